"""`megarl train`: start the roles, watch them, restart what dies, end the run.

    checks ─► RUN/recipe.yaml, RUN/endpoints.json ─► servers, controller, learner start at once (they wait for each other)
           ─► every tick: who died? (restart.py)  who hangs? (watch.py)  what do the files say? (observe.py ─► view.py)
           ─► the learner has exited: controller and servers are ended, summary and report written

Ctrl-C or SIGTERM, also to controller or learner, writes RUN/stop: the learner saves and exits. A Ctrl-C after that kills. Every
role dies with this process. Losing the screen (a pager, a `tee`) ends nothing.
"""

import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megarl.core.base.rundir import Endpoints, RunDir, append_jsonl
from megarl.core.evaluation.forecast import not_worth_it
from megarl.core.recipe import Recipe
from megarl.run import checks
from megarl.run.closing import Death, RunEnd, WriteReport, closing, how
from megarl.run.launcher import Launcher, RunningRole, task
from megarl.run.observe import Observer, last_problem, log_of, log_sizes
from megarl.run.placement import Place, described, place
from megarl.run.prepare import prepare
from megarl.run.process import StopRequest, adopt_orphans, lock, outlive_screen, stop_requests
from megarl.run.restart import Done, Drop, Elsewhere, GiveUp, Nothing, Restart, RestartPolicy, Role
from megarl.run.srun import chosen
from megarl.run.view import Frame, RoleView, Screen
from megarl.run.watch import Watch

TICK_S = 0.1
LOOK_S = 0.5
WATCH_S = 5.0
SAVE_LIMIT_S = 540.0
"""From the request to stop to the learner's exit: its current step, and a checkpoint. Slurm ends a job 600 s after SIGUSR1."""
MAKE_ROOM = (signal.SIGTERM, signal.SIGUSR1)
"""Signals to a job that has to end now and resumes later."""
LEAVE_LIMIT_S = 10.0
"""How long the controller may take to exit once all else has ended."""
PORTS_A_ROLE = 2
"""Ports per server; controller and learner count as two each, as they also serve metrics.

Every node is asked for all ports, before roles are placed: nodes on one machine may have found the same.
"""
EARLY_STATUS = 1
"""Stands for the 0 of a learner that leaves before the run's end: a crash that did not look like one."""
START_ELSEWHERE = 75
"""Exit status (EX_TEMPFAIL) of a run that can resume, but not on these nodes."""
MOST_FRUITLESS_STARTS = 5
"""A run that was started more often since its newest step, and loses a node again, fails: the nodes are not at fault."""


def main(recipe: Recipe, fingerprints: checks.Fingerprints, host_bytes: float, write_report: WriteReport) -> int:
    """Run to the end. Return 0: all steps done; 1: failed; 75: to be started again elsewhere; 128 + signal: asked to stop.

    fingerprints: those of the run's inputs, already read and checked. host_bytes: see checks.check_host. write_report: called
    when the run is over, unless its job has to make room.
    """
    rundir = RunDir(recipe.run.path)
    with lock(rundir.path, "megarl train", "run.name"):
        resumed = checks.check_history(recipe, rundir, fingerprints)
        launcher = chosen(recipe, rundir)
        nodes = launcher.survey(PORTS_A_ROLE * (4 + recipe.resources.servers + recipe.teachers))
        placed = place(recipe, nodes)
        checks.check_placed(recipe, placed, host_bytes)
        endpoints = prepare(recipe, rundir, placed, fingerprints, resumed)
        adopt_orphans()
        outlive_screen()
        console = Console()
        if resumed:
            console.print(f"going on with {rundir.path}", highlight=False)
        if len(nodes) > 1:
            print(*described(placed, nodes), sep="\n", flush=True)
        with stop_requests() as stop_request:
            supervisor = Supervisor(recipe, rundir, endpoints, launcher, placed, stop_request)
            screen = Screen(console)
            with screen.live or nullcontext():
                outcome = supervisor.run(screen)
        asked = stop_request.signal or rundir.stop_signal()
        report = None if outcome.kind == "stopped" and asked in MAKE_ROOM else write_report
        wall_s = time.monotonic() - supervisor.began
        closing(console, recipe, rundir, outcome, supervisor.deaths, supervisor.begins, wall_s, report)
    if outcome.kind == "stopped":
        return 128 + asked if asked else 0
    return {"finished": 0, "elsewhere": START_ELSEWHERE, "failed": 1}[outcome.kind]


