"""The bubblewrap sandbox of an agent.

    the machine's files, read-only
      ─► temporary folders and /run, empty but for what the agent needs
      ─► directories that nobody may not pass, likewise      under root
      ─► the run directory, empty; sockets elsewhere, covered
      ─► the agent's own folder, which it may write in
      ─► the gateway's socket ─► setpriv ─► the agent

Processes, IPC, /dev and the network are the sandbox's own. Of the network there is only
a loopback interface, on which inside.py forwards one port to the gateway's socket: an
agent reaches no other port of the machine and no abstract socket.

A network namespace does not cover sockets in the file system, such as Docker's or those
of SGLang's processes. They lie in /run and in temporary folders, or are listed in
/proc/net/unix when the agent starts.

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
from megarl.tasks.agents.inside import FORWARDED, folders_of_sockets
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
OWN_FILES = ("/dev", "/proc", "/sys")
"""What the sandbox has of its own, or what has no sockets."""
MOST_LINKS = 40
"""Linux follows no more in one path."""
_CHECK = "import sys; from megarl.tasks.agents.inside import problem; print(problem(sys.argv[1:]))"


def agent_sandbox(
    folder: Path, hidden: Path, command: Sequence[str] = (), gateway: Path | None = None
) -> list[str]:
    """Build the bwrap command that runs an agent.

    folder: the agent's own. hidden: a directory that is empty in the sandbox. command:
    the agent's, whose files it must be able to read. gateway: the socket that inside.py
    forwards to; None: the agent has no network at all.
    """
    sandbox = ["bwrap", "--die-with-parent", "--ro-bind", "/", "/"]
    sandbox += ["--dev", "/dev", "--proc", "/proc"]
    stops = _all_stops([*_needed(command), *_links(folder)])
    covers = _covers(stops)
    sandbox += _covered(covers, stops)
    # bwrap cannot mount at a path that leads over an absolute link.
    folder = folder.resolve()
    hidden = hidden.resolve()
    if hidden.is_dir():
        sandbox += ["--tmpfs", str(hidden)]
    for socket in _visible_sockets(stops, {*covers, hidden}):
        sandbox += ["--ro-bind", os.devnull, str(socket)]
    sandbox += _folders_within(covers, folder)
    sandbox += ["--bind", str(folder), str(folder)]
    if gateway is not None:
        sandbox += ["--ro-bind", str(gateway), FORWARDED]
    for cover in covers:
        sandbox += ["--remount-ro", str(cover)]
    sandbox += ["--cap-drop", "ALL", "--unshare-net"]
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


def hides(path: Path) -> bool:
    """Return whether an agent that is a function cannot reach a path in its sandbox. It
    sees more if it is started from a directory around the path.
    """
    path = path.resolve()
    stops = _all_stops(_needed(()))
    covers = _covers(stops)
    edge = _innermost(path, {*stops, *covers})
    if edge is None:
        return becomes_nobody() and _closed(path) is not None
    return edge not in stops


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


def _all_stops(paths: Iterable[Path]) -> set[Path]:
    """Return the `_stops` of all these paths, without those that lie in another."""
    stops: set[Path] = set()
    for path in paths:
        stops.update(_stops(path))
    return {stop for stop in stops if stops.isdisjoint(stop.parents)}


def _links(folder: Path) -> list[Path]:
    """Return the links on the way to a folder."""
    return [stop for stop in _stops(folder) if stop.is_symlink()]


def _covers(stops: Iterable[Path]) -> list[Path]:
    """Return the directories that an empty one covers, outer ones first: those that
    have sockets and, if the agent is nobody, closed ones on the way to a stop.
    """
    covers = folders_of_sockets()
    if becomes_nobody():
        closed = map(_closed, stops)
        covers.update(directory for directory in closed if directory is not None)
    return sorted(covers)


def _covered(covers: Sequence[Path], stops: Iterable[Path]) -> list[str]:
    """Return bwrap's arguments for empty directories, in which only the stops are to be
    seen. Files that the agent reads there have to be readable for its user.
    """
    arguments: list[str] = []
    for cover in covers:
        arguments += _folders_within(covers, cover)
        arguments += ["--perms", "0755", "--tmpfs", str(cover)]
        for stop in sorted(stops):
            if _innermost(stop, covers) == cover:
                arguments += _uncovered(stop, cover)
    return arguments


def _innermost(path: Path, folders: Iterable[Path]) -> Path | None:
    """Return the deepest of these folders that the path lies in or is, if any."""
    around = [folder for folder in folders if path.is_relative_to(folder)]
    return max(around, key=lambda folder: len(folder.parts), default=None)


def _folders_within(covers: Iterable[Path], path: Path) -> list[str]:
    """Return the arguments for the directories between a path and the cover that it
    lies in.
    """
    cover = _innermost(path.parent, covers)
    if cover is None:
        return []
    arguments: list[str] = []
    for parent in reversed(path.parents):
        if parent.is_relative_to(cover) and parent != cover:
            arguments += _folder(parent)
    return arguments


def _visible_sockets(stops: Iterable[Path], covers: Iterable[Path]) -> Iterator[Path]:
    """Yield the sockets in the file system that the agent could connect to."""
    edges = {*stops, *covers}
    covered = set(covers)
    with open("/proc/net/unix") as table:
        rows = [line.split(maxsplit=7) for line in table.read().splitlines()[1:]]
    paths = {row[7] for row in rows if len(row) == 8}  # others have no name
    for path in sorted(paths):
        if not path.startswith("/") or path.startswith(OWN_FILES):
            continue
        socket = Path(path).resolve()
        is_visible = _innermost(socket, edges) not in covered
        if is_visible and os.access(socket, os.W_OK) and socket.is_socket():
            yield socket


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
    if os.path.exists(path):  # False, too, if we may not look
        yield path


def _first_link(path: Path) -> Path | None:
    """Return the first link on the way to this path, itself included."""
    for step in (*reversed(path.parents), path):
        if os.path.islink(step):
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


def _uncovered(path: Path, cover: Path) -> list[str]:
    """Return the arguments that show this path in the empty directory that covers
    `cover`. Of a directory that not everybody may read, its children are shown in an
    open one.
    """
    arguments = _folders_within([cover], path)
    mode = path.lstat().st_mode
    is_open = mode & READ_BY_ALL == READ_BY_ALL or not becomes_nobody()
    if is_open or not stat.S_ISDIR(mode):
        return [*arguments, *_mounted(path)]
    if path != cover:
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
