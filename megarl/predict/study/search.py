"""`megarl study search`: successive halving. Every arm (a recipe) runs up to a rung,
the better half goes on, and so on.

    [trunk ─►] all arms ─► rung: each arm's chance of being the best ─► the better half
                           (STUDY/rungs/STEP.json)                       ─► … ─► winner

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
from megarl.predict.scaling.compare import SAME_CEILING, RunComparison, compare
from megarl.predict.scaling.points import Curve, PointColumns, amount, curve_of_run, unit_name
from megarl.predict.study import plan
from megarl.predict.study.plan import Study, StudyTask
from megarl.predict.study.running import StudyOptions, numbers, prepared, run, side_by_side

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
    """A comparison of arms. standings: the likeliest best first. problem: the reason
    why no asymptotes were compared, "" if they were. ceiling: the common A, 0 if no
    asymptotes were compared.
    """

    standings: tuple[Standing, ...]
    problem: str = msgspec.field(default="", name="why")
    ceiling: float = 0.0

    def chance(self, arms: Sequence[str]) -> float:
        """Return the chance that one of these arms is the best."""
        return sum(standing.chance for standing in self.standings if standing.arm in arms)


class Rung(msgspec.Struct, frozen=True):
    """A rung's decision. arms: those that go on, the likeliest best first; failed: runs
    that did not reach the step.
    """

    step: int
    arms: tuple[str, ...] = msgspec.field(name="kept")
    failed: tuple[str, ...]
    judgement: Judgement


def search(names: Sequence[str], options: StudyOptions, search_options: SearchOptions) -> int:
    """Search among recipes and their variations by `vary`; return the exit status. If a
    task is given, run only its part of the present rung.
    """
    recipes = arms(names, options.overrides, search_options.vary)
    rungs = _rungs(recipes, search_options)
    kind = f"search-{next(iter(recipes))}"
    study = prepared(kind, recipes, options, rungs, search_options.branch)
    if study is None:
        return 0
    return advance(study, terminal.console(), options.task)


def arms(names: Sequence[str], overrides: Sequence[str], vary: Sequence[str]) -> dict[str, Recipe]:
    """Return the arms by name: each recipe with each combination of values in `vary`.
    MegarlError if two are the same one.
    """
    recipes: dict[str, Recipe] = {}
    # The values with which a recipe was first made, by its text.
    first_values: dict[str, tuple[str, ...]] = {}
    for values in itertools.product(*map(_axis, vary)):
        endings = [_in_a_name(value) for value in values]
        for name, recipe in side_by_side(names, [*overrides, *values]).items():
            arm = "-".join([name, *endings])
            while arm in recipes:  # such as of +1 and -1
                arm += "-2"
            recipes[arm] = recipe
            # Name and seed make no other recipe: the study gives each run its own.
            run = recipe.run.model_copy(update={"name": "", "seed": 0})
            text = dump(recipe.model_copy(update={"run": run}))
            twin = first_values.setdefault(text, values)
            if twin is not values:
                raise MegarlError(
                    f"--vary: {' '.join(twin)} and {' '.join(values)} make the same recipe, as"
                    " every run gets the study's seeds; leave one out"
                )
    return recipes


def _axis(text: str) -> list[str]:
    """Return the overrides KEY=A, KEY=B, … of `KEY=A,B,…`."""
    key, _, values = text.partition("=")
    listed = listed_values(values)
    if not key or not listed:
        raise MegarlError(
            f"--vary: {text!r} is not KEY=A,B, such as learner.optimizer.lr=1e-4,2e-4"
        )
    return [f"{key}={value}" for value in listed]


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
    values = []
    for item in node.value:  # its marks count the bracket in front
        value = text[item.start_mark.index - 1 : item.end_mark.index - 1]
        values.append(value.strip())
    return values


def _in_a_name(override: str) -> str:
    """Return a key's last part and its value as they stand in the name of an arm."""
    key, _, value = override.partition("=")
    bare = value.strip("[]{}'\" ")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key.rpartition('.')[2]}-{bare}")


