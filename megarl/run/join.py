"""`megarl serve --join RUN`: a server more for a run, from another shell, Slurm job or machine that sees the run directory.

    checks ─► Join ─► Joined(5) ─► `megarl serve --join RUN --index 5 --port P`, a process that dies with this one
              Join again every BEAT_S ─► Stop, or RUN/summary.json: the run has ended ──► exit 0
    SIGTERM ─► Leave again and again ─► Ack: its requests go on elsewhere ─────────────► exit 0, within LEAVE_LIMIT_S anyway

The controller brings the server to the current weights, without a pause of the others, and then sends it requests. Whoever can
read RUN/endpoints.json has the keys to join. It listens on loopback, or on the network that the run's recipe names.
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

from megarl.core.base.errors import MegarlError
from megarl.core.base.link import ControllerLink, Interrupted
from megarl.core.base.messages import Ack, Join, Joined, Leave, Refused, Reply, Request, Stop, Wait
from megarl.core.base.rundir import Endpoints, RunDir
from megarl.core.base.types import decode
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, load
from megarl.run.closing import how
from megarl.run.launcher import LocalLauncher, RunningRole, task
from megarl.run.nodes import LOOPBACK, OF_SLURM, Node, here
from megarl.run.observe import last_problem
from megarl.run.placement import Place
from megarl.run.process import SIGNALS, StopRequest, adopt_orphans, stop_requests
from megarl.run.restart import Role

BEAT_S, TICK_S = 2.0, 0.2
JOIN_LIMIT_S = 20.0
"""From the first word to the first answer. A controller that has just been started takes some seconds."""
SILENT_LIMIT_S = 120.0
"""How long the controller may be silent later: its restart takes less."""
LEAVE_LIMIT_S = 20.0
"""From the request to end to the exit. Slurm kills what is left 30 s after its SIGTERM (KillWait)."""


def main(run: Path, interface: str) -> int:
    """Serve until the run has ended (0), SIGTERM or Ctrl-C (0), or SIGUSR1, after which a job goes on elsewhere (138).

    interface: the network interface to listen on; empty: the run's. MegarlError, before a server starts, if it cannot join.
    """
    rundir, recipe, endpoints = opened(run)
    place = _place(recipe, endpoints, interface)
    adopt_orphans()
    with stop_requests() as asked:
        guest = Guest(rundir, recipe, endpoints, place, interface, asked)
        with closing(guest.link):
            guest.stay()
    return 128 + asked.signal if asked.signal == signal.SIGUSR1 else 0


def opened(run: Path) -> tuple[RunDir, Recipe, Endpoints]:
    """Return what a live run says of itself. Its recipe names the directory as it is called here."""
    path = run.resolve()
    rundir = RunDir.opened(path)
    if rundir.summary.exists():
        raise MegarlError(f"{run}: this run has ended ({rundir.summary} exists); resume it first")
    recipe = load(str(rundir.recipe), [f"run.dir={json.dumps(str(path.parent))}", f"run.name={json.dumps(path.name)}"])
    endpoints = rundir.endpoints()
    JournalReader(rundir.rollouts).begun()  # raises for another schema
    for key, value in (
        ("resources.colocate", recipe.resources.colocate),
        ("weights.transport", recipe.weights.transport),
    ):
        if value in (True, "cuda_ipc"):
            raise MegarlError(
                f"{run}: no server joins a run with {key}={str(value).lower()}: its servers share the learner's GPUs"
            )
    if not Path(recipe.model.path).exists():
        raise MegarlError(f"model.path: {recipe.model.path} is not here; start where the run was started")
    return rundir, recipe, endpoints


def listening(recipe: Recipe, endpoints: Endpoints, interface: str, ports: int = 0) -> Node:
    """Return this machine as the server sees it: its address on the run's network, and free ports there."""
    controller = str(urlsplit(endpoints.controller).hostname)
    if controller == LOOPBACK and interface not in ("", OF_SLURM):
        raise MegarlError(f"--interface: the run listens on loopback alone; start it with run.interface={interface}")
    return here(ports, interface or recipe.run.interface, controller)


def _place(recipe: Recipe, endpoints: Endpoints, interface: str) -> Place:
    node = listening(recipe, endpoints, interface, 1 + len(endpoints.servers))
    width = recipe.resources.server_tensor_parallel
    if endpoints.gpus and len(node.gpus) < width:
        raise MegarlError(
            f"resources.server_tensor_parallel: {width} GPUs a server, and this machine shows {len(node.gpus)}"
        )
    if node.gpus and not endpoints.gpus:
        raise MegarlError(
            "the run is on CPUs, and this machine shows a GPU; hide it: CUDA_VISIBLE_DEVICES= megarl serve …"
        )
    return Place((node,), node.gpus[:width])


