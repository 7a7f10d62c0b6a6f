"""Faults from within. Python imports this before all else in every process that has
this folder on its PYTHONPATH.

INJECT_AT=TrainedNetwork.update:2:KILL:/tmp/marker[:RANK]
    The 2nd call in a process sends SIGKILL to itself. It happens once: a process that
    finds the marker is left alone.
INJECT_CLOCK=/tmp/offset
    time.time() is off by the seconds that are in this file.
INJECT_SEEN=/tmp/folder
    SGLang's scheduler writes what it was sent and what it sampled of each request that
    it lets go of, `[ids, ids]` a line of PID.jsonl.

Functions are found by their qualified name as they are called (PEP 669): the code under
test knows nothing of this.
"""

import json
import os
import signal
import sys
import time
from types import CodeType
from typing import Any


def inject(function: str, count: int, name: str, marker: str, rank: str) -> None:
    """The `count`-th call of this function in this process does it."""
    monitoring = sys.monitoring
    calls = 0

    def called(code: CodeType, _offset: int) -> Any:
        nonlocal calls
        if code.co_qualname != function:
            return monitoring.DISABLE
        if rank and os.environ.get("RANK") != rank:
            return monitoring.DISABLE
        calls += 1
        if calls == count:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return monitoring.DISABLE
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
        return None

    at_calls(called)


def at_calls(called: Any) -> None:
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.DEBUGGER_ID, "faults")
    monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.PY_START, called)
    monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.PY_START)


def write_seen(folder: str) -> None:
    def called(code: CodeType, _offset: int) -> Any:
        if code.co_qualname != "release_kv_cache":
            return sys.monitoring.DISABLE
        request = sys._getframe(1).f_locals["req"]
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(
                json.dumps([list(request.origin_input_ids), list(request.output_ids)]) + "\n"
            )
        return None

    at_calls(called)


def jump(path: str) -> None:
    """The wall clock of this process is that of the machine and as many seconds as the
    file says.
    """
    true = time.time

    def jumping() -> float:
        with open(path) as file:
            return true() + float(file.read() or 0)

    time.time = jumping


if "INJECT_AT" in os.environ:
    function, count, name, marker, *rank = os.environ["INJECT_AT"].split(":")
    inject(function, int(count), name, marker, rank[0] if rank else "")
if "INJECT_CLOCK" in os.environ:
    jump(os.environ["INJECT_CLOCK"])
if "INJECT_SEEN" in os.environ:
    write_seen(os.environ["INJECT_SEEN"])