def _rungs(recipes: Mapping[str, Recipe], options: SearchOptions) -> list[int]:
    """Return the steps at which half of the arms are dropped. MegarlError if the arms
    or the rungs do not suit a search.
    """
    if len(recipes) < 2:
        raise MegarlError(
            "a search needs two arms or more: name more recipes, or give --vary KEY=A,B"
        )
    lengths = {recipe.run.steps for recipe in recipes.values()}
    if len(lengths) > 1:
        raise MegarlError(
            f"run.steps: the arms have {sorted(lengths)}; give all the same, as key=value"
        )
    for name, recipe in recipes.items():
        _check_arm(name, recipe)
    end = lengths.pop()
    if options.rungs:
        rungs = numbers("--rungs", options.rungs)
    else:
        halvings = math.ceil(math.log2(len(recipes)))
        rungs = [end >> n for n in range(halvings, 0, -1)]
    is_rising = sorted(set(rungs)) == rungs
    if not is_rising or not 0 <= options.branch < rungs[0] or rungs[-1] >= end:
        raise MegarlError(
            f"--rungs {','.join(map(str, rungs))}, --branch {options.branch}: they have to rise,"
            f" from the branch (0: none) to below run.steps, which is {end}"
        )
    return rungs


def _check_arm(name: str, recipe: Recipe) -> None:
    """Raise MegarlError if an arm's run depends on its end, or has no score."""
    key = ""
    if recipe.run.stop_when:
        key = "run.stop_when"
    elif recipe.learner.optimizer.schedule != "constant":
        key = "learner.optimizer.schedule"
    if key:
        raise MegarlError(
            f"{name}: {key}: an arm that ends at a rung must have trained like one that goes on;"
            " take it out"
        )
    if not recipe.forecast_column:
        raise MegarlError(
            f"{name}: evaluation.forecast: with several tasks, name the one by whose score the"
            " arms are compared"
        )


def advance(study: Study, console: Console, index: int | None = None) -> int:
    """Go through the rungs, or run task `index`'s part of the present one. Return 0; 1:
    a run failed; 128 + signal: stopped. A failed run is tried again as long as its rung
    is not decided; with an `index`, as one of several jobs, it counts as ended.
    """
    alive = study.variants  # arms that no rung has dropped
    status = 0
    ended = ("done",) if index is None else ("done", "failed")
    for stage in (study.trunk, *_stages(study)):
        if stage.variants == study.variants:  # not the trunk
            stage = replace(stage, variants=alive)
            file = _file(study, stage.steps)
            if file.exists():  # this rung is decided
                alive = _read(file).arms
                continue
        missing = [task for task in stage.tasks if task.state() not in ended]
        if missing and index is not None:
            names = _names_of_job(study, index)
            return run(stage, [task for task in missing if task.name in names], console)
        if missing:
            status = run(stage, missing, console)
        if missing and status > 1:
            return status
        if stage.steps in study.rungs:
            rung = decide(study, stage)
            console.print(*_lines(rung), sep="\n", highlight=False)
            alive = rung.arms
            status = 0  # a failure is a result, too
        elif stage.variants == ("trunk",):
            _check_trunk(stage)
    if index is not None:
        return status
    return table_and_plots(study.path) or status


def table_and_plots(path: Path) -> int:
    """Write the results of a study, unfinished or not; return the exit status."""
    from megarl.predict.study import results  # imports matplotlib

    study = plan.opened(path)
    console = terminal.console()
    if study.rungs:
        write_atomically(path / "search.md", report(study).encode())
        console.print((path / "search.md").read_text(), highlight=False)
        if not any(task.state() == "done" for task in study.tasks):
            return 0  # not even the first rung
    return results.write(study, console)


