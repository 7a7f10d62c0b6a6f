"""A real Slurm on this machine: munged, slurmctld and some slurmd, each with a port and
a folder of its own, ended by pid.

All nodes are this machine, so that what is on one is seen by all. Nothing of an
installed Slurm's configuration is used.
"""

import getpass
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megarl.run.process import free_ports
from tests.processes import alive

LIMIT_S = 60.0
CONFIGURATION = """\
ClusterName=megarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=1
SlurmdTimeout=60
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class DaemonDied(AssertionError):
    """Not by our hand: Debian's slurmd 22.05.8 can corrupt its heap when it launches
    several steps at once, and crash.
    """


class Cluster:
    """Running from `start` to `stop`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"node{i + 1}" for i in range(nodes)]
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._killed: set[str] = set()

    def start(self) -> None:
        """MegarlError is none of its: what does not start is an assertion with the
        logs.
        """
        folder = self.folder
        host = socket.gethostname().split(".")[0]
        (folder / "state").mkdir(parents=True)
        (folder / "spool").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        ports = free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
            " RealMemory=4000 Gres=gpu:2"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        text = CONFIGURATION.format(
            host=host,
            controller_port=ports[0],
            user=getpass.getuser(),
            folder=folder,
            nodes="\n".join(lines),
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero\n")  # in name only
        files = {
            "key-file": "munge.key",
            "socket": "munge.sock",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
        }
        self._run(
            [
                "munged",
                "--force",
                f"--seed-file={folder}/munge.seed",
                *(f"--{k}={folder}/{v}" for k, v in files.items()),
            ]
        )
        for name in self._daemons():
            self._start(name)
        self.wait_for_idle()

    def revive(self) -> None:
        """Start the daemons that have died; slurmd ends what is left of the jobs it
        knew.
        """
        dead = [name for name in self._daemons() if not self._lives(name)]
        for name in dead:
            self._start(name)
        self._killed.clear()
        for name in dead:
            self.says(
                "scontrol", "update", f"nodename={name}", "state=resume"
            )  # if it was found out
        names = ",".join(name for name in dead if name in self.nodes)
        self.wait_for(lambda: not names or self._up(names), f"start of {names}")

    def dead(self) -> list[str]:
        """Daemons that have ended, not by `kill`."""
        return [
            name for name in self._daemons() if not self._lives(name) and name not in self._killed
        ]

    def kill(self, node: str) -> None:
        """Its slurmd: its steps live on, and Slurm can no longer end them."""
        self._killed.add(node)
        psutil.Process(int((self.folder / f"{node}.pid").read_text())).kill()

    def _up(self, names: str) -> bool:
        states = self.says("sinfo", "-h", "-n", names, "-o", "%t").split()
        return bool(states) and not any(
            state.startswith(("down", "unk")) or "*" in state for state in states
        )

    def _daemons(self) -> list[str]:
        return ["slurmctld", *self.nodes]

    def _start(self, name: str) -> None:
        (self.folder / f"{name}.pid").unlink(missing_ok=True)
        self._run(["slurmctld"] if name == "slurmctld" else ["slurmd", "-N", name])

    def _lives(self, name: str) -> bool:
        """Its file is written a moment after it has been started."""
        try:
            return alive(int((self.folder / f"{name}.pid").read_text()))
        except (FileNotFoundError, ValueError):
            return True

    def wait_for_idle(self) -> None:
        """All nodes up and empty."""
        idle = f"{len(self.nodes)} idle"
        self.wait_for(lambda: self.says("sinfo", "-h", "-o", "%D %t").strip() == idle, "idle nodes")

    def stop(self) -> None:
        """Jobs, then daemons, which end whatever has become of the jobs."""
        try:
            self.revive()
            self._run(["scancel", "--full", f"--user={getpass.getuser()}"])
            self.wait_for(lambda: not self.says("squeue", "-h"), "empty queue")
        finally:
            for name in (*reversed(self._daemons()), "munged"):
                with suppress(FileNotFoundError, psutil.NoSuchProcess):
                    process = psutil.Process(int((self.folder / f"{name}.pid").read_text()))
                    process.terminate()
                    try:
                        process.wait(20)
                    except psutil.TimeoutExpired:
                        process.kill()

    def submit(self, *words: str, cwd: Path, environment: dict[str, str]) -> str:
        """sbatch; the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            cwd=cwd,
            env=self.environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, …"""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """Return one field of `scontrol show job`; empty if it is not there."""
        words = self.says("scontrol", "show", "job", "-o", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def says(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        ).stdout

    def wait_for(
        self,
        condition: Callable[[], bool],
        what: str,
        limit_s: float = LIMIT_S,
        logs: Sequence[Path] = (),
    ) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            if dead := self.dead():
                raise DaemonDied(
                    f"{', '.join(dead)} died while {what} was waited for; see {self.folder}"
                )
            if time.monotonic() > end:
                shown = [
                    f"== {log}\n{log.read_text(errors='replace')[-4000:]}"
                    for log in [*self.folder.glob("*.log"), *logs]
                    if log.exists()
                ]
                raise AssertionError(
                    f"no {what} within {limit_s:g} s\n{self.says('squeue')}\n" + "\n".join(shown)
                )
            time.sleep(0.5)

    def _run(self, words: Sequence[str]) -> None:
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{words[0]}: {done.stderr}"
