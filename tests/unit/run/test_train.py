"""The supervisor over small stand-in processes: what dies is started again, and in the
end nothing is left.
"""

import errno
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import (
    Endpoints,
    LinkKeys,
    RunDir,
    append_jsonl,
    latest_rows,
    read_jsonl,
)
from megarl.core.recipe import Recipe, dump
from megarl.run import train
from megarl.run.closing import RunEnd, closing
from megarl.run.launcher import LocalLauncher
from megarl.run.process import StopRequest
from megarl.run.restart import Role
from megarl.run.view import Screen
from tests.processes import alive

pytestmark = pytest.mark.processes

TRAIN = Path(__file__).with_name("stand_in_train.py")
LIMIT_S = 60.0
KEYS = LinkKeys(controller="", controller_secret="", learner="", learner_secret="")


class Life:
    """One `megarl train` over stand-ins."""

    def __init__(self, recipe: Recipe, folder: Path, report: bool, before: str = "") -> None:
        """before: what the shell does before it becomes the supervisor."""
        self.rundir = RunDir(recipe.run.path)
        file = folder / "recipe.yaml"
        file.write_text(dump(recipe))
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(TRAIN), str(file), *(["report"] if report else [])]
        self.process = subprocess.Popen(
            ["sh", "-c", f"{before} exec {shlex.join(command)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def pids(self, role: str) -> list[int]:
        """All processes that stood in for a role so far, and their children."""
        return [row["pid"] for row in read_jsonl(self.rundir.path / f"{role}.pids")]

    def newest(self, role: str) -> int:
        return [
            row["pid"]
            for row in read_jsonl(self.rundir.path / f"{role}.pids")
            if "child" not in row
        ][-1]

    def all_pids(self) -> list[int]:
        return [
            pid for role in ("server-0", "controller-0", "learner-0") for pid in self.pids(role)
        ]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit, "not within a minute"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(
            lambda: (
                len(latest_rows(self.rundir.metrics)) >= count
                and len(self.pids("server-0")) >= 3
                and len(self.pids("controller-0")) >= 1
            )
        )

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, output

    def events(self, name: str) -> list[str]:
        return [
            e.get("role", "")
            for e in read_jsonl(self.rundir.logs / "supervisor.jsonl")
            if e["event"] == name
        ]


@pytest.fixture
def live(recipe: Recipe, tmp_path: Path) -> Iterator[Callable[..., Life]]:
    lives: list[Life] = []

    def start(
        steps: int = 2_000, resume: bool = False, report: bool = False, before: str = ""
    ) -> Life:
        changed = {"steps": steps} | ({"resume": "auto"} if resume else {})
        chosen = recipe.model_copy(update={"run": recipe.run.model_copy(update=changed)})
        lives.append(Life(chosen, tmp_path, report, before))
        return lives[-1]

    yield start
    for life in lives:
        life.process.kill()
        life.process.wait()


def nobody(pids: list[int], ended: float = math.inf) -> bool:
    """Whether none of them lives. ended: what began after this time has only been given
    one of their numbers.
    """
    return not any(alive(pid, ended) for pid in pids)


def marked(recipe: Recipe, what: str) -> RunDir:
    """Its run, whose learner will find itself to be so."""
    rundir = RunDir(recipe.run.path)
    rundir.path.mkdir(parents=True)
    (rundir.path / what).touch()
    return rundir


def test_all_steps_then_nothing_left(live: Callable[..., Life]) -> None:
    life = live(report=True)
    life.wait_for_steps(5)
    (life.rundir.path / "enough").touch()
    status, output = life.end()
    assert status == 0, output
    assert len(life.all_pids()) == 5
    assert nobody(life.all_pids())
    summary = json.loads(life.rundir.summary.read_text())
    assert (summary["outcome"], summary["steps"], summary["restarts"]) == (
        "finished",
        len(latest_rows(life.rundir.metrics)),
        0,
    )
    assert life.rundir.report.exists()
    assert life.rundir.picture.exists()


def test_a_reader_of_the_screen_that_leaves_ends_nothing(live: Callable[..., Life]) -> None:
    """`megarl train | head -1`, `megarl train 2>&1 | tee file` with a tee that is
    killed.
    """
    life = live()
    assert life.process.stdout is not None
    assert life.process.stdout.readline()
    life.process.stdout.close()
    (life.rundir.path / "enough").touch()
    assert life.process.wait(LIMIT_S) == 0
    assert json.loads(life.rundir.summary.read_text())["outcome"] == "finished"
    assert nobody(life.all_pids())


def test_a_run_needs_no_streams_at_all(live: Callable[..., Life]) -> None:
    life = live(before="exec <&- >&- 2>&-;")
    life.wait_for_steps(3)
    (life.rundir.path / "enough").touch()
    status, _ = life.end()
    assert status == 0
    assert json.loads(life.rundir.summary.read_text())["outcome"] == "finished"


@pytest.mark.parametrize("role", ["server-0", "controller-0", "learner-0"])
def test_killed_role_is_started_again(live: Callable[..., Life], role: str) -> None:
    life = live()
    life.wait_for_steps(3)
    killed = life.newest(role)
    os.kill(killed, signal.SIGKILL)
    life.wait_for(lambda: life.newest(role) != killed)
    life.wait_for_steps(len(latest_rows(life.rundir.metrics)) + 2)
    (life.rundir.path / "enough").touch()
    status, output = life.end()
    assert status == 0, output
    assert life.events("restart") == [role]
    steps = [row["step"] for row in latest_rows(life.rundir.metrics)]
    assert steps == list(range(len(steps)))
    assert nobody(life.all_pids())
    assert json.loads(life.rundir.summary.read_text())["restarts"] == 1


def test_what_a_dead_role_started_dies_too(live: Callable[..., Life]) -> None:
    life = live()
    life.wait_for_steps(1)
    family = life.pids("server-0")
    os.kill(life.newest("server-0"), signal.SIGKILL)
    life.wait_for(lambda: len(life.pids("server-0")) > len(family) and nobody(family))


def test_stopped_role_is_killed_and_started_again(live: Callable[..., Life]) -> None:
    life = live()
    life.wait_for_steps(2)
    os.kill(life.newest("learner-0"), signal.SIGSTOP)
    life.wait_for(lambda: life.events("restart") == ["learner-0"])
    (life.rundir.path / "enough").touch()
    status, output = life.end()
    assert status == 0, output
    assert life.events("hung") == ["learner-0"]
    assert "has been stopped" in output


def test_one_signal_saves(live: Callable[..., Life]) -> None:
    life = live()
    life.wait_for_steps(2)
    life.process.send_signal(signal.SIGINT)
    status, output = life.end()
    assert status == 130, output
    assert life.rundir.stop_file.exists()
    assert json.loads(life.rundir.summary.read_text())["outcome"] == "stopped"
    assert nobody(life.all_pids())


def test_stop_file_is_obeyed(live: Callable[..., Life]) -> None:
    life = live()
    life.wait_for_steps(2)
    life.rundir.stop_file.touch()
    status, output = life.end()
    assert status == 0, output
    assert json.loads(life.rundir.summary.read_text())["outcome"] == "stopped"


@pytest.mark.parametrize("role", ["controller-0", "learner-0"])
def test_a_role_that_is_told_to_end_ends_the_run(live: Callable[..., Life], role: str) -> None:
    """As Slurm tells all processes of a job that has to make room,
    but not its script.
    """
    life = live()
    life.wait_for_steps(2)
    os.kill(life.newest(role), signal.SIGTERM)
    status, output = life.end()
    assert status == 128 + signal.SIGTERM, output
    summary = json.loads(life.rundir.summary.read_text())
    assert (summary["outcome"], summary["reason"]) == ("stopped", "as asked")
    assert life.events("restart") == []
    assert nobody(life.all_pids())


def test_a_learner_that_leaves_before_the_last_step_has_crashed(
    live: Callable[..., Life], recipe: Recipe
) -> None:
    """Whatever it takes for the end, nobody asked for one: its status 0 makes no run
    finished.
    """
    rundir = marked(recipe, "leaves")
    life = live()
    life.wait_for(lambda: len(life.events("restart")) == 1)
    (rundir.path / "leaves").unlink()
    (rundir.path / "enough").touch()
    status, output = life.end()
    assert status == 0, output
    assert "learner-0 left after step 1 of 2000, with status 0; starting it again" in output
    assert json.loads(rundir.summary.read_text())["steps"] == 2000


def test_a_job_ends_before_slurms_signal_if_the_checkpoint_takes_longer(
    live: Callable[..., Life],
) -> None:
    """Its status has the job queued again, as after the signal."""
    life = live(before="export SLURM_JOB_END_TIME=$(( $(date +%s) + 1000 ));")
    life.wait_for_steps(2)
    append_jsonl(life.rundir.metrics, {"step": 0, "checkpoint_write_seconds": 700.0})
    status, output = life.end()
    assert status == 128 + signal.SIGUSR1, output
    assert "the job ends soon, and a step and the checkpoints of this run take up to 14" in output


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGUSR1, 128 + signal.SIGUSR1), (signal.SIGINT, 1)]
)
def test_a_learner_that_does_not_save(
    live: Callable[..., Life], number: int, expected: int
) -> None:
    """A job that has to make room goes on later all the same; whoever pressed Ctrl-C is
    told.
    """
    life = live()
    life.wait_for_steps(2)
    (life.rundir.path / "unsaved").touch()
    life.process.send_signal(number)
    status, output = life.end()
    assert status == expected, output
    assert "learner-0 ended with status 1 before it had saved" in output


