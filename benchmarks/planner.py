"""Compares the planner's simulator with real runs of the quickstart on this machine:
throughput and idle shares.

    python -m benchmarks.planner [--steps 40] [--runs DIR] [--json FILE]

    calibration   decode steps: one server alone, at four concurrencies, all slowed by
                  the same factor as beside a learner; that factor, training,
                  publication, lengths: one real run, with the quickstart's batch and k
    prediction    other batches, windows and a narrower server, simulated with only
                  these costs
    measured      the same, in real runs

It needs runs/quickstart-data and runs/quickstart-sft.

The policy does not change (a learning rate of almost nothing, no prompt excluded), so
that every run has the same lengths and the same share of groups with a gradient. Steps
that fill the window, or have no more prompts to draw, are not counted.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.roles import client_of, served, trained
from megarl.core import recipe as recipes
from megarl.core.base.rundir import Endpoints, RunDir, latest_rows
from megarl.core.client.client import ServerClient
from megarl.core.recipe import Recipe
from megarl.predict.planning.simulate import Costs, simulate, summary
from megarl.predict.planning.workload import Lengths, Workload, lengths_of

FIXED = [
    "learner.optimizer.lr=1e-12",
    "batch.positive_threshold=null",
    "evaluation.every=100000",
    "evaluation.prompts=1",
    "evaluation.samples=1",
    "checkpoint.every=100000",
    "learner.optimizer.warmup_steps=0",
]
CASES = {
    "calibration: 24 prompts, k = 8": [],
    "8 prompts, k = 8": ["batch.prompts=8"],
    "48 prompts, k = 4": ["batch.prompts=48", "pipeline.k=4"],
    "24 prompts, k = 0 (synchronous)": ["pipeline.k=0"],
    "a server of 24 requests at once": ["serving.max_running_requests=24"],
}
CONCURRENCY = (8, 32, 128, 256)
TOKENS = 24
"""Tokens per request when the server is measured alone, near the mean of the
quickstart's completions.
"""
PROMPT_TOKENS = 10
REPEATS = 3


@dataclass(frozen=True)
class Figures:
    """Figures of the counted steps: tokens/s, the share of time that the learner waits,
    and that the server is idle.
    """

    tokens_per_second: float
    learner_idle: float
    server_idle: float
    server_running: float


@dataclass(frozen=True)
class Calibration:
    """Seconds: decode step = decode[0] + decode[1] x requests; training = train[0] +
    train[1] x tokens; others per step.
    """

    decode: tuple[float, float]
    train: tuple[float, float]
    transfer: float
    parity: float
    trained_share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--runs",
        type=Path,
        help="keep the runs there; those that are there and finished are not run again",
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        made = {
            name: recipe_of(folder, i, keys, options.steps)
            for i, (name, keys) in enumerate(CASES.items())
        }
        decode = server_alone(recipe_of(folder, len(CASES), [], options.steps))
        measured: dict[str, Figures] = {}
        predicted: dict[str, Figures] = {}
        for name, recipe in made.items():
            rows = real(recipe)
            if not measured:
                calibration = calibrate(recipe, rows, decode)
                lengths = lengths_of(RunDir(recipe.run.path).path)
                print(json.dumps(asdict(calibration)))
            measured[name] = figures_of(recipe, rows)
            predicted[name] = prediction(recipe, calibration, lengths)
            print(
                f"{name:<34} measured {measured[name]}\n{'':<34} predicted {predicted[name]}",
                flush=True,
            )
        if options.json:
            machine = {
                "cpus": os.cpu_count(),
                "processor": platform.processor(),
                "load": os.getloadavg(),
            }
            rows_of = {
                n: {"measured": asdict(measured[n]), "predicted": asdict(predicted[n])}
                for n in made
            }
            found = {
                "machine": machine,
                "steps": options.steps,
                "calibration": asdict(calibration),
                "runs": rows_of,
            }
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(measured, predicted))


def recipe_of(folder: Path, index: int, keys: Sequence[str], steps: int) -> Recipe:
    places = [f"run.dir={folder}", f"run.name=run{index}", f"run.steps={steps}"]
    return recipes.load("quickstart", [*FIXED, *places, *keys])


def server_alone(recipe: Recipe) -> tuple[float, float]:
    """Return (a, b) of a decode step's seconds a + b x requests, by relative least
    squares over the concurrencies.
    """
    with served(recipe) as server:
        return linear(CONCURRENCY, asyncio.run(_decode_seconds(server.endpoints)))


async def _decode_seconds(endpoints: Endpoints) -> list[float]:
    """Return the seconds of one decode step at each concurrency, from requests with
    TOKENS tokens; the best of REPEATS.
    """
    random = np.random.default_rng(0)

    async def follow(client: ServerClient, count: int) -> None:
        for _ in range(count):
            prompt = random.integers(4, 16, PROMPT_TOKENS, dtype=np.int32)
            salt = str(random.integers(1 << 30))
            await client.generate(prompt, TOKENS, cache_salt=salt, ignore_eos=True)

    found = []
    async with client_of(endpoints) as client:
        for concurrency in CONCURRENCY:
            rates = []
            for _ in range(REPEATS):
                began = asyncio.get_running_loop().time()
                await asyncio.gather(*(follow(client, 4) for _ in range(concurrency)))
                rates.append(concurrency * 4 * TOKENS / (asyncio.get_running_loop().time() - began))
            found.append(concurrency / max(rates))
    return found


def real(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of the recipe's run, which is made unless it
    exists.
    """
    rundir = RunDir(recipe.run.path)
    return latest_rows(rundir.metrics) if rundir.summary.exists() else trained(recipe)


