"""Differences of log-probs by cause, what breaks a limit, what ends a run, and what is
named as the cause.

That the limits hold for real kernels, and that real faults break them, is measured on
the real stack (benchmarks/parity.md).
"""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.parity.records import KeptRollout, comparisons, kept
from megarl.core.evaluation.parity import (
    LASTING,
    LIMITED,
    LIMITS,
    Distribution,
    Measurement,
    ParityJudge,
    ParityLimits,
    RolloutScores,
    explained_by_logprob,
    grid_share,
    growth_along_sequence,
    kernels_text,
    likely_cause,
    logit_error,
    named_cause,
    same_bits,
)

N = 600
BF16 = LIMITS["bf16", False]


def scores(seed: int = 0, noise: float = 0.02, **changes: Any) -> RolloutScores:
    """Servers and learner that differ by noise; half of the tokens have a lag of 1, in
    which the model has changed a little.
    """
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.5, N).astype(np.float32)

    def noisy(around: np.ndarray) -> np.ndarray:
        return (around + rng.normal(0, noise, N)).astype(np.float32)

    then = noisy(logprobs)
    now = (logprobs + rng.normal(0, 0.1, N)).astype(np.float32)
    found = RolloutScores(
        behaviour=noisy(logprobs),
        sampled_at=then,
        rescored=noisy(now),
        learner=noisy(now),
        lag=np.arange(N) % 2,
        position=np.tile(np.arange(N // 4), 4),
        stale=np.zeros(N, bool),
        server=np.zeros(N, np.int64),
        served_gap=rng.normal(0, 3, N).astype(np.float32),
        learner_gap=rng.normal(0, 3, N).astype(np.float32),
    )
    return replace(found, **changes)


def measured(version: int, one: RolloutScores, choices: int = 0, differing: int = 0) -> Measurement:
    return Measurement(version, one, 4, choices, differing)


def judge(experts: bool = False, dtype: str = "bf16") -> ParityJudge:
    return ParityJudge(dtype, experts, True, True)


def test_a_distribution_is_that_of_the_absolute_differences() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 5000))
    first[7] = np.nan
    found = Distribution.of(first, second)
    assert found is not None
    size = np.abs(np.delete(second - first, 7))
    assert found.tokens == 4999
    assert found.mean == pytest.approx(size.mean())
    assert found.max == size.max()
    assert found.share == pytest.approx((size > 0.1).mean())
    for name, q in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        assert vars(found)[name] == np.quantile(size, q, method="higher")


def test_the_error_of_logits_does_not_depend_on_how_certain_the_policy_is() -> None:
    """Logits with noise of .01, by a distribution that is flat and by one that is
    sharp; a tenth of the tokens far off.
    """
    rng = np.random.default_rng(3)
    found = []
    for spread in (1.0, 8.0):
        logits = spread * rng.normal(size=(4000, 10))
        noisy = logits + rng.normal(size=logits.shape) * 0.01
        noisy[::10] += 5 * rng.normal(size=(400, 10))
        first, second = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, noisy))
        tokens = np.array([rng.choice(10, p=np.exp(row)) for row in first])
        pair = (first[np.arange(4000), tokens], second[np.arange(4000), tokens])
        found.append((logit_error(*pair), np.abs(pair[1] - pair[0]).mean()))
    (flat, flat_mean), (sharp, sharp_mean) = found
    assert flat == pytest.approx(0.01 * 0.6745, rel=0.5)
    assert 0.6 < sharp / flat < 1.6
    assert sharp_mean > 10 * sharp, "the mean is that of the few"
    assert flat_mean > 10 * flat
    assert math.isnan(logit_error(np.full(99, -1e-9), np.full(99, -1e-5))), "certain of all"
    assert logit_error(np.full(99, -1.0), np.full(99, -1.0)) == 0


def test_a_row_has_the_signs_that_tell_causes_apart() -> None:
    judged = judge()
    row = judged.metrics(measured(3, scores()))
    assert {
        "parity_logit/kernels",
        "parity_same_bits",
        "parity_line",
        "parity_growth",
        "parity_grid/server",
    } <= row.keys()
    assert row["parity_same_bits"] < 0.1
    assert named_cause(row, routing=False).startswith("dtype")
    of_four = np.arange(N) % 4  # one of four servers is off
    off = scores()
    off = replace(
        off, server=of_four, rescored=np.where(of_four == 2, off.rescored + 1.0, off.rescored)
    )
    assert (
        judge().metrics(measured(3, off))["parity_logit/kernels"] > 10 * row["parity_logit/kernels"]
    )
    for _ in range(3):
        row = judged.metrics(measured(4, scores(rescored=scores().learner * 1.2)))
    assert named_cause(row, routing=False).startswith("temperature")


