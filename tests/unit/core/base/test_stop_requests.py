"""Signals that ask a command to save and end."""

import signal
from collections.abc import Iterator

import pytest

from megarl.core.base.process import SIGNALS, wishes


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_is_counted_and_remembered(number: signal.Signals) -> None:
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with wishes() as wish:
        signal.raise_signal(number)
        assert (wish.count, wish.signal) == (1, number)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers


def test_the_same_wish_comes_twice_but_ctrl_c_is_pressed_twice() -> None:
    with wishes() as wish:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert wish.count == 1
        signal.raise_signal(signal.SIGINT)
        assert (wish.count, wish.signal) == (2, signal.SIGTERM)


def test_nohup_is_obeyed() -> None:
    """A command under nohup does not end with its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with wishes() as wish:
        signal.raise_signal(signal.SIGHUP)
        assert wish.count == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
