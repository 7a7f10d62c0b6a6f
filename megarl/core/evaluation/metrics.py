"""Metrics of a suite's answers: rates, lengths, the benefit of several answers per
prompt, and confidence intervals.

Estimators are pure functions of n answers to a prompt:

    right or wrong ─► pass_at_k       one of k is right: an oracle chooses
    votes          ─► maj_at_k        the most frequent answer of k is right
    rewards        ─► best_at_k       the answer of k with the highest reward is right

All three are exact expectations over the k-subsets of the n answers, so unbiased for k
<= n; tied answers have equal chances.
"""

import importlib.metadata
import math
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from msgspec import UNSET

import megarl
from megarl.core.base.types import JsonObject
from megarl.core.evaluation.answers import Answer, Result, read_answers
from megarl.core.recipe import Recipe, Rows


class Outcome(NamedTuple):
    """An answer without its texts, so small that all of an evaluation fit in memory.
    Fields are as in Answer, None if unset.
    """

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
    void: str = ""
    reward: float | None = None
    by_length: bool | None = None
    scores: Mapping[str, float] | None = None
    difficulty: int | None = None

    @classmethod
    def of(cls, answer: Answer) -> Self:
        """Return the outcome of an answer."""
        values = []
        for name in cls._fields:
            value = getattr(answer, name)
            values.append(None if value is UNSET else value)
        return cls._make(values)


def read_outcomes(answers: Path) -> list[Outcome]:
    """Return the newest outcome of each id and sample."""
    outcomes = {(answer.id, answer.sample): Outcome.of(answer) for answer in read_answers(answers)}
    return [outcomes[key] for key in sorted(outcomes)]


type Choice = Callable[[Sequence[Outcome], int], float]
"""Returns the chance that the answer chosen among k of a prompt's answers is right.
Arguments: all answers, and k.
"""


def choices(outcomes: Sequence[Outcome]) -> dict[str, Choice]:
    """Return the ways to choose among answers, by metric: `maj` if every well-formed
    answer that is not void votes, `best` with rewards.
    """

    choosers: dict[str, Choice] = {"pass": _right_at_all}
    has_votes = any(o.vote for o in outcomes)
    if has_votes and all(o.vote or o.void or not o.format_ok for o in outcomes):
        choosers["maj"] = _by_vote
    if any(o.reward is not None for o in outcomes):
        choosers["best"] = _by_reward
    return choosers


def _right_at_all(group: Sequence[Outcome], k: int) -> float:
    """Choose a right answer if there is one (a Choice)."""
    return pass_at_k(sum(o.correct for o in group), len(group), k)


def _by_vote(group: Sequence[Outcome], k: int) -> float:
    """Choose the most frequent vote (a Choice)."""
    return maj_at_k([o.vote for o in group], [o.correct for o in group], k)


def _by_reward(group: Sequence[Outcome], k: int) -> float:
    """Choose the answer of highest reward (a Choice). One without comes last."""
    rewards = [-math.inf if o.reward is None else o.reward for o in group]
    return best_at_k(rewards, [o.correct for o in group], k)


def by_prompt(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes of each prompt, in the order of prompts' first ones."""
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.id].append(outcome)
    return list(groups.values())


