"""`megarl serve --join RUN`: an additional server for a run, from another shell, Slurm
job or machine that sees its directory.

    checks ─► Join ─► Joined(5)
           ─► `megarl serve --join RUN --index 5 --port P`, which dies with this process
           ─► Join again every BEAT_S
           ─► Stop, or RUN/summary.json: the run has ended ──► exit 0
    SIGTERM ─► Leave, repeated ─► Ack: its requests continue elsewhere
            ──► exit 0, within LEAVE_LIMIT_S anyway

If a run was told to stop, or lost a node, the server joins it again once it is resumed,
wherever that is: its new endpoints and keys are in the run directory.

Whoever can read RUN/endpoints.json has the keys to join. The server listens on
loopback, or on the network that the run names.
"""

import json
import signal
import socket
import time
import uuid
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import structs

from megarl.core.base import terminal
from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import (
    Ack,
    FromServer,
    Join,
    Joined,
    Leave,
    Refused,
    Reply,
    Stop,
    Wait,
)
from megarl.core.base.rundir import Endpoints, RunDir
from megarl.core.base.types import decode
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, load
from megarl.run.closing import ending_of
from megarl.run.launcher import LocalLauncher, RoleCommand, RunningRole, task
from megarl.run.logs import last_problem
from megarl.run.nodes import LOOPBACK, OF_SLURM, Node, this_node
from megarl.run.placement import Place
from megarl.run.process import MAKE_ROOM, SIGNALS, StopRequest, adopt_orphans, stop_requests
from megarl.run.restart import Role

BEAT_S = 2.0
TICK_S = 0.2
JOIN_LIMIT_S = 20.0
"""Time limit from the first request to the first answer. A controller that was just
started takes some seconds.
"""
SILENT_LIMIT_S = 120.0
"""How long the controller may be silent later; its restart takes less."""
LEAVE_LIMIT_S = 20.0
"""Time limit from the request to end to the exit. Slurm kills all processes 30 s after
its SIGTERM (KillWait).
"""
FOLLOW_LIMIT_S = 1800.0
"""How long servers, which hold GPUs, wait for a run that was told to stop and is in the
queue again.
"""


def main(run: Path, interface: str) -> int:
    """Join a run. Return the exit status: 0 when the run ends, or on SIGTERM or Ctrl-C;
    138 on SIGUSR1, after which a Slurm job is requeued. interface: the network
    interface to listen on; empty: the run's. MegarlError, before a server starts, if it
    cannot join.
    """
    adopt_orphans()
    with stop_requests() as request:
        session = serve(run, interface, request)
        while not request.count and resumed(RunDir(run.resolve()), session, request):
            session = serve(run, interface, request)
    return 128 + request.signal if request.signal == signal.SIGUSR1 else 0


def serve(run: Path, interface: str, request: StopRequest) -> str:
    """Join the run and serve it until it ends or this server is asked to end. Return
    the name of the run's session, its present life.
    """
    rundir, recipe, endpoints = opened(run)
    gpus = recipe.resources.server_tensor_parallel
    # A server of the run that is down for a moment leaves its port free. Of one port
    # more than the run has servers, at least one belongs to none of them.
    node = listening(recipe, endpoints, interface, 1 + len(endpoints.servers))
    _check_gpus(node, endpoints, gpus)
    urls = {port: f"http://{node.address}:{port}" for port in node.ports}
    port = next(port for port, url in urls.items() if url not in endpoints.servers)
    place = Place((node,), node.gpus[:gpus])
    command = task(recipe, rundir, Role("server"), port, place)
    join = ("-m", "megarl", "serve", "--join", str(rundir.path))
    # Without the last word: Guest appends the number that the controller gives.
    arguments = (*join, "--interface", interface, "--port", str(port), "--index")
    guest = Guest(endpoints, replace(command, arguments=arguments), urls[port], request)
    with closing(guest.link):
        guest.stay()
    return endpoints.session


def _check_gpus(node: Node, endpoints: Endpoints, gpus: int) -> None:
    """Raise MegarlError unless this machine has as many GPUs as a server takes (`gpus`)
    or, if the run is on CPUs, none.
    """
    if endpoints.gpus:
        fits = len(node.gpus) >= gpus
        needs = f"{gpus} GPUs (resources.server_tensor_parallel)"
    else:
        fits = not node.gpus
        needs = "CPUs (CUDA_VISIBLE_DEVICES= hides GPUs)"
    if not fits:
        raise MegarlError(
            f"a server of this run needs {needs}, and this machine shows {len(node.gpus)} GPUs"
        )


