"""Does `megarl plan --allocate` choose well? Tests it on a grid of tiny runs with equal
tokens, by choices from parts of a few.

    python -m benchmarks.allocation run DIR [--task N]
    python -m benchmarks.allocation score

`run` makes the grid, or one run of it, and resumes after an interruption. `score`
prints the choices, compared with the grid's best cell.

All runs are `quickstart` with 0.3 million active parameters, from one warm start, made
as for the corpus. A cell is a run of P prompts x G rollouts per step, for ROLLOUTS
rollouts; it is scored on 2,048 answers each time rollouts have grown by 1.6.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks import corpus
from benchmarks.forecasts import part_of
from megarl.core.base.rundir import latest_rows, latest_scores, write_atomically
from megarl.core.recipe import Recipe
from megarl.predict.planning.allocate import BatchSize, choose, measured
from megarl.predict.scaling.cells import CellLaw, CellRun
from megarl.predict.scaling.points import Curve
from megarl.predict.study import plan
from megarl.predict.study.plan import StudyTask
from megarl.predict.study.running import CommandLines, StudyHooks, run

RESULTS = Path("benchmarks/results/allocation.json")
ROLLOUTS = 10_240
KIND = "quickstart-0.3m-fp32"
CELLS = (
    (8, 4),
    (32, 16),
    (16, 8),
    (8, 16),
    (32, 4),
    (8, 8),
    (16, 16),
    (32, 8),
    (16, 4),
)  # the fitted ones come first
FITTED = 5
SHORT = 0.34  # share of the rollouts that is fitted
FEW = 3
SUBSETS = 30


def recipes(directory: Path) -> dict[str, Recipe]:
    return {f"{p}x{g}": corpus.recipes(directory, _cell(p, g))[KIND] for p, g in CELLS}


def _cell(prompts: int, generations: int) -> tuple[str, ...]:
    steps = ROLLOUTS // (prompts * generations)
    return (
        f"batch.prompts={prompts}",
        f"sampling.generations={generations}",
        f"run.steps={steps}",
        "learner.optimizer.warmup_steps=1",
        "evaluation.samples=4",
        f"evaluation.every={steps // 10}",
        "evaluation.growth=1.6",
        f"checkpoint.every={steps}",
    )


def before(task: StudyTask) -> CommandLines:
    """Return the command of the common warm start, if it is missing."""
    commands = corpus.before(replace(task, variant=KIND, seed=0))
    return [[*command[:4], str(task.recipe), *command[5:]] for command in commands]


def record(directory: Path) -> None:
    """Write the curves of the finished runs."""
    cells = []
    for task in plan.opened(directory).tasks:
        if task.state() != "done":
            continue
        steps = latest_rows(task.rundir.metrics)
        tokens = np.cumsum([0.0, *(row["generated_tokens"] for row in steps)])
        seconds = np.diff([row["training_hours"] for row in steps]) * 1800  # two cores
        prompts, generations = map(int, task.variant.split("x"))
        scores = [
            (row["step"], round(row["pass_rate"], 6)) for row in latest_scores(task.rundir.eval)
        ]
        cells.append(
            {
                "prompts": prompts,
                "generations": generations,
                "seconds": round(float(np.median(seconds)), 4),
                "answers": 2048,
                "points": [
                    {"step": s, "tokens": int(tokens[s]), "pass_rate": r} for s, r in scores
                ],
            }
        )
    lines = ",\n".join(f" {json.dumps(cell)}" for cell in cells)
    write_atomically(directory / "allocation.json", f"[\n{lines}\n]\n".encode())


class GridChoice(NamedTuple):
    """A choice for a budget, and the gains of the grid's cells with that budget."""

    chosen: BatchSize
    # cells whose score lies in the predicted interval, widened by the noise of 2,048
    # answers
    inside: int
    gains: dict[BatchSize, float]

    @property
    def share(self) -> float:
        return self.gains[self.chosen] / max(self.gains.values())


