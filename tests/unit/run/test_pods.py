"""Roles in pods: the survey, and a step with its reports and orders, by a kubectl that
is a fake.

The fake keeps its pods on this machine: it runs a command of `exec` here.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checks import inputs
from megarl.core.base import terminal
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe
from megarl.run import pods, srun, train
from megarl.run.launcher import RoleCommand
from megarl.run.launchers import choose_launcher
from megarl.run.nodes import Node
from megarl.run.placement import Place
from megarl.run.pods import FIRST, INDEX, OTHERS, REPLICATED_JOB, PodLauncher, PodStep
from megarl.run.restart import Role
from megarl.tools import jobset
from tests.make import start_facts

pytestmark = pytest.mark.processes

FAKE_KUBECTL = """#!/usr/bin/env bash
case "$1" in
    get) cat {pods}; exit ;;
    exec) [[ "$2 $4 $5" == "--stdin --container=megarl --" ]] || exit 9; shift 5; exec "$@" ;;
esac
"""


def pod(name: str, job: str, index: int, phase: str = "Running") -> dict[str, Any]:
    labels = {REPLICATED_JOB: job, INDEX: str(index)}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase}}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what sets the pods that kubectl knows."""
    listed = tmp_path / "pods.json"
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(FAKE_KUBECTL.format(pods=listed))
    kubectl.chmod(0o755)
    (kubectl.parent / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("MEGARL_PODS", "2")
    monkeypatch.setenv("MEGARL_JOBSET", "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(pods, "POLL_S", 0.01)

    def are(*described: dict[str, Any]) -> None:
        listed.write_text(json.dumps({"items": described}))

    are(pod("run-others-0-0-b", OTHERS, 0), pod("run-first-0-0-a", FIRST, 0))
    return are


def launcher(recipe: Recipe, folder: Path) -> PodLauncher:
    (folder / ".lock").touch()
    made = choose_launcher(recipe, RunDir(folder))
    assert isinstance(made, PodLauncher)
    return made


def until[T](what: Callable[[], T]) -> T:
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_pods_are_nodes(recipe: Recipe, tmp_path: Path, cluster: Callable[..., None]) -> None:
    nodes = launcher(recipe, tmp_path).survey(3)
    assert [node.name for node in nodes] == ["run-first-0-0-a", "run-others-0-0-b"]
    assert [len(set(node.ports)) for node in nodes] == [3, 3]


def test_a_survey_that_fails_is_made_again(
    recipe: Recipe,
    tmp_path: Path,
    cluster: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a status for which JobSet makes all pods again: 2 would end it for good."""
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(kubectl.read_text().replace('exec "$@"', "exit 1"))
    status = train.main(recipe, start_facts(recipe), inputs.check_start, lambda _: None)
    assert status == train.START_ELSEWHERE
    assert "a step over the job's nodes failed" in capfd.readouterr().err
    assert train.START_ELSEWHERE not in jobset.GIVEN_UP


def test_pods_that_do_not_run_are_waited_for(
    recipe: Recipe,
    tmp_path: Path,
    cluster: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = pod("run-first-0-0-a", FIRST, 0)
    waiting = pod("run-others-0-0-b", OTHERS, 0, "Pending")
    ending = pod("run-others-0-0-old", OTHERS, 0)
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster(waiting, ending, first)
    heard: list[str] = []

    def say(text: str, **_: object) -> None:
        heard.append(text)
        if len(heard) == 2:
            cluster(first, pod("run-others-0-0-b", OTHERS, 0))

    monkeypatch.setattr(terminal, "say", say)
    monkeypatch.setattr(pods, "SURVEY_LIMIT_S", 0.02)
    assert launcher(recipe, tmp_path).names() == ["run-first-0-0-a", "run-others-0-0-b"]
    assert re.match(r"1 of 2 pods run after \d+ s; waiting .*describe jobset run", heard[0])


def step(recipe: Recipe, folder: Path, code: str) -> Any:
    """A controller in both pods."""
    names = ("run-first-0-0-a", "run-others-0-0-b")
    nodes = tuple(Node(name, "here", "127.0.0.1", "lo", (), 1, 1 << 30, ()) for name in names)
    task = RoleCommand(Role("controller"), ("-c", code), {}, Place(nodes), RunDir(folder))
    return launcher(recipe, folder).start(task)


def test_a_role_that_ends_badly_in_one_pod_ends_in_all(
    recipe: Recipe, tmp_path: Path, cluster: Callable[..., None]
) -> None:
    code = (
        "import os, sys, time; sys.exit(7) if os.environ['MEGARL_NODE_RANK'] == '1' else"
        " time.sleep(600)"
    )
    role = step(recipe, tmp_path, code)
    until(lambda: role.status() is not None)
    assert role.status() in (7, -9)


def test_a_role_is_told_to_end_and_a_lost_pod_is_seen(
    recipe: Recipe, tmp_path: Path, cluster: Callable[..., None]
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    code = (
        "import os, pathlib, signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); "
        f"pathlib.Path({str(ready)!r}, str(os.getpid())).touch(); time.sleep(600)"
    )
    role = step(recipe, tmp_path, code)
    until(lambda: role.answered and len(list(ready.iterdir())) == 2)
    assert (role.status(), role.node_state()) == (None, "up")
    cluster(pod("run-first-0-0-a", FIRST, 0))
    assert role.node_state() == "down"
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text("#!/bin/sh\nexit 1\n")
    assert role.node_state() == "up", "Kubernetes does not answer, which says nothing of a pod"
    role.terminate()
    until(lambda: role.status() is not None)
    assert role.status() == 5


def test_a_role_is_killed_in_its_pods(
    recipe: Recipe, tmp_path: Path, cluster: Callable[..., None]
) -> None:
    mark = f"a role of {tmp_path}"
    role = step(recipe, tmp_path, f"import time; {mark!r}; time.sleep(600)")
    until(lambda: role.answered)
    role.kill()
    role.wait_gone()

    def left() -> str:
        words = ["pgrep", "--full", mark]
        return subprocess.run(words, capture_output=True, text=True).stdout

    until(lambda: not left())


def test_a_lost_connection_is_not_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its role may still have the GPUs, until the step notices that nobody
    answers it.
    """
    code = """print('{"node": "a"}', flush=True); raise SystemExit(1)"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    role = PodStep(process, ["a"])
    until(lambda: role.answered and process.poll() is not None)
    assert role.status() is None
    monkeypatch.setattr(srun, "DESERTED_S", 0.0)
    assert role.status() == 1


def test_a_step_has_ended_in_all_pods_when_its_command_returns(
    tmp_path: Path, cluster: Callable[..., None]
) -> None:
    """Else the next start of the role would find its GPUs in use."""
    ended = tmp_path / "ended"
    script = f'[[ $SLURMD_NODENAME == a ]] && exit 7; cat; sleep 0.5; touch "{ended}"'
    words = [sys.executable, "-m", "megarl.run.pods", "step", "a", "b", "--", "bash", "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 7
    assert ended.exists()


def caught(status: Path) -> int:
    """Return the signals that a process handles, as bits."""
    match = re.search(r"SigCgt:\s*([0-9a-f]+)", status.read_text())
    assert match is not None
    return int(match[1], 16)


def waiting_pod(jobset: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl.run.pods", "wait"],
        env=os.environ | {"MEGARL_JOBSET": jobset},
    )
    status = Path(f"/proc/{process.pid}/status")
    until(lambda: caught(status) >> (signal.SIGTERM - 1) & 1)
    assert process.poll() is None
    return process


def test_an_idle_pod_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """With a status for which it is made again: it may have been preempted."""
    process = waiting_pod(str(tmp_path))
    process.terminate()
    assert process.wait(30) == 143


def test_a_role_in_a_pod_that_is_told_to_end_is_told_too(tmp_path: Path) -> None:
    process = waiting_pod(str(tmp_path))
    environment = os.environ | {"MEGARL_JOBSET": str(tmp_path)}
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print(flush=True);"
        " signal.pause()"
    )
    words = [sys.executable, "-c", code, "megarl.run.step"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as step:
        assert step.stdout is not None
        step.stdout.readline()
        process.terminate()
        assert step.wait(30) == 5
    assert process.wait(30) == 143


@pytest.mark.parametrize(("kind", "lingers"), [("server", False), ("learner", True)])
def test_a_pod_with_servers_alone_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lingers: bool
) -> None:
    """A server goes on when it is told to end, for as long as its pod is there."""
    monkeypatch.setenv("MEGARL_JOBSET", str(tmp_path))
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    task = json.dumps({"role": {"kind": kind, "index": 0}})
    words = [sys.executable, "-c", code, "megarl.run.step", task]
    waiting = (
        "import sys; from megarl.run import pods; pods.SERVERS_LIMIT_S = 0.2; sys.exit(pods.wait())"
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE) as step:
        assert step.stdout is not None
        step.stdout.readline()
        pod = subprocess.Popen([sys.executable, "-c", waiting])
        status = Path(f"/proc/{pod.pid}/status")
        until(lambda: caught(status) >> (signal.SIGTERM - 1) & 1)
        pod.terminate()
        if lingers:
            with pytest.raises(subprocess.TimeoutExpired):
                pod.wait(3)
            step.kill()
        assert pod.wait(30) == 143
        step.kill()