class Guest:
    """A server beside a run, and its conversation with the controller."""

    def __init__(
        self, rundir: RunDir, recipe: Recipe, endpoints: Endpoints, place: Place, interface: str, asked: StopRequest
    ) -> None:
        self._rundir, self._recipe, self._endpoints, self._place, self._asked = rundir, recipe, endpoints, place, asked
        node = place.nodes[0]
        urls = {port: f"http://{node.address}:{port}" for port in node.ports}
        self._port = next(port for port, url in urls.items() if url not in endpoints.servers)  # theirs may be down now
        self._interface, self._written = interface, rundir.endpoints_file.read_bytes()
        self._began = time.monotonic()
        self._join = Join(life=uuid.uuid4().hex, url=urls[self._port])
        self._launcher = LocalLauncher()
        self._process: RunningRole | None = None
        self.link = ControllerLink(
            endpoints.controller, endpoints.link, self._why_end, resend_s=JOIN_LIMIT_S / 4, limit_s=JOIN_LIMIT_S
        )

    def stay(self) -> None:
        """Join, serve, leave. MegarlError if the controller refuses or is silent, or the server ends by itself."""
        why = ""
        try:
            while not why:
                why = self._beat() or self._why_end()
                until = time.monotonic() + BEAT_S
                while not why and time.monotonic() < until:
                    time.sleep(TICK_S)
                    why = self._why_end()
            print(f"megarl: leaving: {why}", flush=True)
            status = self._process.status() if self._process else None
            if self._process and (self._asked.count or status is not None):
                self._leave()
        finally:
            if self._process:
                self._process.kill()
                self._process.wait_gone()
                self._launcher.sweep([])
        if status is not None:
            log = self._rundir.log("server", self._place.nodes[0].name, self._join.server)
            raise MegarlError(f"server {self._join.server} {how(status)}: {last_problem(log) or 'see its log'} ({log})")

    def _beat(self) -> str:
        """Say that we are there; the first time, start the server. Return why to end, if that is the answer."""
        try:
            reply = self._say(self._join)
        except Interrupted as ended:
            return str(ended)
        except MegarlError as error:
            raise MegarlError(str(error) if self._process else self._unheard()) from None
        match reply:
            case Joined() if self._process is None:
                self._start(reply.server)
            case Joined():
                self._join = structs.replace(self._join, server=reply.server)
            case Wait() if time.monotonic() - self._began > JOIN_LIMIT_S and self._process is None:
                raise MegarlError(reply.reason)
            case Stop():
                return f"the run is ending: {reply.reason}"
            case Refused():
                raise MegarlError(reply.error)
        return ""

    def _start(self, server: int) -> None:
        self._join = structs.replace(self._join, server=server)
        role = task(self._recipe, self._rundir, Role("server", server), self._port, self._place)
        arguments = ["-m", "megarl", "serve", "--join", str(self._rundir.path), "--interface", self._interface]
        arguments += ["--index", str(server), "--port", str(self._port)]
        # Slurm sends SIGTERM to all processes of a step at once. The server's part is to go on until its requests have left.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = self._launcher.start(replace(role, arguments=tuple(arguments)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        print(f"megarl: server {server} starts at {self._join.url}; its log: {role.log()}", flush=True)
        self.link.limit_s = SILENT_LIMIT_S

    def _leave(self) -> None:
        """Say goodbye until all has left, the limit is over or the run is."""
        until = time.monotonic() + LEAVE_LIMIT_S
        self.link.interrupted = lambda: "asked twice" if self._asked.count > 1 or time.monotonic() > until else ""
        with suppress(MegarlError, Interrupted):
            while not isinstance(self._say(Leave(life=self._join.life)), Ack | Stop):
                time.sleep(TICK_S)

    def _say(self, request: Request) -> Reply:
        reply: Reply = decode(self.link.ask(request), Reply)
        return reply

    def _why_end(self) -> str:
        """Return why not to go on; empty if there is no reason."""
        if self._asked.count:
            return f"{signal.Signals(self._asked.signal).name} came"
        if self._process and self._process.status() is not None:
            return "the server has ended"
        with suppress(OSError):  # a shared file system may be away for a while
            if self._rundir.summary.exists() or self._rundir.endpoints_file.read_bytes() != self._written:
                return "the run has ended"
        return ""

    def _unheard(self) -> str:
        """Return why nobody has answered."""
        address, keys = self._endpoints.controller, self._rundir.endpoints_file
        at = urlsplit(address)
        try:
            socket.create_connection((str(at.hostname), int(at.port or 0)), JOIN_LIMIT_S / 4).close()
        except ConnectionRefusedError:
            other = ", or it is on another machine and has no run.interface" if at.hostname == LOOPBACK else ""
            return f"nobody listens at {address}, named in {keys}: the run has ended, or its controller is down{other}"
        except OSError as error:
            return f"this machine does not reach the run's controller at {address} ({error}): are they on one network?"
        return f"the controller at {address} does not answer: the keys in {keys} are not its own, or it hangs"
