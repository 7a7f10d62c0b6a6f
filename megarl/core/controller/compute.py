"""Compute so far: devices held × wall time, over all lives of the supervisor. A new life goes on from the journal."""

import os
import time
from dataclasses import dataclass

from megarl.core.base.rundir import RunDir
from megarl.core.journal.records import Session
from megarl.core.journal.state import State
from megarl.core.recipe import Resources


def session_of(rundir: RunDir) -> Session:
    """The present life of the supervisor: it began when it wrote the endpoints."""
    endpoints = rundir.endpoints()
    return Session(
        session=endpoints.session,
        time=rundir.endpoints_file.stat().st_mtime,
        devices=endpoints.gpus or os.cpu_count() or 1,
        compute_unit="gpu" if endpoints.gpus else "core",
    )


@dataclass(frozen=True)
class Spent:
    """Device hours so far: all, and what of them went into starting up and into evaluations.

    startup: of each life of the supervisor, up to the first publication of weights; a replay is part of it. evaluation: of the
    servers held for scores; what others waited for them meanwhile is not counted.
    """

    total: float
    startup: float
    evaluation: float

    def row(self) -> dict[str, float]:
        """As rows have it, the total aside."""
        rest = self.total - self.startup - self.evaluation
        return {"startup_hours": self.startup, "evaluation_hours": self.evaluation, "training_hours": rest}


class ComputeClock:
    """`hours()` at any moment of this life, and what they were `spent()` on."""

    def __init__(self, state: State, resources: Resources) -> None:
        assert state.session is not None
        self._startup, self._published = state.startup_hours, state.session_published
        self._evaluation, self._held, self._held_since = state.evaluation_hours, 0, 0.0
        self._earlier_hours = state.earlier_hours
        self._seconds_before = max(0.0, time.time() - state.session.time)
        self._began = time.monotonic()  # from here on a wall clock that is set costs nothing
        self.devices, self.unit = state.session.devices, state.session.compute_unit
        cores = 1 if self.unit == "gpu" else resources.threads
        self._server_devices = resources.server_tensor_parallel * cores

    def hours(self) -> float:
        seconds = self._seconds_before + time.monotonic() - self._began
        return self._earlier_hours + self.devices * seconds / 3600

    def hold(self, servers: int) -> None:
        """So many servers more (or fewer, below 0) score from now on."""
        self._evaluation, self._held_since = self._evaluation_hours(), time.monotonic()
        self._held += servers

    def published(self) -> None:
        """Weights are on servers; the first time in a life of the supervisor that ends its start-up."""
        if not self._published:
            self._published = True
            self._startup += self.hours() - self._earlier_hours

    def spent(self) -> Spent:
        total = self.hours()
        starting = 0.0 if self._published else total - self._earlier_hours
        return Spent(total, self._startup + starting, self._evaluation_hours())

    def _evaluation_hours(self) -> float:
        devices = min(self._held * self._server_devices, self.devices)
        return self._evaluation + devices * (time.monotonic() - self._held_since) / 3600
