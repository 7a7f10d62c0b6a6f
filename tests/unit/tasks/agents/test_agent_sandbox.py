"""What an agent in bubblewrap can change on the machine: nothing. It asks with
access(2).
"""

import json
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.tasks.agents import sandbox
from megarl.tasks.agents.sandbox import agent_sandbox, check_agent_sandbox
from megarl.tasks.graders.scratch import becomes_nobody, hand_over, scratch

pytestmark = pytest.mark.processes
as_root = pytest.mark.skipif(not becomes_nobody(), reason="an ordinary user's agents are that user")
PROBE = r"""
import json, os

def ours(path):
    kind = path.split("/")[2]
    return path.startswith("/proc/") and (kind.isdigit() or "self" in kind)

writable = []
for top in ("/proc", "/sys", "/dev"):
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not ours(f"{folder}/{name}")]
        paths = [os.path.join(folder, name) for name in names]
        writable += [path for path in paths if os.access(path, os.W_OK)]
try:
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    opened = True
except OSError:
    opened = False
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\t", 1) for line in lines)
rights = [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
ids = [os.getuid(), os.getgid(), *os.getgroups()]
print(json.dumps([writable, opened, ids, rights]))
"""
CONNECTIONS = r"""
import resource, socket, time
from megarl.tasks.agents import inside

resource.setrlimit(resource.RLIMIT_NOFILE, (16, 64))
inside._forward()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def connected(count):
    return [socket.create_connection(("127.0.0.1", inside.PORT), 10) for _ in range(count)]

def echoed(clients):
    for client in clients:
        client.sendall(b"x")
    return b"".join(client.recv(1) for client in clients).decode()

clients = connected(15)
at_once = echoed(clients)
more = connected(40)
time.sleep(0.5)
for client in [*clients, *more]:
    client.close()
time.sleep(0.5)
print(at_once, echoed(connected(1)))
"""
"""Fifteen connections need more descriptors than the soft limit, 55 more than the hard
one.
"""
DEVICES = ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/ptmx"]
OWN = {f"/dev/{name}" for name in [*DEVICES, "stdin", "stdout", "stderr"]}
"""The sandbox's own /dev, its terminals and the process's own descriptors. What is
written to /dev/random is only mixed in.
"""
PRESSURE = {f"/proc/pressure/{what}" for what in ("io", "cpu", "memory")}
OPEN_TO_ALL = {*PRESSURE, "/proc/sys/kernel/ns_last_pid"}
"""Any user may open them: to be told of pressure; the last one needs rights."""
IPC = ["sem", "shmall", "shmmax", "shmmni", "shm_rmid_forced", "msgmax", "msgmnb", "msgmni"]
NAMESPACED = {f"/proc/sys/kernel/{name}" for name in [*IPC, "auto_msgmni", "pid_max"]}
QUEUES = "/proc/sys/fs/mqueue/"
"""Settings of the sandbox's own namespaces, which an ordinary user has made and may
change.
"""


def of_the_machine(writable: Iterable[str]) -> set[str]:
    """Those of the files that are not the sandbox's own, and not open to every user
    anyway.
    """
    others = set(writable) - OWN - OPEN_TO_ALL - NAMESPACED
    return {path for path in others if not path.startswith(QUEUES)}


def probed(*around: str) -> tuple[set[str], bool, list[int], list[int]]:
    """What the probe may write; whether it could open core_pattern; its user, groups
    and rights.
    """
    done = subprocess.run(
        [*around, sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    )
    writable, opened, ids, rights = json.loads(done.stdout)
    return set(writable), opened, ids, rights


def test_an_agent_can_change_nothing_of_the_kernel() -> None:
    with scratch() as folder:
        hand_over(folder)
        writable, opened, ids, rights = probed(*agent_sandbox(folder, folder))
    assert of_the_machine(writable) == set()
    assert not opened
    assert not any(rights)
    assert 0 not in ids or os.getgid() != 0, "it is neither root nor of root's group"


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while said := self.request.recv(1):
            self.request.sendall(said)


def test_the_gateway_is_reached_after_more_connections_than_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    with tempfile.TemporaryDirectory() as temporary, scratch() as folder:
        hand_over(folder)
        gateway = Path(temporary) / "gateway"
        with socketserver.ThreadingUnixStreamServer(str(gateway), Echo) as server:
            server.daemon_threads = True
            gateway.chmod(0o777)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            done = subprocess.run(
                [
                    *agent_sandbox(folder, folder, gateway=gateway),
                    sys.executable,
                    "-c",
                    CONNECTIONS,
                ],
                capture_output=True,
                text=True,
            )
            server.shutdown()
    assert done.stdout.split() == ["x" * 15, "x"], done.stderr


@as_root
def test_the_probe_finds_what_root_without_rights_can_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same sandbox, but of an agent that stays root; the check before a run notices
    it, too.
    """
    for module in (sandbox, sys.modules[scratch.__module__]):
        monkeypatch.setattr(module, "becomes_nobody", lambda: False)
    with scratch() as folder:
        writable, opened, ids, rights = probed(*agent_sandbox(folder, folder))
    assert len(of_the_machine(writable)) > 100
    assert opened
    assert ids[0] == 0
    assert not any(rights)
    refused = (
        r"agent cannot be run .*could write /proc/sys/kernel/core_pattern.*another user than root"
    )
    with pytest.raises(MegarlError, match=refused):
        check_agent_sandbox("agent", ["true"])


@as_root
def test_nobody_reads_what_an_agent_needs_and_nothing_else_of_a_closed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command, by a link, and a package lie below a directory that only root may
    pass, as /root is.
    """
    home = tmp_path / "home"
    for folder in ("tool/bin", "packages", "private", "project"):
        (home / folder).mkdir(parents=True)
    (home / "tool" / "bin" / "agent").write_text(
        f"#!/bin/sh\ncat {home}/packages/it; cd {home}/project && ls {home}"
    )
    (home / "tool" / "bin" / "agent").chmod(0o755)
    (home / "link").symlink_to(home / "tool")
    (home / "packages" / "it").write_text("package\n")
    home.chmod(0o700)
    monkeypatch.setenv("PYTHONPATH", str(home / "packages"))
    monkeypatch.chdir(home / "project")
    command = [str(home / "link" / "bin" / "agent")]
    with scratch() as workplace:
        hand_over(workplace)
        done = subprocess.run(
            [*agent_sandbox(workplace, workplace, command), *command],
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [
            "package",
            "link",
            "packages",
            "project",
            "tool",
        ], done.stderr
    check_agent_sandbox("agent", command)
    (home / "tool" / "bin" / "agent").chmod(0o700)
    with pytest.raises(
        MegarlError,
        match=r"agents could not run .*agent\); under root, agents are nobody: let everybody",
    ):
        check_agent_sandbox("agent", command)
    (home / "packages" / "it.py").touch()
    monkeypatch.syspath_prepend(home / "packages")
    check_agent_sandbox("agent", "it:function")
