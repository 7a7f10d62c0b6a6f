"""Makes faulty training runs, and clean ones, for benchmarks/alarm.py to judge: real
roles, tiny policies, one fault each.

    python -m benchmarks.alarm_faults FOLDER [--only KIND] [--seconds N] [--at-once N]

    data ─► models/init ─`megarl sft`─► models/warm ─► a clean run for each precision
                                            ─► forks of it: one for each fault

A fork first runs cleanly for OWN steps, so that its pipeline is full again. Then the
fault begins, as described in alarm_injected/sitecustomize.py; the recipe does not
mention it. A run ends when its held-out pass rate has fallen by two standard errors in
two evaluations in a row, when parity ends it, or AFTER steps after the fault. Clean
forks run as long: they show how often a pass rate falls by chance.

FOLDER/labels.csv lists the finished runs. The same command resumes after an
interruption; the interrupted run begins anew. With --seconds no run begins after that
time. --at-once: the number of concurrent runs. The exit status is 0 once all runs are
done, else 1.

The policy has 0.3 million parameters (as in `python -m benchmarks.corpus`); with
experts, it is that of the shipped quickstart-moe. Each seed has a precision: 0 fp32, 1
bf16, 2 fp16.
"""

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import alarm
from benchmarks.corpus import SIZES
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import SUPERVISOR
from megarl.core.base.rundir import RunDir, latest_rows, latest_scores, write_jsonl
from megarl.tasks.data import arithmetic
from megarl.tasks.data.arithmetic_models import save_model

ROOT = Path(__file__).parents[1]
INJECTED = Path(__file__).with_name("alarm_injected")
DTYPES = ("fp32", "bf16", "fp16")
FORK = 48
OWN = 8
AFTER = 60
FAULT = FORK + OWN
EVERY = 4
PROMPTS = 128
"""Steps between evaluations, and answers in each: at a pass rate of .7 the standard
error is .041, a difference's .057.
"""
DIGITS = 2
"""Digits of the longest operands. Short problems have short completions."""
LIMIT_S = 400.0
COLUMNS = (*alarm.COLUMNS, "fork")


class Fault(NamedTuple):
    """A fault to inject. named: the alarms, or words of a message, that tell the user
    what is wrong.

    moe: whether it needs experts, with routing replay. servers: their number. The kinds
    are in alarm_injected/sitecustomize.py.
    """

    kind: str
    dose: str
    named: str
    moe: bool = False
    servers: int = 1


_STEP = "learning_rate drift grad_norm learner.optimizer"
FAULTS = (
    Fault("learning_rate", "4", _STEP),
    Fault("learning_rate", "10", _STEP),
    Fault("weight_decay", "0.01", _STEP),
    Fault("weight_decay", "0.03", _STEP),
    Fault("reward_sign", "0.6", "reward_sign"),
    Fault("reward_sign", "1", "reward_sign"),
    Fault("loss_sign", "0.6", "advantages"),
    Fault("loss_sign", "1", "advantages"),
    Fault("grader", "prefix", "pass_rate_jump"),
    Fault("grader", "any", "pass_rate_jump"),
    Fault("temperature", "1.15", "sampled_hot temperature:"),
    Fault("temperature", "1.4", "sampled_hot temperature:"),
    Fault("stale", "1", "stale"),
    Fault("stale", "2", "stale", servers=2),
    Fault("damaged", "0.1", "kernels kernels_median parity differ"),
    Fault("damaged", "0.5", "kernels kernels_median parity differ"),
    Fault("rope", "1.05", "RoPE"),
    Fault("rope", "1.3", "RoPE"),
    Fault("head", "bf16", "head dtype:"),
    Fault("head", "1.1", "temperature:"),
    Fault("routing", "late", "routing replay", moe=True),
    Fault("routing", "1", "routing", moe=True),
    Fault("dead_experts", "1", "imbalance unused_experts", moe=True),
    Fault("dead_experts", "2", "imbalance unused_experts", moe=True),
    Fault("advantage", "none", "advantages"),
    Fault("advantage", "neighbour", "advantages"),
    Fault("shifted", "0.3", "decode"),
    Fault("shifted", "1", "decode"),
    Fault("entropy", "0.01", "entropy_fall"),
    Fault("entropy", "0.1", "entropy_fall"),
    Fault("same_prompts", "8", "no_variance pass_rate_jump"),
    Fault("same_prompts", "2", "no_variance pass_rate_jump"),
)


