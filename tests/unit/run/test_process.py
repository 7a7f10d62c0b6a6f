"""Ports that nobody listens on, and how a process ended."""

import signal
import socket

import pytest

from megarl.core.base.errors import MegarlError
from megarl.run import process
from megarl.run.closing import ending_of


@pytest.fixture
def three_ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """Only these may be given out: consecutive ones that are free now."""
    for first in range(20_000, 60_000, 7):
        ports = range(first, first + 3)
        if all(is_free(port) for port in ports):
            break
    monkeypatch.setattr(process, "LOWEST_PORT", first)
    monkeypatch.setattr(process, "PORTS_WANTED", -1)
    monkeypatch.setattr(process.Path, "read_text", lambda _: f"{first + 3} 60999\n")
    return ports


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_all_free_ports_may_be_given_out(three_ports: range) -> None:
    assert sorted(process.free_ports(3)) == list(three_ports)


def test_too_few_free_ports_are_an_error(three_ports: range) -> None:
    with socket.create_server(("127.0.0.1", three_ports[1])):
        with pytest.raises(MegarlError, match="only 2 are free; 3 are needed"):
            process.free_ports(3)
        assert len(process.free_ports(2)) == 2


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3, "ended with status 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_ending_by_any_signal_has_a_text(status: int, text: str) -> None:
    assert ending_of(status) == text
