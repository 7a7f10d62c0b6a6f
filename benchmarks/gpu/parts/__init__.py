"""The parts, in the order in which they are measured: what is worth most, and least likely to take all the time, first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """module: has `rows(tiny)`. limit_s: of its process, imports included."""

    module: str
    limit_s: float


PARTS = {
    "tests": Part(f"{__name__}.marked_tests", 120),
    "head": Part(f"{__name__}.head", 90),
    "learner": Part(f"{__name__}.learner", 120),
    "precision": Part(f"{__name__}.precision", 90),
    "moe": Part(f"{__name__}.moe", 90),
    "checkpoint": Part(f"{__name__}.checkpoint", 120),
    "server": Part(f"{__name__}.server", 240),
}
