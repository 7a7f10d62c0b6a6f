"""Temporary folders that outlive a killed process, and who removes them."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megarl.tasks.graders.functions import environment as worker_environment
from megarl.tasks.graders.scratch import PREFIX, remove_abandoned, scratch

pytestmark = pytest.mark.processes
HOLDS = """
import os, subprocess, time
from megarl.tasks.graders.scratch import scratch
with scratch() as folder:
    (folder / "left").touch()
    environment = os.environ | {"TMPDIR": str(folder)}
    child = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    print(folder, child.pid, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_removed_once_nobody_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the processes end that have it as TMPDIR. What is young, linked or held by a living process stays."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDS], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in "ab"
    ]
    children: list[psutil.Process] = []
    try:
        told = [process.stdout.readline().split() for process in holders if process.stdout]
        killed, held = (Path(folder) for folder, _ in told)
        children += [psutil.Process(int(pid)) for _, pid in told]
        holders[0].kill()
        holders[0].wait()
        young, link, another = (tmp_path / name for name in (f"{PREFIX}young", f"{PREFIX}link", "another"))
        young.mkdir()
        another.mkdir()
        link.symlink_to(another)
        for old in (killed, held, another):
            os.utime(old, (0, 0))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with scratch() as ours:
            until = time.monotonic() + 10
            while killed.exists():
                assert time.monotonic() < until, "it is left for ever"
                time.sleep(0.01)
            remove_abandoned(tmp_path)
            assert set(tmp_path.iterdir()) == {held, young, link, another, ours}
        psutil.wait_procs(children[:1], timeout=10)
        assert [child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children] == [False, True]
        assert (held / "left").exists()
        assert not ours.exists()
    finally:
        for process in holders:
            process.kill()
            process.communicate()
        for child in children[1:]:
            child.kill()


def test_workers_can_make_temporary_files_where_the_jobs_folder_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container does not have it. Python looks elsewhere by itself; what an environment starts, such as a shell, does not."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, "/nowhere/job-1")
    monkeypatch.setattr(tempfile, "tempdir", None)
    made = subprocess.run(["mktemp"], env=worker_environment(), capture_output=True, text=True, check=True)
    Path(made.stdout.strip()).unlink()
