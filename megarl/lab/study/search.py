"""`megarl study search`: successive halving. Every arm (a recipe) runs up to a rung,
the better half goes on, and so on.

    [trunk ─►] all arms ─► rung: each arm's chance of being the best ─► STUDY/rungs/STEP.json ─► the better half ─► … winner

The chance is a share of draws from the posteriors of the arms' curves
(scaling/posterior.py), and judges recipes rather than scores so far. In a draw the
highest asymptote A wins; among arms within 0.02 of it (`SAME_CEILING`), the one with
the highest B in the fits at one common A (scaling/compare.py). If an arm cannot be
fitted yet, all arms are judged by draws of their last scores with the noise of their
answers, and the rung says so. Hours are `training_hours`, as each rung has its own
start-up.

Halving: K. Jamieson, A. Talwalkar, arXiv 1502.07943, algorithm 1. A decision is a file,
and depends only on rows up to its step. A process that finds a rung's runs ended, but
no file, makes it; if two processes do so, they make the same.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import yaml
from rich.console import Console

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.rundir import latest_rows, latest_scores, write_atomically
from megarl.core.recipe import Recipe, dump, load
from megarl.lab.scaling.compare import SAME_CEILING, compare
from megarl.lab.scaling.points import Curve, PointColumns, amount, curve_of_run
from megarl.lab.study.main import (
    StudyOptions,
    numbers,
    prepared,
    run,
    side_by_side,
    table_and_plots,
)
from megarl.lab.study.plan import Study, StudyTask

DRAWS = 4000


class SearchOptions(NamedTuple):
    """Options of a search. vary: KEY=A,B each, whose combinations are the arms; rungs:
    "" to halve the steps; branch: 0 for none.
    """

    vary: Sequence[str]
    rungs: str
    branch: int


class Standing(msgspec.Struct, frozen=True):
    """An arm at a rung. chance: that it is the best of all; B: at the common A. A,
    A_interval and B are None if not fitted.
    """

    arm: str
    chance: float
    score: float
    A: float | None = None
    A_interval: tuple[float, float] | None = None
    B: float | None = None


class Judgement(msgspec.Struct, frozen=True):
    """A comparison of arms. standings: the likeliest first. why: the reason why no
    asymptotes were compared, "" if they were. ceiling: the common A, 0 if there is
    none.
    """

    standings: tuple[Standing, ...]
    why: str = ""
    ceiling: float = 0.0

    def chance(self, arms: Sequence[str]) -> float:
        """Return the chance that one of these arms is the best."""
        return sum(one.chance for one in self.standings if one.arm in arms)


class Rung(msgspec.Struct, frozen=True):
    """A decision at a step. kept: the arms that go on; failed: runs that did not reach
    the step.
    """

    step: int
    kept: tuple[str, ...]
    failed: tuple[str, ...]
    judgement: Judgement


def search(names: Sequence[str], options: StudyOptions, how: SearchOptions) -> int:
    """Search among recipes and their variations by `vary`. If a task is given, run only
    its part of the present rung.
    """
    recipes = arms(names, options.overrides, how.vary)
    study = prepared(
        f"search-{next(iter(recipes))}", recipes, options, _rungs(recipes, how), how.branch
    )
    return 0 if study is None else advance(study, terminal.console(), options.task)


def arms(names: Sequence[str], overrides: Sequence[str], vary: Sequence[str]) -> dict[str, Recipe]:
    """Return the arms by name: each recipe with each combination of values in `vary`.
    MegarlError if two are the same one.
    """
    found: dict[str, Recipe] = {}
    first: dict[
        str, tuple[tuple[str, str], ...]
    ] = {}  # the values with which a recipe was first made
    axes = []
    for axis in vary:
        key, _, values = axis.partition("=")
        each = listed_values(values)
        if not key or not each:
            raise MegarlError(
                f"--vary: {axis!r} is not KEY=A,B, such as learner.optimizer.lr=1e-4,2e-4"
            )
        axes.append([(key, value) for value in each])
    for pairs in itertools.product(*axes):
        ends = [_in_a_name(key, value) for key, value in pairs]
        for name, recipe in side_by_side(
            names, [*overrides, *("=".join(pair) for pair in pairs)]
        ).items():
            arm = "-".join([name, *ends])
            while arm in found:  # such as of +1 and -1
                arm += "-2"
            found[arm] = recipe
            run = recipe.run.model_copy(update={"name": "", "seed": 0})
            if (
                twin := first.setdefault(dump(recipe.model_copy(update={"run": run})), pairs)
            ) is not pairs:
                same = " and ".join(" ".join(map("=".join, each)) for each in (twin, pairs))
                advice = "leave one out"
                raise MegarlError(
                    f"--vary: {same} make the same recipe, as every run gets the study's seeds;"
                    f" {advice}"
                )
    return found


def listed_values(text: str) -> list[str]:
    """Split values at the commas between them, as YAML does: a list, a mapping and a
    quoted text are one value each. Return each as it is written; none if the text is
    not such a list.
    """
    try:
        node = yaml.compose(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(text) + 2:
        return []
    return [text[one.start_mark.index - 1 : one.end_mark.index - 1].strip() for one in node.value]


def _in_a_name(key: str, value: str) -> str:
    """Return a key's last part and its value as they stand in the name of an arm."""
    bare = value.strip("[]{}'\" ")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key.rpartition('.')[2]}-{bare}")


