"""`megarl train`: start the roles, watch them, restart what dies, end the run.

    checks ─► RUN/recipe.yaml, RUN/endpoints.json ─► servers, controller, learner start at once (they wait for each other)
           ─► every tick: who died? (restart.py)  who hangs? (watch.py)  what do the files say? (observe.py ─► view.py)
           ─► the learner has left: controller and servers are ended, summary and report written

Ctrl-C or SIGTERM writes RUN/stop: the learner saves and leaves. A second one kills. Every role dies with this process.
"""

import json
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from rich.console import Console
from rich.live import Live

from megarl.monitor import summary
from megarl.process import adopt_orphans
from megarl.recipe import Recipe, dump
from megarl.rundir import Endpoints, LinkKeys, RunDir, append_jsonl, free_ports, write_atomically
from megarl.scaling.outlook import enough
from megarl.supervisor import checks, devices
from megarl.supervisor.launcher import Launcher, LocalLauncher, Running, sweep, task
from megarl.supervisor.observe import Observer, last_lines
from megarl.supervisor.restart import Done, GiveUp, Nothing, Restart, RestartPolicy, Role
from megarl.supervisor.view import Frame, RoleView, line, render, warnings
from megarl.supervisor.watch import Watch, stopped_roles

TICK_S = 0.1
LOOK_S = 0.5
WATCH_S = 5.0
LINE_S = 10.0
"""Between lines where the output is no terminal."""
SAVE_LIMIT_S = 600.0
"""From the wish to stop to the learner's end: the step under way, and a checkpoint."""
LEAVE_LIMIT_S = 10.0
"""For the controller, when all else has ended."""


@dataclass(frozen=True)
class Outcome:
    """How the run ended: all steps done; stopped by a wish; or failed. `role`: whose log says why."""

    kind: Literal["finished", "stopped", "failed"]
    reason: str
    role: Role | None = None


