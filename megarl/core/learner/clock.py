"""How the time of a step was spent. A step begins when the one before it ends.

wait (for the controller)  train  publish  parity  checkpoint  ──► next_step() ──► columns of metrics.jsonl
        └ within: forward_backward, optimizer; pause, transfer, resume ──► spans of RUN/trace/learner.jsonl
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from torch.profiler import record_function

from megarl.core.base.messages import Published
from megarl.core.telemetry.spans import spans

PLACE = "learner/rank 0"
StepPart = Literal["wait", "train", "publish", "parity", "checkpoint"]


class StepClock:
    """Times one learner rank, in seconds of wall time."""

    def __init__(self) -> None:
        self._begin = self._part_begin = time.monotonic()
        self._spent: dict[StepPart, float] = dict.fromkeys(get_args(StepPart), 0.0)
        self._publication: dict[str, float] = {}

    @contextmanager
    def spent(self, part: StepPart, step: int) -> Iterator[None]:
        """Count the time within this context as a part of the step."""
        begin = self._part_begin = time.monotonic()
        spans.open(PLACE, part, begin, step=step)
        spans.flush()
        try:
            yield
        finally:
            end = time.monotonic()
            self._spent[part] += end - begin
            spans.span(PLACE, part, begin, end, step=step)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Record the time within this context under `name`, in our trace and in the
        profiler's.
        """
        with spans.timed(PLACE, name), record_function(name):
            yield

    def published(self, result: Published) -> None:
        """Trace the publication that has just ended, which counts in this step."""
        phases = {
            "pause": result.pause_seconds,
            "transfer": result.transfer_seconds,
            "resume": result.resume_seconds,
        }
        if result.staged:
            phases = {"transfer": phases.pop("transfer"), **phases}
        self._publication = {f"{name}_seconds": seconds for name, seconds in phases.items()}
        self._publication["publish_bytes"] = float(result.bytes_sent)
        end = paused = self._part_begin
        if result.staged:
            paused += result.transfer_seconds
        for name, seconds in phases.items():
            begin = end
            end = end + seconds
            spans.span(PLACE, name, begin, end)
        for r in result.results:
            told = {"error": r.error} if r.error else {}
            spans.span(f"server {r.id}/paused", f"version {result.version}", paused, end, **told)

    def next_step(self, step: int) -> dict[str, float]:
        """Return the metrics of the step that ends now, and begin the next."""
        now = time.monotonic()
        spans.span(PLACE, f"step {step}", self._begin, now, step=step)
        total = now - self._begin
        columns = {f"{part}_seconds": seconds for part, seconds in self._spent.items()}
        columns |= self._publication | {
            "step_seconds": total,
            "learner_idle_share": columns["wait_seconds"] / total,
        }
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._begin = now
        self._publication = {}
        return columns
