"""Fits laws to slices of a run: its scores by task, difficulty, objective, or pass@n,
from the answers of its own evaluations. A law is the curve of a score against compute
(fit.py).

    RUN/evaluations/step-N/NAME/answers.jsonl
        ─► AnswersTo: a prompt's answers ─► Slice: its scores [evaluations, prompts]
        ─► a Curve with its noise ─► fit.py ─► a law, or why there is none

difficulty   the data set's column, if the answers have it. If not, the even samples of
             the first evaluation determine a prompt's bin, and the odd ones its first
             score: if the same answers did both, hard prompts would seem to get better,
             and easy ones worse, by chance alone.
objective    each reward's score and their total, if the answers have them. The lowest
             and the highest of all scores are 0 and 1 of the law; printed figures are
             in the reward's own unit.
pass@n       n up to half of the samples, because closer to all samples the estimate has
             a large variance.

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
from megarl.predict.scaling.fit import ConstantScores, Fit, FitOptions, Interval, fit
from megarl.predict.scaling.overoptimisation import RISES, straying, trend
from megarl.predict.scaling.points import Curve, PointColumns, binomial_noise, curve_of_run

log = logging.getLogger(__name__)
KINDS = ("task", "difficulty", "objective", "pass@n")
NO_SCORES = np.zeros((0, 0))
MOST_BINS = 5  # most values of a column with a bin each; more values are put into three bins


class AnswersTo(NamedTuple):
    """The answers to one prompt in one evaluation. right: [samples] bool; scores: for
    each objective [graded samples], fewer than `right` if some answers are void;
    difficulty: 0 if the prompt has none.
    """

    right: np.ndarray
    scores: dict[str, np.ndarray]
    difficulty: int


AnswerTable = list[list[AnswersTo]]
"""The answers of all evaluations, to the prompts of all: [evaluations][prompts]."""


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

    def in_own_unit(self, value: float) -> float:
        """Return a score in the objective's own unit."""
        low, high = self.unit
        return low + value * (high - low)

    @property
    def ends(self) -> list[float]:
        """[first, last] mean score in the objective's own unit; empty if there are no
        scores.
        """
        if not self.values.size:
            return []
        first = float(self.values[0].mean())
        last = float(self.values[-1].mean())
        return [self.in_own_unit(first), self.in_own_unit(last)]

    def record(self) -> dict[str, object]:
        """Return a record for JSON, with all scores in the objective's own unit."""
        first, last = self.ends or (None, None)
        law = None
        if self.fit is not None:
            law = self.fit.record() | self._scores_in_own_unit(self.fit)
        return {
            "task": self.task,
            "kind": self.kind,
            "slice": self.name,
            "prompts": self.values.shape[1],
            "before": first,
            "last": last,
            "law": law,
            "problem": self.problem,
        }

    def _scores_in_own_unit(self, fitted: Fit) -> dict[str, object]:
        """Return those parameters of a law that are scores."""
        score_before = fitted.score_before
        return {
            "A": self.in_own_unit(fitted.A),
            "R_0": self.in_own_unit(fitted.R_0),
            "A_interval": [self.in_own_unit(end) for end in fitted.A_interval],
            "score_before": None if score_before is None else self.in_own_unit(score_before),
        }


class _EvaluatedStep(NamedTuple):
    """A row of eval.jsonl and the folder with its answers."""

    row: Row
    folder: Path


def slices(
    run: Path, hours_column: str | None = None, **options: Unpack[FitOptions]
) -> list[Slice]:
    """Return all slices of a run with their laws. hours_column: the column of
    eval.jsonl that has the compute; None: gpu_hours if there is one, else
    compute_hours. options: of `fit`.
    """
    rundir = RunDir.opened(run)
    evaluations = _evaluations(rundir)
    metrics = latest_rows(rundir.metrics)
    tasks = load(str(rundir.recipe)).data.tasks
    columns = PointColumns(hours_column)
    fitted = []
    for name in suites_in(evaluations[-1].folder):
        rows, answers = _answers_of(name, evaluations)
        # A suite, which is no task of the recipe, has no rewards.
        has_rewards = name in tasks and bool(tasks[name].rewards)
        for part in parts(name, answers, has_rewards):
            fitted.append(_with_law(part, rows, metrics, columns, options))
    return fitted