def _stages(study: Study) -> list[Study]:
    """Return the study up to each rung, and up to its last step, as studies with these
    `steps`.
    """
    return [replace(study, steps=step) for step in (*study.rungs, _total(study))]


def _names_of_job(study: Study, index: int) -> set[str]:
    """Return the names of the runs that belong to the job of task `index`: the trunk of
    a seed belongs to the job of its first arm.
    """
    task = study.tasks[index]
    if task.variant == study.variants[0]:
        return {task.name, f"trunk-seed{task.seed}"}
    return {task.name}


def _check_trunk(stage: Study) -> None:
    """Raise MegarlError if a run of the trunk has failed."""
    failed = [str(task.log) for task in stage.tasks if task.state() != "done"]
    if failed:
        raise MegarlError(
            f"{stage.path}: no arm can branch from a trunk that failed; see {', '.join(failed)}"
        )


def _total(study: Study) -> int:
    return load(str(study.tasks[0].recipe)).run.steps


def _file(study: Study, step: int) -> Path:
    return study.path / "rungs" / f"{step}.json"


def _read(file: Path) -> Rung:
    return msgspec.json.decode(contents(file), type=Rung)


def decide(study: Study, stage: Study) -> Rung:
    """Decide which variants go on after the stage's step: the better half of those that
    reached it. Write and return the decision. MegarlError if none reached it.
    """
    done = [task for task in stage.tasks if task.state() == "done"]
    if not done:
        advice = "see logs/, then the same command tries again"
        raise MegarlError(f"{study.path}: no run reached step {stage.steps}; {advice}")
    until = dict.fromkeys(stage.variants, stage.steps)
    judgement = judge(_curves(done, until))
    half = math.ceil(len(judgement.standings) / 2)
    better_half = judgement.standings[:half]
    rung = Rung(
        stage.steps,
        tuple(standing.arm for standing in better_half),
        tuple(task.name for task in stage.tasks if task not in done),
        judgement,
    )
    text = msgspec.json.format(msgspec.json.encode(rung))
    write_atomically(_file(study, stage.steps), text)
    return rung


def _curves(tasks: Sequence[StudyTask], until: Mapping[str, int]) -> dict[str, list[Curve]]:
    """Return each arm's curves, one per seed, up to the arm's step in `until`, over
    hours without start-up and evaluation.
    """
    curves: dict[str, list[Curve]] = {}
    for task in tasks:
        end = until[task.variant]
        rundir = task.rundir
        recipe = load(str(task.recipe))
        columns = PointColumns("training_hours", recipe.forecast_column)
        scores = [row for row in latest_scores(rundir.eval) if row["step"] <= end]
        steps = [row for row in latest_rows(rundir.metrics) if row["step"] < end]
        curve = curve_of_run(task.name, scores, steps, str(rundir.eval), columns)
        curves.setdefault(task.variant, []).append(curve)
    return curves


def judge(curves: Mapping[str, Sequence[Curve]]) -> Judgement:
    """Compare arms, each by the curves of its seeds: by fits if all arms have one."""
    if len(curves) < 2:
        return _by_scores(curves, "one arm is left")
    try:
        comparison = compare(curves)
    except MegarlError as error:  # such as hours of GPUs and of CPU cores
        return _by_scores(curves, str(error))
    for entry in comparison.entries:
        if entry.fit is None:
            return _by_scores(curves, entry.problem)
    return _by_fits(curves, comparison)


def _by_scores(curves: Mapping[str, Sequence[Curve]], problem: str) -> Judgement:
    """Compare arms by draws of their last scores, with the noise of their answers.
    problem: why there are no fits.
    """
    rng = np.random.default_rng(0)
    drawn = np.empty((len(curves), DRAWS))  # the mean of an arm's seeds, [arms, draws]
    for index, of_arm in enumerate(curves.values()):
        seeds = []
        for curve in of_arm:
            score, deviation = _last_score(curve)
            seeds.append(rng.normal(score, deviation, DRAWS))
        drawn[index] = np.mean(seeds, axis=0)
    won = chances(drawn, drawn, within=0.0)
    standings = []
    for (arm, of_arm), chance in zip(curves.items(), won, strict=True):
        standings.append(Standing(arm, float(chance), _score(of_arm)))
    return Judgement(_ranked(standings), problem)


