"""How the time of a step was spent. A step begins when the one before it ends.

wait (for the controller)  train  publish  parity  checkpoint
  │                                      └─► next_step(): columns of metrics.jsonl
  └ within: forward_backward, optimizer; pause, transfer, resume
                                         └─► spans of RUN/trace/learner.jsonl
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
        self.start()
        self._spent: dict[StepPart, float] = dict.fromkeys(get_args(StepPart), 0.0)
        self._publication: dict[str, float] = {}

    def start(self) -> None:
        """Begin the first step now, not when the clock was made."""
        self._step_start = time.monotonic()
        self._part_start = self._step_start

    @contextmanager
    def spent(self, part: StepPart, step: int) -> Iterator[None]:
        """Count the time within this context as a part of the step."""
        start = time.monotonic()
        self._part_start = start
        spans.open(PLACE, part, start, step=step)
        spans.flush()
        try:
            yield
        finally:
            end = time.monotonic()
            self._spent[part] += end - start
            spans.span(PLACE, part, start, end, step=step)

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
        if result.staged:  # then servers pause only for the swap, after the transfer
            phases = {"transfer": phases.pop("transfer"), **phases}
        self._publication = {f"{name}_seconds": seconds for name, seconds in phases.items()}
        self._publication["publish_bytes"] = float(result.bytes_sent)
        paused = self._part_start
        if result.staged:
            paused += result.transfer_seconds
        end = self._part_start
        for name, seconds in phases.items():
            start = end
            end = start + seconds
            spans.span(PLACE, name, start, end)
        for r in result.results:
            details = {"error": r.error} if r.error else {}
            spans.span(f"server {r.id}/paused", f"version {result.version}", paused, end, **details)

    def next_step(self, step: int) -> dict[str, float]:
        """Return the metrics of the step that ends now, and begin the next."""
        end = time.monotonic()
        spans.span(PLACE, f"step {step}", self._step_start, end, step=step)
        total = end - self._step_start
        columns = {f"{part}_seconds": seconds for part, seconds in self._spent.items()}
        columns |= self._publication
        columns["step_seconds"] = total
        columns["learner_idle_share"] = columns["wait_seconds"] / total
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._step_start = end
        self._publication = {}
        return columns
