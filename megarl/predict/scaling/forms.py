"""The three curves that can be fitted, each with a ceiling A, a speed B and a position
C_mid.

    R(C) = R_0 + (A − R_0) · s(z)

    sigmoid    s = 1/(1 + e^−z)   z = B · ln(C / C_mid)
               ScaleRL's law: s = 1/(1 + (C_mid/C)^B)   (arXiv 2510.13786, eq. 1)
    logistic   s = 1/(1 + e^−z)   z = B · (C − C_mid)
               the same s over linear compute, a different curve; B is per hour
    power      s = 1 − e^−z       z = B · ln(C / C_mid)
               A − (A − R_0)(C_mid/C)^B: the sigmoid's tail for C ≫ C_mid

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
    fit's largest), or its logarithm; u is the x of C_mid, and w the logarithm of B in
    units of x.
    """

    name: str
    log: bool  # x is the logarithm
    share: Callable[[Array], Array]  # s as a function of z
    inverse: Callable[[float], float]  # z as a function of s
    below: float  # how far u may lie below the smallest x; `above`: how far above the largest
    above: float
    w_bounds: tuple[float, float]  # the least and the largest w

    def x(self, hours: Array, scale: float) -> Array:
        """Return x for amounts of compute above 0."""
        return np.log(hours / scale) if self.log else hours / scale

    def hours(self, x: float, scale: float) -> float:
        """Return the hours for a value of x, the inverse of the method `x`."""
        return scale * (math.exp(x) if self.log else x)

    def b(self, w: float, scale: float) -> float:
        """Return the exponent B for a w; that of the logistic curve is per hour."""
        return math.exp(w) if self.log else math.exp(w) / scale


def _logistic(z: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * z))  # no overflow at either end


def _logit(s: float) -> float:
    """Return z for a share s from 0 to 1, the inverse of `_logistic`."""
    return math.log(s / (1 - s))


def _rise(z: Array) -> Array:
    """Return 1 − e^−z; 0 for z below 0, where the power law has not begun to rise."""
    return -np.expm1(-np.maximum(z, 0.0))


def _inverse_rise(s: float) -> float:
    return -math.log(1 - s)


_WIDE = math.log(1000)
SIGMOID = Form(
    "sigmoid",
    log=True,
    share=_logistic,
    inverse=_logit,
    below=_WIDE,
    above=_WIDE,
    w_bounds=(math.log(0.05), math.log(50)),
)
LOGISTIC = Form(
    "logistic",
    log=False,
    share=_logistic,
    inverse=_logit,
    below=2.0,
    above=10.0,
    w_bounds=(math.log(0.1), math.log(500)),
)
POWER = Form(
    "power",
    log=True,
    share=_rise,
    inverse=_inverse_rise,
    below=2 * _WIDE,
    above=0.0,
    w_bounds=(math.log(0.02), math.log(50)),
)
FORMS = {form.name: form for form in (SIGMOID, LOGISTIC, POWER)}