def resumed(rundir: RunDir, session: str, request: StopRequest) -> bool:
    """Return True once the run has another session than this one, with a controller;
    False if it ends for good, or after FOLLOW_LIMIT_S.
    """
    terminal.say(
        f"megarl: if the run goes on within {FOLLOW_LIMIT_S / 60:g} minutes, this server joins it"
        " again",
        flush=True,
    )
    until = time.monotonic() + FOLLOW_LIMIT_S
    while not request.count and time.monotonic() < until:
        with suppress(OSError, MegarlError):  # a shared file system may be away for a while
            if rundir.summary.exists():
                by_hand = rundir.stop_asked() and rundir.stop_signal() not in MAKE_ROOM
                if by_hand or read_json(rundir.summary).get("outcome") != "stopped":
                    return False
            # a new session first removes the old status, so this is its controller's
            elif rundir.endpoints().session != session and rundir.status.exists():
                return True
        time.sleep(BEAT_S)
    return False


def opened(run: Path) -> tuple[RunDir, Recipe, Endpoints]:
    """Return directory, recipe and endpoints of a live run. The recipe has the
    directory's path on this machine.
    """
    path = run.resolve()
    rundir = RunDir.opened(path)
    if rundir.summary.exists():
        raise MegarlError(f"{run}: this run has ended ({rundir.summary} exists); resume it first")
    recipe = load(
        str(rundir.recipe),
        [f"run.dir={json.dumps(str(path.parent))}", f"run.name={json.dumps(path.name)}"],
    )
    endpoints = rundir.endpoints()
    JournalReader(rundir.rollouts).has_tickets()  # raises for another schema
    refused = {
        "resources.colocate=true": recipe.resources.colocate,
        "weights.transport=cuda_ipc": recipe.weights.transport == "cuda_ipc",
    }
    for key, is_set in refused.items():
        if is_set:
            raise MegarlError(
                f"{run}: no server can join a run with {key}, whose servers share the learner's"
                " GPUs"
            )
    if not Path(recipe.model.path).exists():
        raise MegarlError(
            f"model.path: {recipe.model.path} is not here; start in the folder where the run was"
            " started"
        )
    return rundir, recipe, endpoints


def listening(recipe: Recipe, endpoints: Endpoints, interface: str, ports: int = 0) -> Node:
    """Return this machine with its address on the run's network and free ports.
    interface: the network interface to listen on; empty: the run's. ports: the number
    of free ports.
    """
    controller = str(urlsplit(endpoints.controller).hostname)
    if controller == LOOPBACK and interface not in ("", OF_SLURM):
        raise MegarlError(
            "--interface: the run listens only on loopback; start it with"
            f" run.interface={interface}"
        )
    return this_node(ports, interface or recipe.run.interface, controller)


