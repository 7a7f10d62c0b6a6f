"""What is written while a run goes comes back whole: over crashes, a file that grew too
long, a disk that is full.
"""

import time
from pathlib import Path

import pytest

from megarl.core.telemetry import spans as module
from megarl.core.telemetry.spans import Spans
from megarl.tools.report.trace import read


def recorder(path: Path) -> Spans:
    made = Spans()
    made.write_to(path)
    return made


def test_what_is_written_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    before = time.time()
    now = time.monotonic()
    one = recorder(tmp_path / "trace" / "controller.jsonl")
    other = recorder(tmp_path / "trace" / "learner.jsonl")
    one.open("server 0/requests", "late", now + 2)
    one.span("server 0/requests", "late", now + 2, now + 3, tokens=5)
    other.span("learner/rank 0", "early", now + 1, now + 9)
    one.event("controller/batches", "batch 0", step=0, tickets=[1, 2])
    for spans in (one, other):
        spans.flush()
    found, events = read(tmp_path / "trace")
    assert [(s.name, s.cut) for s in found] == [("early", False), ("late", False)]
    assert found[0].start == pytest.approx(before + 1, abs=0.5)
    assert found[1].end - found[1].start == pytest.approx(1, abs=1e-6)
    assert (events[0].args["tickets"], found[1].args) == ([1, 2], {"tokens": 5})


def test_what_a_dead_process_left_open_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "controller.jsonl"
    now = time.monotonic()
    first = recorder(path)
    first.open("server 0/requests", "lost", now)
    first.span("server 0/requests", "done", now, now + 5)
    first.flush()
    time.sleep(0.01)
    second = recorder(path)
    second.open("server 0/requests", "runs", now + 20)
    second.span("server 0/requests", "other", now + 21, now + 30)
    second.flush()
    with path.open("ab") as file:
        file.write(b'{"type":"span","on":"server')  # being written
    ends = {s.name: (round(s.end - s.start, 3), s.cut) for s in read(tmp_path)[0]}
    assert ends == {"lost": (5, True), "done": (5, False), "runs": (10, True), "other": (9, False)}


def test_two_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_BYTES", 10_000)
    spans = recorder(tmp_path / "controller.jsonl")
    spans.open("server 0/requests", "long", 0.0)
    for n in range(1000):
        spans.span("server 0/requests", f"{n}", float(n), n + 1.0)
        spans.flush()
    names = [s.name for s in read(tmp_path)[0] if not s.cut]
    assert names[-1] == "999"
    assert names == [str(n) for n in range(1000 - len(names), 1000)]
    assert len(names) > 50
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size < 10_200 for file in files)


def test_what_fails_is_not_timed(tmp_path: Path) -> None:
    spans = recorder(tmp_path / "controller.jsonl")
    with spans.timed("controller/grading", "done", n=1):
        pass
    with pytest.raises(ValueError, match="no"), spans.timed("controller/grading", "failed"):
        raise ValueError("no")
    spans.flush()
    (span,) = read(tmp_path)[0]
    assert (span.name, span.args) == ("done", {"n": 1})


def test_a_disk_that_takes_nothing_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_text("in the way")
    spans = recorder(tmp_path / "trace" / "controller.jsonl")
    for _ in range(3):
        spans.event("controller/batches", "batch")
        spans.flush()
    assert len(caplog.records) == 1
    assert "spans are lost" in caplog.text


def test_nothing_is_kept_of_whom_nobody_looks_at() -> None:
    spans = Spans()
    spans.event("nobody/nothing", "x")
    spans.flush()
    assert not spans._rows
