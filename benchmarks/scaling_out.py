"""Simulates the pipeline at 80, 1,024 and 16,384 GPUs, for benchmarks/scaling-out.md.

    python -m benchmarks.scaling_out [--json FILE]

As servers are alike, and groups, too, only a part of the two large systems is
simulated, with servers and prompts reduced by the same factor, and with the training
and publication of the whole.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.core.base import architecture
from megarl.core.recipe import load
from megarl.predict.planning.hardware import gpu_named
from megarl.predict.planning.layouts import PlanningProblem, as_written
from megarl.predict.planning.simulate import costs, simulate, summary
from megarl.predict.planning.workload import lognormal, workload

MEAN = 8000
SPREAD = 0.5
STEPS = 12
BASE = ("model.tensor_parallel=2", "model.context_parallel=4", "resources.server_tensor_parallel=1")
CASES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "80": (80, 1, ("resources.servers=48", "resources.learner_ranks=32")),
    "1,024, the same batch": (
        1024,
        1,
        (
            "resources.servers=104",
            "resources.server_tensor_parallel=8",
            "resources.learner_ranks=192",
        ),
    ),
    "1,024": (
        1024,
        16,
        ("batch.prompts=640", "resources.servers=704", "resources.learner_ranks=320"),
    ),
    "1,024, servers of 4": (
        1024,
        16,
        (
            "batch.prompts=640",
            "resources.servers=176",
            "resources.server_tensor_parallel=4",
            "resources.learner_ranks=320",
        ),
    ),
    "16,384": (
        16384,
        128,
        ("batch.prompts=10240", "resources.servers=11264", "resources.learner_ranks=5120"),
    ),
    "16,384, servers of 8": (
        16384,
        128,
        (
            "batch.prompts=10240",
            "resources.servers=1408",
            "resources.server_tensor_parallel=8",
            "resources.learner_ranks=5120",
        ),
    ),
    "16,384, servers of 8, buckets of 4 GB": (
        16384,
        128,
        (
            "batch.prompts=10240",
            "resources.servers=1408",
            "resources.server_tensor_parallel=8",
            "resources.learner_ranks=5120",
            "weights.bucket_mb=4096",
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    print(
        "| GPUs | sync s | step s | tokens/s | publishing | learner idle | lag |"
        " \n|---|---|---|---|---|---|---|"
    )
    for name, (gpus, part, keys) in CASES.items():
        row = found[name] = simulated(gpus, part, keys)
        print(
            f"| {name} | {row['transfer']:.1f} | {row['step_seconds']:.1f} |"
            f" {row['tokens_per_second']:,.0f} | {row['publishing']:.0%} |"
            f" {row['learner_idle']:.0%} | {row['lag_mean']:.1f} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def simulated(gpus: int, part: int, keys: tuple[str, ...]) -> dict[str, Any]:
    recipe = load("scalerl-8b", [*BASE, *keys])
    lengths = lognormal(recipe, MEAN, SPREAD)
    work = workload(recipe, lengths, 1.0, 0)
    problem = PlanningProblem(
        recipe, architecture.read("llama-3.1-8b"), gpu_named("h100"), gpus, work
    )
    plan = as_written(problem)
    assert not isinstance(plan, str), plan
    resources = recipe.resources.model_copy(update={"servers": recipe.resources.servers // part})
    batch = recipe.batch.model_copy(update={"prompts": recipe.batch.prompts // part})
    small = recipe.model_copy(update={"resources": resources, "batch": batch})
    whole = replace(costs(problem, plan), train_seconds=lambda sequences: plan.train_seconds)
    warm_up = 2 * recipe.pipeline.window_steps
    steps = simulate(small, workload(small, lengths, 1.0, 0), whole, STEPS + warm_up)
    result = summary(steps, resources.servers, warm_up)
    return asdict(result) | {
        "transfer": plan.publication.transfer,
        "tokens_per_second": result.tokens_per_second * part,
        "estimated_step_seconds": plan.step_seconds,
    }


if __name__ == "__main__":
    main()
