"""`megarl study search`: successive halving. Every arm (a recipe) runs to a rung, the better half goes on, and so on.

    [trunk ─►] all arms ─► rung: the chance of each to be the best ─► STUDY/rungs/STEP.json ─► the better half ─► … winner

The chance is a share of draws from the posteriors of the arms' curves (scaling/posterior.py), for the recipes and not for their
scores so far: in a draw the highest asymptote A wins, and among those within 0.02 of it (`SAME_CEILING`) the highest B, of the
fits at one common A (scaling/compare.py). Where an arm cannot be fitted yet, draws of the last scores with the noise of
their answers stand in for all arms, and the rung says so. Hours are `training_hours`: each rung has a start-up of its own.

Halving: K. Jamieson, A. Talwalkar, arXiv 1502.07943, algorithm 1. A decision is a file, a function of rows up to its step
alone: whoever finds a rung's runs ended and no file makes it, and two who do make the same.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import latest_rows, latest_scores, write_atomically
from megarl.core.recipe import Recipe, load
from megarl.lab.scaling.compare import SAME_CEILING, compare
from megarl.lab.scaling.points import Curve, PointColumns, amount, curve_of_run
from megarl.lab.study import plan
from megarl.lab.study.main import StudyOptions, numbers, planned, run, side_by_side, table_and_plots
from megarl.lab.study.plan import Study, StudyTask

DRAWS = 4000
UNKNOWN_NOISE = 0.02  # standard deviation of a score of an unknown number of answers


class SearchOptions(NamedTuple):
    """vary: KEY=A,B each, whose products are the arms; rungs: "" for halves of the steps; branch: 0 for none."""

    vary: Sequence[str]
    rungs: str
    branch: int


class Standing(NamedTuple):
    """An arm at a rung. chance: that it is the best of them. A, its interval and B at the common A: None where not fitted."""

    arm: str
    chance: float
    score: float
    A: float | None = None
    A_interval: tuple[float, float] | None = None
    B: float | None = None


class Judgement(NamedTuple):
    """standings: the likeliest first. why: no asymptotes were compared; empty if they were. ceiling: the common A."""

    standings: tuple[Standing, ...]
    why: str = ""
    ceiling: float = 0.0

    def chance(self, arms: Sequence[str]) -> float:
        """Return the chance that the best arm is one of these."""
        return sum(one.chance for one in self.standings if one.arm in arms)


class Rung(NamedTuple):
    """A decision. failed: runs that did not get there."""

    step: int
    kept: tuple[str, ...]
    failed: tuple[str, ...]
    judgement: Judgement


def search(names: Sequence[str], options: StudyOptions, how: SearchOptions) -> int:
    """Search among recipes and what `vary` makes of them; with a task, only run that one's part of the present rung."""
    recipes = arms(names, options.overrides, how.vary)
    seeds, rungs = numbers("--seeds", options.seeds), _rungs(recipes, how)
    path = Path(options.directory or f"runs/studies/search-{next(iter(recipes))}")
    if options.dry_run:
        runs = f"{len(recipes)} arms x {len(seeds)} seeds, half of them dropped at each of steps {', '.join(map(str, rungs))}"
        Console().print(planned(f"{path}: {runs}", recipes))
        return 0
    study = plan.prepare(path, recipes, seeds, rungs, how.branch)
    if options.task is not None and not 0 <= options.task < len(study.tasks):
        raise MegarlError(f"--task: the search has tasks 0 to {len(study.tasks) - 1}, no {options.task}")
    return advance(study, Console(), options.task)


def arms(names: Sequence[str], overrides: Sequence[str], vary: Sequence[str]) -> dict[str, Recipe]:
    """Return the recipes to choose from by name: each of `names` with each combination of the values."""
    axes = []
    for axis in vary:
        key, equals, values = axis.partition("=")
        if not equals or not all(values.split(",")):
            raise MegarlError(f"--vary: {axis!r} is not KEY=A,B, such as learner.optimizer.lr=1e-4,2e-4")
        axes.append([f"{key}={value}" for value in values.split(",")])
    found = {}
    for combination in itertools.product(*axes):
        pairs = [said.partition("=") for said in combination]
        ends = [re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key.rpartition('.')[2]}-{value}") for key, _, value in pairs]
        for name, recipe in side_by_side(names, [*overrides, *combination]).items():
            found["-".join([name, *ends])] = recipe
    return found


