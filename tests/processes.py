"""Processes that tests wait for."""

import math
import time
from collections.abc import Iterable

import psutil

LIMIT_S = 60.0


def alive(pid: int, ended: float = math.inf) -> bool:
    """ended: what began after this time has only been given the number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < ended
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int], limit_s: float = LIMIT_S) -> None:
    """Those a kill has been sent to are there for a moment."""
    end, left = time.monotonic() + limit_s, set(pids)
    while left := {pid for pid in left if alive(pid)}:
        assert time.monotonic() < end, f"{sorted(left)} live after {limit_s:g} s"
        time.sleep(0.05)
