"""`megarl plan RECIPE --allocate HOURS --curves RUN,RUN…`: the batch, and the steps, that a budget is best spent on.

    short runs of a few batches ─► scaling/cells.py: score of (P, G) after n rollouts ─┐
    hours of their steps, or layouts.py with --gpus, --gpu: price of a step of (P, G) ─┴─► T = budget / price; the best (P, G)

A price has a part for the step and a part for its rollouts (publication and bubbles do not grow with them), so a budget buys
small batches fewer rollouts. With --answers Q it also pays n answers to each of Q prompts, and so fewer steps for larger n;
their score by majority or oracle goes with that of one answer as in the runs' evaluations: a line between logits for each n.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, latest_rows, latest_scores
from megarl.core.recipe import Recipe, differences, load
from megarl.lab.planning import show
from megarl.lab.planning.layouts import PlanningProblem, as_written, search
from megarl.lab.planning.workload import workload
from megarl.lab.scaling.cells import CellLaw, CellRun
from megarl.lab.scaling.points import PointColumns, amount, read_points

StepPrice = Callable[[int, int], float | None]  # device-hours of a step of P x G; None: impossible
BEST, ROWS = 5, 3
FURTHER = 10.0  # times the rollouts of the longest run
FREE = (
    "run.",
    "description",
    "evaluation.",
    "checkpoint.",
    "resources.",
    "telemetry.",
    "batch.prompts",
    "sampling.generations",
)
"""Keys in which runs may differ and still be of one law."""


class BatchChoice(NamedTuple):
    """A batch, the steps that the budget buys, and the score after them. first: the chance that no other is better."""

    prompts: int
    generations: int
    steps: int
    hours: float  # of a step
    score: float
    interval: tuple[float, float]
    first: float

    @property
    def cell(self) -> tuple[int, int]:
        return self.prompts, self.generations


class BudgetSplit(NamedTuple):
    """Training for the budget less n answers a prompt. majority, oracle: of n answers; None: the evaluations do not tell."""

    n: int
    chosen: BatchChoice
    majority: float | None
    oracle: float | None


def read_run(path: Path) -> CellRun:
    """Read a run directory as a point of the grid."""
    recipe, rundir = load(str(RunDir.opened(path).recipe)), RunDir(path)
    (curve,) = read_points(path, PointColumns(hours="step"))
    hours = np.diff([row["training_hours"] for row in latest_rows(rundir.metrics)])
    if not len(hours):
        raise MegarlError(f"{path}: fewer than two steps, so what a step takes is not known; train further")
    batch = recipe.batch.prompts, recipe.sampling.generations
    # The median: steps during which the servers were held for an evaluation waited.
    return CellRun(*batch, replace(curve, hours=curve.hours * batch[0] * batch[1]), float(np.median(hours)))


def measured(runs: Sequence[CellRun]) -> StepPrice:
    """Price steps by those of the runs: a part for each step and a part for each rollout, neither below 0."""
    hours = np.array([run.device_hours for run in runs])
    parts = np.column_stack([np.ones(len(runs)), [run.prompts * run.generations for run in runs]]) / hours[:, None]
    fixed, rollout = np.linalg.lstsq(parts, np.ones(len(runs)), rcond=None)[0]
    if fixed < 0 or rollout < 0 or np.linalg.matrix_rank(parts * hours[:, None]) < 2:
        fixed, rollout = (
            (0.0, parts[:, 1].sum() / (parts[:, 1] ** 2).sum()) if rollout > 0 else (float(hours.mean()), 0.0)
        )
    return lambda prompts, generations: float(fixed + rollout * prompts * generations)


def planned(posed: PlanningProblem) -> StepPrice:
    """Price steps by the planner: with the layout that is best for the recipe's batch, or another where that is impossible."""
    best = search(posed).plans
    layout = best[0].recipe if best else posed.recipe

    def price(prompts: int, generations: int) -> float | None:
        recipe = _with_batch(layout, prompts, generations)
        work = workload(recipe, posed.work.lengths, posed.work.trained_share, recipe.run.seed)
        there = replace(posed, recipe=recipe, work=work)
        plan = as_written(there)
        found = next(iter(search(there).plans), None) if isinstance(plan, str) else plan
        return None if found is None else found.gpus * found.step_seconds / 3600

    return price