def _rungs(recipes: Mapping[str, Recipe], how: SearchOptions) -> list[int]:
    """Return the steps at which half of the arms are dropped. MegarlError if the arms
    or the rungs do not suit a search.
    """
    if len(recipes) < 2:
        raise MegarlError(
            "a search needs two arms or more: name more recipes, or give --vary KEY=A,B"
        )
    if len(lengths := {recipe.run.steps for recipe in recipes.values()}) > 1:
        raise MegarlError(
            f"run.steps: the arms have {sorted(lengths)}; give all the same, as key=value"
        )
    for name, recipe in recipes.items():
        if recipe.learner.optimizer.schedule != "constant" or recipe.run.stop_when:
            key = "run.stop_when" if recipe.run.stop_when else "learner.optimizer.schedule"
            why = "an arm that ends at a rung must have trained like one that goes on"
            raise MegarlError(f"{name}: {key}: {why}; take it out")
        if not recipe.forecast_column:
            why = "with several tasks, name the one by whose score the arms are compared"
            raise MegarlError(f"{name}: evaluation.forecast: {why}")
    end = lengths.pop()
    halvings = math.ceil(math.log2(len(recipes)))
    rungs = (
        numbers("--rungs", how.rungs) if how.rungs else [end >> n for n in range(halvings, 0, -1)]
    )
    if sorted(set(rungs)) != rungs or not 0 <= how.branch < rungs[0] or rungs[-1] >= end:
        said = f"--rungs {','.join(map(str, rungs))}, --branch {how.branch}"
        raise MegarlError(
            f"{said}: they have to rise, from the branch (0: none) to below run.steps, which is"
            f" {end}"
        )
    return rungs


def advance(study: Study, console: Console, index: int | None = None) -> int:
    """Go through the rungs, or run task `index`'s part of the present one. Return 0; 1:
    a run failed; 128 + signal: stopped. A failed run is tried again as long as its rung
    is not decided; with an `index`, as one of several jobs, it counts as ended.
    """
    alive = study.variants
    status = 0
    for stage in (
        study.trunk,
        *(replace(study, steps=step) for step in (*study.rungs, _total(study))),
    ):
        if stage.variants == study.variants:
            stage = replace(stage, variants=alive)
            if (file := _file(study, stage.steps)).exists():
                alive = _read(file).kept
                continue
        missing = [
            task
            for task in stage.tasks
            if task.state() not in ("done", "failed" if index is not None else "")
        ]
        if missing and index is not None:
            own = study.tasks[index]  # the trunk of a seed belongs to its first arm's job
            names = {own.name, f"trunk-seed{own.seed}" if own.variant == study.variants[0] else ""}
            return run(stage, [task for task in missing if task.name in names], console)
        if missing and (status := run(stage, missing, console)) > 1:
            return status
        if stage.steps in study.rungs:
            rung = decide(study, stage)
            console.print(*_lines(rung), sep="\n", highlight=False)
            alive = rung.kept
            status = 0  # a failure is a result, too
        elif stage.variants == ("trunk",) and (
            failed := [str(t.log) for t in stage.tasks if t.state() != "done"]
        ):
            raise MegarlError(
                f"{study.path}: no arm can branch from a trunk that failed; see {', '.join(failed)}"
            )
    return status if index is not None else table_and_plots(study.path) or status


