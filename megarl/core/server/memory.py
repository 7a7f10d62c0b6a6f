"""How much of a GPU a server takes that is not alone there.

SGLang's mem_fraction_static is of the memory that is free when it starts, and what is in use then it never counts. So a server
that starts again beside a learner would get less each time; here the share is always of the whole GPU.
"""

import os
import subprocess

from megarl.core.base.errors import MegarlError

LIMIT_S = 30.0
MIB_A_GIB = 1024


def free_and_total() -> list[tuple[int, int]]:
    """MiB of each GPU that this process sees. By nvidia-smi: to ask CUDA would take some of it."""
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        command.append(f"--id={visible}")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout.splitlines()
        return [(int(free), int(total)) for free, total in (line.split(",") for line in lines)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MegarlError(
            f"serving.memory_fraction: nvidia-smi does not say how much memory is free ({error}); is the driver installed?"
        ) from None


def static_fraction(share: float, memory: list[tuple[int, int]]) -> float:
    """SGLang's mem_fraction_static for `share` of each whole GPU. memory: (free, total) of each."""
    free, total = min(memory, key=lambda of: of[0] / of[1])
    if share * total >= free:
        raise MegarlError(
            f"serving.memory_fraction: {share:g} of the GPU are {share * total / MIB_A_GIB:.1f} GiB, and only "
            f"{free / MIB_A_GIB:.1f} of {total / MIB_A_GIB:.1f} GiB are free; lower it, or learner.microbatch_tokens if the "
            "learner has taken the rest"
        )
    return share * total / free
