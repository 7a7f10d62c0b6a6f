"""Steps of a Slurm job: one per role, on the role's nodes. Steps overlap: placement.py,
not Slurm, assigns the GPUs.

    srun --nodelist=node3 … python -m megarl.run.step TASK
      step.py, which starts the role on the node
      stdin   held open by the supervisor: it closes when the supervisor dies, however
              it dies, and then the step ends
      stdout  reports, each of which is acknowledged
      stderr  srun's own messages, to the role's log

MEGARL_STEP_OPTIONS has further options for srun (`--container-image=…`),
MEGARL_STEP_COMMAND the words before `-m` (`apptainer exec … python`; default: this
Python). launch/slurm/common.sh sets both.
"""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, writing
from megarl.run.launcher import RoleCommand, RunningRole, Stuck
from megarl.run.nodes import OF_SLURM, Node, gathered
from megarl.run.restart import MESSAGE_STATUS, NodeState
from megarl.run.step import BEAT_S, HEARD, TERMINATE, UNANSWERED, Report, encoded

STEP_OPTIONS = "MEGARL_STEP_OPTIONS"
STEP_COMMAND = "MEGARL_STEP_COMMAND"
SURVEY_LIMIT_S = 900.0
"""Generous, because a container image of tens of gigabytes may have to be fetched."""
START_LIMIT_S = 900.0
"""Time limit from srun's start to the step's first report."""
SILENT_S = 3 * BEAT_S
SRUN_LIMIT_S = 10.0
"""Time limit from SIGTERM to srun until its end. Then it is killed, while Slurm goes on
ending the step.
"""
ASK_LIMIT_S = 30.0
UNKNOWN_STATUS = 1
DESERTED_S = UNANSWERED * BEAT_S + 5.0
"""How long a step without its srun goes on after its last report, until it notices that
nobody acknowledges it.
"""
BROKEN_STATES = ("down", "fail", "unknown", "future", "power")
"""Prefixes of Slurm's states of nodes that run nothing."""


OF_THE_JOB = (
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_THREADS_PER_CORE",
    "SLURM_HINT",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_DISTRIBUTION",
    "SLURM_DIST_PLANESIZE",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_TRES_BIND",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_BIND",
    "SLURM_LABELIO",
)
"""Options of `sbatch`, or of the job in which it was called, that srun would take from
the environment; launch/slurm/common.sh removes the same. A step has all that its job
has on a node, and some of these would give it one core (--hint=nomultithread implies
--exact), one GPU, or end srun, such as two of SLURM_MEM_PER_…. Labels of its output
would hide the reports.
"""


