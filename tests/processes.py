"""Processes that tests start and wait for."""

import asyncio
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megarl.core.base.process import die_with_parent

LIMIT_S = 60.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.stack.imported"])


class ForkedServer:
    """`megarl` in its own process group, forked from a process that has imported SGLang; used like a subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path) -> None:
        self._process = FORKS.Process(target=_megarl, args=(list(arguments), cwd, dict(env), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _megarl(arguments: list[str], cwd: Path, env: dict[str, str], log: Path) -> None:
    from megarl.cli import main

    os.setsid()
    die_with_parent()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(main(arguments))


def alive(pid: int, ended: float = math.inf) -> bool:
    """ended: what began after this time has only been given the number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < ended
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int], limit_s: float = LIMIT_S) -> None:
    """Those a kill has been sent to are there for a moment."""
    end, left = time.monotonic() + limit_s, set(pids)
    while left := {pid for pid in left if alive(pid)}:
        assert time.monotonic() < end, f"{sorted(left)} live after {limit_s:g} s"
        time.sleep(0.05)


_create = asyncio.create_subprocess_exec


async def ended_before_it_is_asked(*command: Any, **options: Any) -> asyncio.subprocess.Process:
    """Start a process as asyncio does, but return only after its end was noticed, as on a busy machine."""
    process = await _create(*command, **options)
    assert process.stdin
    await process.wait()
    while not process.stdin.is_closing():
        await asyncio.sleep(0.01)
    return process
