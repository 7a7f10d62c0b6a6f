"""Each loss against its paper's formula in numpy (value) and finite differences of a
surrogate in float64 (gradient), and the special cases that tie the losses together.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from megarl.core.algorithm.losses import policy_loss
from megarl.core.algorithm.losses.terms import (
    Tokens,
    cross_entropy,
    metric_names,
    with_effective_sample_size,
)
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Loss
from megarl.core.recipe.algorithm import LOSSES

Floats = np.ndarray
Draw = tuple[
    Floats, Floats, Floats, list[int]
]  # log pi, log mu, advantage [n]; lengths of the sequences


def draw(lengths: list[int], seed: int = 0, lag: float = 0.4) -> Draw:
    """Log-probs of both policies, `lag` apart; one advantage a sequence."""
    random = np.random.default_rng(seed)
    n = sum(lengths)
    behaviour = -random.exponential(2.0, n)
    return (
        behaviour + random.normal(0, lag, n),
        behaviour,
        np.repeat(random.normal(0, 1, len(lengths)), lengths),
        lengths,
    )


def tokens(logp: torch.Tensor, drawn: Draw, entropy: torch.Tensor | None = None) -> Tokens:
    _, recorded, advantage, lengths = drawn
    n = torch.tensor(lengths)
    entropy = torch.zeros_like(logp) if entropy is None else entropy
    behaviour = torch.tensor(recorded)
    reference = torch.zeros_like(logp)
    return Tokens(
        logp,
        behaviour,
        reference,
        torch.tensor(advantage),
        entropy,
        torch.ones_like(logp),
        n,
        n.to(logp.dtype),
    )


def value_and_gradient(section: Loss, drawn: Draw) -> tuple[Floats, Floats, dict[str, Floats]]:
    """Token losses, gradient of their sum, metrics; all [n] float64."""
    logp = torch.tensor(drawn[0], requires_grad=True)
    losses, metrics = policy_loss(section)(tokens(logp, drawn))
    losses.sum().backward()
    assert logp.grad is not None
    return losses.detach().numpy(), logp.grad.numpy(), {k: v.numpy() for k, v in metrics.items()}


def differences(objective: Callable[[Floats], float], at: Floats) -> Floats:
    """Central finite differences."""
    step = 1e-6
    return np.array(
        [
            (objective(at + step * e) - objective(at - step * e)) / (2 * step)
            for e in np.eye(len(at))
        ]
    )


def cispo(
    section: Loss, logp: Floats, frozen: Floats, behaviour: Floats, gain: Floats, _: list[int]
) -> float:
    """MiniMax-M1, equations 4 and 5. frozen: logp under stop-gradient."""
    return float(-(np.minimum(np.exp(frozen - behaviour), section.cap) * gain * logp).sum())


def ppo(
    section: Loss, logp: Floats, _frozen: Floats, behaviour: Floats, gain: Floats, _: list[int]
) -> float:
    """PPO, equation 7: written case by case."""
    total = 0.0
    for new, old, a in zip(logp, behaviour, gain, strict=True):
        ratio = np.exp(new - old)
        bound = 1 + section.clip_high if a >= 0 else 1 - section.clip_low
        total -= a * (min(ratio, bound) if a >= 0 else max(ratio, bound))
    return float(total)


def gspo(
    section: Loss,
    logp: Floats,
    _frozen: Floats,
    behaviour: Floats,
    gain: Floats,
    lengths: list[int],
) -> float:
    """GSPO, equations 5 and 7: a loss a sequence, times its tokens, for the sum over
    tokens is what is compared.
    """
    total = 0.0
    start = 0
    for n in lengths:
        here = slice(start, start + n)
        ratio = np.exp(logp[here].sum() - behaviour[here].sum()) ** (1 / n)
        a = gain[start]
        total -= n * min(ratio * a, np.clip(ratio, 1 - section.clip_low, 1 + section.clip_high) * a)
        start += n
    return float(total)


def dppo(
    section: Loss, logp: Floats, frozen: Floats, behaviour: Floats, gain: Floats, _: list[int]
) -> float:
    """arXiv 2602.04879: token by token, the divergence between two coins that show the
    sampled token or another one.
    """
    total = 0.0
    for new, now, old, a in zip(logp, frozen, behaviour, gain, strict=True):
        p = np.exp(old)
        q = np.exp(now)
        apart = (
            abs(p - q) if section.divergence == "tv" else rel_entr(p, q) + rel_entr(1 - p, 1 - q)
        )
        masked = (
            apart > section.clip_high
            if a > 0 and q > p
            else a < 0 and q < p and apart > section.clip_low
        )
        total -= 0.0 if masked else np.exp(new - old) * a
        total += section.log_ratio_penalty * (new - old) ** 2
    return float(total)


def gmpo(
    section: Loss,
    logp: Floats,
    _frozen: Floats,
    behaviour: Floats,
    gain: Floats,
    lengths: list[int],
) -> float:
    """arXiv 2507.20673: a product over tokens with the sign of the advantage as its
    exponent, times a sequence's tokens.
    """
    total = 0.0
    start = 0
    for n in lengths:
        here = slice(start, start + n)
        ratio = np.exp(logp[here] - behaviour[here])
        sign = np.sign(gain[start])
        bounded = np.clip(ratio, np.exp(-section.clip_low), np.exp(section.clip_high))
        product = np.prod(np.minimum(ratio**sign, bounded**sign)) ** (sign / n)
        total -= n * product * gain[start]
        start += n
    return float(total)


def icepop(
    section: Loss, logp: Floats, frozen: Floats, behaviour: Floats, gain: Floats, _: list[int]
) -> float:
    """arXiv 2510.18855, section 2.3, where the old policy is the one that sampled: M
    masks PPO's objective.
    """
    kept = (np.exp(frozen - behaviour) >= section.lower) & (
        np.exp(frozen - behaviour) <= section.cap
    )
    ratio = np.exp(logp - behaviour)
    bounded = np.clip(ratio, 1 - section.clip_low, 1 + section.clip_high)
    return float(-(kept * np.minimum(ratio * gain, bounded * gain)).sum())


def masked_cispo(
    section: Loss, logp: Floats, frozen: Floats, behaviour: Floats, gain: Floats, lengths: list[int]
) -> float:
    """CISPO on the sequences whose ratios have a geometric mean within bounds."""
    assert section.sequence_mask
    low, high = section.sequence_mask
    ratios = np.split(np.exp(frozen - behaviour), np.cumsum(lengths)[:-1])
    means = [np.prod(r) ** (1 / len(r)) for r in ratios]
    kept = np.repeat([low <= m <= high for m in means], lengths)
    return cispo(section, logp[kept], frozen[kept], behaviour[kept], gain[kept], [])


def reinforce(
    section: Loss, logp: Floats, frozen: Floats, behaviour: Floats, gain: Floats, _: list[int]
) -> float:
    return float(-(gain * logp).sum())


@pytest.mark.parametrize("lag", [0.05, 1.5])
@pytest.mark.parametrize(
    ("section", "reference"),
    [
        (Loss(cap=4.0), cispo),
        (Loss(cap=1.2), cispo),
        (Loss(kind="clip"), ppo),
        (Loss(kind="clip", clip_low=0.2, clip_high=0.28), ppo),
        (Loss(kind="gspo", clip_low=3e-4, clip_high=4e-4), gspo),
        (Loss(kind="gspo", clip_low=0.1, clip_high=0.2), gspo),
        (Loss(kind="reinforce"), reinforce),
        (Loss(kind="dppo", clip_low=0.15, clip_high=0.1), dppo),
        (Loss(kind="dppo", divergence="kl", clip_low=0.05, clip_high=0.02), dppo),
        (Loss(kind="dppo", log_ratio_penalty=1e-3), dppo),
        (Loss(kind="gmpo", clip_low=0.4, clip_high=0.3), gmpo),
        (Loss(kind="clip", correction="mask", lower=0.5, cap=5.0), icepop),
        (Loss(sequence_mask=(0.98, 1.02)), masked_cispo),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_value_and_gradient(section: Loss, reference: Callable[..., float], lag: float) -> None:
    drawn = draw([1, 7, 30, 2], lag=lag)
    logp, behaviour, gain, lengths = drawn
    losses, gradient, _ = value_and_gradient(section, drawn)

    def objective(at: Floats) -> float:
        return reference(section, at, logp, behaviour, gain, lengths)

    assert losses.sum() == pytest.approx(objective(logp), rel=1e-12)
    rounding = 5e-9 * max(
        1.0, np.abs(gradient).max()
    )  # of the objective's sum, over the step of the differences
    np.testing.assert_allclose(gradient, differences(objective, logp), rtol=1e-6, atol=rounding)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """own_module(source): my_losses.py in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source: str) -> None:
        sys.modules.pop("my_losses", None)
        importlib.invalidate_caches()
        (tmp_path / "my_losses.py").write_text(source)

    yield write
    sys.modules.pop("my_losses", None)


