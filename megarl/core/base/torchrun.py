"""The learner as several processes: `python -m megarl.core.base.torchrun` with
torchrun's arguments.

It differs from torchrun's own command. The store listens only on --master-addr.
SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks, which have sessions of
their own: they save, while torchrun goes on. When a rank dies, the others are killed at
once, because they wait for it and cannot save. The exit status is that of the rank that
ended first, instead of 1.

It imports torch only when it runs: what becomes torchrun needs none, and what it runs
imports megatron by itself.
"""

import os
import signal
import sys
from contextlib import suppress

import psutil

from megarl.core.base.process import ENDING, NODE_RANK, SUPERVISOR, ignore_late_signals, importing

TORCHRUNS_OWN = "SIGQUIT"
"""The one signal that torchrun may handle: at those that it does, it ends the ranks."""


def run(arguments: list[str]) -> int:
    """Run torchrun. Return the exit status of the rank that ended first, or 128 plus
    the signal that killed it.
    """
    with importing():
        from torch.distributed.elastic.multiprocessing.api import SubprocessContext
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main

        from megarl.core.base import ranks

    ranks.bind_all()
    close = SubprocessContext._close

    def kill(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Kill the ranks, in place of the signal that torchrun asks for."""
        close(self, signal.SIGKILL, timeout)

    # By default, torchrun would send SIGTERM, and SIGKILL 30 s later.
    SubprocessContext._close = kill
    # We are the supervisor of the ranks, which run `megarl` again.
    os.environ[SUPERVISOR] = str(os.getpid())
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _pass_on)
    try:
        main([f"--signals-to-handle={TORCHRUNS_OWN}", *arguments])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode  # of a killed rank minus the signal
        return status if status > 0 else 128 - status
    finally:
        ignore_late_signals()
    return 0


def _pass_on(number: int, _frame: object) -> None:
    """Send a signal to the ranks: a handler."""
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def is_rank() -> bool:
    """Return whether torchrun started this process. If not, remove a rank's variables,
    which NVIDIA's images set in Slurm.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return False


def become_torchrun(ranks: int, port: int, host: str = "127.0.0.1", nodes: int = 1) -> None:
    """Replace this process with torchrun, which runs the same command as this node's
    share of `ranks`, meeting at `host`.
    """
    node_rank = os.environ[NODE_RANK] if nodes > 1 else "0"
    options = [
        f"--nproc-per-node={ranks // nodes}",
        f"--nnodes={nodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]
    torchrun = [sys.executable, "-m", "megarl.core.base.torchrun", *options]
    os.execv(sys.executable, [*torchrun, "-m", "megarl", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
