"""`megarl plan RECIPE --allocate HOURS --curves RUN,RUN…`: the batch size and the steps
on which a budget is best spent.

    short runs with a few batch sizes
        ─► scaling/cells.py: score of (P, G) after n rollouts    ─┐
    hours of their steps, or layouts.py with --gpus, --gpu        │
        ─► price of a step with (P, G) ───────────────────────────┴─► T = budget / price
                                                                      best (P, G)

P is the number of prompts, G that of rollouts per prompt. A price has a part per step
and a part per rollout (publication and bubbles do not grow with rollouts), so with
small batches a budget buys fewer rollouts. With --answers Q the budget must also pay
for n answers to each of Q prompts, which leaves fewer steps for larger n. The score of
n answers, by majority or oracle, follows from that of one answer by a line between
their logits, which is fitted to the runs' evaluations for each n.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores
from megarl.core.recipe import Recipe, differences, load
from megarl.predict.planning import show
from megarl.predict.planning.layouts import PlanningProblem, as_written, changed, search
from megarl.predict.planning.workload import workload
from megarl.predict.scaling.cells import CellLaw, CellRun
from megarl.predict.scaling.points import PointColumns, amount, binomial_noise, read_points

BatchSize = tuple[int, int]  # prompts, and rollouts per prompt
BEST = 5
ROWS = 3
FURTHER = 10.0  # times the rollouts of the longest run
FREE = ("run.", "evaluation.", "checkpoint.", "resources.", "batch.prompts", "sampling.generations")
"""Keys in which runs may differ and still follow one law."""


class BatchChoice(NamedTuple):
    """A batch size, the steps that the budget buys, and the score after them. first:
    the chance that no other is better.
    """

    batch: BatchSize
    steps: int
    hours: float  # of a step
    score: float
    interval: tuple[float, float]
    first: float


class BudgetSplit(NamedTuple):
    """The best training with what n answers per prompt leave of the budget. majority,
    oracle: their scores; None: unknown.
    """

    n: int
    chosen: BatchChoice
    majority: float | None
    oracle: float | None


def read_run(path: Path) -> CellRun:
    """Read a run directory as a point of the grid."""
    rundir = RunDir.opened(path)
    recipe = load(str(rundir.recipe))
    if recipe.run.fork:
        raise MegarlError(
            f"{path}: a fork, whose first steps its parent made, perhaps with another batch; give"
            " runs that made all of their steps"
        )
    (curve,) = read_points(path, PointColumns(hours="step"))
    rows = latest_rows(rundir.metrics)
    step_hours = np.diff([row["training_hours"] for row in rows if "training_hours" in row])
    # The median, because steps waited while servers were reserved for an evaluation.
    median = float(np.median(step_hours)) if len(step_hours) else 0.0
    if not median > 0:
        raise MegarlError(
            f"{path}: fewer than two steps, so the time of a step is unknown; train further"
        )
    prompts = recipe.batch.prompts
    generations = recipe.sampling.generations
    unit = latest_scores(rundir.eval)[-1]["compute_unit"]
    over_rollouts = replace(curve, hours=curve.hours * prompts * generations, unit=unit)
    return CellRun(prompts, generations, over_rollouts, median)


def measured(runs: Sequence[CellRun], batches: Sequence[BatchSize]) -> dict[BatchSize, float]:
    """Return device-hours of a step by batch size, fitted to the runs': a part per
    step, one per rollout, neither below 0.
    """
    hours, rollouts = np.array(
        [(run.device_hours, run.prompts * run.generations) for run in runs]
    ).T
    relative = np.column_stack([1 / hours, rollouts / hours])
    per_step, per_rollout = np.linalg.lstsq(relative, np.ones(len(runs)), rcond=None)[0]
    if min(per_step, per_rollout) < 0 or np.ptp(rollouts) == 0:
        if per_rollout > 0:
            per_step = 0.0
            per_rollout = float((hours / rollouts).mean())
        else:
            per_step = float(hours.mean())
            per_rollout = 0.0
    prices = {}
    for prompts, generations in batches:
        price = per_step + per_rollout * prompts * generations
        prices[prompts, generations] = float(price)
    return prices


def planned(problem: PlanningProblem, batches: Sequence[BatchSize]) -> dict[BatchSize, float]:
    """Return GPU-hours of a step for each batch size, with the layout that is best for
    the recipe; where that does not fit, with the best other one. A batch size for which
    nothing fits is left out.
    """
    best = search(problem).plans
    prices = {}
    layout = best[0].recipe if best else problem.recipe
    for prompts, generations in batches:
        recipe = changed(layout, "batch", prompts=prompts)
        recipe = changed(recipe, "sampling", generations=generations)
        work = workload(recipe, problem.work.lengths, problem.work.trained_share, recipe.run.seed)
        with_batch = replace(problem, recipe=recipe, work=work)
        plan = as_written(with_batch)
        plans = search(with_batch).plans if isinstance(plan, str) else [plan]
        if plans:
            chosen = plans[0]
            prices[prompts, generations] = chosen.gpus * chosen.step_seconds / 3600
    return prices


def candidates(runs: Sequence[CellRun], written: BatchSize) -> list[BatchSize]:
    """Return the batch sizes to choose from: powers of two up to twice beyond the
    runs', the runs' own, and the recipe's.
    """
    prompts = _axis([run.prompts for run in runs])
    generations = _axis([run.generations for run in runs])
    return list(dict.fromkeys([*product(prompts, generations), written]))


def _axis(sizes: Sequence[int]) -> list[int]:
    """Return these sizes, and the powers of two from half the smallest, but at least 2,
    to twice the largest.
    """
    low = max(2, min(sizes) // 2)
    high = 2 * max(sizes)
    powers = {1 << n for n in range(high.bit_length()) if low <= 1 << n}
    return sorted(powers | set(sizes))


def choose(
    law: CellLaw, prices: Mapping[BatchSize, float], budget: float
) -> tuple[list[BatchChoice], np.ndarray]:
    """Return affordable batch sizes, best first, and draws [draws, choices] of their
    scores. MegarlError if there are none.
    """
    affordable = {batch: hours for batch, hours in prices.items() if hours <= budget}
    steps = {batch: int(budget / hours) for batch, hours in affordable.items()}
    if not steps:
        raise MegarlError(
            f"--allocate: {amount(budget)} hours do not pay for one step of any batch; give more"
        )
    rollouts = np.array([math.prod(batch) * count for batch, count in steps.items()])
    scores = law.scores(np.array([*steps]), rollouts)
    first = np.bincount(scores.argmax(1), minlength=len(steps)) / len(scores)
    means = scores.mean(0)
    low, high = np.quantile(scores, (0.025, 0.975), axis=0)
    order = np.argsort(-means)
    choices = []
    for n, (batch, count) in enumerate(steps.items()):
        choice = BatchChoice(
            batch=batch,
            steps=count,
            hours=prices[batch],
            score=float(means[n]),
            interval=(float(low[n]), float(high[n])),
            first=float(first[n]),
        )
        choices.append(choice)
    return [choices[n] for n in order], scores[:, order]


def splits(
    law: CellLaw,
    prices: Mapping[BatchSize, float],
    budget: float,
    answers: int,
    paths: Sequence[Path],
) -> list[BudgetSplit]:
    """Return the best training for each number n of answers to each of `answers`
    prompts. MegarlError if none is affordable.
    """
    rows, answer_hours = _evaluations(paths)
    finite_hours = [hours for hours in answer_hours if math.isfinite(hours)]
    hours_of_one = float(np.median(finite_hours or [math.inf]))
    columns = {name for row in rows for name in row}
    numbers = sorted(int(name[5:]) for name in columns if re.fullmatch(r"pass@\d+", name))
    affordable = []
    for n in numbers:
        remaining = budget - answers * n * hours_of_one
        if remaining < min(prices.values()):
            continue
        ranked, draws = choose(law, prices, remaining)
        majority = _of_n(rows, f"maj@{n}", draws[:, 0])
        oracle = _of_n(rows, f"pass@{n}", draws[:, 0])
        affordable.append(BudgetSplit(n, ranked[0], majority, oracle))
    if not affordable:
        reason = "no evaluation tells the cost"
        if hours_of_one < math.inf:
            reason = f"one answer to each prompt takes {amount(answers * hours_of_one)} hours"
        raise MegarlError(f"--answers: {reason}; nothing is left to train")
    return affordable


def _evaluations(paths: Sequence[Path]) -> tuple[list[dict[str, float]], list[float]]:
    """Return for each evaluation of the runs: the columns of the score to forecast, by
    names without its task, and the device-hours of an answer (NaN: unknown).
    """
    rows = []
    answer_hours = []
    for path in paths:
        recipe = load(str(RunDir(path).recipe))
        suffix = recipe.forecast_column.removeprefix("pass_rate")
        for row in latest_scores(RunDir(path).eval):
            of_task = [key for key in row if key.endswith(suffix)]
            rows.append({key.removesuffix(suffix): row[key] for key in of_task})
            answer_hours.append(_answer_hours(recipe, row))
    return rows, answer_hours


def _answer_hours(recipe: Recipe, row: Row) -> float:
    """Return the device-hours of an answer in an evaluation."""
    resources = recipe.resources
    cores = 1 if row["compute_unit"] == "gpu" else resources.threads
    devices = row.get("servers", math.nan) * resources.server_tensor_parallel * cores
    # Which parts are in row["seconds"]: the tasks, and suites that were asked.
    answers = row["n_prompts"] * row["samples"]
    for suite in recipe.evaluation.suites:
        if f"n_prompts/{suite}" in row:
            answers += row[f"n_prompts/{suite}"] * row[f"samples/{suite}"]
    device_seconds = row.get("seconds", math.nan) * devices
    return device_seconds / 3600 / answers


def _of_n(rows: Sequence[dict[str, float]], name: str, single: np.ndarray) -> float | None:
    """Return the mean score `name` of n answers, from draws `single` of that of one;
    None if under ROWS evaluations have it.
    """
    if name.endswith("@1"):
        return float(single.mean())
    pairs = np.array([(row["pass_rate"], row[name]) for row in rows if name in row])
    pairs = pairs.clip(1e-3, 1 - 1e-3)
    if len(pairs) < ROWS or np.ptp(pairs[:, 0]) == 0:
        return None
    logits = np.log(pairs / (1 - pairs))
    single = single.clip(1e-3, 1 - 1e-3)
    single_logits = np.log(single / (1 - single))
    logits_of_one, logits_of_n = logits.T
    slope, intercept = np.polyfit(logits_of_one, logits_of_n, 1)
    odds_against = np.exp(-intercept - slope * single_logits)
    scores = 1 / (1 + odds_against)
    return float(scores.mean())


def main(
    recipe: Recipe,
    budget: float,
    paths: Sequence[Path],
    answers: int | None,
    problem: PlanningProblem | None,
    as_json: bool,
) -> int:
    """Fit, choose, print. budget: device-hours; answers: prompts that it must also
    answer; problem: None for measured prices.
    """
    if not 0 < budget < 1e12:
        raise MegarlError(
            f"--allocate is {budget:g}; it is a budget of device-hours, above 0 and below 1e12"
        )
    if len({path.resolve() for path in paths}) < len(paths):
        raise MegarlError("--curves: a run is named twice, and would count twice")
    runs = [read_run(path) for path in paths]
    units = {run.curve.unit for run in runs}
    if len(units) > 1 or (problem and units != {"gpu"}):
        raise MegarlError(
            "--curves: hours of CPU cores and of GPUs are different; give runs of one kind, and"
            " --gpus only with runs on GPUs"
        )
    law = CellLaw(runs)
    written = (recipe.batch.prompts, recipe.sampling.generations)
    batches = candidates(runs, written)
    prices = planned(problem, batches) if problem else measured(runs, batches)
    ranked = choose(law, prices, budget)[0]
    divided = splits(law, prices, budget, answers, paths) if answers else []
    plans = prices if problem else {}
    caveats = list(_caveats(recipe, runs, paths, ranked[0], law, plans))
    if as_json:
        terminal.say(json.dumps(_record(ranked, divided, caveats), indent=2))
        return 0
    console = terminal.console()
    console.print(f"{amount(budget, runs[0].curve.unit)} buy", _choices(ranked, written))
    if divided:
        console.print(
            f"\nor training, and then n answers to each of {answers:,} prompts", _splits(divided)
        )
    terminal.say(*(f"note: {text}" for text in caveats), sep="\n")
    return 0


def _record(
    ranked: Sequence[BatchChoice], divided: Sequence[BudgetSplit], caveats: Sequence[str]
) -> dict[str, object]:
    """Return what is printed, unrounded, for JSON."""
    return {
        "choices": [choice._asdict() for choice in ranked],
        "splits": [split._asdict() | {"chosen": split.chosen._asdict()} for split in divided],
        "caveats": caveats,
    }


def _choices(ranked: Sequence[BatchChoice], written: BatchSize) -> Table:
    """Make a table of the best batch sizes, and of the recipe's."""
    table = show.narrow(
        "",
        "prompts",
        "rollouts\na prompt",
        "steps",
        "hours\na step",
        "score",
        "95 %",
        "chance to\nbe best",
    )
    for n, choice in enumerate(ranked, 1):
        is_written = choice.batch == written
        if n > BEST and not is_written:
            continue
        prompts, generations = choice.batch
        low, high = choice.interval
        table.add_row(
            "as written" if is_written else str(n),
            str(prompts),
            str(generations),
            f"{choice.steps:,}",
            f"{choice.hours:.3g}",
            f"{choice.score:.3f}",
            f"{low:.3f} … {high:.3f}",
            f"{choice.first:.0%}",
        )
    return table