def _rungs(recipes: Mapping[str, Recipe], how: SearchOptions) -> list[int]:
    """Return the steps at which half of the arms are dropped. MegarlError for what cannot be searched."""
    if len(recipes) < 2:
        raise MegarlError("a search needs two arms or more: name more recipes, or give --vary KEY=A,B")
    if len(lengths := {recipe.run.steps for recipe in recipes.values()}) > 1:
        raise MegarlError(f"run.steps: the arms have {sorted(lengths)}; give all the same, as key=value")
    for name, recipe in recipes.items():
        if recipe.learner.optimizer.schedule != "constant" or recipe.run.stop_when:
            key = "run.stop_when" if recipe.run.stop_when else "learner.optimizer.schedule"
            raise MegarlError(
                f"{name}: {key}: an arm that ends at a rung must be as far as one that goes on; take it out"
            )
        if not recipe.forecast_column:
            raise MegarlError(
                f"{name}: evaluation.forecast: of several tasks, say whose score the arms are compared by"
            )
    end, halvings = lengths.pop(), math.ceil(math.log2(len(recipes)))
    rungs = numbers("--rungs", how.rungs) if how.rungs else [end >> n for n in range(halvings, 0, -1)]
    if sorted(set(rungs)) != rungs or not how.branch < rungs[0] or rungs[0] < 1 or rungs[-1] >= end or how.branch < 0:
        said = f"--rungs {','.join(map(str, rungs))}, --branch {how.branch}"
        raise MegarlError(f"{said}: they have to rise, from the branch (0: none) to below run.steps, which is {end}")
    return rungs


def advance(study: Study, console: Console, index: int | None = None) -> int:
    """Go through the rungs, or run one task's part of the present one. Return 0; 1: a run failed; 128 + signal: stopped.

    Alone, a failed run is tried again as long as its rung is not decided; as one of several jobs it counts as ended.
    """
    alive, status = study.variants, 0
    ended = ("done",) if index is None else ("done", "failed")
    for stage in (study.trunk, *(replace(study, steps=step) for step in (*study.rungs, _total(study)))):
        if stage.variants == study.variants:
            stage = replace(stage, variants=alive)
            if (file := _file(study, stage.steps)).exists():
                alive = _read(file).kept
                continue
        missing = [task for task in stage.tasks if task.state() not in ended]
        if missing and index is not None:
            return run(stage, _part(study, index, missing), console)
        if missing and (status := max(status, run(stage, missing, console))) > 1:
            return status
        if stage.variants == ("trunk",):
            if failed := [str(task.log) for task in stage.tasks if task.state() != "done"]:
                raise MegarlError(f"{study.path}: no arm can branch from a trunk that failed; see {', '.join(failed)}")
        elif stage.steps in study.rungs:
            rung = decide(study, stage)
            console.print(*_lines(rung), sep="\n", highlight=False)
            alive, status = rung.kept, 0  # what failed is a result
    return status if index is not None else table_and_plots(study.path) or status


def _part(study: Study, index: int, tasks: Sequence[StudyTask]) -> list[StudyTask]:
    """Return the one of these tasks that is for the job with this index: its own, or, of its seed, the trunk."""
    own = study.tasks[index]
    mine = {own.name, f"trunk-seed{own.seed}"} if own.variant == study.variants[0] else {own.name}
    return [task for task in tasks if task.name in mine]


def _total(study: Study) -> int:
    return load(str(study.tasks[0].recipe)).run.steps


def _file(study: Study, step: int) -> Path:
    return study.path / "rungs" / f"{step}.json"


