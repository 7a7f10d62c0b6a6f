"""The parts, in the order in which they are measured: first those that only a GPU can
show.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part. module: it has a function `rows(tiny)`. limit_s: time limit of its
    process, imports included.
    """

    module: str
    limit_s: float


PARTS = {
    "checksum": Part(f"{__name__}.checksum", 60),
    "publication": Part(f"{__name__}.publication", 240),
    "head": Part(f"{__name__}.head", 60),
    "learner": Part(f"{__name__}.learner", 120),
    "parity": Part(f"{__name__}.parity", 280),
    "server": Part(f"{__name__}.server", 400),
    "run": Part(f"{__name__}.run", 480),
    "fp8": Part(f"{__name__}.fp8", 120),
    "tests": Part(f"{__name__}.marked_tests", 180),
    "moe": Part(f"{__name__}.moe", 90),
    "precision": Part(f"{__name__}.precision", 90),
    "checkpoint": Part(f"{__name__}.checkpoint", 120),
}
