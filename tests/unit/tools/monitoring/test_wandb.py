"""W&B as a second writer, against a stand-in of its module: same names, one id over
resumes, no error of it reaches the run.

With the real one in offline mode, where it is installed.
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir, append_jsonl
from megarl.core.recipe import Recipe, from_tree
from megarl.tools.monitoring import wandb_writer
from megarl.tools.monitoring.metrics import MetricsWriter
from megarl.tools.monitoring.wandb_writer import WandbWriter

NOBODY = Endpoints(
    session="s",
    controller="",
    servers=(),
    api_key="u",
    admin_key="a",
    link=LinkKeys.new(),
    rendezvous_port=1,
)


class FakeWandb(SimpleNamespace):
    """What of wandb's module is used. `inits`: arguments of each init; `logged`: rows
    of all runs.
    """

    class Error(Exception): ...

    def __init__(self, reachable: bool = True, breaks: bool = False) -> None:
        super().__init__(Settings=lambda **s: s)
        self.reachable = reachable
        self.breaks = breaks
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    def init(self, **asked: Any) -> "FakeWandb":
        self.inits.append(asked)
        if asked.get("mode") != "offline" and not self.reachable:
            raise self.Error("timed out")
        return self

    def teardown(self) -> None: ...

    def define_metric(self, name: str, step_metric: str = "") -> None: ...

    def log(self, row: dict[str, float]) -> None:
        if self.breaks:
            raise BrokenPipeError("its process is gone")
        self.logged.append(row)

    def finish(self) -> None:
        self.finished += 1


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeWandb) -> FakeWandb:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def wanted(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    services = {"judge": {"url": "http://judge/score?key=hush"}}
    data = tree["data"] | {"services": services}
    return from_tree(tree | {"data": data})


@pytest.fixture
def rundir(wanted: Recipe) -> RunDir:
    made = RunDir(wanted.run.path)
    made.create()
    return made


def test_rows_and_evaluations_under_the_names_of_tensorboard(
    wanted: Recipe, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch, FakeWandb())
    writer = MetricsWriter(wanted, rundir, NOBODY)
    writer.row({"step": 0, "loss": 0.5, "entropy": float("nan"), "compute_unit": "core"})
    append_jsonl(rundir.eval, {"step": 1, "pass_rate": 0.25})
    writer.row({"step": 1, "loss": 0.25})
    writer.close()
    monkeypatch.delenv("WANDB_PROJECT")
    MetricsWriter(wanted, rundir, NOBODY).close()
    assert len(fake.inits) == 1, "without a project nothing is sent"
    assert fake.logged == [
        {"run/step": 0, "learner/loss": 0.5, "health/health": 1.0, "step": 0},
        {"run/step": 1, "learner/loss": 0.25, "health/health": 1.0, "step": 1},
        {"eval/pass_rate": 0.25, "step": 1},
    ]
    assert fake.finished == 1
    asked = fake.inits[0]
    assert asked["name"] == "demo"
    assert "hush" not in json.dumps(asked["config"]), "a service's URL may have a key in it"


def test_a_run_that_goes_on_is_one_run_there(
    wanted: Recipe, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch, FakeWandb())
    WandbWriter(wanted, rundir).close()
    WandbWriter(wanted, rundir).close()
    known = (rundir.path / "wandb" / "run-id").read_text()
    assert [(a["id"], a["resume"]) for a in fake.inits] == [(known, "allow")] * 2


def test_without_its_network_it_is_written_offline(
    wanted: Recipe,
    rundir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = use(monkeypatch, FakeWandb(reachable=False))
    writer = WandbWriter(wanted, rundir)
    writer.write(0, {"learner/loss": 1.0})
    writer.close()
    assert [a.get("mode") for a in fake.inits] == [None, "offline"]
    assert len(fake.logged) == 1
    assert "wandb sync" in caplog.text


def test_its_errors_do_not_stop_the_run(
    wanted: Recipe,
    rundir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use(monkeypatch, FakeWandb(breaks=True))
    writer = WandbWriter(wanted, rundir)
    for step in range(3):
        writer.write(step, {"learner/loss": 1.0})
    writer.close()
    assert caplog.text.count("its process is gone") == 1


@pytest.mark.parametrize("hangs", ["init", "log", "finish"])
def test_nor_does_it_wait_for_one_that_hangs(
    hangs: str,
    wanted: Recipe,
    rundir: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And whose process, for which wandb would wait as Python exits, is ended."""
    monkeypatch.setattr(wandb_writer, "FINISH_LIMIT_S", 0.05)
    monkeypatch.setattr(wandb_writer, "MOST_WAITING", 10)
    fake = use(monkeypatch, FakeWandb())
    forever = threading.Event()
    monkeypatch.setattr(fake, hangs, lambda *_, **__: forever.wait())
    (tmp_path / "wandb-core").symlink_to(shutil.which("sleep") or "")
    core = subprocess.Popen([tmp_path / "wandb-core", "600"])
    writer = WandbWriter(wanted, rundir)
    for step in range(100):
        writer.write(step, {"learner/loss": 1.0})
    assert writer._rows.qsize() <= 11
    writer.close()
    assert "send the rest with `wandb sync`" in caplog.text
    assert core.wait(60) == -signal.SIGKILL
    forever.set()


def test_what_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setattr(wandb_writer, "find_spec", lambda name: None)
    with pytest.raises(
        MegarlError, match=r"WANDB_PROJECT: 'mine', but wandb is not installed; `pip install wandb`"
    ):
        wandb_writer.check()
    monkeypatch.setattr(wandb_writer, "find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(MegarlError, match="WANDB_API_KEY"):
        wandb_writer.check()
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_writer.check()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    wandb_writer.check()
    monkeypatch.delenv("WANDB_PROJECT")
    monkeypatch.setattr(wandb_writer, "find_spec", lambda name: None)
    wandb_writer.check()


@pytest.mark.slow  # not in the gate, whose machine has no wandb
def test_with_the_real_one_offline(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    recipe = from_tree(tree)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_MODE", "offline")
    rundir = RunDir(recipe.run.path)
    rundir.create()
    for begin in (0, 2):
        writer = WandbWriter(recipe, rundir)
        for step in range(begin, begin + 3):
            writer.write(step, {"learner/loss": 1.0 / (step + 1)})
        writer.close()
    files = list(rundir.path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {
        f"run-{(rundir.path / 'wandb' / 'run-id').read_text()}.wandb"
    }
    assert b"learner/loss" in files[0].read_bytes()