def judge(
    cells: Sequence[dict[str, Any]], fitted: Sequence[BatchSize], until: float, fixed: bool
) -> GridChoice:
    """Fit parts of some cells, up to a share of their rollouts, and choose among all
    cells.

    fixed: a step has fixed costs, estimated from the fitted cells, and the budget is
    the cheapest cell's cost. Otherwise a step costs only its rollouts, and the budget
    is all of a cell's rollouts.
    """
    runs = {(cell["prompts"], cell["generations"]): cell for cell in cells}
    curves = {batch: _curve(cell) for batch, cell in runs.items()}
    short = []
    for batch in fitted:
        seen = part_of(curves[batch], curves[batch].hours <= until * ROLLOUTS)
        short.append(CellRun(*batch, seen, runs[batch]["seconds"] / 1800))
    prices = measured(short, [*runs]) if fixed else {batch: float(np.prod(batch)) for batch in runs}
    budget = min(hours * (ROLLOUTS // np.prod(batch)) for batch, hours in prices.items())
    ranked, _ = choose(CellLaw(short), prices, float(budget) + 1e-9)
    start = float(np.mean([curve.r0 for curve in curves.values()]))
    scores = {}
    for choice in ranked:
        curve = curves[choice.batch]
        rollouts = np.prod(choice.batch) * choice.steps
        scores[choice.batch] = float(
            np.interp(np.log(rollouts), np.log(curve.hours), curve.pass_rate)
        )
    noise = 1.96 * np.sqrt(0.25 / 2048)
    inside = sum(c.interval[0] - noise <= scores[c.batch] <= c.interval[1] + noise for c in ranked)
    return GridChoice(
        ranked[0].batch, inside, {batch: score - start for batch, score in scores.items()}
    )


def _curve(cell: dict[str, Any]) -> Curve:
    first, *later = cell["points"]
    rollouts = np.array(
        [row["step"] * cell["prompts"] * cell["generations"] for row in later], float
    )
    rates = np.array([row["pass_rate"] for row in later])
    return Curve("", rollouts, rates, first["pass_rate"], "core", answers=cell["answers"])


def score() -> None:
    cells = json.loads(RESULTS.read_text())
    ran = [(cell["prompts"], cell["generations"]) for cell in cells]
    for fixed in (False, True):
        print(f"\na step costs {'a fixed part and its rollouts' if fixed else 'its rollouts'}")
        best = judge(cells, ran[:FITTED], SHORT, fixed)
        for batch, gain in sorted(best.gains.items(), key=lambda item: -item[1]):
            print(
                f"  {batch[0]:>3} x {batch[1]:<3} gain"
                f" {gain:.3f}{'  chosen' * (batch == best.chosen)}"
            )
        print(
            f"  {best.share:.2f} of the best gain; {best.inside} of {len(ran)} scores inside their"
            " intervals"
        )
        some = list(combinations(ran, FEW))
        some = [some[n] for n in np.random.default_rng(0).permutation(len(some))[:SUBSETS]]
        others = [judge(cells, chosen, SHORT, fixed) for chosen in some]
        shares = np.array([other.share for other in others])
        inside = np.sum([other.inside for other in others]) / (len(ran) * len(others))
        random = np.mean([*best.gains.values()]) / max(best.gains.values())
        print(
            f"  {len(others)} choices from {FEW} cells: {shares.mean():.2f} of the best gain, at"
            f" least {shares.min():.2f},"
        )
        print(
            f"  {np.mean(shares >= 0.9):.0%} of them .9 or more; {inside:.0%} of the scores inside;"
            f" a random cell: {random:.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("directory", type=Path)
    running.add_argument("--task", type=int)
    commands.add_parser("score")
    options = parser.parse_args(arguments)
    if options.command == "score":
        score()
    if options.command == "run":
        study = plan.prepare(options.directory, recipes(options.directory), [0])
        tasks = study.tasks if options.task is None else [study.tasks[options.task]]
        run(study, tasks, Console(), StudyHooks(before, done=lambda _: record(options.directory)))


if __name__ == "__main__":
    main()
