"""Worlds of processes for the parallel tests: what torchrun would start, without its
own seconds of start-up.

    run_world(2, "tests.parallel.models_world", "dir", "a")  # python -m
    tests.parallel.models_world dir a, as ranks 0 and 1

Imports take seconds, so a world is forked from a process that has made them, and forks
its ranks; and a test starts one world and goes through its layouts inside.
"""

import faulthandler
import importlib
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from megarl.core.base.process import die_with_parent, importing
from megarl.run.process import free_ports
from tests.processes import LEARNERS

ROOT = Path(__file__).parents[2]


def run_world(
    ranks: int, module: str, *args: str, timeout_s: float = 480.0, fresh: bool = False
) -> str:
    """Run `python -m module args` as `ranks` ranks over gloo; their output.
    AssertionError with it if one fails. fresh: by a new Python, where the module has to
    be imported first of all.
    """
    (port,) = free_ports(1)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    run = _run_fresh if fresh else LEARNERS.run
    status, output = run(main, (ranks, module, args), ROOT, env, timeout_s)
    assert status == 0, f"{module} on {ranks} ranks failed\n{output[-8000:]}"
    return output


def _run_fresh(
    _: object,
    words: tuple[int, str, tuple[str, ...]],
    cwd: Path,
    env: dict[str, str],
    limit_s: float,
) -> tuple[int, str]:
    ranks, module, args = words
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.parallel.worlds",
        str(ranks),
        module,
        *args,
    ]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )
    return done.returncode, done.stdout


def main(ranks: int, module: str, args: tuple[str, ...]) -> None:
    """The world's first process. It ends, and all ranks with it, when one has failed:
    the others would wait for that one.
    """
    with importing():  # and no page of what is imported is copied because it is looked through
        importlib.import_module(module)
    rank_of = {_fork(rank, module, args): rank for rank in range(ranks)}
    for _ in rank_of:
        pid, status = os.wait()
        if status:
            print(f"rank {rank_of[pid]}: exit {os.waitstatus_to_exitcode(status)}", flush=True)
            os.killpg(0, signal.SIGKILL)


def _fork(rank: int, module: str, args: tuple[str, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    faulthandler.enable()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
