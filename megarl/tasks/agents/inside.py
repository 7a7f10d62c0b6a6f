"""The main program of an agent's process: it sets limits, then runs the user's command
or function.

    stdin         {"prompt", "id", "task", "answer", "reward_key"}
    environment   OPENAI_BASE_URL, …: how to reach the session
    FORWARDED     in bubblewrap: the gateway's socket, to which PORT is forwarded
    arguments     one of:
    command PYTHONPATH WORD …
        replaces this process; it posts its reward, or leaves it to the task's grader
    function package.module:name
        is called with an `AgentTask`, and returns the reward, or None to leave it to
        the grader
"""

import contextlib
import inspect
import json
import math
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megarl.core.base.process import die_with_parent, imported

FORWARDED = "/dev/megarl-gateway"
"""Where a sandbox has the gateway's socket."""
PORT = 8000
"""The port of a sandbox's own loopback interface that leads to the gateway."""
WAITING_CONNECTIONS = 128
COPIED_BYTES = 1 << 16
STACK_BYTES = 1 << 18
"""Of a thread that copies: two of them serve a connection."""
PAUSE_S = 0.1
"""How long no connection is accepted after one for which resources were lacking."""
REWARD_LIMIT_S = 60.0
LARGEST_FILE = 1 << 30
FOLDERS_OF_SOCKETS = ("/run", "/tmp", "/var/tmp")
KERNEL_FILES = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sysrq-trigger",
    "/proc/mtrr",
    "/sys/power/state",
)
"""Whoever may write one of them can do so outside every sandbox."""


@dataclass(frozen=True)
class AgentTask:
    """The argument of a user's function. base_url, api_key, model: as OpenAI's clients
    take them. answer: the task's reference answer, for computing a reward; reward_key:
    for posting one. Put neither anywhere that the policy can read.
    """

    prompt: str
    id: str
    task: str
    answer: str
    reward_key: str
    base_url: str
    api_key: str
    model: str


def problem(words: list[str]) -> str:
    """Return why this process is no place for the agent `function NAME` or `command
    WORD …`; "" if it is one.
    """
    for file in KERNEL_FILES:
        if os.access(file, os.W_OK):
            return f"agents could write {file}, which is the kernel's"
    try:
        tempfile.TemporaryFile(dir=os.environ["TMPDIR"]).close()
    except OSError as error:
        return f"agents could not write in $TMPDIR: {error.strerror}"
    kind, name = words[:2]
    if kind == "command":
        if shutil.which(name) is None:
            return f"agents could not run {name}"
        return ""
    package = name.partition(":")[0].partition(".")[0]
    if find_spec(package) is None:
        return f"agents could not import {package}"
    return ""


def folders_of_sockets() -> set[Path]:
    """Return the directories in which programs make their sockets."""
    names = [*FOLDERS_OF_SOCKETS, tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", "")]
    return {Path(name).resolve() for name in names if name and os.path.isdir(name)}


def main(words: list[str]) -> None:
    """Turn this process into the command, or call the function and post its reward."""
    die_with_parent()
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this dies first
    # for this and each child process
    quarter_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    resource.setrlimit(resource.RLIMIT_DATA, (quarter_of_memory, quarter_of_memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    if os.path.exists(FORWARDED):
        _forward()
    if words[0] == "command":
        os.environ["PYTHONPATH"] = words[1]  # ours would make another Python import our packages
        os.execvp(words[2], words[2:])
    # so that `finally` and `atexit` clean up
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    function = imported(words[1])
    task = AgentTask(
        **json.load(sys.stdin),
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model=os.environ["OPENAI_MODEL"],
    )
    reward = function(task)
    if inspect.isawaitable(reward):
        import asyncio  # this import takes half as long as all the others together

        reward = asyncio.run(_awaited(reward))
    if reward is not None:
        _post(task, reward)


def _forward() -> None:
    """Start a process that forwards PORT to the gateway's socket as long as the sandbox
    lives. When this returns, the port is open.
    """
    listener = socket.create_server(("127.0.0.1", PORT), backlog=WAITING_CONNECTIONS)
    child = os.fork()
    if child:
        listener.close()
        os.waitpid(child, 0)
        return
    try:
        if os.fork():  # an agent that waits for all of its children has none here
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        threading.stack_size(STACK_BYTES)
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        while True:
            _accept(listener)
    finally:
        os._exit(1)


def _accept(listener: socket.socket) -> None:
    """Forward the next connection in a thread. If there are no descriptors or no memory
    left for it, close it and wait until others may have ended.
    """
    client = None
    try:
        client, _ = listener.accept()
        threading.Thread(target=_connect, args=(client,), daemon=True).start()
    except (OSError, RuntimeError):
        if client is not None:
            client.close()
        time.sleep(PAUSE_S)


def _connect(client: socket.socket) -> None:
    """Forward a connection, both ways, until both sides have closed it."""
    with client, socket.socket(socket.AF_UNIX) as gateway:
        gateway.connect(FORWARDED)
        back = threading.Thread(target=_copy, args=(gateway, client), daemon=True)
        back.start()
        _copy(client, gateway)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes from the source, and its end."""
    with contextlib.suppress(OSError):  # the other side has gone
        while data := source.recv(COPIED_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


async def _awaited(reward: Awaitable[object]) -> object:
    """Return what an async function returns; asyncio.run takes only coroutines."""
    return await reward


def _post(task: AgentTask, reward: object) -> None:
    """Post a reward to the gateway. reward: a number or a bool, perhaps numpy's or
    torch's. TypeError or ValueError if it is no finite number.
    """
    headers = {"Authorization": f"Bearer {task.reward_key}", "Content-Type": "application/json"}
    dtype = str(getattr(reward, "dtype", ""))  # numpy's and torch's
    is_bool = isinstance(reward, bool) or dtype.endswith("bool")
    number = bool(reward) if is_bool else float(reward)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"the agent's function returned {number}; a reward is a finite number")
    body = json.dumps({"reward": number}).encode()
    url = f"{task.base_url}/reward"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, headers), timeout=REWARD_LIMIT_S) as reply:
        reply.read()