def _with_batch(recipe: Recipe, prompts: int, generations: int) -> Recipe:
    batch = recipe.batch.model_copy(update={"prompts": prompts})
    sampling = recipe.sampling.model_copy(update={"generations": generations})
    return recipe.model_copy(update={"batch": batch, "sampling": sampling})


def cells(runs: Sequence[CellRun], written: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the batches to choose from: powers of two up to twice beyond the runs', theirs, and the recipe's."""
    axes = []
    for own in zip(*(run.cell for run in runs), strict=True):
        low, high = max(2, min(own) // 2), 2 * max(own)
        axes.append(sorted({1 << n for n in range(high.bit_length()) if low <= 1 << n <= high} | set(own)))
    return list(dict.fromkeys([*product(axes[0], axes[1]), written]))


def choose(
    law: CellLaw, price: StepPrice, batches: Sequence[tuple[int, int]], budget: float
) -> tuple[list[BatchChoice], np.ndarray]:
    """Return all batches of which the budget pays a step, best first, and draws [draws, choices] of their scores."""
    priced = [(p, g, hours) for p, g in batches if (hours := price(p, g)) and hours <= budget]
    if not priced:
        raise MegarlError(f"--allocate: {amount(budget)} hours do not pay one step of any batch; give more")
    steps = [int(budget / hours) for *_, hours in priced]
    rollouts = np.array([p * g * t for (p, g, _), t in zip(priced, steps, strict=True)])
    scores = law.scores(np.array([row[:2] for row in priced]), rollouts)
    first = np.bincount(scores.argmax(1), minlength=len(priced)) / len(scores)
    low, high = np.quantile(scores, (0.025, 0.975), axis=0)
    rows = [
        BatchChoice(p, g, t, each, float(mean), (float(a), float(b)), float(chance))
        for (p, g, each), t, mean, a, b, chance in zip(priced, steps, scores.mean(0), low, high, first, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda n: -rows[n].score)
    return [rows[n] for n in order], scores[:, order]


def splits(
    law: CellLaw,
    price: StepPrice,
    batches: Sequence[tuple[int, int]],
    budget: float,
    answers: int,
    paths: Sequence[Path],
) -> list[BudgetSplit]:
    """Return the best training for each number n of answers to `answers` prompts."""
    rows, each = [], []
    for path in paths:
        recipe = load(str(RunDir(path).recipe))
        column, resources = recipe.forecast_column, recipe.resources
        for row in latest_scores(RunDir(path).eval):
            if not {"seconds", "servers"} <= row.keys():
                continue
            rows.append({name.removesuffix(column.removeprefix("pass_rate")): value for name, value in row.items()})
            cores = 1 if row["compute_unit"] == "gpu" else resources.threads
            devices = row["servers"] * resources.server_tensor_parallel * cores
            each.append(row["seconds"] * devices / 3600 / (row["n_prompts"] * row["samples"]))
    if not each:
        raise MegarlError("--answers: no evaluation of the runs tells how long it took")
    found, one = [], float(np.median(each))
    for n in sorted({int(name[5:]) for row in rows for name in row if name.startswith("pass@") and "_" not in name}):
        if (left := budget - answers * n * one) <= 0:
            break
        try:
            ranked, draws = choose(law, price, batches, left)
        except MegarlError:  # what is left pays no step
            break
        scores = [_of_n(rows, f"{kind}@{n}", draws[:, 0]) for kind in ("maj", "pass")]
        found.append(BudgetSplit(n, ranked[0], *scores))
    if not found:
        raise MegarlError(
            f"--answers: one answer to each prompt takes {amount(answers * one)} hours; nothing is left to train"
        )
    return found


def _of_n(rows: Sequence[dict[str, float]], name: str, single: np.ndarray) -> float | None:
    """Return the mean score of n answers where one has these draws of a score; None if fewer than ROWS evaluations have it."""
    if name.endswith("@1"):
        return float(single.mean())
    pairs = np.array([(row["pass_rate"], row[name]) for row in rows if name in row]).clip(1e-3, 1 - 1e-3)
    if len(pairs) < ROWS or np.ptp(pairs[:, 0]) == 0:
        return None
    logits = np.log(pairs / (1 - pairs))
    slope, intercept = np.polyfit(logits[:, 0], logits[:, 1], 1)
    single = single.clip(1e-3, 1 - 1e-3)
    return float((1 / (1 + np.exp(-intercept - slope * np.log(single / (1 - single))))).mean())


def main(
    recipe: Recipe,
    budget: float,
    paths: Sequence[Path],
    answers: int | None,
    posed: PlanningProblem | None,
    as_json: bool,
) -> int:
    """Fit, choose and print. budget: device-hours; answers: prompts that it also answers; posed: for the planner's prices."""
    if not budget > 0:
        raise MegarlError(f"--allocate is {budget:g}; it is a budget of device-hours, above 0")
    runs = [read_run(path) for path in paths]
    if len(units := {run.curve.unit for run in runs}) > 1 or (posed and units != {"gpu"}):
        raise MegarlError(
            "--curves: runs on CPU cores and on GPUs have different hours; give runs of one kind of device"
        )
    law, price = CellLaw(runs), planned(posed) if posed else measured(runs)
    written = recipe.batch.prompts, recipe.sampling.generations
    batches = cells(runs, written)
    ranked = choose(law, price, batches, budget)[0]
    divided = splits(law, price, batches, budget, answers, paths) if answers else []
    said = list(_caveats(recipe, runs, paths, ranked[0], law, price if posed else None))
    if as_json:
        split = [s._asdict() | {"chosen": s.chosen._asdict()} for s in divided]
        print(json.dumps({"choices": [c._asdict() for c in ranked], "splits": split, "caveats": said}, indent=2))
        return 0
    rows = {str(n): choice for n, choice in enumerate(ranked, 1) if n <= BEST or choice.cell == written}
    table = show.narrow(
        "", "prompts", "rollouts\na prompt", "steps", "hours\na step", "score", "95 %", "chance to\nbe best"
    )
    for name, c in rows.items():
        score, low, high = (f"{value:.3f}" for value in (c.score, *c.interval))
        cell = "as written" if c.cell == written else name
        table.add_row(
            cell, *map(str, c.cell), f"{c.steps:,}", f"{c.hours:.3g}", score, f"{low} … {high}", f"{c.first:.0%}"
        )
    console = Console(highlight=False)
    console.print(f"{amount(budget, runs[0].curve.unit)} buy", table)
    if divided:
        table = show.narrow(
            "", "answers\na prompt", "prompts x\nrollouts", "steps", "one", "by\nmajority", "by an\noracle"
        )
        for n, c, *of_n in divided:
            scores = ["–" if score is None else f"{score:.3f}" for score in (c.score, *of_n)]
            table.add_row("", str(n), f"{c.prompts} x {c.generations}", f"{c.steps:,}", *scores)
        console.print(f"\nor training, and then n answers to each of {answers:,} prompts", table)
    print(*(f"note: {text}" for text in said), sep="\n")
    return 0


def _caveats(
    recipe: Recipe,
    runs: Sequence[CellRun],
    paths: Sequence[Path],
    best: BatchChoice,
    law: CellLaw,
    plans: StepPrice | None,
) -> Iterator[str]:
    """Yield what the runs cannot support."""
    if (further := best.prompts * best.generations * best.steps / law.scale) > FURTHER:
        yield f"the budget is {further:.0f} times the rollouts of the longest run: intervals so far from it are not tested"
    of_runs = zip(*(run.cell for run in runs), strict=True)
    for what, at, own in zip(("prompts", "rollouts a prompt"), best.cell, of_runs, strict=True):
        if len(set(own)) == 1:
            yield f"all runs have {own[0]} {what}: what another number does is a guess from other runs"
        elif not min(own) <= at <= max(own):
            yield f"the best has {at} {what}, the runs {min(own)} to {max(own)}: try it in a short run first"
    if plans is None and len({run.prompts * run.generations for run in runs}) == 1:
        yield "all runs have as many rollouts a step, so what a step costs beside its rollouts is not known"
    if plans and (pairs := [run.device_hours / hours for run in runs if (hours := plans(*run.cell))]):
        yield f"the runs' own steps took {np.median(pairs):.2g} times what is planned for them"
    first, *others = (load(str(RunDir(path).recipe)) for path in paths)
    changed = {key for other in (*others, recipe) for key, *_ in differences(first, other) if not key.startswith(FREE)}
    if changed:
        yield f"the runs and the recipe differ in more than the batch: {', '.join(sorted(changed))}"
