"""Compute so far: devices held × wall time, over all lives of the supervisor. A new life goes on from the journal."""

import os
import time

from megarl.rollout.records import Session
from megarl.rollout.state import State
from megarl.rundir import RunDir


def session_of(rundir: RunDir) -> Session:
    """The present life of the supervisor: it began when it wrote the endpoints."""
    endpoints = rundir.endpoints()
    return Session(
        session=endpoints.session,
        time=rundir.endpoints_file.stat().st_mtime,
        devices=endpoints.gpus or os.cpu_count() or 1,
        compute_unit="gpu" if endpoints.gpus else "core",
    )


class ComputeClock:
    """`hours()` at any moment of this life."""

    def __init__(self, state: State) -> None:
        assert state.session is not None
        self._earlier_hours = state.earlier_hours
        self._seconds_before = max(0.0, time.time() - state.session.time)
        self._began = time.monotonic()  # from here on a wall clock that is set costs nothing
        self.devices, self.unit = state.session.devices, state.session.compute_unit

    def hours(self) -> float:
        seconds = self._seconds_before + time.monotonic() - self._began
        return self._earlier_hours + self.devices * seconds / 3600
