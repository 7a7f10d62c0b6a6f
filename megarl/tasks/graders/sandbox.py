"""Runs an untrusted Python program and returns its output.

    program, input ─► bwrap ─► python -c inside.py ─► stdout, limited in size and time
                      │        └─ user nobody, resource limits, a filter on system calls
                      └─ namespaces (processes, network, IPC), a read-only root of /usr
                         and Python only, a small /tmp

A program may also be tested by a check that is code itself. The check runs in its own
sandbox, and two pipes connect them:

    check ─► sandbox ── calls ──► sandbox ◄─ program
    `passed` ◄──┘  ◄── results ──────┘

The expected results are in the first, the program in the second.

`bubblewrap` does all of this. `rlimits` does not use bwrap: the program's resources are
limited, and the kernel's Landlock keeps it from files; without Landlock it can read,
write and delete whatever the user running the controller can (`remains`). Nothing that
decides right or wrong is within the program's reach.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from megarl.core.base.contracts import GraderDown
from megarl.core.base.errors import MegarlError
from megarl.tasks.graders.inside import landlock_version
from megarl.tasks.graders.scratch import async_scratch, hand_over, scratch
from megarl.tasks.graders.system_calls import system_call_filter

log = logging.getLogger(__name__)
SandboxKind = Literal["bubblewrap", "rlimits"]
INSIDE = Path(__file__).with_name("inside.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache")
"""The paths that a program may read, besides its Python."""
LANDLOCK = 3
"""The first version of Landlock that protects files from truncation."""
CHECK_LIMIT_S = 60.0
KILL_LIMIT_S = 60.0
TRIES = 2
NAMESPACES = (
    "in a container it needs the right to make namespaces (docker run --privileged, or"
    " --security-opt seccomp=unconfined --security-opt apparmor=unconfined), elsewhere sysctl"
    " kernel.apparmor_restrict_unprivileged_userns=0"
)
STARTED = b"started\n"
"""The first line that inside.py prints. Without it, the program has not begun."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program, in bytes except for:

    seconds: wall-clock time, start-up included. open_files: a number. processes: a
    number, in which threads count too; processes_of_others: added to it if the
    program's processes cannot be counted separately from its user's.
    """

    seconds: int = 10
    memory: int = 1 << 30
    processes: int = 16
    processes_of_others: int = 4096
    file: int = 16 << 20
    tmp: int = 64 << 20
    open_files: int = 64
    output: int = 1 << 20


type Ended = Literal["exit", "time", "output"]


class Ran(NamedTuple):
    """The outcome of a program. stdout: its output, or what else inside.py answers;
    ended: `exit` if it exited by itself (with any status), else the limit that it
    exceeded.
    """

    stdout: str
    ended: Ended
    status: int = 0


def places() -> int:
    """Return how many programs may run at once: a quarter of the cores, at most 32; the
    rest is for servers and learner.
    """
    return max(1, min(32, (os.cpu_count() or 1) // 4))


def remains() -> str:
    """Describe what programs under `rlimits` may still do with files on this
    machine.
    """
    if landlock_version(ctypes.CDLL(None)) >= LANDLOCK:
        return "see which files there are"  # Landlock does not check `stat`
    return (
        "read, write and delete what you can (this kernel has no Landlock to prevent it, or an old"
        " one)"
    )


class Sandbox:
    """Runs at most `places` programs at once."""

    def __init__(
        self,
        kind: SandboxKind,
        places: int,
        limits: Limits | None = None,
        python: Path | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._kind = kind
        self.python = python or Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        self._places = asyncio.Semaphore(places)

    def check(self) -> None:
        """Raise MegarlError if this kind of sandbox cannot run programs on this
        machine. Takes a tenth of a second.
        """
        if self._kind == "bubblewrap" and shutil.which("bwrap") is None:
            raise MegarlError(
                "data.sandbox: bubblewrap is not installed, and the policy's programs run in its"
                " sandbox; install it (apt-get install bubblewrap), or set data.sandbox=rlimits if"
                f" the programs may {remains()}"
            )
        problem = self._problem()
        if problem:
            raise MegarlError(
                f"data.sandbox: no program can be run with {self._kind} here ({problem});"
                f" {self._advice(problem)}"
            )
        if self._kind == "rlimits":
            log.warning("data.sandbox=rlimits: programs may %s", remains())
        if sys.version_info < (3, 12, 2):
            log.warning(
                "programs are graded by Python %s, where functions with functools.cache recur at"
                " most 498 deep, and right programs fail; use 3.12.2 or later",
                platform.python_version(),
            )

    def _problem(self) -> str:
        """Run a program; return why it does not give the right output, or ""."""
        with scratch() as folder:
            try:
                hand_over(folder)
                done = subprocess.run(
                    self._command(),
                    input=_task("import heapq\nprint(6 * 7)"),
                    cwd=folder,
                    env=ENVIRONMENT,
                    capture_output=True,
                    timeout=CHECK_LIMIT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error) or "it printed nothing"
        if done.stdout.removeprefix(STARTED) == b"42\n":
            return ""
        complaints = done.stderr.decode().strip().splitlines()
        return complaints[-1] if complaints else "it printed nothing"

    def _advice(self, problem: str) -> str:
        """Return what to do if no program can be run."""
        if self._kind == "rlimits":
            return (
                f"run as another user than root, or let everybody read {self.python.parent.parent}"
            )
        otherwise = f"or set data.sandbox=rlimits if the programs may {remains()}"
        if problem.startswith("bwrap: execvp"):
            prefixes = " and ".join(map(str, self._prefixes()))
            return (
                f"Python cannot be started there: what it needs has to be in {prefixes}, or in"
                f" /usr; {otherwise}"
            )
        return f"{NAMESPACES}; {otherwise}"

    def _prefixes(self) -> list[Path]:
        """Return the directories that our Python is installed in, and the one that a
        link to it leads to.
        """
        programs = (self.python, self.python.resolve())
        return list(dict.fromkeys(program.parent.parent for program in programs))

    async def run(self, program: str, stdin: str, call: str = "", expected: int = 0) -> Ran:
        """Return the program's output for this stdin or, after it has run, the repr of
        the expression `call`. expected: bytes of output that the test expects, which
        may be printed beyond the limit. GraderDown if no sandbox can start it.
        """
        return await self._tried(
            lambda: self._run(program, expected=expected, input=stdin, call=call)
        )

    async def run_checked(self, program: str, function: str, check: str) -> Ran:
        """Run `check(candidate)`, defined by the source `check`, on this function of
        the program. The output is `passed` or nothing. Check and program have a sandbox
        each and share the time of one. GraderDown as above.
        """
        return await self._tried(lambda: self._pair(program, function, check))

    async def _tried(self, run: Callable[[], Awaitable[Ran]]) -> Ran:
        """Return what `run` returns, called in one of the places, and again if it
        fails. GraderDown after TRIES failures, or at once if `run` raises it.
        """
        for attempt in range(TRIES):
            try:
                async with self._places:
                    return await run()
            except GraderDown:
                raise
            except Exception as error:
                # whatever a program does to its sandbox must not end the controller
                unforeseen = None if isinstance(error, OSError) else error
                log.warning(
                    "a sandbox failed (attempt %d): %s", attempt + 1, error, exc_info=unforeseen
                )
        raise GraderDown(f"no sandbox could start a program, {TRIES} times; the log has the reason")

    async def _pair(self, program: str, function: str, check: str) -> Ran:
        """Run a check, whose calls of `function` go to the program through two pipes.
        Return what came of the check.
        """
        calls = _pipe()
        results = _pipe()
        program_pipes = (calls[0], results[1])
        check_pipes = (results[0], calls[1])
        try:
            async with asyncio.TaskGroup() as both:
                serving = both.create_task(self._run(program, program_pipes, serves=function))
                judging = both.create_task(self._run(check, check_pipes))
                verdict = await judging
                # without output, the program's sandbox may have failed, which is no
                # verdict
                if verdict.stdout:
                    serving.cancel()
        except* (OSError, GraderDown) as errors:
            raise errors.exceptions[0] from None  # one alone, as `_tried` expects it
        return verdict

    async def _run(
        self, program: str, pipes: Sequence[IO[bytes]] = (), expected: int = 0, **fields: Any
    ) -> Ran:
        """Run one process in its own directory. pipes: passed to it and closed here;
        fields: of its task.
        """
        numbers = [pipe.fileno() for pipe in pipes]
        async with async_scratch() as folder:
            try:
                hand_over(folder)
                process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    cwd=folder,
                    env=ENVIRONMENT,
                    start_new_session=True,
                    pass_fds=numbers,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            finally:
                for pipe in pipes:
                    pipe.close()
            task = _task(program, pipes=numbers, **fields)
            return await self._finished(process, task, self._limits.output + expected)

    async def _finished(
        self, process: asyncio.subprocess.Process, task: bytes, longest: int
    ) -> Ran:
        """Give a process its task, and return its outcome. longest: the most bytes of
        its output. OSError if the process ended before the program began.
        """
        output = bytearray()
        ended: Ended = "exit"
        try:
            async with asyncio.timeout(self._limits.seconds):
                await _give(process, task)
                await _read(process, output, longest)
                if len(output) > longest:
                    ended = "output"
                else:
                    await process.wait()
        except TimeoutError:
            ended = "time"
        finally:
            await _killed(process)
        if ended == "exit" and not output.startswith(STARTED):
            raise OSError(
                f"{self._kind} ended with status {process.returncode} before the program began"
            )
        text = output.removeprefix(STARTED).decode(errors="replace")
        return Ran(text, ended, process.returncode or 0)

    def _command(self) -> list[str]:
        """Return the command that starts inside.py in a sandbox of this kind."""
        is_bubblewrap = self._kind == "bubblewrap"
        readable = [] if is_bubblewrap else [*SYSTEM, *map(str, self._prefixes())]
        python = [str(self.python), "-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0", "-c"]
        arguments = [
            INSIDE.read_text(),
            json.dumps(asdict(self._limits)),
            json.dumps(readable),
            system_call_filter(bool(readable)).hex(),
        ]
        if is_bubblewrap:
            return [*_bubblewrap(self._prefixes(), self._limits), "--", *python, *arguments]
        return [*python, *arguments]


def _task(program: str, **fields: Any) -> bytes:
    """Encode the task for inside.py."""
    task = {"program": program, "input": "", "call": "", "serves": "", "pipes": []}
    return json.dumps(task | fields).encode()


async def _give(process: asyncio.subprocess.Process, task: bytes) -> None:
    """Write a process's task to its stdin."""
    assert process.stdin
    # it may exit before it has read its task
    with contextlib.suppress(ConnectionError, RuntimeError):
        process.stdin.write(task)
        await process.stdin.drain()
        process.stdin.close()


