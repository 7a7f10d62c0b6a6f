"""Runs a Python program that nobody trusts, and gives back what it printed.

    program, input ─► bwrap ─► python -c inside.py ─► stdout, at most so much of it, within so much time
                      │          user nobody, resource limits, a filter on system calls
                      └─ namespaces (processes, network, IPC), a root of /usr and Python alone, read-only; a small /tmp

`bubblewrap` is all of this. `rlimits` leaves bwrap out: what a program may use is limited, but it reads what the user running
the controller can read. Nothing that decides on right or wrong is inside; the verdict is made of the output, outside.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.errors import MegarlError
from megarl.grading.answer import GraderDown

log = logging.getLogger(__name__)
Kind = Literal["bubblewrap", "rlimits"]
INSIDE = Path(__file__).with_name("inside.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
CHECK_LIMIT_S = 60.0
KILL_LIMIT_S = 60.0
TRIES = 2
STARTED = b"started\n"
"""What inside.py says first: without it nothing is known of the program."""


@dataclass(frozen=True)
class Limits:
    """Of one program. Bytes, but for:

    seconds: by the clock, starting included. processes: threads too; processes_of_others: added to them where a program's
    cannot be counted apart from those of the user who runs it.
    """

    seconds: int = 10
    memory: int = 1 << 30
    processes: int = 16
    processes_of_others: int = 4096
    file: int = 16 << 20
    tmp: int = 64 << 20
    open_files: int = 64
    output: int = 1 << 20


class Ran(NamedTuple):
    """stdout: what was printed. ended: `exit` by itself (whatever the status), else the limit that it met."""

    stdout: str
    ended: Literal["exit", "time", "output"]
    status: int = 0


def places() -> int:
    """How many programs may run at once: a quarter of the cores, for servers and learner want the others."""
    return max(1, min(32, (os.cpu_count() or 1) // 4))


class Sandbox:
    """Runs at most `places` programs at once."""

    def __init__(self, kind: Kind, places: int, limits: Limits | None = None, python: Path | None = None) -> None:
        self._kind, self._limits = kind, limits or Limits()
        self.python = python or Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        self._places = asyncio.Semaphore(places)

    def check(self) -> None:
        """MegarlError if programs cannot be run here as the recipe wants it; takes a tenth of a second."""
        if self._kind == "bubblewrap" and shutil.which("bwrap") is None:
            raise MegarlError(
                "data.sandbox: bubblewrap is not installed, and code is graded in its sandbox; install it (apt-get install "
                "bubblewrap), or set data.sandbox=rlimits if the programs may read what you can read"
            )
        task = json.dumps({"program": "import heapq\nprint(6 * 7)", "input": "", "call": ""})
        with tempfile.TemporaryDirectory() as scratch:
            os.chmod(scratch, 0o777)
            try:
                done = subprocess.run(
                    self._command(), input=task, cwd=scratch, env=ENVIRONMENT, capture_output=True, text=True,
                    timeout=CHECK_LIMIT_S, check=False,
                )  # fmt: skip
                said, out = done.stderr.strip().splitlines()[-1:], done.stdout.removeprefix(STARTED.decode())
            except (OSError, subprocess.TimeoutExpired) as error:
                said, out = [str(error)], ""
        if out != "42\n":
            raise MegarlError(
                f"data.sandbox: no program can be run with {self._kind} here ({' '.join(said) or 'it printed nothing'}); "
                + (
                    "in a container it needs the right to make namespaces (docker run --privileged, or "
                    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined), elsewhere "
                    "sysctl kernel.apparmor_restrict_unprivileged_userns=0; or set data.sandbox=rlimits if the programs "
                    "may read what you can read"
                    if self._kind == "bubblewrap"
                    else f"run as another user than root, or let everybody read {self.python.parent.parent}"
                )
            )

    async def run(self, program: str, given: str, call: str = "") -> Ran:
        """What `program` printed when it was given this on stdin; or the repr of the expression `call` after it has run.

        GraderDown if the sandbox could not start it, `TRIES` times.
        """
        task = json.dumps({"program": program, "input": given, "call": call}).encode()
        for attempt in range(TRIES):
            try:
                async with self._places:
                    with tempfile.TemporaryDirectory(prefix="megarl-sandbox-") as scratch:
                        os.chmod(scratch, 0o777)
                        return await self._run(task, scratch)
            except OSError as error:
                log.warning("a sandbox failed (attempt %d): %s", attempt + 1, error)
        raise GraderDown(f"no sandbox could start a program, {TRIES} times; the log has the reason")

    async def _run(self, task: bytes, scratch: str) -> Ran:
        process = await asyncio.create_subprocess_exec(
            *self._command(), cwd=scratch, env=ENVIRONMENT, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin
        assert process.stdout
        out, ended = b"", "exit"
        try:
            async with asyncio.timeout(self._limits.seconds):
                with contextlib.suppress(ConnectionError):  # it may end without having read it
                    process.stdin.write(task)
                    await process.stdin.drain()
                    process.stdin.close()
                while len(out) <= self._limits.output and (more := await process.stdout.read(1 << 16)):
                    out += more
                if len(out) > self._limits.output:
                    ended = "output"
                else:
                    await process.wait()
        except TimeoutError:
            ended = "time"
        finally:
            await _killed(process)
        if ended == "exit" and not out.startswith(STARTED):
            raise OSError(f"{self._kind} ended with status {process.returncode} before the program began")
        return Ran(out.removeprefix(STARTED).decode(errors="replace"), ended, process.returncode or 0)  # type: ignore[arg-type]

    def _command(self) -> list[str]:
        python = [
            str(self.python), "-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0",
            "-c", INSIDE.read_text(), json.dumps(asdict(self._limits)),
        ]  # fmt: skip
        if self._kind == "rlimits":
            return python
        return [*_bubblewrap(self.python.parent.parent, self._limits), "--", *python]


async def _killed(process: asyncio.subprocess.Process) -> None:
    """It and its children. What they printed last is read and forgotten: asyncio waits for the end of pipes, too."""
    assert process.stdout
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(KILL_LIMIT_S):
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()
    except TimeoutError:
        raise GraderDown(f"the sandbox of process {process.pid} did not end {KILL_LIMIT_S:g} s after SIGKILL") from None


def _bubblewrap(prefix: Path, limits: Limits) -> list[str]:
    """A root of the system's programs and the Python of `prefix`; as root with what inside.py needs to become nobody."""
    command = ["bwrap", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/") / name
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        else:
            command += ["--ro-bind-try", str(path), str(path)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):  # bwrap would make them for its own user alone
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(prefix), str(prefix)]
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(limits.tmp), "--tmpfs", "/tmp"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        return [*command, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "--unshare-user"]