class Wish:
    """How often the user has asked us to end."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0

    def heard(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.signal = number


def main(recipe: Recipe) -> int:
    """Run to the end. 0 all steps done; 1 failed; 128 + signal when asked to stop."""
    rundir = RunDir.of(recipe)
    checks.check_inputs(recipe)
    with checks.lock(rundir):
        resumed = checks.check_history(recipe, rundir)
        endpoints = prepare(recipe, rundir)
        adopt_orphans()
        console = Console()
        if resumed:
            console.print(f"going on with {rundir.path}", highlight=False)
        began = time.monotonic()
        with wishes() as wish:
            supervisor = Supervisor(recipe, rundir, endpoints, LocalLauncher(), wish)
            with Screen(console) as screen:
                outcome = supervisor.run(screen)
        closing(console, recipe, rundir, outcome, time.monotonic() - began)
    if outcome.kind == "stopped":
        return 128 + wish.signal if wish.count else 0
    return 0 if outcome.kind == "finished" else 1


def prepare(recipe: Recipe, rundir: RunDir) -> Endpoints:
    """What the roles read before anything else. The recipe says `resume: auto`: a role that starts again goes on."""
    rundir.create()
    rundir.stop_file.unlink(missing_ok=True)
    rundir.failure_file.unlink(missing_ok=True)
    rundir.status.unlink(missing_ok=True)
    again = recipe.model_copy(update={"run": recipe.run.model_copy(update={"resume": "auto"})})
    write_atomically(rundir.recipe, dump(again).encode())
    ports = free_ports(2 + recipe.resources.servers)
    server_ports = checks.server_ports(recipe) or ports[2:]
    host = "127.0.0.1" if recipe.serving.host == "0.0.0.0" else recipe.serving.host
    endpoints = Endpoints(
        session=uuid.uuid4().hex,
        controller=f"tcp://127.0.0.1:{ports[0]}",
        servers=tuple(f"http://{host}:{port}" for port in server_ports),
        api_key=secrets.token_hex(16),
        admin_key=secrets.token_hex(16),
        link=LinkKeys.new(),
        rendezvous_port=ports[1],
        gpus=devices.needed(recipe) if devices.gpus() else 0,
    )
    rundir.write_endpoints(endpoints)
    return endpoints


@contextmanager
def wishes() -> Iterator[Wish]:
    """Ctrl-C, SIGTERM and a closed terminal are counted instead of ending us."""
    wish = Wish()
    before = {n: signal.signal(n, wish.heard) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Screen:
    """Where frames go: a live picture in a terminal, else a line every `LINE_S` seconds and each warning once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last, self._stopping = -LINE_S, ""
        self._warned: set[str] = set()

    def __enter__(self) -> "Screen":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, frame: Frame) -> None:
        if self._live:
            self._live.update(render(frame), refresh=True)
        elif frame.elapsed_s - self._last >= LINE_S or frame.stopping != self._stopping:
            self._last, self._stopping = frame.elapsed_s, frame.stopping
            print(line(frame), flush=True)
            for warning in warnings(frame):
                kind = warning.lstrip("0123456789.%")
                if kind not in self._warned:
                    self._warned.add(kind)
                    print(f"! {warning}", flush=True)

    def say(self, text: str) -> None:
        """One lasting line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Supervisor:
    """The roles of one life of a run."""

    def __init__(
        self,
        recipe: Recipe,
        rundir: RunDir,
        endpoints: Endpoints,
        launcher: Launcher,
        wish: Wish,
        watch: Watch | None = None,
    ) -> None:
        self.recipe, self.rundir, self.endpoints, self.launcher, self.wish = recipe, rundir, endpoints, launcher, wish
        self.roles = [Role("server", i) for i in range(recipe.resources.servers)] + [
            Role("controller"),
            Role("learner"),
        ]
        self.shares = devices.divide(recipe, devices.gpus())
        self.policy, self.watch = RestartPolicy(), watch or Watch()
        self.observer = Observer(rundir, [rundir.logs / f"{role.name}.log" for role in self.roles])
        self.running: dict[Role, Running] = {}
        self.due: dict[Role, float] = {}
        self.restarts = dict.fromkeys(self.roles, 0)
        self.began = time.monotonic()
        self.stopping_since: float | None = None
        self._looked = self._watched = 0.0

    def run(self, screen: Screen) -> Outcome:
        """Until the run's end; no process is left then."""
        self.screen = screen
        try:
            for role in self.roles:
                self._start(role)
            while (outcome := self._tick()) is None:
                time.sleep(TICK_S)
            return outcome
        finally:
            self._end_all()
            self.observer.look()

    def frame(self) -> Frame:
        """What there is to see now."""
        now = time.monotonic()
        views = {}
        for role in self.roles:
            process = self.running.get(role)
            state = "running" if process else "restarting" if role in self.due else "ended"
            views[role] = RoleView(state, now - process.started if process else 0.0, self.restarts[role])
        return Frame(self.recipe, self.observer, now - self.began, views, self._stopping())

    def _tick(self) -> Outcome | None:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.observer.look()
            self.screen.show(self.frame())
        if now - self._watched >= WATCH_S and self.stopping_since is None:
            self._watched = now
            self._end_hung(now)
        for role in [role for role, at in self.due.items() if at <= now]:
            del self.due[role]
            self._start(role)
        return self._deaths(now) or self._wishes(now)

    def _start(self, role: Role) -> None:
        if role.kind == "controller":
            self.observer.forget_status()
        self.watch.forget(role)
        url = self.endpoints.servers[role.index] if role.kind == "server" else ""
        port = int(url.rpartition(":")[2]) if url else 0
        what = task(self.recipe, self.rundir.recipe, role, port, self.shares[role], self.rundir.logs)
        self.running[role] = self.launcher.start(what)
        self._note("started", role, pid=self.running[role].pid)

    def _deaths(self, now: float) -> Outcome | None:
        """Deal with every role that has ended since the last tick; the learner first, for its end is the run's."""
        ended = [(role, s) for role, p in self.running.items() if (s := p.status()) is not None]
        for role, status in sorted(ended, reverse=True, key=lambda e: e[0].kind == "learner"):
            self.running.pop(role).kill()  # what it left behind
            self._note("ended", role, status=status)
            self.observer.look()
            outcome = self._after(role, status, now)
            if outcome is not None:
                return outcome
        if ended:
            sweep([p.pid for p in self.running.values()])
        return None

    def _after(self, role: Role, status: int, now: float) -> Outcome | None:
        if role.kind == "learner" and self.rundir.failure_file.exists():
            return Outcome("failed", self.rundir.failure_file.read_text(), role)
        if self.stopping_since is not None and not (role.kind == "learner" and status == 0):
            if role.kind != "learner":
                return None  # no longer needed: the learner saves by itself
            return Outcome("failed", f"{role.name} {_how(status)} before it had saved", role)
        match self.policy.died(role, status, now, self.observer.steps_made):
            case Done():
                if self.wish.count or self.rundir.stop_file.exists():
                    return Outcome("stopped", "stopped as asked")
                return Outcome("finished", self._finished())
            case Nothing():
                return None
            case GiveUp(culprit, reason):
                return Outcome("failed", reason, culprit)
            case Restart(culprit, delay):
                self.restarts[culprit] += 1
                self.due[culprit] = now + delay
                if culprit.kind == "learner" and Role("controller") not in self.running:
                    self.due.setdefault(Role("controller"), now)  # it had left, thinking the run was over
                self._note("restart", culprit, delay_s=delay)
                self.screen.say(
                    f"{culprit.name} {_how(status)}; starting it again{f' in {delay:g} s' if delay else ''}"
                )
        return None

    def _finished(self) -> str:
        newest = max(self.observer.evaluations.items(), default=(0, {}))[1]
        if self.recipe.run.stop_at_asymptote and newest.get("enough"):
            return f"at the asymptote: {enough(newest)}"
        return "all steps done"

    def _wishes(self, now: float) -> Outcome | None:
        if self.wish.count and self.stopping_since is None:
            self.stopping_since = now
            self.rundir.stop_file.touch()
            self._note("stopping", None, signal=self.wish.signal)
            if Role("learner") not in self.running:
                return Outcome("stopped", "stopped while the learner was not running; its last checkpoint stands")
        if self.wish.count > 1:
            return Outcome("stopped", "killed as asked; the last checkpoint stands")
        if self.stopping_since is not None and now - self.stopping_since > SAVE_LIMIT_S:
            return Outcome("failed", f"the learner did not save and leave within {SAVE_LIMIT_S:g} s", Role("learner"))
        return None

    def _end_hung(self, now: float) -> None:
        """Kill what does not move; the next tick sees it dead."""
        stopped = stopped_roles({role: p.pid for role, p in self.running.items()})
        hung = self.watch.hung(stopped, self.observer.status, self.observer.status_age, set(self.running), now)
        for role, why in hung.items():
            self.screen.say(f"{role.name} {why}; killing it")
            self._note("hung", role, why=why)
            self.running[role].kill()

    def _end_all(self) -> None:
        """Servers and learner have nothing to finish; the controller may close its journal. Nothing is left after this."""
        for role in [role for role in self.running if role.kind != "controller"]:
            self.running.pop(role).kill()
        for process in self.running.values():
            process.terminate()
            limit = time.monotonic() + LEAVE_LIMIT_S
            while process.status() is None and time.monotonic() < limit:
                time.sleep(TICK_S)
            process.kill()
        self.running.clear()
        sweep()

    def _stopping(self) -> str:
        if self.stopping_since is None:
            return ""
        seconds = time.monotonic() - self.stopping_since
        return f"stopping: the learner finishes its step and saves ({seconds:.0f} s); Ctrl-C again kills"

    def _note(self, event: str, role: Role | None, **more: object) -> None:
        row = {"time": time.time(), "session": self.endpoints.session, "event": event}
        append_jsonl(self.rundir.logs / "supervisor.jsonl", row | ({"role": role.name} if role else {}) | more)


def closing(console: Console, recipe: Recipe, rundir: RunDir, outcome: Outcome, wall_s: float) -> None:
    """Summary and report on disk, and what a user wants to know on the screen; a failure's log last, where it is seen."""
    values = summary.summarise(recipe, rundir) | {
        "outcome": outcome.kind,
        "reason": outcome.reason,
        "wall_seconds": round(wall_s, 1),
    }
    write_atomically(rundir.summary, json.dumps(values, indent=2).encode())
    report(rundir)
    console.print(summary.render(values, recipe, rundir))
    if outcome.role is not None:
        log = rundir.logs / f"{outcome.role.name}.log"
        print(f"\nThe end of {log}:", *last_lines(log), sep="\n  ", file=sys.stderr)
    if outcome.kind == "failed":
        print(f"\nmegarl: {outcome.reason}; see {rundir.logs}", file=sys.stderr)


def report(rundir: RunDir) -> None:
    """RUN/report.html and RUN/reward.png. Imported at the end: matplotlib has no place in a run that lives for weeks."""
    from megarl.monitor.report import write_report

    write_report(rundir)


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
