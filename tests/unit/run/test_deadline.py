"""When a run is told to stop ahead of its job's end, and how long it then may save."""

import time

import pytest

from megarl.run import deadline
from megarl.run.state import RunState


def state(write_s: float, step_s: float = 0.0, wait_s: float = 0.0) -> RunState:
    rows = {0: {"step": 0, "step_seconds": step_s, "wait_seconds": wait_s}}
    return RunState(rows=rows, write_seconds=write_s)


@pytest.mark.parametrize(
    ("run", "left", "is_due", "limit"),
    [
        # Slurm's signal, 600 s before the end, is early enough.
        (state(200.0, 100.0), 700.0, False, 540.0),
        # A long step, before any checkpoint was written.
        (state(0.0, 900.0), 1000.0, False, 900.0),
        (state(0.0, 900.0), 950.0, True, 890.0),
        # A step, a checkpoint that is being written, and the last one.
        (state(700.0, 150.0, wait_s=50.0), 1570.0, False, 1500.0),
        (state(700.0, 150.0, wait_s=50.0), 1550.0, True, 1490.0),
        # Nothing suffices: as long as there is.
        (state(700.0), 600.0, True, 540.0),
        (state(700.0), 300.0, True, 240.0),
        # The job's time was extended, or it is none of Slurm's.
        (state(700.0), -100.0, False, 540.0),
        (state(700.0), None, False, 540.0),
    ],
)
def test_a_job_leaves_time_for_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, run: RunState, left: float | None, is_due: bool, limit: float
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if left is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + left))
    end = deadline.job_end()
    assert deadline.is_due(run, end) == is_due
    assert deadline.save_limit(run, end, must_make_room=True) == pytest.approx(limit, abs=1)
    # After Ctrl-C nobody ends the job.
    needed = max(540.0, deadline.seconds_to_save(run))
    assert deadline.save_limit(run, end, must_make_room=False) == needed