def _total(study: Study) -> int:
    return load(str(study.tasks[0].recipe)).run.steps


def _file(study: Study, step: int) -> Path:
    return study.path / "rungs" / f"{step}.json"


def _read(file: Path) -> Rung:
    return msgspec.json.decode(contents(file), type=Rung)


def decide(study: Study, stage: Study) -> Rung:
    """Decide which variants go on after the stage's step: the better half of those that
    reached it. MegarlError if none did.
    """
    done = [task for task in stage.tasks if task.state() == "done"]
    if not done:
        advice = "see logs/, then the same command tries again"
        raise MegarlError(f"{study.path}: no run reached step {stage.steps}; {advice}")
    judgement = judge(_curves(done, dict.fromkeys(stage.variants, stage.steps)))
    kept = tuple(one.arm for one in judgement.standings[: math.ceil(len(judgement.standings) / 2)])
    rung = Rung(
        stage.steps, kept, tuple(task.name for task in stage.tasks if task not in done), judgement
    )
    write_atomically(_file(study, stage.steps), msgspec.json.format(msgspec.json.encode(rung)))
    return rung


def _curves(tasks: Sequence[StudyTask], until: Mapping[str, int]) -> dict[str, list[Curve]]:
    """Return each arm's curves up to its step in `until`, over hours without start-up
    and evaluation.
    """
    curves: dict[str, list[Curve]] = {}
    for task in tasks:
        end = until[task.variant]
        columns = PointColumns("training_hours", load(str(task.recipe)).forecast_column)
        scores = [row for row in latest_scores(task.rundir.eval) if row["step"] <= end]
        steps = [row for row in latest_rows(task.rundir.metrics) if row["step"] < end]
        curve = curve_of_run(task.name, scores, steps, str(task.rundir.eval), columns)
        curves.setdefault(task.variant, []).append(curve)
    return curves


def judge(curves: Mapping[str, Sequence[Curve]]) -> Judgement:
    """Compare arms, each by the curves of its seeds."""
    last = {
        arm: [_last(curve) for curve in of_arm] for arm, of_arm in curves.items()
    }  # scores and their deviations
    score = {arm: float(np.mean([rate for rate, _ in of_arm])) for arm, of_arm in last.items()}
    rng = np.random.default_rng(0)
    why = "one arm is left" if len(curves) < 2 else ""
    try:
        fitted = compare(curves)
        why = why or next((entry.problem for entry in fitted.entries if entry.fit is None), "")
    except MegarlError as error:  # such as hours of GPUs and of CPU cores
        why = str(error)
    if why:
        drawn = np.array(
            [
                np.mean([rng.normal(*each, DRAWS) for each in of_arm], axis=0)
                for of_arm in last.values()
            ]
        )
        won = chances(drawn, drawn, within=0.0)
        ceiling = 0.0
        standings = [
            Standing(arm, float(p), score[arm]) for arm, p in zip(curves, won, strict=True)
        ]
    else:
        fits = {entry.name: entry.fit for entry in fitted.entries if entry.fit is not None}
        held = fitted.at_ceiling
        # Draws are in the order of a grid, which is the same for each arm; shuffling
        # makes them independent.
        a = np.array([rng.permutation(one.posterior.theta[:, 0]) for one in fits.values()])
        b = np.array(
            [rng.permutation(held[arm].posterior.theta[:, 2]) for arm in fits]
        )  # the logarithm of B
        won = chances(a, b)
        ceiling = fitted.ceiling
        standings = [
            Standing(arm, float(p), score[arm], one.A, one.A_interval, held[arm].B)
            for (arm, one), p in zip(fits.items(), won, strict=True)
        ]
    return Judgement(
        tuple(sorted(standings, key=lambda one: (-one.chance, -one.score))), why, ceiling
    )


def chances(a: np.ndarray, b: np.ndarray, within: float = SAME_CEILING) -> np.ndarray:
    """Return how often each arm is best, [arms]. a, b: draws [arms, draws]; b decides
    among arms `within` of the highest a.
    """
    best = np.where(a >= a.max(0) - within, b, -np.inf).argmax(0)
    return np.bincount(best, minlength=len(a)) / a.shape[1]


