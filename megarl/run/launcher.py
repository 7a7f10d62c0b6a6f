"""How a role is started, watched and ended. `Launcher` is the interface;
`LocalLauncher` starts processes on this machine, srun.py's launcher starts steps of a
Slurm job.

Each role leads its own session: Ctrl-C in the terminal reaches only the supervisor, and
`kill` reaches all of the role's processes through their group. Roles end with the
supervisor, however it ends (`megarl.run.process.die_with_supervisor`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import psutil

from megarl.core.base.errors import MegarlError
from megarl.core.base.process import NODE, NODE_RANK, SUPERVISOR
from megarl.core.base.rundir import RunDir, writing
from megarl.core.recipe import Recipe
from megarl.run import devices
from megarl.run.nodes import Node, this_node
from megarl.run.placement import Place
from megarl.run.process import remove_abandoned_shared_memory, remove_shared_memory
from megarl.run.restart import NodeState, Role

KILL_LIMIT_S = 30.0
"""If a killed process still exists after this time, it hangs in the kernel (a driver);
nothing more can be done about it.
"""
Stuck = Literal["stopped", "unheard"]
"""Why a role is stuck: one of its processes is stopped, or its node has stopped
reporting.
"""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
ALIKE = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Variables on which learner and servers must agree if they share a node; a user's own
values are kept. NCCL reads a peer's memory by its own setting and fails, or hangs, if
the peer's differs; its default is 1, and SGLang sets 0 in its processes.
"""
ALIKE_IN_A_RACK = ALIKE | {"NCCL_CUMEM_ENABLE": "1"}
"""The same for GPUs of RACK: with 0, NVLink would end at the machine ("MNNVL requires
cuMem", NCCL's src/mnnvl.cc at 5067397; by itself NCCL then uses it between machines,
src/init.cc). SGLang sets 1 for a server on several such nodes (_set_envs_and_config in
its entrypoints/engine.py).
"""
RACK = ("GB200", "GB300")
"""Parts of the names of GPUs whose NVLink connects the machines of a rack."""
ORDER = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Kernels start in the order of their calls, so that those that send are not behind
those that compute. SGLang sets 8 for itself.
"""
NEEDS_NO_ORDER = 10
"""Major compute capability, Blackwell's, from which megatron does without ORDER."""
PINNED = "pinned_max_round_threshold_mb"
"""From this size on, torch rounds pinned memory up to whole MiB; by default it rounds
up to a power of two, which would make a server's copy of its weights up to 1.6 times as
large.
"""
EXPANDABLE = "expandable_segments"
"""Without it, a learner's memory is soon in pieces that its next micro-batch does not
fit: no two have the same size. It is not set with weights.transport=cuda_ipc, which
cannot share such memory (checks.py).
"""
COMMANDS = {"server": "serve", "controller": "rollout", "learner": "learn"}


@dataclass(frozen=True)
class RoleCommand:
    """The command of a role. arguments: those of `python`. environment: variables that
    differ from ours (None: unset).
    """

    role: Role
    arguments: tuple[str, ...]
    environment: Mapping[str, str | None]
    place: Place
    rundir: RunDir

    def log(self, n: int = 0) -> Path:
        """Return the role's log on its n-th node. A learner's is that of its first rank
        there; further ranks have their own (`megarl.core.base.process.log_to`).
        """
        rank = self.role.index if self.role.serves else n * self.place.ranks
        return self.rundir.log(self.role.kind, self.place.nodes[n].name, rank)


class RunningRole(Protocol):
    """A role that was started. pid: of the process that stands for it here."""

    pid: int

    def status(self) -> int | None:
        """Return None while it runs, then its exit status, or minus the signal."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill the role and everything it started; also clean up after a dead role.
        Return without waiting.
        """

    def wait_gone(self) -> None:
        """Wait after `kill` until the role is gone, for at most KILL_LIMIT_S."""

    def why_stuck(self) -> Stuck | None:
        """Return why the role is stuck; None if it is not."""

    def node_state(self) -> NodeState:
        """Return the state of the role's nodes, once it has ended."""


