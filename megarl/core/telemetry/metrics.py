"""The writer of metrics: one row a step into RUN/metrics.jsonl and to all who show it.

    controller's Train.stats ─┐                                    ┌─► metrics.jsonl
    learner's train_step ─────┴─► one dict ─► MetricsWriter.row ───┼─► board.py: TensorBoard ┐
    controller ─► eval.jsonl ────────────────► (mirrored) ─────────┼─► wandb_writer.py       ┘ tag(name): heading/name
                                                                   └─► prometheus.py: GET /metrics

If a step appears twice, the last row counts: after a crash the replayed steps are written again.
"""

import math
from typing import Any

from megarl.core.base.rundir import Endpoints, RunDir, append_jsonl, by_step, read_jsonl
from megarl.core.recipe import Recipe
from megarl.core.telemetry.board import Board
from megarl.core.telemetry.families import LearnerMetrics
from megarl.core.telemetry.names import tag
from megarl.core.telemetry.prometheus import Exporter
from megarl.core.telemetry.tail import Tail
from megarl.core.telemetry.wandb_writer import WandbWriter


class MetricsWriter:
    """Learner rank 0's. `row` may be called again for a step: the later row counts."""

    def __init__(self, recipe: Recipe, rundir: RunDir, endpoints: Endpoints) -> None:
        self._path = rundir.metrics
        self._last_step = max(by_step(read_jsonl(rundir.metrics)), default=-1)
        self._writers: list[Board | WandbWriter] = [Board(rundir.tensorboard)]
        if recipe.monitor.wandb.project:
            self._writers.append(WandbWriter(recipe, rundir))
        self._latest = LearnerMetrics()
        self._exporter = (
            Exporter(endpoints.learner_metrics, endpoints.metrics_key, self._latest.families)
            if endpoints.learner_metrics
            else None
        )
        self._evaluations = Tail(rundir.eval)
        self._evaluations.new()  # those of an earlier life have been written by that

    def row(self, row: dict[str, Any]) -> None:
        """Keep the metrics of `row["step"]`."""
        append_jsonl(self._path, row)
        self._latest.add(row)
        if row["step"] <= self._last_step:
            for writer in self._writers:
                writer.begin_again(row["step"])
        self._last_step = row["step"]
        self._show(row["step"], {tag(name): value for name, value in row.items()})
        self._mirror_evaluations()

    def close(self) -> None:
        """Also takes over evaluations that came after the last step."""
        self._mirror_evaluations()
        for writer in self._writers:
            writer.close()
        if self._exporter is not None:
            self._exporter.close()

    def _mirror_evaluations(self) -> None:
        for step, row in by_step(self._evaluations.new()).items():
            self._show(step, {f"eval/{name}": row[name] for name in row if name != "step"})

    def _show(self, step: int, values: dict[str, Any]) -> None:
        scalars = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
        for writer in self._writers:
            writer.write(step, scalars)