def _last(curve: Curve) -> tuple[float, float]:
    """Return the last score and its binomial standard deviation."""
    rate = float([curve.r0 or 0.0, *curve.pass_rate][-1])
    answers = curve.answers or 1
    middle = min(
        max(rate, 1 / (answers + 1)), answers / (answers + 1)
    )  # a perfect score is not without noise
    return rate, math.sqrt(middle * (1 - middle) / answers)


def _lines(rung: Rung) -> Iterator[str]:
    """Yield a rung's decision as lines of Markdown."""
    judged = rung.judgement
    means = f"A, then B at A = {judged.ceiling:.3f}"
    if not judged.ceiling:
        means = (
            "the last scores and the noise of their answers, because there is no fit"
            f" ({judged.why})"
        )
    yield (
        f"step {rung.step}, by {means}; the best is among the kept with probability"
        f" {judged.chance(rung.kept):.2f}"
    )
    for one in judged.standings:
        low, high = one.A_interval or (0.0, 0.0)
        fitted = f", A {one.A:.3f} [{low:.3f}, {high:.3f}], B {one.B:.2f}" if judged.ceiling else ""
        goes = "kept" if one.arm in rung.kept else "dropped"
        yield (
            f"- {goes}: {one.arm}: best with probability {one.chance:.2f}{fitted}, score"
            f" {one.score:.3f}"
        )
    yield from (f"- failed: {name}; see logs/{name}.log" for name in rung.failed)


def report(study: Study) -> str:
    """Return search.md: each rung's decision and, once all runs have ended, the winner,
    its probability, and compute saved.
    """
    rungs = [_read(file) for step in study.rungs if (file := _file(study, step)).exists()]
    lines = [line for rung in rungs for line in (*_lines(rung), "")]
    alive = rungs[-1].kept if rungs else study.variants
    total = _total(study)
    ends = replace(study, variants=alive, steps=total).tasks
    if len(rungs) < len(study.rungs) or any(
        task.state() not in ("done", "failed") for task in ends
    ):
        return "\n".join([*lines, f"Not ended: {', '.join(alive)} go on.\n"])
    reached = {
        one.arm: rung.step for rung in rungs for one in rung.judgement.standings
    } | dict.fromkeys(alive, total)
    tasks = [task for task in study.tasks if task.variant in reached and task.state() == "done"]
    final = judge(_curves(tasks, reached))
    if (winner := next((one for one in final.standings if one.arm in alive), None)) is None:
        return "\n".join(
            [*lines, f"No winner: {', '.join(alive)} failed after the last rung; see logs/.\n"]
        )
    shared = {task.seed: _hours(task, study.branch) for task in study.trunk.tasks}
    spent = sum(shared.values())
    alone = 0.0
    for task in tasks:
        before = shared.get(task.seed, 0.0)
        steps = reached[task.variant] - study.branch
        own = _hours(task, reached[task.variant]) - before
        spent = spent + own
        alone = alone + before + own * (total - study.branch) / steps
    unit = latest_scores(tasks[0].rundir.eval)[-1]["compute_unit"]
    kept = math.prod([rung.judgement.chance(rung.kept) for rung in rungs])
    said = (
        (
            f"Winner: {winner.arm}, score {winner.score:.3f}. The best arm was kept at every rung"
            f" with probability {kept:.2f}; by all points in the end, the winner is the best with"
            f" probability {winner.chance:.2f}."
        ),
        (
            f"Compute: {amount(spent, unit)}; all arms to step {total}, at their own pace,"
            f" {amount(alone, unit)}: {1 - spent / alone:.0%} saved."
        ),
    )
    likelier = (
        f"But {one.arm}, dropped at step {reached[one.arm]}, is likelier to be the best"
        f" ({one.chance:.2f}): `megarl train` of its file in recipes/ continues it."
        for one in final.standings
        if one.arm not in alive and one.chance > winner.chance
    )
    return "\n".join([*lines, *said, *likelier]) + "\n"


def _hours(task: StudyTask, until: int) -> float:
    """Return all compute of a run up to a step."""
    return float(
        max(row["compute_hours"] for row in latest_scores(task.rundir.eval) if row["step"] <= until)
    )