class Guest:
    """A server that joins a run, and its conversation with the controller. command: the
    server's, without the number that it will get; url: where it will listen.
    """

    def __init__(
        self, endpoints: Endpoints, command: RoleCommand, url: str, request: StopRequest
    ) -> None:
        self._began = time.monotonic()
        self._command = command
        self._request = request
        self._address = endpoints.controller
        self._endpoints_file = command.rundir.endpoints_file
        self._written = self._endpoints_file.stat().st_mtime_ns
        self._join = Join(life=uuid.uuid4().hex, url=url)
        self._launcher = LocalLauncher()
        self._process: RunningRole | None = None
        self.link = ControllerLink(
            self._address,
            endpoints.link,
            self._why_end,
            resend_s=JOIN_LIMIT_S,
            limit_s=JOIN_LIMIT_S,
        )

    def stay(self) -> None:
        """Join, serve, leave. MegarlError if the controller refuses or is silent, or
        the server ends by itself.
        """
        try:
            reason = self._stay()
            terminal.say(f"megarl: leaving: {reason}", flush=True)
            # of a server that ended by itself; None while it lives
            status = self._process.status() if self._process else None
            if self._process and (self._request.count or status is not None):
                self._leave()  # else the run has ended, and nobody would answer
        finally:
            if self._process:
                self._process.kill()
                self._process.wait_gone()
                self._launcher.sweep([])
        if status is not None:
            log = self._command.log()
            problem = last_problem(log) or "see its log"
            raise MegarlError(f"server {self._join.server} {ending_of(status)}: {problem} ({log})")

    def _stay(self) -> str:
        """Serve until there is a reason to end; return it."""
        while True:
            reason = self._beat() or self._why_end()
            next_beat = time.monotonic() + BEAT_S
            while not reason and time.monotonic() < next_beat:
                time.sleep(TICK_S)
                reason = self._why_end()
            if reason:
                return reason

    def _beat(self) -> str:
        """Announce the server to the controller, and start it at its first `Joined`.
        Return a reason to end, or "" to go on. The controller answers `Wait` as long as
        another server has this address, such as an earlier one that is still leaving.
        """
        try:
            reply = self._say(self._join)
        except Interrupted as ended:
            return str(ended)
        except MegarlError as error:
            raise MegarlError(str(error) if self._process else self._unheard()) from None
        match reply:
            case Joined():
                self._join = structs.replace(self._join, server=reply.server)
                if self._process is None:
                    self._start(reply.server)
            case Wait() if time.monotonic() - self._began > JOIN_LIMIT_S and self._process is None:
                raise MegarlError(reply.reason)
            case Stop():
                return f"the run is ending: {reply.reason}"
            case Refused():
                raise MegarlError(reply.error)
        return ""

    def _start(self, server: int) -> None:
        """Start the server's process under the number that the controller gave it."""
        arguments = (*self._command.arguments, str(server))
        role = Role("server", server)
        self._command = replace(self._command, role=role, arguments=arguments)
        # Slurm sends SIGTERM to all processes of a step at once, but the server must go
        # on until its requests have left.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = self._launcher.start(self._command)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        terminal.say(
            f"megarl: server {server} starts at {self._join.url}; its log: {self._command.log()}",
            flush=True,
        )
        self.link.limit_s = SILENT_LIMIT_S

    def _leave(self) -> None:
        """Ask to leave until the controller agrees, LEAVE_LIMIT_S has passed, a second
        signal comes, or the run ends.
        """
        until = time.monotonic() + LEAVE_LIMIT_S

        def reason_to_give_up() -> str:
            """Return a text that is not empty once nobody should wait any longer."""
            is_late = time.monotonic() > until
            was_asked_twice = self._request.count > 1
            return "late, or asked twice" if is_late or was_asked_twice else ""

        self.link.interrupted = reason_to_give_up
        with suppress(MegarlError, Interrupted):
            while not isinstance(self._say(Leave(life=self._join.life)), Ack | Stop):
                time.sleep(TICK_S)

    def _say(self, word: FromServer) -> Reply:
        """Send a message to the controller and return its reply."""
        reply: Reply = decode(self.link.ask(word), Reply)
        return reply

    def _why_end(self) -> str:
        """Return a reason to end; empty if there is none."""
        if self._request.count:
            return f"{signal.Signals(self._request.signal).name} came"
        if self._process and self._process.status() is not None:
            return "the server has ended"
        with suppress(OSError):  # a shared file system may be away for a while
            if self._command.rundir.summary.exists():
                return "the run has ended"
            if self._endpoints_file.stat().st_mtime_ns != self._written:
                return "the run has ended"
        return ""

    def _unheard(self) -> str:
        """Return a text that says why the controller has not answered."""
        parts = urlsplit(self._address)
        host = str(parts.hostname)
        address = f"{self._address}, named in {self._endpoints_file}"
        try:
            socket.create_connection((host, int(parts.port or 0)), JOIN_LIMIT_S / 4).close()
        except ConnectionRefusedError:
            text = f"nobody listens at {address}: the run has ended, or its controller is down"
            if host == LOOPBACK:
                text += ", or it is on another machine and has no run.interface"
            return text
        except OSError as error:
            return (
                f"this machine does not reach the run's controller at {address} ({error}): are they"
                " on one network?"
            )
        return (
            f"the controller at {address}, does not answer: the keys in that file are not its own,"
            " or it hangs"
        )
