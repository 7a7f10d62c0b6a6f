"""The live view and its plain line, from files as the roles write them."""

import errno
import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.core.base.rundir import FORECAST, RunDir, append_jsonl, read_jsonl
from megarl.core.recipe import Recipe
from megarl.core.recipe.algorithm import Teacher
from megarl.run import state
from megarl.run.logs import last_lines, last_problem, log_of, log_sizes
from megarl.run.restart import MESSAGE_STATUS, GiveUp, Restart, RestartPolicy, Role
from megarl.run.state import Observer, RoleState, Status
from megarl.run.view import (
    ViewFrame,
    clock,
    ending,
    line,
    phase,
    recent,
    render,
    sparkline,
    warnings,
)

ROLES = {
    Role("server", 0): RoleState("running", 60),
    Role("server", 1): RoleState("running", 60, 2),
}
ROLES |= {Role("controller"): RoleState("running", 60), Role("learner"): RoleState("running", 60)}


def frame(recipe: Recipe, rundir: RunDir, stopping: str = "") -> ViewFrame:
    observer = Observer(rundir)
    observer.look()
    observer.state.roles = ROLES
    return ViewFrame(recipe, observer.state, 135.0, stopping)


def text(shown: ViewFrame) -> str:
    console = Console(width=100, file=io.StringIO(), record=True, force_terminal=True)
    console.print(render(shown))
    return console.export_text()


def test_before_anything_is_written(recipe: Recipe) -> None:
    rundir = RunDir(recipe.run.path)
    rundir.create()
    shown = frame(recipe, rundir)
    assert phase(shown) == "starting all roles"
    assert "step 0/80" in text(shown)
    assert line(shown) == "[2:15]  starting all roles"