def test_the_loss_of_the_examples(own_module: Callable[[str], None]) -> None:
    own_module((Path(__file__).parents[4] / "examples" / "my_loss.py").read_text())
    section = Loss(kind="my_losses:tapered", cap=0.9)
    drawn = draw([3, 17, 4], lag=0.8)
    logp, behaviour, gain, _ = drawn
    losses, gradient, metrics = value_and_gradient(section, drawn)
    ratio = np.exp(logp - behaviour)
    weight = np.array([1.0 if a >= 0 else min(r, 0.9) for a, r in zip(gain, ratio, strict=True)])
    np.testing.assert_allclose(losses, -weight * gain * logp, rtol=1e-9)
    np.testing.assert_allclose(gradient, -weight * gain, rtol=1e-9)
    assert set(metrics) == set(metric_names(policy_loss(section))), (
        "ranks that do not compute it know its metrics"
    )
    assert metrics["tapered_share"].tolist() == (ratio > 0.9).tolist()
    assert with_effective_sample_size(dict.fromkeys(metrics, 1.0))["effective_sample_size"] == 1
    assert "clipped_share" not in metrics
    bonus, _ = policy_loss(section.model_copy(update={"entropy_bonus": 0.5}))(
        tokens(torch.tensor(logp), drawn, torch.ones(len(logp), dtype=torch.float64))
    )
    np.testing.assert_allclose(bonus.numpy(), losses - 0.5, rtol=1e-9)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "cannot be imported: ModuleNotFoundError: No module named 'my_losses'"),
        (
            "def other(): ...",
            "cannot be imported: AttributeError: module 'my_losses' has no attribute 'mine'",
        ),
        ("1 +", "cannot be imported: SyntaxError"),
        ("mine = 3", "is a int and cannot be called"),
        (
            "def mine(tokens): return tokens.logp, {}",
            "fails on three made-up tokens: TypeError: mine() takes 1 positional",
        ),
        ("def mine(t, s): return t.logp", "returns a Tensor, not (losses, metrics)"),
        (
            "def mine(t, s): return t.logp.mean(), {}",
            "returns losses of shape (); return one loss per token",
        ),
        ("def mine(t, s): return t.logp.detach(), {}", "returns losses without a gradient"),
        (
            "def mine(t, s): return t.logp, {'x': t.logp}",
            "returns a metric 'x' that is not a tensor [n], or has a gradient",
        ),
        (
            "def mine(t, s): return t.logp, {'lr': t.advantage}",
            "returns a metric named 'lr', but that name is taken",
        ),
        (
            "def mine(t, s): return t.logp, {'ratio_mean': t.advantage}",
            "returns a metric named 'ratio_mean', but that name is taken",
        ),
    ],
)
def test_what_is_no_loss_is_named(
    own_module: Callable[[str], None], body: str | None, said: str
) -> None:
    if body is not None:
        own_module(body + "\n")
    with pytest.raises(MegarlError) as error:
        policy_loss(Loss(kind="my_losses:mine"))
    assert str(error.value).startswith("loss.kind: my_losses:mine ")
    assert said in str(error.value)


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_correction_bounds_the_weight(kind: str) -> None:
    """The gradient is -w A, w the corrected importance weight, also where PPO's clip
    would let it grow.
    """
    drawn = draw([40, 40], lag=1.5)
    logp, behaviour, gain, _ = drawn
    ratio = np.exp(logp - behaviour)
    weight = np.minimum(ratio, 2.0) if kind == "truncate" else np.where(ratio <= 2.0, ratio, 0.0)
    free = np.where(gain >= 0, ratio <= 1.28, ratio >= 0.8)  # not clipped
    assert ((ratio > 2) & free).any()
    clipped = Loss.model_validate(
        {"kind": "clip", "clip_high": 0.28, "correction": kind, "cap": 2.0}
    )
    np.testing.assert_allclose(
        value_and_gradient(clipped, drawn)[1], -weight * gain * free, rtol=1e-12
    )
    bare = Loss.model_validate({"kind": "reinforce", "correction": kind, "cap": 2.0})
    _, gradient, metrics = value_and_gradient(bare, drawn)
    np.testing.assert_allclose(gradient, -weight * gain, rtol=1e-12)
    np.testing.assert_array_equal(metrics["corrected_share"], ratio > 2.0)


