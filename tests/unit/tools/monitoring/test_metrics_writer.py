"""metrics.jsonl and TensorBoard, read back with TensorBoard's own reader."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import TENSORS, EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir, append_jsonl, latest_rows
from megarl.core.recipe import Recipe, dump
from megarl.core.telemetry.names import tag
from megarl.run import status
from megarl.run.logs import Tail
from megarl.run.state import Observer
from megarl.tools.monitoring import metrics
from megarl.tools.monitoring.metrics import MetricsWriter

ENDPOINTS = Endpoints(
    session="s",
    controller="",
    servers=(),
    api_key="u",
    admin_key="a",
    link=LinkKeys.new(),
    rendezvous_port=1,
)


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files by name: second, process, and a number in the process, of
    which 10 comes before 9.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def board(rundir: RunDir) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(rundir.tensorboard), size_guidance={TENSORS: 0})
    events.Reload()
    return {
        name: [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(name)]
        for name in events.Tags()[TENSORS]
    }


def test_rows_reach_both(recipe: Recipe, rundir: RunDir) -> None:
    writer = MetricsWriter(recipe, rundir, ENDPOINTS)
    for step in range(3):
        writer.row(
            {
                "step": step,
                "pass_rate_train": 0.25 * step,
                "entropy": math.nan,
                "compute_unit": "core",
                "mine": 1,
            }
        )
    append_jsonl(rundir.eval, {"step": 3, "pass_rate": 0.5})
    writer.close()
    assert [row["pass_rate_train"] for row in latest_rows(rundir.metrics)] == [0, 0.25, 0.5]
    scalars = board(rundir)
    assert scalars["reward/pass_rate_train"] == [(0, 0), (1, 0.25), (2, 0.5)]
    assert scalars["other/mine"][-1] == (2, 1)
    assert scalars["eval/pass_rate"] == [(3, 0.5)]
    assert not any("entropy" in name or "compute_unit" in name for name in scalars)


def test_replay_supersedes(recipe: Recipe, rundir: RunDir) -> None:
    first = MetricsWriter(recipe, rundir, ENDPOINTS)
    for step in range(4):
        first.row({"step": step, "loss": 1.0})
    first.close()
    second = MetricsWriter(recipe, rundir, ENDPOINTS)
    for step in range(2, 5):
        second.row({"step": step, "loss": 2.0})
    second.close()
    assert [row["loss"] for row in latest_rows(rundir.metrics)] == [1, 1, 2, 2, 2]
    assert board(rundir)["learner/loss"] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2)]


def test_evaluations_that_a_replay_does_not_make_again_stay(recipe: Recipe, rundir: RunDir) -> None:
    first = MetricsWriter(recipe, rundir, ENDPOINTS)
    for step in range(4):
        append_jsonl(rundir.eval, {"step": step, "pass_rate": step / 4})
        first.row({"step": step, "loss": 1.0})
    first.close()
    append_jsonl(rundir.eval, {"step": 4, "pass_rate": 1.0})  # while no learner is alive
    for begin in (2, 3):
        again = MetricsWriter(recipe, rundir, ENDPOINTS)
        for step in range(begin, 5):
            again.row({"step": step, "loss": 2.0})
        again.close()
        assert board(rundir)["eval/pass_rate"] == [(step, step / 4) for step in range(5)]


def test_tensorboard_ends_no_step_and_is_written_again(
    recipe: Recipe, rundir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder is gone for a moment, as on an evicted client of a network's file
    system.
    """
    writer = MetricsWriter(recipe, rundir, ENDPOINTS)
    away = rundir.path / "away"
    writer.row({"step": 0, "loss": 1.0})
    rundir.tensorboard.rename(away)
    rundir.tensorboard.touch()
    for step in range(1, 2000):
        writer.row({"step": step, "loss": 1.0})
        if "values are lost" in caplog.text:
            break
        time.sleep(0.01)
    rundir.tensorboard.unlink()
    away.rename(rundir.tensorboard)
    for more in range(step + 1, step + 4):
        writer.row({"step": more, "loss": 1.0})
    writer.close()
    assert len(latest_rows(rundir.metrics)) == step + 4
    assert [at for at, _ in board(rundir)["learner/loss"]][-3:] == [step + 1, step + 2, step + 3]
    assert caplog.text.count("values are lost") == 1


