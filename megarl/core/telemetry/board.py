"""TensorBoard files of a run: RUN/tensorboard/."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megarl.core.base.rundir import writing


class Board:
    """A writer of scalars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = EventFileWriter(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))

    def begin_again(self, step: int) -> None:
        """Replay: TensorBoard drops what it has from here on."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        with writing(self._folder):
            self._events.close()

    def _add(self, event: event_pb2.Event) -> None:
        with writing(self._folder):
            self._events.add_event(event)