def summarise(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return rates over all completions, and 95 % intervals of `pass_rate`
    (mean@samples), pass@k, maj@k and best@k.
    """
    if not outcomes:
        return {}
    prompts = by_prompt(outcomes)
    n = len(outcomes)
    metrics = over_prompts(list(pass_rates(outcomes).values()), n).columns("pass_rate")
    metrics["n_prompts"] = len(prompts)
    metrics |= _rates(outcomes)
    if any(o.by_length is not None for o in outcomes):
        by_length = []
        for group in prompts:
            right = sum(bool(o.by_length) for o in group)
            by_length.append(right / len(group))
        metrics |= over_prompts(by_length, n).columns("pass_rate_by_length")
    means = proxy_and_trusted(outcomes)
    if means:
        proxy, trusted = np.mean(list(means.values()), axis=0).tolist()
        metrics["proxy_score"] = proxy
        metrics["trusted_score"] = trusted
    entropies = [o.entropy for o in outcomes if o.entropy is not None]
    if entropies:
        metrics["entropy"] = math.fsum(entropies) / len(entropies)
    sizes = powers_up_to(min(len(group) for group in prompts))
    for name, chance in choices(outcomes).items():
        for k in sizes:
            estimate = over_prompts([chance(group, k) for group in prompts], n, k)
            metrics |= estimate.columns(f"{name}@{k}")
    return metrics


def _rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return what share of completions ended badly, and their lengths."""
    n = len(outcomes)
    lengths = [o.tokens for o in outcomes]
    p50, p95 = np.quantile(lengths, (0.5, 0.95), method="inverted_cdf").tolist()
    return {
        "truncation_rate": sum(o.truncated for o in outcomes) / n,
        "interruption_rate": sum(o.interrupted for o in outcomes) / n,
        "format_error_rate": sum(not o.format_ok for o in outcomes) / n,
        "grader_timeout_rate": sum(o.grader_timeout for o in outcomes) / n,
        "grader_error_rate": sum(o.grader_error for o in outcomes) / n,
        "void_rate": sum(bool(o.void) for o in outcomes) / n,
        "completion_tokens_mean": sum(lengths) / n,
        "completion_tokens_p50": p50,
        "completion_tokens_p95": p95,
    }


def pass_rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return each prompt's share of right answers, by id."""
    rates: dict[str, float] = {}
    for group in by_prompt(outcomes):
        right = sum(outcome.correct for outcome in group)
        rates[group[0].id] = right / len(group)
    return rates


def proxy_and_trusted(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """Return each prompt's mean reward and mean trusted score over answers that are not
    void; empty without such a grader.
    """
    graded = (o for o in outcomes if o.scores is not None and "trusted" in o.scores)
    means: dict[str, tuple[float, float]] = {}
    for group in by_prompt(graded):
        scores = [(o.scores["total"], o.scores["trusted"]) for o in group if o.scores]
        proxy, trusted = np.mean(scores, axis=0)
        means[group[0].id] = (float(proxy), float(trusted))
    return means


Z = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""


class Estimate(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def columns(self, name: str) -> dict[str, float]:
        """Return the columns of a result for the metric `name`."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def pass_at_k(right: int, n: int, k: int) -> float:
    """Return the chance that k of n answers, c = `right` of them right, include a right
    one: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, section 2.1).
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(votes: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Return the chance that the most frequent vote of k answers is right
    (self-consistency, arXiv 2203.11171). votes, correct: [n]; "" is no vote. If none of
    the k answers votes, the choice is wrong. If only a share of a vote's answers was
    graded as right, the vote counts as right by that share.
    """
    by_vote: defaultdict[str, list[bool]] = defaultdict(list)
    for vote, is_right in zip(votes, correct, strict=True):
        by_vote[vote].append(is_right)
    silent = len(by_vote.pop("", []))
    sizes = Counter(len(answers) for answers in by_vote.values())
    total = 0.0
    for answers in by_vote.values():
        if any(answers):
            size = len(answers)
            sizes_of_others = sizes - Counter([size])
            rivals = tuple(sorted(sizes_of_others.elements()))
            share_right = sum(answers) / size
            total += share_right * _wins(size, rivals, silent, k)
    return total


def best_at_k(rewards: Sequence[float], correct: Sequence[bool], k: int) -> float:
    """Return the chance that the answer of highest reward among k is right. rewards,
    correct: [n]; ties have equal chances.
    """
    subsets = math.comb(len(rewards), k)
    answers = Counter(rewards)
    right = Counter(reward for reward, ok in zip(rewards, correct, strict=True) if ok)
    below = 0
    total = 0.0
    for reward in sorted(answers):
        up_to_reward = below + answers[reward]
        subsets_with_highest = math.comb(up_to_reward, k) - math.comb(below, k)
        chance = subsets_with_highest / subsets
        total += chance * right[reward] / answers[reward]
        below = up_to_reward
    return total


def over_prompts(values: Sequence[float], answers: int, k: int = 1) -> Estimate:
    """Return the mean of a value in [0, 1] over prompts, with Wilson's score interval
    for the effective number of answers. k: how many answers decide a value, as in
    pass@k.

    Prompts are a random sample; the answers to one prompt are a cluster. With s^2 the
    variance of the values over n prompts, the mean p is as certain as that of p (1-p) n
    / s^2 independent answers. That is the effective number, times (t of all answers / t
    of the prompts)^2, because s^2 is estimated from n prompts only (Korn and Graubard
    1998; with Wilson's interval as in Franco et al. 2019). With one answer per prompt
    it is n, and the result is Wilson's interval. The effective number is at most that
    of disjoint groups of k among all `answers`, and n if p is 0 or 1. The interval is
    within [0, 1], and not empty if all prompts agree.
    """
    n = len(values)
    p = math.fsum(values) / n
    variance_of_one = p * (1 - p)
    variance = math.fsum((value - p) ** 2 for value in values) / n
    groups = answers / k
    if variance > 0:
        correction = (student(answers - 1) / student(n - 1)) ** 2
        independent = variance_of_one * n / variance
        effective = min(independent * correction, groups)
    elif variance_of_one > 0:
        effective = groups
    else:
        effective = n
    shrink = 1 + Z * Z / effective
    centre = (p + Z * Z / (2 * effective)) / shrink
    from_values = variance_of_one / effective
    from_few_answers = (Z / (2 * effective)) ** 2
    half = Z / shrink * math.sqrt(from_values + from_few_answers)
    low = max(0.0, min(p, centre - half))
    high = min(1.0, max(p, centre + half))
    return Estimate(p, low, high)


def student(freedom: int) -> float:
    """Return Student's quantile of a two-sided 95 % interval."""
    from scipy.special import stdtrit  # 35 MB that a GPU benchmark's archive can leave out

    return float(stdtrit(max(freedom, 1), 0.975))


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, … and n."""
    powers = {1 << bit for bit in range(n.bit_length())}
    return sorted(powers | {n})


@lru_cache(maxsize=1 << 16)
def _wins(mine: int, rivals: tuple[int, ...], silent: int, k: int) -> float:
    """Return the chance that a vote is the one chosen among k of n answers. mine:
    answers with this vote; rivals: numbers with each other vote; silent: without a
    vote. For each number `top` of the k answers with this vote, it counts the ways in
    which no other vote has more, divided by the number of votes that tie.
    """
    n = mine + sum(rivals) + silent
    ways = 0.0
    for top in range(1, min(mine, k) + 1):
        others = k - top
        ways_of_others = sum(
            count * math.comb(silent, others - votes) / (ties + 1)
            for (votes, ties), count in _rival_votes(rivals, top, others).items()
        )
        ways += math.comb(mine, top) * ways_of_others
    return ways / math.comb(n, k)


def _rival_votes(rivals: tuple[int, ...], top: int, limit: int) -> dict[tuple[int, int], int]:
    """Return by (votes, ties) in how many ways rivals can have `votes` answers, at most
    `limit`, where `ties` of the rivals have `top` and none has more.
    """
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for size in rivals:
        with_rival: defaultdict[tuple[int, int], int] = defaultdict(int)
        for (votes, ties), count in ways.items():
            for chosen in range(min(size, top, limit - votes) + 1):
                reached = (votes + chosen, ties + 1 if chosen == top else ties)
                with_rival[reached] += count * math.comb(size, chosen)
        ways = with_rival
    return ways


VERSIONS = ("sglang", "torch", "transformers", "mpmath")
LENGTH = {
    "control",
    "prompt_tokens",
    "thinking_tokens",
    "answer_tokens",
    "end_of_thinking",
    "interruption",
}


def settings_of(recipe: Recipe, rows: Rows) -> JsonObject:
    """Return all settings of the recipe on which an answer depends. The numbers of
    answers and prompts are not among them.
    """
    suite = rows.model_dump(mode="json", exclude={"samples", "prompts", "train", "weight"})
    if suite.get("heldout") is None:
        suite.pop("heldout", None)
    return {
        "suite": suite,
        "length": recipe.length.model_dump(mode="json", include=LENGTH),
        "temperature": recipe.evaluation.temperature,
        "top_p": recipe.evaluation.top_p,
        "dtype": recipe.model.dtype,
        "fp32_head": recipe.model.fp32_head,
    }


def result_of(
    suite: str, model: str, samples: int, settings: JsonObject, outcomes: Sequence[Outcome]
) -> Result:
    """Return the result of a suite, with the versions of what computed it."""
    versions = {"megarl": megarl.__version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in VERSIONS}
    return Result(
        suite=suite,
        model=model,
        samples=samples,
        settings=settings,
        metrics=summarise(outcomes),
        time=time.time(),
        versions=versions,
        pass_rates=pass_rates(outcomes),
        proxy_and_trusted=proxy_and_trusted(outcomes) or UNSET,
    )