def _evaluations(rundir: RunDir) -> list[_EvaluatedStep]:
    """Return the evaluations whose answers still exist. MegarlError if none do."""
    evaluations = []
    missing = []
    for row in latest_scores(rundir.eval):
        folder = step_folder(rundir.evaluations, row["step"])
        if suites_in(folder):
            evaluations.append(_EvaluatedStep(row, folder))
        else:
            missing.append(str(row["step"]))
    if missing:
        log.warning(
            "evaluations whose answers are gone (evaluation.keep, a fork) are left out: step %s",
            ", ".join(missing),
        )
    if not evaluations:
        raise MegarlError(
            f"{rundir.evaluations}: no answers of eval.jsonl's evaluations; slices are made from"
            " answers"
        )
    return evaluations


def _answers_of(
    name: str, evaluations: Sequence[_EvaluatedStep]
) -> tuple[list[Row], list[dict[str, AnswersTo]]]:
    """Return the evaluations of a task or suite: their rows, and for each the answers
    by prompt. Those that did not ask it, or have no answer to it, are left out.
    """
    rows = []
    answers = []
    empty = []
    for row, folder in evaluations:
        if name not in suites_in(folder):
            continue
        by_id = _read(SuiteDir(folder, name).answers)
        if not by_id:
            empty.append(str(row["step"]))
            continue
        rows.append(row)
        answers.append(by_id)
    if empty:
        log.warning(
            "%s: evaluations without an answer are left out: step %s", name, ", ".join(empty)
        )
    return rows, answers


def _read(path: Path) -> dict[str, AnswersTo]:
    """Return the answers in a file by the id of their prompt."""
    by_id = {}
    for outcomes in by_prompt(read_outcomes(path)):
        # Each answer's scores by objective; void answers have none.
        graded = [outcome.scores for outcome in outcomes if outcome.scores]
        objectives = list(graded[0]) if graded else []  # all answers have the same
        scores = {}
        for name in objectives:
            scores[name] = np.array([of_answer[name] for of_answer in graded])
        right = np.array([outcome.correct for outcome in outcomes])
        difficulty = outcomes[0].difficulty or 0  # 0: the prompt has none
        by_id[outcomes[0].id] = AnswersTo(right, scores, difficulty)
    return by_id


