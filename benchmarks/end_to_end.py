"""Rollout and training together, on two cores: megarl against TRL's GRPOTrainer and against its own bound, in one run.

    launch/bench.sh                          # the way to start it; options go through
    python -m benchmarks.end_to_end [--steps 24] [--fixed] [--json FILE]

    server alone S, learner alone L     tokens per second, one thread each, the other core free
    bound = 2 / (1/S + 1/L)             two cores, every token costs 1/S core-seconds to sample and 1/L to train
    megarl                              `megarl train`: server, controller and learner, from its own metrics
    TRL                                 the same model, prompts, lengths and batch, loss "cispo", two threads

All count completion tokens. See workload.py for what is trained.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload import EOS, GrpoStepSizes, make_model, prompt_texts
from megarl.core import recipe as recipes
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import RunDir, latest_rows
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.recipe import Recipe
from megarl.core.server.client import ServerClient
from megarl.lab.evaluation.servers import wait_ready
from megarl.tasks.data.prompts import load_tasks

ROOT = Path(__file__).parents[1]
PIPELINE_FILL = 6
"""First steps of megarl that are not counted: the window of tickets fills up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="of megarl; TRL gets a quarter")
    parser.add_argument("--fixed", action="store_true", help="all completions of 80 tokens instead of ragged ones")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    work = GrpoStepSizes(mean_tokens=None, max_tokens=80) if options.fixed else GrpoStepSizes()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_model(place / "model", work)
        write_data(place, work, options.steps)
        recipe = recipe_of(place, work, options.steps)
        figures: dict[str, float] = {}
        for name, measure in {
            "server_alone": lambda: server_alone(recipe, work),
            "learner_alone": lambda: learner_alone(options.fixed),
            "megarl": lambda: end_to_end(recipe),
            "trl": lambda: trl(place, dataclasses.replace(work, steps=max(4, options.steps // 4))),
        }.items():
            figures[name] = measure()
            print(f"{name.replace('_', ' ')}: {figures[name]:,.0f} tokens/s", file=sys.stderr, flush=True)
    figures["bound"] = 2 / (1 / figures["server_alone"] + 1 / figures["learner_alone"])
    print(table(figures, work))
    if options.json:
        options.json.write_text(json.dumps(figures | {"workload": dataclasses.asdict(work)}, indent=1) + "\n")


def table(figures: dict[str, float], work: GrpoStepSizes) -> str:
    lengths = f"mean {work.mean_tokens}, at most {work.max_tokens}" if work.mean_tokens else f"all {work.max_tokens}"
    rows = [
        f"{work.completions} completions a step, tokens: {lengths}; {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}",
        "",
        "| | completion tokens/s |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {value:,.0f} |" for name, value in figures.items()),
        "",
        f"megarl / TRL = {figures['megarl'] / figures['trl']:.2f}; megarl / bound = {figures['megarl'] / figures['bound']:.2f}",
    ]
    return "\n".join(rows)


def write_data(place: Path, work: GrpoStepSizes, steps: int) -> None:
    """Prompts for all steps, the window and the evaluation; no answer is ever right."""
    texts = prompt_texts(work, (steps + 16) * work.prompts)
    for name, part in (("heldout", texts[:2]), ("train", texts[2:])):
        rows = [{"id": f"{name}-{i}", "prompt": text, "answer": "none"} for i, text in enumerate(part)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(place: Path, work: GrpoStepSizes, steps: int) -> Recipe:
    """ScaleRL's structure with the workload's sizes. Groups without variance are trained: all of them have none."""
    return recipes.from_tree(
        {
            "run": {"name": "bench", "dir": str(place / "runs"), "steps": steps},
            "model": {"path": str(place / "model"), "dtype": "fp32"},
            "data": {
                "tasks": {
                    "bench": {
                        "train": str(place / "train.jsonl"),
                        "heldout": str(place / "heldout.jsonl"),
                        "grader": "exact",
                    }
                }
            },
            "length": {
                "prompt_tokens": work.prompt_tokens,
                "thinking_tokens": (work.max_tokens, work.max_tokens),
                "answer_tokens": 1,
                "end_of_thinking": "w9",
                "interruption": "w9",
            },
            "sampling": {"generations": work.generations},
            "batch": {"prompts": work.prompts, "zero_variance": "keep", "positive_threshold": None},
            "learner": {"microbatch_tokens": 4096},
            "serving": {"kv_tokens": 131072},
            "evaluation": {"every": 10_000, "prompts": 1, "samples": 1},
            "checkpoint": {"every": 10_000},
        }
    )


def server_alone(recipe: Recipe, work: GrpoStepSizes) -> float:
    """Median of three rounds of three steps' prompts, as many requests at once as the controller keeps up."""
    from benchmarks.server import start

    run = recipe.run.model_copy(update={"name": "server"})
    process, endpoints = start(recipe.model_copy(update={"run": run}))
    try:
        wait_ready(endpoints.servers[0], recipe.start_limit_s, process.poll)
        prompts = load_tasks(recipe, load_tokenizer(recipe.model.path))["bench"].train

        async def rounds() -> list[float]:
            places = asyncio.Semaphore(recipe.serving.max_running_requests)
            async with ServerClient(
                ServerAddress(id=0, url=endpoints.servers[0]), endpoints.api_key, endpoints.admin_key, 300
            ) as client:

                async def one(i: int) -> int:
                    async with places:
                        prompt = prompts[i // work.generations].tokens
                        done = await client.generate(
                            prompt, work.max_tokens, stop_token_ids=(EOS,), cache_salt=str(i // work.generations)
                        )
                        return len(done.tokens)

                speeds = []
                for _ in range(4):
                    begin = time.perf_counter()
                    tokens = sum(await asyncio.gather(*(one(i) for i in range(3 * work.completions))))
                    speeds.append(tokens / (time.perf_counter() - begin))
                return speeds[1:]

        return statistics.median(asyncio.run(rounds()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def learner_alone(fixed: bool) -> float:
    """Completion tokens per second of the training step (benchmarks/learner.py), one thread."""
    command = [sys.executable, "-m", "benchmarks.learner", "--json", "--steps", "3", *(["--fixed"] if fixed else [])]
    return float(json.loads(output(command, {"OMP_NUM_THREADS": "1"}))["megarl_completion_tokens_per_second"])


def end_to_end(recipe: Recipe) -> float:
    """Completion tokens trained per second of wall time, of the steps after the pipeline has filled."""
    rundir = RunDir(recipe.run.path)
    rundir.path.parent.mkdir(parents=True, exist_ok=True)
    file = rundir.path.parent / "bench.yaml"
    file.write_text(recipes.dump(recipe))
    output([sys.executable, "-m", "megarl", "train", str(file)], {})
    rows = latest_rows(rundir.metrics)
    counted = rows[PIPELINE_FILL + 1 :]
    assert all(row["tokens_trained"] == row["generated_tokens"] for row in counted), "not every token was trained"
    return sum(row["generated_tokens"] for row in counted) / (rows[-1]["time"] - rows[PIPELINE_FILL]["time"])


def trl(place: Path, work: GrpoStepSizes) -> float:
    command = [sys.executable, "-m", "benchmarks.trl_grpo", str(place / "model"), json.dumps(dataclasses.asdict(work))]
    path = os.pathsep.join([str(ROOT / ".bench"), str(ROOT)])
    printed = output(command, {"OMP_NUM_THREADS": "2", "PYTHONPATH": path})
    return float(json.loads(printed.splitlines()[-1])["tokens_per_second"])


def output(command: list[str], environment: dict[str, Any]) -> str:
    """What the command prints; its errors are shown if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
