"""Measures rollout and training together, on two cores: megarl against TRL's
GRPOTrainer and its own bound, in one run.

    launch/bench.sh                          # starts it; options are passed on
    python -m benchmarks.end_to_end [--steps 24] [--fixed] [--json FILE]
    python -m benchmarks.end_to_end --real [--steps 30] [--trl JSON] [--json FILE]

    server alone S, learner alone L   tokens per second, one thread each, the other core
                                      free
    bound = 2 / (1/S + 1/L)           two cores, every token costs 1/S core-seconds to
                                      sample and 1/L to train
    megarl                            `megarl train`: server, controller and learner,
                                      from its own metrics
    TRL                               the same model, prompts, lengths and batch, loss
                                      "cispo", two threads

All of them count completion tokens. The workload is in workload.py; --real is in
real_comparison.py.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import real_comparison
from benchmarks.roles import client_of, output, served, trained, with_trl
from benchmarks.workload import EOS, GrpoStepSizes, make_model, prompt_texts
from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.recipe import Recipe
from megarl.tasks.data.prompts import load_tasks

PIPELINE_FILL = 6
"""The first steps of megarl, during which the window of tickets fills; they are not
counted.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, help="of megarl, 24; TRL gets a quarter. With --real of both, 30"
    )
    parser.add_argument(
        "--fixed", action="store_true", help="all completions of 80 tokens instead of ragged ones"
    )
    parser.add_argument(
        "--real", action="store_true", help="SmolLM2-135M-Instruct learns sums by quickstart-real"
    )
    parser.add_argument(
        "--trl", default="{}", help="with --real: settings of TRL's GRPOConfig, a JSON object"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    if options.real and options.fixed:
        parser.error("--fixed: the real model's answers are as long as they are; leave it out")
    if options.real:
        compare_real(options.steps or 30, options.trl, options.json)
    else:
        compare_with_bound(options.steps or 24, options.fixed, options.json)


def compare_real(steps: int, trl_settings: str, json_file: Path | None) -> None:
    try:
        real_comparison.compare(steps, trl_settings, json_file)
    except MegarlError as problem:
        raise SystemExit(f"megarl: {problem}") from None


def compare_with_bound(steps: int, fixed: bool, json_file: Path | None) -> None:
    """Measure the workload by megarl, by TRL and by each of megarl's sides alone, and
    print a table.
    """
    work = GrpoStepSizes(mean_tokens=None, max_tokens=80) if fixed else GrpoStepSizes()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_model(place / "model", work)
        write_data(place, work, steps)
        recipe = recipe_of(place, work, steps)
        figures: dict[str, float] = {}
        for name, measure in {
            "server_alone": lambda: server_alone(recipe, work),
            "learner_alone": lambda: learner_alone(fixed),
            "megarl": lambda: end_to_end(recipe),
            "trl": lambda: trl(place, dataclasses.replace(work, steps=max(4, steps // 4))),
        }.items():
            figures[name] = measure()
            print(
                f"{name.replace('_', ' ')}: {figures[name]:,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    figures["bound"] = 2 / (1 / figures["server_alone"] + 1 / figures["learner_alone"])
    print(table(figures, work))
    if json_file:
        json_file.write_text(
            json.dumps(figures | {"workload": dataclasses.asdict(work)}, indent=1) + "\n"
        )


def table(figures: dict[str, float], work: GrpoStepSizes) -> str:
    lengths = (
        f"mean {work.mean_tokens}, at most {work.max_tokens}"
        if work.mean_tokens
        else f"all {work.max_tokens}"
    )
    rows = [
        (
            f"{work.completions} completions a step, tokens: {lengths}; {os.cpu_count()} cores"
            f" ({platform.machine()}), torch {torch.__version__}"
        ),
        "",
        "| | completion tokens/s |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {value:,.0f} |" for name, value in figures.items()),
        "",
        (
            f"megarl / TRL = {figures['megarl'] / figures['trl']:.2f}; megarl / bound ="
            f" {figures['megarl'] / figures['bound']:.2f}"
        ),
    ]
    return "\n".join(rows)


def write_data(place: Path, work: GrpoStepSizes, steps: int) -> None:
    """Write prompts for all steps, the window and the evaluation; no answer is ever
    right.
    """
    texts = prompt_texts(work, (steps + 16) * work.prompts)
    for name, part in (("heldout", texts[:2]), ("train", texts[2:])):
        rows = [
            {"id": f"{name}-{i}", "prompt": text, "answer": "none"} for i, text in enumerate(part)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(place: Path, work: GrpoStepSizes, steps: int) -> Recipe:
    """Return a recipe with ScaleRL's structure and the workload's sizes. It trains
    groups without variance, as none has any.
    """
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
    """Return the server's tokens/s: the median of three rounds with three steps'
    prompts, as concurrent as the controller's.
    """
    run = recipe.run.model_copy(update={"name": "server"})
    prompts = load_tasks(recipe, load_tokenizer(recipe.model.path))["bench"].train

    async def rounds(endpoints: Endpoints) -> list[float]:
        places = asyncio.Semaphore(recipe.serving.max_running_requests)
        async with client_of(endpoints, 300) as client:

            async def one(i: int) -> int:
                async with places:
                    prompt = prompts[i // work.generations].tokens
                    salt = str(i // work.generations)
                    done = await client.generate(
                        prompt, work.max_tokens, stop_token_ids=(EOS,), cache_salt=salt
                    )
                    return len(done.tokens)

            speeds = []
            for _ in range(4):
                begin = time.perf_counter()
                tokens = sum(await asyncio.gather(*(one(i) for i in range(3 * work.completions))))
                speeds.append(tokens / (time.perf_counter() - begin))
            return speeds[1:]

    with served(recipe.model_copy(update={"run": run})) as server:
        return statistics.median(asyncio.run(rounds(server.endpoints)))


def learner_alone(fixed: bool) -> float:
    """Return completion tokens per second of the training step (benchmarks/learner.py),
    with one thread.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.learner",
        "--json",
        "--steps",
        "3",
        *(["--fixed"] if fixed else []),
    ]
    return float(
        json.loads(output(command, {"OMP_NUM_THREADS": "1"}))["megarl_completion_tokens_per_second"]
    )


def end_to_end(recipe: Recipe) -> float:
    """Return completion tokens trained per second of wall time, over the steps after
    the pipeline has filled.
    """
    rows = trained(recipe)
    counted = rows[PIPELINE_FILL + 1 :]
    assert all(row["tokens_trained"] == row["generated_tokens"] for row in counted), (
        "not every token was trained"
    )
    return sum(row["generated_tokens"] for row in counted) / (
        rows[-1]["time"] - rows[PIPELINE_FILL]["time"]
    )


def trl(place: Path, work: GrpoStepSizes) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.trl_grpo",
        str(place / "model"),
        json.dumps(dataclasses.asdict(work)),
    ]
    printed = output(command, with_trl())
    return float(json.loads(printed.splitlines()[-1])["tokens_per_second"])


if __name__ == "__main__":
    main()
