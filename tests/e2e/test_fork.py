"""A real fork, at a checkpoint of a finished run, with another loss and batch, killed
and resumed.
"""

from pathlib import Path

import pytest

from megarl.core import recipe as recipes
from megarl.core.base.rundir import complete, latest_rows, latest_scores, step_of
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Admitted, Finished
from tests.e2e import runs
from tests.e2e.runs import SMALL, LiveRun, batches

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
STEP = 8
PROMPTS = 8
STEPS = 14


def test_fork(finished: LiveRun, workplace: Path) -> None:
    assert STEP in map(step_of, complete(finished.rundir.checkpoints))
    words: tuple[str, ...] = (
        *SMALL,
        f"run.steps={STEPS}",
        "run.name=forked",
        f"run.fork=runs/whole@{STEP}",
        "run.resume=auto",
    )
    words += ("loss.kind=clip", f"batch.prompts={PROMPTS}")
    run = runs.start(workplace, *words)
    try:
        run.wait_for(lambda: run.steps() >= STEP + 2, "two steps of its own")
        run.kill()
        again = runs.start(workplace, *words)
        try:
            assert again.finish() == 0, again.tail()
        finally:
            again.kill()
    finally:
        run.kill()
    rundir, recipe = again.rundir, recipes.load(str(again.rundir.recipe))
    rows = latest_rows(rundir.metrics)
    assert [row["step"] for row in rows] == list(range(STEPS))
    ours, parents = (
        path.read_text().splitlines()[:STEP] for path in (rundir.metrics, finished.rundir.metrics)
    )
    assert ours == parents
    hours = [row["compute_hours"] for row in rows]
    assert hours == sorted(hours)
    scored = [row["step"] for row in latest_scores(rundir.eval)]
    assert scored[:2] == [0, 5]
    assert scored[-1] == STEPS

    # Its own batches: of its size, in order, each ticket once, within the lag; none of
    # the parent's later tickets.
    records = list(JournalReader(rundir.rollouts).replay())
    drawn = [record for record in records if isinstance(record, Admitted)]
    groups = {
        record.group.ticket: record.group for record in records if isinstance(record, Finished)
    }
    for n, record in enumerate(drawn[: (STEPS - STEP) * PROMPTS]):
        assert record.due_step == STEP + n // PROMPTS
        versions = [r.versions.min() for r in groups[record.ticket].rollouts]
        assert record.due_step - min(versions) <= recipe.pipeline.k
        assert min(versions) >= STEP
    for row in rows[STEP:]:
        of_step = [groups[r.ticket] for r in drawn if r.due_step == row["step"]]
        assert len(of_step) == PROMPTS
        assert row["generated_tokens"] == sum(r.trained_tokens for g in of_step for r in g.rollouts)

    original = recipes.load(str(finished.rundir.recipe))
    before = [g for groups in batches(finished.rundir, original, STEP) for g in groups]
    assert drawn[0].ticket == max(g.ticket for g in before) + 1
    assert {r.epoch for r in drawn} == {g.epoch for g in before} == {0}
    assert not {r.prompt_id for r in drawn} & {g.prompt.id for g in before}, (
        "no prompt twice in an epoch"
    )
