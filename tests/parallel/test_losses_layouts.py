"""GSPO and GMPO, whose ratio is a whole sequence's, masks of tokens and sequences, the
clip with what can be put on it, and KL to a reference in loss and reward are the same
at every layout: what autograd computes from the papers' formulas and transformers'
logits in float64, a sequence at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.core.base.types import Batch, Group, Rollout, encode
from tests.parallel.losses_world import LONGEST, SETTINGS
from tests.parallel.test_learner_layouts import TEMPERATURE, VOCABULARY, make_batch
from tests.parallel.worlds import run_world
from tests.tiny import gradients, tiny_llama


@dataclass
class Scored:
    """A rollout of those in the loss: place in its group; of its trained tokens
    log-probs of policy, sampler and reference.
    """

    group: Group
    i: int
    logp: Tensor
    behaviour: Tensor
    reference: Tensor
    entropy: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.logp - self.behaviour).exp()


def gspo(rollout: Scored, everything: list[Scored]) -> tuple[Tensor, dict[str, Tensor]]:
    """arXiv 2507.18071, equations 5 to 7, less an entropy bonus; the loss, and per
    token whether it is clipped.
    """
    loss = SETTINGS["gspo"]["loss"]
    rewards = rollout.group.rewards
    gain = (rewards[rollout.i] - rewards.mean()) / rewards.std()
    s = rollout.ratio.log().mean().exp()
    bounded = s.clamp(1 - loss["clip_low"], 1 + loss["clip_high"])
    objective = (
        torch.minimum(s * gain, bounded * gain) + loss["entropy_bonus"] * rollout.entropy.mean()
    )
    return -objective / len(everything), {
        "clipped_share": (bounded * gain < s * gain).expand(len(rollout.logp))
    }


def dr_dapo(rollout: Scored, everything: list[Scored]) -> tuple[Tensor, dict[str, Tensor]]:
    """arXiv 2503.14476, equation 8, weights truncated, over a constant (arXiv
    2503.20783) with RLOO's advantage.
    """
    loss = SETTINGS["dr-dapo"]["loss"]
    ratio = rollout.ratio
    rewards = rollout.group.rewards
    gain = rewards[rollout.i] - np.delete(rewards, rollout.i).mean()
    bounded = ratio.clamp(1 - loss["clip_low"], 1 + loss["clip_high"])
    truncated = ratio.detach().clamp(max=loss["cap"]) / ratio.detach()
    objective = torch.minimum(ratio * gain, bounded * gain) * truncated
    return -objective.sum() / LONGEST / len(everything), {
        "clipped_share": bounded * gain < ratio * gain
    }


def gmpo(rollout: Scored, everything: list[Scored]) -> tuple[Tensor, dict[str, Tensor]]:
    """arXiv 2507.20673: the geometric mean of clipped ratios, written as the product
    that it is.
    """
    loss = SETTINGS["gmpo"]["loss"]
    rewards = rollout.group.rewards
    gain = (rewards[rollout.i] - rewards.mean()) / rewards.std()
    sign = np.sign(gain)
    ratio = rollout.ratio
    bounded = ratio.clamp(np.exp(-loss["clip_low"]), np.exp(loss["clip_high"]))
    product = torch.minimum(ratio**sign, bounded**sign).prod() ** (sign / len(ratio))
    return -product * gain / len(everything), {"clipped_share": bounded**sign < ratio**sign}


def dppo(rollout: Scored, everything: list[Scored]) -> tuple[Tensor, dict[str, Tensor]]:
    """arXiv 2602.04879, Binary-KL, with a squared log ratio (arXiv 2602.02276), on
    sequences that are not masked.
    """
    loss = SETTINGS["dppo"]["loss"]
    rewards = rollout.group.rewards
    p = rollout.behaviour.exp()
    q = rollout.logp.exp()
    gain = rewards[rollout.i] - rewards.mean()
    apart = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    moved = (
        (apart > loss["clip_high"]) & (q > p) if gain > 0 else (apart > loss["clip_low"]) & (q < p)
    )
    low, high = loss["sequence_mask"]
    masked = not low <= rollout.ratio.log().mean().exp() <= high
    total = (
        -rollout.ratio * gain * ~moved * (not masked)
        + loss["log_ratio_penalty"] * rollout.ratio.log() ** 2
    )
    shown = {
        "clipped_share": moved,
        "divergence_max": apart.detach(),
        "divergence_mean": apart.detach(),
    }
    shown["sequence_masked_share"] = torch.full_like(apart, float(masked)).detach()
    return total.sum() / sum(len(r.logp) for r in everything), shown


def kl_in_loss(rollout: Scored, everything: list[Scored]) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with GRPO's penalty, arXiv 2402.03300, equation 4."""
    coefficient = SETTINGS["kl-in-loss"]["reference"]["coefficient"]
    rewards = rollout.group.rewards
    ratio = (rollout.reference - rollout.logp).exp()
    kl = ratio - ratio.log() - 1
    loss = -(rewards[rollout.i] - rewards.mean()) * rollout.logp + coefficient * kl
    return loss.sum() / sum(len(r.logp) for r in everything), {"kl_reference": kl.detach()}


