"""Local processes: their log, their environment, and that nothing of them outlives `kill` or the supervisor."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.recipe import Recipe
from megarl.supervisor.launcher import LocalLauncher, LocalProcess, Task, task
from megarl.supervisor.restart import Role

SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; print('child', subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
ROLE = "import os; from megarl.process import die_with_supervisor; die_with_supervisor(); print('role', os.getpid())"


def start(code: str, log: Path, **environment: str | None) -> LocalProcess:
    return LocalLauncher().start(Task(Role("server"), (sys.executable, "-c", code), environment, log))


def wait_for_line(log: Path, mark: str) -> str:
    limit = time.monotonic() + 60
    while True:
        for line in log.read_text().splitlines() if log.exists() else []:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_log_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("first", "second"):
        process = start(f"import sys; print('{word}'); print('problem', file=sys.stderr)", log)
        assert process._process.wait(60) == 0
    lines = [line for line in log.read_text().splitlines() if not line.startswith("---")]
    assert lines == ["first", "problem", "second", "problem"] or sorted(lines) == [
        "first",
        "problem",
        "problem",
        "second",
    ]


def test_status_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import os, sys; sys.exit(int(os.environ['N']) + ('PYTHONDONTWRITEBYTECODE' in os.environ))"
    process = start(code, tmp_path / "log", N="5", PYTHONDONTWRITEBYTECODE=None)
    assert process._process.wait(60) == 5
    assert process.status() == 5


def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    family = f"{PARENT}; {SLEEP}"
    process = start(family, log)
    child = int(wait_for_line(log, "child"))
    process.kill()
    assert process.status() == -9
    wait_until_gone(child)


def test_kill_ends_what_a_dead_leader_left(tmp_path: Path) -> None:
    log = tmp_path / "log"
    family = (
        f"import subprocess, sys; print('child', subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
    )
    process = start(family, log)
    child = int(wait_for_line(log, "child"))
    assert process._process.wait(60) == 0
    assert not gone(child)
    process.kill()
    wait_until_gone(child)


def test_role_dies_with_its_supervisor(tmp_path: Path) -> None:
    """The supervisor is killed with SIGKILL: no handler of it runs."""
    log = tmp_path / "log"
    role = f"{ROLE}; {SLEEP}"
    supervisor = f"""
import sys, time
from pathlib import Path
from megarl.supervisor.launcher import LocalLauncher, Task
from megarl.supervisor.restart import Role
command = (sys.executable, "-u", "-c", {role!r})
LocalLauncher().start(Task(Role("server"), command, {{}}, Path({str(log)!r})))
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", supervisor])
    pid = int(wait_for_line(log, "role"))
    parent.kill()
    parent.wait()
    wait_until_gone(pid)


def test_role_whose_supervisor_is_dead_already_ends_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"MEGARL_SUPERVISOR_PID": "1"}
    code = f"from megarl.process import die_with_supervisor; die_with_supervisor(); {SLEEP}"
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == -9


def test_task_of_a_server(recipe: Recipe, tmp_path: Path) -> None:
    made = task(recipe, tmp_path / "recipe.yaml", Role("server", 1), 4001, ("2", "3"), tmp_path, python="python")
    assert " ".join(made.arguments) == f"python -m megarl serve {tmp_path}/recipe.yaml --index 1 --port 4001"
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert made.environment["PYTHONDONTWRITEBYTECODE"] is None
    assert made.log == tmp_path / "server-1.log"