def test_a_role_that_dies_again_and_again_ends_the_run_with_its_causes(
    live: Callable[..., Life], recipe: Recipe
) -> None:
    marked(recipe, "dies")
    life = live()
    status, output = life.end()
    assert status == 1
    assert "learner-0 died 6 times within 0 minutes" in output
    assert output[output.index("what died") :].count("ended with status 1") == 6
    assert life.events("restart") == ["learner-0"] * 5
    assert nobody(life.all_pids())


@pytest.mark.parametrize(("number", "reported"), [(signal.SIGUSR1, False), (signal.SIGINT, True)])
def test_a_report_that_fails_changes_no_status(
    live: Callable[..., Life], number: signal.Signals, reported: bool
) -> None:
    """A job is requeued by its status. One that has to make room tries no report: of a
    long run it takes minutes.
    """
    life = live(report=True)
    life.wait_for_steps(2)
    (life.rundir.path / "rollouts" / "000000.journal").write_text("damaged")
    life.process.send_signal(number)
    status, output = life.end()
    assert status == 128 + number, output
    assert ("report.html was not written" in output) == reported
    assert json.loads(life.rundir.summary.read_text())["outcome"] == "stopped"


def test_a_summary_that_fails_ends_no_closing(
    recipe: Recipe, write_run: Callable[[int], RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = write_run(2)
    rundir.summary.mkdir()
    written: list[RunDir] = []
    closing(Console(), recipe, rundir, RunEnd("failed", "a reason"), [], {}, 1.0, written.append)
    said = capsys.readouterr().err
    assert f"{rundir.summary} was not written" in said
    assert "megarl: a reason; see" in said
    assert written == [rundir]


def test_second_signal_kills(live: Callable[..., Life]) -> None:
    life = live()
    life.wait_for_steps(2)
    os.kill(life.newest("learner-0"), signal.SIGSTOP)  # it will never save
    life.process.send_signal(signal.SIGTERM)
    life.wait_for(lambda: life.rundir.stop_file.exists())
    life.process.send_signal(
        signal.SIGTERM
    )  # so soon after the first it is the same request, sent by the job and by its script
    life.process.send_signal(signal.SIGINT)
    status, output = life.end()
    assert status == 128 + signal.SIGTERM, output
    assert "killed as asked" in output
    assert nobody(life.all_pids())


def test_nothing_survives_the_supervisor_and_the_run_goes_on(live: Callable[..., Life]) -> None:
    life = live()
    life.wait_for_steps(3)
    life.process.kill()
    life.end()
    stray = {
        row["pid"] for row in read_jsonl(life.rundir.path / "server-0.pids") if row.get("child")
    }
    theirs = [pid for pid in life.all_pids() if pid not in stray]
    limit = time.monotonic() + LIMIT_S
    ended = time.time()
    while not nobody(theirs, ended):
        assert time.monotonic() < limit
        time.sleep(0.05)
    for (
        pid
    ) in stray:  # by design it has left every session and asks for no signal: the one kind that can
        os.kill(pid, signal.SIGKILL)
    steps = len(latest_rows(life.rundir.metrics)) + 3
    again = live(steps=steps, resume=True)
    status, output = again.end()
    assert status == 0, output
    assert f"resuming {life.rundir.path}\n  run.steps: 2000 before, {steps} now\n" in output, (
        "a forgotten key=value shows"
    )
    assert len(latest_rows(again.rundir.metrics)) == steps


@pytest.mark.parametrize(("starts", "fruitful", "expected"), [(4, 0, 75), (5, 0, 1), (7, 3, 75)])
def test_a_job_that_loses_node_after_node_ends(
    live: Callable[..., Life],
    write_run: Callable[[int], RunDir],
    starts: int,
    fruitful: int,
    expected: int,
) -> None:
    """starts: of earlier lives; fruitful: of those, how many made steps, however often
    Slurm requeued them.
    """
    rundir = write_run(0)
    began = time.time() - 1000
    for life in range(starts):
        row = {
            "time": began + 10 * life,
            "session": str(life),
            "event": "started",
            "role": "learner-0",
        }
        append_jsonl(rundir.logs / "supervisor.jsonl", row)
        if life < fruitful:
            append_jsonl(rundir.metrics, {"step": life, "time": began + 10 * life + 5})
    for mark in ("dies", "lost"):
        (rundir.path / mark).touch()
    status, output = live(resume=True).end()
    assert status == expected, output
    assert "the node of learner-0 is lost" in output
    assert ("no step was made since the run was started 6 times" in output) == (expected == 1)


@pytest.mark.parametrize(
    ("starts", "number", "expected"), [(4, "USR1", 138), (5, "USR1", 1), (5, "TERM", 143)]
)
def test_a_job_whose_time_ends_before_each_first_step_ends(
    live: Callable[..., Life],
    write_run: Callable[[int], RunDir],
    starts: int,
    number: str,
    expected: int,
) -> None:
    """Slurm would requeue it for ever. A job can be preempted so often without a fault
    of its own.
    """
    rundir = write_run(0)
    for n in range(starts):
        row = {
            "time": time.time() - 1000 + n,
            "session": str(n),
            "event": "started",
            "role": "learner-0",
        }
        append_jsonl(rundir.logs / "supervisor.jsonl", row)
    (rundir.path / "slow").touch()
    life = live(resume=True)
    life.wait_for(lambda: (rundir.path / "learner-0.pids").exists())
    life.process.send_signal(signal.Signals[f"SIG{number}"])
    status, output = life.end()
    assert status == expected, output
    said = "ahead of a time limit (--time), and no step was made since the run was started 6 times"
    assert (said in output) == (expected == 1), output


def test_broken_from_the_start_ends_the_run_with_its_log(
    live: Callable[..., Life], recipe: Recipe
) -> None:
    rundir = marked(recipe, "broken")
    life = live()
    status, output = life.end()
    assert status == 1
    assert "learner-0 could not start" in output
    assert "megarl: the model is broken" in output
    assert json.loads(rundir.summary.read_text())["outcome"] == "failed"
    assert nobody(life.all_pids())


@pytest.mark.faults
def test_a_learner_that_says_the_run_has_failed_is_not_started_again(
    live: Callable[..., Life], recipe: Recipe
) -> None:
    rundir = marked(recipe, "hopeless")
    life = live()
    status, output = life.end()
    assert status == 1
    assert "megarl: three steps were skipped" in output
    assert life.events("restart") == []
    assert json.loads(rundir.summary.read_text())["outcome"] == "failed"
    (rundir.path / "hopeless").unlink()
    status, output = live(steps=3, resume=True).end()
    assert status == 0, output


@pytest.mark.faults
def test_a_controller_that_says_the_run_has_failed_is_not_started_again(
    live: Callable[..., Life],
) -> None:
    """The learner saves and leaves; nobody is started again."""
    life = live()
    life.wait_for_steps(3)
    (life.rundir.path / "senseless").touch()
    status, output = life.end()
    assert status == 1
    assert "megarl: the weights did not arrive as they are" in output
    assert (life.events("restart"), life.events("ended")) == ([], ["controller-0", "learner-0"])
    assert json.loads(life.rundir.summary.read_text())["outcome"] == "failed"
    assert nobody(life.all_pids())


@contextmanager
def in_the_way(file: Path) -> Iterator[None]:
    """A folder in the file's place, which nobody can write to as a file."""
    aside = file.with_name(f"{file.name}.aside")
    file.rename(aside)
    file.mkdir()
    try:
        yield
    finally:
        file.rmdir()
        aside.rename(file)


def test_a_run_directory_that_fails_for_a_moment_ends_nothing(live: Callable[..., Life]) -> None:
    """What is to be noted or started meanwhile is noted or started later; the screen is
    told.
    """
    life = live()
    life.wait_for_steps(2)
    server = life.newest("server-0")
    controller = life.newest("controller-0")
    (log,) = (life.rundir.logs / "server").glob("*.0.log")
    with in_the_way(life.rundir.logs / "supervisor.jsonl"), in_the_way(log):
        os.kill(server, signal.SIGKILL)
        os.kill(controller, signal.SIGKILL)
        life.wait_for(lambda: life.newest("controller-0") != controller)
        time.sleep(0.5)
        assert life.newest("server-0") == server
    life.wait_for(lambda: life.newest("server-0") != server)
    (life.rundir.path / "enough").touch()
    status, output = life.end()
    assert status == 0, output
    assert (
        1
        <= output.count("cannot be written: Is a directory; make it writable for the run; going on")
        <= 4
    )
    assert sorted(life.events("restart")) == ["controller-0", "server-0"]
    assert sorted(life.events("started")) == sorted(
        ["controller-0", "server-0"] * 2 + ["learner-0"]
    )
    assert nobody(life.all_pids())


def idle_supervisor(recipe: Recipe, rundir: RunDir, asked: StopRequest) -> train.Supervisor:
    """A supervisor that has started no role."""
    endpoints = Endpoints(
        session="s",
        controller="",
        servers=(),
        api_key="",
        admin_key="",
        link=KEYS,
        rendezvous_port=1,
    )
    supervisor = train.Supervisor(recipe, rundir, endpoints, LocalLauncher(), {}, asked)
    supervisor.screen = Screen(Console())
    return supervisor


def test_a_life_that_makes_steps_is_not_fruitless_by_a_wrong_clock(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """The learner's node believes that it is 1970, so its rows are older than every
    start of the run.
    """
    rundir = write_run(0)
    for n in range(7):
        row = {
            "time": time.time() - 1000 + n,
            "session": str(n),
            "event": "started",
            "role": "learner-0",
        }
        append_jsonl(rundir.logs / "supervisor.jsonl", row)
    supervisor = idle_supervisor(recipe, rundir, StopRequest())
    assert supervisor.end_if_restarted_too_often("its time is up") is not None
    append_jsonl(rundir.metrics, {"step": 0, "time": 5.0})
    supervisor.observer.look()
    assert supervisor.end_if_restarted_too_often("its time is up") is None


def test_a_request_to_stop_that_could_not_be_written_is_written_at_the_next_look(
    recipe: Recipe,
    write_run: Callable[[int], RunDir],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rundir = write_run(2)
    asked = StopRequest()
    stop = RunDir.stop
    fails = iter([True, True, False])

    def evicted(self: RunDir, number: int = 0) -> None:
        if next(fails):
            raise MegarlError("stop: cannot be written")
        stop(self, number)

    monkeypatch.setattr(RunDir, "stop", evicted)
    monkeypatch.setattr(train, "LOOK_S", 0.0)
    supervisor = idle_supervisor(recipe, rundir, asked)
    asked.heard(signal.SIGTERM, None)
    for _ in range(2):
        assert supervisor._tick() is None
    outcome = supervisor._tick()
    assert outcome is not None
    assert outcome.kind == "stopped"
    assert rundir.stop_signal() == signal.SIGTERM
    assert capsys.readouterr().out.count("stop: cannot be written; going on, and trying again") == 1


def test_a_role_that_cannot_start_ends_the_run_though_other_files_can_be_written(
    recipe: Recipe, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(role: Role) -> None:
        raise MegarlError(f"{role.name}.log: cannot be written")

    supervisor = idle_supervisor(recipe, write_run(2), StopRequest())
    monkeypatch.setattr(supervisor, "_start", refused)
    supervisor.restarts_at[Role("learner")] = 0.0
    supervisor._tick()
    monkeypatch.setattr(train, "MOMENT_S", 0.0)
    supervisor._note("beside it", None)
    with pytest.raises(MegarlError, match=r"learner-0\.log: cannot be written"):
        supervisor._tick()


def test_what_cannot_be_read_at_the_end_leaves_the_exit_status_alone(
    recipe: Recipe,
    write_run: Callable[[int], RunDir],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By it the batch script tells whether the job is to go on elsewhere."""

    def evicted(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("megarl.run.closing.log_of", evicted)
    lost = RunEnd("elsewhere", "the node of learner-0 is lost", Role("learner"))
    closing(Console(), recipe, write_run(2), lost, [], {}, 1.0, None)
    assert "the node of learner-0 is lost; its checkpoint is kept" in capsys.readouterr().err


def test_second_supervisor_is_refused(live: Callable[..., Life], recipe: Recipe) -> None:
    life = live()
    life.wait_for_steps(1)
    second = live(resume=True)
    status, output = second.end()
    assert status == 1
    assert f"another `megarl train` (process {life.process.pid} on " in output