async def _read(process: asyncio.subprocess.Process, output: bytearray, longest: int) -> None:
    """Append a process's output to `output`, until it ends or has more than `longest`
    bytes.
    """
    assert process.stdout
    while len(output) <= longest:
        piece = await process.stdout.read(1 << 16)
        if not piece:
            return
        output += piece


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Return a pipe's reading and writing ends, as file objects so that they are closed
    whatever happens.
    """
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)


async def _killed(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its children, and wait for their end. The last output is
    read and dropped, because asyncio waits for pipes to end, too. GraderDown if they do
    not end.
    """
    assert process.stdout
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(KILL_LIMIT_S):
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()
    except TimeoutError:
        raise GraderDown(
            f"the sandbox of process {process.pid} did not end {KILL_LIMIT_S:g} s after SIGKILL"
        ) from None


def _bubblewrap(prefixes: Sequence[Path], limits: Limits) -> list[str]:
    """Build the bwrap command, with a root of only the system's programs and the Python
    in `prefixes`.
    """
    command = ["bwrap", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
    for path in SYSTEM[1:]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "1777", "--size", str(limits.tmp), "--tmpfs", "/tmp"]
    for prefix in prefixes:  # after /tmp, where it may be, too
        command += _installed(prefix)
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try"]
    if os.getuid() == 0:  # what inside.py needs to become nobody
        return [*command, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "--unshare-user"]


def _installed(prefix: Path) -> list[str]:
    """Return bwrap's arguments that show the Python in this directory, read-only."""
    if prefix.is_relative_to("/usr"):  # all of /usr is shown
        return []
    arguments: list[str] = []
    # bwrap by itself would make them accessible to its own user only
    for parent in reversed(prefix.parents[:-1]):
        arguments += ["--perms", "0755", "--dir", str(parent)]
    return [*arguments, "--ro-bind", str(prefix), str(prefix)]
