"""`megarl trace`: the format's rules and the run's own times, of random runs; what it
says when there is nothing to show.
"""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import cli
from megarl.core.base.rundir import RunDir, append_jsonl
from megarl.core.telemetry.spans import Span, Spans
from megarl.tools.report.trace import changes, nested, packed, trace_of, union
from tests import trace_format

# Times are eighths of a second, so that sums of them are exact.
TIMES = st.tuples(st.integers(0, 400), st.integers(1, 80)).map(
    lambda t: (t[0] / 8, (t[0] + t[1]) / 8)
)
SPANS = st.lists(TIMES.map(lambda t: Span("a/b", "x", *t)), max_size=40)


def at_once(spans: list[Span], at: float) -> int:
    return sum(s.start <= at < s.end for s in spans)


@given(SPANS)
def test_lanes_hold_all_spans_apart_on_as_few_lanes_as_there_are_at_once(spans: list[Span]) -> None:
    lanes = packed([[span] for span in spans])
    assert sorted(s.start for lane in lanes for s in lane) == sorted(s.start for s in spans)
    for lane in lanes:
        assert all(a.end <= b.start for a, b in pairwise(lane))
    assert len(lanes) == max((at_once(spans, s.start) for s in spans), default=0)


@given(SPANS)
def test_union_and_changes_count_what_is_there(spans: list[Span]) -> None:
    found = union(spans)
    counts = changes((s.start, s.end) for s in spans)
    assert all(a[1] < b[0] for a, b in pairwise(found))
    for eighth in range(0, 481):
        at = eighth / 8
        assert any(begin <= at < end for begin, end in found) == (at_once(spans, at) > 0)
        assert next((count for time, count in reversed(counts) if time <= at), 0) == at_once(
            spans, at
        )


def test_parts_stay_with_their_whole() -> None:
    whole = Span("a", "w", 0, 4)
    part = Span("a", "p", 0, 2)
    next_ = Span("a", "n", 4, 5)
    assert nested([next_, part, whole]) == [[whole, part], [next_]]


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, list[tuple[float, float]]]]:
    """Steps that follow each other: the parts of each, and requests that run meanwhile
    on two servers.
    """
    steps = []
    at = 100.0
    for _ in range(draw(st.integers(1, 6))):
        cuts = sorted(draw(st.lists(st.integers(1, 80), min_size=5, max_size=5, unique=True)))
        times = [at + cut / 8 for cut in cuts]
        requests = draw(st.lists(st.tuples(TIMES, st.integers(0, 1)), max_size=10))
        steps.append(
            {
                "step": [(at, times[4])],
                "wait": [(times[0], times[1])],
                "train": [(times[1], times[2])],
                "publish": [(times[3], times[4])],
                "server 0": [
                    (at + b / 4, at + e / 4) for (b, e), server in requests if server == 0
                ],
                "server 1": [
                    (at + b / 4, at + e / 4) for (b, e), server in requests if server == 1
                ],
            }
        )
        at = times[4]
    return steps


def recorded(path: Path, steps: list[dict[str, list[tuple[float, float]]]]) -> RunDir:
    """As learner and controller write it: ticket s is generated from step s - 1 on and
    trained in step s.
    """
    rundir = RunDir(path)
    path.mkdir()
    rundir.recipe.write_text("")
    learner = Spans()
    controller = Spans()
    learner.write_to(rundir.trace / "learner.jsonl")
    controller.write_to(rundir.trace / "controller.jsonl")
    learner._offset = controller._offset = 0.0
    for n, step in enumerate(steps):
        for part in ("wait", "train", "publish"):
            learner.span("learner/rank 0", part, *step[part][0], step=n)
        begin, end = step["train"][0]
        learner.span("learner/rank 0", "forward_backward", begin, (begin + end) / 2)
        learner.span("server 0/paused", f"version {n}", *step["publish"][0])
        learner.span("learner/rank 0", f"step {n}", *step["step"][0], step=n)
        for server in ("server 0", "server 1"):
            for request in step[server]:
                controller.open(f"{server}/requests", "ticket 0.0", request[0])
                controller.span(f"{server}/requests", "ticket 0.0", *request, tokens=1)
        ticket = steps[max(0, n - 1)]["step"][0][0]
        controller.span(
            "groups/tickets", "ticket", ticket, step["wait"][0][0], ticket=n, removed=False
        )
        controller.event("controller/batches", f"batch {n}", step=n, tickets=[n])
        event: Any = controller._rows[-1]
        controller._rows[-1] = type(event)(event.on, event.name, step["wait"][0][1], event.args)
        append_jsonl(rundir.metrics, {"step": n, "lag_mean": n / 4, "lag_max": float(n)})
    controller.flush()
    learner.flush()
    return rundir


