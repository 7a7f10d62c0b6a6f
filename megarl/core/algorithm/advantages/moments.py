"""Running mean and deviation of all numbers so far, one batch at a time."""

from dataclasses import dataclass
from math import sqrt

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all numbers so far, as in trlX and
    TRL. The recurrence of Chan, Golub and LeVeque 1979, in float64: the same batches
    give the same bits.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def updated(self, values: np.ndarray) -> "Moments":
        """Return the moments after one more batch [n] float64. A batch changes nothing
        if it is empty, or if a value in it is not finite, which would cause all later
        steps to be skipped.
        """
        if not len(values) or not np.isfinite(values).all():
            return self
        n = len(values)
        count = self.count + n
        shift = float(values.mean()) - self.mean
        squares_within = float(values.var()) * n
        squares_between = shift * shift * self.count * n / count
        return Moments(
            count=count,
            mean=self.mean + shift * n / count,
            squares=self.squares + squares_within + squares_between,
        )

    @property
    def deviation(self) -> float:
        """Population deviation; 1, so that dividing changes nothing, before the first
        batch and if all numbers are equal.
        """
        if not self.count:
            return 1.0
        return sqrt(self.squares / self.count) or 1.0


NOTHING_SEEN = Moments()
