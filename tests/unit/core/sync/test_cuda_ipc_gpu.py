"""A bucket on a GPU, read by another process through CUDA IPC as SGLang reads it; and
what is left of its memory.
"""

import importlib.util
import subprocess
import sys

import pytest
import torch

from megarl.core.sync import cuda_ipc
from megarl.core.sync.transport import buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

READER = """
import sys
import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
monkey_patch_torch_reductions()
for line in sys.stdin:
    found = MultiprocessingSerializer.deserialize(line.strip())
    flat = found["flattened_tensor"]
    sums = [flat[m.start_idx : m.end_idx].view(m.dtype).double().sum().item() for m in found["metadata"]]
    del found, flat
    print(*sums, flush=True)
"""


def test_a_server_process_reads_what_the_learner_has() -> None:
    """Many buckets one after the other, none of which stays: the learner's memory does
    not grow.
    """
    reader = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    held = torch.cuda.memory_allocated()
    try:
        for n in range(20):
            random = torch.Generator("cuda").manual_seed(n)
            tensors = {
                "a": torch.randn(1 << 20, device="cuda", generator=random).bfloat16(),
                "b": torch.randn(1 << 19, device="cuda", generator=random),
            }
            (bucket,) = buckets(tensors.items(), 1 << 30)
            torch.cuda.current_stream().synchronize()
            print(cuda_ipc.handle(bucket), file=reader.stdin, flush=True)
            sums = dict(
                zip(bucket.names, map(float, reader.stdout.readline().split()), strict=True)
            )
            assert sums == pytest.approx(
                {name: tensor.double().sum().item() for name, tensor in tensors.items()}
            )
            del bucket, tensors
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated() - held < 4 << 20
    finally:
        reader.kill()
        reader.wait()
