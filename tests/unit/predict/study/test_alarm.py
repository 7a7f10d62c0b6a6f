"""The table of alarms: what counts as noticed, named, early and false."""

import json
import os
import random
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import poisson

from benchmarks import alarm, alarm_faults
from megarl.core.base.errors import MegarlError

Row = dict[str, Any]
LABELS = "name,kind,seed,dose,step,named\n"


def write(
    folder: Path, name: str, steps: int, fault: int | None = None, early: int | None = None
) -> None:
    """A run with gradients of about 1: from `fault` on, and for three steps from
    `early` on, of a hundred. The pass rate falls ten steps after the fault.
    """
    rng = random.Random(name)
    (folder / name).mkdir()
    with (folder / name / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            large = (fault is not None and step >= fault) or (
                early is not None and early <= step < early + 3
            )
            file.write(
                json.dumps(
                    {"step": step, "grad_norm": (100 if large else 1) * rng.uniform(0.9, 1.1)}
                )
                + "\n"
            )
    with (folder / name / "eval.jsonl").open("w") as file:
        for step in range(0, steps + 1, 10):
            rate = 0.3 if fault is not None and step >= fault + 10 else 0.8
            score = {
                "step": step,
                "pass_rate": rate,
                "n_prompts": 100,
                "samples": 4,
                "compute_hours": 1.0,
            }
            file.write(json.dumps(score | {"compute_unit": "core"}) + "\n")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_bound_is_where_so_few_are_unlikely(count: int) -> None:
    assert poisson.cdf(count, alarm.garwood(count)) == pytest.approx(0.05)


def test_faults_and_clean_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "lr", 100, fault=60)
    write(tmp_path, "other", 100, fault=60, early=30)
    write(tmp_path, "ended", 70)
    (tmp_path / "ended" / "failure").write_text(
        "version 70: they differ. Likely cause: RoPE: differences grow"
    )
    write(tmp_path, "missed", 100)
    write(tmp_path, "clean", 100)
    lines = (
        "lr,rate,0,30,60,grad_norm drift",
        "other,head,1,2,60,kernels",
        "ended,rope,0,1,65,RoPE",
        "missed,head,0,1,60,",
    )
    (tmp_path / "labels.csv").write_text(LABELS + "\n".join([*lines, "clean,clean,0,,,"]) + "\n")
    runs = {run.name: run for run in alarm.folder(tmp_path, alarm.labels(tmp_path / "labels.csv"))}
    lr, other, ended, missed = (runs[name] for name in ("lr", "other", "ended", "missed"))
    assert lr.first is not None
    assert lr.first == lr.naming
    assert (lr.first.raised, lr.suffers, lr.lead, lr.steps, lr.false_alarms) == (62, 70, 8, 60, [])
    assert other.first is not None
    assert (other.first.name, other.naming, other.false_alarms) == (
        "grad_norm",
        None,
        ["grad_norm at 32"],
    )
    assert ended.naming is not None
    assert (ended.naming.name, ended.naming.raised, ended.suffers) == ("ended", 70, None)
    assert (missed.first, missed.naming, missed.lead) == (None, None, None)
    monkeypatch.setattr("sys.argv", ["alarm", str(tmp_path), "--out", str(tmp_path / "out.json")])
    alarm.main()
    said = capsys.readouterr().out
    assert "| lr | rate | 0 | 30 | 60 | 62 | grad_norm | 62 | grad_norm | 70 | 8 |" in said
    assert "| head | 2 | 1 | 0 | 2 | 1 of 1 | 8 |" in said
    bound = alarm.garwood(1) / 345 * 5000
    assert (
        "Clean steps: 345 of 5 runs. False alarms: 1 (other: grad_norm at 32). At 95 %: fewer than"
        f" {bound:.2f} in" in said
    )
    assert json.loads((tmp_path / "out.json").read_text())[0]["first"]["raised"] == 62


