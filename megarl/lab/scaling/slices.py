"""Fits laws to parts of a run, from the answers of its own evaluations: by task,
difficulty, objective, and pass@n.

    RUN/evaluations/step-N/NAME/answers.jsonl ─► AnswersTo: a prompt's answers ─► Slice: its scores [evaluations, prompts]
                                                             ─► a Curve with its noise ─► fit.py ─► a law, or why there is none

difficulty   the data set's column, if the answers have it. If not, the even samples of the first evaluation determine a
             prompt's bin, and the odd ones its first score: if the same answers did
             both, hard prompts would seem to get better, and easy ones worse, by chance
             alone.
objective    each reward's score and their total, if the answers have them. The lowest and the highest of all scores are 0 and
             1 of the law; printed figures are in the reward's own unit.
pass@n       n up to half of the samples, because closer to all samples the estimate has a large variance.

A slice has a law only if a line through its scores rises by more than two standard
errors (overoptimisation.py), because the law can only rise. All scores are over the
prompts that are in every evaluation. The noise of right or wrong answers is binomial in
their number; that of other scores is their standard error over prompts.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores, step_folder
from megarl.core.evaluation.answers import SuiteDir, suites_in
from megarl.core.evaluation.metrics import by_prompt, pass_at_k, powers_up_to, read_outcomes
from megarl.core.recipe import load
from megarl.lab.scaling.fit import ConstantScores, Fit, FitOptions, Interval, fit
from megarl.lab.scaling.overoptimisation import RISES, straying, trend
from megarl.lab.scaling.points import Curve, PointColumns, binomial_noise, curve_of_run

log = logging.getLogger(__name__)
KINDS = ("task", "difficulty", "objective", "pass@n")
NONE = np.zeros((0, 0))
MOST_BINS = 5  # most values of a column with a bin each; more values are put into three bins


class AnswersTo(NamedTuple):
    """The answers to one prompt in one evaluation. right: [samples] bool; scores:
    [samples] for each objective.
    """

    right: np.ndarray
    scores: dict[str, np.ndarray]
    difficulty: int


@dataclass(frozen=True, eq=False)
class Slice:
    """A part of a run's scores. values: [evaluations, prompts] from 0 to 1, empty if
    there are none; `problem` then says why. answers: the number of answers in each mean
    score, if scores are shares of right answers; unit: the objective's values that
    correspond to 0 and 1; curve, fit: set once fitted.
    """

    task: str
    kind: str
    name: str
    values: np.ndarray
    answers: int | None = None
    unit: Interval = (0.0, 1.0)
    problem: str = ""
    curve: Curve | None = None
    fit: Fit | None = None

    def shown(self, value: float) -> float:
        """Return a score in the objective's own unit."""
        return self.unit[0] + value * (self.unit[1] - self.unit[0])

    @property
    def ends(self) -> list[float]:
        """The first and the last mean score, if any, in the objective's own unit."""
        return (
            [self.shown(float(self.values[n].mean())) for n in (0, -1)] if self.values.size else []
        )

    def record(self) -> dict[str, object]:
        """Return a record for JSON, with all scores in the objective's own unit."""
        before, last = self.ends or (None, None)
        law = None if self.fit is None else self.fit.record() | self._in_own_unit(self.fit)
        known = {
            "task": self.task,
            "kind": self.kind,
            "slice": self.name,
            "prompts": self.values.shape[1],
        }
        return known | {"before": before, "last": last, "law": law, "problem": self.problem}

    def _in_own_unit(self, fitted: Fit) -> dict[str, object]:
        """Return those parameters of a law that are scores."""
        before = fitted.score_before
        return {
            "A": self.shown(fitted.A),
            "R_0": self.shown(fitted.R_0),
            "A_interval": [self.shown(end) for end in fitted.A_interval],
            "score_before": None if before is None else self.shown(before),
        }


def slices(run: Path, hours: str | None = None, **how: Unpack[FitOptions]) -> list[Slice]:
    """Return all slices of a run with their laws. hours: the column of compute, as in
    PointColumns; how: options of `fit`.
    """
    rundir = RunDir.opened(run)
    scored = [
        (row, step_folder(rundir.evaluations, row["step"])) for row in latest_scores(rundir.eval)
    ]
    if gone := [str(row["step"]) for row, folder in scored if not suites_in(folder)]:
        log.warning(
            "evaluations whose answers are gone (evaluation.keep, a fork) are left out: step %s",
            ", ".join(gone),
        )
    scored = [(row, folder) for row, folder in scored if suites_in(folder)]
    if not scored:
        raise MegarlError(
            f"{rundir.evaluations}: no answers of eval.jsonl's evaluations; slices are made from"
            " answers"
        )
    metrics = latest_rows(rundir.metrics)
    tasks = load(str(rundir.recipe)).data.tasks
    columns = PointColumns(hours)
    found = []
    for name in suites_in(scored[-1][1]):
        read = [
            (row, _read(SuiteDir(folder, name).answers))
            for row, folder in scored
            if name in suites_in(folder)
        ]
        if empty := [str(row["step"]) for row, answers in read if not answers]:
            log.warning(
                "%s: evaluations without an answer are left out: step %s", name, ", ".join(empty)
            )
        rows = [row for row, answers in read if answers]
        asked = [answers for _, answers in read if answers]
        rewarded = name in tasks and bool(tasks[name].rewards)
        found += [
            _with_law(part, rows, metrics, columns, how) for part in parts(name, asked, rewarded)
        ]
    return found


