"""Whatever the files of a run directory contain, every command that reads one answers,
or prints one message, quickly.
"""

import json
import random
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megarl import cli
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe, dump
from megarl.run.state import Observer
from tests.unit.conftest import evaluation_row, metrics_row
from tests.unit.core.journal.test_journal import written
from tests.unit.fuzz.hostile import changed, lines, rows_like

LIMIT_S = 10.0
LONGEST = 8_000  # seconds of a core, characters
EVENT = {
    "time": 1.8e9,
    "session": "s",
    "event": "started",
    "role": "learner-0",
    "pid": 1,
    "nodes": ["here"],
}
FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "eval.jsonl",
    "status.json",
    "logs/supervisor.jsonl",
    "endpoints.json",
    "fingerprints.json",
    "rollouts/000000.journal",
    "stop",
    "summary.json",
    "trace/learner.jsonl",
)


@pytest.fixture
def whole(
    recipe: Recipe, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> RunDir:
    """A run with a journal, whose recipe is written beside it too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rundir = write_run(3)
    (rundir.path.parent / "again.yaml").write_text(dump(recipe))
    written(rundir.rollouts, 2)
    (rundir.logs / "supervisor.jsonl").write_text(json.dumps(EVENT) + "\n")
    return rundir


def commands(rundir: RunDir) -> list[list[str]]:
    run = str(rundir.path)
    again = ["train", str(rundir.path.parent / "again.yaml"), "--dry-run", "run.resume=auto"]
    return [
        ["status", run],
        ["rollouts", "show", run],
        ["trace", run],
        ["logs", run],
        ["scaling", "fit", run],
        again,
    ]


PROFILE: Any = settings.default


@settings(
    suppress_health_check=list(HealthCheck),
    max_examples=PROFILE.max_examples // 3,
    phases=(Phase.generate,),  # an example takes long, and what is shown of one is short
)
@given(data=st.data())
def test_any_file_of_a_run(
    whole: RunDir, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    kept = whole.path.with_name("kept")
    if not kept.exists():
        shutil.copytree(whole.path, kept)
    shutil.rmtree(whole.path)
    shutil.copytree(kept, whole.path)
    name = data.draw(st.sampled_from(FILES))
    file = whole.path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data.draw(contents(name, file.read_bytes() if file.exists() else b"{}\n")))
    Observer(whole).look()
    command = data.draw(st.sampled_from(commands(whole)))
    begun = time.process_time()
    assert cli.main(command) in (0, 1, 2)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert len(said.err) < LONGEST
    assert time.process_time() - begun < LIMIT_S


def contents(name: str, before: bytes) -> st.SearchStrategy[bytes]:
    """Generate contents for a file of this name:
    nearly as it was, or quite different.
    """
    rows = {
        "metrics.jsonl": metrics_row(0, random.Random(0)),
        "eval.jsonl": evaluation_row(0),
        "logs/supervisor.jsonl": EVENT,
    }
    found = st.just(b"") | changed(before)
    if name in rows:
        return found | lines(rows_like(rows[name]))
    if name.endswith(".json"):
        return found | rows_like(json.loads(before) or {"x": 1}).map(
            lambda row: json.dumps(row).encode()
        )
    return found
