"""Where the seconds of a step went, from the end of the step before.

wait (for the controller)  train  publish  checkpoint  ──► next_step() ──► columns of metrics.jsonl
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from megarl.messages import Published

Part = Literal["wait", "train", "publish", "checkpoint"]


class StepClock:
    """One learner rank's. All values in seconds of wall time."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._spent: dict[Part, float] = {"wait": 0.0, "train": 0.0, "publish": 0.0, "checkpoint": 0.0}
        self._publication = {"probe_logprob_diff": math.nan}

    @contextmanager
    def spent(self, part: Part) -> Iterator[None]:
        """Count the time within as this part of the step."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spent[part] += time.monotonic() - begin

    def published(self, result: Published) -> None:
        """The latest publication: its columns stay until the next."""
        differences = [r.probe_logprob_diff for r in result.results if not r.error]
        self._publication = {
            "pause_seconds": result.pause_seconds,
            "transfer_seconds": result.transfer_seconds,
            "resume_seconds": result.resume_seconds,
            "probe_seconds": result.probe_seconds,
            "publish_bytes": float(result.bytes_sent),
            "probe_logprob_diff": max(differences, default=math.nan),
        }

    def next_step(self) -> dict[str, float]:
        """The columns of the step that ends now."""
        now = time.monotonic()
        total = now - self._begin
        columns = {f"{part}_seconds": seconds for part, seconds in self._spent.items()}
        self._begin, self._spent = now, dict.fromkeys(self._spent, 0.0)
        return (
            columns
            | self._publication
            | {
                "step_seconds": total,
                "learner_idle_share": columns["wait_seconds"] / total,
            }
        )