@pytest.mark.parametrize(
    ("section", "weight"),
    [
        ({"kind": "clip", "correction": "mask"}, 0),
        ({"kind": "clip", "correction": "truncate"}, 4),
        ({"kind": "clip", "sequence_mask": (0.5, 2)}, 0),
        ({"kind": "dppo", "correction": "mask"}, 0),
        ({"kind": "dppo", "sequence_mask": (0.5, 2)}, 0),
        ({"kind": "reinforce", "correction": "mask"}, 0),
        ({"kind": "reinforce", "correction": "truncate"}, 4),
        ({"kind": "cispo"}, 4),
        ({"kind": "cispo", "sequence_mask": (0.5, 2)}, 0),
    ],
)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_an_infinite_ratio_is_bounded_or_dropped(
    section: dict[str, Any], weight: float, advantage: float
) -> None:
    """e^99.5 is infinite in float32. The other sequence learns as it does alone."""
    loss = policy_loss(Loss.model_validate(section | {"cap": 4.0}))
    if advantage > 0 and section["kind"] == "clip":
        weight = 0
    logp = torch.tensor([-0.5, -1.0], requires_grad=True)
    one = torch.ones(2)
    none = torch.zeros(2)
    recorded = torch.tensor([-100.0, -0.9])
    gains = torch.tensor([advantage, 1.0])
    lengths = torch.tensor([1, 1])
    losses, _ = loss(Tokens(logp, recorded, none, gains, none, one, lengths, one))
    losses.sum().backward()
    alone = torch.tensor([-1.0], requires_grad=True)
    loss(Tokens(alone, recorded[1:], none[1:], one[1:], none[1:], one[1:], lengths[1:], one[1:]))[
        0
    ].sum().backward()
    assert losses.isfinite().all()
    assert logp.grad is not None
    assert alone.grad is not None
    assert logp.grad.tolist() == [pytest.approx(-weight * advantage), alone.grad.item()]


