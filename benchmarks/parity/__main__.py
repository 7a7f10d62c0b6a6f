"""Makes real runs of `megarl train` on a CPU, without and with a fault, and shows what
parity reports.

    python -m benchmarks.parity clean llama-24 --dtype bf16 --steps 40
    python -m benchmarks.parity faults --out faults.jsonl

`faults` runs every fault and dose: when is it detected, and how named?

A run is ScaleRL's pipeline with a grader that tosses a coin, so that weights move
although the model is random. Each run prints one JSON object: distributions by cause,
and how it ended.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parity import models
from megarl.core.base.rundir import RunDir, latest_rows
from megarl.core.evaluation.parity import pooled
from megarl.tasks.graders.answer import Submission

FOLDER = Path(__file__).parent
ROOT = Path(__file__).parents[2]
RECIPE = (
    "batch.prompts=8",
    "sampling.generations=4",
    "length.thinking_tokens=[100,120]",
    "serving.kv_tokens=32768",
    "learner.optimizer.lr=2e-5",
    "evaluation.every=100000",
    "evaluation.prompts=1",
    "evaluation.samples=1",
    "checkpoint.every=100000",
    "data.tasks.arithmetic.grader=benchmarks.parity.__main__:coin",
    "pipeline.k=4",
)
FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # fault: (model, word that its message must contain, doses)
    "head-server": ("llama-24", "one-sided head", ("1",)),
    "head-learner": ("llama-24", "one-sided head", ("1",)),
    "dtype-server": ("llama-24", "dtype", ("2", "8")),
    "dtype-cache": ("llama-24", "dtype", ("1",)),
    "rope-theta": ("llama-24", "RoPE", ("1.5", "3")),
    "rope-positions": ("llama-24", "RoPE", ("1.028", "1.06")),
    "temperature-sampling": ("llama-24", "temperature", ("1.05", "1.15")),
    "temperature-logits": ("llama-24", "temperature", ("1.076", "1.2")),
    "routing-server": ("qwen3-moe-16", "routing", (".2", "1")),
    "routing-learner": ("qwen3-moe-16", "routing", (".2", "1")),
    "stale-server": ("llama-24", "stale", ("5e-5", "2e-4")),
    "stale-one-of-two": ("llama-24", "stale", ("5e-5:1", "2e-4:1")),
}


def coin(submission: Submission) -> bool:
    """Return right or wrong by a hash of the completion."""
    return bool(hashlib.blake2b(submission.completion.encode(), digest_size=1).digest()[0] & 1)


def train(
    work: Path, model: str, dtype: str, steps: int, fault: str, overrides: list[str]
) -> tuple[Path, float]:
    """Run the model; return the run's directory and its seconds."""
    data = work / "runs/quickstart-data"
    if not data.exists():
        subprocess.run(
            [sys.executable, "-m", "megarl", "data", "arithmetic", str(data)], cwd=work, check=True
        )
    path = models.make(model, work) if model in models.MODELS else Path(model).resolve()
    recipe = () if model not in models.MODELS else RECIPE
    name = f"{path.name}-{dtype}-{fault.replace(':', '-') or 'clean'}"
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    if fault.startswith(
        "stale"
    ):  # the effect of missing weights depends on how far they move: the dose is the learning rate
        overrides = [f"learner.optimizer.lr={fault.split(':')[1]}", *overrides]
    servers = ["resources.servers=2"] if fault.startswith("stale-one") else []
    began = time.monotonic()
    with (work / f"{name}.log").open("w") as log:
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "megarl",
                    "train",
                    "quickstart",
                    f"run.name={name}",
                    f"model.path={path}",
                ),
                *(f"model.dtype={dtype}", f"run.steps={steps}", *recipe, *servers, *overrides),
            ],
            cwd=work,
            stdout=log,
            stderr=log,
            env=dict(os.environ)
            | {"PYTHONPATH": f"{FOLDER / 'injected'}{os.pathsep}{ROOT}"}
            | ({"PARITY_FAULT": fault} if fault else {}),
        )
    return work / "runs" / name, time.monotonic() - began


def told(run: Path) -> dict[str, Any]:
    """Return the differences by cause over the run's publications, and how it ended."""
    rows = [row for row in latest_rows(RunDir(run).metrics) if "parity_rollouts" in row]
    found: dict[str, Any] = {
        "publications": len(rows),
        "warnings": int(sum(row["warning_parity"] for row in rows)),
    }
    found |= pooled(rows)
    routing = [row["parity_routing"] for row in rows if "parity_routing" in row]
    if routing:
        found["routing"], found["worst_routing"] = float(np.mean(routing)), max(routing)
    failure = RunDir(run).failure_file
    found["ended"] = failure.read_text() if failure.exists() else ""
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("clean", "faults"))
    parser.add_argument(
        "models",
        nargs="*",
        help="names of benchmarks/parity/models.py, or model directories; or faults",
    )
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("runs/parity"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the recipe")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    plan = [(m, "", "") for m in given.models or models.MODELS]
    if given.what == "faults":
        every = [f"{fault}:{dose}" for fault, (_, _, doses) in FAULTS.items() for dose in doses]
        plan = [
            (FAULTS[f.partition(":")[0]][0], f, FAULTS[f.partition(":")[0]][1])
            for f in given.models or every
        ]
    for model, fault, named in plan:
        run, seconds = train(given.work, model, given.dtype, given.steps, fault, given.set)
        found = {
            "model": Path(model).name,
            "dtype": given.dtype,
            "fault": fault,
            "seconds": seconds,
        } | told(run)
        if fault:
            found["named_right"] = f"Likely cause: {named}" in found["ended"]
        line = json.dumps(found)
        print(line, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