@dataclass
class Supervisor:
    """The roles of one life of a run."""

    recipe: Recipe
    rundir: RunDir
    endpoints: Endpoints
    launcher: Launcher
    placed: Mapping[Role, Place]
    stop_request: StopRequest
    deaths: list[Death] = field(default_factory=list)
    dropped: set[Role] = field(default_factory=set)
    running: dict[Role, RunningRole] = field(default_factory=dict)
    due: dict[Role, float] = field(default_factory=dict)
    begins: dict[Path, int] = field(default_factory=dict)  # in each log, where the last life of its role begins
    began: float = field(default_factory=time.monotonic)
    stopping_since: float | None = None
    _looked: float = 0.0
    _watched: float = 0.0

    def __post_init__(self) -> None:
        servers = self.recipe.resources.servers
        teachers = (Role("teacher", i) for i in range(self.recipe.teachers))
        self.roles = [*(Role("server", i) for i in range(servers)), *teachers, Role("controller"), Role("learner")]
        self.restarts = dict.fromkeys(self.roles, 0)
        self.policy, self.watch = RestartPolicy(servers), Watch(self.recipe.start_limit_s)
        self.observer = Observer(self.rundir)

    def run(self, screen: Screen) -> RunEnd:
        """Run until the end of the run; no process is left afterwards."""
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
        now = time.monotonic()
        views = {}
        for role in self.roles:
            process = self.running.get(role)
            state = "running" if process else "restarting" if role in self.due else "ended"
            state = "dropped" if role in self.dropped else state
            seconds = now - process.started if process else 0.0
            views[role] = RoleView(state, seconds, self.restarts[role], self._nodes(role))
        stopping = ""
        if self.stopping_since is not None:
            seconds = now - self.stopping_since
            stopping = f"stopping: the learner finishes its step and saves ({seconds:.0f} s); Ctrl-C again kills"
        return Frame(self.recipe, self.observer, now - self.began, views, stopping)

    def _tick(self) -> RunEnd | None:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.observer.look()
            self.screen.show(self.frame())
            if self.stopping_since is None and (self.stop_request.count or self.rundir.stop_asked()):
                self.stopping_since = now
                if self.stop_request.count:
                    self.rundir.stop(self.stop_request.signal)
                self._note("stopping", None, signal=self.rundir.stop_signal())
        if now - self._watched >= WATCH_S and self.stopping_since is None:
            self._watched = now
            self._end_hung(now)
        for role in [role for role, at in self.due.items() if at <= now]:
            del self.due[role]
            self._start(role)
        return self._deaths(now) or self._second_request(now)

    def _start(self, role: Role) -> None:
        if role.kind == "controller":
            self.observer.forget_status()
        self.watch.forget(role, time.monotonic())
        self.begins |= log_sizes(self.rundir, role)
        urls = {"server": self.endpoints.servers, "teacher": self.endpoints.teachers}.get(role.kind)
        port = int(urls[role.index].rpartition(":")[2]) if urls else 0
        self.running[role] = self.launcher.start(task(self.recipe, self.rundir, role, port, self.placed[role]))
        self._note("started", role, pid=self.running[role].pid, nodes=self._nodes(role))

    def _deaths(self, now: float) -> RunEnd | None:
        """Handle every role that has ended since the last tick, the learner first, because its end is the run's."""
        ended = [(role, s) for role, p in self.running.items() if (s := p.status()) is not None]
        for role, status in sorted(ended, reverse=True, key=lambda e: e[0].kind == "learner"):
            process = self.running.pop(role)
            process.kill()  # to end what it left behind
            process.wait_gone()
            self._note("ended", role, status=status)
            self.observer.look()
            if outcome := self._after(role, process, status, now):
                return outcome
        if ended:
            self.launcher.sweep(list(self.running.values()))
        return None

    def _after(self, role: Role, process: RunningRole, status: int, now: float) -> RunEnd | None:
        if not role.serves and (failure := self.rundir.failure()):
            return self._failure(role, failure, now)
        if self.stopping_since is not None and not (role.kind == "learner" and status == 0):
            if role.kind != "learner":
                return None  # no longer needed: the learner saves by itself
            return self._unsaved(f"{role.name} {how(status)} before it had saved", role)
        said = how(status)
        if role.kind == "learner" and status == 0 and (why := self._unfinished()):
            status, said = EARLY_STATUS, f"left {why}"
        if status or role.serves:
            problem = ""
            with suppress(OSError):
                log = log_of(self.rundir, role, self.begins)
                problem = last_problem(log, self.begins.get(log, 0)) if log is not None else ""
            self.deaths.append(Death(role, self._nodes(role), time.time(), said, problem))
        node = process.node_state() if status else "up"
        joined = len(self.observer.joined(self.recipe.resources.servers))
        match self.policy.died(role, status, now, self.observer.steps_made, node, joined):
            case Done():
                if self.stop_request.count or self.rundir.stop_asked():
                    return RunEnd("stopped", "as asked")
                return RunEnd("finished", self._finished())
            case Nothing():
                return None
            case GiveUp(culprit, reason):
                return RunEnd("failed", reason, culprit)
            case Elsewhere(culprit, reason):
                if (starts := self._fruitless_starts()) > MOST_FRUITLESS_STARTS:
                    why = f"{reason}, and no step was made since the run was started {starts} times"
                    return RunEnd("failed", why, culprit)
                return RunEnd("elsewhere", reason, culprit)
            case Drop(culprit, reason):
                self.dropped.add(culprit)
                self._note("dropped", culprit, nodes=self._nodes(culprit))
                self.screen.say(
                    f"{culprit.name} on {', '.join(self._nodes(culprit))} {said}; {reason}: the run goes on with the "
                    f"other {self.policy.servers + joined} servers"
                )
            case Restart(culprit, delay):
                self.restarts[culprit] += 1
                self.due[culprit] = now + delay
                if culprit.kind == "learner" and Role("controller") not in self.running:
                    self.due.setdefault(Role("controller"), now)  # it had exited, taking the run to be over
                self._note("restart", culprit, delay_s=delay)
                self.screen.say(f"{culprit.name} {said}; starting it again{f' in {delay:g} s' if delay else ''}")
        return None

    def _fruitless_starts(self) -> int:
        """Return how many lives of the run, with this one, began after its newest step was made."""
        newest = self.observer.latest.get("time", 0.0)
        began: dict[str, float] = {}
        for event in self.rundir.events():
            began.setdefault(event.session, event.time)
        return sum(time > newest for time in began.values())

    def _failure(self, role: Role, reason: str, now: float) -> RunEnd | None:
        """Handle a failure reported by controller or learner: the run ends once the learner, if alive, has saved and exited."""
        if role.kind == "controller" and Role("learner") in self.running:
            self.stopping_since = self.stopping_since or now
            self.rundir.stop()
            return None
        return self._failed(role, reason)

    def _failed(self, role: Role, reason: str) -> RunEnd:
        culprit = role if Role("controller") in self.running else Role("controller")
        return RunEnd("failed", reason, culprit)

    def _finished(self) -> str:
        return f"as run.stop_when says: {why}" if (why := self._not_worth_it()) else "all steps done"

    def _not_worth_it(self) -> str:
        newest = max(self.observer.evaluations.items(), default=(0, {}))[1]
        return not_worth_it(newest, self.recipe.run.stop_when)

    def _unfinished(self) -> str:
        """Return how far a learner that has left came, if nobody asked it to leave and steps remain; else an empty string."""
        made, planned = self.observer.latest.get("step", -1) + 1, self.recipe.run.steps
        if made >= planned or self.stop_request.count or self.rundir.stop_asked() or self._not_worth_it():
            return ""
        return f"after step {made} of {planned}, with status 0"

    def _second_request(self, now: float) -> RunEnd | None:
        if self.stop_request.count > 1:
            return RunEnd("stopped", "killed as asked; the last checkpoint stands")
        if self.stopping_since is None:
            return None
        if Role("learner") not in self.running:
            return RunEnd("stopped", "stopped while the learner was not running; its last checkpoint stands")
        if now - self.stopping_since > SAVE_LIMIT_S:
            return self._unsaved(f"the learner did not save and leave within {SAVE_LIMIT_S:g} s", Role("learner"))
        return None

    def _unsaved(self, why: str, role: Role) -> RunEnd:
        """Return the outcome when the final checkpoint is lost; a job that must make room resumes from the previous one."""
        if failure := self.rundir.failure():
            return self._failed(role, failure)
        if self.rundir.stop_signal() in MAKE_ROOM:
            return RunEnd("stopped", f"{why}; the last checkpoint stands", role)
        return RunEnd("failed", why, role)

    def _end_hung(self, now: float) -> None:
        """Kill roles that are stuck; the next tick sees them dead."""
        still = {role: reason for role, process in self.running.items() if (reason := process.still()) is not None}
        hung = self.watch.hung(still, self.observer.status, self.observer.status_age, set(self.running), now)
        for role, why in hung.items():
            self.screen.say(f"{role.name} {why}; killing it")
            self._note("hung", role, why=why)
            self.running[role].kill()
        for role in hung:
            self.running[role].wait_gone()

    def _end_all(self) -> None:
        """End every role: servers and learner at once, the controller once it had time to close its journal."""
        others = [self.running.pop(role) for role in list(self.running) if role.kind != "controller"]
        for process in others:
            process.kill()
        for process in others:
            process.wait_gone()
        for process in self.running.values():
            process.terminate()
            limit = time.monotonic() + LEAVE_LIMIT_S
            while process.status() is None and time.monotonic() < limit:
                time.sleep(TICK_S)
            process.kill()
            process.wait_gone()
        self.running.clear()
        self.launcher.sweep([])

    def _nodes(self, role: Role) -> list[str]:
        return [node.name for node in self.placed[role].nodes]

    def _note(self, event: str, role: Role | None, **more: object) -> None:
        row = {"time": time.time(), "session": self.endpoints.session, "event": event}
        append_jsonl(self.rundir.logs / "supervisor.jsonl", row | ({"role": role.name} if role else {}) | more)
