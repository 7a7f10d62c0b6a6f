"""The run directory (docs/reference/run-directory.md says what each file is), the
addresses of a live run, and the one JSONL writer.
"""

import errno
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents, lines_of, next_line, opened

log = logging.getLogger(__name__)
META = "megarl.json"
"""Written last into a checkpoint: without it the checkpoint is incomplete."""
CHECKPOINT = re.compile(r"step-(\d+)")

LARGEST = 1 << 62
"""Bound on the size of any number in a row."""
type Row = dict[str, Any]
"""A line of a JSONL file: numbers, and a few strings, by name."""


class LinkKeys(msgspec.Struct, frozen=True, kw_only=True):
    """CURVE keys (http://curvezmq.org, in Z85) for authentication and encryption
    between learner and controller.
    """

    controller: str
    controller_secret: str
    learner: str
    learner_secret: str

    @staticmethod
    def new() -> "LinkKeys":
        """Make new keys."""
        import zmq  # only here: most importers of this module need just a run's files

        controller, controller_secret = zmq.curve_keypair()
        learner, learner_secret = zmq.curve_keypair()
        return LinkKeys(
            controller=controller.decode(),
            controller_secret=controller_secret.decode(),
            learner=learner.decode(),
            learner_secret=learner_secret.decode(),
        )


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks of a server that spans `nodes` nodes meet: at this port of its
    first node.
    """

    nodes: int
    port: int


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and keys of a live run's roles. session: names one life of the
    supervisor, within which compute is counted.
    """

    session: str
    controller: str  # tcp://host:port
    servers: tuple[str, ...]  # http://host:port
    api_key: str
    admin_key: str
    link: LinkKeys
    meetings: dict[str, Meeting] = {}  # of servers that span nodes, by role, such as server-0
    rendezvous_port: int  # for the learner's ranks, on its first node
    rendezvous_host: str = "127.0.0.1"
    learner_nodes: int = 1
    gpus: int = 0  # of all roles together; 0: compute is counted in cores
    controller_metrics: str = ""  # host:port of GET /metrics; empty: not served
    learner_metrics: str = ""
    metrics_key: str = ""
    spent: float = 0.0  # device-hours of the lives before this one, by the status that they left


class SupervisorEvent(msgspec.Struct, frozen=True):
    """A line of RUN/logs/supervisor.jsonl: something that the supervisor did. session:
    the life in which it did so.
    """

    time: float
    session: str
    event: str
    role: Annotated[str, msgspec.Meta(pattern=r"^((server|controller|learner)-[0-9]{1,9})?$")] = ""
    nodes: tuple[str, ...] = ()


class RunDir:
    """Paths in a run directory, and safe ways to write to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"  # fully resolved
        self.metrics = path / "metrics.jsonl"  # a row per step
        self.eval = path / "eval.jsonl"  # a row per evaluation
        self.summary = path / "summary.json"
        self.status = path / "status.json"
        self.endpoints_file = path / "endpoints.json"
        # A request for an orderly end, polled by learner and controller.
        self.stop_file = path / "stop"
        self.failure_file = path / "failure"  # why the run must not be restarted automatically
        # The size that learner.microbatch_tokens=auto found.
        self.microbatch = path / "microbatch.json"
        self.fingerprints = path / "fingerprints.json"
        self.bad_rollouts = path / "bad-rollouts.jsonl"  # of skipped steps
        self.rollouts = path / "rollouts"  # the journal
        self.logs = path / "logs"
        self.supervisor = self.logs / "supervisor.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.report = path / "report.html"
        self.picture = path / "reward.png"
        self.trace = path / "trace"  # spans of the roles
        self.profile = path / "profile"
        self.prometheus = path / "prometheus"  # scrape targets
        self.weights = path / "weights"  # that servers read with weights.transport=disk
        self.evaluations = path / "evaluations"

    @staticmethod
    def opened(path: Path) -> "RunDir":
        """Open the directory of a run that has begun; MegarlError if there is none."""
        rundir = RunDir(path)
        if not os.path.exists(rundir.recipe):
            raise MegarlError(f"{path}: not a run directory (no recipe.yaml in it)")
        return rundir

    def log(self, role: str, host: str, rank: int) -> Path:
        """Return a process's log file. role: server, controller or learner; rank: which
        server, or which learner rank.
        """
        return self.logs / role / f"{host}.{rank}.log"

    def events(self) -> Iterator[SupervisorEvent]:
        """Yield the supervisor's events in all its lives; invalid lines are skipped."""
        for row in read_jsonl(self.supervisor):
            with suppress(msgspec.ValidationError):
                yield msgspec.convert(row, SupervisorEvent)

    def create(self) -> None:
        """Make the folders, and mend what an earlier life left within a line."""
        for folder in (self.path, self.rollouts, self.logs, self.checkpoints, self.tensorboard):
            folder.mkdir(parents=True, exist_ok=True)
        for lines in (self.metrics, self.eval, self.bad_rollouts, self.supervisor):
            mend_jsonl(lines)

    def stop(self, signal: int = 0) -> None:
        """Ask the run to save and end. signal: the reason, if it was a signal."""
        with writing(self.stop_file):
            self.stop_file.write_text(str(int(signal) or ""))

    def stop_asked(self) -> bool:
        """Return whether the run was asked to end; False if the file system fails."""
        return os.path.exists(self.stop_file)

    def stop_signal(self) -> int:
        """Return the signal for which the run was asked to end; 0 for none, or if
        nobody has asked.
        """
        text = _text(self.stop_file).strip()
        return int(text) if text.isdecimal() else 0

    def failure(self) -> str:
        """Return why the run must not be restarted automatically; empty if it may be,
        or while the file system fails.
        """
        return _text(self.failure_file)

    def endpoints(self) -> Endpoints:
        """Read the addresses of the live run. MegarlError if it is not live, or of
        another version.
        """
        path = self.endpoints_file
        try:
            return msgspec.json.decode(contents(path), type=Endpoints)
        except FileNotFoundError:
            raise MegarlError(
                f"{path}: no such file; the run is not live. Start it with `megarl train`."
            ) from None
        except msgspec.DecodeError as error:
            raise MegarlError(
                f"{path}: this version of megarl cannot read it: {error}; use the run's version"
            ) from None

    def write_endpoints(self, endpoints: Endpoints) -> None:
        """Write the addresses; only this user can read them."""
        write_atomically(self.endpoints_file, msgspec.json.encode(endpoints), mode=0o600)