def test_k3_estimates_the_kl_divergence() -> None:
    """Tokens sampled from p; KL(p || q) of two known distributions."""
    rng = np.random.default_rng(2)
    p = np.array([0.5, 0.3, 0.2])
    q = np.array([0.4, 0.35, 0.25])
    tokens = rng.choice(3, 400_000, p=p)
    found = Distribution.of(np.log(p)[tokens], np.log(q)[tokens])
    assert found is not None
    assert found.k3 == pytest.approx(float((p * np.log(p / q)).sum()), rel=0.02)


def test_nothing_known_and_infinite_log_probs() -> None:
    assert Distribution.of(np.full(3, np.nan), np.zeros(3)) is None
    found = Distribution.of(np.array([-np.inf, -1.0]), np.array([-2.0, -1.0]))
    assert found is not None
    assert found.mean == found.max == np.inf


def test_each_cause_is_the_difference_of_its_two_scores() -> None:
    stale = np.arange(N) < 100
    one = scores(stale=stale)
    metrics = measured(3, one, choices=1000, differing=30).metrics()
    assert metrics["parity_mean/kernels"] == pytest.approx(
        np.abs(one.rescored - one.learner).mean()
    )
    assert metrics["parity_mean/decode"] == pytest.approx(
        np.abs(one.behaviour - one.sampled_at)[~stale].mean()
    )
    assert metrics["parity_mean/stale_kv"] == pytest.approx(
        np.abs(one.behaviour - one.sampled_at)[stale].mean()
    )
    assert metrics["parity_mean/staleness"] == pytest.approx(
        np.abs(one.sampled_at - one.rescored)[one.lag > 0].mean()
    )
    assert metrics["parity_mean/total"] == pytest.approx(np.abs(one.behaviour - one.learner).mean())
    assert metrics["parity_tokens/stale_kv"] == 100
    assert metrics["parity_routing"] == pytest.approx(0.03)
    assert (
        "parity_mean/decode"
        not in measured(3, replace(one, sampled_at=np.full(N, np.nan))).metrics()
    )


def test_rounding_is_let_pass() -> None:
    one = judge()
    for version in range(200):
        assert one.judge(measured(version, scores(version, noise=0.02))).warning == ""


def test_only_what_lasts_ends_a_run() -> None:
    one = judge()
    bad = scores(noise=0.07)
    verdicts = [one.judge(measured(v, bad)) for v in range(LASTING - 1)]
    assert all(v.warning and not v.ends for v in verdicts)
    assert one.judge(measured(9, scores(noise=0.02))).warning == ""
    verdicts = [one.judge(measured(10 + v, bad)) for v in range(LASTING)]
    assert [v.ends for v in verdicts] == [False, False, True]
    assert "3 comparisons in a row" in verdicts[-1].warning


@pytest.mark.parametrize("value", [4.0, -np.inf])
def test_a_huge_difference_ends_it_at_once(value: float) -> None:
    one = scores()
    assert judge().judge(measured(1, replace(one, rescored=one.rescored + np.float32(value)))).ends


