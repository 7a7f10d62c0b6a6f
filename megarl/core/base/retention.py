"""Which checkpoints stay besides the newest: the first that reached each of
`checkpoint.milestones`, and with `checkpoint.keep_best` that of the highest held-out
score.

    milestones: [250, 1000 GPU-hours]
    checkpoints of steps 100, 200, 250, 300, …   ──► 250 stays
    metrics.jsonl: step 699 ended at 998, 799 at 1,141 GPU-hours   ──► 800 stays

The answer follows from the run directory alone, so a learner that was restarted, and
whoever reads the directory, gives the same one. A checkpoint that was put aside as
damaged counts no more: the next one takes its place.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import (
    RunDir,
    complete,
    latest_scores,
    rows_in_order,
    step_folder,
    step_of,
)

type Milestone = int | str
"""A step, or compute such as `1000 GPU-hours`."""


@dataclass(frozen=True)
class Compute:
    """The run's compute up to a step. unit: gpu or core."""

    hours: float
    unit: str


def milestone_checkpoints(folder: Path, milestones: Sequence[Milestone]) -> dict[Milestone, Path]:
    """Return, for each milestone that a checkpoint has reached, the first such
    checkpoint. folder: RUN/checkpoints.
    """
    checkpoints = complete(folder)
    compute_by_step: dict[int, Compute] = {}
    if any(isinstance(milestone, str) for milestone in milestones):
        compute_by_step = _compute_by_step(RunDir(folder.parent).metrics)
    first = {}
    for milestone in milestones:
        for path in checkpoints:
            if _reaches(step_of(path), milestone, compute_by_step):
                first[milestone] = path
                break
    return first


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint whose weights have the highest held-out pass rate, of equal
    ones the first.

    None if no checkpoint was evaluated. folder: RUN/checkpoints.
    """
    score_of = {row["step"]: row["pass_rate"] for row in latest_scores(RunDir(folder.parent).eval)}
    scored = [path for path in complete(folder) if step_of(path) in score_of]
    return max(scored, key=lambda path: score_of[step_of(path)], default=None)


def scored_checkpoints(folder: Path) -> list[Path]:
    """Return the best checkpoint, and those whose evaluation is under way: one of them
    may become the best.

    An evaluation is under way if its folder is there, but neither its score nor that of
    a later version: what a killed controller left behind counts only until the next
    score.
    """
    rundir = RunDir(folder.parent)
    last_scored = max((row["step"] for row in latest_scores(rundir.eval)), default=-1)
    best = best_checkpoint(folder)
    checkpoints = [] if best is None else [best]
    for path in complete(folder):
        step = step_of(path)
        if step > last_scored and step_folder(rundir.evaluations, step).is_dir():
            checkpoints.append(path)
    return checkpoints


BEST = "best"
_NAMED = re.compile(rf"(.+)@(\d+|{BEST})")


def split_name(name: str) -> tuple[Path, str]:
    """Split `RUN@STEP` or `RUN@best`; the second part is empty if the name has none."""
    match = _NAMED.fullmatch(name)
    if match is None:
        return Path(name), ""
    return Path(match[1]), match[2]


def named_checkpoint(run: Path, name: str) -> Path:
    """Return a run's checkpoint of the step `name`, or its best one. MegarlError if
    there is none.
    """
    folder = RunDir(run).checkpoints
    checkpoints = complete(folder)
    if not checkpoints:
        raise MegarlError(
            f"{run}: no complete checkpoint there; a run writes one every checkpoint.every steps"
        )
    steps = ", ".join(str(step_of(path)) for path in checkpoints)
    if name == BEST:
        best = best_checkpoint(folder)
        if best is None:
            raise MegarlError(
                f"{run}@{BEST}: none of its checkpoints ({steps}) has a held-out score;"
                " checkpoint.keep_best=true writes one of each version that is evaluated"
            )
        return best
    checkpoint = step_folder(folder, int(name))
    if checkpoint not in checkpoints:
        raise MegarlError(f"{run} has no checkpoint of step {name}; there are those of {steps}")
    return checkpoint


def unit_of(milestone: str) -> str:
    """Return `gpu` or `core`."""
    return milestone.rpartition(" ")[2].removesuffix("-hours").lower()


def _reaches(step: int, milestone: Milestone, compute_by_step: Mapping[int, Compute]) -> bool:
    """Return whether a checkpoint of this step is at or after a milestone; False for
    one in compute if the step's compute is unknown, or counted in another unit.
    """
    if isinstance(milestone, int):
        return step >= milestone
    compute = compute_by_step.get(step)
    if compute is None or compute.unit != unit_of(milestone):
        return False
    return compute.hours >= float(milestone.partition(" ")[0])


def _compute_by_step(metrics: Path) -> dict[int, Compute]:
    """Return the compute up to each version of the weights. The row of step s is about
    the step that makes version s + 1.
    """
    compute_by_step = {}
    for row in rows_in_order(metrics):
        if "compute_hours" in row and "compute_unit" in row:
            compute = Compute(row["compute_hours"], row["compute_unit"])
            compute_by_step[row["step"] + 1] = compute
    return compute_by_step
