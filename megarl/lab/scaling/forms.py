"""The three curves that can be fitted, each with a ceiling A, a speed B and a position
C_mid.

    R(C) = R_0 + (A − R_0) · s(z)

    sigmoid    s = 1/(1 + e^−z)   z = B · ln(C / C_mid)     ScaleRL's law: 1/(1 + (C_mid/C)^B)   (arXiv 2510.13786, eq. 1)
    logistic   s = 1/(1 + e^−z)   z = B · (C − C_mid)       the same s over linear compute, a different curve; B is per hour
    power      s = 1 − e^−z       z = B · ln(C / C_mid)     A − (A − R_0)(C_mid/C)^B: the sigmoid's tail for C ≫ C_mid

For the power law C_mid is not the middle of the curve but the point at which it leaves
R_0; for less compute s is 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Form:
    """A form of curve. Internally z = e^w · (x − u), where x is compute / `scale` (the
    fit's largest), or its logarithm.
    """

    name: str
    log: bool
    share: Callable[[Array], Array]  # s as a function of z
    inverse: Callable[[float], float]  # z as a function of s
    below: float  # how far u may lie below the smallest x; `above`: how far above the largest
    above: float
    w_bounds: tuple[float, float]

    def x(self, hours: Array, scale: float) -> Array:
        return np.log(hours / scale) if self.log else hours / scale

    def hours(self, x: float, scale: float) -> float:
        """Return the hours for a value of x, the inverse of the method `x`."""
        return scale * (math.exp(x) if self.log else x)

    def b(self, w: float, scale: float) -> float:
        return math.exp(w) if self.log else math.exp(w) / scale


def _logistic(z: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * z))  # no overflow at either end


def _rise(z: Array) -> Array:
    return -np.expm1(-np.maximum(z, 0.0))


def _logit(s: float) -> float:
    return math.log(s / (1 - s))


_WIDE = math.log(1000)
FORMS = {
    form.name: form
    for form in (
        Form("sigmoid", True, _logistic, _logit, _WIDE, _WIDE, (math.log(0.05), math.log(50))),
        Form("logistic", False, _logistic, _logit, 2.0, 10.0, (math.log(0.1), math.log(500))),
        Form(
            "power",
            True,
            _rise,
            lambda s: -math.log(1 - s),
            2 * _WIDE,
            0.0,
            (math.log(0.02), math.log(50)),
        ),
    )
}
