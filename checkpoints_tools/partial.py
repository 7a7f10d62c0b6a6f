"""A directory being written: resumable after a kill, and never taken for a whole one.

    .DST.partial/                what a killed conversion leaves; the next one with the same identity goes on from it
        progress.jsonl           identity; then one line a finished file, with whatever its writer wants to remember
        model-00001-of-….part    being written: renamed, and noted, when it is on disk
    DST                          the same directory, renamed when whole, without progress.jsonl

A file is put on disk (fsync) by a second thread while the next one is filled. An error removes the directory; a kill, or
Ctrl-C, leaves it to be continued.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.core.base.errors import MegarlError

PROGRESS = "progress.jsonl"
SETTLE_BYTES = 128 << 20
"""Left to itself Linux begins to write at a tenth of the memory, and the disk stands idle till then."""


class Partial:
    """Made by `writing`. path: the directory. finished: what was noted about each finished file (JSON), by name."""

    def __init__(self, path: Path, log: TextIO, progress: Progress) -> None:
        self.path = path
        self.finished: dict[str, object] = {}
        self.done = 0
        self._unsettled = 0
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._disk = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._log = log

    def begin(self, identity: Mapping[str, object]) -> None:
        """Continue what lies here if it has the same identity, else begin anew."""
        first, *rows = self._log.read().splitlines() or [""]
        if first != json.dumps(identity):
            for entry in self.path.iterdir():
                if entry.name != PROGRESS:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self._log.seek(0)
            self._log.truncate()
            self._note(identity)
            return
        for line in rows:
            with suppress(json.JSONDecodeError):  # a line that a kill cut off
                row = json.loads(line)
                if (file := self.path / row["file"]).is_file() and file.stat().st_size == row["bytes"]:
                    self.finished[row["file"]] = row["note"]

    def expect(self, what: str, total: int) -> None:
        """Tell the progress bar how many bytes will be written in all."""
        self._progress.update(self._task, description=what, total=total)

    def skip(self, count: int) -> None:
        """Count bytes that are there already."""
        self._progress.advance(self._task, count)

    def wrote(self, name: str, count: int) -> None:
        """Count bytes that were added to `unfinished(name)`: every now and then the second thread puts them on disk."""
        self.done += count
        self._progress.advance(self._task, count)
        self._unsettled += count
        if self._unsettled >= SETTLE_BYTES and (self._pending is None or self._pending.done()):
            self.flush()
            self._unsettled = 0
            self._pending = self._disk.submit(_settle, self.unfinished(name))

    def unfinished(self, name: str) -> Path:
        """Return where to write the file `name`."""
        return self.path / f"{name}.part"

    def finish(self, name: str, note: object) -> None:
        """Put the complete `unfinished(name)` on disk, give it its name, remember it. Returns before that is done."""
        self.flush()
        self._pending = self._disk.submit(self._finish, name, note)

    def flush(self) -> None:
        """Wait until what is finished is on disk; raise what went wrong there."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self._disk.shutdown()
        with suppress(OSError):  # a full disk: a line that is still in memory
            self._log.close()

    def _finish(self, name: str, note: object) -> None:
        _settle(self.unfinished(name))
        os.replace(self.unfinished(name), self.path / name)
        self._note({"file": name, "bytes": (self.path / name).stat().st_size, "note": note})
        self.finished[name] = note

    def _note(self, row: Mapping[str, object]) -> None:
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())


@contextmanager
def writing(destination: Path, identity: Mapping[str, object]) -> Iterator[Partial]:
    """`destination` exists once the block has ended well. identity: what makes an earlier attempt the same (JSON)."""
    refuse_existing(destination)
    path = destination.with_name(f".{destination.name}.partial")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    begin = time.monotonic()
    try:
        path.mkdir(parents=True, exist_ok=True)
        log = _locked(path)
    except OSError as error:
        raise MegarlError(f"{destination}: cannot be written: {error.strerror}") from None
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as progress:
        partial = Partial(path, log, progress)
        try:
            try:
                partial.begin(identity)
                yield partial
                partial.flush()
                (path / PROGRESS).unlink()
                os.replace(path, destination)
            finally:
                partial.close()  # before the directory goes, for the second thread may be renaming a file in it
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise MegarlError(
                f"{destination}: could not be written (is the disk full?): {error.strerror or error}"
            ) from None
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            raise
    seconds, megabytes = time.monotonic() - begin, partial.done / 1e6
    print(f"{destination}: {megabytes:,.1f} MB written in {seconds:.1f} s ({megabytes / seconds:,.0f} MB/s)")


def _settle(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def refuse_existing(destination: Path) -> None:
    if destination.exists():
        raise MegarlError(f"{destination}: exists already; remove it or name another directory")


def fingerprint(directory: Path) -> list[list[str | int]]:
    """Return name, size and time of every file: a conversion of a source that has changed is not continued."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return [[str(p.relative_to(directory)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]


def _locked(path: Path) -> TextIO:
    log = (path / PROGRESS).open("a+")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise MegarlError(
            f"{path}: another conversion is writing there; wait for it or name another directory"
        ) from None
    log.seek(0)
    return log
