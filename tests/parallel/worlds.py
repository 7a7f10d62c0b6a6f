"""Worlds of processes for the parallel tests: what torchrun would start, without its own seconds of start-up.

    run_world(2, "tests.parallel.models_world", "dir")      # python -m tests.parallel.models_world dir, as ranks 0 and 1

Starting a world costs seconds of imports a rank, so a test starts one and goes through its layouts inside.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.ports import free_ports
from megarl.process import die_with_parent

ROOT = Path(__file__).parents[2]


def run_world(ranks: int, module: str, *args: str, timeout_s: float = 240.0) -> str:
    """Run `python -m module args` as `ranks` ranks over gloo; rank 0's output. AssertionError with all output if one fails."""
    (port,) = free_ports(1)
    base = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    base.pop("PYTHONDONTWRITEBYTECODE", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *args],
            cwd=ROOT,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        for rank in range(ranks)
    ]
    try:
        _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        tails = (
            f"--- rank {rank} (exit {p.returncode})\n{out[-4000:]}"
            for rank, (p, out) in enumerate(zip(processes, outputs, strict=True))
        )
        raise AssertionError(f"{module} on {ranks} ranks failed (limit {timeout_s:g} s)\n" + "\n".join(tails))
    return outputs[0]


def _wait(processes: list[subprocess.Popen[str]], deadline: float) -> None:
    """Until all have ended, or one has failed (the others would wait for it), or the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)