def _text(file: Path) -> str:
    """Return a file's contents; "" if it cannot be read."""
    try:
        return contents(file).decode(errors="replace")
    except OSError:
        return ""


def step_folder(parent: Path, step: int) -> Path:
    """Return the folder of `step`'s checkpoint in RUN/checkpoints, or of its answers in
    RUN/evaluations.
    """
    return parent / f"step-{step:07}"


def step_of(folder: Path) -> int:
    """Return the step in the name of such a folder."""
    return int(folder.name.removeprefix("step-"))


def complete(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints in RUN/checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if CHECKPOINT.fullmatch(path.name)]
    sealed = [path for path in folders if (path / META).is_file()]
    return sorted(sealed, key=step_of)


def checkpoint_of(rundir: RunDir, step: int | None) -> Path:
    """Return the complete checkpoint of a step, None: the newest. MegarlError if it is
    not there.
    """
    by_step = {step_of(folder): folder for folder in complete(rundir.checkpoints)}
    if not by_step:
        raise MegarlError(
            f"{rundir.path}: no checkpoint yet; one is written every checkpoint.every steps, and"
            " when the run is stopped"
        )
    if step is None:
        return by_step[max(by_step)]
    if step not in by_step:
        steps = ", ".join(map(str, by_step))
        raise MegarlError(f"--step: {rundir.path} has no checkpoint of step {step}; it has {steps}")
    return by_step[step]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Re-raise an OSError within this context as a MegarlError that names the path."""
    try:
        yield
    except OSError as error:
        advice = "make it writable for the run"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "make room and resume: what was written before is intact"
        raise MegarlError(f"{path}: cannot be written: {error.strerror}; {advice}") from None


@contextmanager
def made_directory(path: Path) -> Iterator[None]:
    """Make a folder for what is written meanwhile. If that fails before there is
    anything in it, neither it nor a folder made above it is left. MegarlError if the
    folder cannot be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegarlError(f"{path}: cannot make this directory: {error.strerror}") from None
    try:
        yield
    except BaseException:
        with suppress(OSError):  # that a folder is not empty
            for folder in missing:
                folder.rmdir()
        raise


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file in one rename, so that readers see the old contents or the new,
    never a part.
    """
    with (
        writing(path),
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file,
    ):
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, mode)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one row per line, all of them or none."""
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    write_atomically(path, b"".join(lines))


def append_jsonl(path: Path, row: Row) -> None:
    """Append one line, with null for a non-finite number, after removing one that a
    crash cut off.
    """
    with writing(path), opened_jsonl(path) as file:
        file.write(line_of(row))


def opened_jsonl(path: Path) -> BinaryIO:
    """Open a file for lines at its end, as `append_jsonl` does."""
    file = path.open("ab+")
    _mend(file, path)
    return file


def mend_jsonl(path: Path) -> None:
    """Remove a last line that a crash cut off: any program can then read the file."""
    if os.path.exists(path):
        with writing(path), path.open("rb+") as file:
            _mend(file, path)


SEARCHED_BYTES = 1 << 16


def _mend(file: BinaryIO, path: Path) -> None:
    """Make the file end with a whole line. A last line without an end gets one if it is
    a whole row; else it is removed, as a crash cut it off. A crash in here leaves the
    file as it was or mended.
    """
    size = file.seek(0, os.SEEK_END)
    start = _after_last_line_end(file, size)
    if start == size:
        return
    file.seek(start)
    last_line = file.read(SEARCHED_BYTES)
    is_read = size - start <= SEARCHED_BYTES
    if is_read and parsed(last_line.decode(errors="replace")) is not None:
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    else:
        file.truncate(start)
        log.warning("%s: removed a line that a crash cut off: %r", path, last_line[:80])
    file.flush()
    os.fsync(file.fileno())
    file.seek(0, os.SEEK_END)


