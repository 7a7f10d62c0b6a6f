"""`megarl train`: start the roles, watch them, restart what dies, end the run.

    checks (checks/table.py) ─► RUN/recipe.yaml, RUN/endpoints.json (prepare.py)
        ─► servers, controller, learner start at once (they wait for each other)
        ─► every tick: roles that died (restart.py), roles that hang (watch.py),
                       the run's files (state.py ─► view.py)
        ─► the learner has exited: controller and servers are ended,
                       summary and report written (closing.py)

Ctrl-C or SIGTERM, even if sent to controller or learner, writes RUN/stop: the learner
saves and exits. Another Ctrl-C kills. Every role dies with this process. Losing the
screen (a pager, a `tee`) ends nothing.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints, Row, RunDir, SupervisorEvent, append_jsonl
from megarl.core.evaluation.forecast import not_worth_it
from megarl.core.recipe import Recipe, differences, load
from megarl.run import deadline
from megarl.run.closing import Death, RunEnd, WriteReport, closing, ending_of
from megarl.run.launcher import Launcher, RunningRole, Stuck, UnansweredSurveyError, task
from megarl.run.logs import last_problem, log_of, log_sizes
from megarl.run.nodes import Node
from megarl.run.placement import Place, described
from megarl.run.prepare import Fingerprints, prepare
from megarl.run.process import (
    MAKE_ROOM,
    StopRequest,
    adopt_orphans,
    lock,
    outlive_screen,
    stop_requests,
)
from megarl.run.restart import (
    Done,
    Drop,
    Elsewhere,
    GiveUp,
    Nothing,
    Reaction,
    Restart,
    RestartPolicy,
    Role,
)
from megarl.run.state import Observer, roles_after
from megarl.run.view import Screen, ViewFrame, ending
from megarl.run.watch import Watch

TICK_S = 0.1
LOOK_S = 0.5
WATCH_S = 5.0
MOMENT_S = 30.0
"""How long writing to the run directory may fail when a role is to be started; after
that, the disk must be full or gone.
"""
START_ORDER = ("server", "controller", "learner")
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


type Facts = dict[str, Any]
"""What the checks have found out; see checks/making.py."""


def main(
    recipe: Recipe,
    facts: Facts,
    make_checks: Callable[[Facts], None],
    write_report: WriteReport,
) -> int:
    """Run to the end. Return 0: all steps done, or stopped without a signal; 1: failed;
    75: to be started again elsewhere; 128 + signal: stopped by it. facts: of the run's
    inputs, which have been checked. make_checks: makes the checks of machine and nodes,
    and adds their facts. write_report: called when the run is over, unless its job must
    end soon.
    """
    rundir = RunDir(recipe.run.path)
    fingerprints: Fingerprints = facts["fingerprints"]
    controller_and_learner = 2 + 2  # see PORTS_A_ROLE
    facts["ports"] = PORTS_A_ROLE * (controller_and_learner + recipe.resources.servers)
    with lock(rundir.path, "megarl train", "run.name"):
        try:
            make_checks(facts)
        except UnansweredSurveyError as error:
            terminal.say(f"megarl: {error}; start it again", file=sys.stderr)
            return START_ELSEWHERE
        changes: list[tuple[str, object, object]] = []
        if facts["resumed"]:
            changes = differences(load(str(rundir.recipe)), recipe)
        placed: Mapping[Role, Place] = facts["placed"]
        endpoints = prepare(recipe, rundir, placed, fingerprints, facts["resumed"])
        adopt_orphans()
        outlive_screen()
        console = terminal.console()
        if facts["resumed"]:
            _say_resumed(console, rundir, changes)
        nodes: Sequence[Node] = facts["nodes"]
        if len(nodes) > 1:
            terminal.say(*described(placed, nodes), sep="\n", flush=True)
        with stop_requests() as stop_request:
            supervisor = Supervisor(
                recipe, rundir, endpoints, facts["launcher"], placed, stop_request
            )
            screen = Screen(console)
            with screen.live or nullcontext():
                outcome = supervisor.run(screen)
        return _close(supervisor, outcome, console, write_report)


def _say_resumed(
    console: Console, rundir: RunDir, changes: Sequence[tuple[str, object, object]]
) -> None:
    """Say that a run is resumed, and with which changes of its recipe."""
    lines = [f"resuming {rundir.path}"]
    for key, old, new in changes:
        lines.append(f"  {key}: {old!r} before, {new!r} now")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _close(
    supervisor: "Supervisor", outcome: RunEnd, console: Console, write_report: WriteReport
) -> int:
    """Write and show what the run ends with; return the exit status."""
    signal_number = supervisor.stop_request.signal or supervisor.rundir.stop_signal()
    if outcome.kind == "stopped" and signal_number == signal.SIGUSR1:
        reason = "told to stop by SIGUSR1, as ahead of a time limit (--time)"
        outcome = supervisor.end_if_restarted_too_often(reason) or outcome
    must_end_soon = outcome.kind == "stopped" and signal_number in MAKE_ROOM
    closing(
        console,
        supervisor.recipe,
        supervisor.rundir,
        outcome,
        supervisor.deaths,
        supervisor.log_offsets,
        time.monotonic() - supervisor.began,
        None if must_end_soon else write_report,
    )
    if outcome.kind == "stopped":
        return 128 + signal_number if signal_number else 0
    return {"finished": 0, "elsewhere": START_ELSEWHERE, "failed": 1}[outcome.kind]


@dataclass
class Supervisor:
    """The roles of one life of a run. restarts_at: when roles that died are started
    again. log_offsets: the offset in each log at which its role's last life begins.
    """

    recipe: Recipe
    rundir: RunDir
    endpoints: Endpoints
    launcher: Launcher
    placed: Mapping[Role, Place]
    stop_request: StopRequest
    deaths: list[Death] = field(default_factory=list)
    events: list[SupervisorEvent] = field(default_factory=list)
    running: dict[Role, RunningRole] = field(default_factory=dict)
    restarts_at: dict[Role, float] = field(default_factory=dict)
    log_offsets: dict[Path, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    stopping_since: float | None = None
    _looked: float = 0.0
    _watched: float = 0.0
    _unwritten: list[Row] = field(default_factory=list)
    """Events that are not in the file yet."""
    _failing_since: dict[object, float] = field(default_factory=dict)
    """Since when each kind of work has failed."""

    def __post_init__(self) -> None:
        self.policy = RestartPolicy(self.recipe.resources.servers)
        self.watch = Watch(self.recipe.start_limit_s)
        self.observer = Observer(self.rundir)
        self._job_end = deadline.job_end()
        self._save_limit_s = deadline.SAVE_LIMIT_S
        self._has_warned = False

    def run(self, screen: Screen) -> RunEnd:
        """Supervise until the end of the run; no process is left afterwards."""
        self.screen = screen
        try:
            order = {kind: place for place, kind in enumerate(START_ORDER)}
            for role in sorted(self.placed, key=lambda role: (order[role.kind], role.index)):
                self._start(role)
            while True:
                outcome = self._tick()
                if outcome is not None:
                    return outcome
                time.sleep(TICK_S)
        finally:
            self._end_all()
            self.observer.look()

    def frame(self) -> ViewFrame:
        """Return what the live view shows at this moment."""
        time_now = time.monotonic()
        state = self.observer.state
        state.roles = roles_after(self.events)
        stopping = ""
        if self.stopping_since is not None:
            seconds = time_now - self.stopping_since
            stopping = f"stopping: {ending(state.status)} ({seconds:.0f} s); Ctrl-C again kills"
        return ViewFrame(self.recipe, state, time_now - self.began, stopping)

    def _tick(self) -> RunEnd | None:
        """Look after the run once: read its files, end roles that hang, start those
        whose restart is due, handle deaths. Return the run's end, or None to go on.
        """
        at = time.monotonic()
        if at - self._looked >= LOOK_S:
            self._looked = at
            self.observer.look()
            self.screen.show(self.frame())
            self._stop_before_the_job_ends()
            self._pass_on_request(at)
        if at - self._watched >= WATCH_S and self.stopping_since is None:
            self._watched = at
            self._end_hung(at)
        for role in [role for role, start_at in self.restarts_at.items() if start_at <= at]:
            if self._tried(self._start, role, limit_s=MOMENT_S):  # else at the next tick
                del self.restarts_at[role]
        return self._deaths(at) or self._second_request(at)

    def _stop_before_the_job_ends(self) -> None:
        """Ask the run to stop, as SIGUSR1 would, if that will come too late for its
        checkpoint. If no step was made yet, the next job would come no further: say so.
        """
        state = self.observer.state
        if self._is_to_stop() or not deadline.is_due(state, self._job_end):
            return
        needed = deadline.seconds_to_save(state)
        duration = f"a step and the checkpoints of this run take up to {needed:.0f} s"
        if state.steps_made:
            if self._tried(self.rundir.stop, signal.SIGUSR1):
                self.screen.say(f"the job ends soon, and {duration}: saving now")
        elif not self._has_warned:
            self._has_warned = True
            self.screen.say(
                f"{duration}, but its job ends before, with no step made: the last checkpoint may be"
                " lost; give the job more time (--time)"
            )

    def _pass_on_request(self, at: float) -> None:
        """Write a request to stop into the run's directory, where the roles read it. If
        that fails, it is written at the next look.
        """
        if self.stopping_since is not None or not self._is_to_stop():
            return
        request = self.stop_request
        if request.count and not self._tried(self.rundir.stop, request.signal):
            return
        self.stopping_since = at
        signal_number = self.rundir.stop_signal()
        self._save_limit_s = deadline.save_limit(
            self.observer.state, self._job_end, signal_number in MAKE_ROOM
        )
        self._note("stopping", None, signal=signal_number)

    def _start(self, role: Role) -> None:
        """Start the role, forgetting what is known of its last life."""
        if role.kind == "controller":
            self.observer.forget_status()
        self.watch.forget(role, time.monotonic())
        self.log_offsets |= log_sizes(self.rundir, role)
        port = self._port(role)
        command = task(self.recipe, self.rundir, role, port, self.placed[role])
        self.running[role] = self.launcher.start(command)
        self._note("started", role, pid=self.running[role].pid, nodes=self._nodes(role))

    def _port(self, role: Role) -> int:
        """Return the port on which a role serves; 0 if it does not."""
        if not role.serves:
            return 0
        return int(self.endpoints.servers[role.index].rpartition(":")[2])

    def _deaths(self, at: float) -> RunEnd | None:
        """Handle every role that has ended since the last tick, the learner first,
        because the run ends with it.
        """
        statuses = {role: process.status() for role, process in self.running.items()}
        ended = [(role, status) for role, status in statuses.items() if status is not None]
        ended.sort(key=lambda pair: pair[0].kind == "learner", reverse=True)
        for role, status in ended:
            process = self.running.pop(role)
            process.kill()  # to end what it left behind
            process.wait_gone()
            self._note("ended", role, status=status)
            self.observer.look()
            outcome = self._death(role, process, status, at)
            if outcome is not None:
                return outcome
        if ended:
            self.launcher.sweep(list(self.running.values()))
        return None

    def _death(self, role: Role, process: RunningRole, status: int, at: float) -> RunEnd | None:
        """Handle a role's end; return the run's, if it ends with it."""
        failure = "" if role.serves else self.rundir.failure()
        if failure:
            return self._failed(role, failure, at)
        if self.stopping_since is not None:
            if role.kind != "learner":
                return None  # no longer needed: the learner saves by itself
            if status != 0:
                return self._unsaved(f"{role.name} {ending_of(status)} before it had saved", at)
        text = ending_of(status)
        early = self._how_early() if role.kind == "learner" and status == 0 else ""
        if early:
            status = EARLY_STATUS
            text = f"left {early}"
        if status or role.serves:  # a server has no good end of its own, not even 0
            self.deaths.append(
                Death(role, self._nodes(role), time.time(), text, self._problem(role))
            )
        node = process.node_state() if status else "up"
        guests = len(self.observer.state.guests(self.recipe.resources.servers))
        reaction = self.policy.died(role, status, at, self.observer.state.steps_made, node, guests)
        return self._react(reaction, text, guests, at)

    def _problem(self, role: Role) -> str:
        """Return the last problem in the log that says why a role ended."""
        with suppress(OSError):
            log = log_of(self.rundir, role, self.log_offsets)
            if log is not None:
                return last_problem(log, self.log_offsets.get(log, 0))
        return ""

    def _react(self, reaction: Reaction, text: str, guests: int, at: float) -> RunEnd | None:
        """Carry out the policy's decision on a role's end. Return how the run ends;
        None if it goes on. text: how the role ended, as in `ended with status 1`.
        guests: how many servers have joined.
        """
        match reaction:
            case Done():
                return self._done()
            case Nothing():
                return None
            case GiveUp(culprit, reason):
                return RunEnd("failed", reason, culprit)
            case Elsewhere(culprit, reason):
                return self.end_if_restarted_too_often(reason, culprit) or RunEnd(
                    "elsewhere", reason, culprit
                )
            case Drop(culprit, reason):
                nodes = self._nodes(culprit)
                self._note("dropped", culprit, nodes=nodes)
                self.screen.say(
                    f"{culprit.name} on {', '.join(nodes)} {text}; {reason}: the run goes on with"
                    f" the other {self.policy.servers + guests} servers"
                )
            case Restart(culprit, delay):
                self._restart(culprit, delay, text, at)
        return None

    def _done(self) -> RunEnd:
        """Return the end of a run whose learner has saved and exited."""
        if self._is_to_stop():
            return RunEnd("stopped", "as asked")
        reason = self._not_worth_it()
        return RunEnd(
            "finished", f"as run.stop_when says: {reason}" if reason else "all steps done"
        )

    def _restart(self, role: Role, delay_s: float, text: str, at: float) -> None:
        """Start a role again after `delay_s`; with the learner also a controller that
        had exited, taking the run to be over.
        """
        self.restarts_at[role] = at + delay_s
        if role.kind == "learner" and Role("controller") not in self.running:
            self.restarts_at.setdefault(Role("controller"), at)
        self._note("restart", role, delay_s=delay_s)
        delay = f" in {delay_s:g} s" if delay_s else ""
        self.screen.say(f"{role.name} {text}; starting it again{delay}")

    def end_if_restarted_too_often(self, reason: str, culprit: Role | None = None) -> RunEnd | None:
        """Return the outcome of a run that was started again too often without a new
        step, now for `reason`; else None.
        """
        if self.observer.state.steps_made:
            return None  # whatever the clocks of the learner's nodes and of ours say
        newest = self.observer.state.latest.get("time", 0.0)
        lives: dict[str, float] = {}  # when each began
        with suppress(OSError):
            for event in self.rundir.events():
                lives.setdefault(event.session, event.time)
        starts = sum(began > newest for began in lives.values())
        if starts <= MOST_FRUITLESS_STARTS:
            return None
        return RunEnd(
            "failed",
            f"{reason}, and no step was made since the run was started {starts} times",
            culprit,
        )

    def _failed(self, role: Role, reason: str, at: float) -> RunEnd | None:
        """Handle the end of a role, controller or learner, where one of the two has
        reported a failure of the run. Return the run's end; None if the learner still
        lives, which then saves first.
        """
        learner_lives = role.kind == "controller" and Role("learner") in self.running
        if learner_lives and self._tried(self.rundir.stop):
            self.stopping_since = self.stopping_since or at
            return None
        # A controller that does not run any more was the first to end.
        controller = Role("controller")
        culprit = role if controller in self.running else controller
        return RunEnd("failed", reason, culprit)

    def _is_to_stop(self) -> bool:
        """Return whether this process, or anybody through the run's directory, was
        asked to stop the run.
        """
        return self.stop_request.count > 0 or self.rundir.stop_asked()

    def _not_worth_it(self) -> str:
        """Return why going on does not pay by `run.stop_when`; empty if it does."""
        return not_worth_it(self.observer.state.latest_score, self.recipe.run.stop_when)

    def _how_early(self) -> str:
        """Return after which step the learner left, if it was not asked to leave and
        steps remain; else an empty string.
        """
        steps = self.observer.state.latest.get("step", -1) + 1
        planned = self.recipe.run.steps
        if steps >= planned or self._is_to_stop() or self._not_worth_it():
            return ""
        return f"after step {steps} of {planned}, with status 0"

    def _second_request(self, at: float) -> RunEnd | None:
        """Return the end of a run that was asked to stop and need not be waited for: it
        was asked twice, or its learner does not run or does not save in time. Else
        None.
        """
        if self.stop_request.count > 1:
            return RunEnd("stopped", "killed as asked; the last checkpoint is kept")
        if self.stopping_since is None:
            return None
        if Role("learner") not in self.running:
            return RunEnd(
                "stopped", "stopped while the learner was not running; its last checkpoint is kept"
            )
        if at - self.stopping_since > self._save_limit_s:
            return self._unsaved(
                f"the learner did not save and leave within {self._save_limit_s:.0f} s", at
            )
        return None

    def _unsaved(self, reason: str, at: float) -> RunEnd | None:
        """Return the run's end when the learner could not save. A job that has to make
        room counts as stopped, since it resumes from the checkpoint before; else the
        run has failed. If the learner has reported a failure, see `_failed`.
        """
        learner = Role("learner")
        failure = self.rundir.failure()
        if failure:
            return self._failed(learner, failure, at)
        if self.rundir.stop_signal() in MAKE_ROOM:
            return RunEnd("stopped", f"{reason}; the last checkpoint is kept", learner)
        return RunEnd("failed", reason, learner)

    def _end_hung(self, at: float) -> None:
        """Kill roles that are stuck; the next tick handles their deaths."""
        stuck: dict[Role, Stuck] = {}
        for role, process in self.running.items():
            reason = process.why_stuck()
            if reason is not None:
                stuck[role] = reason
        status = self.observer.state.status
        hung = self.watch.hung(stuck, status, self.observer.status_age, set(self.running), at)
        for role, complaint in hung.items():
            self.screen.say(f"{role.name} {complaint}; killing it")
            self._note("hung", role, why=complaint)
            self.running[role].kill()
        for role in hung:
            self.running[role].wait_gone()

    def _end_all(self) -> None:
        """End every role: servers and learner at once, the controller after it had time
        to close its journal.
        """
        roles = [role for role in self.running if role.kind != "controller"]
        processes = [self.running.pop(role) for role in roles]
        for process in processes:
            process.kill()
        for process in processes:
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
        """Return the names of the role's nodes."""
        return [node.name for node in self.placed[role].nodes]

    def _note(self, event: str, role: Role | None, **details: object) -> None:
        """Write an event, after those that could not be written before."""
        row: Row = {"time": time.time(), "session": self.endpoints.session, "event": event}
        if role is not None:
            row["role"] = role.name
        row |= details
        self.events.append(msgspec.convert(row, SupervisorEvent))
        self._unwritten.append(row)
        file = self.rundir.supervisor
        while self._unwritten and self._tried(append_jsonl, file, self._unwritten[0]):
            del self._unwritten[0]

    def _tried(
        self, work: Callable[..., None], *arguments: object, limit_s: float = math.inf
    ) -> bool:
        """Do `work`, which needs the run directory, and return whether it succeeded. A
        failure is shown once; it is raised only if failures last longer than `limit_s`.
        """
        at = time.monotonic()
        kind = (work, *arguments[:1])  # such as the start of one role, or writes to one file
        try:
            work(*arguments)
        except (MegarlError, OSError) as error:
            if kind not in self._failing_since:
                self._failing_since[kind] = at
                self.screen.say(f"{error}; going on, and trying again")
            if at - self._failing_since[kind] > limit_s:
                raise
            return False
        self._failing_since.pop(kind, None)
        return True