class Made(NamedTuple):
    """A run to make. fault: None for a clean fork; forked: False for the clean run from
    which others are forked.
    """

    name: str
    seed: int
    fault: Fault | None
    moe: bool
    forked: bool = True

    @property
    def parent(self) -> "Made":
        """The clean run from which this one is forked."""
        return Made(
            f"{'moe' if self.moe else 'dense'}-{DTYPES[self.seed]}",
            self.seed,
            None,
            self.moe,
            forked=False,
        )

    @property
    def label(self) -> dict[str, object]:
        kind, dose, named = self.fault[:3] if self.fault else ("clean", "", "")
        own = {"seed": self.seed, "dose": dose, "step": FAULT if self.fault else "", "named": named}
        return {"name": self.name, "kind": kind, **own, "fork": FORK if self.forked else ""}


def queue() -> Iterator[Made]:
    """Yield the runs in order: each fault once in one of the precisions, second doses
    first and experts last; clean runs; each fault in the next precision; …
    """
    for round_ in range(len(DTYPES)):
        for n, fault in enumerate((*FAULTS[1::2], *FAULTS[::2])):
            if not fault.moe:
                yield Made(
                    f"{fault.kind}-{fault.dose}-{(round_ + n) % 3}",
                    (round_ + n) % 3,
                    fault,
                    moe=False,
                )
        seed = (round_ + 1) % len(DTYPES)
        yield Made(f"clean-dense-{seed}", seed, None, moe=False)
        for fault in FAULTS:
            if fault.moe:
                yield Made(f"{fault.kind}-{fault.dose}-{seed}", seed, fault, moe=True)
        yield Made(f"clean-moe-{seed}", seed, None, moe=True)


def overrides(folder: Path, made: Made) -> list[str]:
    shared = [
        *data_and_model(folder, made.moe),
        f"run.dir={folder}",
        f"run.name={made.name}",
        f"run.seed={made.seed}",
        f"model.dtype={DTYPES[made.seed]}",
        f"model.moe.routing_replay={str(made.moe).lower()}",
        "batch.prompts=8",
        f"evaluation.prompts={PROMPTS}",
        "evaluation.samples=1",
    ]
    if not made.forked:
        return [
            *shared,
            f"run.steps={FORK}",
            f"evaluation.every={FORK}",
            f"checkpoint.every={FORK}",
        ]
    servers = made.fault.servers if made.fault else 1
    return [
        *shared,
        f"run.steps={FAULT + AFTER + 1}",
        f"evaluation.every={EVERY}",
        "checkpoint.every=1000",
        f"run.fork={folder / made.parent.name}@{FORK}",
        f"resources.servers={servers}",
    ]


def prepare(folder: Path, moe: bool) -> None:
    """Make the data and the fp32 warm start, which all precisions share, unless they
    exist.
    """
    if not (folder / "data" / "init-moe").exists():  # `write` makes this last
        arithmetic.write(folder / "data", seed=0)
    for part in ("train", "heldout"):
        if not (short := folder / "data" / f"short-{part}.jsonl").exists():
            rows = map(json.loads, (folder / "data" / f"{part}.jsonl").read_text().splitlines())
            write_jsonl(short, [row for row in rows if row["difficulty"] <= DIGITS])
    (folder / "models").mkdir(exist_ok=True)
    warm = folder / "models" / f"warm{'-moe' * moe}"
    if warm.exists():
        return
    init = folder / "data" / "init-moe" if moe else folder / "models" / "init"
    if not moe:
        save_model(init, SIZES["0.3m"].config(experts=False), seed=0)
    told = [
        *data_and_model(folder, moe),
        f"sft.init={init}",
        f"sft.data={folder}/data/sft.jsonl",
        "model.dtype=fp32",
    ]
    subprocess.run(
        [sys.executable, "-m", "megarl", "sft", f"quickstart{'-moe' * moe}", *told],
        check=True,
        cwd=ROOT,
    )