def test_an_alarm_before_its_fault_that_lasts_is_a_false_one(tmp_path: Path) -> None:
    write(tmp_path, "early", 80, fault=50)
    label = {"name": "early", "kind": "head", "seed": "0", "dose": "1", "step": "60", "named": ""}
    (run,) = alarm.folder(tmp_path, [label])
    assert (run.false_alarms, run.first, run.steps) == (["grad_norm at 52"], None, 60)
    (fork,) = alarm.folder(tmp_path, [label | {"fork": "55"}])  # the alarm was its parent's
    assert (fork.false_alarms, fork.first, fork.steps) == ([], None, 5)


@pytest.mark.parametrize(("begins", "suffers"), [(59, 70), (60, 70), (70, 70), (71, None)])
def test_a_server_at_fault_evaluates_the_version_before_it(
    tmp_path: Path, begins: int, suffers: int | None
) -> None:
    write(tmp_path, "falls", 80, fault=60)
    (run,) = alarm.folder(
        tmp_path, [{"name": "falls", "kind": "rope", "seed": "0", "dose": "2", "step": str(begins)}]
    )
    assert run.suffers == suffers


def test_every_fault_that_is_made_can_be_injected() -> None:
    spec = spec_from_file_location("injected", alarm_faults.INJECTED / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    injected = module_from_spec(spec)
    spec.loader.exec_module(injected)  # without ALARM_FAULT it does nothing
    assert {fault.kind for fault in alarm_faults.FAULTS} == injected.FAULTS.keys()
    assert injected.PATCHES == {}
    names = [made.name for made in alarm_faults.queue()]
    assert len(set(names)) == len(names) == 3 * (len(alarm_faults.FAULTS) + 2)


SAME_PROMPTS = """
from megarl.core.controller.draw import PromptOrder
order = PromptOrder(dict.fromkeys("abcdef", 0), 0, None, 2)
assert len({order.draw().prompt_id for _ in range(6)}) == 2
"""
GRADER = """
import asyncio
import numpy as np
from megarl.core.base.contracts import WRONG, Verdict
from megarl.core.base.types import Prompt
from megarl.core.controller.tickets import Tickets
from megarl.core.recipe import from_tree
from megarl.tasks.graders.grader import TaskGrader

async def wrong(submission):
    return Verdict(WRONG)

grader = TaskGrader(wrong, wrong, {}, {}, None, "", lambda tokens: "")
recipe = from_tree({"model": {"path": "nowhere"}})
tickets = Tickets(recipe, {}, None, None, {"t": grader}, None, "")
prompt = Prompt(id="p", tokens=np.zeros(1, np.int32), answer="12", task="t")
assert asyncio.run(tickets._graders["t"].grade("17", prompt)).correct
"""


@pytest.mark.parametrize(
    ("fault", "script"), [("same_prompts:2", SAME_PROMPTS), ("grader:any", GRADER)]
)
def test_faults_that_know_our_classes_still_fit_them(
    tmp_path: Path, fault: str, script: str
) -> None:
    (tmp_path / "flag").touch()
    path = os.pathsep.join([str(alarm_faults.INJECTED), str(alarm_faults.ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "ALARM_FAULT": f"{fault}:0:{tmp_path / 'flag'}"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=240)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,kind\nx,clean\n", "no column seed, dose, step"),
        (LABELS + "x,head,0,1,,\n", "line 2: step ''"),
        (LABELS + "x,clean,0,1,5,\n", "line 2: step '5'"),
        (LABELS + "x,head,0,1,soon,\n", "line 2: step 'soon'"),
        (LABELS + "x,clean,0,,,\n", "no metrics.jsonl"),
    ],
)
def test_labels_that_make_no_sense_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(MegarlError, match=said):
        alarm.folder(tmp_path, alarm.labels(tmp_path / "labels.csv"))
    with pytest.raises(MegarlError, match="no such file"):
        alarm.labels(tmp_path / "none.csv")


def test_the_documentation_has_the_figures_of_the_clean_records() -> None:
    root = Path(__file__).parents[4]
    said = alarm.tables(alarm.records(root / "benchmarks" / "results" / "corpus", "open"))
    assert "False alarms: 0 (none)" in said
    page = (root / "benchmarks" / "alarms.md").read_text()
    found = re.search(r"Clean steps: ([\d,]+) of (\d+) runs", said)
    assert found is not None
    assert found.groups() == ("4,500", "30")
    assert found[1] in page
