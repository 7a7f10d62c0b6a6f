"""`learner` and `sft`: how a step is computed."""

from typing import Annotated, Literal

from pydantic import Field

from megarl.core.recipe.section import Section


class Optimizer(Section):
    """AdamW and its schedule."""

    lr: float = Field(5e-7, gt=0, description="learning rate after the warm-up")
    warmup_steps: int = Field(100, ge=0, description="steps of linear warm-up")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="after the warm-up; cosine and linear fall to 0 after the last step"
    )
    grad_clip: float = Field(1.0, gt=0, description="largest global gradient norm; not stated")


class Learner(Section):
    """How the learner computes a step."""

    microbatch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        16_384,
        description=(
            "tokens of a data-parallel rank's packed micro-batch; auto: most that fit, found by"
            " trying"
        ),
    )
    recompute: Literal["none", "light", "selective", "full"] = Field(
        "none",
        description=(
            "what the backward pass recomputes, not stored: nothing; experts' norms and activation"
            " functions; MLPs, experts and gated delta networks; or whole layers"
        ),
    )
    optimizer_offload: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "share of the policy's AdamW kept in the host's memory, where CPU cores update it"
        ),
    )
    epochs: int = Field(1, ge=1, description="updates per batch, within its step; ScaleRL has one")
    optimizer: Optimizer = Optimizer()


class SftRate(Section):
    """The learning rate of supervised fine-tuning."""

    lr: float = Field(3e-5, gt=0, description="learning rate after the warm-up")


class Sft(Section):
    """Supervised fine-tuning before RL (`megarl sft`)."""

    data: str = Field(
        "",
        description=(
            "traces: rows of prompt and completion, or messages; a file or hub:… as for tasks"
        ),
    )
    init: str = Field(
        "",
        description=(
            "Hugging Face directory to start from; what is trained is written to model.path"
        ),
    )
    steps: int = Field(1000, ge=1, description="optimiser steps")
    batch_tokens: int = Field(2_000_000, ge=1, description="tokens per step")
    optimizer: SftRate = Field(
        SftRate(),
        description=(
            "its rate; the rest is ScaleRL's, with a thirtieth of the steps for the warm-up"
        ),
    )
