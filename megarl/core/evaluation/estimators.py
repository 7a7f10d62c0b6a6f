"""What k answers to a prompt are worth, estimated from n of them; and how sure a mean over prompts is. Pure functions.

    right or wrong ─► pass_at_k       one of k is right: the oracle's choice
    votes          ─► maj_at_k        the most frequent answer of k is right
    rewards        ─► best_at_k       the answer of k with the highest reward is right

All three are exact expectations over the k-subsets of the n answers, so unbiased for k <= n; ties are shared.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from scipy.special import stdtrit

Z = 1.959963984540054
"""Of 95 %, two-sided."""


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def pass_at_k(right: int, of: int, k: int) -> float:
    """Chance that k of the answers have a right one among them: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(of - right, k) / math.comb(of, k)


def maj_at_k(votes: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Chance that the most frequent vote of k answers is right (self-consistency, arXiv 2203.11171). "" is no vote.

    votes, correct: [n]. Where votes tie each is chosen alike; where none of the k votes, the choice is wrong. A vote of which
    only some answers were found right counts as right to that share.
    """
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for vote, ok in zip(votes, correct, strict=True):
        found[vote].append(ok)
    silent = len(found.pop("", []))
    sizes = {vote: len(oks) for vote, oks in found.items()}
    total = 0.0
    for vote, oks in found.items():
        if any(oks):
            others = tuple(sorted(size for other, size in sizes.items() if other != vote))
            total += sum(oks) / len(oks) * _wins(len(oks), others, silent, k)
    return total


def best_at_k(rewards: Sequence[float], correct: Sequence[bool], k: int) -> float:
    """Chance that the answer of highest reward among k is right. rewards, correct: [n]; ties are shared."""
    n, below, total = len(rewards), 0, 0.0
    tied = Counter(rewards)
    right: Mapping[float, int] = Counter(reward for reward, ok in zip(rewards, correct, strict=True) if ok)
    for reward in sorted(tied):
        upto = below + tied[reward]
        highest_here = (math.comb(upto, k) - math.comb(below, k)) / math.comb(n, k)
        total += highest_here * right.get(reward, 0) / tied[reward]
        below = upto
    return total


def over_prompts(values: Sequence[float], answers: int) -> Interval:
    """Mean of a value in [0, 1] that each prompt has, with Wilson's score interval for the effective number of answers.

    Prompts are what was drawn at random; the answers of one are a cluster. With s^2 the variance of the values over the n
    prompts, the mean p has the variance of p (1-p) n / s^2 independent answers. That is the effective number, less the factor
    (t of all answers / t of the prompts)^2 for s^2 is known from n prompts only (Korn and Graubard 1998; with Wilson's interval
    as in Franco et al. 2019). One answer a prompt: it is n, and this is Wilson's interval itself. It stays within [0, 1], and
    is not empty where all prompts agree. It is at most `answers`, all there are, and n where p is 0 or 1.
    """
    n = len(values)
    p = math.fsum(values) / n
    bound, spread = p * (1 - p), math.fsum((value - p) ** 2 for value in values) / n
    if spread > 0:
        effective = min(bound * n / spread * (_t(answers - 1) / _t(n - 1)) ** 2, answers)
    else:
        effective = answers if bound > 0 else n
    centre = (p + Z * Z / (2 * effective)) / (1 + Z * Z / effective)
    half = Z / (1 + Z * Z / effective) * math.sqrt(bound / effective + (Z / (2 * effective)) ** 2)
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def _t(freedom: int) -> float:
    """Student's quantile of 95 %, two-sided."""
    return float(stdtrit(max(freedom, 1), 0.975))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, … and n."""
    return sorted({1 << b for b in range(n.bit_length()) if 1 << b <= n} | {n})


@lru_cache(maxsize=1 << 16)
def _wins(mine: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Expected share in the first place, of a vote that `mine` of n answers have; the other votes have `others`, `silent` none.

    By how many of the k answers have this vote (top): the ways in which no other has more, by how many of them have as many.
    """
    n = mine + sum(others) + silent
    ways = 0.0
    for top in range(1, min(mine, k) + 1):
        # of the others: rest[size][ties] ways to take `size` answers, `ties` votes having `top` of them and none having more
        rest: dict[tuple[int, int], int] = {(0, 0): 1}
        for size in others:
            grown: defaultdict[tuple[int, int], int] = defaultdict(int)
            for (taken, ties), count in rest.items():
                for more in range(min(size, top, k - top - taken) + 1):
                    grown[taken + more, ties + (more == top)] += count * math.comb(size, more)
            rest = grown
        first = math.comb(mine, top)
        ways += sum(
            first * count * math.comb(silent, k - top - taken) / (ties + 1) for (taken, ties), count in rest.items()
        )
    return ways / math.comb(n, k)