class UnansweredSurveyError(MegarlError):
    """Nodes could not be asked for their resources; another start may mend that."""


class Launcher(Protocol):
    """Starts roles on the nodes that it has."""

    def survey(self, ports: int) -> tuple[Node, ...]:
        """Return the available nodes in the order of the allocation, each with this
        many free ports.
        """

    def start(self, task: RoleCommand) -> RunningRole:
        """Start the role at its place."""

    def sweep(self, running: Sequence[RunningRole]) -> None:
        """Kill processes that dead roles have left, except those that belong to
        `running`.
        """


def task(recipe: Recipe, rundir: RunDir, role: Role, port: int, place: Place) -> RoleCommand:
    """Build the command that runs the role with the resolved recipe. port: only for
    roles that serve.
    """
    arguments = ["-m", "megarl", COMMANDS[role.kind], str(rundir.recipe)]
    if role.serves:
        arguments += ["--index", str(role.index), "--port", str(port)]
    return RoleCommand(role, tuple(arguments), _environment(recipe, role, place), place, rundir)


def _environment(recipe: Recipe, role: Role, place: Place) -> dict[str, str | None]:
    """Return the variables of a role's processes that differ from ours; None: unset."""
    threads = "1" if role.kind == "controller" else str(recipe.resources.threads)
    environment: dict[str, str | None] = {
        **{name: os.environ.get(name, value) for name, value in alike(place.nodes).items()},
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # With a limit below `threads` SGLang's server dies at the first token on a CPU.
        "OMP_THREAD_LIMIT": None,
        # A thread that waits for the others of its role sleeps. One that spins keeps
        # another role from its core.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(place.gpus),
        # by default nvidia-smi's, and Slurm's
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        # With it all symbols are resolved at import, and Transformer Engine lacks some
        # of optional libraries.
        "LD_BIND_NOW": None,
        "PYTHONUNBUFFERED": "1",
        # else every role compiles all its imports at each start
        "PYTHONDONTWRITEBYTECODE": None,
    }
    is_learner = role.kind == "learner"
    if place.gpus:
        environment |= _allocator(is_learner and recipe.weights.transport != "cuda_ipc")
    if place.gpus and is_learner:
        environment |= kernel_order(recipe, place.capabilities)
    return environment


def alike(nodes: Sequence[Node]) -> dict[str, str]:
    """Return NCCL's variables for a role on these nodes."""
    kinds: set[str] = set()
    for node in nodes:
        kinds.update(node.kinds or ("",))  # "": not known, which is no GPU of a rack
    in_a_rack = all(_is_of_a_rack(kind) for kind in kinds)
    return ALIKE_IN_A_RACK if in_a_rack else ALIKE


def _is_of_a_rack(kind: str) -> bool:
    """Return whether a GPU of this name is one of RACK."""
    return any(name in kind for name in RACK)


def kernel_order(recipe: Recipe, capabilities: Collection[str]) -> dict[str, str]:
    """Return ORDER if a learner on GPUs of these compute capabilities ("9.0"; none:
    unknown) needs it.

    Megatron requires it with tensor or context parallelism, before Blackwell
    (validate_args in its training/arguments.py). Where it is not needed, exchanges of
    experts and of gradients would wait for kernels beside which they could run.
    """
    is_parallel = recipe.model.tensor_parallel > 1 or recipe.model.context_parallel > 1
    majors = [int(capability.partition(".")[0]) for capability in capabilities]
    may_be_older = not majors or min(majors) < NEEDS_NO_ORDER
    return ORDER if is_parallel and may_be_older else {}


