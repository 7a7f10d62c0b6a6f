"""The bubblewrap sandbox of an agent.

    the machine's files, read-only
      ─► paths that nobody could not reach      under root
      ─► the run directory, empty
      ─► the agent's own folder, which it may write in ─► setpriv ─► the agent

The network is the machine's; processes, IPC and /dev are the sandbox's own.

Root owns the files below /proc/sys even without capabilities, and the program named in
/proc/sys/kernel/core_pattern runs outside every sandbox. So under root an agent is
nobody. It then cannot pass a directory such as /root, where Python or the agent's
program may lie: in the sandbox, an empty directory covers it, with only the paths that
the agent needs.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.tasks.graders.functions import environment
from megarl.tasks.graders.inside import NOBODY
from megarl.tasks.graders.sandbox import CHECK_LIMIT_S, NAMESPACES
from megarl.tasks.graders.scratch import becomes_nobody, hand_over, scratch

AS_NOBODY = (
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--inh-caps=-all",
)
PASSED_BY_ALL = 0o001
READ_BY_ALL = 0o005
MOST_LINKS = 40
"""Linux follows no more in one path."""
_CHECK = "import sys; from megarl.tasks.agents.inside import problem; print(problem(sys.argv[1:]))"


def agent_sandbox(folder: Path, hidden: Path, command: Sequence[str] = ()) -> list[str]:
    """Build the bwrap command that runs an agent.

    folder: the agent's own. hidden: a directory that is empty in the sandbox. command:
    the agent's, whose files it must be able to read.
    """
    sandbox = ["bwrap", "--die-with-parent", "--ro-bind", "/", "/"]
    sandbox += ["--dev", "/dev", "--proc", "/proc"]
    if becomes_nobody():
        sandbox += _opened_to_nobody([*_needed(command), folder.parent])
    # bwrap cannot mount at a path that leads over an absolute link.
    folder = folder.resolve()
    hidden = hidden.resolve()
    if hidden.is_dir():
        sandbox += ["--tmpfs", str(hidden)]
    sandbox += ["--bind", str(folder), str(folder), "--cap-drop", "ALL"]
    sandbox += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if becomes_nobody():
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return [*sandbox, *rights, "--", *AS_NOBODY]
    if os.getuid() == 0:
        return sandbox
    return [*sandbox, "--unshare-user"]


def check_agent_sandbox(subject: str, agent: str | Sequence[str]) -> None:
    """Raise MegarlError if bubblewrap cannot run this agent on this machine.

    subject: the agent in the message.
    """
    command: Sequence[str] = []
    words = ["function", str(agent)]
    if not isinstance(agent, str):
        command = agent
        words = ["command", *command]
    with scratch() as folder:
        hand_over(folder)
        run = [*agent_sandbox(folder, folder, command), sys.executable, "-c", _CHECK, *words]
        problem = _problem(run, environment() | {"TMPDIR": str(folder)})
    if problem:
        raise MegarlError(
            f"data.sandbox: {subject} cannot be run with bubblewrap here ({problem});"
            f" {_advice(problem)}; or set data.sandbox=rlimits if agents may do all that you can"
        )


def _problem(run: Sequence[str], variables: dict[str, str]) -> str:
    """Return what the check prints, or why it cannot be run; "" if all is well."""
    try:
        done = subprocess.run(
            run,
            env=variables,
            capture_output=True,
            text=True,
            timeout=CHECK_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip()


def _advice(problem: str) -> str:
    """Return what the user can do about a problem that `_problem` found."""
    if shutil.which("bwrap") is None:
        return "install it (apt-get install bubblewrap)"
    if "execvp setpriv" in problem:
        return "install it (apt-get install util-linux)"
    if not problem.startswith(("agents ", "setpriv: ")):
        return NAMESPACES
    if becomes_nobody():
        return (
            "under root, agents are nobody: let everybody read what they need, or run as another"
            " user"
        )
    if os.getuid() == 0:
        return "run as another user than root"
    return "in the sandbox they write only in $TMPDIR"


def _needed(command: Sequence[str]) -> Iterator[Path]:
    """Yield the paths that an agent reads: our Python, what it imports, and the
    directories of its program and of files among its arguments. command: the agent's;
    empty for a function.
    """
    yield from (Path(sys.prefix), Path(sys.base_prefix), Path.cwd())
    for entry in [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]:
        if entry:
            yield Path(entry)
    if not command:
        return
    program = shutil.which(command[0])
    if program:
        yield _installation(Path(program))
        yield _installation(Path(program).resolve())
    for word in command[1:]:
        if word and os.path.exists(word):
            yield Path(word).parent


def _installation(program: Path) -> Path:
    """Return the folder that a program is installed in: of /opt/tool/bin/program,
    /opt/tool.
    """
    folder = program.absolute().parent
    return folder.parent if folder.name == "bin" else folder


def _opened_to_nobody(paths: Iterable[Path]) -> list[str]:
    """Return bwrap's arguments by which the user `nobody` can reach these paths.

    They concern paths with a directory on the way that not everybody may pass. The
    files themselves have to be readable by everybody.
    """
    stops: set[Path] = set()
    for path in paths:
        stops.update(_stops(path))
    stops_within: dict[Path, set[Path]] = {}  # by the closed directory on their way
    for stop in stops:
        closed = _closed(stop)
        if closed:
            stops_within.setdefault(closed, set()).add(stop)
    arguments: list[str] = []
    for closed, inside in sorted(stops_within.items()):
        arguments += ["--perms", "0755", "--tmpfs", str(closed)]
        for stop in sorted(inside):
            is_in_another = not inside.isdisjoint(stop.parents)
            if not is_in_another:
                arguments += _uncovered(stop, closed)
    return arguments


def _stops(path: Path) -> Iterator[Path]:
    """Yield the links on the way to a path, and at last what the path leads to, if that
    exists. The way to each of them has no links.
    """
    path = Path(os.path.normpath(path.absolute()))
    for _ in range(MOST_LINKS):
        link = _first_link(path)
        if link is None:
            break
        yield link
        target = link.parent / os.readlink(link)
        path = Path(os.path.normpath(target / path.relative_to(link)))
    if path.exists():
        yield path


def _first_link(path: Path) -> Path | None:
    """Return the first link on the way to this path, itself included."""
    for step in (*reversed(path.parents), path):
        if step.is_symlink():
            return step
    return None


def _closed(path: Path) -> Path | None:
    """Return the first directory on the way to this path that not everybody may
    pass.
    """
    for directory in (*reversed(path.parents), path):
        mode = directory.lstat().st_mode
        if stat.S_ISDIR(mode) and not mode & PASSED_BY_ALL:
            return directory
    return None


def _uncovered(path: Path, closed: Path) -> list[str]:
    """Return the arguments that show this path in the empty directory that covers
    `closed`. Of a directory that not everybody may read, its children are shown in an
    open one.
    """
    arguments: list[str] = []
    for parent in reversed(path.parents):
        if parent.is_relative_to(closed) and parent != closed:
            arguments += _folder(parent)
    mode = path.lstat().st_mode
    is_open = mode & READ_BY_ALL == READ_BY_ALL
    if is_open or not stat.S_ISDIR(mode):
        return [*arguments, *_mounted(path)]
    if path != closed:
        arguments += _folder(path)
    for child in sorted(path.iterdir()):
        arguments += _mounted(child)
    return arguments


def _folder(path: Path) -> list[str]:
    """Return the arguments for a directory that everybody may pass; bwrap's own are
    closed.
    """
    return ["--perms", "0755", "--dir", str(path)]


def _mounted(path: Path) -> list[str]:
    """Return the arguments that show a link as the same link, and all else as it is."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind-try", str(path), str(path)]
