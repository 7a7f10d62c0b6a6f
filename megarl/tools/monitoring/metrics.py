"""Writes metrics: one row per step to RUN/metrics.jsonl and to every program that
displays them.

    controller's Train.stats ─┐                              ┌─► metrics.jsonl
    learner's train_step ─────┴─► a dict ─► MetricsWriter.row┼─► TensorBoard (Board)   ┐
    controller ─► eval.jsonl ───────────────► (mirrored) ────┼─► wandb_writer.py       ┤
                                                             └─► prometheus.py         │
                                                     tag(name): heading/name ◄─────────┘

If a step appears twice, the last row counts: after a crash the replayed steps are
written again.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import (
    Endpoints,
    Row,
    RunDir,
    append_jsonl,
    by_step,
    rows_in_order,
    writing,
)
from megarl.core.recipe import Recipe
from megarl.core.telemetry.names import tag
from megarl.run.health import MEMORY, Health
from megarl.run.logs import Tail
from megarl.tools.monitoring import wandb_writer
from megarl.tools.monitoring.prometheus import LearnerMetrics, serve
from megarl.tools.monitoring.wandb_writer import WandbWriter

log = logging.getLogger(__name__)

MOMENT_S = 30.0
"""How long writing metrics.jsonl may fail before the learner ends and trains all steps
since its checkpoint again.
"""


class MetricsWriter:
    """The metrics writer of learner rank 0. If `row` is called again for a step, the
    later row counts.
    """

    def __init__(self, recipe: Recipe, rundir: RunDir, endpoints: Endpoints) -> None:
        self._path = rundir.metrics
        self._health: Health | None = None  # before the first row
        self._writers: list[Board | WandbWriter] = [Board(rundir.tensorboard)]
        if wandb_writer.project():
            self._writers.append(WandbWriter(recipe, rundir))
        self._latest = LearnerMetrics()
        self._close_exporter = serve(
            endpoints.learner_metrics, endpoints.metrics_key, self._latest.families
        )
        self._evaluations = Tail(rundir.eval)
        self._evaluations.new()  # skips those that an earlier life of the run has shown

    def row(self, row: Row) -> None:
        """Write a step's row, with the judgement on it, to all destinations."""
        health = self._health
        if health is None or row["step"] <= health.step:  # at first, and when steps are replayed
            health = self._health_before(row["step"])
            self._health = health
        health.add(row)
        row = row | health.metrics()
        self._append(row)
        self._latest.add(row)
        self._show(row["step"], {tag(name): value for name, value in row.items()})
        self._mirror_evaluations()

    def _append(self, row: Row) -> None:
        """Append the row to metrics.jsonl; if that fails, try again until MOMENT_S have
        passed.
        """
        until = time.monotonic() + MOMENT_S
        while True:
            try:
                return append_jsonl(self._path, row)
            except MegarlError as error:
                if time.monotonic() > until:
                    raise
                log.warning("%s; trying again", error)
            time.sleep(1.0)

    def _health_before(self, step: int) -> Health:
        """Return the judgement on the rows before this step. If there are rows from
        this step on, they are replayed: the writers drop what they have of these steps,
        and are shown again the evaluations of them, which are not made again.
        """
        health = Health()
        newest = -1
        for row in rows_in_order(self._path, step - MEMORY):
            newest = row["step"]
            if newest < step:
                health.add(row)
        if newest >= step:
            for writer in self._writers:
                writer.begin_again(step)
            self._evaluations = Tail(self._evaluations.path)
            self._mirror_evaluations(step)
        return health

    def close(self) -> None:
        """Write evaluations that came after the last step, then close all writers."""
        self._mirror_evaluations()
        for writer in self._writers:
            writer.close()
        self._close_exporter()

    def _mirror_evaluations(self, first: int = 0) -> None:
        """Show the writers new evaluations of version `first` or later."""
        for step, row in by_step(self._evaluations.new()).items():
            if step >= first:
                self._show(step, {f"eval/{name}": row[name] for name in row if name != "step"})

    def _show(self, step: int, values: Row) -> None:
        """Give the writers those values that are finite numbers."""
        scalars = {}
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                scalars[name] = float(value)
        for writer in self._writers:
            writer.write(step, scalars)


class Board:
    """Writes scalars to TensorBoard. If its file cannot be written, the run goes on,
    and a new one is begun.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing(folder):
            self._events: EventFileWriter | None = EventFileWriter(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
        ]
        summary = summary_pb2.Summary(value=values)
        self._add(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def begin_again(self, step: int) -> None:
        """Make TensorBoard drop its values from this step on, before they are
        replayed.
        """
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # It takes the first one of a run for the run's begin, and drops nothing.
        for _ in range(2):
            self._add(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        """Write what is left."""
        if self._events is not None:
            with self._survived():
                self._events.close()

    def _add(self, event: event_pb2.Event) -> None:
        """Write an event, to a new file if the last one has failed."""
        with self._survived():
            self._events = self._events or EventFileWriter(str(self._folder))
            self._events.add_event(event)

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Log a failure to write in the block, and forget the file. A learner that
        ended by it would train all steps since its checkpoint again. Only the first
        failure is logged until a file can be begun.
        """
        try:
            yield
        except OSError as error:
            if self._events is not None:
                log.warning(
                    "%s: cannot be written, values are lost: %s", self._folder, error.strerror
                )
            self._events = None
