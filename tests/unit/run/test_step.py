"""The supervisor's helper on a node: what it does when it gets messages, and when it no
longer does. No Slurm is needed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megarl.core.base.rundir import RunDir
from megarl.run.launcher import RoleCommand
from megarl.run.nodes import Node
from megarl.run.placement import Place
from megarl.run.restart import Role
from megarl.run.srun import SrunStep
from megarl.run.step import UNANSWERED, Report, encoded, place_of

pytestmark = pytest.mark.processes

QUICK = """
import sys
from megarl.run import step
step.BEAT_S, step.UNANSWERED = 0.05, int(sys.argv[2])
sys.exit(step.main(sys.argv[1]))
"""
NODE = Node("n1", "vm", "127.0.0.1", "lo", (), 2, 0, ())
LIMIT_S = 60.0
PATIENT = 1000
LEARNER = Role("learner")
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A step as srun would start it, of a role that sleeps."""
    place = Place((NODE,), (), 1)

    def started(unanswered: int, role: Role = LEARNER) -> subprocess.Popen[bytes]:
        begun = (
            f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch();"
            " time.sleep(600)"
        )
        task = RoleCommand(role, ("-c", begun), {}, place, RunDir(tmp_path / "run"))
        order = encoded(task)
        return subprocess.Popen(
            [sys.executable, "-c", QUICK, order, str(unanswered)],
            env=os.environ | {"SLURMD_NODENAME": NODE.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    return started


def test_a_node_knows_its_place_by_its_name(tmp_path: Path) -> None:
    """Not by SLURM_PROCID: Slurm may order the nodes of a step otherwise than those of
    its job.
    """
    names = ["a10", "a9", "b1"]
    place = Place(tuple(replace(NODE, name=name) for name in names), (), 1)
    task = RoleCommand(LEARNER, (), {}, place, RunDir(tmp_path))
    assert [place_of(name, task) for name in ("b1", "a10", "a9")] == [2, 0, 1]


def reports(process: subprocess.Popen[bytes]) -> list[Report]:
    assert process.stdout is not None
    return [msgspec.json.decode(line, type=Report) for line in process.stdout]


def test_ends_the_role_when_nobody_hears_it(start: Start) -> None:
    """stdin stays open: an srun that was killed, or whose slurmd was, says nothing of
    it to the step.
    """
    process = start(UNANSWERED)
    said = reports(process)
    assert process.wait(LIMIT_S) == 137
    assert [report.status for report in said] == [None] * UNANSWERED + [-9]


def test_ends_the_role_with_its_supervisor(start: Start) -> None:
    process = start(PATIENT)
    assert process.stdin is not None
    process.stdin.close()
    assert reports(process)[-1].status == -9
    assert process.wait(LIMIT_S) == 137


def test_words_come_in_pieces(start: Start) -> None:
    process = start(PATIENT)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    for piece in (b"heard\nterm", b"inate", b"\nheard\n"):
        process.stdin.write(piece)
        process.stdin.flush()
        time.sleep(0.1)
    assert reports(process)[-1].status == -15
    assert process.wait(LIMIT_S) == 143


def test_lives_as_long_as_it_is_heard(start: Start) -> None:
    step = SrunStep(start(4 * UNANSWERED), ["n1"])
    end = time.monotonic() + LIMIT_S
    while not step.answered:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(12 * UNANSWERED * 0.05)
    assert step.status() is None
    step.terminate()
    while step.status() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert step.status() == -15
    step.wait_gone()
    step.terminate()  # nobody listens any more


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", [LEARNER, Role("controller")])
def test_a_signal_to_the_step_alone_is_the_roles(
    start: Start, tmp_path: Path, role: Role, number: signal.Signals
) -> None:
    process = start(PATIENT, role)
    assert process.stdout is not None
    while not (
        tmp_path / "begun"
    ).exists():  # Python itself ends with status 1 of a signal while it starts
        assert process.stdout.readline()
    process.send_signal(number)
    assert reports(process)[-1].status == -number
    process.wait(LIMIT_S)


def test_a_server_does_not_end_of_one(start: Start) -> None:
    process = start(PATIENT, Role("server"))
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    for _ in range(5):
        assert msgspec.json.decode(process.stdout.readline(), type=Report).status is None
    process.stdin.close()
    assert reports(process)[-1].status == -9