def test_start_up(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(0)
    status = {
        "time": 0.0,
        "phase": "starting",
        "servers": [{"id": 0, "state": "starting"}, {"id": 1, "state": "starting"}],
    }
    rundir.status.write_text(json.dumps(status))
    assert phase(frame(recipe, rundir)) == "starting server-0, server-1"
    status["servers"] = [{"id": 0, "state": "unknown"}]
    rundir.status.write_text(json.dumps(status))
    assert phase(frame(recipe, rundir)) == "starting the learner"
    status |= {"phase": "wait", "step": 3, "evaluating": [2]}
    rundir.status.write_text(json.dumps(status))
    assert phase(frame(recipe, rundir)) == "the learner waits at step 3 · evaluating version 2"


def test_what_a_run_does_that_is_asked_to_stop() -> None:
    for early in (None, Status(time=0.0, phase="starting")):
        assert ending(early) == "roles are still starting, and end once they have"
    assert ending(Status(time=0.0, phase="train")) == "the learner finishes its step and saves"


def test_in_the_middle(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    shown = frame(recipe, write_run(41), "stopping")
    page = text(shown)
    for part in (
        "step 41/80",
        "held out",
        "0.863",
        "step 40",
        "limit 8 · window 6.0",
        "publishing",
        "2,310",
        "93%",
        "152 of 216",
        "stopping",
    ):
        assert part in page, page
    assert all(len(row) <= 100 for row in page.splitlines())
    assert "step 41/80" in line(shown)
    assert "held-out 0.86 at 40" in line(shown)


def test_several_tasks(write_tasks_run: Callable[[int], tuple[Recipe, RunDir]]) -> None:
    recipe, rundir = write_tasks_run(41)
    page = text(frame(recipe, rundir))
    (code,) = [row for row in page.splitlines() if "  code" in row]
    assert "training 0." in code
    assert "held out 0.663" in code
    assert all(len(row) <= 100 for row in page.splitlines())


def test_rows_supersede_by_step(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(10)
    observer = Observer(rundir)
    append_jsonl(rundir.metrics, {"step": 9, "pass_rate_train": 0.123})
    observer.look()
    assert len(observer.state.rows) == 10
    assert observer.state.latest == {"step": 9, "pass_rate_train": 0.123}
    assert observer.state.steps_made == 0


def test_rows_that_could_not_be_read_at_first_come_with_the_next_look(
    recipe: Recipe, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    rundir = write_run(10)
    with monkeypatch.context() as patch:
        patch.setattr(state, "rows_in_order", failing)
        observer = Observer(rundir)
    assert not observer.state.rows
    observer.look()
    assert (len(observer.state.rows), observer.state.health.step) == (10, 9)


def test_only_what_is_shown_is_kept_of_the_rows(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """All rows of a long run take gigabytes. What is shown is the same with them."""
    rundir = write_run(30)
    append_jsonl(rundir.metrics, {"step": 30, "pass_rate_train": 1.0, "parity_rollouts": 4.0})
    observer = Observer(rundir)
    for step in range(31, 60):
        append_jsonl(rundir.metrics, {"step": step, "pass_rate_train": step / 60})
        observer.look()
    append_jsonl(
        rundir.metrics, {"step": 12, "pass_rate_train": 0.5, "parity_rollouts": 3.0}
    )  # of a replay
    observer.look()
    assert sorted(observer.state.rows) == list(range(40, 60))
    assert sorted(observer.state.pass_rates) == list(range(60))
    assert (observer.state.pass_rates[12], observer.state.pass_rates[59]) == (0.5, 59 / 60)
    assert (
        observer.state.compared["step"],
        observer.state.health.step,
        observer.state.steps_made,
    ) == (30, 59, 29)
    assert recent(observer.state, "pass_rate_train") == pytest.approx(sum(range(40, 60)) / 20 / 60)


def test_replayed_steps_are_no_progress(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """Else a learner that fails at the same step again and again would never be given
    up.
    """
    rundir = write_run(10)
    observer = Observer(rundir)
    policy = RestartPolicy(2)
    decisions = []
    for life in range(2):
        for step in range(5, 11):
            append_jsonl(rundir.metrics, {"step": step})
            observer.look()
        assert observer.state.steps_made == 1
        decisions.append(
            policy.died(Role("learner"), MESSAGE_STATUS, 300.0 * life, observer.state.steps_made)
        )
    assert [type(decision) for decision in decisions] == [Restart, GiveUp]


def test_torn_status_keeps_the_last(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(3)
    observer = Observer(rundir)
    observer.look()
    rundir.status.write_text('{"time": 1.0, "st')
    observer.look()
    assert observer.state.status is not None
    assert observer.state.status.step == 3
    observer.forget_status()
    observer.look()
    assert observer.state.status is None


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_controller_whose_clock_is_another_is_not_silent(
    write_run: Callable[[int], RunDir], ahead: float
) -> None:
    """`megarl train` may run on a login node (salloc). A controller that stands still
    is, at whatever hour.
    """
    rundir = write_run(3)
    observer = Observer(rundir)
    for beat in range(3):
        rundir.status.write_text(json.dumps({"time": time.time() + ahead + beat}))
        observer.look()
        assert 0 <= observer.status_age < 5
    time.sleep(0.1)
    observer.look()
    assert observer.status_age >= 0.1


def test_a_file_system_that_fails_for_a_moment_delays_what_is_known(
    recipe: Recipe, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = write_run(10)
    observer = Observer(rundir)
    append_jsonl(rundir.metrics, {"step": 10})

    def evicted(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("io.open", evicted)
        patched.setattr("os.scandir", evicted)
        observer.look()
        assert observer.state.steps_made == 0
    observer.look()
    assert observer.state.steps_made == 1


def test_problems_of_this_life_are_shown(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(3)
    log = rundir.log("server", "node1", 0)
    log.parent.mkdir()
    log.write_text("12:00 server 0 ERROR old: of the last life\n")
    observer = Observer(rundir)
    observer.look()
    assert observer.state.problem == ""
    with log.open("a") as file:
        file.write(
            "12:01 server 0 INFO all is well\nRuntimeError: the disk is full\n12:02 ERROR but"
            " this li"
        )
    observer.look()
    assert observer.state.problem == "server node1.0: RuntimeError: the disk is full"


def test_logs_of_earlier_lives_are_not_read(
    recipe: Recipe, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of weeks have gigabytes, and the first role waits for it."""
    rundir = write_run(3)
    read = Path.open
    log = rundir.log("server", "node1", 0)
    log.parent.mkdir()
    log.write_text("12:00 server 0 INFO old\n")

    def opened(path: Path, *mode: Any, **more: Any) -> object:
        assert path != log
        return read(path, *mode, **more)

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.open", opened)
        Observer(rundir).look()


def test_a_problem_goes_when_its_role_is_well_again(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(3)
    observer = Observer(rundir)
    for role, rank in (("server", 1), ("learner", 0)):
        log = rundir.log(role, "node1", rank)
        log.parent.mkdir()
        log.write_text("RuntimeError: once\n")
        observer.look()
        said = f"{role} node1.{rank}: RuntimeError: once"
        assert observer.state.problem == said
        step = max(observer.state.rows) + 1
        append_jsonl(rundir.metrics, {"step": step})
        if role == "server":
            for at, state in (
                (-60.0, "clean"),
                (60.0, "lost"),
                (60.0, "publishing"),
            ):  # before it; after it, not well
                servers = [{"id": 0, "state": "clean"}, {"id": 1, "state": state}]
                rundir.status.write_text(json.dumps({"time": time.time() + at, "servers": servers}))
                observer.look()
                assert observer.state.problem == said, (at, state)
            servers[1]["state"] = "clean"
            rundir.status.write_text(json.dumps({"time": time.time() + 60, "servers": servers}))
        observer.look()
        assert observer.state.problem == ""


FALLEN = {
    "pass_rate": 0.6,
    "warning_fall": 1.0,
    "fall": 0.263,
    "fall_error": 0.04,
    "fall_since": 40,
}
"""What a row of eval.jsonl has more if the score has fallen."""


def test_warnings_come_first_and_the_best_score_is_shown(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(61)
    rows = list(read_jsonl(rundir.eval))
    shown = frame(recipe, rundir)
    assert "at step 60 · first" in " ".join(text(shown).split())
    assert "best" not in line(shown)
    append_jsonl(rundir.eval, rows[-1] | FALLEN)
    shown = frame(recipe, rundir)
    page = text(shown)
    assert page.index("has fallen by 0.263") < page.index("step 61/80")
    assert "0.600 at step 60 · best 0.863 at step 40 · first" in " ".join(page.split())
    assert "held-out 0.60 at 60 (best 0.86 at 40)" in line(shown)
    assert all(len(row) <= 100 for row in page.splitlines())


@pytest.mark.parametrize(
    ("steps", "averaged"), [(1, "last step"), (10, "last 10 steps"), (30, "last 20 steps")]
)
def test_the_training_rate_says_over_which_steps_it_goes(
    recipe: Recipe, write_run: Callable[[int], RunDir], steps: int, averaged: str
) -> None:
    shown = frame(recipe, write_run(steps))
    assert re.search(rf"train 0\.\d\d \({averaged}\)", line(shown))
    assert f"({averaged})" in text(shown)


def test_warnings(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(30)
    assert warnings(frame(recipe, rundir)) == []
    for step in range(30, 60):
        append_jsonl(
            rundir.metrics,
            {
                "step": step,
                "truncation_rate": 0.12,
                "effective_sample_size": 0.08,
                "skipped": 1.0,
            },
        )
    rundir.status.write_text(
        json.dumps({"time": time.time(), "parity": "version 59: both sides differ by 0.09"})
    )
    said = " ".join(warnings(frame(recipe, rundir)))
    assert "truncation (0.12 on average, limit 0.1): answers are cut off" in said
    assert "sample size (0.08 on average, limit 0.1)" in said
    assert "0.09" in said
    assert "not finite" in said
    assert "truncation (0.12 on average" in text(frame(recipe, rundir))
    append_jsonl(rundir.metrics, {"step": 60, "skipped": 1.0, "groups_in_loss": 0.0})
    assert "nothing was learnt" in " ".join(warnings(frame(recipe, rundir)))
    taught = recipe.model_copy(update={"teacher": Teacher(url="http://t", weight=1.0)})
    assert "nothing was learnt" not in " ".join(warnings(frame(taught, rundir))), (
        "its scores are lessons all the same"
    )


def test_same_bits_are_said_so(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """The view shows the latest publication that was compared."""
    rundir = write_run(5)
    assert "same bits" not in text(frame(recipe, rundir))
    append_jsonl(
        rundir.metrics,
        {"step": 5, "parity_rollouts": 4.0, "parity_mean/kernels": 0.0, "parity_mean/decode": 2e-7},
    )
    append_jsonl(rundir.metrics, {"step": 6, "pass_rate_train": 0.5})
    shown = frame(recipe, rundir)
    assert re.search(r"server − learner +same bits · decode 2.0e-07\b", text(shown))
    assert line(shown).endswith("parity same bits")


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 5, ""),
        ([0.0, 1.0], 5, "▁█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([0.5], 3, "▅"),
        ([-3.0, 9.0], 3, "▁█"),
    ],
)
def test_sparkline(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars


def test_clock() -> None:
    assert [clock(s) for s in (5, 65, 7387)] == ["0:05", "1:05", "2:03:07"]


def test_last_lines(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    log = write_run(0).logs / "x.log"
    assert last_lines(log) == []
    log.write_text("\n".join(map(str, range(100))))
    assert last_lines(log, 3) == ["97", "98", "99"]


def test_outlook(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """What the run will reach, and what the rest of it may gain at most, once there is
    a fit.
    """
    rundir = write_run(41)
    assert "predicted" not in text(frame(recipe, rundir))
    found = dict(zip(FORECAST, (12.0, 0.91, 0.9, 0.88, 0.92, 0.012, 0.034), strict=True))
    counts = {"n_prompts": 100, "samples": 4, "compute_hours": 1.0, "compute_unit": "gpu"}
    append_jsonl(rundir.eval, {"step": 41, "pass_rate": 0.87} | counts | found)
    page = text(frame(recipe, rundir))
    assert (
        "0.900 (0.880–0.920) at the end · ceiling 0.910 · +0.034 at most in the rest"
        in " ".join(page.split())
    )


def test_nodes_are_shown_where_there_are_several(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    shown = frame(recipe, write_run(3))
    assert " node " not in text(shown)
    roles = {
        Role("server", 0): RoleState("running", 60, 0, ["n1"]),
        Role("server", 1): RoleState("dropped", 0, 0, ["n2"]),
        Role("learner"): RoleState("running", 60, 0, ["n3", "n4"]),
    }
    shown.state.roles = roles
    lines = [line.strip("│ ").split() for line in text(shown).splitlines()]
    assert ["server-1", "n2", "dropped"] in [line[:3] for line in lines]
    assert "n3 … n4" in text(shown)
    assert "1 servers dropped" in line(shown)


def test_joined_servers_are_shown(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    shown = frame(recipe, write_run(3))
    shown.state.roles = {
        Role("server", 0): RoleState("running", 60),
        Role("learner"): RoleState("running", 60),
    }
    lines = [words.strip("│ ").split() for words in text(shown).splitlines()]
    assert ["server-1", "(joined)", "publishing"] in [words[:3] for words in lines]
    assert ["server-0", "clean"] in [words[:2] for words in lines]
    assert "1 servers joined" in line(shown)


def test_log_that_says_why(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """It is that of the rank, or of the server's node, with a problem, though another
    wrote later; else the newest.
    """
    rundir = write_run(0)
    assert log_of(rundir, Role("learner")) is None
    for n, (role, host, rank, said) in enumerate(
        [
            ("learner", "n3", 0, "all is well"),
            ("learner", "n3", 1, "RuntimeError: out of luck"),
            ("learner", "n4", 2, "torchrun ends the others"),
            ("server", "n1", 1, "of an earlier life"),
            ("server", "n2", 1, "of this one"),
            ("server", "n2", 11, "another"),
            ("server", "n1", 2, "RuntimeError: out of luck"),
            ("server", "n2", 2, "killed with the other node's"),
        ]
    ):
        log = rundir.log(role, host, rank)
        log.parent.mkdir(exist_ok=True)
        log.write_text(said + "\n")
        os.utime(log, (n, n))
    assert log_of(rundir, Role("learner")) == rundir.log("learner", "n3", 1)
    assert log_of(rundir, Role("server", 1)) == rundir.log("server", "n2", 1)
    assert log_of(rundir, Role("server", 2)) == rundir.log("server", "n1", 2)


def test_that_a_peer_was_lost_is_no_cause(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """The rank that ended first says why; those that noticed wrote later. Only if it
    could say nothing are they shown.
    """
    rundir = write_run(0)
    server = Role("server", 0)
    first = rundir.log("server", "n1", 0)
    second = rundir.log("server", "n2", 0)
    first.parent.mkdir()
    lost = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:30562"
    )
    second.write_text("ValueError: out of luck\n")
    first.write_text(f"{lost}\n")
    os.utime(second, (1, 1))
    assert log_of(rundir, server) == second
    second.write_text(f"ValueError: out of luck\n{lost}\n")
    assert log_of(rundir, server) == second
    assert last_problem(second) == "ValueError: out of luck"
    second.write_text("killed\n")
    assert log_of(rundir, server) == first
    assert last_problem(first) == lost
    first.write_text(
        f" ERROR a grader failed\nmegarl: http://rewards: Connection reset by peer\n{lost}\n"
    )
    assert last_problem(first) == "megarl: http://rewards: Connection reset by peer"


def test_what_an_earlier_life_said_is_no_cause(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """Neither on a node that the role has left, nor in the log of a rank that goes on
    in the same file.
    """
    rundir = write_run(0)
    learner = Role("learner")
    left = rundir.log("learner", "node7", 0)
    again = rundir.log("learner", "node9", 1)
    left.parent.mkdir()
    for log in (left, again):
        log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    begins = log_sizes(rundir, learner)
    assert log_of(rundir, learner, begins) is None
    with again.open("a") as file:
        file.write("INFO step 41\n")
    assert log_of(rundir, learner, begins) == again
    assert last_problem(again, begins[again]) == ""
    assert last_lines(again, start=begins[again]) == ["INFO step 41"]
    new = rundir.log("learner", "node9", 0)
    new.write_text("RuntimeError: out of luck\n")
    assert log_of(rundir, learner, begins) == new
    assert last_problem(new) == "RuntimeError: out of luck"