def _by_fits(curves: Mapping[str, Sequence[Curve]], comparison: RunComparison) -> Judgement:
    """Compare arms by draws of their asymptotes A, and of exponents B at one A."""
    at_ceiling = comparison.at_ceiling
    fits = {entry.name: entry.fit for entry in comparison.entries if entry.fit is not None}
    # Draws are in the order of a grid, which is the same for each arm; shuffling makes
    # them independent.
    rng = np.random.default_rng(0)
    a = []
    for fit in fits.values():
        a.append(rng.permutation(fit.posterior.theta[:, 0]))
    log_b = []
    for arm in fits:
        log_b.append(rng.permutation(at_ceiling[arm].posterior.theta[:, 2]))
    won = chances(np.array(a), np.array(log_b))
    standings = []
    for (arm, fit), chance in zip(fits.items(), won, strict=True):
        score = _score(curves[arm])
        b = at_ceiling[arm].B
        standings.append(Standing(arm, float(chance), score, fit.A, fit.A_interval, b))
    return Judgement(_ranked(standings), ceiling=comparison.ceiling)


def _ranked(standings: Sequence[Standing]) -> tuple[Standing, ...]:
    """Sort by the chance of being the best, then by the score."""
    return tuple(sorted(standings, key=lambda standing: (-standing.chance, -standing.score)))


def _score(curves: Sequence[Curve]) -> float:
    """Return the mean of the last scores of an arm's seeds."""
    last_scores = [_last_score(curve)[0] for curve in curves]
    return float(np.mean(last_scores))


def chances(a: np.ndarray, b: np.ndarray, within: float = SAME_CEILING) -> np.ndarray:
    """Return how often each arm is best, [arms]. a, b: draws [arms, draws]; b decides
    among arms `within` of the highest a.
    """
    arms, draws = a.shape
    is_near_highest = a >= a.max(0) - within
    best = np.where(is_near_highest, b, -np.inf).argmax(0)
    return np.bincount(best, minlength=arms) / draws


def _last_score(curve: Curve) -> tuple[float, float]:
    """Return the last score, that before training if there is no other, and its
    binomial standard deviation.
    """
    rate = float([curve.r0 or 0.0, *curve.pass_rate][-1])
    answers = curve.answers or 1
    # A perfect score is not without noise.
    lowest = 1 / (answers + 1)
    highest = answers / (answers + 1)
    middle = min(max(rate, lowest), highest)
    return rate, math.sqrt(middle * (1 - middle) / answers)


def _lines(rung: Rung) -> Iterator[str]:
    """Yield a rung's decision as lines of Markdown."""
    judged = rung.judgement
    means = f"A, then B at A = {judged.ceiling:.3f}"
    if not judged.ceiling:
        means = (
            "the last scores and the noise of their answers, because there is no fit"
            f" ({judged.problem})"
        )
    yield (
        f"step {rung.step}, by {means}; the best is among the kept with probability"
        f" {judged.chance(rung.arms):.2f}"
    )
    for standing in judged.standings:
        fitted = ""
        if judged.ceiling:
            low, high = standing.A_interval or (0.0, 0.0)
            fitted = f", A {standing.A:.3f} [{low:.3f}, {high:.3f}], B {standing.B:.2f}"
        decision = "kept" if standing.arm in rung.arms else "dropped"
        yield (
            f"- {decision}: {standing.arm}: best with probability {standing.chance:.2f}{fitted},"
            f" score {standing.score:.3f}"
        )
    for name in rung.failed:
        yield f"- failed: {name}; see logs/{name}.log"


