"""The order, the failures and the interruption of tasks, with a stand-in for `megarl
train`.
"""

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from megarl.predict.study import running
from megarl.predict.study.plan import Study, prepare
from megarl.predict.study.running import side_by_side

pytestmark = pytest.mark.processes

FAKE_TRAIN = """
import json, os, pathlib, signal, sys, time
import yaml
run = yaml.safe_load(open(sys.argv[-1]))["run"]
path = pathlib.Path(run["dir"], run["name"])
path.mkdir(parents=True, exist_ok=True)
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
(path / "recipe.yaml").touch()
end = time.monotonic() + {seconds}
while time.monotonic() < end and not stop:
    time.sleep(0.01)
outcome = "stopped" if stop else "failed" if run["name"] in {failing} else "finished"
(path / "summary.json").write_text(json.dumps({{"outcome": outcome}}))
with (path.parent.parent / "order").open("a") as order:
    order.write(run["name"] + " " + outcome + "\\n")
if run["name"] in {ending}:
    (path / "summary.json").write_text(json.dumps({{"outcome": "stopped"}}))
    sys.exit(128 + signal.SIGUSR1)
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(running, "LOOK_S", 0.02)
    return prepare(tmp_path, side_by_side(["quickstart", "grpo"], ["base=quickstart"]), (0, 1))


def train_as(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seconds: float = 0.0,
    failing: tuple[str, ...] = (),
    ending: tuple[str, ...] = (),
) -> None:
    """From now on a run is this script."""
    script = tmp_path / "fake_train.py"
    script.write_text(FAKE_TRAIN.format(seconds=seconds, failing=failing, ending=ending))
    monkeypatch.setattr(running, "TRAIN", (sys.executable, str(script)))


def order(study: Study) -> list[str]:
    return (study.path / "order").read_text().splitlines()


def test_all_in_order_and_only_once(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_as(monkeypatch, tmp_path)
    names = ["quickstart-seed0", "grpo-seed0", "quickstart-seed1", "grpo-seed1"]
    for _ in range(2):  # the second time there is nothing left to do
        assert running.run(study, study.tasks, Console(quiet=True)) == 0
        assert order(study) == [f"{name} finished" for name in names]


def test_a_failure_does_not_stop_the_others(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_as(monkeypatch, tmp_path, failing=("grpo-seed0",))
    assert running.run(study, study.tasks, Console(quiet=True)) == 1
    assert [line for line in order(study) if "failed" in line] == ["grpo-seed0 failed"]
    train_as(monkeypatch, tmp_path)
    assert running.run(study, study.tasks, Console(quiet=True)) == 0
    assert order(study)[4:] == ["grpo-seed0 finished"]


def test_a_run_that_stops_ahead_of_its_jobs_end_stops_the_study(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another would begin minutes before that; and its job is queued again."""
    train_as(monkeypatch, tmp_path, ending=("grpo-seed0",))
    assert running.run(study, study.tasks, Console(quiet=True)) == 128 + signal.SIGUSR1
    assert [task.state() for task in study.tasks] == ["done", "begun", "waiting", "waiting"]


def test_interruption(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is told to stop; the same call goes on with it."""
    train_as(monkeypatch, tmp_path, seconds=30)

    def interrupt() -> None:
        limit = time.monotonic() + 60
        while study.tasks[0].state() != "begun" and time.monotonic() < limit:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert running.run(study, study.tasks, Console(quiet=True)) == 128 + signal.SIGINT
    assert order(study) == ["quickstart-seed0 stopped"]
    assert [task.state() for task in study.tasks] == ["begun", "waiting", "waiting", "waiting"]
    train_as(monkeypatch, tmp_path)
    assert running.run(study, study.tasks, Console(quiet=True)) == 0
    assert order(study)[1] == "quickstart-seed0 finished"


def test_table_of_all_tasks(study: Study) -> None:
    first = study.tasks[0]
    first.rundir.create()
    first.rundir.recipe.touch()
    counts = {"n_prompts": 100, "samples": 4, "compute_hours": 1.0, "compute_unit": "gpu"}
    first.rundir.eval.write_text(
        "".join(json.dumps({"step": s, "pass_rate": s / 10} | counts) + "\n" for s in (0, 4, 9))
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(running.table(study, first, 125.0))
    text = console.export_text()
    assert "quickstart-seed0" in text
    assert "running" in text
    assert "0.000 → 0.900" in text
    assert "▁▄█" in text
    assert text.count("waiting") == 3
