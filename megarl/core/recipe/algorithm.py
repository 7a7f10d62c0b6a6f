"""`batch`, `loss`, `reference`, `teacher`, `critic`: what a step learns from."""

from collections.abc import Iterator
from typing import Literal, override

from pydantic import Field

from megarl.core.recipe.section import KeyPlace, Section, unknown_name


class BatchSection(Section):
    """Which rollouts a step trains on, and how rewards become advantages."""

    prompts: int = Field(
        48, ge=1, description="prompts per step; each has sampling.generations rollouts"
    )
    zero_variance: Literal["drop", "refill", "keep"] = Field(
        "drop",
        description=(
            "groups whose answers are graded alike: drop them, refill with other prompts' groups,"
            " or keep them in the loss"
        ),
    )
    truncated: Literal["keep", "drop"] = Field(
        "keep",
        description=(
            "rollouts that the answer budget cut off; drop: left out of the loss, though their"
            " rewards count in the group's mean and deviation"
        ),
    )
    positive_threshold: float | None = Field(
        0.9,
        gt=0,
        le=1,
        description=(
            "a prompt of this pass rate is not drawn again (no-positive-resampling); null: off"
        ),
    )
    centring: Literal["group", "leave_one_out", "none", "critic"] = Field(
        "group",
        description=(
            "what is subtracted from a reward: the mean of the group, of the group's others,"
            " nothing; critic: what a value model expected, token by token (GAE)"
        ),
    )
    advantage: Literal["batch", "group", "running", "none"] = Field(
        "batch",
        description=(
            "whose deviation divides the centred reward; running: that of all batches so far"
        ),
    )
    aggregation: Literal["prompt", "sample", "token", "constant"] = Field(
        "prompt",
        description=(
            "what the loss is averaged over first; constant: rollouts x longest completion (Dr."
            " GRPO)"
        ),
    )

    @override
    def problems(self) -> Iterator[str]:
        if self.centring == "none" and self.advantage == "group":
            yield (
                "advantage: a group without variance has no deviation to divide an uncentred"
                " reward by; use batch or none, or set centring"
            )
        if self.centring == "critic" and self.advantage == "group":
            yield (
                "advantage: a critic gives each token its advantage, not each group; use batch,"
                " running or none"
            )
        if self.centring == "critic" and self.zero_variance != "keep":
            yield keep_all_groups("zero_variance", "a critic", self.zero_variance)


def keep_all_groups(key: str, second_source: str, zero_variance: str) -> str:
    """Return the problem of dropping groups although the model learns from more than
    rewards. second_source: what else it learns from.
    """
    return (
        f"{key}: with {second_source} a group of equal rewards has a gradient too; set keep, not"
        f" {zero_variance}"
    )


LOSSES = ("cispo", "clip", "dppo", "gmpo", "gspo", "reinforce")
"""Built-in losses; others are functions."""
ALGORITHMS = {
    "grpo": "GRPO's loss is clip; the recipe grpo has the rest of it",
    "dapo": "DAPO's loss is clip; the recipe dapo has the rest of it",
    "dr-grpo": "Dr. GRPO's loss is clip; the recipe dr-grpo has the rest of it",
    "ppo": "PPO's loss is clip; the recipe ppo-critic has the rest of it",
    "rloo": "RLOO's loss is reinforce, with batch.centring: leave_one_out",
}
"""Algorithms that people give as a loss, and what to write."""


