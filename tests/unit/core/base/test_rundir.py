"""Rows and files of a run directory under crashes."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from megarl.core.base import files, rundir
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import (
    RunDir,
    append_jsonl,
    by_step,
    latest_rows,
    opened_jsonl,
    read_jsonl,
    rows_in_order,
    write_atomically,
)
from megarl.core.evaluation.answers import SuiteDir
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted
from megarl.core.telemetry.spans import Spans
from megarl.run.process import lock
from megarl.run.state import Observer
from tests.full_disk import files_no_larger_than


def test_rows_supersede_by_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, loss in ((0, 1.0), (1, 2.0), (1, 3.0), (2, 4.0)):
        append_jsonl(path, {"step": step, "loss": loss})
    assert latest_rows(path) == [
        {"step": 0, "loss": 1.0},
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 4.0},
    ]


ROW = b'{"step": 0, "loss": 1.5}\n'


@pytest.mark.parametrize(
    ("left", "mended"),
    {
        b"": b"",
        ROW: ROW,
        ROW + b'{"step": 1, "lo': ROW,
        ROW + b"\0" * 4096: ROW,  # as file systems leave after a power failure
        ROW + b'{"x": "' + b"y" * 200_000: ROW,
        b'{"step"': b"",
        ROW[:-1]: ROW,  # only the line end is missing
        ROW + ROW[:-1]: ROW + ROW,
        ROW + b"[1, 2]": ROW,
        ROW + b"\xff\xfe\n": ROW + b"\xff\xfe\n",  # a whole line, whatever is in it
    }.items(),
)
def test_a_line_that_a_crash_cut_off_goes(tmp_path: Path, left: bytes, mended: bytes) -> None:
    """At a start, and when a line is added: programs that are not ours read the file
    then.
    """
    run = RunDir(tmp_path)
    run.eval.write_bytes(left)
    run.create()
    assert run.eval.read_bytes() == mended
    run.eval.write_bytes(left)
    append_jsonl(run.eval, {"step": 2})
    assert run.eval.read_bytes() == mended + b'{"step": 2}\n'


def test_every_file_of_lines_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a run at its start, others when they are opened for more."""
    run = RunDir(tmp_path)
    run.create()
    files = [run.metrics, run.eval, run.bad_rollouts, run.supervisor]
    answers = SuiteDir(tmp_path, "math")
    trace = run.trace / "learner.jsonl"
    answers.path.mkdir()
    run.trace.mkdir()
    for path in [*files, answers.answers, trace]:
        path.write_bytes(ROW + b'{"st')
    run.create()
    opened_jsonl(answers.answers).close()
    spans = Spans()
    spans.write_to(trace)
    spans.flush()
    assert [path.read_bytes() for path in files] == [ROW] * len(files)
    assert answers.answers.read_bytes() == ROW
    assert [type(json.loads(line)) for line in trace.read_text().splitlines()] == [dict, dict]
    assert "metrics.jsonl: removed a line that a crash cut off: b'{\"st'" in caplog.text


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO has its reader wait; a device, or a sparse file, has more than fits into
    memory.
    """
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "zeros"):
        with pytest.raises(
            MegarlError, match=f"{name}: a pipe or a device, where a regular file belongs"
        ):
            files.contents(tmp_path / name)
        with pytest.raises(MegarlError, match=f"{name}: a pipe or a device"):
            list(files.lines_of(tmp_path / name))
    with pytest.raises(
        IsADirectoryError
    ):  # as a file system may say for a moment, so whoever watches tries again
        files.contents(tmp_path / "folder")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(40 << 30)
    with pytest.raises(MegarlError, match="sparse: larger than 256 MiB"):
        files.contents(tmp_path / "sparse")
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 1 << 20)
    with pytest.raises(MegarlError, match="sparse: a line of more than 1 MiB"):
        latest_rows(tmp_path / "sparse")
    (tmp_path / "link").symlink_to(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_bytes(ROW * 2)
    assert list(files.lines_of(tmp_path / "link")) == [ROW] * 2
    assert files.contents(tmp_path / "link", len(ROW) * 2) == ROW * 2
    with pytest.raises(MegarlError, match="larger than"):
        files.contents(tmp_path / "link", len(ROW) * 2 - 1)


def test_lines_that_are_not_ours_spoil_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 0})
    with path.open("ab") as file:
        file.write(
            b'{"loss": 1}\n{"step": "1"}\n{"step": null}\n{"step": [1]}\n\xff\xfe{\n[3]\n'
            + b"[" * 100_000
            + b"\n"
        )
        file.write(b'{"step": 2, "x": "\xff"}\n')
    append_jsonl(path, {"step": 1})
    assert [row["step"] for row in latest_rows(path)] == [0, 1, 2]
    observer = Observer(RunDir(tmp_path))
    assert sorted(observer.state.rows) == [0, 1, 2]


def test_rows_come_in_order_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest of each step, after replays, whatever else stands in the file."""
    path = tmp_path / "metrics.jsonl"
    parse = rundir.parsed
    read = list[str]()
    steps = [*range(5), *range(3, 8), *range(2, 6)]
    lines = [f'{{"step": {step}, "at": {at}}}\n'.encode() for at, step in enumerate(steps)]
    lines[7:7] = [
        b'{"step": 1, "lo\n',
        b"[1]\n",
        b"\n",
        b'{"step": true}\n',
        b'{"step": -1}\n',
        b'{"step": 4.0}\n',
        b'{"step": 4611686018427387904}\n',
        b'{"n": {"step": 1}}\n',
        b'{"step": 0, "at": 0, "x": "\xff", "y": 1e400}\n',
    ]
    path.write_bytes(b"".join(lines) + b'{"step": 9, "at": 12')
    monkeypatch.setattr(rundir, "parsed", lambda line: read.append(line) or parse(line))
    rows = rows_in_order(path)
    assert next(rows)["step"] == 0
    assert len(read) == 1
    found = [(row["step"], row["at"]) for row in rows]
    assert found == [(1, 1), (2, 10), (3, 11), (4, 12), (5, 13), (6, 8), (7, 9)]
    assert [row for _, row in sorted(by_step(read_jsonl(path)).items())][1:] == latest_rows(path)[
        1:
    ]
    read.clear()
    assert [row["at"] for row in rows_in_order(path, 6)] == [8, 9]
    assert len(read) == 2, "earlier rows are not even parsed"
    assert list(rows_in_order(tmp_path / "nothing")) == []


