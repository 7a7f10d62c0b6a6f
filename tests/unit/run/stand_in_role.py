"""A small process in place of a role: `stand_in_role.py KIND INDEX RUN STEPS`. Tells
its process id in RUN/KIND-INDEX.pids.

server: starts a process that leaves its session, as a stray would; controller: writes
status.json; learner: makes rows, to the last step, without rests once RUN/enough
exists. Both do on SIGTERM as the real ones do.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.core.base.process import ignore_late_signals
from megarl.core.base.rundir import RunDir, append_jsonl, read_jsonl, write_atomically
from megarl.run.process import die_with_supervisor

STRAY = """
import os, sys, time
from pathlib import Path
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import append_jsonl
die_with_parent()
if os.getppid() != int(sys.argv[2]):
    sys.exit()  # the parent died before that
append_jsonl(Path(sys.argv[1]), {"pid": os.getpid(), "child": False})
time.sleep(600)
"""
LONELY = "import time; time.sleep(600)"


def server(rundir: RunDir, index: int, steps: int) -> int:
    del steps
    pids = rundir.path / f"server-{index}.pids"
    subprocess.Popen(
        [sys.executable, "-c", STRAY, pids, str(os.getpid())]
    )  # tells it when it is ready to die
    lonely = subprocess.Popen([sys.executable, "-c", LONELY], start_new_session=True)
    append_jsonl(pids, {"pid": lonely.pid, "child": True})
    time.sleep(600)
    return 0


def controller(rundir: RunDir, index: int, steps: int) -> int:
    del index, steps
    while not rundir.stop_file.exists():
        if (rundir.path / "senseless").exists():
            rundir.failure_file.write_text("the weights did not arrive as they are")
            return 1
        status = {
            "time": time.time(),
            "phase": "train",
            "servers": [{"id": 0, "state": "clean", "version": 1}],
        }
        write_atomically(rundir.status, json.dumps(status).encode())
        time.sleep(0.05)
    return 0


def learner(rundir: RunDir, index: int, steps: int) -> int:
    del index
    if (rundir.path / "broken").exists():
        print("megarl: the model is broken", flush=True)
        return 2
    if (rundir.path / "dies").exists():
        return 1
    if (rundir.path / "hopeless").exists():
        append_jsonl(
            rundir.metrics,
            {"step": 0, "time": time.time(), "compute_hours": 0.1, "compute_unit": "core"},
        )
        rundir.failure_file.write_text("three steps were skipped")
        return 1  # as torchrun does
    while (rundir.path / "slow").exists():
        if rundir.stop_file.exists():
            return 0
        time.sleep(0.05)
    done = len(list(read_jsonl(rundir.metrics)))
    for step in range(done, steps):
        append_jsonl(
            rundir.metrics,
            {
                "step": step,
                "time": time.time(),
                "compute_hours": step / 100,
                "compute_unit": "core",
            },
        )
        if rundir.stop_file.exists():
            return int((rundir.path / "unsaved").exists())
        if (rundir.path / "leaves").exists():
            return 0
        time.sleep(0.0 if (rundir.path / "enough").exists() else 0.1)
    return 0


if __name__ == "__main__":
    die_with_supervisor()
    kind, index, run, steps = sys.argv[1:]
    Path(run).mkdir(parents=True, exist_ok=True)
    append_jsonl(Path(run) / f"{kind}-{index}.pids", {"pid": os.getpid()})
    if kind != "server":
        signal.signal(signal.SIGTERM, lambda number, _: RunDir(Path(run)).stop(number))
    roles = {"server": server, "controller": controller, "learner": learner}
    status = roles[kind](RunDir(Path(run)), int(index), int(steps))
    ignore_late_signals()
    sys.exit(status)
