"""The learner as several processes: torchrun as megarl wants it, `python -m megarl.core.learner.torchrun` with torchrun's
arguments.

Its store listens on --master-addr alone. SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks, which have sessions of
their own: they save then, and torchrun goes on. When a rank dies it kills the others at once, which wait for that one and have
nothing to save, and ranks die with it. It ends with the status of the rank that ended first; torchrun itself says 1 for all.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from megarl.core.base import ranks
from megarl.core.base.process import SUPERVISOR

FOR_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
OURS = "SIGQUIT"


def run(arguments: list[str]) -> int:
    """The exit status; 128 and the signal that killed the rank which ended first."""
    ranks.bind_all()
    _kill_ranks()
    os.environ[SUPERVISOR] = str(os.getpid())  # of the ranks, which are `megarl` again
    for number in FOR_RANKS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _pass_on)
    try:
        main([f"--signals-to-handle={OURS}", *arguments])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    return 0


def _kill_ranks() -> None:
    """Instead of SIGTERM, and SIGKILL 30 s later."""
    close: Any = SubprocessContext._close

    def killing(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        del death_sig
        close(self, signal.SIGKILL, timeout)

    SubprocessContext._close = killing


def _pass_on(number: int, _frame: object) -> None:
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))


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