def test_what_is_no_number_is_null_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 0, "a": math.nan, "b": math.inf})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 0,
        "a": None,
        "b": None,
    }
    (row,) = read_jsonl(path)
    assert math.isnan(row["a"])


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_wish_to_stop_that_does_not_fit_on_the_disk_is_one_message(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.stop(15)
    assert rundir.stop_signal() == 15
    rundir.stop_file.unlink()
    rundir.stop_file.symlink_to("/dev/full")
    with pytest.raises(MegarlError, match=r"stop: cannot be written: No space left on device"):
        rundir.stop(15)


def test_a_file_system_that_fails_does_not_ask_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path)
    rundir.stop(15)
    rundir.failure_file.write_text("a reason")

    def evicted(*_: object, **__: object) -> None:
        raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))

    with monkeypatch.context() as patched:
        patched.setattr("os.stat", evicted)
        patched.setattr("io.open", evicted)
        assert (rundir.stop_asked(), rundir.stop_signal(), rundir.failure()) == (False, 0, "")
    assert (rundir.stop_asked(), rundir.stop_signal(), rundir.failure()) == (True, 15, "a reason")


def test_a_quota_that_is_used_up_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's file system says so when the file is synchronised. What was there is
    whole, and nothing lies beside it.
    """
    journal = Journal.open(tmp_path / "rollouts", 2, 1)
    (whole,) = (tmp_path / "rollouts").glob("*.journal")
    before = whole.read_bytes()
    write_atomically(tmp_path / "status.json", b"old")

    def used_up(fd: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", used_up)
        said = (
            r"{}: cannot be written: Disk quota exceeded; make room and resume: what was written"
            r" before is intact"
        )
        with pytest.raises(MegarlError, match=said.format(r"status\.json")):
            write_atomically(tmp_path / "status.json", b"new")
        with pytest.raises(MegarlError, match=said.format(r"000000\.journal")):
            journal.append(Admitted(ticket=0, task="math", prompt_id="p", epoch=0, due_step=0))
    assert (tmp_path / "status.json").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollouts", "status.json"]
    assert whole.read_bytes() == before
    again = Journal.open(tmp_path / "rollouts", 2, 1)
    assert again.state.admission.next_ticket == 0
    again.close()


def test_a_run_that_cannot_even_be_locked_is_one_message(tmp_path: Path) -> None:
    with (
        files_no_larger_than(0),
        pytest.raises(MegarlError, match=r"\.lock: cannot be written: File too large; make room"),
        lock(tmp_path, "megarl train", "run.name"),
    ):
        pass
    with lock(tmp_path, "megarl train", "run.name"):  # the first was let go of
        pass
