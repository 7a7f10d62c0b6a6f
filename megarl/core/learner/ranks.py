"""The learner as several processes: becoming torchrun."""

import os
import sys


def is_rank() -> bool:
    """Whether torchrun (or Slurm, with the same variables) started this process."""
    return "RANK" in os.environ


def become_torchrun(ranks: int, port: int, host: str = "127.0.0.1", nodes: int = 1) -> None:
    """Replace this process by torchrun, which runs its command again as its node's share of `ranks` and ends all when one
    dies. They meet at `host`, which is the first node; which one this is, Slurm says."""
    torchrun = [sys.executable, "-m", "megarl.core.learner.torchrun", f"--nproc-per-node={ranks // nodes}"]
    torchrun += [f"--nnodes={nodes}", f"--node-rank={os.environ.get('SLURM_PROCID', '0') if nodes > 1 else 0}"]
    torchrun += [f"--master-addr={host}", f"--master-port={port}"]
    os.execv(sys.executable, [*torchrun, "-m", "megarl", *sys.argv[1:]])
