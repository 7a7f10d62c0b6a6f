"""Which checkpoints stay besides the newest: the first that reached each of `checkpoint.milestones`.

    milestones: [250, 1000 GPU-hours]
    checkpoints of steps 100, 200, 250, 300, …   ──► 250 stays
    metrics.jsonl: step 699 ended at 998, 799 at 1,141 GPU-hours   ──► 800 stays

The answer follows from the run directory alone, so a learner that was restarted, and
whoever reads the directory, gives the same one. A checkpoint that was put aside as damaged
counts no more: the next one takes its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.base.rundir import RunDir, complete, rows_in_order, step_of

type Milestone = int | str
"""A step, or compute such as `1000 GPU-hours`."""


@dataclass(frozen=True)
class Compute:
    """The run's compute up to a step. unit: gpu or core."""

    hours: float
    unit: str


def milestone_checkpoints(folder: Path, milestones: Sequence[Milestone]) -> dict[Milestone, Path]:
    """Return, for each milestone that a checkpoint has reached, the first such checkpoint. folder: RUN/checkpoints."""
    checkpoints = complete(folder)
    compute_by_step: dict[int, Compute] = {}
    if any(isinstance(milestone, str) for milestone in milestones):
        compute_by_step = _compute_by_step(RunDir(folder.parent).metrics)
    first = {}
    for milestone in milestones:
        candidates = [path for path in checkpoints if _reaches(step_of(path), milestone, compute_by_step)]
        if candidates:
            first[milestone] = candidates[0]
    return first


def unit_of(milestone: str) -> str:
    """Return `gpu` or `core`."""
    return milestone.rpartition(" ")[2].removesuffix("-hours").lower()


def _reaches(step: int, milestone: Milestone, compute_by_step: Mapping[int, Compute]) -> bool:
    if isinstance(milestone, int):
        return step >= milestone
    compute = compute_by_step.get(step)
    if compute is None or compute.unit != unit_of(milestone):
        return False
    return compute.hours >= float(milestone.partition(" ")[0])


def _compute_by_step(metrics: Path) -> dict[int, Compute]:
    """Return the compute up to each version of the weights. The row of step s is about the step that makes version s + 1."""
    return {
        row["step"] + 1: Compute(row["compute_hours"], row["compute_unit"])
        for row in rows_in_order(metrics)
        if "compute_hours" in row and "compute_unit" in row
    }
