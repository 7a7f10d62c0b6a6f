"""From the groups of a batch to the sequences of a training step: filters, aggregation
weights, statistics.

    Batch ─► groups in the loss ─► advantages (advantages/) ─┐
                               └─► weights ──────────────────┴─► [TrainSequence]

Every rank computes these on the whole batch. So the loss, the sum over sequences and
tokens of loss_weight · token_loss, is exact whatever the micro-batches and the number
of ranks: partial sums are added, never averaged again. Source of the formulas: ScaleRL
(arXiv 2510.13786), section 3.2; constant aggregation: Dr. GRPO (arXiv 2503.20783).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megarl.core.base.types import Batch, Group, PathTokens, Rollout, Segment, paths_of
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
class RankExperts:
    """The part of a sequence's recorded experts that a rank replays: of the tokens that
    it has, in the layers that it has. choices: [tokens, layers, chosen] uint8 or int16,
    of its first tokens, perhaps not of all.
    """

    choices: np.ndarray


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
    # Of the rollout; with a critic, a teacher or `agent.credit: turn`, of each token.
    advantage: PerToken
    # To replay: [at most prompt + completion, layers with experts, chosen], or this
    # rank's share of it.
    experts: np.ndarray | RankExperts | None = None
    reward: float = 0.0  # the rollout's, for the critic
    value: PerToken = 0.0  # the critic's estimate before each token
    value_target: PerToken = 0.0  # the value that it should learn
    reference_logprobs: PerToken = 0.0  # of the frozen reference
    kl_penalty: PerToken = 0.0  # amount by which the KL to the reference lowers the reward
    teacher_gain: PerToken = 0.0  # log pi_teacher(y) - log mu(y); 0 without a teacher
    # [prompt + completion] int32, as in `Segment`; None: turns have no own credit.
    turns: np.ndarray | None = None
    path: int = 0  # the index of the sequence's path in its rollout

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
    counts = []
    for rollout in group.rollouts:
        dropped = settings.truncated == "drop" and rollout.finish == "length"
        counts.append(0 if dropped else rollout.trained_tokens)
    return counts


def groups_in_loss(groups: Sequence[Group], settings: BatchSection) -> list[Group]:
    """Return the groups with something to train: not void, and with variance unless
    `keep`.
    """

    def is_in_loss(group: Group) -> bool:
        """Return whether the group has something to train."""
        if group.void:
            return False
        if settings.zero_variance != "keep" and not group.has_variance:
            return False
        return any(tokens_in_loss(group, settings))

    return [group for group in groups if is_in_loss(group)]


def token_weights(
    trained_tokens: Sequence[Sequence[int]], aggregation: Aggregation, longest: int
) -> list[np.ndarray]:
    """Return the weight in the loss that each rollout's trained tokens have: one
    [generations] float64 per group.

    trained_tokens[g][j]: |y| of rollout j of group g; longest: the longest possible
    |y|. The loss is the mean over prompts of the mean over the group's tokens (prompt),
    over rollouts of the mean over tokens (sample), over all tokens (token), or over
    rollouts of the sum over tokens / longest (constant). Rollouts and groups without a
    trained token count in none of these means.
    """
    counts = [np.asarray(group, dtype=np.float64) for group in trained_tokens]
    prompts = sum(bool(group.any()) for group in counts)
    rollouts = sum(int(np.count_nonzero(group)) for group in counts)
    tokens = sum(float(group.sum()) for group in counts)
    weights = []
    for group in counts:
        divisor: np.ndarray | float
        match aggregation:
            case "prompt":
                divisor = prompts * group.sum()
            case "sample":
                divisor = rollouts * group
            case "token":
                divisor = tokens
            case "constant":
                divisor = rollouts * longest
        zeros = np.zeros(len(group))
        weights.append(np.divide(1.0, divisor, out=zeros, where=group > 0))
    return weights


def sequences_in_loss(batch: Batch, recipe: Recipe) -> list[TrainSequence]:
    """Return the batch's sequences in the loss, ordered by ticket, sample and path;
    empty if no group has a gradient. Paths of a rollout weigh by their tokens.
    Advantages are still 0: a model may first have to compute penalties on the rewards.
    """
    groups = groups_in_loss(batch.groups, recipe.batch)
    counts = [tokens_in_loss(group, recipe.batch) for group in groups]
    weights = token_weights(counts, recipe.batch.aggregation, recipe.most_trained_tokens)
    sequences: list[TrainSequence] = []
    for group, group_weights in zip(groups, weights, strict=True):
        for rollout, weight in zip(group.rollouts, group_weights, strict=True):
            if weight:
                sequences += _sequences_of(group, rollout, float(weight))
    return sequences


def _sequences_of(group: Group, rollout: Rollout, weight: float) -> list[TrainSequence]:
    """Return a rollout's paths that have a trained token. weight: as in `_sequence`."""
    paths = paths_of(rollout.segments, rollout.paths, group.prompt.tokens)
    sequences = []
    for number, (path, experts) in enumerate(zip(paths, rollout.path_experts, strict=True)):
        if path.trained.any():
            sequence = _sequence(group, rollout, path, weight)
            sequences.append(replace(sequence, experts=experts, path=number))
    return sequences