def decide(study: Study, stage: Study) -> Rung:
    """Decide which variants of the stage go on after its step: the better half of those that got there."""
    done = [task for task in stage.tasks if task.state() == "done"]
    failed = tuple(task.name for task in stage.tasks if task not in done)
    curves: dict[str, list[Curve]] = {}
    for task in done:
        curves.setdefault(task.variant, []).append(curve(task, stage.steps))
    if not curves:
        raise MegarlError(
            f"{study.path}: no run reached step {stage.steps}; see logs/, then the same command tries again"
        )
    judgement = judge(curves)
    kept = tuple(one.arm for one in judgement.standings[: math.ceil(len(curves) / 2)])
    rung = Rung(stage.steps, kept, failed, judgement)
    record = rung._asdict() | {
        "judgement": judgement._asdict() | {"standings": [s._asdict() for s in judgement.standings]}
    }
    write_atomically(_file(study, stage.steps), json.dumps(record, indent=2).encode())
    return rung


def _read(file: Path) -> Rung:
    record: dict[str, Any] = json.loads(file.read_text())
    judged = record["judgement"]
    standings = tuple(Standing(**one) for one in judged["standings"])
    judgement = Judgement(**judged | {"standings": standings})
    return Rung(record["step"], tuple(record["kept"]), tuple(record["failed"]), judgement)


def curve(task: StudyTask, until: int) -> Curve:
    """Return a run's scores up to a step, over the hours without start-up and evaluation."""
    columns = PointColumns("training_hours", load(str(task.recipe)).forecast_column)
    scores = [row for row in latest_scores(task.rundir.eval) if row["step"] <= until]
    steps = [row for row in latest_rows(task.rundir.metrics) if row["step"] < until]
    return curve_of_run(task.name, scores, steps, str(task.rundir.eval), columns)


def judge(curves: Mapping[str, Sequence[Curve]]) -> Judgement:
    """Compare arms, each by the curves of its seeds."""
    scores = {arm: float(np.mean([_last(one) for one in of_arm])) for arm, of_arm in curves.items()}
    why, fitted = "", None
    try:
        fitted = compare(curves)
        why = next((entry.problem for entry in fitted.entries if entry.fit is None), "")
    except MegarlError as error:  # at the common A a curve needs one point more
        why = str(error)
    rng = np.random.default_rng(0)
    if why or fitted is None or len(curves) < 2:
        drawn = np.array([_scores_drawn(of_arm, rng) for of_arm in curves.values()])
        won = chances(drawn, drawn, within=0.0)
        standings = [Standing(arm, float(p), scores[arm]) for arm, p in zip(curves, won, strict=True)]
        return Judgement(_best_first(standings), why)
    fits = {entry.name: entry.fit for entry in fitted.entries if entry.fit is not None}
    # Draws are in the order of a grid, the same for each arm: shuffled, they are independent.
    a = np.array([rng.permutation(one.posterior.theta[:, 0]) for one in fits.values()])
    b = np.array([rng.permutation(fitted.at_ceiling[arm].posterior.theta[:, 2]) for arm in fits])  # the logarithm of B
    won = chances(a, b)
    standings = [
        Standing(arm, float(p), scores[arm], one.A, one.A_interval, fitted.at_ceiling[arm].B)
        for (arm, one), p in zip(fits.items(), won, strict=True)
    ]
    return Judgement(_best_first(standings), "", fitted.ceiling)


def chances(a: np.ndarray, b: np.ndarray, within: float = SAME_CEILING) -> np.ndarray:
    """Return how often each arm is best, [arms]. a, b: draws [arms, draws]; b decides among those `within` the highest a."""
    best = np.where(a >= a.max(0) - within, b, -np.inf).argmax(0)
    return np.bincount(best, minlength=len(a)) / a.shape[1]


def _last(one: Curve) -> float:
    return float(one.pass_rate[-1]) if len(one.pass_rate) else one.r0 or 0.0