class SrunLauncher:
    """Starts roles as steps of the Slurm job that we run in."""

    def __init__(self, rundir: RunDir, interface: str) -> None:
        self._rundir = rundir
        self._interface = interface
        self._gpus: Sequence[str] = ()

    def names(self) -> list[str]:
        """Return the names of the job's nodes, in its order."""
        names = hosts(os.environ["SLURM_JOB_NODELIST"])
        if not names:
            raise MegarlError(
                f"scontrol does not know the nodes {os.environ['SLURM_JOB_NODELIST']}; is Slurm"
                " down?"
            )
        if len(names) > 1 and not self._interface:
            raise MegarlError(
                "run.interface: roles on several nodes need the network on which they trust each"
                " other: its name (`ip -4 address` on a node lists them), or"
                f" {OF_SLURM!r} for the one by which Slurm reaches the nodes"
            )
        self._gpus = gpus_of_a_node()
        return names

    def words(self, names: Sequence[str], step: str, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `python ARGUMENTS` on these nodes."""
        return command(names, step, arguments, self._gpus)

    def survey(self, ports: int) -> tuple[Node, ...]:
        """Ask every node for its resources. MegarlError, naming the node, if one does
        not answer or cannot take part.
        """
        return self.ask(self.names(), ports)

    def ask(self, names: Sequence[str], ports: int) -> tuple[Node, ...]:
        """Ask these nodes; see `survey`."""
        arguments = ("-m", "megarl.run.nodes", str(ports), self._interface, str(self._rundir.path))
        try:
            done = subprocess.run(
                self.words(names, "survey", arguments),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SURVEY_LIMIT_S,
                env=environment(),
            )
        except subprocess.TimeoutExpired:
            raise MegarlError(
                f"the nodes {', '.join(names)} did not all answer within {SURVEY_LIMIT_S:g} s; see"
                " `scontrol show node`"
            ) from None
        answers = gathered(done.stdout.splitlines())
        missing = [
            name for name in names if name not in answers or len(answers[name].ports) < ports
        ]
        if done.returncode or missing:
            raise MegarlError(
                "a step over the job's nodes failed; no complete answer from"
                f" {', '.join(missing) or 'none'}:\n{done.stderr.strip()}"
            )
        return checked([answers[name] for name in names])

    def start(self, task: RoleCommand) -> "SrunStep":
        """Start the role as a step on its nodes."""
        names = [node.name for node in task.place.nodes]
        with writing(task.log()):
            task.log().parent.mkdir(parents=True, exist_ok=True)
            log = task.log().open("ab")
        words = self.words(names, task.role.name, ("-m", "megarl.run.step", encoded(task)))
        with log:
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env=environment(),
                )
            except OSError as error:
                raise MegarlError(f"{words[0]} cannot be started: {error.strerror}") from None
        return self.step(process, names)

    def step(self, process: subprocess.Popen[bytes], names: Sequence[str]) -> "SrunStep":
        """Return the step of a process that runs on these nodes."""
        return SrunStep(process, names)

    def sweep(self, running: Sequence[RunningRole]) -> None:
        """Do nothing: each step cleans up on its own node."""


class SrunStep:
    """An `srun` process and the reports of its nodes."""

    @staticmethod
    def may_go_on_after(code: int) -> bool:
        """Return whether the step may go on after its process has ended with this
        status: killed by a signal.
        """
        return code < 0

    def __init__(self, process: subprocess.Popen[bytes], names: Sequence[str]) -> None:
        self._process = process
        self.names = names
        self.pid = process.pid
        self._started = time.monotonic()
        self._over = math.inf  # when the process was first seen to have ended
        self._killed = math.inf  # when `kill` was first called
        self._reports: dict[str, tuple[float, Report]] = {}  # each node's last, and when it came
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Keep each node's last report, and acknowledge it, until the step ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(msgspec.MsgspecError):  # a site's prologue may print there
                report = msgspec.json.decode(line, type=Report)
                self._reports[report.node] = (time.monotonic(), report)
                self._tell(HEARD)

    @property
    def answered(self) -> bool:
        """Whether all nodes of the step have reported."""
        return set(self._reports) >= set(self.names)

    def status(self) -> int | None:
        """Return None while the role runs or may run, then its exit status, or minus
        the signal.

        It is the status that the nodes report or, if one did not, srun's. Of srun, 0 is
        no success then, but says that the node is lost: UNKNOWN_STATUS. An srun that
        was killed, or failed to start the step, may leave the step running. The role
        counts as running until that step must have ended by itself, so that there are
        never two.
        """
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(1.0)
        self._over = min(self._over, time.monotonic())
        reports = list(self._reports.values())
        statuses = [report.status for _, report in reports if report.status is not None]
        if MESSAGE_STATUS in statuses:
            return MESSAGE_STATUS  # the others died because this one ended
        failures = [status for status in statuses if status]
        if failures:
            return failures[0]
        if len(statuses) == len(self.names):
            return 0
        last_report = self._over
        if self.answered:
            times = [at for at, report in reports if report.status is None]
            last_report = max(times, default=self._over)
        may_go_on = self.may_go_on_after(code) or not self.answered
        if may_go_on and time.monotonic() - last_report < DESERTED_S:
            return None
        if 128 < code <= 128 + signal.SIGRTMAX:  # a signal, in a shell's form
            return 128 - code
        return code or UNKNOWN_STATUS

    def why_stuck(self) -> Stuck | None:
        """Return "stopped" if a process is stopped anywhere, "unheard" if a node has
        been silent for too long.
        """
        present = time.monotonic()
        if self._process.poll() is not None:
            return None  # `status` waits for its end
        alive = [
            (at, report) for at, report in list(self._reports.values()) if report.status is None
        ]
        if any(report.stopped for _, report in alive):
            return "stopped"
        is_late = not self.answered and present - self._started > START_LIMIT_S
        is_silent = any(present - at > SILENT_S for at, _ in alive)
        return "unheard" if is_late or is_silent else None

    def terminate(self) -> None:
        """Have every node of the step send SIGTERM to its part of the role."""
        self._tell(TERMINATE)

    def _tell(self, word: bytes) -> None:
        """Send a word to all nodes of the step, if srun is alive and its stdin open."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(word + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGTERM to srun, which makes Slurm kill the whole step."""
        self._killed = min(self._killed, time.monotonic())
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait_gone(self) -> None:
        """Wait for srun, then kill it: a step on a lost node never ends, so neither
        does its srun.
        """
        try:
            self._process.wait(max(0.0, self._killed + SRUN_LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def node_state(self) -> NodeState:
        """Return "down" if Slurm has lost a node of the step, "silent" if not all nodes
        have reported, else "up". Slurm removes a lost node from the job, but not at
        once; until then it is silent. Even if it is up again by now, it is no longer
        ours.
        """
        listed = _output(["squeue", "-h", "-j", our_job(), "-o", "%N"]).strip()
        ours = hosts(listed) if listed else self.names
        states = _output(["sinfo", "-h", "-n", ",".join(self.names), "-o", "%T"]).splitlines()
        if any(map(is_broken, states)) or not set(self.names) <= set(ours):
            return "down"
        return "up" if self.answered else "silent"


def gpus_of_a_node() -> list[str]:
    """Return srun's option for a node's GPUs if the job asked for a number on all nodes
    together (`sbatch --gpus`); else none. Without it a step, even on one node, would
    ask for that same number. Each node is taken to have as many as the first one.
    """
    count = os.environ.get("SLURM_GPUS_ON_NODE")
    if not count:
        return []
    job = _output(["scontrol", "show", "job", our_job()])
    if re.search(r"TresPerJob=\S*gpu", job) is None:
        return []
    return [f"--gpus-per-node={count}"]


def command(
    names: Sequence[str], step: str, arguments: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """Build the srun command: one task on each node, beside those of other steps,
    whatever the batch script says. step: its name; options: further ones for srun;
    arguments: of Python.
    """
    python = shlex.split(os.environ.get(STEP_COMMAND, "")) or [sys.executable]
    return [
        "srun",
        f"--job-name={step}",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(names)}",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--export=ALL",
        "--input=all",
        "--kill-on-bad-exit=1",  # for the learner's nodes; a step on one node has no other task
        *options,
        *shlex.split(os.environ.get(STEP_OPTIONS, "")),
        *python,
        *arguments,
    ]


def environment() -> dict[str, str]:
    """Return our environment without the options that srun would take from it."""
    return {name: value for name, value in os.environ.items() if name not in OF_THE_JOB}


def checked(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes, with distinct ports, after checking that they can reach each
    other.
    """
    if len({node.host for node in nodes}) > 1:
        for node in nodes:
            if node.address.startswith("127."):
                raise MegarlError(
                    f"node {node.name}: its address is {node.address}, which no other node can"
                    " reach; name the network interface with run.interface (`ip -4 address` on a"
                    " node lists them)"
                )
    used: set[tuple[str, int]] = set()
    distinct = []
    for node in nodes:  # nodes on one machine may have found the same ports
        ports = tuple(port for port in node.ports if (node.address, port) not in used)
        used |= {(node.address, port) for port in ports}
        distinct.append(replace(node, ports=ports))
    return tuple(distinct)


def our_job() -> str:
    """Return our job as squeue names it: of an array's task, ARRAY_TASK. One task of an
    array has the array's own id as SLURM_JOB_ID; by that alone squeue would list the
    nodes of all tasks.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def hosts(listed: str) -> list[str]:
    """Expand `node[1-3]` into a list of names."""
    return _output(["scontrol", "show", "hostnames", listed]).split()


def is_broken(state: str) -> bool:
    """Return whether this is Slurm's state of a node that runs nothing (`down`,
    `down*`, `failing`); a draining one works.
    """
    return state.strip().lower().startswith(BROKEN_STATES)


def _output(words: Sequence[str]) -> str:
    """Return the output of a Slurm command; empty if it fails or does not answer."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True
        ).stdout
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return ""