def test_a_clipped_token_of_infinite_ratio_leaves_no_nan() -> None:
    logp = torch.tensor([-0.5], requires_grad=True)
    one = torch.ones(1)
    none = torch.zeros(1)
    given = Tokens(logp, torch.tensor([-100.0]), none, one, none, one, torch.tensor([1]), one)
    losses = policy_loss(Loss(kind="clip", clip_high=0.28))(given)[0]
    losses.sum().backward()
    assert logp.grad is not None
    assert (losses.item(), logp.grad.item()) == (pytest.approx(-1.28), 0.0)


def test_masked_gspo_drops_tokens_and_keeps_the_ratio_of_the_sequence() -> None:
    drawn = draw([25, 25], lag=1.0)
    kept = np.exp(drawn[0] - drawn[1]) <= 2.0
    plain = Loss(kind="gspo", clip_low=1.0, clip_high=10.0)
    gradient = value_and_gradient(plain, drawn)[1]
    masked = value_and_gradient(plain.model_copy(update={"correction": "mask", "cap": 2.0}), drawn)[
        1
    ]
    np.testing.assert_allclose(masked, gradient * kept, rtol=1e-12)
    assert 0 < kept.sum() < 50


@pytest.mark.parametrize(
    ("behaviour", "now", "advantage", "masked"),
    [
        (0.6, 0.9, 1.0, True),
        (0.6, 0.9, -1.0, False),
        (0.6, 0.3, -1.0, True),
        (0.6, 0.3, 1.0, False),
        (0.6, 0.7, 1.0, False),
        (
            1e-5,
            1e-3,
            1.0,
            False,
        ),  # PPO would clip it, and would let the first through at 1.5 with clip_high 0.5
        (1.0, 1e-30, -1.0, True),
        (1e-30, 1.0, 1.0, True),
    ],
)
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_masks_what_moved_far_and_is_pulled_on(
    behaviour: float, now: float, advantage: float, masked: bool, divergence: str
) -> None:
    drawn = (np.log([now]), np.log([behaviour]), np.array([advantage]), [1])
    section = Loss.model_validate(
        {"kind": "dppo", "divergence": divergence, "clip_low": 0.15, "clip_high": 0.15}
    )
    _, gradient, metrics = value_and_gradient(section, drawn)
    assert np.isfinite(gradient).all()
    assert (gradient.item() == 0, metrics["clipped_share"].item()) == (masked, masked)
    assert np.isfinite(metrics["divergence_max"]).all()


