"""A run that begins at a checkpoint of another, its parent: `run.fork=PARENT@STEP`,
with another loss, batch, or other keys.

    PARENT/recipe.yaml        ──compared────► RUN/recipe.yaml
    its checkpoint of STEP    ──hard links──► RUN/checkpoints
    metrics.jsonl, eval.jsonl ─rows to STEP─► the same files of RUN
    the draws before STEP     ──snapshot────► RUN/rollouts/000000.journal, written last

Hard links survive the parent's pruning. With the snapshot, the run resumes like any
other; nothing else knows of forks.
"""

import os
import shutil
from pathlib import Path

from msgspec.structs import replace

from megarl.core.base.admission import Admission
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import (
    Row,
    RunDir,
    complete,
    latest_rows,
    parsed,
    step_folder,
    step_of,
    write_atomically,
)
from megarl.core.journal import file
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Session, State
from megarl.core.recipe import Recipe, differences, load

THAWED = ("model.moe.freeze_router", False)
"""A key, and the new value that no fork can give it: the parent's checkpoint has no
optimiser state of routers that were frozen.
"""


def check(recipe: Recipe) -> None:
    """Raise MegarlError if the run cannot begin at the step in `run.fork`."""
    path, step = recipe.run.forked
    parent = RunDir.opened(path)
    _check_steps(recipe, parent, step)
    parent_recipe = load(str(parent.recipe))
    if recipe.has_critic and not parent_recipe.has_critic:
        raise MegarlError(
            f"batch.centring: critic, and {path} has none; keep its centring, or start a new run"
        )
    for key, old, new in differences(parent_recipe, recipe):
        if key in ("run.seed", "model.dtype") or (key, new) == THAWED:
            raise MegarlError(
                f"{key}: {old!r} in {parent.recipe}, {new!r} now; a fork keeps it, so undo the"
                " change"
            )
    JournalReader(parent.rollouts).state_before(step)  # raises if that is gone or incomplete


def _check_steps(recipe: Recipe, parent: RunDir, step: int) -> None:
    """Raise MegarlError unless the parent has a checkpoint of the step, and the run
    goes beyond it.
    """
    steps_made = {row["step"] for row in latest_rows(parent.metrics)}
    if step - 1 not in steps_made:
        raise MegarlError(
            f"run.fork: {parent.path} has made {max(steps_made, default=-1) + 1} steps, not {step}; give"
            " one that it made"
        )
    if step >= recipe.run.steps:
        raise MegarlError(
            f"run.steps: {recipe.run.steps}, and the fork begins after step {step}; give it more"
            " steps"
        )
    steps = [step_of(checkpoint) for checkpoint in complete(parent.checkpoints)]
    if not steps:
        raise MegarlError(
            f"run.fork: {parent.path} has no checkpoint; a fork begins at one, so wait until it"
            " has written one (checkpoint.every)"
        )
    if step not in steps:
        nearest = min(steps, key=lambda candidate: abs(candidate - step))
        raise MegarlError(
            f"run.fork: {parent.path} has no checkpoint of step {step}; the nearest is of step"
            f" {nearest}: give {parent.path}@{nearest}"
        )


def _has_begun(rundir: RunDir, step: int) -> bool:
    """Return whether the run has a journal, or has made a step itself."""
    if any(rundir.rollouts.glob("*.journal")):
        return True
    return any(row["step"] >= step for row in latest_rows(rundir.metrics))


def start(recipe: Recipe, rundir: RunDir) -> None:
    """Write the files that the run begins with, unless it has begun. After a crash
    here, the next start writes them again.
    """
    path, step = recipe.run.forked
    if _has_begun(rundir, step):
        return
    parent = RunDir(path)
    rows = {row["step"]: row for row in latest_rows(parent.metrics)}
    _link(step_folder(parent.checkpoints, step), step_folder(rundir.checkpoints, step))
    if not complete(rundir.checkpoints):
        raise MegarlError(
            f"run.fork: the checkpoint of step {step} was removed meanwhile; start again"
        )
    # an evaluation's step is the number of steps made, a metric's counts from 0
    _copy_rows(parent.metrics, rundir.metrics, end=step)
    _copy_rows(parent.eval, rundir.eval, end=step + 1)
    parent_state = JournalReader(parent.rollouts).state_before(step)
    state = _forked(parent_state, recipe, rows[step - 1])
    if recipe.data.shares != load(str(parent.recipe)).data.shares:
        # the new shares hold from here on, not for all that was ever drawn
        state.drawn_before = {task: history.drawn for task, history in state.tasks.items()}
    file.create(rundir.rollouts / f"{0:06}.journal", file.head(state.snapshot()))


def _copy_rows(source: Path, target: Path, end: int) -> None:
    """Write the rows of a JSONL file whose step is below `end`; lines that are no rows
    are left out.
    """
    lines = []
    if source.exists():
        lines = source.read_text(errors="replace").splitlines(keepends=True)
    earlier_rows = [line for line in lines if (parsed(line) or {}).get("step", end) < end]
    write_atomically(target, "".join(earlier_rows).encode())


def _forked(state: State, recipe: Recipe, last: Row) -> State:
    """Return the state that a fork begins with. state: the parent's, without later
    draws; last: metrics of its last step. The parent's tickets are counted as if its
    batches had the fork's size: D(g) of the next ticket is the fork's first step.
    """
    prompts = recipe.batch.prompts
    pipeline = recipe.pipeline
    step = last["step"] + 1
    admission = Admission(
        prompts,
        pipeline.max_lag,
        pipeline.phase_steps,
        next_ticket=state.admission.next_ticket,
        forgotten=prompts * step,
    )
    return replace(
        state,
        admission=admission,
        published_version=-1,
        evaluations={
            version: score for version, score in state.evaluations.items() if version <= step
        },
        session=Session(
            session=recipe.run.fork, time=0.0, devices=0, compute_unit=last["compute_unit"]
        ),
        earlier_sessions=(),
        last_time=0.0,
        earlier_hours=last["compute_hours"],
        startup_hours=last["startup_hours"],
        evaluation_hours=last["evaluation_hours"],
        window=0,
    )


def _link(source: Path, target: Path) -> None:
    """Make `target` a copy of a folder, by hard links if the file system has them."""

    def link(source_file: str, target_file: str) -> None:
        """Link one file or, where that is impossible, copy it."""
        try:
            os.link(source_file, target_file)
        except OSError:
            shutil.copy(source_file, target_file)

    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=link, ignore=shutil.ignore_patterns("lock"))
    except (OSError, shutil.Error) as error:
        raise MegarlError(
            f"run.fork: {source} cannot be linked or copied, or was removed meanwhile: {error}"
        ) from None
