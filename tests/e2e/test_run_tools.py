"""A real run of policy and calculator in turns, and the same recipe without it: turns,
masks, versions and lags.
"""

from pathlib import Path

import numpy as np
import pytest

from megarl.core.base.tokenizer import load_tokenizer
from megarl.tasks.environments.calculator import calculated
from tests.e2e import runs
from tests.e2e.runs import batches, check_history, check_nothing_left, megarl

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

OVERRIDES = (
    "run.steps=8",
    "batch.prompts=12",
    "pipeline.k=2",  # what the servers have done before the first step is of one version,
    "serving.max_running_requests=64",  # and so would be batches that are all under way at once
    "evaluation.every=8",
    "evaluation.prompts=40",
    "evaluation.samples=2",
    "checkpoint.every=3",
)


@pytest.fixture(scope="module")
def warm(workplace: Path) -> Path:
    """A policy that has learnt to call, now and then."""
    runs.warm_start("quickstart-tools", "sft.steps=120", cwd=workplace)
    return workplace


def run_of(workplace: Path, *overrides: str) -> runs.LiveRun:
    run = runs.start(workplace, *OVERRIDES, *overrides, recipe="quickstart-tools")
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    return run


def test_turns_of_policy_and_calculator(warm: Path) -> None:
    run = run_of(warm)
    check_history(run.rundir, run.recipe)
    runs.check_parity(run.rundir)
    trained = batches(run.rundir, run.recipe)
    rollouts = [
        (step, r) for step, groups in enumerate(trained) for g in groups for r in g.rollouts
    ]
    tokenizer = load_tokenizer(warm / run.recipe.model.path)
    task = run.recipe.data.tasks["products"]
    calls = several = 0
    for step, rollout in rollouts:
        assert rollout.episode is not None
        assert 1 <= rollout.episode.turns <= task.turns
        assert len(rollout.tokens) <= run.recipe.length.completion_tokens + 4
        sampled = [s for s in rollout.segments if s.trained]
        assert min(step - s.weight_version for s in sampled) >= 0
        assert max(step - s.weight_version for s in sampled) <= run.recipe.pipeline.k
        several += rollout.episode.calls > 0 and len({s.weight_version for s in sampled}) > 1
        turn = ""
        for segment in rollout.segments:
            said = tokenizer.decode(segment.tokens)
            if not segment.trained and said != run.recipe.length.interruption:
                assert turn.endswith("]")
                value = calculated(turn[:-1].rpartition("[")[2]) if "[" in turn else None
                assert said == ("?" if value is None else str(value)), (
                    "every masked segment is the calculator's reply"
                )
                assert not segment.logprobs.any()
                calls += 1
                said = turn = ""
            turn += said
    assert calls > 10
    assert several > 0, "no episode of several turns has tokens of more than one version"
    for row, groups in zip(runs.latest_rows(run.rundir.metrics), trained, strict=True):
        episodes = [r.episode for g in groups for r in g.rollouts if r.episode is not None]
        assert row["turns_mean"] == pytest.approx(np.mean([e.turns for e in episodes]))
        assert row["lag_max"] <= run.recipe.pipeline.k
    shown = megarl("rollouts", "show", str(run.rundir.path), "--step", "2", cwd=warm)
    assert shown.returncode == 0, shown.stderr
    assert len(list(runs.latest_rows(run.rundir.eval))) == 2


@pytest.mark.slow
def test_the_same_recipe_without_the_tool(warm: Path) -> None:
    run = run_of(warm, "run.name=without", "run.steps=2", "data.tasks.products.environment=''")
    rollouts = [r for groups in batches(run.rundir, run.recipe) for g in groups for r in g.rollouts]
    assert all(r.episode is None for r in rollouts)
    assert "turns_mean" not in runs.latest_rows(run.rundir.metrics)[0]
