"""Writes a directory. After a kill it can be continued, and it is never mistaken for a
complete one.

    .DST.partial/               left by a killed conversion; the next one with the same
                                identity continues it
        progress.jsonl          the identity, then one line per finished file, with any
                                data that its writer wants to keep
        model-00001-of-….part   a file being written; it is renamed and recorded once it
                                is on disk
    DST                         the same directory, renamed when complete, without
                                progress.jsonl

A second thread puts a file on disk (fsync) while the next one is filled. An error
removes the directory; a kill or Ctrl-C leaves it, to be continued.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import mend_jsonl

PROGRESS = "progress.jsonl"
SETTLE_BYTES = 128 << 20
"""Bytes after which data are put on disk. Linux itself begins only at a tenth of the
memory; the disk is idle until then.
"""


class Partial:
    """A directory being written, created by `writing`. log: its progress.jsonl;
    finished: the note (JSON) on each finished file, by name; done: bytes written by
    this process.
    """

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

    def open(self, same: Mapping[str, object]) -> None:
        """Continue the directory if it was begun with the same identity, else empty it
        and begin anew. Files that are not whole do not count as finished.
        """
        first, *rows = self._log.read().splitlines() or [""]
        if first != json.dumps(same):
            for entry in self.path.iterdir():
                if entry.name != PROGRESS:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self._log.seek(0)
            self._log.truncate()
            self._note(same)
            return
        for line in rows:
            row = json.loads(line)
            file = self.path / row["file"]
            if file.is_file() and file.stat().st_size == row["bytes"]:
                self.finished[row["file"]] = row["note"]

    def expect(self, description: str, total: int) -> None:
        """Set the progress bar's text and the total number of bytes to write."""
        self._progress.update(self._task, description=description, total=total)

    def skip(self, count: int) -> None:
        """Count bytes that were already written."""
        self._progress.advance(self._task, count)

    def wrote(self, name: str, count: int) -> None:
        """Count bytes that were added to `unfinished(name)`. From time to time the
        second thread puts them on disk.
        """
        self.done += count
        self._progress.advance(self._task, count)
        self._unsettled += count
        if self._unsettled >= SETTLE_BYTES and (self._pending is None or self._pending.done()):
            self.flush()  # raises the error of what is done
            self._unsettled = 0
            self._pending = self._disk.submit(_settle, self.unfinished(name))

    def unfinished(self, name: str) -> Path:
        """Return the path at which to write the file `name` until it is complete."""
        return self.path / f"{name}.part"

    def finish(self, name: str, note: object) -> None:
        """Put the complete `unfinished(name)` on disk, rename it, and record it with
        `note`; return before that is done.
        """
        self.flush()
        self._pending = self._disk.submit(self._finish, name, note)

    def flush(self) -> None:
        """Wait until finished files are on disk; raise the error if that failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Stop the thread, after the file that it is putting on disk;
        keep the folder.
        """
        self._disk.shutdown()
        with suppress(OSError):  # on a full disk, a line may still be in memory
            self._log.close()

    def _finish(self, name: str, note: object) -> None:
        """Do in the second thread what `finish` says."""
        _settle(self.unfinished(name))
        os.replace(self.unfinished(name), self.path / name)
        self._note({"file": name, "bytes": (self.path / name).stat().st_size, "note": note})
        self.finished[name] = note

    def _note(self, row: Mapping[str, object]) -> None:
        """Append a line to progress.jsonl, and put it on disk."""
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())


@contextmanager
def writing(destination: Path, same: Mapping[str, object]) -> Iterator[Partial]:
    """Yield a directory to write, which appears as `destination` once the block has
    succeeded. same: the identity (JSON, see `identity`) with which an earlier attempt
    must have begun to be continued.
    """
    path = destination.with_name(f".{destination.name}.partial")
    console = terminal.console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    started = time.monotonic()
    try:
        path.mkdir(parents=True, exist_ok=True)
        log = _locked(path)
    except OSError as error:
        raise MegarlError(f"{destination}: cannot be written: {error.strerror}") from None
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()
    ) as progress:
        try:
            # It is closed before the directory is removed, since the second thread may
            # be renaming a file in it.
            with closing(Partial(path, log, progress)) as partial:
                partial.open(same)
                yield partial
                partial.flush()
                (path / PROGRESS).unlink()
                os.replace(path, destination)
        except Exception as error:
            shutil.rmtree(path, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or error
            raise MegarlError(
                f"{destination}: could not be written (is the disk full?): {reason}"
            ) from None
    seconds = time.monotonic() - started
    megabytes = partial.done / 1e6
    terminal.say(
        f"{destination}: {megabytes:,.1f} MB written in {seconds:.1f} s ({megabytes / seconds:,.0f}"
        " MB/s)"
    )


def _settle(path: Path) -> None:
    """Put a file on disk (fsync)."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def refuse_existing(destination: Path) -> None:
    """Raise MegarlError if the destination exists, or cannot be looked for. It is
    called before a conversion is planned, which may take minutes.
    """
    try:
        exists = destination.exists()
    except OSError as error:  # such as a name that is too long
        raise MegarlError(f"{destination}: cannot be written: {error.strerror}") from None
    if exists:
        raise MegarlError(f"{destination}: exists already; remove it or name another directory")


def identity(command: str, source: Path, **settings: object) -> dict[str, object]:
    """Return the data that must be the same for a killed conversion to be continued,
    including name, size and time of every source file.
    """
    file_states = []
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        state = path.stat()
        file_states.append([str(path.relative_to(source)), state.st_size, state.st_mtime_ns])
    return {"command": command, "source": str(source.resolve()), "files": file_states} | settings


def _locked(path: Path) -> TextIO:
    """Return the directory's progress.jsonl, locked for as long as it is open, with
    whole lines only. MegarlError if another process has it.
    """
    log = (path / PROGRESS).open("a+")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise MegarlError(
            f"{path}: another conversion is writing there; wait for it or name another directory"
        ) from None
    mend_jsonl(path / PROGRESS)
    log.seek(0)
    return log
