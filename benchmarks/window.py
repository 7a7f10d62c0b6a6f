"""Tests `pipeline.window`: real runs limited by their learner, with a full window and
with `auto`, in alternating pairs.

    python -m benchmarks.window [--pairs 5] [--steps 80] [--json FILE]
    python -m benchmarks.window --simulate

The first makes ten runs of two minutes, and needs two quiet cores; --simulate is
scalerl-8b on 80 H100, two minutes of a core.

The workload is that of `workload.py` with prompts four times as long as answers: a
server reads a prompt once per group, the learner with every answer, so the learner is
the bottleneck. Steps count after `WARM_UP`, during which the window fills and shrinks,
up to the last step for which a full window still draws. The interval is Student's t for
the pairs' logarithms; one pair has none. Tokens per second depend on the machine's
speed during a run and on the lengths that were drawn, too; a narrow window costs
throughput if the learner waits more, so the time in which it works is compared as well.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.end_to_end import recipe_of, write_data
from benchmarks.roles import trained
from benchmarks.workload import GrpoStepSizes, make_model
from megarl.core import recipe as recipes
from megarl.core.base import architecture
from megarl.core.recipe import Recipe
from megarl.predict.planning.hardware import gpu_named
from megarl.predict.planning.layouts import PlanningProblem, as_written
from megarl.predict.planning.simulate import simulated
from megarl.predict.planning.workload import lognormal, workload

WORK = GrpoStepSizes(prompts=8, generations=8, prompt_tokens=64, mean_tokens=16, max_tokens=48)
WARM_UP = 30
WINDOWS = ("full", "auto")
FIGURES = ("tokens_per_second", "lag_mean", "learner_idle_share", "window")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", type=Path, help="write the figures of each run there too")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="simulate 80 GPUs instead, learner-bound and nearly balanced",
    )
    options = parser.parse_args()
    if options.simulate:
        return simulate()
    found: dict[str, list[dict[str, float]]] = {window: [] for window in WINDOWS}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_model(place / "model", WORK)
        write_data(place, WORK, options.steps)
        for pair in range(options.pairs):
            for window in WINDOWS[:: -1 if pair % 2 else 1]:
                found[window].append(measured(made(place, options.steps, window, pair)))
                figures = ", ".join(
                    f"{name} {value:,.3g}" for name, value in found[window][-1].items()
                )
                print(
                    f"pair {pair}, {window}: {figures}; load {os.getloadavg()[0]:.1f}", flush=True
                )
    print(table(found))
    if options.json:
        options.json.write_text(
            json.dumps({"cores": os.cpu_count(), "steps": options.steps, "runs": found}, indent=1)
            + "\n"
        )


def simulate() -> None:
    print(
        "| servers + learner | window | tokens/s | mean lag | learner idle |\n|---|---|---|---|---|"
    )
    for servers in (72, 64):
        for window in WINDOWS:
            split = [
                "model.tensor_parallel=4",
                "resources.server_tensor_parallel=1",
                f"resources.servers={servers}",
                f"resources.learner_ranks={80 - servers}",
                f"pipeline.window={window}",
            ]
            recipe = recipes.load("scalerl-8b", split)
            drawn = workload(recipe, lognormal(recipe, 8000, 0.5), 1.0, 0)
            posed = PlanningProblem(
                recipe, architecture.read("llama-3.1-8b"), gpu_named("h100"), 80, drawn
            )
            plan = as_written(posed)
            assert not isinstance(plan, str), plan
            found = simulated(posed, plan, 12).summary
            figures = (
                f"{found.tokens_per_second:,.0f} | {found.lag_mean:.2f} | {found.learner_idle:.1%}"
            )
            print(f"| {servers} + {80 - servers} | {window} | {figures} |", flush=True)


def made(place: Path, steps: int, window: str, pair: int) -> Recipe:
    recipe = recipe_of(place, WORK, steps)
    update = {
        "run": recipe.run.model_copy(update={"name": f"{window}-{pair}"}),
        "pipeline": recipe.pipeline.model_copy(update={"window": window}),
    }
    return recipe.model_copy(update=update)


def measured(recipe: Recipe) -> dict[str, float]:
    """Run the recipe; return its figures over the counted steps. Shares and means are
    over the seconds of these steps.
    """
    rows = trained(recipe)[WARM_UP : -recipe.pipeline.window_steps]
    seconds = np.array([row["step_seconds"] for row in rows])
    return {
        name: float(np.average([row[name] for row in rows], weights=seconds)) for name in FIGURES
    }


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the pairs' ratios and its 95 % interval, which is
    unbounded for one pair.
    """
    logs = np.log(ratios)
    if len(logs) == 1:
        return math.exp(logs[0]), 0.0, math.inf
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return math.exp(logs.mean()), math.exp(logs.mean() - half), math.exp(logs.mean() + half)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| window | tokens/s | mean lag | learner idle | batches |", "|---|---|---|---|---|"]
    for window, runs in found.items():
        tokens, lag, idle, batches = (np.mean([run[name] for run in runs]) for name in FIGURES)
        lines.append(f"| {window} | {tokens:,.0f} | {lag:.2f} | {idle:.1%} | {batches:.1f} |")
    pairs = list(zip(found["auto"], found["full"], strict=True))
    ratios = {name: [auto[name] / full[name] for auto, full in pairs] for name in FIGURES[:2]}
    ratios["time in which the learner works"] = [
        (1 - auto["learner_idle_share"]) / (1 - full["learner_idle_share"]) for auto, full in pairs
    ]
    for name, found_of in ratios.items():
        mean, low, high = interval(found_of)
        lines.append(
            f"\n{name}, auto / full: {mean:.3f} [{low:.3f}, {high:.3f}] over {len(pairs)} pairs"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
