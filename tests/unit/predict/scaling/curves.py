"""Curves with a known law."""

import numpy as np

from megarl.predict.scaling.points import Curve

HOURS = np.linspace(500, 16_000, 32)


def law(hours: np.ndarray, a: float, b: float, c_mid: float, r0: float = 0.3) -> np.ndarray:
    """ScaleRL's equation 1, written out."""
    return r0 + (a - r0) / (1 + (c_mid / hours) ** b)


def exact(
    a: float, b: float, c_mid: float, hours: np.ndarray = HOURS, name: str = "exact"
) -> Curve:
    return Curve(name, hours, law(hours, a, b, c_mid), 0.3)


def noisy(
    a: float, b: float, c_mid: float, seed: int = 0, hours: np.ndarray = HOURS, name: str = "noisy"
) -> Curve:
    """R_0 is known exactly; scores have an evaluation's noise."""
    p = law(hours, a, b, c_mid)
    noise = np.sqrt(p * (1 - p) / 16_000) * np.random.default_rng(seed).normal(size=len(hours))
    return Curve(name, hours, p + noise, 0.3)