def test_a_masked_sequence_leaves_the_others_as_they_were() -> None:
    """One of three sequences has moved by .1 a token, up or down; alone it is masked,
    with or without a correction.
    """
    for way in (1, -1):
        behaviour = np.full(9, -1.0)
        drawn = (
            behaviour + np.repeat([0.001, way * 0.1, 0.0], 3),
            behaviour,
            np.ones(9),
            [3, 3, 3],
        )
        for section in (
            Loss(),
            Loss(kind="clip", correction="mask"),
            Loss(kind="gmpo"),
            Loss(kind="dppo"),
        ):
            plain = value_and_gradient(section, drawn)[1]
            _, gradient, metrics = value_and_gradient(
                section.model_copy(update={"sequence_mask": (0.99, 1.01)}), drawn
            )
            np.testing.assert_array_equal(gradient, plain * np.repeat([1, 0, 1], 3))
            np.testing.assert_array_equal(metrics["sequence_masked_share"], np.repeat([0, 1, 0], 3))


LAG = st.floats(0, 2)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
SEED = st.integers(0, 1000)


def same(a: Loss, b: Loss, drawn: Draw) -> None:
    """Losses with equal gradients; some values differ by a constant."""
    np.testing.assert_allclose(
        value_and_gradient(a, drawn)[1], value_and_gradient(b, drawn)[1], rtol=1e-10, atol=1e-14
    )


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEED)
def test_cispo_without_cap_and_lag_is_reinforce(lengths: list[int], seed: int) -> None:
    drawn = draw(lengths, seed, lag=0.0)
    same(Loss(cap=1e30), Loss(kind="reinforce"), drawn)
    same(Loss(kind="clip"), Loss(kind="reinforce"), drawn)
    for kind in ("gspo", "gmpo", "dppo"):
        same(Loss(kind=kind), Loss(kind="reinforce"), drawn)


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEED, lag=LAG)
def test_truncated_reinforce_is_cispo(lengths: list[int], seed: int, lag: float) -> None:
    same(
        Loss(kind="reinforce", correction="truncate", cap=1.3),
        Loss(cap=1.3),
        draw(lengths, seed, lag),
    )


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEED, lag=LAG)
def test_dapo_with_equal_clips_is_grpo(lengths: list[int], seed: int, lag: float) -> None:
    """GRPO as its equation 3 has it, without the KL term."""
    drawn = draw(lengths, seed, lag)
    logp, behaviour, gain, _ = drawn
    ratio = np.exp(logp - behaviour)
    losses, _, _ = value_and_gradient(Loss(kind="clip", clip_low=0.15, clip_high=0.15), drawn)
    np.testing.assert_allclose(
        losses, -np.minimum(ratio * gain, np.clip(ratio, 0.85, 1.15) * gain), rtol=1e-12
    )


