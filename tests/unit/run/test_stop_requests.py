"""Signals that ask a command to save and end."""

import math
import signal
from collections.abc import Iterator

import pytest

from megarl.run.process import SIGNALS, stop_requests


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_is_counted_and_remembered(number: signal.Signals) -> None:
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with stop_requests() as stop_request:
        signal.raise_signal(number)
        assert (stop_request.count, stop_request.signal) == (1, number)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers


def test_slurm_may_ask_twice_but_ctrl_c_is_pressed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is preempted while it saves for its time limit has the grace time to
    go on saving.
    """
    with stop_requests() as stop_request:
        signal.raise_signal(signal.SIGUSR1)
        monkeypatch.setattr("time.monotonic", lambda: math.inf)
        signal.raise_signal(signal.SIGTERM)
        assert stop_request.count == 1
        signal.raise_signal(signal.SIGINT)
        assert (stop_request.count, stop_request.signal) == (2, signal.SIGUSR1)


def test_nohup_is_obeyed() -> None:
    """A command under nohup does not end with its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_requests() as stop_request:
        signal.raise_signal(signal.SIGHUP)
        assert stop_request.count == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
