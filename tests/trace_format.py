"""What Perfetto and chrome://tracing ask of a trace (Trace Event Format), checked
without the code that draws it.
"""

from collections import defaultdict
from typing import Any

import jsonschema

Tree = dict[str, Any]

COMMON = {
    "name": {"type": "string"},
    "pid": {"type": "integer", "minimum": 1},
    "tid": {"type": "integer", "minimum": 0},
    "ts": {"type": "integer"},
}
BY_PHASE: dict[str, Tree] = {
    "X": {"dur": {"type": "integer", "minimum": 0}, "args": {"type": "object"}},
    "i": {"s": {"enum": ["g", "p", "t"]}, "args": {"type": "object"}},
    "C": {
        "args": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}
    },
    "s": {"cat": {"type": "string"}, "id": {"type": "integer"}},
    "f": {"cat": {"type": "string"}, "id": {"type": "integer"}, "bp": {"const": "e"}},
    "M": {
        "name": {
            "enum": ["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
        },
        "args": {"type": "object", "minProperties": 1, "maxProperties": 1},
    },
}
EVENTS = {
    phase: jsonschema.Draft202012Validator(
        {"properties": COMMON | of, "required": list(COMMON | of)}
    )
    for phase, of in BY_PHASE.items()
}
WHOLE = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {"type": "array", "items": {"type": "object"}},
    },
}


def check(trace: Tree) -> None:
    """The form of all events, spans that nest on their threads, names of all threads,
    arrows that lead from span to span.
    """
    jsonschema.validate(trace, WHOLE)
    events = trace["traceEvents"]
    for event in events:
        EVENTS[event["ph"]].validate(event)
        assert event.keys() == COMMON.keys() | BY_PHASE[event["ph"]].keys() | {"ph"}
    by_thread: dict[tuple[int, int], list[Tree]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert by_thread.keys() <= named
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}
    for spans in by_thread.values():
        assert_nested(spans)
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    arrows: dict[int, list[Tree]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    for ends in arrows.values():
        assert sorted(e["ph"] for e in ends) == ["f", "s"]
        for end in ends:
            at = by_thread[end["pid"], end["tid"]]
            assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in at), end


def assert_nested(spans: list[Tree]) -> None:
    """Spans of one thread are within each other or apart."""
    stack: list[int] = []
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1] <= span["ts"]:
            stack.pop()
        assert not stack or span["ts"] + span["dur"] <= stack[-1], span
        stack.append(span["ts"] + span["dur"])


def threads(trace: Tree) -> dict[str, list[Tree]]:
    """Spans by `process/thread`, in order; lanes of one place are put together."""
    events = trace["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Tree]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            name = thread[event["pid"], event["tid"]].split(" ")
            whole = (
                " ".join(name[:-1]) if name[-1].isdigit() and name[0] != "rank" else " ".join(name)
            )
            found[f"{process[event['pid']]}/{whole}"].append(event)
    return found


def counter(trace: Tree, process: str, name: str) -> list[tuple[int, float]]:
    """(time, value) of a counter with one value."""
    events = trace["traceEvents"]
    (pid,) = {
        e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process
    }
    return [
        (e["ts"], *e["args"].values())
        for e in events
        if e["ph"] == "C" and e["pid"] == pid and e["name"] == name
    ]
