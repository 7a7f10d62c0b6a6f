"""The work of a step: how many rollouts, and how long they are.

Lengths are log-normal with a given mean and spread, roughly like those of reasoning
traces, and cut off at the recipe's longest completion; or they are drawn from those of
a measured run. Rollouts of a prompt are drawn independently.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe


class Lengths(Protocol):
    """A distribution of completion lengths, in tokens."""

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths [count] int64, each 1 or more."""


@dataclass(frozen=True)
class Measured:
    """The lengths of a run's rollouts, drawn with replacement."""

    tokens: tuple[int, ...]

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths [count] int64."""
        return random.choice(np.array(self.tokens, np.int64), count)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths, cut off at `longest`. mean: after the cut; spread: standard
    deviation of the logarithm before it.
    """

    mean: float
    spread: float
    longest: int

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths [count] int64."""
        random_lengths = random.lognormal(self._location(), self.spread, count)
        return np.clip(np.ceil(random_lengths), 1, self.longest).astype(np.int64)

    def _location(self) -> float:
        """Return the mean of the logarithm that gives `mean`, by bisection, since the
        mean rises with it.
        """
        low = math.log(self.mean) - self.spread**2
        high = math.log(self.longest) + 10 * self.spread
        for _ in range(80):
            middle = (low + high) / 2
            if self._mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _mean(self, location: float) -> float:
        """Return E min(X, c) = exp(m + s^2/2) Phi((ln c - m - s^2) / s) + c (1 -
        Phi((ln c - m) / s)).
        """
        phi = NormalDist().cdf
        cut = math.log(self.longest) - location
        mean_before_cut = math.exp(location + self.spread**2 / 2)
        below = mean_before_cut * phi((cut - self.spread**2) / self.spread)
        return below + self.longest * (1 - phi(cut / self.spread))


@dataclass(frozen=True, eq=False)
class Workload:
    """The work of one step of a recipe."""

    prompts: int
    generations: int
    prompt_tokens: int
    lengths: Lengths
    trained_share: float  # share of the groups that have variance and so are trained (1: all)
    sample: np.ndarray  # lengths of one step's rollouts, [prompts x generations], fixed by the seed

    @property
    def rollouts(self) -> int:
        """Rollouts of a step."""
        return self.prompts * self.generations

    @property
    def mean_tokens(self) -> float:
        """Mean length of a completion."""
        return float(self.sample.mean())

    @property
    def live_context(self) -> float:
        """Mean tokens that a request holds at a random moment, at which long requests
        are more likely to be found.
        """
        lengths = self.sample.astype(np.float64)
        return self.prompt_tokens + float((lengths**2).mean() / (2 * lengths.mean()))

    @property
    def trained(self) -> np.ndarray:
        """Sequence lengths, prompt included, of the rollouts on which a step trains."""
        count = max(1, round(self.trained_share * self.rollouts))
        return self.sample[:count] + self.prompt_tokens


MEAN_SHARE = 0.5  # mean as a share of the longest completion, unless given
PROMPT_SHARE = 0.125  # typical prompt as a share of the longest: 256 tokens of 2,048


def workload(recipe: Recipe, lengths: Lengths, trained_share: float, seed: int) -> Workload:
    """Return the work of a step, with lengths drawn with this seed. MegarlError if
    trained_share is no share.
    """
    if not 0 < trained_share <= 1:
        raise MegarlError(
            f"--trained-share: {trained_share} is not a share; give more than 0, at most 1"
        )
    prompts = recipe.batch.prompts
    generations = recipe.sampling.generations
    prompt_tokens = max(1, round(PROMPT_SHARE * recipe.length.prompt_tokens))
    sample = lengths.draw(np.random.default_rng(seed), prompts * generations)
    return Workload(prompts, generations, prompt_tokens, lengths, trained_share, sample)


def lognormal(recipe: Recipe, mean: float | None, spread: float) -> LogNormal:
    """Return log-normal lengths up to the recipe's longest completion. MegarlError if
    mean or spread is out of range.
    """
    longest = recipe.length.completion_tokens
    mean = MEAN_SHARE * longest if mean is None else mean
    if not 1 <= mean < longest:
        raise MegarlError(
            f"--mean-tokens: {mean:g} is not between 1 and the longest completion, {longest}"
            " (length.*)"
        )
    if not 0 < spread <= 3:
        raise MegarlError(
            f"--spread: {spread:g} is not above 0 and at most 3 (deviation of the lengths'"
            " logarithm)"
        )
    return LogNormal(mean, spread, longest)


MOST_GROUPS = 500


def lengths_of(run: Path) -> Measured:
    """Return lengths measured in the run's latest groups, sampled tokens only."""
    rundir = RunDir(run)
    if not rundir.rollouts.is_dir():
        raise MegarlError(
            f"--lengths: {run} has no journal ({rundir.rollouts}); give a run directory"
        )
    reader = JournalReader(rundir.rollouts)
    groups = reader.groups(reader.finished(MOST_GROUPS))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = tuple(rollout.trained_tokens for rollout in rollouts if rollout.trained_tokens)
    if not lengths:
        raise MegarlError(f"--lengths: the journal of {run} has no finished rollout yet")
    return Measured(lengths)
