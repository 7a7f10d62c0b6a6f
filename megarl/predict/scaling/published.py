"""The fits of ScaleRL's paper (published.yaml), as curves to compare a run with and as
a source of synthetic points.
"""

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.points import Curve

FILE = Path(__file__).with_name("published.yaml")
SAMPLES = 16_000  # completions in an evaluation of the paper: 1,000 prompts x 16


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the file. C_mid: in GPU-hours; None if only A and B are published."""

    name: str
    group: Literal["scale", "leave-one-out", "recipes"]
    about: str
    A: float
    B: float
    C_mid: float | None = None
    figure: int | None = None  # of the paper, where it is drawn with its points
    fitted: float | None = None  # GPU-hours up to which the paper fitted it; the rest is its test
    hours: float | None = None  # GPU-hours of the run
    mark: str = ""
    r0: float = 0.0
    """Read off the paper's figure 1 and used for all rows, as the paper does not state
    it.
    """

    def __call__(self, hours: np.ndarray) -> np.ndarray:
        """Return pass rates [points] at `hours` GPU-hours. MegarlError if no C_mid is
        published.
        """
        if self.C_mid is None:
            raise MegarlError(f"{self.name}: no C_mid is published, so its curve cannot be drawn")
        odds_against = (self.C_mid / hours) ** self.B
        return self.r0 + (self.A - self.r0) / (1 + odds_against)


class _File(msgspec.Struct, frozen=True):
    r0: float
    runs: tuple[Law, ...]


@cache
def published() -> tuple[Law, ...]:
    """Return all rows, in the file's order."""
    file = msgspec.yaml.decode(FILE.read_bytes(), type=_File)
    return tuple(msgspec.structs.replace(law, r0=file.r0) for law in file.runs)


def law_named(name: str) -> Law:
    """Return the row of this name. MegarlError if there is none."""
    for law in published():
        if law.name == name:
            return law
    raise MegarlError(f"no published fit {name!r}; `megarl scaling published` lists them")


def synthetic(law: Law, hours: np.ndarray, seed: int) -> Curve:
    """Draw points at `hours` and R_0 from the law, with the binomial noise of SAMPLES
    independent completions; those of a real evaluation share prompts.
    """
    rng = np.random.default_rng(seed)
    scores = rng.binomial(SAMPLES, law(hours)) / SAMPLES
    r0 = float(rng.binomial(SAMPLES, law.r0) / SAMPLES)
    return Curve(law.name, hours, scores, r0)


def csv_of(curves: list[Curve], about: str) -> str:
    """Return a CSV that `read_points` can read, with `about` as a comment, and a column
    `seed` if there are several curves.
    """
    header = "gpu_hours,pass_rate"
    if len(curves) > 1:
        header += ",seed"
    lines = [f"# {about}", header]
    for seed, curve in enumerate(curves):
        seed_field = f",{seed}" if len(curves) > 1 else ""
        for hours, rate in [(0.0, curve.r0), *zip(curve.hours, curve.pass_rate, strict=True)]:
            lines.append(f"{hours:g},{rate:.5f}{seed_field}")
    return "\n".join(lines) + "\n"