def test_a_file_system_that_fails_for_a_moment_ends_no_step(
    recipe: Recipe, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MetricsWriter(recipe, rundir, ENDPOINTS)
    away = rundir.path / "away"
    writer.row({"step": 0, "loss": 1.0})
    rundir.metrics.rename(away)
    rundir.metrics.mkdir()  # so it cannot be opened

    def recover() -> None:
        rundir.metrics.rmdir()
        away.rename(rundir.metrics)

    well = threading.Timer(1.5, recover)
    well.start()
    writer.row({"step": 1, "loss": 1.0})
    well.join()
    assert [row["step"] for row in latest_rows(rundir.metrics)] == [0, 1]
    rundir.metrics.rename(away)
    rundir.metrics.mkdir()
    monkeypatch.setattr(metrics, "MOMENT_S", 0.5)
    with pytest.raises(MegarlError, match=r"metrics\.jsonl: cannot be written: Is a directory"):
        writer.row({"step": 2, "loss": 1.0})
    writer.close()


def test_alarms_are_the_same_live_after_a_restart_and_afterwards(
    recipe: Recipe, rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.recipe.write_text(dump(recipe))
    observer = Observer(rundir)
    for steps in (range(33), range(30, 60)):  # the second life begins with a replay
        writer = MetricsWriter(recipe, rundir, ENDPOINTS)
        for step in steps:
            writer.row({"step": step, "grad_norm": 100.0 if 31 <= step < 45 else 1.0})
            if step % 3 == 0:
                observer.look()
        writer.close()
    observer.look()
    rows = latest_rows(rundir.metrics)
    ill = [row["step"] for row in rows if row.get("alarm/grad_norm")]
    assert ill == [row["step"] for row in rows if not row["health"]]
    assert 33 == ill[0] < 45 < ill[-1] < 59, (
        "the third step far off raises it; it goes when the signal has come back"
    )
    (alarm,) = observer.state.health.history
    assert (alarm.since, alarm.raised, alarm.until) == (31, 33, ill[-1] + 1)
    assert board(rundir)["health/health"][33] == (33, 0)
    assert status.health(rundir.path) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"steps 31 to {ill[-1]}, noticed at 33: grad norm (100 since step 31, 1 before): gradients"
        " have"
    )
    assert said.endswith("60 steps, 1 alarms; now: healthy\n")
    for step in range(60, 63):
        append_jsonl(rundir.metrics, {"step": step, "grad_norm": 1e9})
    assert status.health(rundir.path) == 1
    assert "now: grad_norm\n" in capsys.readouterr().out


def test_tag() -> None:
    assert tag("lag_max") == "pipeline/lag_max"
    assert tag("pass_rate_train/math") == "reward/pass_rate_train/math"
    assert tag("unheard_of") == "other/unheard_of"


def test_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    tail = Tail(path)
    assert tail.new() == []
    writes: list[tuple[str, list[dict[str, int]]]] = [
        ('{"a": 1}\n{"a"', [{"a": 1}]),
        (": 2}", []),
        ("\n", [{"a": 2}]),
        ('{"cut\n{"a": 3}\n', [{"a": 3}]),
    ]
    for text, expected in writes:
        with path.open("a") as file:
            file.write(text)
        assert tail.new() == expected


def test_names_are_those_of_a_row(write_run: Callable[[int], RunDir]) -> None:
    row = latest_rows(write_run(1).metrics)[0]
    assert all(not tag(name).startswith("other/") for name in row)
