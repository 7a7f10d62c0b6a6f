"""Processes that tests start and wait for."""

import asyncio
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from megarl.core.base.process import die_with_parent

LIMIT_S = 60.0


class Forks:
    """A process that has imported `module` and forks others, each of which would import
    it for many seconds of a core.
    """

    def __init__(self, module: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([module])

    def start(
        self,
        function: Callable[..., int | None],
        arguments: Sequence[object],
        cwd: Path,
        env: Mapping[str, str],
        log: Path,
    ) -> "Forked":
        """Start a process that leads a session, appends its output to `log` and ends
        with the function's status.
        """
        process = multiprocessing.get_context("forkserver").Process(
            target=_called, args=(function, arguments, cwd, dict(env), log)
        )
        with patch.object(
            forkserver, "connect_to_new_process", self._server.connect_to_new_process
        ):
            process.start()
        return Forked(process)

    def megarl(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path
    ) -> "Forked":
        return self.start(command_line, [arguments], cwd, env, log)

    def run(
        self,
        function: Callable[..., int | None],
        arguments: Sequence[object],
        cwd: Path,
        env: Mapping[str, str],
        limit_s: float,
    ) -> tuple[int, str]:
        """Start it, and wait: status and output. A process that has not ended within
        the limit is killed.
        """
        with tempfile.NamedTemporaryFile() as file:
            log = Path(file.name)
            process = self.start(function, arguments, cwd, env, log)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"no end in {limit_s:g} s\n{log.read_text()}") from None
            return status, log.read_text()


class Forked:
    """A forked process, used like a subprocess.Popen."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        status: int | None = self._process.exitcode
        return status

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


SERVERS = Forks("tests.stack.imported")
LEARNERS = Forks("tests.parallel.imported")


def _called(
    function: Callable[..., int | None],
    arguments: Sequence[object],
    cwd: Path,
    env: dict[str, str],
    log: Path,
) -> None:
    os.setsid()
    die_with_parent()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    warnings.simplefilter("ignore")
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(function(*arguments))


def command_line(arguments: Sequence[str]) -> int:
    """megarl's."""
    from megarl.cli import main

    sys.argv[1:] = arguments  # a learner of several ranks becomes torchrun with these
    return main()


def alive(pid: int, ended: float = math.inf) -> bool:
    """ended: what began after this time has only been given the number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < ended
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int], limit_s: float = LIMIT_S) -> None:
    """Those a kill has been sent to are there for a moment."""
    end = time.monotonic() + limit_s
    left = set(pids)
    while left := {pid for pid in left if alive(pid)}:
        assert time.monotonic() < end, f"{sorted(left)} live after {limit_s:g} s"
        time.sleep(0.05)


_create = asyncio.create_subprocess_exec


async def ended_before_it_is_asked(*command: Any, **options: Any) -> asyncio.subprocess.Process:
    """Start a process as asyncio does, but return only after its end was noticed, as on
    a busy machine.
    """
    process = await _create(*command, **options)
    assert process.stdin
    await process.wait()
    while not process.stdin.is_closing():
        await asyncio.sleep(0.01)
    return process
