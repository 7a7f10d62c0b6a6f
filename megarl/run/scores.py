"""What a run's held-out scores say: the best and the last, and what they warn of.

rows of eval.jsonl ──► a fall, a score outside its forecast, ──┬─► ScoreWarning
                       over-optimisation                       │
newest rows of metrics.jsonl ──► what they show beside a fall ─┘
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from megarl.core.base.rundir import Row
from megarl.core.evaluation import fall
from megarl.core.evaluation.departure import Departure, lasting_departure
from megarl.core.evaluation.forecast import PASS_RATE

NEWEST = 20
"""How many of the newest steps the means shown of training are about."""
OVER = "warning_overoptimisation"
"""A column of eval.jsonl, or the prefix of one per task if there are several."""
READ = "read what the policy writes now (megarl rollouts show RUN --step N)"
FORK = (
    "fork from an earlier step (run.fork) at a lower or falling rate"
    " (learner.optimizer.schedule=linear)"
)

FEW_GROUPS = 0.5
LOW_ENTROPY = 0.1
SMALL_SAMPLE = 0.8
"""Below these, the share of groups in the loss, the entropy in nats and the effective
sample size are named beside a fall.
"""
OFTEN_CLIPPED = 0.5
"""Above this share of steps whose gradient was clipped, norms are named beside a fall.
"""


@dataclass(frozen=True)
class ScoreWarning:
    """What a run's evaluations warn of. name: for the list of what lasts."""

    name: str
    text: str


def best_of(evaluations: Sequence[Row], name: str = PASS_RATE) -> Row:
    """Return the evaluation with the highest score, of equal ones the first; empty if
    none has it.
    """
    scored = [row for row in evaluations if name in row]
    return max(scored, key=lambda row: row[name], default={})


def score_warnings(
    evaluations: Sequence[Row], steps: Sequence[Row], grad_clip: float
) -> list[ScoreWarning]:
    """Return what the newest of a run's evaluations, given in order of steps, warns of.

    steps: the run's rows of metrics.jsonl in order, at least the NEWEST ones.
    grad_clip: of its recipe, to say how many gradients were clipped.
    """
    if not evaluations:
        return []
    newest = evaluations[-1]
    warnings = [ScoreWarning("over-optimisation", text) for text in overoptimised(newest)]
    signs = signs_beside(steps[-NEWEST:], grad_clip)
    for name in newest:
        if name.startswith(fall.WARNING_COLUMN) and newest[name]:
            text = _fall_text(evaluations, name.removeprefix(fall.WARNING_COLUMN), signs)
            warnings.append(ScoreWarning("fall of the held-out score", text))
    departure = lasting_departure(evaluations)
    if departure is not None and departure.below:
        warnings.append(ScoreWarning("fall below the forecast", _below_text(departure)))
    elif departure is not None:
        warnings.append(ScoreWarning("rise above the forecast", _above_text(departure)))
    return warnings


def newest_words(count: int) -> str:
    """Return over which steps a mean goes, as text."""
    return "last step" if count == 1 else f"last {count} steps"


def signs_beside(steps: Sequence[Row], grad_clip: float) -> str:
    """Return a sentence on the signs in these steps of states in which runs got worse,
    or that they show none.
    """
    signs = list(_signs(steps, grad_clip))
    period = newest_words(len(steps))
    if not signs:
        return f"The metrics of the {period} show no usual cause"
    return f"Beside it, in the {period}: {'; '.join(signs)}"


