"""A signal that comes as Python exits, after it has restored the default handlers; a port that is taken."""

import signal
import socket
import subprocess
import sys

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.process import check_free

EXITS = """
import os, signal, sys
from megarl.core.base.process import ignore_late_signals

class Late:
    def __del__(self):  # while modules are cleared: handlers are gone by then
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, lambda *_: None)
late = Late()
if sys.argv[1] == "ignored":
    ignore_late_signals()
"""


@pytest.mark.parametrize(("word", "status"), [("ignored", 0), ("heard", -signal.SIGTERM)])
def test_a_late_signal_does_not_make_a_finished_process_look_killed(word: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", EXITS, word], timeout=60).returncode == status


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MegarlError, match=rf"--port: cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
