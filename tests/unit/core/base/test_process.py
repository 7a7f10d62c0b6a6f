"""A signal that comes as Python exits, after it has restored the default handlers;
limits; a crash; a port that is taken.
"""

import os
import resource
import signal
import socket
import subprocess
import sys

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.process import check_free, dump_no_core, raise_limits

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
    assert subprocess.run([sys.executable, "-c", EXITS, word], timeout=240).returncode == status


LIMITS = """
import resource
from megarl.cli import main
main(["--version"])
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_every_command_may_open_as_many_files_as_the_system_allows() -> None:
    """A job has the limits of the shell that submitted it, and the controller of an
    80-GPU run thousands of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = (min(256, hard - 1), hard)
    words = [sys.executable, "-c", LIMITS]
    resource.setrlimit(resource.RLIMIT_NOFILE, low)
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=240).stdout
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said.splitlines()[-1] == f"{hard} {hard}"


def test_a_limit_that_the_system_refuses_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []

    def setrlimit(what: int, _: tuple[int, int]) -> None:
        if what == resource.RLIMIT_NOFILE:
            raise ValueError("not allowed to raise maximum limit")
        raised.append(what)

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    raise_limits()
    assert raised == [resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC]


def test_a_crash_writes_no_core_dump() -> None:
    """A rank's would have hundreds of gigabytes. The hard limit stays, for who wants
    one after all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        dump_no_core()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


AFFINITY = """
import os
from megarl.cli import main
before = os.sched_getaffinity(0)
main(["recipes"])
import torch
assert os.sched_getaffinity(0) == before
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [("OMP_PROC_BIND", "close"), ("OMP_PLACES", "cores"), ("GOMP_CPU_AFFINITY", "0-63")],
)
def test_openmp_binds_no_role_to_the_first_core(name: str, value: str) -> None:
    """Nor all others of the node, which clusters would have it do: by their modules'
    settings, as torch is imported.
    """
    words = [sys.executable, "-W", "ignore", "-c", AFFINITY]
    done = subprocess.run(words, env=os.environ | {name: value}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CRASHES = """
import os
from megarl.core.base.process import start_logging

def deep_in_a_library():
    os.abort()

start_logging("learner 0")
deep_in_a_library()
"""


def test_a_crash_in_compiled_code_leaves_the_place_in_the_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHES], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in deep_in_a_library" in done.stderr


SAYS = """
import logging
from megarl.core.base.process import start_logging

start_logging("controller")
logging.warning("begin%send", "x" * 10_000_000)
logging.warning("an agent printed: %s", "\\x1b[2J\\x9b\\r\\nmore")
"""


def test_a_terminal_does_not_obey_what_a_log_quotes() -> None:
    """Nor has a log the whole of what has no end."""
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, timeout=240)
    assert len(done.stderr) < 70_000
    assert b"beginxxx" in done.stderr
    assert b"xxxend\n" in done.stderr
    assert done.stderr.endswith(
        b"controller WARNING root: an agent printed: \\x1b[2J\\x9b\\x0d\nmore\n"
    )


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            MegarlError,
            match=rf"--port: cannot listen on 127\.0\.0\.1:{port}: Address already in use",
        ):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
