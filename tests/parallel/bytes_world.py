"""A message that rank 0 has, on all ranks: the same bytes, and the most memory that it
took, in multiples of its size.
"""

import os
import re
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megarl.core.base.ranks import bytes_from_rank_0

SIZE = 1 << 28


def memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def main() -> None:
    dist.init_process_group("gloo")
    whole = np.arange(SIZE // 8).tobytes()
    given = whole if dist.get_rank() == 0 else b""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = memory("VmRSS")
    got = bytes_from_rank_0(given)
    print(f"rank {dist.get_rank()}: {(memory('VmHWM') - before) / SIZE:.2f}", flush=True)
    assert got == whole
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