def _after_last_line_end(file: BinaryIO, size: int) -> int:
    """Return the offset after the last line end in a file of this size; 0 if there is
    none.
    """
    end = size
    while end > 0:
        start = max(0, end - SEARCHED_BYTES)
        file.seek(start)
        position = file.read(end - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def line_of(row: Row) -> bytes:
    """Return the row as a line of JSON, with null for a non-finite number."""
    finite = dict(row)
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def parsed(line: str) -> Row | None:
    """Parse a line of `append_jsonl`, with NaN for null. Return None for a line that is
    truncated or not an object.
    """
    row = _decoded(line)
    if not isinstance(row, dict):
        return None
    for name, value in row.items():
        # Nearly all values are plain floats, and need no call.
        if type(value) is not float or not -LARGEST < value < LARGEST:
            row[name] = _number(value)
    return row


def _decoded(line: str) -> object:
    """Decode a line of JSON, also with NaN and 1e400; None if it is none."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        pass  # NaN and 1e400 are errors to it, but it is several times as fast as json
    except (ValueError, RecursionError):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> object:
    """Return NaN for null and for numbers too large for any metric; any other value as
    it is.
    """
    if value is None:
        return math.nan
    if isinstance(value, int | float) and not -LARGEST < value < LARGEST:
        return math.nan
    return value


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield rows in order; bytes that are not UTF-8 are replaced."""
    if not path.exists():
        return
    for line in lines_of(path):
        row = parsed(line.decode(errors="replace"))
        if row is not None:
            yield row


class _Stepped(msgspec.Struct):
    """A row's step, the only part of it that is decoded."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=LARGEST)]


def rows_in_order(path: Path, first: int = 0) -> Iterator[Row]:
    """Yield rows by step from step `first` on, of each the last (replay after a crash).
    One at a time: all take gigabytes.
    """
    if not path.exists():
        return
    offsets: dict[int, int] = {}  # of each step's last row
    with opened(path) as file:
        offset = 0
        while line := next_line(file, path):
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                step = msgspec.json.decode(line, type=_Stepped).step
                offsets[step] = offset
            offset += len(line)
        for step in sorted(offsets):
            if step < first:
                continue
            file.seek(offsets[step])
            row = parsed(file.readline().decode(errors="replace"))
            if row and _has_step(row):
                yield _known_values(row)


def latest_rows(path: Path) -> list[Row]:
    """Return all `rows_in_order`."""
    return list(rows_in_order(path))


TEXTS = ("compute_unit", "predicted_score")
"""Keys of an eval.jsonl row that are not numbers."""
FORECAST = (
    "predicted_hours",
    "predicted_asymptote",
    "predicted_final",
    "predicted_final_low",
    "predicted_final_high",
    "predicted_gain",
    "predicted_rest_high",
)
"""Keys of which a row has all or none."""


def lacking(score: Mapping[str, Any]) -> str:
    """Return the first required key that is missing or invalid in this eval.jsonl row;
    empty if the row is complete.
    """
    for name in ("step", "pass_rate", "n_prompts", "samples", "compute_hours"):
        if not is_figure(score.get(name)) or score[name] < 0:
            return name
    if score["pass_rate"] > 1 or not score["n_prompts"]:
        return "pass_rate of any prompts"
    if score.get("compute_unit") not in ("gpu", "core"):
        return "compute_unit"
    return ""


def is_figure(value: object) -> bool:
    """Return whether this is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def scores(rows: Iterable[Row]) -> dict[int, Row]:
    """Return the latest eval.jsonl row of each step: its numbers and TEXTS. Incomplete
    rows are skipped.
    """
    result = {}
    for step, row in by_step(row for row in rows if not lacking(row)).items():
        score = {name: value for name, value in row.items() if name in TEXTS or is_figure(value)}
        if not _has_forecast(score):
            score = {name: value for name, value in score.items() if name not in FORECAST}
        result[step] = score
    return result


def _has_forecast(score: Row) -> bool:
    """Return whether a score has a whole forecast."""
    return all(name in score for name in FORECAST) and score["predicted_hours"] > 0


def latest_scores(path: Path) -> list[Row]:
    """Return the `scores` in a file, in order of steps."""
    score_of = scores(read_jsonl(path))
    return [score_of[step] for step in sorted(score_of)]


def by_step(rows: Iterable[Row]) -> dict[int, Row]:
    """Return the latest row of each step: its numbers and TEXTS. Rows without a step
    are skipped, as they are not ours.
    """
    return {row["step"]: _known_values(row) for row in rows if _has_step(row)}


def _has_step(row: Row) -> bool:
    """Return whether a row has a valid step; True is no number."""
    step = row.get("step")
    return type(step) is int and step >= 0


def _known_values(row: Row) -> Row:
    """Return a row's numbers and TEXTS."""
    values = {}
    for name, value in row.items():
        is_known = isinstance(value, str) if name in TEXTS else type(value) in (int, float)
        if is_known:
            values[name] = value
    return values
