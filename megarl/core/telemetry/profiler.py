"""torch's profiler over `monitor.profile_steps`, on every rank of the learner; does
nothing in other steps.

    a step of warm-up ─► first … last ─► RUN/profile/step-0000005-rank-0.json.gz
                                         for ui.perfetto.dev
                         with a GPU   ─► ….pickle: its memory, for
                                         pytorch.org/memory_viz

A step lasts from the end of the previous one to its own end, so it includes publication
and the wait for its batch. A learner that starts within the window records the rest of
it.
"""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)

MOST_ALLOCATIONS = 1_000_000


class Profiler:
    """The profiler of one rank. Call `step` when a step begins, `stop` at the end."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        """steps: the first and last to record; None: none."""
        self._first, last = steps or (0, -1)
        self._end = last + 1
        self._memory = torch.cuda.is_available()
        self._folder = folder
        self._rank = rank
        self._running: profile | None = None

    def step(self, step: int) -> None:
        """Note that this step begins, and the previous one has ended."""
        is_within = self._first - 1 <= step < self._end  # with a step of warm-up
        if self._running is not None:
            self._running.step()
            if step >= self._end:
                self.stop()
        elif self._first < self._end and is_within:
            self._start(step)

    def stop(self) -> None:
        """Stop recording and write the profile, if one is being recorded."""
        if self._running is None:
            return
        self._running.stop()
        self._running = None
        if self._memory:
            torch.cuda.memory._dump_snapshot(str(self._path(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self, step: int) -> None:
        """Begin to record, after a step of warm-up if `step` is before the first one to
        record.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        warmup = int(step < self._first)
        self._first = step + warmup
        activities = [ProfilerActivity.CPU]
        if self._memory:
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warmup, active=self._end - self._first, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=self._memory,
        )
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._running.start()

    def _write(self, recorded: profile) -> None:
        """Write the profile to its file, once it is complete."""
        path = self._path(".json.gz")
        recorded.export_chrome_trace(str(path))
        log.info("profile of the steps from %d on: %s", self._first, path)

    def _path(self, suffix: str) -> Path:
        """Return the path of this rank's file with this suffix."""
        return self._folder / f"step-{self._first:07}-rank-{self._rank}{suffix}"
