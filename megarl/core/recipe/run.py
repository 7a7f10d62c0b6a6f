"""`run`, `checkpoint`, `journal` and `monitor`: a run as a whole, what stays of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, override

from pydantic import Field

from megarl.core.recipe.section import Section


class Run(Section):
    """Where a run is, how long it is, and what it starts from."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        max_length=200,
        description="the run's directory is dir/name",
    )
    dir: str = Field("runs", description="folder of all runs")
    seed: int = Field(
        0, ge=0, description="seed of shuffles, budgets and all other random choices but sampling"
    )
    steps: int = Field(400, ge=1, description="optimiser steps")
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto: continue the run in this directory, if there is one; never: refuse to",
    )
    fork: str = Field(
        "",
        pattern=r"^$|^.+@0*[1-9][0-9]*$",
        description=(
            "RUN@STEP: start with that run's weights, optimiser, draws and compute at its"
            " checkpoint of STEP; empty: afresh"
        ),
    )
    interface: str = Field(
        "",
        description=(
            "network interface all roles listen on, such as ib0; slurm: the one through which Slurm"
            " reaches the nodes; empty: loopback"
        ),
    )
    stop_when: str = Field(
        "",
        pattern=r"^$|^gain < [0-9]*\.?[0-9]+(e-?[0-9]+)? per (GPU|core)-hour$",
        description=(
            "such as gain < 1e-5 per GPU-hour: end when the rest of the run is predicted to gain"
            " less, even at the upper end of the 95 % interval"
        ),
    )

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.dir) / self.name

    @property
    def forked(self) -> tuple[Path, int]:
        """The parent's directory and the step at which the run forks from it; only for
        a fork.
        """
        parent, _, step = self.fork.rpartition("@")
        return Path(parent), int(step)


MilestoneStep = Annotated[int, Field(ge=1)]
MilestoneCompute = Annotated[str, Field(pattern=r"^[0-9]*\.?[0-9]+ (GPU|core)-hours$")]


class Checkpoint(Section):
    """When checkpoints are written, and which of them stay."""

    every: int = Field(100, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    milestones: tuple[MilestoneStep | MilestoneCompute, ...] = Field(
        (),
        description=(
            "steps, or compute such as 1000 GPU-hours: the first checkpoint at or after each is"
            " never removed; one is written at each of these steps"
        ),
    )
    keep_best: bool = Field(
        False,
        description=(
            "a checkpoint is written of each version that is evaluated, and the one with the"
            " highest held-out score stays: RUN@best"
        ),
    )


class Monitor(Section):
    """Metrics over HTTP, and profiles."""

    prometheus: bool = Field(
        False, description="controller, learner and servers answer GET /metrics"
    )
    profile_steps: tuple[int, int] | None = Field(
        None,
        description=(
            "first and last step that torch's profiler records on every rank of the learner; null:"
            " none"
        ),
    )

    @override
    def problems(self) -> Iterator[str]:
        profiled = self.profile_steps
        if profiled and not 0 <= profiled[0] <= profiled[1]:
            yield f"profile_steps: should be [first, last], 0 or more, got {list(profiled)}"


class JournalSection(Section):
    """How much of the journal stays."""

    keep: Literal["all", "checkpoints"] = Field(
        "all", description="checkpoints: drop what none of the checkpoint.keep newest replays"
    )