def _signs(steps: Sequence[Row], grad_clip: float) -> Iterator[str]:
    """Yield a phrase for each sign in these steps of a state in which runs got worse.
    grad_clip: the norm above which gradients are clipped.
    """
    equal = _mean(steps, "zero_variance_share")
    groups = _mean(steps, "groups_in_loss")
    if 1 - equal < FEW_GROUPS:
        yield f"few groups are left in the loss ({1 - equal:.0%}, {groups:.1f} a step)"
    entropy = _mean(steps, "entropy")
    if entropy < LOW_ENTROPY:
        yield f"low entropy ({entropy:.3f} nats)"
    sample_size = _mean(steps, "effective_sample_size")
    if sample_size < SMALL_SAMPLE:
        yield f"a small effective sample size ({sample_size:.2f})"
    norms = _finite(steps, "grad_norm")
    if not norms:
        return
    clipped_share = fmean(float(norm > grad_clip) for norm in norms)
    if clipped_share > OFTEN_CLIPPED:
        yield (
            f"gradients clipped in {clipped_share:.0%} of the steps (norm {fmean(norms):.1f} on"
            f" average, clipped at {grad_clip:g})"
        )


def _mean(steps: Sequence[Row], name: str) -> float:
    """Return a metric's mean over the steps that have it; NaN, which is below no limit,
    if none has.
    """
    values = _finite(steps, name)
    return fmean(values) if values else math.nan


def _finite(steps: Sequence[Row], name: str) -> list[float]:
    """Return a metric's finite values in these steps."""
    return [row[name] for row in steps if math.isfinite(row.get(name, math.nan))]


def _fall_text(evaluations: Sequence[Row], task: str, signs: str) -> str:
    """Return a fall's text. task: "/NAME" if there are several."""
    newest = evaluations[-1]
    name = PASS_RATE + task
    best = best_of(evaluations, name)
    return (
        f"{_scored(name)}: the score has fallen by {newest[f'fall{task}']:.3f} ±"
        f" {newest[f'fall_error{task}']:.3f} since step {newest[f'fall_since{task}']:g}, on the"
        f" same prompts; it is {newest[name]:.3f} at step {newest['step']}, and was"
        f" {best[name]:.3f} at its best, step {best['step']}. The policy gets worse. {signs}."
        f" {READ.capitalize()}; take the best checkpoint (checkpoint.keep_best), or {FORK}"
    )


def _below_text(departure: Departure) -> str:
    """Return the text of a score below its forecast."""
    return (
        f"{_scored(departure.name)}: the score has fallen to {departure.score:.3f} at step"
        f" {departure.step}, and that before was as low; by the forecast of step"
        f" {departure.forecast_step} it would stay at {departure.bound:.3f} or above. The policy"
        f" gets worse: {READ}, {FORK}"
    )


def _above_text(departure: Departure) -> str:
    """Return the text of a score above its forecast."""
    return (
        f"{_scored(departure.name)}: the score has risen to {departure.score:.3f} at step"
        f" {departure.step}, and that before was as high; by the forecast of step"
        f" {departure.forecast_step} it would stay at {departure.bound:.3f} or below. The policy"
        f" has learnt something new, or exploits its grader: {READ}"
    )


def _scored(name: str) -> str:
    """Return what a column of pass rates scores: its task, or all that is held out."""
    return name.removeprefix(PASS_RATE).removeprefix("/") or "held out"


def overoptimised(evaluation: Row) -> list[str]:
    """Return the warnings of overoptimisation in a row of eval.jsonl; empty if there
    are none.
    """
    return [
        _overoptimised(evaluation, name)
        for name in evaluation
        if name.startswith(OVER) and evaluation[name]
    ]


def _overoptimised(row: Row, warning: str) -> str:
    """Return the text of one warning. warning: its column in eval.jsonl."""
    task = warning.removeprefix(OVER)  # "/NAME" if there are several
    drop = row.get(f"trusted_fall{task}", math.nan)
    rise = row.get(f"proxy_rise{task}", math.nan)
    step = row.get(f"trusted_peak_step{task}", math.nan)
    return (
        f"{task[1:] or 'held out'}: the trusted score has fallen by {drop:.3f} since step"
        f" {step:g} while the reward rose by {rise:.3f}: the policy exploits the reward. Stop, keep"
        " the checkpoint nearest to that step, read what has changed (megarl answers compare) and"
        " repair the grader, or keep the policy closer to its start (reference)"
    )
