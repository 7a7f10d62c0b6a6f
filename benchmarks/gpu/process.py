"""Runs one part in a process and session of its own. Whatever happens to it, the rows
until then are kept.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.rows import Outcome, Row
from megarl.core.base.process import die_with_parent
from megarl.run import devices

ROOT = Path(__file__).parents[2]
LOGS = 3
LOG_CHARACTERS = 6000
GONE_LIMIT_S = 30.0


def run(part: str, module: str, limit_s: float, tiny: bool, rows: Path | None = None) -> Outcome:
    """Run a part; never raise an error because of the part. tiny: at a size for a test,
    without a GPU. rows: a file for rows as they are measured.
    """
    with tempfile.TemporaryDirectory(
        prefix=f"megarl-{part}-", ignore_cleanup_errors=True
    ) as folder:
        file = rows or Path(folder) / "rows.jsonl"
        log = Path(folder) / "log"
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        file.unlink(missing_ok=True)  # of a run that was killed
        # By default compiled kernels would be in TMPDIR, and each part would compile
        # them again.
        compilers = devices.kernel_caches() | devices.toolkit()
        exact = {
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"
        }  # some containers set it; FP32 would then have 10 bits
        environment = (
            compilers | os.environ | exact | {"PYTHONPATH": _python_path(), "TMPDIR": str(scratch)}
        )
        if tiny:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        words = [
            sys.executable,
            "-m",
            "benchmarks.gpu.part",
            module,
            str(file),
            *(["--tiny"] if tiny else []),
        ]
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        seconds = time.monotonic() - begin
        lines = _lines(file)
        outcome = _ended(part, lines[-1] if lines else {}, status, limit_s)
        outcome.seconds = seconds
        outcome.rows = [Row(**line["row"]) for line in lines if "row" in line]
        outcome.remarks = [line["remark"] for line in lines if "remark" in line]
        outcome.raw = [line["raw"] for line in lines if "raw" in line]
        if outcome.ending not in ("measured", "absent"):
            outcome.log = ends_of_logs(scratch) + _end_of(
                log, (LOGS + 1) * LOG_CHARACTERS
            )  # parts print those of roles
        return outcome


def _ended(part: str, last: dict[str, Any], status: int | None, limit_s: float) -> Outcome:
    if "ending" in last:
        return Outcome(part, last["ending"], last["why"])
    if status is None:
        return Outcome(part, "over its limit", f"not done after {limit_s:.0f} s")
    if status < 0:
        return Outcome(part, "killed", f"by {signal.Signals(-status).name}")
    return Outcome(part, "failed", f"exit status {status}")


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows in all complete lines."""
    if not file.exists():
        return []
    return [
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def ends_of_logs(folder: Path) -> str:
    """Return the ends of the newest logs of roles in this folder."""
    newest = sorted(folder.rglob("*.log"), key=os.path.getmtime)[-LOGS:]
    return "".join(f"== {log.parent.name}/{log.name}\n{_end_of(log)}\n" for log in newest)


def _end_of(log: Path, characters: int = LOG_CHARACTERS) -> str:
    return log.read_text(errors="replace")[-characters:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it started, also in sessions of their own; wait
    until they have left GPU and disk.
    """
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, GONE_LIMIT_S)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