class Loss(Section):
    """The policy loss and its trust region."""

    kind: str = Field(
        "cispo",
        description=(
            "policy loss: cispo, clip (PPO, GRPO, DAPO), dppo, gmpo, gspo, reinforce, or"
            " package.module:function of your own (docs/how-to/add-a-loss.md)"
        ),
    )
    cap: float = Field(
        4.0,
        gt=0,
        description=(
            "largest importance ratio, of cispo and `correction`; cispo: 4, 5 and 8 were tried,"
            " choice not stated"
        ),
    )
    clip_low: float = Field(
        0.2,
        ge=0,
        le=1,
        description=(
            "clip: a token's ratio is clipped at 1 - clip_low; gspo: a sequence's ratio, for which"
            " 3e-4 is usual; gmpo: a token's at exp(-clip_low), 0.4 in its paper; dppo: a token may"
            " fall by this divergence"
        ),
    )
    clip_high: float = Field(
        0.2,
        ge=0,
        description=(
            "upper bound, 1 + clip_high; gspo: usually 4e-4; gmpo: exp(clip_high); dppo: rise by it"
        ),
    )
    divergence: Literal["tv", "kl"] = Field(
        "tv",
        description="dppo: of two distributions; tv: total variation, 0.15 in its recipe; kl: 0.05",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description=(
            "clip, dppo, gmpo and gspo (mask only), reinforce: what happens to a ratio above `cap`"
        ),
    )
    lower: float = Field(
        0.0,
        ge=0,
        description="correction: mask: smallest ratio that is trained; IcePop: 0.5, cap 5",
    )
    sequence_mask: tuple[float, float] | None = Field(
        None,
        description=(
            "[low, high]: no rollout is trained whose ratios have a geometric mean outside; null:"
            " all are"
        ),
    )
    log_ratio_penalty: float = Field(
        0.0, ge=0, description="coefficient of (log ratio)^2 in the loss; prime-rl: 1e-3"
    )
    entropy_bonus: float = Field(
        0.0, ge=0, description="coefficient of the entropy in the loss; ScaleRL has none"
    )

    @override
    def problems(self) -> Iterator[str]:
        algorithm = self.kind.lower().replace("_", "-")
        if algorithm in ALGORITHMS:
            yield f"kind: {self.kind!r} is not a loss but an algorithm: {ALGORITHMS[algorithm]}"
        else:
            yield from unknown_name("kind", self.kind, "loss", LOSSES)
        if self.kind not in LOSSES and self.correction != "none":
            yield (
                "correction: your own loss applies the importance weight itself; bound it there,"
                " and set none here"
            )
        if self.kind == "cispo" and self.correction != "none":
            yield "correction: cispo already truncates the importance weight; use loss.cap"
        if self.kind in ("gmpo", "gspo") and self.correction == "truncate":
            yield (
                f"correction: {self.kind} has one weight per sequence, so no token's can be"
                " truncated; use mask"
            )
        if self.lower and (self.correction != "mask" or self.lower >= self.cap):
            yield (
                f"lower: needs loss.correction=mask, and a value below loss.cap ({self.cap:g});"
                " set these, or 0 here"
            )
        if self.sequence_mask:
            low, high = self.sequence_mask
            if not 0 <= low < 1 < high:
                yield (
                    "sequence_mask: give [low, high] around 1, such as [0.99, 1.01], not"
                    f" {list(self.sequence_mask)}"
                )


class Reference(Section):
    """KL penalty that keeps the policy near its start (model.path), frozen. ScaleRL and
    DAPO have none.
    """

    coefficient: float = Field(
        0.0, ge=0, description="weight of the penalty; 0: none, and no second model is loaded"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description=(
            "estimator of a token's KL. k1: subtracted from the reward, summed over the rollout's"
            " tokens; k2, k3 (GRPO's): added to the loss for each token"
        ),
    )

    @property
    def in_loss(self) -> bool:
        """Whether the KL is in the loss, not in the reward. k1's gradient in the loss
        would be 0 on average; k2's and k3's in the reward would be biased.
        """
        return self.estimator != "k1"


class Teacher(Section):
    """On-policy distillation: a frozen model, behind any SGLang endpoint, scores what
    the policy samples. Not part of ScaleRL.
    """

    url: str = Field(
        "",
        pattern=r"^$|^https?://[^@\s]+$",
        description="an SGLang server's address, whose model has the policy's tokens",
    )
    api_key: KeyPlace = Field(
        "", description="where its key is: env:VARIABLE or file:PATH; empty: it has none"
    )
    weight: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "weight of log pi_teacher - log mu in a token's advantage; the reward has the rest; 1:"
            " only distillation; 0: no teacher is asked"
        ),
    )

    @override
    def problems(self) -> Iterator[str]:
        if self.weight and not self.url:
            yield (
                "url: teacher.weight above 0 needs a teacher; give an SGLang server's address"
                " (`megarl serve --model DIR` starts one), or set teacher.weight=0"
            )


class CriticRate(Section):
    """The critic's learning rate."""

    lr: float = Field(5e-6, gt=0, description="learning rate after the warm-up")


class Critic(Section):
    """The value model of `batch.centring: critic`: model.path with a new head, at the
    policy's layout. Not part of ScaleRL.
    """

    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "fp32", description="precision of its weights and activations, independent of model.dtype"
    )
    lam: float = Field(
        1.0,
        ge=0,
        le=1,
        description="GAE's lambda; 1 in Open-Reasoner-Zero, 0.95 in games and robots",
    )
    warmup_steps: int = Field(
        0, ge=0, description="first steps, in which only the critic is trained, at a rising rate"
    )
    optimizer: CriticRate = Field(
        CriticRate(), description="its rate; schedule, grad_clip: learner.optimizer's"
    )