def kl_in_reward(rollout: Scored, everything: list[Scored]) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with InstructGPT's reward, arXiv 2203.02155, equation 2; each reward
    lowered by that of its whole answer.
    """
    coefficient = SETTINGS["kl-in-reward"]["reference"]["coefficient"]
    lowered = {
        (r.group.ticket, r.i): (
            r.group.rewards[r.i] - coefficient * float((r.behaviour - r.reference).sum())
        )
        for r in everything
    }
    means = {
        t: np.mean([v for (ticket, _), v in lowered.items() if ticket == t]) for t, _ in lowered
    }
    centred = {key: value - means[key[0]] for key, value in lowered.items()}
    gain = centred[rollout.group.ticket, rollout.i] / np.std(list(centred.values()))
    tokens = sum(len(r.logp) for r in everything if r.group is rollout.group)
    kl = rollout.logp - rollout.reference
    return -gain * rollout.logp.sum() / tokens / len(means), {"kl_reference": kl.detach()}


FORMULAS: dict[str, Callable[[Scored, list[Scored]], tuple[Tensor, dict[str, Tensor]]]] = {
    "gspo": gspo,
    "gmpo": gmpo,
    "dppo": dppo,
    "dr-dapo": dr_dapo,
    "kl-in-loss": kl_in_loss,
    "kl-in-reward": kl_in_reward,
}


def by_transformers(
    model: Any, reference: Any, batch: Batch, name: str, path: Path
) -> dict[str, Any]:
    model.zero_grad()
    everything = []
    for group in batch.groups:
        if len({r.reward for r in group.rollouts}) > 1:
            for i, rollout in enumerate(group.rollouts):
                logp, entropy = scores(model, group, rollout)
                with torch.no_grad():
                    frozen, _ = scores(reference, group, rollout)
                behaviour = torch.from_numpy(rollout.logprobs[rollout.trained]).double()
                everything.append(Scored(group, i, logp, behaviour, frozen, entropy))
    losses, metrics = zip(*(FORMULAS[name](r, everything) for r in everything), strict=True)
    total = torch.stack(losses).sum()
    total.backward()
    shown = {key: torch.cat([m[key] for m in metrics]).double() for key in metrics[0]}
    means = {key: float(values.mean()) for key, values in shown.items()}
    assert 0.1 < means.get("clipped_share", 0.5) < 0.9
    assert 0.1 < means.get("sequence_masked_share", 0.5) < 0.9
    means |= {key: float(values.max()) for key, values in shown.items() if key.endswith("_max")}
    if "kl_reference" in shown:
        means["kl_reference_max"] = float(shown["kl_reference"].max())
    ratio = torch.cat([r.ratio for r in everything]).detach()
    return {
        "loss": float(total),
        "magnitude": float(torch.stack(losses).abs().sum()),
        "gradients": gradients(model, path),
        "reference": {(r.group.ticket, r.i): r.reference for r in everything},
        "metrics": (
            means
            | {
                "effective_sample_size": float(
                    ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())
                ),
                "kl_k3": float((ratio - 1 - ratio.log()).mean()),
            }
        ),
    }


def scores(model: Any, group: Group, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the trained tokens."""
    ids = torch.from_numpy(np.concatenate([group.prompt.tokens, rollout.tokens])).long()
    first = len(group.prompt.tokens)
    trained = torch.from_numpy(rollout.trained)
    distribution = torch.log_softmax(model(ids[None]).logits[0, first - 1 : -1] / TEMPERATURE, -1)
    logp = distribution.gather(-1, ids[first:, None])[:, 0]
    return logp[trained], -(distribution.exp() * distribution).sum(-1)[trained]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("losses")
    batch = make_batch()
    (path / "batch.msgpack").write_bytes(encode(batch))
    model = tiny_llama(path / "model", vocab_size=VOCABULARY).double()
    reference = tiny_llama(path / "reference", seed=1, vocab_size=VOCABULARY).double()
    for name in SETTINGS:
        torch.save(
            by_transformers(model, reference, batch, name, tmp_path_factory.mktemp(name)),
            path / f"{name}.pt",
        )
    return path


def test_every_layout_has_the_gradients_of_the_formula(directory: Path) -> None:
    print(run_world(2, "tests.parallel.losses_world", str(directory)))