def _scores_drawn(of_arm: Sequence[Curve], rng: np.random.Generator) -> np.ndarray:
    """Draw the mean of the arm's last scores, with the binomial noise of their answers."""
    drawn = np.zeros(DRAWS)
    for one in of_arm:
        rate, noise = _last(one), UNKNOWN_NOISE
        if one.answers:
            rate = min(max(rate, 1 / one.answers), 1 - 1 / one.answers)
            noise = math.sqrt(rate * (1 - rate) / one.answers)
        drawn += rng.normal(rate, noise, DRAWS) / len(of_arm)
    return drawn


def _best_first(standings: Sequence[Standing]) -> tuple[Standing, ...]:
    return tuple(sorted(standings, key=lambda one: (-one.chance, -one.score)))


def _lines(rung: Rung) -> Iterator[str]:
    """Yield what a rung says, as lines of Markdown."""
    judged = rung.judgement
    means = (
        f"A, then B at A = {judged.ceiling:.3f}"
        if judged.ceiling
        else f"the last scores and the noise of their answers, for want of a fit ({judged.why})"
    )
    yield f"step {rung.step}, by {means}; the best is among the kept with probability {judged.chance(rung.kept):.2f}"
    for one in judged.standings:
        fitted = ""
        if one.A is not None and one.A_interval is not None:
            fitted = f", A {one.A:.3f} [{one.A_interval[0]:.3f}, {one.A_interval[1]:.3f}], B {one.B:.2f}"
        goes = "kept" if one.arm in rung.kept else "dropped"
        yield f"- {goes}: {one.arm}: best with probability {one.chance:.2f}{fitted}, score {one.score:.3f}"
    for name in rung.failed:
        yield f"- failed: {name}; see logs/{name}.log"


def report(study: Study) -> str:
    """Return search.md: what each rung decided; once all have, the winner, its probability, and the compute saved."""
    rungs = [_read(file) for step in study.rungs if (file := _file(study, step)).exists()]
    lines = list(itertools.chain.from_iterable((*_lines(rung), "") for rung in rungs))
    alive, total = rungs[-1].kept if rungs else study.variants, _total(study)
    ends = replace(study, variants=alive, steps=total).tasks
    if len(rungs) < len(study.rungs) or any(task.state() not in ("done", "failed") for task in ends):
        return "\n".join([*lines, f"Not ended: {', '.join(alive)} go on.\n"])
    reached = dict.fromkeys(study.variants, 0) | {one.arm: r.step for r in rungs for one in r.judgement.standings}
    reached |= dict.fromkeys(alive, total)
    tasks = [task for task in study.tasks if reached[task.variant] and task.state() == "done"]
    curves: dict[str, list[Curve]] = {}
    for task in tasks:
        curves.setdefault(task.variant, []).append(curve(task, reached[task.variant]))
    final = judge(curves)
    if (winner := next((one for one in final.standings if one.arm in alive), None)) is None:
        return "\n".join([*lines, f"No winner: {', '.join(alive)} failed after the last rung; see logs/.\n"])
    kept = math.prod([rung.judgement.chance(rung.kept) for rung in rungs])
    shared = {task.seed: _hours(task, study.branch) for task in study.trunk.tasks}
    spent, alone = sum(shared.values()), 0.0
    for task in tasks:
        before, steps = shared.get(task.seed, 0.0), reached[task.variant] - study.branch
        own = _hours(task, reached[task.variant]) - before
        spent, alone = spent + own, alone + before + own * (total - study.branch) / steps
    unit = latest_scores(tasks[0].rundir.eval)[-1]["compute_unit"]
    lines += [
        f"Winner: {winner.arm}, score {winner.score:.3f}. The best arm was kept at every rung with probability {kept:.2f}; by "
        f"all points in the end, the winner is the best with probability {winner.chance:.2f}.",
        f"Compute: {amount(spent, unit)}; all arms to step {total}, at their own pace, {amount(alone, unit)}: "
        f"{1 - spent / alone:.0%} saved.",
    ]
    return "\n".join(lines) + "\n"


def _hours(task: StudyTask, until: int) -> float:
    """Return all compute of a run up to a step."""
    return float(max(row["compute_hours"] for row in latest_scores(task.rundir.eval) if row["step"] <= until))
