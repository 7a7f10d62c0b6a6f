"""Does `megarl plan --allocate` choose well? A grid of tiny runs of equal tokens, and a choice from short parts of a few.

    python -m benchmarks.allocation run DIR [--task N]     the grid, or one run of it; goes on after an interruption
    python -m benchmarks.allocation score                  what was chosen, and how it compares with the grid's best cell

All runs are `quickstart` with 0.3 million active parameters, from one warm start that is made as the corpus makes its own. A
cell is P prompts x G rollouts a step, for ROLLOUTS rollouts; scores are of 2,048 answers, where rollouts have grown by 1.6.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from megarl.core.base.rundir import latest_rows, latest_scores, write_atomically
from megarl.core.recipe import Recipe
from megarl.lab.study import corpus, plan
from megarl.lab.study.main import CommandLines, StudyHooks, run
from megarl.lab.study.plan import StudyTask

RESULTS = Path("benchmarks/results/allocation.json")
ROLLOUTS = 10_240
KIND = "quickstart-0.3m-fp32"
CELLS = ((8, 4), (32, 16), (16, 8), (8, 16), (32, 4), (8, 8), (16, 16), (32, 8), (16, 4))  # first those that are fitted
FITTED = 5


def recipes(directory: Path) -> dict[str, Recipe]:
    return {f"{p}x{g}": corpus.recipes(directory, _cell(p, g))[KIND] for p, g in CELLS}


def _cell(prompts: int, generations: int) -> tuple[str, ...]:
    steps = ROLLOUTS // (prompts * generations)
    return (
        f"batch.prompts={prompts}", f"sampling.generations={generations}", f"run.steps={steps}",
        "learner.optimizer.warmup_steps=1", "evaluation.samples=4", f"evaluation.every={steps // 10}",
        "evaluation.growth=1.6", f"checkpoint.every={steps}",
    )  # fmt: skip


def before(task: StudyTask) -> CommandLines:
    """Return the command of the common warm start, if it is missing."""
    commands = corpus.before(replace(task, variant=KIND, seed=0))
    return [[*command[:4], str(task.recipe), *command[5:]] for command in commands]


def record(directory: Path) -> None:
    """Write the curves of the runs that are done."""
    cells = []
    for task in plan.opened(directory).tasks:
        if task.state() != "done":
            continue
        steps = latest_rows(task.rundir.metrics)
        tokens = np.cumsum([0.0, *(row["generated_tokens"] for row in steps)])
        seconds = np.diff([row["training_hours"] for row in steps]) * 1800  # two cores
        prompts, generations = map(int, task.variant.split("x"))
        scores = [(row["step"], round(row["pass_rate"], 6)) for row in latest_scores(task.rundir.eval)]
        cells.append(
            {
                "prompts": prompts,
                "generations": generations,
                "seconds": round(float(np.median(seconds)), 4),
                "answers": 2048,
                "points": [{"step": s, "tokens": int(tokens[s]), "pass_rate": r} for s, r in scores],
            }
        )
    lines = ",\n".join(f" {json.dumps(cell)}" for cell in cells)
    write_atomically(directory / "allocation.json", f"[\n{lines}\n]\n".encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("directory", type=Path)
    running.add_argument("--task", type=int)
    options = parser.parse_args(arguments)
    if options.command == "run":
        study = plan.prepare(options.directory, recipes(options.directory), [0])
        tasks = study.tasks if options.task is None else [study.tasks[options.task]]
        run(study, tasks, Console(), StudyHooks(before, done=lambda _: record(options.directory)))


if __name__ == "__main__":
    main()
