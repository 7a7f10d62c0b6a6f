"""torchrun over two small ranks: how it ends the others when one dies, and with what
status; that ranks die with it; what it passes on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.core.base.torchrun import is_rank
from megarl.run.process import free_ports

pytestmark = pytest.mark.processes

RANK = """
import os, signal, sys, time
from pathlib import Path
from megarl.run.process import die_with_supervisor
die_with_supervisor()
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: (folder / f"told-{rank}-{number}").touch())
(folder / f"pid-{rank}.new").write_text(str(os.getpid()))
os.replace(folder / f"pid-{rank}.new", folder / f"pid-{rank}")
if rank == "0":
    time.sleep(600)
while not (folder / "end").exists():
    time.sleep(0.01)
code = int((folder / "end").read_text())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
LIMIT_S = 240.0


def appears(path: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.02)


def end(folder: Path, status: int) -> None:
    (folder / "end.new").write_text(str(status))
    os.replace(folder / "end.new", folder / "end")


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "rank.py").write_text(RANK)
    words = [
        sys.executable,
        "-m",
        "megarl.core.base.torchrun",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
    ]
    words += [f"--master-port={free_ports(1)[0]}", str(tmp_path / "rank.py"), str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for rank in (0, 1):
        appears(tmp_path / f"pid-{rank}", process)
    yield process
    process.kill()
    process.wait()


def test_only_torchrun_makes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's images set a rank's variables for each task of Slurm, as many as there
    are nodes.
    """
    for name, value in {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "10"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert is_rank()
    assert os.environ["RANK"] == "3"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not is_rank()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (-signal.SIGKILL, 137)])
def test_status_of_the_rank_that_ended_first(
    torchrun: subprocess.Popen[bytes], tmp_path: Path, status: int, expected: int
) -> None:
    end(tmp_path, status)
    assert torchrun.wait(LIMIT_S) == expected
    assert not list(tmp_path.glob("told-*")), (
        "a SIGTERM that comes from torchrun would be taken for one from outside"
    )


def test_ranks_die_with_it(torchrun: subprocess.Popen[bytes], tmp_path: Path) -> None:
    ranks = [psutil.Process(int((tmp_path / f"pid-{rank}").read_text())) for rank in (0, 1)]
    torchrun.kill()
    _, alive = psutil.wait_procs(ranks, LIMIT_S)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_wish_to_stop_is_passed_on(
    torchrun: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    """Both ranks hear it, which a terminal does not reach, and nobody ends of it."""
    torchrun.send_signal(number)
    for rank in (0, 1):
        appears(tmp_path / f"told-{rank}-{int(number)}", torchrun)
    end(tmp_path, 3)
    assert torchrun.wait(LIMIT_S) == 3
