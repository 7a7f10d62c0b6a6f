"""A run that begins at a step of another, its parent: `run.fork=PARENT@STEP`, with another loss, batch, or other keys.

    PARENT/recipe.yaml                      ──copy──────────► RUN/parent/recipe.yaml
    its newest checkpoint up to STEP        ──hard links────► RUN/checkpoints if it is STEP's, else RUN/parent/checkpoints,
    rollouts/, unless it is STEP's          ──hard links────► RUN/parent/rollouts: the learner replays what lies between, by the
                                                              parent's recipe (core/learner/forked.py)
    metrics.jsonl, eval.jsonl               ──rows to STEP──► the same files of RUN
    the draws of the batches before STEP    ──snapshot──────► RUN/rollouts/000000.journal, written last

Hard links take no space, and survive the parent's pruning. From the snapshot on the run is one that resumes: nothing else knows
of forks. Tickets that the parent had drawn for later steps are dropped, and compute goes on from the parent's at STEP.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from megarl.core.base.admission import Admission
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import (
    META,
    Row,
    RunDir,
    complete,
    latest_rows,
    read_jsonl,
    step_folder,
    step_of,
    write_jsonl,
)
from megarl.core.journal import file
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Session, State
from megarl.core.recipe import Recipe, differences, load

KEPT = ("run.seed", "model.dtype")
"""Keys that no fork changes, beside the contents of model and prompts (checks.py): draws or weights would not fit."""


def check(recipe: Recipe) -> None:
    """Raise MegarlError if the run cannot begin where `run.fork` says."""
    parent, step = _parent(recipe)
    before = load(str(parent.recipe))
    for key, old, new in (d for d in differences(before, recipe) if d[0] in KEPT):
        raise MegarlError(f"{key}: {old!r} in {parent.recipe}, {new!r} now; a fork keeps it, so undo the change")
    if recipe.has_critic and not before.has_critic:
        raise MegarlError(f"batch.centring: critic, and {parent.path} has none; keep its centring, or begin a run anew")
    _last_row(parent, step)
    if step >= recipe.run.steps:
        raise MegarlError(f"run.steps: {recipe.run.steps}, and the fork begins after step {step}; give it more steps")
    reader, start = JournalReader(parent.rollouts), _start(parent, step)
    reader.before(step)
    if start == step:
        return
    for key, old, new in (d for d in differences(before, recipe) if _of_layout(d[0])):
        raise MegarlError(
            f"{key}: {old!r} in {parent.recipe}, {new!r} now. {parent.path} has no checkpoint of step {step}, and steps "
            f"{start} to {step - 1} are replayed at its layout: undo the change, or fork at a step with a checkpoint "
            f"({_kept(parent)})"
        )
    admission, there = reader.fold().admission, set(reader.finished())
    needed = {ticket for s in range(start, step) for ticket in admission.batch(s) or ()}
    if missing := needed - there:
        raise MegarlError(
            f"run.fork: {parent.rollouts} no longer has {len(missing)} of the {len(needed)} groups of steps {start} to "
            f"{step - 1} (journal.keep); fork at a step with a checkpoint ({_kept(parent)})"
        )


def begin(recipe: Recipe, rundir: RunDir) -> None:
    """Write what the run begins with, unless it has begun. After a crash in here the next start writes it again."""
    parent, step = _parent(recipe)
    made = max((row["step"] for row in latest_rows(rundir.metrics)), default=-1)
    if any(rundir.rollouts.glob("*.journal")) or made >= step:
        return
    row, start = _last_row(parent, step), _start(parent, step)
    shutil.rmtree(rundir.parent.path, ignore_errors=True)
    rundir.parent.checkpoints.mkdir(parents=True)
    shutil.copy(parent.recipe, rundir.parent.recipe)
    if start:
        where = rundir if start == step else rundir.parent
        _link(step_folder(parent.checkpoints, start), step_folder(where.checkpoints, start))
    if start < step:
        _link(parent.rollouts, rundir.parent.rollouts)
    write_jsonl(rundir.metrics, [row for row in read_jsonl(parent.metrics) if row.get("step", step) < step])
    write_jsonl(rundir.eval, [row for row in read_jsonl(parent.eval) if row.get("step", step + 1) <= step])
    state = JournalReader(parent.rollouts).before(step)
    file.create(rundir.rollouts / f"{0:06}.journal", file.head(_forked(state, recipe, row).snapshot()))


def _forked(state: State, recipe: Recipe, row: Row) -> State:
    """Return the state that a fork begins with, of the parent's without later draws. row: of the parent's last step.

    Batches count from the parent's begin, each of the fork's size: D(g) of the next ticket is the fork's first step.
    """
    prompts, pipeline, step = recipe.batch.prompts, recipe.pipeline, row["step"] + 1
    tickets = {"next_ticket": state.admission.next_ticket, "forgotten": step * prompts}
    spent = Session(session=f"before {recipe.run.fork}", time=0.0, devices=0, compute_unit=row["compute_unit"])
    return replace(
        state,
        admission=Admission(prompts, pipeline.max_lag, pipeline.phase_steps, **tickets),
        published_version=-1,
        evaluations={version: score for version, score in state.evaluations.items() if version <= step},
        session=spent,
        earlier_sessions=(),
        last_time=0.0,
        earlier_hours=row["compute_hours"],
        startup_hours=row["startup_hours"],
        evaluation_hours=row["evaluation_hours"],
    )


def _parent(recipe: Recipe) -> tuple[RunDir, int]:
    path, step = recipe.run.forked
    try:
        return RunDir.opened(path), step
    except MegarlError as error:
        raise MegarlError(f"run.fork: {error}") from None


def _last_row(parent: RunDir, step: int) -> Row:
    """Return the metrics of the last step before `step`."""
    rows = {row["step"]: row for row in latest_rows(parent.metrics)}
    if step - 1 not in rows:
        raise MegarlError(
            f"run.fork: {parent.path} has made {max(rows, default=-1) + 1} steps, not {step}; give one of them"
        )
    return rows[step - 1]


def _start(parent: RunDir, step: int) -> int:
    """Return the step of the newest checkpoint up to `step`; 0, the model as it came, if there is none."""
    return max((kept for kept in map(step_of, complete(parent.checkpoints)) if kept <= step), default=0)


def _kept(parent: RunDir) -> str:
    return ", ".join(str(step_of(path)) for path in complete(parent.checkpoints)) or "it has none"


def _of_layout(key: str) -> bool:
    return key == "resources.learner_ranks" or (key.startswith("model.") and key.endswith("_parallel"))


def _link(source: Path, target: Path) -> None:
    """Make `target` a copy of a folder, of hard links where the file system has them."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without
            shutil.copy(one, other)

    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=link, ignore=shutil.ignore_patterns("lock"))
        if (source / META).exists() != (target / META).exists():
            raise FileNotFoundError(source / META)
    except (FileNotFoundError, shutil.Error):
        raise MegarlError(
            f"run.fork: {source} was removed while it was linked; start again, it goes on from an older one"
        ) from None