def report(study: Study) -> str:
    """Return the text of search.md: each rung's decision and, once all runs have ended,
    the winner, its probability, and compute saved.
    """
    files = [_file(study, step) for step in study.rungs]
    rungs = [_read(file) for file in files if file.exists()]
    lines = []
    for rung in rungs:
        lines += [*_lines(rung), ""]
    alive = rungs[-1].arms if rungs else study.variants
    total = _total(study)
    states = [task.state() for task in replace(study, variants=alive, steps=total).tasks]
    if len(rungs) < len(study.rungs) or "waiting" in states or "begun" in states:
        lines.append(f"Not ended: {', '.join(alive)} go on.\n")
    else:
        lines.append(_conclusion(study, rungs, alive, total))
    return "\n".join(lines)


def _conclusion(study: Study, rungs: Sequence[Rung], alive: Sequence[str], total: int) -> str:
    """Return the end of search.md. rungs: all decisions; alive: the arms that ran to
    `total` steps.
    """
    reached: dict[str, int] = {}  # the last step of each arm
    for rung in rungs:
        for standing in rung.judgement.standings:
            reached[standing.arm] = rung.step
    for arm in alive:
        reached[arm] = total
    tasks = [task for task in study.tasks if task.variant in reached and task.state() == "done"]
    final = judge(_curves(tasks, reached))
    finalists = [standing for standing in final.standings if standing.arm in alive]
    if not finalists:
        return f"No winner: {', '.join(alive)} failed after the last rung; see logs/.\n"
    winner = finalists[0]
    certainty = math.prod([rung.judgement.chance(rung.arms) for rung in rungs])
    lines = [
        (
            f"Winner: {winner.arm}, score {winner.score:.3f}. The best arm was kept at every rung"
            f" with probability {certainty:.2f}; by all points in the end, the winner is the best"
            f" with probability {winner.chance:.2f}."
        ),
        _compute_saved(study, tasks, reached, total),
    ]
    for standing in final.standings:
        if standing.arm not in alive and standing.chance > winner.chance:
            lines.append(
                f"But {standing.arm}, dropped at step {reached[standing.arm]}, is likelier to be"
                f" the best ({standing.chance:.2f}): `megarl train` of its file in recipes/"
                " continues it."
            )
    return "\n".join(lines) + "\n"


def _compute_saved(
    study: Study, tasks: Sequence[StudyTask], reached: Mapping[str, int], total: int
) -> str:
    """Return a line on the search's compute, and what all arms would have taken to
    `total` steps without it. tasks: the runs of arms that reached their last step,
    which `reached` has by arm. Each arm's compute is extrapolated from its own steps
    after the branch. Hours of GPUs and of cores are not added up.
    """
    units = {latest_scores(task.rundir.eval)[-1]["compute_unit"] for task in tasks}
    if len(units) > 1:
        names = " and ".join(unit_name(unit) for unit in sorted(units))
        return f"Compute: not added up, because the runs count {names}."
    trunk_hours = {task.seed: _hours(task, study.branch) for task in study.trunk.tasks}
    spent = sum(trunk_hours.values())
    without_search = 0.0
    for task in tasks:
        shared = trunk_hours.get(task.seed, 0.0)
        own_compute = _hours(task, reached[task.variant]) - shared
        own_steps = reached[task.variant] - study.branch
        spent = spent + own_compute
        own_to_end = own_compute * (total - study.branch) / own_steps
        without_search = without_search + shared + own_to_end
    (unit,) = units
    return (
        f"Compute: {amount(spent, unit)}; all arms to step {total}, at their own pace,"
        f" {amount(without_search, unit)}: {1 - spent / without_search:.0%} saved."
    )


def _hours(task: StudyTask, until: int) -> float:
    """Return all compute of a run up to a step, that of its trunk included."""
    rows = [row for row in latest_scores(task.rundir.eval) if row["step"] <= until]
    return float(max(row["compute_hours"] for row in rows))