def _splits(divided: Sequence[BudgetSplit]) -> Table:
    """Make a table of the best training for each number of answers."""
    table = show.narrow(
        "",
        "answers\na prompt",
        "prompts x\nrollouts",
        "steps",
        "one",
        "by\nmajority",
        "by an\noracle",
    )
    for split in divided:
        chosen = split.chosen
        prompts, generations = chosen.batch
        scores = []
        for score in (chosen.score, split.majority, split.oracle):
            scores.append("–" if score is None else f"{score:.3f}")
        batch = f"{prompts} x {generations}"
        table.add_row("", str(split.n), batch, f"{chosen.steps:,}", *scores)
    return table


def _caveats(
    recipe: Recipe,
    runs: Sequence[CellRun],
    paths: Sequence[Path],
    best: BatchChoice,
    law: CellLaw,
    plans: Mapping[BatchSize, float],
) -> Iterator[str]:
    """Yield notes on what the runs do not support. plans: the planner's prices, empty
    if prices are measured.
    """
    multiple = math.prod(best.batch) * best.steps / law.scale
    if multiple > FURTHER:
        yield (
            f"the budget is {multiple:.0f} times the rollouts of the longest run: intervals so far"
            " from it are not tested"
        )
    yield from _flat_runs(runs)
    prompts, generations = best.batch
    yield from _untried("prompts", prompts, [run.prompts for run in runs])
    yield from _untried("rollouts a prompt", generations, [run.generations for run in runs])
    if plans:
        ratios = [run.device_hours / plans[run.batch] for run in runs if run.batch in plans]
        ratio = np.median(ratios or [math.nan])
        yield f"the runs' own steps took {ratio:.2g} times what is planned for them"
    elif len({math.prod(run.batch) for run in runs}) == 1:
        yield (
            "all runs have equally many rollouts a step, so the cost of a step without its rollouts"
            " is unknown"
        )
    recipes = [load(str(RunDir(path).recipe)) for path in paths]
    keys = set()
    for compared in [*recipes[1:], recipe]:
        for key, *_ in differences(recipes[0], compared):
            if not key.startswith(FREE):
                keys.add(key)
    if keys:
        yield f"the runs and the recipe differ in more than the batch: {', '.join(sorted(keys))}"


def _flat_runs(runs: Sequence[CellRun]) -> Iterator[str]:
    """Yield a note on each run whose score has not clearly risen."""
    for run in runs:
        curve = run.curve
        first = curve.pass_rate[0] if curve.r0 is None else curve.r0
        rates = np.array([first, curve.pass_rate[-1]])
        noise = np.linalg.norm(binomial_noise(rates, curve.answers or 1))
        if np.diff(rates) < 2 * noise:
            yield (
                f"{curve.name} ends at {rates[1]:.3f}, not clearly above {rates[0]:.3f}: the"
                " law can only rise"
            )


def _untried(quantity: str, best: int, sizes: Sequence[int]) -> Iterator[str]:
    """Yield a note if the best value of a quantity is not between those of the runs."""
    if len(set(sizes)) == 1:
        yield (
            f"all runs have {sizes[0]} {quantity}: the effect of another number is a guess from"
            " other runs"
        )
    elif not min(sizes) <= best <= max(sizes):
        yield (
            f"the best has {best} {quantity}, the runs {min(sizes)} to {max(sizes)}: try it in a"
            " short run first"
        )
