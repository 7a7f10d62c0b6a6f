"""`megarl train`: start the roles, watch them, restart what dies, end the run.

    checks ─► RUN/recipe.yaml, RUN/endpoints.json ─► servers, controller, learner start at once (they wait for each other)
           ─► every tick: roles that died (restart.py), roles that hang (watch.py), the run's files (observe.py ─► view.py)
           ─► the learner has exited: controller and servers are ended, summary and report written

Ctrl-C or SIGTERM, even if sent to controller or learner, writes RUN/stop: the learner
saves and exits. Another Ctrl-C kills. Every role dies with this process. Losing the
screen (a pager, a `tee`) ends nothing.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints, Row, RunDir, SupervisorEvent, append_jsonl
from megarl.core.evaluation.forecast import not_worth_it
from megarl.core.recipe import Recipe, differences, load
from megarl.run import checks
from megarl.run.closing import Death, RunEnd, WriteReport, closing, how
from megarl.run.launcher import Launcher, RunningRole, UnansweredSurveyError, task
from megarl.run.observe import Observer, last_problem, log_of, log_sizes
from megarl.run.placement import Place, described, place
from megarl.run.prepare import prepare
from megarl.run.process import (
    MAKE_ROOM,
    StopRequest,
    adopt_orphans,
    lock,
    outlive_screen,
    stop_requests,
)
from megarl.run.restart import Done, Drop, Elsewhere, GiveUp, Nothing, Restart, RestartPolicy, Role
from megarl.run.srun import chosen
from megarl.run.view import Frame, Screen, ending, roles_after
from megarl.run.watch import Watch

TICK_S = 0.1
LOOK_S = 0.5
WATCH_S = 5.0
SAVE_LIMIT_S = 540.0
"""Time limit from a request to stop until the learner has saved and exited. Slurm ends
a job 600 s after SIGUSR1.
"""
MOMENT_S = 30.0
"""How long writing to the run directory may fail when a role is to be started; after
that, the disk must be full or gone.
"""
START_ORDER = ("server", "teacher", "controller", "learner")
"""Servers take longest to start."""
LEAVE_LIMIT_S = 10.0
"""How long the controller may take to exit once all other roles have ended."""
PORTS_A_ROLE = 2
"""Ports per server; controller and learner count as two each, as they also serve
metrics. Every node is asked for all ports, before roles are placed, because nodes on
one machine may have found the same ports.
"""
EARLY_STATUS = 1
"""Replaces the status 0 of a learner that leaves before the run's end, which counts as
a crash.
"""
START_ELSEWHERE = 75
"""Exit status (EX_TEMPFAIL) of a run that can resume, but not on these nodes."""
MOST_FRUITLESS_STARTS = 5
"""If a run loses a node or comes to its time limit after more starts than this without
a new step, it fails.
"""


def main(
    recipe: Recipe,
    fingerprints: checks.Fingerprints,
    host_bytes: checks.HostBytes,
    write_report: WriteReport,
) -> int:
    """Run to the end. Return 0: all steps done, or stopped without a signal; 1: failed;
    75: to be started again elsewhere; 128 + signal: stopped by it. fingerprints: of the
    run's inputs, already computed and checked. host_bytes: see checks.check_host.
    write_report: called when the run is over, unless its job must end soon.
    """
    rundir = RunDir(recipe.run.path)
    with lock(rundir.path, "megarl train", "run.name"):
        resumed = checks.check_history(recipe, rundir, fingerprints)
        checks.check_disk(recipe, rundir, rundir.path)
        changes = differences(load(str(rundir.recipe)), recipe) if resumed else []
        launcher = chosen(recipe, rundir)
        try:
            nodes = launcher.survey(PORTS_A_ROLE * (4 + recipe.resources.servers + recipe.teachers))
        except UnansweredSurveyError as error:
            terminal.say(f"megarl: {error}; start it again", file=sys.stderr)
            return START_ELSEWHERE
        placed = place(recipe, nodes)
        checks.check_placed(recipe, placed, host_bytes)
        endpoints = prepare(recipe, rundir, placed, fingerprints, resumed)
        adopt_orphans()
        outlive_screen()
        console = terminal.console()
        if resumed:
            said = [
                f"resuming {rundir.path}",
                *(f"  {key}: {old!r} before, {new!r} now" for key, old, new in changes),
            ]
            console.print("\n".join(said), highlight=False, markup=False, soft_wrap=True)
        if len(nodes) > 1:
            terminal.say(*described(placed, nodes), sep="\n", flush=True)
        with stop_requests() as stop_request:
            supervisor = Supervisor(recipe, rundir, endpoints, launcher, placed, stop_request)
            screen = Screen(console)
            with screen.live or nullcontext():
                outcome = supervisor.run(screen)
        asked = stop_request.signal or rundir.stop_signal()
        if outcome.kind == "stopped" and asked == signal.SIGUSR1:
            outcome = (
                supervisor.given_up("told to stop by SIGUSR1, as ahead of a time limit (--time)")
                or outcome
            )
        report = None if outcome.kind == "stopped" and asked in MAKE_ROOM else write_report
        wall_s = time.monotonic() - supervisor.began
        closing(
            console, recipe, rundir, outcome, supervisor.deaths, supervisor.begins, wall_s, report
        )
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
    events: list[SupervisorEvent] = field(default_factory=list)
    running: dict[Role, RunningRole] = field(default_factory=dict)
    due: dict[Role, float] = field(default_factory=dict)
    begins: dict[Path, int] = field(
        default_factory=dict
    )  # offset in each log at which its role's last life begins
    began: float = field(default_factory=time.monotonic)
    stopping_since: float | None = None
    _looked: float = 0.0
    _watched: float = 0.0
    _unwritten: list[Row] = field(default_factory=list)  # events that are not in the file yet
    _failing_since: dict[object, float] = field(
        default_factory=dict
    )  # since when each kind of work has failed

    def __post_init__(self) -> None:
        self.policy = RestartPolicy(self.recipe.resources.servers)
        self.watch, self.observer = Watch(self.recipe.start_limit_s), Observer(self.rundir)

    def run(self, screen: Screen) -> RunEnd:
        """Supervise until the end of the run; no process is left afterwards."""
        self.screen = screen
        try:
            for role in sorted(
                self.placed, key=lambda role: (START_ORDER.index(role.kind), role.index)
            ):
                self._start(role)
            while (outcome := self._tick()) is None:
                time.sleep(TICK_S)
            return outcome
        finally:
            self._end_all()
            self.observer.look()

    def frame(self) -> Frame:
        now = time.monotonic()
        stopping = ""
        if self.stopping_since is not None:
            seconds = now - self.stopping_since
            stopping = (
                f"stopping: {ending(self.observer.status)} ({seconds:.0f} s); Ctrl-C again kills"
            )
        roles = roles_after(self.events)
        return Frame(
            self.recipe, self.observer, now - self.began, roles, stopping, self.observer.problem
        )

    def _tick(self) -> RunEnd | None:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.observer.look()
            self.screen.show(self.frame())
            if self.stopping_since is None and self._asked_to_stop():
                asked = self.stop_request
                if not asked.count or self._tried(
                    self.rundir.stop, asked.signal
                ):  # else at the next look
                    self.stopping_since = now
                    self._note("stopping", None, signal=self.rundir.stop_signal())
        if now - self._watched >= WATCH_S and self.stopping_since is None:
            self._watched = now
            self._end_hung(now)
        for role in [role for role, at in self.due.items() if at <= now]:
            if self._tried(self._start, role, limit_s=MOMENT_S):  # else at the next tick
                del self.due[role]
        return self._deaths(now) or self._second_request(now)

    def _start(self, role: Role) -> None:
        if role.kind == "controller":
            self.observer.forget_status()
        self.watch.forget(role, time.monotonic())
        self.begins |= log_sizes(self.rundir, role)
        urls = {"server": self.endpoints.servers, "teacher": self.endpoints.teachers}.get(role.kind)
        port = int(urls[role.index].rpartition(":")[2]) if urls else 0
        self.running[role] = self.launcher.start(
            task(self.recipe, self.rundir, role, port, self.placed[role])
        )
        self._note("started", role, pid=self.running[role].pid, nodes=self._nodes(role))

    def _deaths(self, now: float) -> RunEnd | None:
        """Handle every role that has ended since the last tick, the learner first,
        because the run ends with it.
        """
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
            return self._failed(role, failure, now)
        if self.stopping_since is not None and not (role.kind == "learner" and status == 0):
            if role.kind != "learner":
                return None  # no longer needed: the learner saves by itself
            return self._unsaved(f"{role.name} {how(status)} before it had saved", now)
        said = how(status)
        if role.kind == "learner" and status == 0 and (why := self._unfinished()):
            status = EARLY_STATUS
            said = f"left {why}"
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
                if self._asked_to_stop():
                    return RunEnd("stopped", "as asked")
                why = self._not_worth_it()
                return RunEnd(
                    "finished", f"as run.stop_when says: {why}" if why else "all steps done"
                )
            case Nothing():
                return None
            case GiveUp(culprit, reason):
                return RunEnd("failed", reason, culprit)
            case Elsewhere(culprit, reason):
                return self.given_up(reason, culprit) or RunEnd("elsewhere", reason, culprit)
            case Drop(culprit, reason):
                self._note("dropped", culprit, nodes=self._nodes(culprit))
                self.screen.say(
                    f"{culprit.name} on {', '.join(self._nodes(culprit))} {said}; {reason}: the run"
                    f" goes on with the other {self.policy.servers + joined} servers"
                )
            case Restart(culprit, delay):
                self.due[culprit] = now + delay
                if culprit.kind == "learner" and Role("controller") not in self.running:
                    self.due.setdefault(
                        Role("controller"), now
                    )  # it had exited, taking the run to be over
                self._note("restart", culprit, delay_s=delay)
                self.screen.say(
                    f"{culprit.name} {said}; starting it again{f' in {delay:g} s' if delay else ''}"
                )
        return None

    def given_up(self, reason: str, culprit: Role | None = None) -> RunEnd | None:
        """Return the outcome of a run that was started again too often without a new
        step, now for `reason`; else None.
        """
        if self.observer.steps_made:
            return None  # whatever the clocks of the learner's nodes and of ours say
        newest = self.observer.latest.get("time", 0.0)
        began: dict[str, float] = {}
        with suppress(OSError):
            for event in self.rundir.events():
                began.setdefault(event.session, event.time)
        starts = sum(time > newest for time in began.values())
        if starts <= MOST_FRUITLESS_STARTS:
            return None
        return RunEnd(
            "failed",
            f"{reason}, and no step was made since the run was started {starts} times",
            culprit,
        )

    def _failed(self, role: Role, reason: str, now: float) -> RunEnd | None:
        """Handle a failure reported by controller or learner: the run ends once the
        learner, if alive, has saved and exited.
        """
        if (
            role.kind == "controller"
            and Role("learner") in self.running
            and self._tried(self.rundir.stop)
        ):
            self.stopping_since = self.stopping_since or now
            return None
        return RunEnd(
            "failed", reason, role if Role("controller") in self.running else Role("controller")
        )

    def _asked_to_stop(self) -> bool:
        return self.stop_request.count > 0 or self.rundir.stop_asked()

    def _not_worth_it(self) -> str:
        return not_worth_it(self.observer.scored, self.recipe.run.stop_when)

    def _unfinished(self) -> str:
        """Return at which step the learner left, if it was not asked to leave and steps
        remain; else an empty string.
        """
        made = self.observer.latest.get("step", -1) + 1
        planned = self.recipe.run.steps
        if made >= planned or self._asked_to_stop() or self._not_worth_it():
            return ""
        return f"after step {made} of {planned}, with status 0"

    def _second_request(self, now: float) -> RunEnd | None:
        if self.stop_request.count > 1:
            return RunEnd("stopped", "killed as asked; the last checkpoint is kept")
        if self.stopping_since is None:
            return None
        if Role("learner") not in self.running:
            return RunEnd(
                "stopped", "stopped while the learner was not running; its last checkpoint is kept"
            )
        if now - self.stopping_since > SAVE_LIMIT_S:
            return self._unsaved(
                f"the learner did not save and leave within {SAVE_LIMIT_S:g} s", now
            )
        return None

    def _unsaved(self, why: str, now: float) -> RunEnd | None:
        """Return the outcome when the final checkpoint is lost; a job that must end
        soon resumes from the previous one.
        """
        learner = Role("learner")
        if failure := self.rundir.failure():
            return self._failed(learner, failure, now)
        if self.rundir.stop_signal() in MAKE_ROOM:
            return RunEnd("stopped", f"{why}; the last checkpoint is kept", learner)
        return RunEnd("failed", why, learner)

    def _end_hung(self, now: float) -> None:
        """Kill roles that are stuck; the next tick handles their deaths."""
        still = {
            role: reason
            for role, process in self.running.items()
            if (reason := process.still()) is not None
        }
        hung = self.watch.hung(
            still, self.observer.status, self.observer.status_age, set(self.running), now
        )
        for role, why in hung.items():
            self.screen.say(f"{role.name} {why}; killing it")
            self._note("hung", role, why=why)
            self.running[role].kill()
        for role in hung:
            self.running[role].wait_gone()

    def _end_all(self) -> None:
        """End every role: servers and learner at once, the controller after it had time
        to close its journal.
        """
        others = [
            self.running.pop(role) for role in list(self.running) if role.kind != "controller"
        ]
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
        """Write an event, after those that could not be written before."""
        row = {"time": time.time(), "session": self.endpoints.session, "event": event}
        row |= ({"role": role.name} if role else {}) | more
        self.events.append(msgspec.convert(row, SupervisorEvent))
        self._unwritten.append(row)
        file = self.rundir.supervisor
        while self._unwritten and self._tried(append_jsonl, file, self._unwritten[0]):
            del self._unwritten[0]

    def _tried(
        self, what: Callable[..., None], *arguments: object, limit_s: float = math.inf
    ) -> bool:
        """Call `what`, which needs the run directory, and return whether it succeeded.
        A failure is shown once; it is raised only if failures last longer than
        `limit_s`.
        """
        now = time.monotonic()
        work = (what, *arguments[:1])
        try:
            what(*arguments)
        except (MegarlError, OSError) as error:
            if work not in self._failing_since:
                self._failing_since[work] = now
                self.screen.say(f"{error}; going on, and trying again")
            if now - self._failing_since[work] > limit_s:
                raise
            return False
        self._failing_since.pop(work, None)
        return True
