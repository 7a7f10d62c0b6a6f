"""The critic's loss against numpy and against finite differences."""

import numpy as np
import pytest
import torch

from megarl.core.algorithm.losses.terms import value_loss

CLIP = 0.2
WIDE = 1e9


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, old values and returns [50], so that values have moved less and more than
    the clip, both ways.
    """
    draw = np.random.default_rng(seed)
    old, returns = draw.uniform(-1, 1, (2, 50))
    return old + draw.uniform(-0.5, 0.5, 50), old, returns


def reference(values: np.ndarray, old: np.ndarray, returns: np.ndarray, clip: float) -> np.ndarray:
    out = []
    for v, o, r in zip(values, old, returns, strict=True):
        out.append(0.5 * max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2))
    return np.array(out)


@pytest.mark.parametrize("clip", [WIDE, CLIP])
def test_loss_and_gradient(clip: float) -> None:
    values, old, returns = drawn(3)
    v = torch.from_numpy(values).requires_grad_()
    losses, metrics = value_loss(v, torch.from_numpy(old), torch.from_numpy(returns), clip)
    assert losses.detach().numpy() == pytest.approx(
        reference(values, old, returns, clip), abs=1e-12
    )
    losses.sum().backward()
    h = 1e-6
    slopes = (
        reference(values + h, old, returns, clip) - reference(values - h, old, returns, clip)
    ) / (2 * h)
    assert v.grad is not None
    assert v.grad.numpy() == pytest.approx(slopes, abs=1e-8)
    clipped = metrics["value_clipped_share"].bool().numpy()
    assert not v.grad.numpy()[clipped].any()  # held where it is
    assert 0.1 < clipped.mean() < 0.9 if clip == CLIP else not clipped.any()


def test_before_the_first_update_the_clip_is_nothing() -> None:
    _, old, returns = (torch.from_numpy(x) for x in drawn(4))
    gradients = []
    for clip in (WIDE, CLIP):
        values = old.clone().requires_grad_()
        value_loss(values, old, returns, clip)[0].sum().backward()
        gradients.append(values.grad)
    assert torch.equal(gradients[0], gradients[1])