def short_answers(version: int, noise: float, servers: int = 1) -> Measurement:
    """A comparison of four answers of three tokens each."""
    one = scores(version, noise=noise)
    twelve = RolloutScores(**{name: values[:12] for name, values in vars(one).items()})
    return Measurement(version, replace(twelve, server=np.arange(12) // 3 % servers), 4)


def test_few_tokens_are_gathered_until_they_can_be_judged() -> None:
    """Six comparisons of twelve tokens are enough for a judgement; three judgements
    that break a limit end the run.
    """
    one = judge()
    verdicts = []
    waiting = []
    for version in range(18):
        measurement = short_answers(version, noise=0.2)
        verdicts.append(one.judge(measurement))
        waiting.append(one.metrics(measurement)["parity_unjudged/kernels"])
    assert waiting == 3 * [12, 24, 36, 48, 60, 0]
    assert [bool(v.warning) for v in verdicts] == 5 * [False] + 13 * [True], (
        "a warning stands until the next judgement"
    )
    assert [v.ends for v in verdicts] == 17 * [False] + [True]
    assert "72 tokens" in verdicts[-1].warning
    assert "3 comparisons in a row" in verdicts[-1].warning


def test_short_answers_that_agree_raise_no_warning() -> None:
    one = judge()
    assert not any(one.judge(short_answers(version, noise=0.02)).warning for version in range(200))


def test_a_warning_ends_with_the_judgement_that_keeps_the_limit() -> None:
    one = judge()
    noises = 6 * [0.2] + 6 * [0.02]
    warned = [
        bool(one.judge(short_answers(version, noise)).warning)
        for version, noise in enumerate(noises)
    ]
    assert warned == 5 * [False] + 6 * [True] + [False]


def test_each_server_has_its_own_tokens_gathered() -> None:
    """One of the four answers is a server's: three tokens, so that it is judged at the
    22nd comparison.
    """
    one = judge()
    for version in range(22):
        measurement = short_answers(version, noise=0.01, servers=4)
        off = np.where(measurement.scores.server == 1, 0.3, 0.0).astype(np.float32)
        off *= np.where(np.arange(12) % 2, 1, -1)
        served = measurement.scores.learner + off
        verdict = one.judge(
            replace(measurement, scores=replace(measurement.scores, rescored=served))
        )
        if version < 21:
            assert "server 1" not in verdict.warning
    assert "server 1 and the learner" in verdict.warning


def test_heads_are_judged_from_gathered_tokens_too() -> None:
    """Each third token is the end token itself, whose difference from itself says
    nothing: eight of twelve count.
    """
    one = judge()
    warnings = []
    for version in range(8 * LASTING):
        measurement = short_answers(version, noise=0.01)
        gap = np.where(np.arange(12) % 3 == 2, 0.0, rounded(measurement.scores.served_gap)).astype(
            np.float32
        )
        warnings.append(
            one.judge(
                replace(measurement, scores=replace(measurement.scores, served_gap=gap))
            ).warning
        )
    assert warnings[:7] == 7 * [""]
    assert "one-sided head" in warnings[7]
    assert "3 comparisons in a row" in warnings[-1]


def last(experts: bool = False, **changes: Any) -> str:
    """The warning that ends a run in which this stays."""
    one = judge(experts)
    verdict = None
    for version in range(LASTING):
        given = dict(changes)
        routing = {key: given.pop(key) for key in ("choices", "differing") if key in given}
        base = scores(version)
        found = {name: make(base) for name, make in given.items()}
        verdict = one.judge(measured(version, replace(base, **found), **routing))
    assert verdict is not None
    assert verdict.ends, verdict
    return verdict.warning


def rounded(values: np.ndarray) -> np.ndarray:
    """To the grid of bf16 numbers of 0.25 and more."""
    return np.round(values * 64) / 64


def test_causes_are_named_by_their_patterns() -> None:
    noise = np.random.default_rng(5).normal(0, 0.1, N).astype(np.float32)
    assert "server did not compute the LM head in FP32" not in last(
        rescored=lambda s: s.learner + noise
    )
    assert "Likely cause: dtype" in last(rescored=lambda s: s.learner + noise)
    assert "Likely cause: temperature" in last(rescored=lambda s: s.learner * 1.1)
    assert "Likely cause: temperature" in last(behaviour=lambda s: s.sampled_at * 1.1)
    assert "Likely cause: RoPE" in last(rescored=lambda s: s.learner + noise * s.position / 40)
    old: dict[str, Any] = {"behaviour": lambda s: s.rescored, "sampled_at": lambda s: s.rescored}
    assert "Likely cause: stale server" in last(learner=lambda s: s.learner + noise, **old)
    assert "kv_cache_dtype" in last(behaviour=lambda s: s.sampled_at + noise * s.position / 40)
    assert "Likely cause: routing" in last(True, choices=1000, differing=300)


def test_one_stale_server_of_two_is_named_when_both_are_judged_together() -> None:
    base = scores(noise=0.1, server=np.arange(N) // 2 % 2)
    stale = np.where(base.server == 1, base.sampled_at, base.rescored)
    assert "stale server" in likely_cause(
        [measured(1, replace(base, rescored=stale))], BF16, "kernels"
    )
    assert "stale server" not in likely_cause([measured(1, base)], BF16, "kernels")


def test_the_same_bits_of_certain_tokens_say_nothing() -> None:
    """A policy that is certain has log-probs that round to 0 at both versions."""
    certain = np.full(N, -1e-7, np.float32)
    assert same_bits(scores(sampled_at=certain, rescored=certain)) == 0
    uncertain = np.full(N, -1.0, np.float32)
    assert same_bits(scores(sampled_at=uncertain, rescored=uncertain)) == 1


def test_a_rounded_head_is_seen_below_the_noise_of_the_body() -> None:
    assert "logits of the servers lie on the grid" in last(
        served_gap=lambda s: rounded(s.served_gap)
    )
    assert "one-sided head: the learner" in last(learner_gap=lambda s: rounded(s.learner_gap))
    assert (
        ParityJudge("bf16", False, False, True)
        .judge(measured(1, scores(served_gap=rounded(np.linspace(-9, 9, N)))))
        .warning
        == ""
    )


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_logits_of_a_head_in_half_precision_lie_on_the_grid(dtype: str, kind: str) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(500, 64, generator=generator).to(getattr(torch, kind))
    head = (torch.randn(1000, 64, generator=generator) * 3 / 8).to(getattr(torch, kind))
    tokens = torch.randint(1, 1000, (500, 1), generator=generator)

    def gap(logits: torch.Tensor) -> np.ndarray:
        logprobs = torch.log_softmax(logits.float(), -1)
        return (logprobs.gather(1, tokens)[:, 0] - logprobs[:, 0]).numpy()

    assert grid_share(gap(hidden @ head.T), dtype) > 0.85
    assert grid_share(gap(hidden.float() @ head.float().T), dtype) < 0.2


def test_one_server_of_two_is_found_and_named() -> None:
    one = judge()
    for version in range(LASTING):
        half = scores(version, server=np.arange(N) * 2 // N)
        noise = np.where(half.server == 1, 0.2, 0.0) * np.sign(np.sin(np.arange(N) * 7.0))
        verdict = one.judge(
            measured(version, replace(half, rescored=(half.rescored + noise).astype(np.float32)))
        )
    assert verdict.ends
    assert "server 1 and the learner" in verdict.warning
    assert "experts that differ" not in verdict.warning, "that is not known of one server"


def test_a_server_is_judged_over_all_publications_in_which_it_was_compared() -> None:
    """Also over the first ones, in which no other was. The sound one's tokens then keep
    both together within the limit.
    """
    one = judge()
    for version, share in enumerate((1.0, 1.0, 0.12)):
        server = (np.arange(N) >= share * N).astype(np.int64)
        base = scores(version, noise=0.001, server=server)
        noise = np.where(server == 0, 0.2, 0.0) * np.sign(np.sin(np.arange(N) * 7.0))
        verdict = one.judge(
            measured(version, replace(base, rescored=(base.rescored + noise).astype(np.float32)))
        )
    assert verdict.ends
    assert "server 0 and the learner" in verdict.warning
    assert "3 comparisons in a row" in verdict.warning


def test_patterns_of_noise_alone_name_nothing() -> None:
    one = scores(noise=0.1)
    assert explained_by_logprob(one.rescored, one.learner) < 0.1
    assert 0.7 < growth_along_sequence(one.rescored, one.learner, one.position) < 1.4


REAL = kept(Path(__file__).parents[4] / "benchmarks/results/parity/real-bf16.csv.gz", "bf16")
"""Rollouts of a real model of 30 layers, with its own weights and with perturbed ones,
which both sides scored.
"""


LATER = kept(Path(__file__).parents[4] / "benchmarks/results/parity/real-bf16-later.csv.gz", "bf16")
"""The same of 14 states more, which had no part in the choice of the limits."""


IN_FP8 = kept(Path(__file__).parents[4] / "benchmarks/results/parity/real-fp8.csv.gz", "fp8")
"""Rollouts of the same model, if its servers compute in FP8 as a stand-in does
(benchmarks/parity/fp8.py).
"""


def test_servers_in_fp8_have_limits_of_their_own() -> None:
    """They keep them; a server that is in FP8 unasked breaks those of bf16; three times
    the differences break both.
    """

    def warned(fp8: bool, scale: float = 1.0) -> tuple[int, bool]:
        one = ParityJudge("bf16", False, True, True, fp8=fp8)
        count = 0
        for version, rollouts in enumerate(comparisons(IN_FP8)):
            joined = RolloutScores.concatenate([each.scores(scale) for each in rollouts])
            verdict = one.judge(Measurement(version, joined, len(rollouts)))
            count += bool(verdict.warning)
            if verdict.ends:
                return count, True
        return count, False

    assert warned(fp8=True) == (0, False)
    assert warned(fp8=False)[1]
    assert warned(fp8=True, scale=3.0)[1]


def real(
    scale: float = 1.0, tokens: int | None = None, kept_rollouts: Sequence[KeptRollout] = REAL
) -> list[Measurement]:
    """Return its comparisons with all differences times `scale`, of the first tokens of
    each answer.
    """
    found = []
    for version, rollouts in enumerate(comparisons(kept_rollouts)):
        joined = RolloutScores.concatenate([each.scores(scale, tokens) for each in rollouts])
        found.append(Measurement(version, joined, len(rollouts)))
    return found


def until_the_end(measurements: list[Measurement]) -> tuple[int, int]:
    """Return how many comparisons were warned of, and after how many the run ended; 0
    if it did not.
    """
    one = judge()
    warned = 0
    for count, measurement in enumerate(measurements, 1):
        verdict = one.judge(measurement)
        warned += bool(verdict.warning)
        if verdict.ends:
            return warned, count
    return warned, 0


@pytest.mark.parametrize("tokens", [None, 3])
def test_a_real_model_that_is_served_rightly_raises_no_warning(tokens: int | None) -> None:
    measurements = real(tokens=tokens)
    assert len(measurements) >= 80
    assert until_the_end(measurements) == (0, 0)


def test_states_that_limits_were_not_made_from_raise_no_warning_either() -> None:
    measurements = real(kept_rollouts=LATER)
    assert len(measurements) == 112
    assert until_the_end(measurements) == (0, 0)
    assert 0 < until_the_end(real(3.0, kept_rollouts=LATER))[1] <= 9


@pytest.mark.parametrize(
    ("scale", "tokens", "soon"), [(2.0, None, 30), (3.0, None, 9), (3.0, 3, 30)]
)
def test_a_fault_that_doubles_a_real_models_differences_ends_the_run(
    scale: float, tokens: int | None, soon: int
) -> None:
    _, ended = until_the_end(real(scale, tokens))
    assert 0 < ended <= soon


def test_runs_of_a_real_model_keep_the_limits() -> None:
    """Their comparisons had no part in the choice of the limits."""
    with (Path(__file__).parents[4] / "benchmarks/results/parity/real-runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 100
    for row in rows:
        for cause in LIMITED:
            if not row[f"tokens_{cause}"]:
                continue
            tokens = int(row[f"tokens_{cause}"])
            assert float(row[f"mean_{cause}"]) < BF16.mean_of(cause, tokens)
            assert float(row[f"p50_{cause}"]) < BF16.p50_of(tokens)


def test_limits_are_wider_for_fewer_tokens() -> None:
    assert BF16.mean_of("kernels", 121) == pytest.approx(0.034 * 1.5)
    assert BF16.mean_of("decode", 121) == pytest.approx(0.9 * 0.034 * 1.5)
    assert BF16.p50_of(1_000_000) == pytest.approx(0.026, rel=0.01)


LIMITS_ROW = re.compile(
    r"^\| (fp32|bf16|fp8|fp16) \| (dense|experts) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)"
    r" \| ([\d.]+|–) \|$",
    re.MULTILINE,
)


def test_the_documented_limits_are_the_judges() -> None:
    page = (Path(__file__).parents[4] / "docs/how-to/monitoring.md").read_text()
    found = {}
    for dtype, model, kernels, decode, median, few, routing in LIMITS_ROW.findall(page):
        share = 1.0 if routing == "–" else float(routing)
        limits = ParityLimits(float(kernels), float(median), share, float(few))
        assert limits.mean * 0.9 == pytest.approx(float(decode))
        found[dtype, model == "experts"] = limits
    assert found == LIMITS


def test_same_bits_are_said_so() -> None:
    assert kernels_text({"parity_mean/kernels": 0.0}) == "same bits"
    assert kernels_text({"parity_mean/kernels": 0.0123}) == "1.2e-02"
    assert kernels_text({}) == "not measured"
    few = {"parity_mean/kernels": 0.0123, "parity_unjudged/kernels": 12.0}
    assert kernels_text(few) == "1.2e-02 (not judged yet: 12 of 64 tokens)"
    assert kernels_text(few | {"parity_unjudged/kernels": 0.0}) == "1.2e-02"
