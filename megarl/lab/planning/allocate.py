"""`megarl plan RECIPE --allocate HOURS --curves RUN,RUN…`: the batch size and the steps
on which a budget is best spent.

    short runs with a few batch sizes ─► scaling/cells.py: score of (P, G) after n rollouts ─┐
    hours of their steps, or layouts.py with --gpus, --gpu: price of a step with (P, G) ─────┴─► T = budget / price; best (P, G)

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

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, latest_rows, latest_scores
from megarl.core.recipe import Recipe, differences, load
from megarl.lab.planning import show
from megarl.lab.planning.layouts import PlanningProblem, as_written, changed, search
from megarl.lab.planning.workload import workload
from megarl.lab.scaling.cells import CellLaw, CellRun
from megarl.lab.scaling.points import PointColumns, amount, binomial_noise, read_points

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
    recipe = load(str(RunDir.opened(path).recipe))
    rundir = RunDir(path)
    if recipe.run.fork:
        why = "whose first steps its parent made, perhaps with another batch"
        raise MegarlError(f"{path}: a fork, {why}; give runs that made all of their steps")
    (curve,) = read_points(path, PointColumns(hours="step"))
    hours = np.diff(
        [row["training_hours"] for row in latest_rows(rundir.metrics) if "training_hours" in row]
    )
    # The median, because steps waited while servers were reserved for an evaluation.
    if not len(hours) or not (one := float(np.median(hours))) > 0:
        raise MegarlError(
            f"{path}: fewer than two steps, so the time of a step is unknown; train further"
        )
    batch = (recipe.batch.prompts, recipe.sampling.generations)
    unit = latest_scores(rundir.eval)[-1]["compute_unit"]
    return CellRun(*batch, replace(curve, hours=curve.hours * batch[0] * batch[1], unit=unit), one)


def measured(runs: Sequence[CellRun], batches: Sequence[BatchSize]) -> dict[BatchSize, float]:
    """Return device-hours of a step by batch size, fitted to the runs': a part per
    step, one per rollout, neither below 0.
    """
    hours, rollouts = np.array(
        [(run.device_hours, run.prompts * run.generations) for run in runs]
    ).T
    fixed, each = np.linalg.lstsq(
        np.column_stack([1 / hours, rollouts / hours]), np.ones(len(runs)), rcond=None
    )[0]
    if min(fixed, each) < 0 or np.ptp(rollouts) == 0:
        fixed, each = (
            (0.0, float((hours / rollouts).mean())) if each > 0 else (float(hours.mean()), 0.0)
        )
    return {(p, g): float(fixed + each * p * g) for p, g in batches}


def planned(posed: PlanningProblem, batches: Sequence[BatchSize]) -> dict[BatchSize, float]:
    """Return GPU-hours of a step for each batch size, with the layout that is best for
    the recipe; where that does not fit, with the best other one. A batch size for which
    nothing fits is left out.
    """
    best = search(posed).plans
    prices = {}
    layout = best[0].recipe if best else posed.recipe
    for prompts, generations in batches:
        recipe = changed(
            changed(layout, "batch", prompts=prompts), "sampling", generations=generations
        )
        work = workload(recipe, posed.work.lengths, posed.work.trained_share, recipe.run.seed)
        there = replace(posed, recipe=recipe, work=work)
        plan = as_written(there)
        for found in search(there).plans[:1] if isinstance(plan, str) else [plan]:
            prices[prompts, generations] = found.gpus * found.step_seconds / 3600
    return prices


def candidates(runs: Sequence[CellRun], written: BatchSize) -> list[BatchSize]:
    """Return the batch sizes to choose from: powers of two up to twice beyond the
    runs', the runs' own, and the recipe's.
    """
    axes = []
    for own in zip(*(run.batch for run in runs), strict=True):
        low = max(2, min(own) // 2)
        high = 2 * max(own)
        axes.append(sorted({1 << n for n in range(high.bit_length()) if low <= 1 << n} | set(own)))
    return list(dict.fromkeys([*product(axes[0], axes[1]), written]))


def choose(
    law: CellLaw, prices: Mapping[BatchSize, float], budget: float
) -> tuple[list[BatchChoice], np.ndarray]:
    """Return affordable batch sizes, best first, and draws [draws, choices] of their
    scores. MegarlError if there are none.
    """
    steps = {batch: int(budget / hours) for batch, hours in prices.items() if hours <= budget}
    if not steps:
        raise MegarlError(
            f"--allocate: {amount(budget)} hours do not pay for one step of any batch; give more"
        )
    scores = law.scores(np.array([*steps]), np.array([p * g * t for (p, g), t in steps.items()]))
    first = np.bincount(scores.argmax(1), minlength=len(steps)) / len(scores)
    middle = scores.mean(0)
    (low, high) = np.quantile(scores, (0.025, 0.975), axis=0)
    order = np.argsort(-middle)
    rows = [
        BatchChoice(
            batch,
            t,
            prices[batch],
            float(middle[n]),
            (float(low[n]), float(high[n])),
            float(first[n]),
        )
        for n, (batch, t) in enumerate(steps.items())
    ]
    return [rows[n] for n in order], scores[:, order]


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
    rows = []
    each = []
    for path in paths:
        recipe = load(str(RunDir(path).recipe))
        suffix = recipe.forecast_column.removeprefix("pass_rate")
        resources = recipe.resources
        for row in latest_scores(RunDir(path).eval):
            rows.append(
                {
                    key.removesuffix(suffix): value
                    for key, value in row.items()
                    if key.endswith(suffix)
                }
            )
            cores = 1 if row["compute_unit"] == "gpu" else resources.threads
            held = row.get("servers", math.nan) * resources.server_tensor_parallel * cores
            asked = [
                "",
                *(f"/{suite}" for suite in recipe.evaluation.suites if f"n_prompts/{suite}" in row),
            ]
            given = sum(
                row[f"n_prompts{part}"] * row[f"samples{part}"] for part in asked
            )  # answers in row["seconds"]
            each.append(row.get("seconds", math.nan) * held / 3600 / given)
    one = float(np.median([cost for cost in each if math.isfinite(cost)] or [math.inf]))
    found = []
    for n in sorted(
        {int(name[5:]) for row in rows for name in row if re.fullmatch(r"pass@\d+", name)}
    ):
        left = budget - answers * n * one
        if left >= min(prices.values()):
            ranked, draws = choose(law, prices, left)
            scores = [_of_n(rows, f"{kind}@{n}", draws[:, 0]) for kind in ("maj", "pass")]
            found.append(BudgetSplit(n, ranked[0], *scores))
    if not found:
        what = f"one answer to each prompt takes {amount(answers * one)} hours"
        what = what if one < math.inf else "no evaluation tells the cost"
        raise MegarlError(f"--answers: {what}; nothing is left to train")
    return found


def _of_n(rows: Sequence[dict[str, float]], name: str, single: np.ndarray) -> float | None:
    """Return the mean score `name` of n answers, from draws `single` of that of one;
    None if under ROWS evaluations have it.
    """
    if name.endswith("@1"):
        return float(single.mean())
    pairs = np.array([(row["pass_rate"], row[name]) for row in rows if name in row]).clip(
        1e-3, 1 - 1e-3
    )
    if len(pairs) < ROWS or np.ptp(pairs[:, 0]) == 0:
        return None
    logits = np.log(pairs / (1 - pairs))
    single = single.clip(1e-3, 1 - 1e-3)
    slope, intercept = np.polyfit(logits[:, 0], logits[:, 1], 1)
    return float((1 / (1 + np.exp(-intercept - slope * np.log(single / (1 - single))))).mean())


def main(
    recipe: Recipe,
    budget: float,
    paths: Sequence[Path],
    answers: int | None,
    posed: PlanningProblem | None,
    as_json: bool,
) -> int:
    """Fit, choose, print. budget: device-hours; answers: prompts that it must also
    answer; posed: None for measured prices.
    """
    if not 0 < budget < 1e12:
        raise MegarlError(
            f"--allocate is {budget:g}; it is a budget of device-hours, above 0 and below 1e12"
        )
    if len({path.resolve() for path in paths}) < len(paths):
        raise MegarlError("--curves: a run is named twice, and would count twice")
    runs = [read_run(path) for path in paths]
    if len(units := {run.curve.unit for run in runs}) > 1 or (posed and units != {"gpu"}):
        advice = "give runs of one kind, and --gpus only with runs on GPUs"
        raise MegarlError(f"--curves: hours of CPU cores and of GPUs are different; {advice}")
    law = CellLaw(runs)
    written = (recipe.batch.prompts, recipe.sampling.generations)
    batches = candidates(runs, written)
    prices = planned(posed, batches) if posed else measured(runs, batches)
    ranked = choose(law, prices, budget)[0]
    divided = splits(law, prices, budget, answers, paths) if answers else []
    said = list(_caveats(recipe, runs, paths, ranked[0], law, prices if posed else {}))
    if as_json:
        split = [s._asdict() | {"chosen": s.chosen._asdict()} for s in divided]
        terminal.say(
            json.dumps(
                {"choices": [c._asdict() for c in ranked], "splits": split, "caveats": said},
                indent=2,
            )
        )
        return 0
    headings = (
        "prompts",
        "rollouts\na prompt",
        "steps",
        "hours\na step",
        "score",
        "95 %",
        "chance to\nbe best",
    )
    table = show.narrow("", *headings)
    for n, c in enumerate(ranked, 1):
        if n <= BEST or c.batch == written:
            score, low, high = (f"{value:.3f}" for value in (c.score, *c.interval))
            figures = f"{c.steps:,}", f"{c.hours:.3g}", score, f"{low} … {high}", f"{c.first:.0%}"
            table.add_row(
                "as written" if c.batch == written else str(n), *map(str, c.batch), *figures
            )
    console = terminal.console()
    console.print(f"{amount(budget, runs[0].curve.unit)} buy", table)
    if divided:
        titles = (
            "answers\na prompt",
            "prompts x\nrollouts",
            "steps",
            "one",
            "by\nmajority",
            "by an\noracle",
        )
        table = show.narrow("", *titles)
        for n, c, *of_n in divided:
            scores = ["–" if score is None else f"{score:.3f}" for score in (c.score, *of_n)]
            table.add_row("", str(n), "{} x {}".format(*c.batch), f"{c.steps:,}", *scores)
        console.print(f"\nor training, and then n answers to each of {answers:,} prompts", table)
    terminal.say(*(f"note: {text}" for text in said), sep="\n")
    return 0


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
    if (further := math.prod(best.batch) * best.steps / law.scale) > FURTHER:
        yield (
            f"the budget is {further:.0f} times the rollouts of the longest run: intervals so far"
            " from it are not tested"
        )
    for run in runs:
        rates = np.array(
            [
                run.curve.pass_rate[0] if run.curve.r0 is None else run.curve.r0,
                run.curve.pass_rate[-1],
            ]
        )
        if np.diff(rates) < 2 * np.linalg.norm(binomial_noise(rates, run.curve.answers or 1)):
            yield (
                f"{run.curve.name} ends at {rates[1]:.3f}, not clearly above {rates[0]:.3f}: the"
                " law can only rise"
            )
    of_runs = zip(*(run.batch for run in runs), strict=True)
    for what, at, own in zip(("prompts", "rollouts a prompt"), best.batch, of_runs, strict=True):
        if len(set(own)) == 1:
            yield (
                f"all runs have {own[0]} {what}: the effect of another number is a guess from other"
                " runs"
            )
        elif not min(own) <= at <= max(own):
            yield (
                f"the best has {at} {what}, the runs {min(own)} to {max(own)}: try it in a short"
                " run first"
            )
    if plans:
        more = np.median(
            [run.device_hours / plans[run.batch] for run in runs if run.batch in plans]
            or [math.nan]
        )
        yield f"the runs' own steps took {more:.2g} times what is planned for them"
    elif len({math.prod(run.batch) for run in runs}) == 1:
        yield (
            "all runs have equally many rollouts a step, so the cost of a step without its rollouts"
            " is unknown"
        )
    first, *others = (load(str(RunDir(path).recipe)) for path in paths)
    keys = {
        key
        for other in (*others, recipe)
        for key, *_ in differences(first, other)
        if not key.startswith(FREE)
    }
    if keys:
        yield f"the runs and the recipe differ in more than the batch: {', '.join(sorted(keys))}"