def _sequence(group: Group, rollout: Rollout, path: PathTokens, weight: float) -> TrainSequence:
    """Return one path of a rollout as the learner sees it, without its experts. weight:
    of each trained token in the loss.
    """
    turns_have_credit = path.turns.max(initial=-1) >= 0
    return TrainSequence(
        ticket=group.ticket,
        sample=rollout.sample,
        tokens=path.tokens,
        behaviour_logprobs=np.where(path.trained, path.logprobs, np.float32(0)),
        loss_weight=path.trained * np.float32(weight),
        advantage=0.0,
        reward=rollout.reward,
        teacher_gain=_teacher_gain(rollout, len(path.tokens)),
        turns=path.turns if turns_have_credit else None,
    )


def _teacher_gain(rollout: Rollout, tokens: int) -> PerToken:
    """Return log pi_teacher - log mu at trained tokens, 0 elsewhere, [tokens]."""
    if rollout.teacher_logprobs is None:
        return 0.0
    gain = rollout.teacher_logprobs - rollout.logprobs
    gain_of_trained = np.where(rollout.trained, gain, np.float32(0))
    of_prompt = np.zeros(tokens - len(gain), np.float32)
    return np.concatenate([of_prompt, gain_of_trained])


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
    groups = [group for group in batch.groups if not group.void]
    rollouts: list[Rollout] = []
    for group in groups:
        rollouts += group.rollouts
    teaching = [g for g in groups if recipe.all_groups_teach or g.has_variance]
    groups_with_tokens = [g for g in teaching if any(tokens_in_loss(g, recipe.batch))]
    rewards = np.array([r.reward for r in rollouts])
    correct = np.array([r.correct for r in rollouts], dtype=bool)
    lengths = np.array([len(r.tokens) for r in rollouts])
    reward_right = _mean(rewards[correct])
    reward_wrong = _mean(rewards[~correct])
    statistics = {
        "pass_rate_train": _mean(correct),
        "reward_mean": _mean(rewards),
        "reward_gap": reward_right - reward_wrong,
        "zero_variance_share": 1 - _mean([g.has_variance for g in groups]),
        "groups_in_loss": float(len(groups_with_tokens)),
        "void_groups": float(len(batch.groups) - len(groups)),
        "truncation_rate": _mean([r.finish == "length" for r in rollouts]),
        "interruption_rate": _mean([r.interrupted for r in rollouts]),
        "format_error_rate": _mean([not r.format_ok for r in rollouts]),
        "grader_timeout_rate": _mean([r.grader_timeout for r in rollouts]),
        "grader_error_rate": _mean([r.grader_error for r in rollouts]),
        "completion_tokens_mean": _mean(lengths),
        "completion_tokens_right_mean": _mean(lengths[correct]),
        "completion_tokens_wrong_mean": _mean(lengths[~correct]),
        "retries": float(sum(r.retries for r in rollouts)),
    }
    statistics |= _version_statistics(rollouts, batch.step)
    statistics |= _reward_statistics(rollouts)
    return statistics | _teacher_statistics(rollouts)


