"""What losses share: their input `Tokens`, and the terms that combine with any of them.
docs/reference/recipe.md says when to use which.

Ratios. Every policy loss reports statistics of rho_t = pi(y_t) / mu(y_t), the
importance ratio of each trained token. k3 = rho - 1 - log rho estimates KL(mu || pi) on
tokens of mu (http://joschu.net/blog/kl-approx.html). The effective sample size as a
share of the tokens is (sum rho)^2 / (n sum rho^2) (Kong 1992). Progress is the mean of
A log rho: how much likelier better answers have become since they were sampled; to
first order, the expected gain in advantage (Kakade and Langford 2002).

Correction. Truncated (TIS) and masked (MIS) importance sampling bound the weight of a
token that another policy sampled.

    truncate   rho_t -> min(rho_t, cap)
    mask       rho_t -> rho_t [lower <= rho_t <= cap]

Truncation: Ionides 2008; between server and learner: Yao et al. 2025, "Your Efficient
RL Framework Secretly Brings You Off-Policy RL Training". Masking: Liu et al. 2025,
"When Speed Kills Stability"; with both bounds, IcePop (Ring-1T, arXiv 2510.18855,
section 2.3: lower 0.5, cap 5). In these, the learner recomputes the clip's old policy,
and the correction is a second factor. Here the server's log-probs are the old policy,
so a clip loss's ratio already contains the mismatch, and the lag: the correction bounds
it instead of multiplying again. REINFORCE has no ratio, so it gets one (as in
INTELLECT-3, arXiv 2512.16144, equation 1).

Sequence mask: no token of a rollout is trained if the geometric mean of its ratios is
outside [low, high].

    loss_t -> loss_t [low <= exp(mean over t of log rho_t) <= high]

Unlike the product of ratios, the mean does not grow with the length (Liu et al. 2025,
part 3; verl's "geometric" rejection sampling). It drops whole rollouts, since a wrong
choice of experts shifts all following tokens, each by little. Masks change no other
token's weight: the aggregation counts masked tokens.

(log rho)^2: loss_t + coefficient * (log pi(y_t) - log mu(y_t))^2 holds the policy near
the one that sampled, on masked tokens too. Kimi K2.5 (arXiv 2602.02276); prime-rl has
1e-3.

Entropy bonus: loss_t - coefficient * H(pi(. | y_<t)). Williams and Peng 1991; PPO
(arXiv 1707.06347, eq. 9). The entropy is exact, with its gradient (core/models/head/),
not estimated from the sampled token.

KL to a frozen reference, estimated on each sampled token y from the policy's
distribution.

    d = log pi(y) - log pi_ref(y)
    k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

k3 is GRPO's (arXiv 2402.03300, eq. 4). On tokens of pi, k1 and k3 are unbiased for
KL(pi || pi_ref); k3 is never negative and has less variance; k2 is biased, with a
variance as low. A good estimate need not have a good gradient (Liu et al. 2025, arXiv
2510.01555; Shah et al. 2025, arXiv 2512.21852). In the loss, the expected gradient of
k1 is 0, that of k2 is the gradient of KL(pi || pi_ref), that of k3 of KL(pi_ref || pi).
In the reward, k1 gives that of KL(pi || pi_ref); the others are biased.

The critic's loss: half the squared error against the return, clipped like PPO's ratio.

    loss_t = 1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)

V_old is the critic's value before the step, so with one epoch per step the clip never
acts. It is in the code released with PPO; Andrychowicz et al. 2020 (arXiv 2006.05990)
found that it does not help. PPO's value coefficient 0.5 is the 1/2 here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.recipe import Loss


@dataclass(frozen=True)
class Tokens:
    """The n trained tokens that this rank holds, sequence after sequence."""

    # [n] float32 with gradient: log pi(y) of the policy in training, at the sampling
    # temperature
    logp: Tensor
    # [n] log mu(y), as recorded when the token was sampled: every loss's "old policy"
    behaviour: Tensor
    # [n] log-prob of the frozen reference, at the sampling temperature; 0 without one
    reference: Tensor
    advantage: Tensor  # [n]
    entropy: Tensor  # [n] with gradient: of the policy's distribution, nats
    counted: Tensor  # [n] 0 for the token that stands in if none is trained, else 1
    # [sequences] int64: how many of the n belong to each sequence (a stand-in belongs
    # to the first)
    local_lengths: Tensor
    # [sequences] float32: |y|, trained tokens of each, with those on other
    # context-parallel ranks
    lengths: Tensor
    group: dist.ProcessGroup | None = None  # of those ranks; None if there is only one

    @property
    def log_ratio(self) -> Tensor:
        """log rho [n], without gradient."""
        return self.logp.detach() - self.behaviour

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return, for each token, the mean of `values` [n] (no gradient) over its
        sequence. COLLECTIVE in `group`.
        """
        counted = values * self.counted
        totals = torch.segment_reduce(counted, "sum", lengths=self.local_lengths, initial=0)
        if self.group is not None:
            dist.all_reduce(totals, group=self.group)
        means = totals / self.lengths
        return means.repeat_interleave(self.local_lengths, output_size=len(values))


