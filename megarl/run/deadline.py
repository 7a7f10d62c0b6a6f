"""When a run has to be told to stop, so that its last checkpoint is whole before its
job ends.

    rows of metrics.jsonl ──► step_s, write_s
       now          stop                                        leave       job's end
        │ train on    │ step_s │ write_s of the one under way │ write_s │ LEAVE_S │

A job that Slurm ends sends SIGUSR1 SIGNAL_S before that. Only a run that needs longer
must be told to stop earlier. Elsewhere the end of a job is unknown.
"""

import os
import time
from contextlib import suppress

from megarl.run.state import RunState

SIGNAL_S = 600.0
"""Batch scripts have Slurm send SIGUSR1 so long before a job's end."""
SAVE_LIMIT_S = 540.0
"""Time limit from a request to stop until the learner has saved and exited, unless its
steps and checkpoints are known to take longer, and the job does not end before.
"""
LEAVE_S = SIGNAL_S - SAVE_LIMIT_S
"""Time for all roles to end and the job to be queued again."""


def job_end() -> float | None:
    """Return when this process's Slurm job ends, in seconds since the epoch; None if
    that is unknown.
    """
    with suppress(ValueError):
        return float(os.environ.get("SLURM_JOB_END_TIME", ""))
    return None


def seconds_to_save(state: RunState) -> float:
    """Return how long the learner may take to finish its step, then a checkpoint that
    is being written, then the last one; 0 before the first step. Until a checkpoint was
    written, its time counts as 0. The learner does not finish a wait for rollouts.
    """
    busy_seconds = [
        row.get("step_seconds", 0.0) - row.get("wait_seconds", 0.0) for row in state.newest_rows
    ]
    return max(busy_seconds, default=0.0) + 2 * state.write_seconds


def seconds_left(end: float | None) -> float | None:
    """Return the seconds until the learner must have saved in a job with this end; None
    if that is unknown, or past, as where the job's time was extended.
    """
    if end is None:
        return None
    seconds = end - LEAVE_S - time.time()
    return seconds if seconds > 0 else None


def is_due(state: RunState, end: float | None) -> bool:
    """Return whether a run whose job has this end must be told to stop now, because
    SIGUSR1 will come too late.
    """
    needed = seconds_to_save(state)
    remaining_s = seconds_left(end)
    return remaining_s is not None and needed > SAVE_LIMIT_S and remaining_s <= needed


def save_limit(state: RunState, end: float | None, must_make_room: bool) -> float:
    """Return how long the learner has from now on to save and exit. must_make_room: it
    was told to by a job that is ended anyway, SIGNAL_S later if nothing else is known.
    """
    needed = max(SAVE_LIMIT_S, seconds_to_save(state))
    if not must_make_room:
        return needed
    remaining_s = seconds_left(end)
    return SAVE_LIMIT_S if remaining_s is None else min(needed, remaining_s)