def _allocator(expandable: bool) -> dict[str, str]:
    """Return torch's settings for memory allocation: the user's, and `PINNED` and
    perhaps `EXPANDABLE` if they lack them.
    """
    # the second is the older name of the first
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    defaults = {PINNED: "1"}
    if expandable:
        defaults[EXPANDABLE] = "True"
    parts = [settings] if settings else []
    for key, value in defaults.items():
        if key not in settings:
            parts.append(f"{key}:{value}")
    return {"PYTORCH_ALLOC_CONF": ",".join(parts)}


class LocalLauncher:
    """Starts processes on this machine. Call `start` from a thread that outlives the
    roles: they die with it.
    """

    def __init__(self, interface: str = "") -> None:
        self._interface = interface

    def survey(self, ports: int) -> tuple[Node, ...]:
        """Return this machine."""
        return (this_node(ports, self._interface),)

    def start(self, task: RoleCommand, n: int = 0) -> "LocalProcess":
        """Start the role here. n: the index of this machine among the role's nodes."""
        remove_abandoned_shared_memory()
        with writing(task.log(n)):
            task.log(n).parent.mkdir(parents=True, exist_ok=True)
            log = task.log(n).open("ab", buffering=0)
            time_text = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {time_text} {' '.join(task.arguments)}\n".encode())
        variables = {**os.environ, **task.environment, **_variables_on(task, n)}
        with log:
            process = subprocess.Popen(
                [sys.executable, *task.arguments],
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalProcess(process, owns_descendants=task.role.kind == "learner")

    def sweep(self, running: Sequence[RunningRole]) -> None:
        """Kill processes that left their role's session: orphans become our children
        (`megarl.run.process.adopt_orphans`).
        """
        roles = [process.pid for process in running]
        orphans = [child for child in psutil.Process().children() if child.pid not in roles]
        family: list[psutil.Process] = []
        for orphan in orphans:
            family += (orphan, *_descendants(orphan))
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=KILL_LIMIT_S)


def _variables_on(task: RoleCommand, n: int) -> dict[str, str]:
    """Return the variables of a role that only its n-th node knows."""
    node = task.place.nodes[n]
    variables = {
        SUPERVISOR: str(os.getpid()),
        NODE: node.name,
        NODE_RANK: str(n),
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": f"={node.interface}",
    }
    # not the controller: it compiles nothing, and its prompts need a large TMPDIR
    if task.role.kind != "controller":
        variables |= devices.kernel_caches()
        variables |= devices.search_path()
        variables |= devices.toolkit()
        variables |= devices.temporary_folder()
    return variables


class LocalProcess:
    """A session leader and everything it started. owns_descendants: all descendants
    belong to the role, even in sessions of their own (as torchrun's ranks, unlike a
    grader's programs).
    """

    def __init__(self, process: subprocess.Popen[bytes], owns_descendants: bool) -> None:
        self._process = process
        self._owns_descendants = owns_descendants
        self.pid = process.pid

    def status(self) -> int | None:
        """Return None while the leader runs, then its exit status."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the leader."""
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal to the session leader, if it is alive."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the group, whose number stays taken while any of its processes lives."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait_gone(self) -> None:
        """Wait for the leader, and remove the session's shared memory."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_LIMIT_S)
            remove_shared_memory(self.pid)

    def why_stuck(self) -> Stuck | None:
        """Return "stopped" if one of its processes is stopped."""
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.pid)
            if any(map(self._is_stopped, (leader, *_descendants(leader)))):
                return "stopped"
        return None

    def _is_stopped(self, process: psutil.Process) -> bool:
        """Return whether a process of the role is stopped."""
        try:
            if process.status() not in STOPPED:
                return False
            return self._owns_descendants or os.getsid(process.pid) == self.pid
        except (psutil.NoSuchProcess, ProcessLookupError):
            return False

    def node_state(self) -> NodeState:
        """Return "up": this is the role's node."""
        return "up"


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the process's children, theirs and so on; none if it has ended."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