def parts(
    task: str, evaluations: Sequence[Mapping[str, AnswersTo]], has_rewards: bool = False
) -> Iterator[Slice]:
    """Yield the slices of a task or suite, from the answers by prompt of all its
    evaluations. has_rewards: whether its recipe names rewards, whose scores the answers
    should then have.
    """
    prompt_sets = [set(by_id) for by_id in evaluations] or [set()]
    prompts = sorted(set.intersection(*prompt_sets))
    table = []
    for by_id in evaluations:
        table.append([by_id[prompt] for prompt in prompts])
    samples = min((len(answers.right) for row in table for answers in row), default=0)
    if not samples:
        problem = "no prompt is in every evaluation"
        yield Slice(task, "task", "all", NO_SCORES, problem=problem)
        return
    right = np.array([_shares_right(row) for row in table])
    yield Slice(task, "task", "all", right, samples * len(prompts))
    yield from _by_difficulty(task, table, right, samples)
    yield from _by_objective(task, table, has_rewards)
    for n in powers_up_to(samples // 2)[1:]:  # pass@1 is the slice of the whole task
        passed = np.array([_passed_at(row, n) for row in table])
        yield Slice(task, "pass@n", f"pass@{n}", passed)


def _shares_right(row: Sequence[AnswersTo]) -> list[float]:
    """Return the share of right answers to each prompt."""
    return [answers.right.mean() for answers in row]


def _passed_at(row: Sequence[AnswersTo], n: int) -> list[float]:
    """Return pass@n of each prompt."""
    chances = []
    for answers in row:
        right = int(answers.right.sum())
        chances.append(pass_at_k(right, len(answers.right), n))
    return chances


def _by_difficulty(
    task: str, table: AnswerTable, right: np.ndarray, samples: int
) -> Iterator[Slice]:
    """Yield a slice per bin. right: [evaluations, prompts] shares of right answers;
    samples: the least number of answers to a prompt.
    """
    difficulties = np.array([answers.difficulty for answers in table[0]], float)
    if len(np.unique(difficulties)) > 1:
        bins = _bins_of_column(difficulties)
        names = {}
        for number in np.unique(bins):
            names[number] = _bin_name(difficulties[bins == number])
    elif samples < 2:
        problem = (
            "1 answer a prompt and no column of difficulty: nothing but the score itself could"
            " choose bins"
        )
        yield Slice(task, "difficulty", "all", NO_SCORES, problem=problem)
        return
    else:
        even_samples = [answers.right[::2].mean() for answers in table[0]]
        odd_samples = [answers.right[1::2].mean() for answers in table[0]]
        bins = np.searchsorted([1 / 3, 2 / 3], even_samples)
        names = {0: "hard at first", 1: "middling at first", 2: "easy at first"}
        right = np.concatenate([[odd_samples], right[1:]])
    for number in np.unique(bins):
        chosen = bins == number
        answers_in_all = samples * int(chosen.sum())
        yield Slice(task, "difficulty", names[number], right[:, chosen], answers_in_all)


def _bins_of_column(difficulties: np.ndarray) -> np.ndarray:
    """Return the number of each prompt's bin: a bin for each value or, if there are
    more than MOST_BINS values, three bins of equally many prompts.
    """
    levels = np.unique(difficulties)
    cuts = levels[1:]
    if len(levels) > MOST_BINS:
        cuts = np.unique(np.quantile(difficulties, (1 / 3, 2 / 3)))
    return np.searchsorted(cuts, difficulties, side="right")


def _bin_name(difficulties: np.ndarray) -> str:
    """Return the name of the bin that has these difficulties, such as 2 to 4."""
    low = difficulties.min()
    high = difficulties.max()
    return f"difficulty {low:g} to {high:g}" if low < high else f"difficulty {low:g}"


def _by_objective(task: str, table: AnswerTable, has_rewards: bool) -> Iterator[Slice]:
    """Yield a slice per objective, over the prompts that have its score in all
    evaluations.
    """
    prompt_histories = list(zip(*table, strict=True))  # [prompts][evaluations]
    names = set()
    for history in prompt_histories:
        names |= {name for name in history[-1].scores if _is_scored_by(name, history)}
    if has_rewards and not names:
        problem = (
            "not every evaluation recorded its rewards: those of held-out prompts do if the task"
            " has a trusted_grader"
        )
        yield Slice(task, "objective", "all", NO_SCORES, problem=problem)
    if names <= {"answer", "trusted", "total"}:
        names.discard("answer")  # the only reward: the total shows it
    for name in sorted(names):
        histories = [history for history in prompt_histories if _is_scored_by(name, history)]
        scores = [answers.scores[name] for history in histories for answers in history]
        all_scores = np.concatenate(scores)
        low = float(all_scores.min())
        width = float(np.ptp(all_scores)) or 1.0
        means = np.array([values.mean() for values in scores])
        means = means.reshape(len(histories), -1).T  # [evaluations, prompts]
        scaled = (means - low) / width
        yield Slice(task, "objective", name, scaled, unit=(low, low + width))


def _is_scored_by(objective: str, history: Sequence[AnswersTo]) -> bool:
    """Return whether a prompt has this score in each of its evaluations."""
    return all(objective in answers.scores for answers in history)


def _with_law(
    part: Slice,
    rows: Sequence[Row],
    metrics: Sequence[Row],
    columns: PointColumns,
    options: FitOptions,
) -> Slice:
    """Return the slice with its law, or with the problem that says why it has none.
    rows, metrics: of eval.jsonl, one per evaluation, and of metrics.jsonl.
    """
    if part.problem:
        return part
    if part.values.shape[1] < 2:
        return replace(part, problem="it has one prompt, so its noise is unknown")
    means = part.values.mean(1)
    points = [row | {"pass_rate": float(mean)} for row, mean in zip(rows, means, strict=True)]
    name = f"{part.task}, {part.name}"
    steps = np.array([row["step"] for row in rows])
    noise = _noise(part, means)[steps > 0]  # a curve has no point before training
    curve = replace(curve_of_run(name, points, metrics, name, columns), noise=noise)
    part = replace(part, curve=curve)
    try:
        fitted = fit([curve], **options)
    except ConstantScores as constant:
        restated = ConstantScores(name, constant.count, part.in_own_unit(constant.score))
        return replace(part, problem=str(restated).removeprefix(f"{name}: "))
    except MegarlError as error:
        return replace(part, problem=str(error).removeprefix(f"{name}: "))
    change, errors = trend(steps, part.values, straying(part.values))
    if errors > RISES:
        return replace(part, fit=fitted)
    direction = "falls" if errors < -RISES else "does not rise"
    own_change = change * (part.unit[1] - part.unit[0])
    problem = f"it {direction} ({own_change:+.3f}, {abs(errors):.1f} standard errors)"
    return replace(part, problem=problem)


def _noise(part: Slice, means: np.ndarray) -> np.ndarray:
    """Return the standard error of each mean score, [evaluations]."""
    prompts = part.values.shape[1]
    if part.answers is not None:
        return binomial_noise(means, part.answers or prompts)
    over_prompts = part.values.std(1, ddof=1) / math.sqrt(prompts)
    return np.where(over_prompts > 0, over_prompts, binomial_noise(means, prompts))