LARGEST = 80.0
"""Bound of log rho for tokens whose weight is bounded or dropped later: an infinite rho
times 0 is NaN; e^80 is finite.
"""


def with_finite_ratios(tokens: Tokens, mask: Tensor | bool) -> Tokens:
    """Return the tokens with log rho of at most LARGEST where `mask` [n] is true: their
    `behaviour` is raised, so that the gradient through `logp` stays.
    """
    bounded = torch.maximum(tokens.behaviour, tokens.logp.detach() - LARGEST)
    mask = torch.as_tensor(mask, device=bounded.device)
    return replace(tokens, behaviour=torch.where(mask, bounded, tokens.behaviour))


type TokenLoss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""Maps tokens to losses and metrics [n]. Metrics named `…_max` are reduced by maximum,
all others by a mean over tokens.
"""
type PolicyLoss = Callable[[Tokens, Loss], tuple[Tensor, dict[str, Tensor]]]


def made_up_tokens() -> Tokens:
    """Make three tokens of two sequences, to try a loss on before training."""
    logp = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    return Tokens(
        logp=logp,
        behaviour=torch.tensor([-0.6, -0.9, -2.5]),
        reference=torch.tensor([-0.7, -0.8, -2.2]),
        advantage=torch.tensor([1.0, 1.0, -1.0]),
        entropy=logp * -0.5,
        counted=torch.ones(3),
        local_lengths=torch.tensor([2, 1]),
        lengths=torch.tensor([2.0, 1.0]),
    )


def metric_names(loss: TokenLoss) -> tuple[str, ...]:
    """Return the names of a loss's metrics, for ranks that do not compute the loss but
    take part in reducing the metrics.
    """
    return tuple(loss(made_up_tokens())[1])


def ratio_metrics(tokens: Tokens) -> dict[str, Tensor]:
    """Compute per-token metrics [n] of log rho."""
    log_ratio = tokens.log_ratio
    ratio = log_ratio.exp()
    gap = log_ratio.abs()
    return {
        "progress": tokens.advantage * log_ratio,
        "ratio_mean": ratio,
        "ratio_max": ratio,
        "ratio_square": ratio.square(),
        "kl_k3": ratio - 1 - log_ratio,
        "trained_logprob_diff": gap,
        "trained_logprob_diff_max": gap,
    }


def with_effective_sample_size(means: dict[str, float]) -> dict[str, float]:
    """Replace the ratios' mean square in reduced metrics, if there is one, by the
    `effective_sample_size`.
    """
    mean_square = means.pop("ratio_square", None)
    if mean_square:
        means["effective_sample_size"] = means["ratio_mean"] ** 2 / mean_square
    return means


def correction_factor(
    ratio: Tensor, kind: Literal["truncate", "mask"], lower: float, cap: float
) -> Tensor:
    """Return the factor in [0, 1] by which the correction scales each ratio [n]."""
    if kind == "truncate":
        return (cap / ratio).clamp(max=1)
    within_bounds = (lower <= ratio) & (ratio <= cap)
    return within_bounds.to(ratio.dtype)


def sequences_outside(tokens: Tokens, low: float, high: float) -> Tensor:
    """Return for each token [n] whether its sequence's mean ratio is outside [low,
    high]; NaN counts as outside. COLLECTIVE.
    """
    ratio = tokens.sequence_mean(tokens.log_ratio).exp()
    return ~((low <= ratio) & (ratio <= high))


Estimator = Literal["k1", "k2", "k3"]


def estimate(logp: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate the KL at each token [n]; the gradient flows through `logp`. expm1 keeps
    precision for small d.
    """
    d = logp - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


VALUE_METRICS = ("value_clipped_share",)


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's loss [n] and metrics [n]. values: [n] with gradient; old:
    those before the step; clip: how far a value may move from its old one.
    """
    free = (values - returns).square()
    near_old = torch.clamp(values, old - clip, old + clip)
    bounded = (near_old - returns).square()
    clipped = (bounded > free).detach().float()
    return torch.maximum(free, bounded) / 2, {"value_clipped_share": clipped}


def cross_entropy(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -log pi(y) [n], which the warm start minimises."""
    return -tokens.logp, {"token_nll": -tokens.logp.detach()}
