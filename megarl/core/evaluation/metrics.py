"""What the answers to a suite come to: rates, lengths, what more answers a prompt would bring, and how sure all that is."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from msgspec import UNSET

from megarl.core.evaluation.answers import Answer, read_answers
from megarl.core.evaluation.estimators import best_at_k, maj_at_k, over_prompts, pass_at_k, powers_up_to


class Outcome(NamedTuple):
    """Of an answer, what counts: without its texts, for those of a whole evaluation are held."""

    id: str
    sample: int
    correct: bool
    truncated: bool
    interrupted: bool
    format_ok: bool
    grader_timeout: bool
    grader_error: bool
    tokens: int
    entropy: float | None
    vote: str
    void: bool = False
    reward: float | None = None
    by_length: bool | None = None  # of multiple choice: whether the likeliest by its length is right

    @classmethod
    def of(cls, answer: Answer) -> Self:
        reward = None if answer.reward is UNSET else answer.reward
        texts, chosen = answer.choices, answer.chosen_normalised
        by_length = None if texts is UNSET or chosen is UNSET else texts[chosen] == answer.expected
        return cls(
            answer.id, answer.sample, answer.correct, answer.truncated, answer.interrupted, answer.format_ok,
            answer.grader_timeout, answer.grader_error, answer.tokens, answer.entropy, answer.vote,
            bool(answer.void), reward, by_length,
        )  # fmt: skip


def read_outcomes(answers: Path) -> list[Outcome]:
    """Of a file of answers: the newest of each id and sample, by id and sample."""
    found = {(answer.id, answer.sample): Outcome.of(answer) for answer in read_answers(answers)}
    return [found[key] for key in sorted(found)]


type Choice = Callable[[Sequence[Outcome], int], float]
"""Chance that what is chosen of k answers of a prompt is right, given all of them."""


def oracle(of_prompt: Sequence[Outcome], k: int) -> float:
    return pass_at_k(sum(o.correct for o in of_prompt), len(of_prompt), k)


def majority(of_prompt: Sequence[Outcome], k: int) -> float:
    return maj_at_k([o.vote for o in of_prompt], [o.correct for o in of_prompt], k)


def by_reward(of_prompt: Sequence[Outcome], k: int) -> float:
    return best_at_k(
        [-math.inf if o.reward is None else o.reward for o in of_prompt], [o.correct for o in of_prompt], k
    )


def choices(outcomes: Sequence[Outcome]) -> dict[str, Choice]:
    """The ways to choose among a prompt's answers that these allow, by the name of their metric: a majority only if every
    answer votes, a reward if there is one."""
    found: dict[str, Choice] = {"pass": oracle}
    if any(o.vote for o in outcomes) and all(o.vote or not o.format_ok for o in outcomes):
        found["maj"] = majority
    if any(o.reward is not None for o in outcomes):
        found["best"] = by_reward
    return found


def by_prompt(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """The outcomes of each prompt."""
    found: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.id].append(outcome)
    return list(found.values())


def summarise(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Rates over all completions; of `pass_rate` (mean@samples) and of pass@k, maj@k and best@k the 95 % interval too."""
    if not outcomes:
        return {}
    prompts, n = by_prompt(outcomes), len(outcomes)
    lengths = sorted(o.tokens for o in outcomes)
    entropies = [o.entropy for o in outcomes if o.entropy is not None]
    found = _interval("pass_rate", [sum(o.correct for o in of) / len(of) for of in prompts], n) | {
        "n_prompts": len(prompts),
        "truncation_rate": sum(o.truncated for o in outcomes) / n,
        "interruption_rate": sum(o.interrupted for o in outcomes) / n,
        "format_error_rate": sum(not o.format_ok for o in outcomes) / n,
        "grader_timeout_rate": sum(o.grader_timeout for o in outcomes) / n,
        "grader_error_rate": sum(o.grader_error for o in outcomes) / n,
        "void_rate": sum(o.void for o in outcomes) / n,
        "completion_tokens_mean": sum(lengths) / n,
        "completion_tokens_p50": quantile(lengths, 0.5),
        "completion_tokens_p95": quantile(lengths, 0.95),
    }
    if any(o.by_length is not None for o in outcomes):
        found |= _interval("pass_rate_by_length", [sum(bool(o.by_length) for o in of) / len(of) for of in prompts], n)
    if entropies:
        found["entropy"] = math.fsum(entropies) / len(entropies)
    samples = min(len(of) for of in prompts)
    for name, chosen in choices(outcomes).items():
        for k in powers_up_to(samples):
            found |= _interval(f"{name}@{k}", [chosen(of, k) for of in prompts], n)
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _interval(name: str, values: Sequence[float], answers: int) -> dict[str, float]:
    mean, low, high = over_prompts(values, answers)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}
