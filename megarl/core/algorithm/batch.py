"""From the groups of a batch to the sequences of a training step: filters, aggregation
weights, statistics.

    Batch ─► groups in the loss ─► advantages (advantages.py) ─┐
                               └─► weights ────────────────────┴─► [TrainSequence] ─► micro-batches (packing.py)

Every rank computes these on the whole batch. So the loss, the sum over sequences and
tokens of loss_weight · token_loss, is exact whatever the micro-batches and the number
of ranks: partial sums are added, never averaged again. Source of the formulas: ScaleRL
(arXiv 2510.13786), section 3.2; constant aggregation: Dr. GRPO (arXiv 2503.20783).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megarl.core.algorithm.advantages import (
    NOTHING_SEEN,
    Moments,
    centred_rewards,
    divided,
    turns_of,
)
from megarl.core.base.types import Batch, Group, PathTokens, Rollout, paths_of
from megarl.core.recipe import BatchSection, Recipe

Aggregation = Literal["prompt", "sample", "token", "constant"]
SCALERL = Recipe()
"""The defaults."""

PerToken = float | np.ndarray
"""[prompt + completion] float32, or one number for all tokens."""
ROUNDING = 1e-9
"""Rounding error that may remain when the mean is subtracted from rewards or advantages
that do not vary.
"""


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """One rollout, or one path of an agent's rollout, as the learner sees it. Arrays
    are aligned with `tokens`: element t belongs to tokens[t]. Float arrays are 0 where
    not trained (prompt, masked segments).
    """

    ticket: int
    sample: int
    tokens: np.ndarray  # [prompt + completion] int32
    behaviour_logprobs: np.ndarray  # [prompt + completion] float32
    loss_weight: np.ndarray  # [prompt + completion] float32
    advantage: (
        PerToken  # of the rollout; with a critic, a teacher or `agent.credit: turn`, of each token
    )
    experts: np.ndarray | None = (
        None  # to replay: [at most prompt + completion, layers with experts, chosen]
    )
    reward: float = 0.0  # the rollout's, for the critic
    value: PerToken = 0.0  # the critic's estimate before each token
    value_target: PerToken = 0.0  # the value that it should learn
    reference_logprobs: PerToken = 0.0  # of the frozen reference
    kl_penalty: PerToken = 0.0  # amount by which the KL to the reference lowers the reward
    teacher_gain: PerToken = 0.0  # log pi_teacher(y) - log mu(y); 0 without a teacher
    turns: np.ndarray | None = (
        None  # [prompt + completion] int32, as in `Segment`; None: turns have no own credit
    )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained(self) -> np.ndarray:
        """Whether each token is trained, [prompt + completion] bool."""
        return self.loss_weight > 0

    def of_trained(self, values: PerToken) -> np.ndarray:
        """Return the values of the trained tokens, [trained tokens] float64."""
        return np.broadcast_to(values, len(self))[self.trained].astype(np.float64)


def tokens_in_loss(group: Group, settings: BatchSection) -> list[int]:
    """Return how many tokens of each rollout are in the loss: |y|, or 0 if the rollout
    is left out as truncated.

    What `batch.truncated: drop` leaves out has no gradient and counts in no
    aggregation. Its reward still counts in the mean and the deviation by which the
    advantages of the others are made, as in TRL's form of DAPO's overlong filtering
    (arXiv 2503.14476): a prompt that the policy often fails by running out of tokens is
    a hard one.
    """
    left_out = settings.truncated == "drop"
    return [0 if left_out and r.finish == "length" else r.trained_tokens for r in group.rollouts]


def groups_in_loss(groups: Sequence[Group], settings: BatchSection) -> list[Group]:
    """Return the groups with something to train: not void, and with variance unless
    `keep`.
    """
    keeps_all = settings.zero_variance == "keep"
    wanted = [g for g in groups if not g.void and (keeps_all or g.has_variance)]
    return [g for g in wanted if any(tokens_in_loss(g, settings))]


def token_weights(
    trained_tokens: Sequence[Sequence[int]], aggregation: Aggregation, longest: int
) -> list[np.ndarray]:
    """Return the weight in the loss that each rollout's trained tokens have: one
    [generations] float64 per group.

    trained_tokens[g][j]: |y| of rollout j of group g; longest: the longest possible
    |y|. The loss is the mean over prompts of the mean over the group's tokens (prompt),
    over rollouts of the mean over tokens (sample), over all tokens (token), or over
    rollouts of the sum over tokens / longest (constant), without rollouts and groups
    that have no trained token.
    """
    counts = [np.asarray(group, dtype=np.float64) for group in trained_tokens]
    prompts = sum(bool(c.any()) for c in counts)
    rollouts = sum(int(np.count_nonzero(c)) for c in counts)
    tokens = sum(float(c.sum()) for c in counts)
    shares: dict[Aggregation, Callable[[np.ndarray], np.ndarray | float]] = {
        "prompt": lambda c: prompts * c.sum(),
        "sample": lambda c: rollouts * c,
        "token": lambda _: tokens,
        "constant": lambda _: rollouts * longest,
    }
    return [
        np.divide(1.0, shares[aggregation](c), out=np.zeros(len(c)), where=c > 0) for c in counts
    ]


def sequences_in_loss(batch: Batch, recipe: Recipe) -> list[TrainSequence]:
    """Return the batch's sequences in the loss, ordered by ticket, sample and path;
    empty if no group has a gradient. Paths of a rollout weigh by their tokens.
    Advantages are still 0: a model may first have to compute penalties on the rewards.
    """
    groups = groups_in_loss(batch.groups, recipe.batch)
    counts = [tokens_in_loss(group, recipe.batch) for group in groups]
    weights = token_weights(counts, recipe.batch.aggregation, recipe.most_trained_tokens)
    return [
        _sequence(group, rollout, path, float(weight))
        for group, group_weights in zip(groups, weights, strict=True)
        for rollout, weight in zip(group.rollouts, group_weights, strict=True)
        for path in paths_of(rollout.segments, rollout.paths, group.prompt.tokens)
        if weight and path.trained.any()
    ]


def with_advantages(
    sequences: Sequence[TrainSequence], batch: Batch, recipe: Recipe, before: Moments = NOTHING_SEEN
) -> tuple[list[TrainSequence], Moments]:
    """Return the batch's `sequences_in_loss` with advantages, from rewards less the sum
    of each rollout's `kl_penalty`, and the statistics of all batches' rewards: those
    `before` and this one's. With a critic all advantages stay 0: gae.py computes them.
    With `agent.credit: turn`, each token has its turn's advantage.
    """
    settings = recipe.batch
    if settings.centring == "critic":
        return list(sequences), before
    groups = groups_in_loss(batch.groups, settings)
    penalties: dict[tuple[int, int], float] = defaultdict(float)
    for s in sequences:  # a rollout may have several sequences
        penalties[s.ticket, s.sample] += float(np.sum(s.kl_penalty))
    centred = [centred_rewards(group, settings.centring, penalties) for group in groups]
    after = before.after(np.concatenate([np.zeros(0), *centred]))
    gains = divided(centred, settings.advantage, after)
    gain_of = {
        (group.ticket, group.rollouts[n].sample, turn): float(gain)
        for group, group_gains in zip(groups, gains, strict=True)
        for (n, turn), gain in zip(turns_of(group), group_gains, strict=True)
    }

    def advantage(s: TrainSequence) -> PerToken:
        if s.turns is None:
            return _with_teacher(gain_of[s.ticket, s.sample, -1], s, recipe)
        gains = np.zeros(len(s), np.float32)
        for turn in np.unique(s.turns[s.trained]):
            gains[s.turns == turn] = gain_of[s.ticket, s.sample, int(turn)]
        return gains

    return [replace(s, advantage=advantage(s)) for s in sequences], after


def _with_teacher(gain: float, sequence: TrainSequence, recipe: Recipe) -> PerToken:
    """Return the advantage of the reward; with a teacher, its weighted mean with
    `teacher_gain`.

    On tokens of mu, log mu - log pi_T is the k1 estimate of the reverse KL(mu || pi_T).
    With its negative as the advantage, each token descends that KL's gradient, without
    credit for later tokens: on-policy distillation (Lu and Thinking Machines Lab 2025;
    GKD, arXiv 2306.13649, with lambda 1 and reverse KL). It is not centred or divided:
    0 means that both agree.
    """
    weight = recipe.teacher.weight
    if not weight:
        return gain
    mixed = (1 - weight) * gain + weight * np.asarray(sequence.teacher_gain)
    return mixed.astype(np.float32)


def _sequence(group: Group, rollout: Rollout, path: PathTokens, weight: float) -> TrainSequence:
    teacher_gain: PerToken = 0.0
    if (teacher := rollout.teacher_logprobs) is not None:
        prompt = np.zeros(len(path.tokens) - len(teacher), np.float32)
        teacher_gain = np.concatenate(
            [prompt, np.where(rollout.trained, teacher - rollout.logprobs, np.float32(0))]
        )
    return TrainSequence(
        ticket=group.ticket,
        sample=rollout.sample,
        tokens=path.tokens,
        behaviour_logprobs=np.where(path.trained, path.logprobs, np.float32(0)),
        loss_weight=path.trained * np.float32(weight),
        advantage=0.0,
        reward=rollout.reward,
        experts=None if rollout.routing is None else rollout.routing.table,
        teacher_gain=teacher_gain,
        turns=path.turns if path.turns.max(initial=-1) >= 0 else None,
    )


def unrewarded(
    index: int, tokens: np.ndarray, first: int = 1, experts: np.ndarray | None = None
) -> TrainSequence:
    """Make a sequence, ticket `index`, of tokens [n] int32: weight 1 from `first` on,
    behaviour log-probs and advantage 0.
    """
    weight = np.ones(len(tokens), np.float32)
    weight[:first] = 0
    return TrainSequence(index, 0, tokens, np.zeros_like(weight), weight, 0.0, experts)


def batch_statistics(batch: Batch, recipe: Recipe = SCALERL) -> dict[str, float]:
    """Compute metrics of a batch (telemetry/names.py), groups without variance and
    truncated rollouts included. A mean over nothing is NaN.
    """
    groups = [g for g in batch.groups if not g.void]
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([sum(len(s.tokens) for s in r.segments) for r in rollouts])
    correct = np.array([r.correct for r in rollouts], dtype=bool)
    sampled = [[s for s in r.segments if s.trained and len(s.tokens)] for r in rollouts]
    counts = np.array([len(s.tokens) for segments in sampled for s in segments], dtype=np.int64)
    lags = batch.step - np.array(
        [s.weight_version for segments in sampled for s in segments], dtype=np.int64
    )
    versions = np.array(
        [len({s.weight_version for s in segments}) for segments in sampled], dtype=np.int64
    )
    varied = [g.has_variance for g in groups]
    teaching = [g for g in groups if recipe.all_groups_teach or g.has_variance]
    names = dict.fromkeys(name for r in rollouts for name in r.rewards)
    more = {
        f"reward/{name}": _mean([r.rewards[name] for r in rollouts if name in r.rewards])
        for name in names
    }
    if turns := [r.credits for r in rollouts if -1 not in r.credits]:
        more["reward/turns"] = _mean([credits[min(credits)] for credits in turns])
    if apart := [
        (r.logprobs - r.teacher_logprobs)[r.trained]
        for r in rollouts
        if r.teacher_logprobs is not None
    ]:
        more["kl_teacher"] = _mean(np.concatenate(apart))
    rewards = np.array([r.reward for r in rollouts])
    return {
        "pass_rate_train": _mean(correct),
        "reward_mean": _mean(rewards),
        "reward_gap": _mean(rewards[correct]) - _mean(rewards[~correct]),
        "zero_variance_share": 1 - _mean(varied),
        "groups_in_loss": float(sum(any(tokens_in_loss(g, recipe.batch)) for g in teaching)),
        "void_groups": float(len(batch.groups) - len(groups)),
        "truncation_rate": _mean([r.finish == "length" for r in rollouts]),
        "interruption_rate": _mean([r.interrupted for r in rollouts]),
        "format_error_rate": _mean([not r.format_ok for r in rollouts]),
        "grader_timeout_rate": _mean([r.grader_timeout for r in rollouts]),
        "grader_error_rate": _mean([r.grader_error for r in rollouts]),
        "completion_tokens_mean": _mean(lengths),
        "completion_tokens_right_mean": _mean(lengths[correct]),
        "completion_tokens_wrong_mean": _mean(lengths[~correct]),
        "generated_tokens": float(counts.sum()),
        "lag_mean": float(np.average(lags, weights=counts)) if len(lags) else float("nan"),
        "lag_max": float(lags.max(initial=0)),
        "versions_per_rollout": _mean(versions),
        "versions_per_rollout_max": float(versions.max(initial=0)),
        "retries": float(sum(r.retries for r in rollouts)),
    } | more


def advantage_statistics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Return statistics over the rollouts in the loss, each counted once; over trained
    tokens if each has its own advantage. `advantage_fit` is NaN if advantages or
    rewards do not vary, and left out if advantages do not come only from rewards.
    """
    first = {(s.ticket, s.sample): s for s in reversed(sequences)}
    each = [s for s in sequences if np.ndim(s.advantage) or first[s.ticket, s.sample] is s]
    gains = np.concatenate([_gains(s) for s in each])
    other_gains = any(np.ndim(s.teacher_gain) or s.turns is not None for s in sequences)
    return {
        "advantage_mean": float(gains.mean()),
        "advantage_std": float(gains.std()),
        "advantage_abs_max": float(np.abs(gains).max()),
    } | ({} if other_gains else {"advantage_fit": _fit(list(first.values()))})


def _fit(rollouts: Sequence[TrainSequence]) -> float:
    _, group = np.unique([s.ticket for s in rollouts], return_inverse=True)
    gains, rewards = (
        values - (np.bincount(group, values) / np.bincount(group))[group]
        for values in (
            np.array([_gains(s).mean() for s in rollouts]),
            np.array([s.reward for s in rollouts]),
        )
    )
    size = math.sqrt((gains @ gains) * (rewards @ rewards))
    return float(gains @ rewards) / size if size > ROUNDING else math.nan


def _gains(sequence: TrainSequence) -> np.ndarray:
    """Return the sequence's advantages as [1] or [trained tokens]."""
    gain = sequence.advantage
    return sequence.of_trained(gain) if np.ndim(gain) else np.array([gain], np.float64)


def _mean(values: np.ndarray | Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