def _read(path: Path) -> dict[str, AnswersTo]:
    result = {}
    for answers in by_prompt(read_outcomes(path)):
        graded = [one.scores for one in answers if one.scores]  # void ones have none
        scores = {
            name: np.array([each[name] for each in graded])
            for name in (graded[0] if graded else ())
        }
        right = np.array([one.correct for one in answers])
        result[answers[0].id] = AnswersTo(right, scores, answers[0].difficulty or 0)
    return result


def parts(
    task: str, asked: Sequence[Mapping[str, AnswersTo]], rewarded: bool = False
) -> Iterator[Slice]:
    """Yield the slices of a task or suite, from all its evaluations. rewarded: whether
    it has several rewards.
    """
    ids = sorted(set.intersection(*map(set, asked or [{}])))
    answers = [[one[id] for id in ids] for one in asked]  # [evaluations][prompts]
    samples = min((len(each.right) for row in answers for each in row), default=0)
    if not samples:
        yield Slice(task, "task", "all", NONE, problem="no prompt is in every evaluation")
        return
    right = np.array([[each.right.mean() for each in row] for row in answers])
    yield Slice(task, "task", "all", right, samples * len(ids))
    yield from _by_difficulty(task, answers, right, samples)
    yield from _by_objective(task, answers, rewarded)
    for n in powers_up_to(samples // 2)[1:]:
        passed = [
            [pass_at_k(int(each.right.sum()), len(each.right), n) for each in row]
            for row in answers
        ]
        yield Slice(task, "pass@n", f"pass@{n}", np.array(passed))


def _by_difficulty(
    task: str, answers: list[list[AnswersTo]], right: np.ndarray, samples: int
) -> Iterator[Slice]:
    numbers = np.array([each.difficulty for each in answers[0]], float)
    levels = np.unique(numbers)
    if len(levels) > 1:
        cuts = (
            levels[1:]
            if len(levels) <= MOST_BINS
            else np.unique(np.quantile(numbers, (1 / 3, 2 / 3)))
        )
        bins = np.searchsorted(cuts, numbers, side="right")
        ends = {number: np.unique(numbers[bins == number])[[0, -1]] for number in np.unique(bins)}
        names = {
            n: f"difficulty {low:g}{f' to {high:g}' if low < high else ''}"
            for n, (low, high) in ends.items()
        }
    elif samples < 2:
        why = (
            "1 answer a prompt and no column of difficulty: nothing but the score itself could"
            " choose bins"
        )
        yield Slice(task, "difficulty", "all", NONE, problem=why)
        return
    else:
        bins = np.searchsorted([1 / 3, 2 / 3], [each.right[::2].mean() for each in answers[0]])
        names = dict(enumerate(("hard at first", "middling at first", "easy at first")))
        right = np.concatenate([[[each.right[1::2].mean() for each in answers[0]]], right[1:]])
    for number in np.unique(bins):
        chosen = bins == number
        yield Slice(
            task, "difficulty", names[number], right[:, chosen], samples * int(chosen.sum())
        )


def _by_objective(task: str, answers: list[list[AnswersTo]], rewarded: bool) -> Iterator[Slice]:
    columns = [
        [row[n] for row in answers] for n in range(len(answers[0]))
    ]  # [prompts][evaluations]
    names = {
        name
        for column in columns
        for name in column[-1].scores
        if all(name in each.scores for each in column)
    }
    if rewarded and not names:
        why = (
            "not every evaluation recorded its rewards: those of held-out prompts do if the task"
            " has a trusted_grader"
        )
        yield Slice(task, "objective", "all", NONE, problem=why)
    for name in sorted(names - ({"answer"} if names <= {"answer", "trusted", "total"} else set())):
        scores = [
            [each.scores[name] for each in c]
            for c in columns
            if all(name in each.scores for each in c)
        ]
        every = np.concatenate([each for column in scores for each in column])
        low = float(every.min())
        width = float(np.ptp(every)) or 1.0
        means = np.array([[each.mean() for each in column] for column in scores]).T
        yield Slice(task, "objective", name, (means - low) / width, unit=(low, low + width))


def _with_law(
    part: Slice, rows: Sequence[Row], metrics: Sequence[Row], columns: PointColumns, how: FitOptions
) -> Slice:
    """Return the slice with its law, or with the problem that says why it has none."""
    prompts = part.values.shape[1]
    if part.problem or prompts < 2:
        return (
            part
            if part.problem
            else replace(part, problem="it has one prompt, so its noise is unknown")
        )
    means = part.values.mean(1)
    answers = part.answers or prompts
    noise = binomial_noise(means, answers)
    if part.answers is None:
        over_prompts = part.values.std(1, ddof=1) / math.sqrt(prompts)
        noise = np.where(over_prompts > 0, over_prompts, noise)
    points = [row | {"pass_rate": float(mean)} for row, mean in zip(rows, means, strict=True)]
    where = f"{part.task}, {part.name}"
    trained = np.array([row["step"] > 0 for row in rows])
    curve = replace(curve_of_run(where, points, metrics, where, columns), noise=noise[trained])
    try:
        found = fit([curve], **how)
    except ConstantScores as constant:
        problem = str(ConstantScores(where, constant.count, part.shown(constant.score)))
        return replace(part, curve=curve, problem=problem.removeprefix(f"{where}: "))
    except MegarlError as error:
        return replace(part, curve=curve, problem=str(error).removeprefix(f"{where}: "))
    change, errors = trend(
        np.array([row["step"] for row in rows]), part.values, straying(part.values)
    )
    if errors > RISES:
        return replace(part, curve=curve, fit=found)
    size = f"{change * (part.unit[1] - part.unit[0]):+.3f}, {abs(errors):.1f} standard errors"
    return replace(
        part, curve=curve, problem=f"it {'falls' if errors < -RISES else 'does not rise'} ({size})"
    )