def counted(recipe: Recipe, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that count: without those of steps that fill the window or drain
    it.
    """
    window = recipe.pipeline.window_steps
    return rows[window + 1 : len(rows) - window]


def figures_of(recipe: Recipe, rows: list[dict[str, Any]]) -> Figures:
    used = counted(recipe, rows)
    seconds = sum(r["step_seconds"] for r in used)

    def share(name: str) -> float:
        return float(sum(r[name] * r["step_seconds"] for r in used) / seconds)

    return Figures(
        tokens_per_second=sum(r["generated_tokens"] for r in used) / seconds,
        learner_idle=share("learner_idle_share"),
        server_idle=max(
            0.0, 1 - share("server_busy_share")
        ),  # a measured share can be slightly above one
        server_running=share("server_running_mean"),
    )


def calibrate(
    recipe: Recipe, rows: list[dict[str, Any]], decode: tuple[float, float]
) -> Calibration:
    """Return the simulator's costs, from one run."""
    used = counted(recipe, rows)
    tokens = [r["tokens_trained"] + PROMPT_TOKENS * r["sequences"] for r in used]
    transfer = float(np.median([lasted(r, "pause", "transfer", "resume") for r in used]))
    slower = beside_learner(recipe, used, decode)
    return Calibration(
        decode=(decode[0] * slower, decode[1] * slower),
        # The run's steps are too alike to separate a constant from a rate, so all of it
        # is a rate.
        train=(0.0, sum(r["train_seconds"] for r in used) / sum(tokens)),
        transfer=transfer,
        parity=float(np.median([r["publish_seconds"] for r in used])) - transfer,
        trained_share=float(np.mean([r["groups_in_loss"] / recipe.batch.prompts for r in used])),
    )


def lasted(row: dict[str, Any], *parts: str) -> float:
    """Return the seconds of these parts of the step's publication; 0 without one."""
    return float(sum(row.get(f"{part}_seconds", 0.0) for part in parts))


def beside_learner(
    recipe: Recipe, rows: list[dict[str, Any]], decode: tuple[float, float]
) -> float:
    """Return the seconds of a decode step in these rows, divided by those of the server
    alone with as many requests. Pauses do not count as decoding.
    """
    pauses = ("pause", "resume") if recipe.generates_meanwhile else ("pause", "transfer", "resume")
    paused = sum(lasted(row, *pauses) for row in rows)
    seconds = sum(r["server_busy_share"] * r["step_seconds"] for r in rows) - paused
    running_seconds = sum(r["server_running_mean"] * r["step_seconds"] for r in rows)
    running = running_seconds / (seconds + paused)
    tokens = sum(
        r["generated_tokens"] for r in rows
    )  # tokens of the batches, in the long run as many as were sampled meanwhile
    return float(seconds * running / tokens / (decode[0] + decode[1] * running))


def linear(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return a, b of y = a + b x, neither negative, with the least relative errors."""
    x = np.asarray(xs, np.float64)
    y = np.asarray(ys, np.float64)
    design = np.stack([1 / y, x / y], 1)
    a, b = np.linalg.lstsq(design, np.ones(len(y)), rcond=None)[0]
    if a < 0 or b < 0:  # due to noise; the other one alone is enough
        return (0.0, float(1 / np.mean(x / y))) if a < 0 else (float(1 / np.mean(1 / y)), 0.0)
    return float(a), float(b)


def prediction(recipe: Recipe, known: Calibration, lengths: Lengths) -> Figures:
    """Return the simulator's figures, for as many steps as are counted in
    the real run.
    """
    sample = lengths.draw(
        np.random.default_rng(0), recipe.batch.prompts * recipe.sampling.generations
    )
    work = Workload(
        recipe.batch.prompts,
        recipe.sampling.generations,
        PROMPT_TOKENS,
        lengths,
        known.trained_share,
        sample,
    )

    def step_seconds(running: float, held: float) -> float:
        return known.decode[0] + known.decode[1] * running

    costs = Costs(
        step_seconds=step_seconds,
        train_seconds=lambda sequences: known.train[0] + known.train[1] * sum(sequences),
        transfer=known.transfer,
        parity=known.parity,
        limit=recipe.serving.max_running_requests,
    )
    window = recipe.pipeline.window_steps
    steps = simulate(recipe, work, costs, recipe.run.steps - window)
    found = summary(steps, recipe.resources.servers, window)
    return Figures(
        found.tokens_per_second, found.learner_idle, 1 - found.server_busy, found.server_running
    )


def table(measured: dict[str, Figures], predicted: dict[str, Figures]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        (
            "| run | tokens/s | predicted | ratio | learner idle | predicted | server idle |"
            " predicted |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, real_one in measured.items():
        ours = predicted[name]
        ratio = ours.tokens_per_second / real_one.tokens_per_second
        lines.append(
            f"| {name} | {real_one.tokens_per_second:,.0f} | {ours.tokens_per_second:,.0f} |"
            f" {ratio:.2f} | {real_one.learner_idle:.0%} | {ours.learner_idle:.0%} |"
            f" {real_one.server_idle:.0%} | {ours.server_idle:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