@settings(max_examples=40)
@given(runs(), st.integers(1, 8))
def test_a_trace_keeps_the_formats_rules_and_the_runs_times(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[dict[str, list[tuple[float, float]]]],
    wanted: int,
) -> None:
    trace = trace_of(recorded(tmp_path_factory.mktemp("trace") / "run", steps), wanted)
    trace_format.check(json.loads(json.dumps(trace)))
    shown = list(range(len(steps)))[-wanted:]
    assert trace["otherData"]["steps"] == shown
    begin = trace["otherData"]["begin"]
    found = trace_format.threads(trace)
    learner = found["learner/rank 0"]
    for n in shown:
        for name, part in (
            ("wait", "wait"),
            ("train", "train"),
            ("publish", "publish"),
            (f"step {n}", "step"),
        ):
            (span,) = [e for e in learner if e["name"] == name and e["args"]["step"] == n]
            assert (span["ts"], span["dur"]) == tuple(
                round(s * 1e6)
                for s in (steps[n][part][0][0] - begin, steps[n][part][0][1] - steps[n][part][0][0])
            )
    since = steps[shown[0]]["step"][0][0]
    for server in ("server 0", "server 1"):
        requests = [Span("a", "x", *r) for step in steps for r in step[server] if r[1] > since]
        busy = [(round((b - begin) * 1e6), round((e - b) * 1e6)) for b, e in union(requests)]
        drawn = [(e["ts"], e["dur"]) for e in found[f"{server}/busy"]]
        assert sum(d for _, d in drawn) >= sum(
            d for _, d in busy
        )  # whole spans, also from before the window
        if wanted >= len(steps):
            assert drawn == busy
        assert len(found[f"{server}/requests"]) == len(requests)
    assert {e["name"] for e in found["groups/tickets"] if e["name"].startswith("ticket")} >= {
        f"ticket {n}" for n in shown
    }
    arrows = [e for e in trace["traceEvents"] if e["ph"] == "f"]
    assert {f"step {n}" for n in shown} <= {e["name"] for e in arrows}
    assert [v for _, v in trace_format.counter(trace, "learner", "lag_max")] == shown
    waiting = trace_format.counter(trace, "groups", "tickets waiting for their step")
    assert all(count >= 0 for _, count in waiting)
    assert waiting[-1][1] == 0


def test_an_arrow_leads_into_a_training_that_begins_just_now(tmp_path: Path) -> None:
    parts = {
        "step": (100, 103),
        "wait": (100.5, 100.75),
        "train": (101, 101),
        "publish": (102, 103),
    }
    step = {name: [(float(begin), float(end))] for name, (begin, end) in parts.items()}
    trace = trace_of(recorded(tmp_path / "run", [step | {"server 0": [], "server 1": []}]), 1)
    trace_format.check(trace)
    (arrow,) = [e for e in trace["traceEvents"] if e["ph"] == "f"]
    (train,) = [e for e in trace["traceEvents"] if e["name"] == "train"]
    assert (arrow["name"], arrow["ts"]) == ("step 0", train["ts"])


def test_a_role_is_shown_between_a_rotation_of_its_file_and_the_next_flush(tmp_path: Path) -> None:
    part = {
        "step": [(0.0, 5.0)],
        "wait": [(1.0, 2.0)],
        "train": [(2.0, 3.0)],
        "publish": [(3.5, 4.0)],
    }
    rundir = recorded(
        tmp_path / "run", [part | {"server 0": [(0.0, 9.0)], "server 1": [(1.0, 2.0)]}]
    )
    before = trace_of(rundir, 1)
    (rundir.trace / "learner.jsonl").rename(rundir.trace / "learner.1.jsonl")
    assert trace_of(rundir, 1) == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = {
        "step": [(0.0, 5.0)],
        "wait": [(1.0, 2.0)],
        "train": [(2.0, 3.0)],
        "publish": [(3.5, 4.0)],
    }
    rundir = recorded(
        tmp_path / "run", [part | {"server 0": [(0.0, 9.0)], "server 1": [(1.0, 2.0)]}]
    )
    assert cli.main(["trace", str(rundir.path)]) == 0
    assert "steps 0 to 0" in capsys.readouterr().out
    packed_trace = json.loads(gzip.decompress((rundir.path / "trace.json.gz").read_bytes()))
    plain = tmp_path / "trace.json"
    assert cli.main(["trace", str(rundir.path), "--steps", "3", "--output", str(plain)]) == 0
    assert json.loads(plain.read_text()) == packed_trace


def test_nothing_to_show_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = RunDir(tmp_path)
    assert cli.main(["trace", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    rundir.recipe.write_text("")
    assert cli.main(["trace", str(tmp_path)]) == 2
    assert "nothing is recorded there yet" in capsys.readouterr().err
