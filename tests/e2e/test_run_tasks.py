"""A real run of two tasks whose few prompts are begun again: the easy ones first, its
journal dropped up to the checkpoints. Server and learner share what they run on:
weights go by handles, and the server's memory is lent to the learner for each step.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.rundir import step_folder
from megarl.core.evaluation.answers import SuiteDir
from tests import make
from tests.e2e import runs
from tests.e2e.runs import batches, check_draws, check_nothing_left, publications

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

OVERRIDES = (
    "run.steps=20",
    "data.tasks.addition.train=few-addition.jsonl",
    "data.tasks.subtraction.train=few-subtraction.jsonl",
    "data.curriculum.kind=linear",
    "batch.prompts=12",
    # one right answer of eight is enough to exclude: so they are solved soon
    "batch.positive_threshold=0.1",
    "length.stages=[{until_step: 2, thinking_tokens: [24, 30]}]",
    "evaluation.every=15",
    "evaluation.prompts=20",
    "evaluation.samples=2",
    "evaluation.suites={sums: {data: few-addition.jsonl, samples: 4}}",
    "checkpoint.every=2",
    "pipeline.k=0",
    "resources.colocate=true",
    "weights.transport=cuda_ipc",
    "serving.memory_fraction=0.5",
    "journal.keep=checkpoints",
)


def few(source: Path, target: Path, easy: int, harder: int) -> None:
    """Prompts of one and two digits: a policy this young solves the first
    now and then.
    """
    rows = [json.loads(line) for line in source.open()]
    chosen = [r for r in rows if r["difficulty"] == 1][:easy] + [
        r for r in rows if r["difficulty"] == 2
    ][:harder]
    make.write_rows(target, chosen)


def check_suite(score: dict[str, Any], suite: SuiteDir) -> None:
    """What eval.jsonl says of it is what its answers, all kept, say."""
    answers = suite.read_answers()
    by_prompt = {one.id: [a.correct for a in answers if a.id == one.id] for one in answers}
    assert [len(right) for right in by_prompt.values()] == [4] * 8
    assert score["pass_rate/sums"] == pytest.approx(sum(a.correct for a in answers) / 32)
    assert score["pass@4/sums"] == pytest.approx(
        sum(any(right) for right in by_prompt.values()) / 8
    )
    assert score["pass@4_low/sums"] <= score["pass@4/sums"] <= score["pass@4_high/sums"]


@pytest.mark.slow
def test_two_tasks_whose_prompts_are_begun_again(workplace: Path) -> None:
    data = workplace / "runs" / "quickstart-data"
    few(data / "train-addition.jsonl", workplace / "few-addition.jsonl", 6, 2)
    few(data / "train-subtraction.jsonl", workplace / "few-subtraction.jsonl", 11, 3)
    run = runs.start(workplace, *OVERRIDES, recipe="quickstart-tasks")
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    published = publications(run.rundir)
    assert {p.version for p in published} == set(range(published[-1].version + 1))
    runs.check_parity(run.rundir)
    rows = list(runs.latest_rows(run.rundir.metrics))
    assert len(rows) == 20
    drawn = check_draws(run.rundir, run.recipe, workplace)
    assert any(a.reset for a in drawn), "too few prompts of a task were left"
    assert [a.task for a in drawn[:6]].count("subtraction") == 4
    assert {a.prompt_id for a in drawn if a.task == "addition"} <= {
        json.loads(line)["id"] for line in (workplace / "few-addition.jsonl").open()
    }
    trained = batches(run.rundir, run.recipe, len(rows))
    for row, groups in zip(rows, trained, strict=True):
        for task in run.recipe.data.tasks:
            rates = [g.pass_rate for g in groups if g.prompt.task == task]
            expected = sum(rates) / len(rates) if rates else None
            assert (
                row[f"pass_rate_train/{task}"] == pytest.approx(expected, nan_ok=True)
                or expected is None
            )
    scores = list(runs.latest_rows(run.rundir.eval))
    assert (scores[0]["step"], scores[-1]["step"]) == (0, len(rows))
    for score in scores:
        each = [score[f"pass_rate/{task}"] for task in run.recipe.data.tasks]
        assert score["pass_rate"] == pytest.approx(sum(each) / 2)  # as many prompts of each
        assert score["n_prompts"] == 40
        check_suite(
            score, SuiteDir(step_folder(run.rundir.evaluations, int(score["step"])), "sums")
        )
    summary = runs.summary(run.rundir)
    assert summary["outcome"] == "finished"
    assert summary["reason"] == "all steps done"
    assert summary["tasks"]["addition"]["pass_rate_after"] == scores[-1]["pass_rate/addition"]
    assert "Pass rate, by task" in run.rundir.report.read_text()