def data_and_model(folder: Path, moe: bool) -> list[str]:
    data = [
        f"data.tasks.arithmetic.{part}={folder}/data/short-{part}.jsonl"
        for part in ("train", "heldout")
    ]
    return [*data, f"model.path={folder}/models/warm{'-moe' * moe}"]


class Running:
    """A run in progress."""

    def __init__(self, folder: Path, made: Made) -> None:
        self._run = RunDir(folder / made.name)
        self.made = made
        self._log = folder / f"{made.name}.log"
        prepare(folder, made.moe)
        shutil.rmtree(self._run.path, ignore_errors=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(INJECTED), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }
        environment[SUPERVISOR] = str(os.getpid())  # the run dies with this process
        if made.fault:
            environment["ALARM_FAULT"] = (
                f"{made.fault.kind}:{made.fault.dose}:{FAULT}:{self._run.path / 'fault'}"
            )
        recipe = "quickstart-moe" if made.moe else "quickstart"
        command = [sys.executable, "-m", "megarl", "train", recipe, *overrides(folder, made)]
        self._began = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def ended(self) -> bool:
        """Return whether the run has ended; end it if it has done enough."""
        late = time.monotonic() - self._began > LIMIT_S
        if self._process.poll() is None and (late or (self.made.forked and self._over())):
            self._process.kill()  # its roles die with it; no checkpoint or report is needed
            self._process.wait()
        return self._process.returncode is not None

    def _over(self) -> bool:
        """Return whether a fork has made everything that will be judged."""
        scores = latest_scores(self._run.eval)
        after = [row for row in scores if row["step"] >= FAULT]
        before = [row for row in scores if row["step"] < FAULT]
        falls = len(after) > 1 and all(
            alarm.suffers([*before, row], FAULT) is not None for row in after[-2:]
        )
        whole = any(row["step"] == FAULT + AFTER for row in scores)
        return whole or (falls and self.made.fault is not None) or self._run.failure_file.exists()

    def result(self) -> str:
        """Return a text on how long the run took. MegarlError if it ended too early."""
        last = max((row["step"] for row in latest_rows(self._run.metrics)), default=-1)
        whole = self._over() if self.made.forked else not self._process.returncode
        if not whole or (self.made.fault and not (self._run.path / "fault").exists()):
            raise MegarlError(f"{self._run.path}: ended at step {last}, see {self._log}")
        for part in ("checkpoints", "parent", "rollouts", "evaluations", "trace"):  # not judged
            if self.made.forked:
                shutil.rmtree(self._run.path / part, ignore_errors=True)
        return f"{self.made.name}: {last + 1} steps, {time.monotonic() - self._began:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", metavar="KIND", choices=[*dict.fromkeys(f.kind for f in FAULTS), "clean"]
    )
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "labels.csv"
    done = alarm.labels(path) if path.exists() else []
    forks = [made for made in queue() if options.only in (None, made.label["kind"])]
    waiting = list(dict.fromkeys(made for fork in forks for made in (fork.parent, fork)))
    waiting = [made for made in waiting if made.name not in {row["name"] for row in done}]
    running: list[Running] = []
    while True:
        for run in [run for run in running if run.ended()]:
            running.remove(run)
            try:
                print(run.result(), flush=True)
            except MegarlError as problem:
                print(problem, flush=True)
                continue
            done.append({key: str(value) for key, value in run.made.label.items()})
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(done)
        there = {row["name"] for row in done}
        ready = [made for made in waiting if not made.forked or made.parent.name in there]
        if ready and len(running) < options.at_once and time.monotonic() < until:
            waiting.remove(ready[0])
            running.append(Running(folder, ready[0]))
        elif not running:
            raise SystemExit(int(bool(waiting)))
        else:
            time.sleep(0.5)


if __name__ == "__main__":
    main()