@settings(deadline=None)
@given(answers=st.integers(1, 20), seed=SEED, lag=LAG)
def test_gspo_on_answers_of_one_token_is_grpo(answers: int, seed: int, lag: float) -> None:
    drawn = draw([1] * answers, seed, lag)
    of_sequences, of_tokens = (
        value_and_gradient(Loss(kind=kind), drawn) for kind in ("gspo", "clip")
    )
    for a, b in zip(of_sequences[:2], of_tokens[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


def test_a_token_clipped_by_cispo_still_learns_and_by_ppo_does_not() -> None:
    drawn = (np.array([-0.1]), np.array([-9.0]), np.array([2.0]), [1])
    assert value_and_gradient(Loss(cap=4.0), drawn)[1].item() == -8.0
    _, gradient, metrics = value_and_gradient(Loss(kind="clip"), drawn)
    assert (gradient.item(), metrics["clipped_share"].item()) == (0.0, 1.0)


def test_entropy_bonus() -> None:
    drawn = draw([3, 2])
    entropy = torch.rand(5, dtype=torch.float64, requires_grad=True)
    logp = torch.tensor(drawn[0])
    plain, _ = policy_loss(Loss(kind="clip"))(tokens(logp, drawn, entropy))
    with_bonus, _ = policy_loss(Loss(kind="clip", entropy_bonus=0.01))(tokens(logp, drawn, entropy))
    torch.testing.assert_close(with_bonus, plain - 0.01 * entropy)
    with_bonus.sum().backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [-0.01] * 5


def test_metrics() -> None:
    drawn = draw([50, 50], lag=1.5)
    logp, behaviour, gain, _ = drawn
    ratio = np.exp(logp - behaviour)
    _, _, capped = value_and_gradient(Loss(cap=1.5), drawn)
    np.testing.assert_allclose(capped["ratio_mean"], ratio, rtol=1e-12)
    np.testing.assert_allclose(capped["kl_k3"], ratio - 1 - np.log(ratio), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(capped["capped_share"], ratio >= 1.5)
    assert capped["trained_logprob_diff_max"].max() == np.abs(logp - behaviour).max()
    _, gradient, clipped = value_and_gradient(Loss(kind="clip"), drawn)
    np.testing.assert_array_equal(clipped["clipped_share"], gradient == 0)
    shown = with_effective_sample_size({name: float(v.mean()) for name, v in capped.items()})
    assert shown["effective_sample_size"] == pytest.approx(
        ratio.sum() ** 2 / (100 * (ratio**2).sum())
    )
    assert "ratio_square" not in shown
    assert len(gain) == 100


def test_effective_sample_size_of_one_token_that_outweighs_all() -> None:
    drawn = (np.full(10, -1.0), np.array([-30.0] + [-1.0] * 9), np.ones(10), [10])
    metrics = value_and_gradient(Loss(), drawn)[2]
    shown = with_effective_sample_size({name: float(v.mean()) for name, v in metrics.items()})
    assert shown["effective_sample_size"] == pytest.approx(0.1)


def test_sequence_mean_over_the_parts_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 3 and 2 tokens, of which the other rank has 1 and 2; a rank without
    tokens has filler.
    """
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda sums, group: sums.add_(torch.tensor([10.0, 7.0]))
    )
    one = torch.ones(2)
    group = object()
    some = Tokens(
        one, one, one, one, one, one, torch.tensor([2, 0]), torch.tensor([3.0, 2.0]), group
    )
    assert some.sequence_mean(torch.tensor([1.0, 4.0])).tolist() == [5.0, 5.0]
    one = torch.ones(1)
    filler = Tokens(
        one, one, one, one, one, one * 0, torch.tensor([1, 0]), torch.tensor([3.0, 2.0]), group
    )
    sums = filler.sequence_mean(torch.tensor([99.0]))
    assert sums.tolist() == pytest.approx([10 / 3])


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("correction", ["none", "mask"])
def test_metric_names_are_the_declared_ones(kind: str, correction: str) -> None:
    section = {
        "kind": kind,
        "correction": correction,
        "entropy_bonus": 0.1,
        "sequence_mask": (0.9, 1.1),
    }
    loss = policy_loss(Loss.model_validate(section))
    drawn = draw([2])
    assert tuple(loss(tokens(torch.tensor(drawn[0]), drawn))[1]) == metric_names(loss)


def test_supervised_loss() -> None:
    drawn = draw([4])
    losses, metrics = cross_entropy(tokens(torch.tensor(drawn[0]), drawn))
    np.testing.assert_array_equal(losses, -drawn[0])
    assert tuple(metrics) == metric_names(cross_entropy)
    assert with_effective_sample_size({"token_nll": 1.0}) == {"token_nll": 1.0}
