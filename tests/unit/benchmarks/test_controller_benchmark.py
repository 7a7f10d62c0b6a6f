"""benchmarks/controller.py, small: a real controller makes steps with its 64 stand-in
servers, and loses none.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]
ROOT = Path(__file__).parents[3]


def test_a_controller_makes_steps_with_stand_ins(tmp_path: Path) -> None:
    arguments = "--streams", "512", "--seconds", "5", "--folder", str(tmp_path)
    command = [sys.executable, "-m", "benchmarks.controller", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["requests_in_flight"] > 0
    assert found["cores"] > 0
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert "publish version 2 to servers 0-63" in log
    assert "is lost" not in log
