"""A real run of a tiny Llama 4: experts divided over two ranks, and the learner takes the experts that the server chose."""

from pathlib import Path

import numpy as np
import pytest

from tests.e2e import runs
from tests.e2e.runs import batches, check_history, check_nothing_left, check_parity, megarl, publications

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

OVERRIDES = (
    "run.steps=4",
    "batch.prompts=12",
    "batch.zero_variance=keep",
    "evaluation.every=4",
    "evaluation.prompts=20",
    "evaluation.samples=2",
    "checkpoint.every=2",
    "resources.learner_ranks=2",
    "model.expert_parallel=2",
    "model.moe.routing_replay=true",
)


def test_experts_over_two_ranks_with_routing_replay(workplace: Path) -> None:
    warm = megarl("sft", "quickstart-moe", "sft.steps=20", cwd=workplace)
    assert warm.returncode == 0, warm.stderr
    run = runs.start(workplace, *OVERRIDES, recipe="quickstart-moe")
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family, ports = run.family(), run.ports()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    check_history(run.rundir, run.recipe)

    published = publications(run.rundir)
    assert {p.version for p in published} >= {0, 4}
    compared = check_parity(run.rundir)
    assert max(row["parity_routing"] for row in compared) < 0.01
    rollouts = [r for groups in batches(run.rundir, run.recipe) for g in groups for r in g.rollouts]
    tables = [r.routing.table for r in rollouts if r.routing is not None]
    assert len(tables) == len(rollouts)
    assert {table.shape[1:] for table in tables} == {(4, 1)}
    assert set(np.unique(np.concatenate(tables))) == {0, 1, 2, 3}