def _version_statistics(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """Return how old the weights were that sampled the rollouts."""
    sampled: list[Segment] = []
    versions: list[int] = []
    for rollout in rollouts:
        segments = [s for s in rollout.segments if s.trained and len(s.tokens)]
        sampled += segments
        versions.append(len({s.weight_version for s in segments}))
    counts = np.array([len(s.tokens) for s in sampled], dtype=np.int64)
    sampled_versions = np.array([s.weight_version for s in sampled], dtype=np.int64)
    lags = step - sampled_versions
    mean_lag = math.nan
    if len(lags):
        mean_lag = float(np.average(lags, weights=counts))
    return {
        "generated_tokens": float(counts.sum()),
        "lag_mean": mean_lag,
        "lag_max": float(lags.max(initial=0)),
        "versions_per_rollout": _mean(versions),
        "versions_per_rollout_max": float(max(versions, default=0)),
    }


def _reward_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each named score, and of the sum of an agent's rewards."""
    scores: dict[str, list[float]] = {}
    credits: list[float] = []
    for rollout in rollouts:
        for name, score in rollout.rewards.items():
            scores.setdefault(name, []).append(score)
        by_turn = rollout.credits
        if -1 not in by_turn:  # -1 stands for the whole rollout: its turns have no credit
            first_turn = min(by_turn)  # its credit is the sum of all later rewards
            credits.append(by_turn[first_turn])
    statistics = {f"reward/{name}": _mean(values) for name, values in scores.items()}
    if credits:
        statistics["reward/turns"] = _mean(credits)
    return statistics


def _teacher_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of log mu - log pi_teacher over trained tokens; nothing without a
    teacher.
    """
    differences = []
    for rollout in rollouts:
        if rollout.teacher_logprobs is not None:
            difference = rollout.logprobs - rollout.teacher_logprobs
            differences.append(difference[rollout.trained])
    if not differences:
        return {}
    return {"kl_teacher": _mean(np.concatenate(differences))}


def advantage_statistics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Return statistics over the rollouts in the loss, each counted once; over trained
    tokens if each has its own advantage. `advantage_fit` is NaN if advantages or
    rewards do not vary, and left out if advantages do not come only from rewards.
    """
    # reversed: of a rollout's several paths the first one stays
    first = {(s.ticket, s.sample): s for s in reversed(sequences)}
    counted = []
    for sequence in sequences:
        is_first = first[sequence.ticket, sequence.sample] is sequence
        if is_first or np.ndim(sequence.advantage):
            counted.append(sequence)
    advantages = np.concatenate([_advantages(s) for s in counted])
    statistics = {
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std()),
        "advantage_abs_max": float(np.abs(advantages).max()),
    }
    if not any(np.ndim(s.teacher_gain) or s.turns is not None for s in sequences):
        statistics["advantage_fit"] = _fit(list(first.values()))
    return statistics


def _fit(rollouts: Sequence[TrainSequence]) -> float:
    """Return the correlation of advantages and rewards, both centred by group."""
    _, group = np.unique([s.ticket for s in rollouts], return_inverse=True)
    mean_advantages = np.array([_advantages(s).mean() for s in rollouts])
    advantages = _less_group_mean(mean_advantages, group)
    rewards = _less_group_mean(np.array([s.reward for s in rollouts]), group)
    squares_of_advantages = advantages @ advantages
    squares_of_rewards = rewards @ rewards
    norm = math.sqrt(squares_of_advantages * squares_of_rewards)
    if norm <= ROUNDING:
        return math.nan
    return float(advantages @ rewards) / norm


def _less_group_mean(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the values [n] less the mean of their group. group: index of each one's
    group, [n].
    """
    means = np.bincount(group, values) / np.bincount(group)
    return values - means[group]


def _advantages(sequence: TrainSequence) -> np.ndarray:
    """Return the sequence's advantages as [1] or [trained tokens]."""
    if np.ndim(sequence.advantage):
        return sequence.of_trained(sequence.advantage)
    return np.array([sequence.advantage], np.float64)


def _mean(values: np.ndarray | Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else float("nan")
