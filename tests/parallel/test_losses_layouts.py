"""GSPO, whose ratio is a whole sequence's, and the clip with what can be put on it are the same at every layout: what autograd
makes of the papers' formulas over transformers' logits in float64, a sequence at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.types import Batch, Group, encode
from tests.parallel.losses_world import LONGEST, SETTINGS
from tests.parallel.test_learner_layouts import TEMPERATURE, VOCABULARY, make_batch
from tests.parallel.worlds import run_world
from tests.tiny import gradients, tiny_llama


def gspo(ratio: torch.Tensor, entropy: torch.Tensor, rewards: np.ndarray, i: int, rollouts: int) -> tuple[Any, Any]:
    """arXiv 2507.18071, equations 5 to 7, less an entropy bonus; the loss and whether it is clipped."""
    loss = SETTINGS["gspo"]["loss"]
    gain = (rewards[i] - rewards.mean()) / rewards.std()
    s = ratio.log().mean().exp()
    bounded = s.clamp(1 - loss["clip_low"], 1 + loss["clip_high"])
    objective = torch.minimum(s * gain, bounded * gain) + loss["entropy_bonus"] * entropy.mean()
    return -objective / rollouts, (bounded * gain < s * gain).expand(len(ratio))


def dr_dapo(ratio: torch.Tensor, entropy: torch.Tensor, rewards: np.ndarray, i: int, rollouts: int) -> tuple[Any, Any]:
    """arXiv 2503.14476, equation 8, weights truncated, over a constant (arXiv 2503.20783) with RLOO's advantage."""
    loss = SETTINGS["dr-dapo"]["loss"]
    gain = rewards[i] - np.delete(rewards, i).mean()
    bounded = ratio.clamp(1 - loss["clip_low"], 1 + loss["clip_high"])
    truncated = ratio.detach().clamp(max=loss["correction_cap"]) / ratio.detach()
    objective = torch.minimum(ratio * gain, bounded * gain) * truncated
    return -objective.sum() / LONGEST / rollouts, bounded * gain < ratio * gain


def by_transformers(model: Any, batch: Batch, setting: Any, path: Path) -> dict[str, Any]:
    model = model.double()
    model.zero_grad()
    groups: list[Group] = [g for g in batch.groups if len({r.reward for r in g.rollouts}) > 1]
    rollouts = sum(len(g.rollouts) for g in groups)
    losses, clipped, ratios = [], [], []
    for group in groups:
        for i, rollout in enumerate(group.rollouts):
            ids = torch.from_numpy(np.concatenate([group.prompt.tokens, rollout.tokens])).long()
            first, trained = len(group.prompt.tokens), torch.from_numpy(rollout.trained)
            distribution = torch.log_softmax(model(ids[None]).logits[0, first - 1 : -1] / TEMPERATURE, -1)
            logp = distribution.gather(-1, ids[first:, None])[:, 0][trained]
            ratio = (logp - torch.from_numpy(rollout.logprobs).double()[trained]).exp()
            entropy = -(distribution.exp() * distribution).sum(-1)[trained]
            loss, cut = setting(ratio, entropy, group.rewards, i, rollouts)
            losses.append(loss)
            clipped.append(cut)
            ratios.append(ratio.detach())
    total = torch.stack(losses).sum()
    total.backward()
    ratio, share = torch.cat(ratios), float(torch.cat(clipped).double().mean())
    assert 0.1 < share < 0.9
    return {
        "loss": float(total),
        "magnitude": float(torch.stack(losses).abs().sum()),
        "gradients": gradients(model, path),
        "metrics": {
            "clipped_share": share,
            "effective_sample_size": float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
            "kl_k3": float((ratio - 1 - ratio.log()).mean()),
        },
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("losses")
    batch = make_batch()
    (path / "batch.msgpack").write_bytes(encode(batch))
    model = tiny_llama(path / "model", vocab_size=VOCABULARY)
    for name, setting in (("gspo", gspo), ("dr-dapo", dr_dapo)):
        torch.save(by_transformers(model, batch, setting, tmp_path_factory.mktemp(name)), path / f"{name}.pt")
    return path


def test_every_layout_has_the_gradients_of_the_formula(directory: Path) -> None:
    print(run_world(2, "tests.parallel.losses_world", str(directory)))
