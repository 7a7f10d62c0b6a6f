"""Parity: do servers and learner compute the same model? Pure functions of scores,
which controller/parity_schedule.py collects.

A few finished rollouts of each batch are scored by both sides. Every trained token then
has up to four log-probs, and each neighbouring pair differs for one cause:

    behaviour     the server sampled the token (decode, version u)
        │  decode; or stale_kv, if the rollout or its group's prompt began before
        │  version u, with older keys and values
    sampled_at    the same server scored the finished rollout (prefill, version u)
        │  staleness: u against v
    rescored      a server scored it again after version v was published (prefill, v)
        │  kernels: other kernels, other precision, or a fault
    learner       the learner scored it, with the weights it published (version v)

`total` is behaviour against learner, the difference in the importance ratio. Checksums,
not parity, tell if weights arrived.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

CAUSES = ("kernels", "decode", "stale_kv", "staleness", "total")
LIMITED = ("kernels", "decode")
"""The causes that have limits; the others depend on how far the weights move."""
SHARE_ABOVE = 0.1
LASTING = 3
"""The run ends if this many publications in a row exceed a limit; a single one may be
due to one unlucky rollout.
"""
AT_ONCE = 20.0
"""The run ends at once if a publication exceeds a limit by this factor."""
FEWEST_TOKENS = 64
"""A mean over fewer tokens is not judged."""


@dataclass(frozen=True)
class ParityLimits:
    """The largest mean and median of |difference| of log-probs that rounding can
    explain, for kernels and for decode. A token for which rounding chooses another
    expert is far off and raises the mean: with experts the median's limit is sharper.

    mean, p50: over very many tokens. routing: the largest share of (token, layer)
    choices of experts that may differ. few: with n tokens the limits are 1 + few /
    sqrt(n) times as wide, because a mean of fewer scatters more.
    """

    mean: float
    p50: float
    routing: float = 1.0
    few: float = 0.0

    def mean_of(self, cause: str, tokens: int) -> float:
        """Return the limit on the mean over so many tokens for a cause. A server
        differs less from itself (decode) than from the learner.
        """
        factor = 0.9 if cause == "decode" else 1.0
        return self.mean * factor * self._wider(tokens)

    def p50_of(self, tokens: int) -> float:
        """Return the limit on the median over so many tokens, for each cause."""
        return self.p50 * self._wider(tokens)

    def _wider(self, tokens: int) -> float:
        """Return how many times as wide the limits are for so few tokens."""
        return 1 + self.few / tokens**0.5


LIMITS = {
    ("fp32", False): ParityLimits(mean=1e-4, p50=1e-4),
    ("fp32", True): ParityLimits(mean=1e-2, p50=1e-4, routing=0.005),
    ("bf16", False): ParityLimits(mean=0.034, p50=0.026, few=5.5),
    ("bf16", True): ParityLimits(mean=0.4, p50=0.12, routing=0.1),
    ("fp8", False): ParityLimits(mean=0.22, p50=0.14, few=5.5),
    ("fp8", True): ParityLimits(mean=0.8, p50=0.3, routing=0.6),
    ("fp16", False): ParityLimits(mean=0.0046, p50=0.0037, few=5.5),
    ("fp16", True): ParityLimits(mean=0.1, p50=0.012, routing=0.05),
}
"""Limits by model.dtype and whether the model has experts. benchmarks/parity.md has the
distributions behind them.
"""


@dataclass(frozen=True)
class Distribution:
    """|difference| of log-probs over `tokens` tokens.

    share: of tokens above SHARE_ABOVE. k3: KL(first || second), nats: the mean of
    exp(d) - 1 - d, d = second - first (joschu.net/blog/kl-approx.html).
    """

    mean: float
    p50: float
    p99: float
    p999: float
    max: float
    share: float
    k3: float
    tokens: int

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray) -> "Distribution | None":
        """Compare log-probs [n] of the same tokens, without pairs with a NaN; None if
        none is left. Infinite ones count.
        """
        is_known = ~(np.isnan(first) | np.isnan(second))
        if not is_known.any():
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            known_first = first[is_known].astype(np.float64)
            known_second = second[is_known].astype(np.float64)
            d = known_second - known_first  # NaN if both are infinite
            size = np.where(np.isnan(d), np.inf, np.abs(d))
            p50, p99, p999 = np.quantile(size, (0.5, 0.99, 0.999), method="higher")
            k3 = np.mean(np.exp(d) - 1 - d)
        return cls(
            mean=float(size.mean()),
            p50=float(p50),
            p99=float(p99),
            p999=float(p999),
            max=float(size.max()),
            share=float(np.mean(size > SHARE_ABOVE)),
            k3=float(k3),
            tokens=len(d),
        )


@dataclass(frozen=True)
class RolloutScores:
    """The scores of the trained tokens of one or more rollouts, [n] each; NaN if
    unknown. The first four are log-probs, as at the top of this file. A gap is a
    log-prob less that of one fixed token at its position: the difference of two logits.

    lag: number of versions from u to v. position: index in the whole sequence. stale:
    whether the rollout, or the first one of its group, began before version u. server:
    computed `rescored`; it also sampled the rollout's end, if it was still available.
    """

    behaviour: np.ndarray
    sampled_at: np.ndarray
    rescored: np.ndarray
    learner: np.ndarray
    lag: np.ndarray
    position: np.ndarray
    stale: np.ndarray
    server: np.ndarray
    served_gap: np.ndarray
    learner_gap: np.ndarray

    def pair(self, cause: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the two scores that differ for this cause, for the tokens that it
        affects.
        """
        match cause:
            case "kernels":
                return self.rescored, self.learner
            case "decode":
                return self.behaviour[~self.stale], self.sampled_at[~self.stale]
            case "stale_kv":
                return self.behaviour[self.stale], self.sampled_at[self.stale]
            case "staleness":
                is_late = self.lag > 0
                return self.sampled_at[is_late], self.rescored[is_late]
            case _:
                return self.behaviour, self.learner

    def gap(self, side: str) -> np.ndarray:
        """Return a side's gaps; side: server or learner."""
        return self.served_gap if side == "server" else self.learner_gap

    def select(self, chosen: np.ndarray) -> "RolloutScores":
        """Return the scores of the chosen tokens; chosen: [n] bool."""
        return RolloutScores(*(values[chosen] for values in vars(self).values()))

    @classmethod
    def concatenate(cls, parts: Sequence["RolloutScores"]) -> "RolloutScores":
        """Return the scores of all parts, one part after the other."""
        columns = {}
        for name in vars(parts[0]):
            columns[name] = np.concatenate([vars(part)[name] for part in parts])
        return cls(**columns)


@dataclass(frozen=True)
class Measurement:
    """The scores of one publication's rollouts.

    choices: (token, layer) choices of experts that were compared. differing: those
    whose sets of experts differ.
    """

    version: int
    scores: RolloutScores
    rollouts: int = 1
    choices: int = 0
    differing: int = 0

    def by_server(self) -> dict[int | None, "Measurement"]:
        """Return the part of each server, and under None the whole. Only the whole has
        choices of experts.
        """
        servers = self.scores.server
        parts = {
            i: Measurement(self.version, self.scores.select(servers == i))
            for i in np.unique(servers).tolist()
        }
        return {None: self, **parts}

    @classmethod
    def concatenate(cls, parts: Sequence["Measurement"]) -> "Measurement":
        """Return the rollouts of several publications as one measurement, with the
        version of the last.
        """
        return cls(
            version=parts[-1].version,
            scores=RolloutScores.concatenate([part.scores for part in parts]),
            rollouts=sum(part.rollouts for part in parts),
            choices=sum(part.choices for part in parts),
            differing=sum(part.differing for part in parts),
        )

    def distribution(self, cause: str) -> Distribution | None:
        """Return the distribution of the differences that this cause makes."""
        return Distribution.of(*self.scores.pair(cause))

    @property
    def routing(self) -> float | None:
        """The share of (token, layer) choices that differ; None for a dense model."""
        return self.differing / self.choices if self.choices else None

    def metrics(self) -> dict[str, float]:
        """Return `parity_STATISTIC/CAUSE` for each cause that was measured, for a row
        of metrics.
        """
        row = {"parity_rollouts": float(self.rollouts)}
        for cause in CAUSES:
            if (d := self.distribution(cause)) is not None:
                row |= {f"parity_{name}/{cause}": float(value) for name, value in vars(d).items()}
        if self.routing is not None:
            row["parity_routing"] = self.routing
        return row


@dataclass(frozen=True)
class ParityVerdict:
    """A judgement. warning: what is wrong now; empty if nothing. ends: whether the run
    must end because of it.
    """

    warning: str = ""
    ends: bool = False


class Limit(NamedTuple):
    """A limit that is judged. quantity: one of LIMITED, "routing", or a head. server:
    None for all servers together.
    """

    quantity: str
    server: int | None


@dataclass(frozen=True)
class Broken:
    """How a limit is broken. excess: by which factor, at its latest judgement;
    in_a_row: judgements that broke it; suspects: the newest of their measurements.
    """

    excess: float = 0.0
    in_a_row: int = 0
    suspects: tuple[Measurement, ...] = ()

    @property
    def duration(self) -> str:
        """Since when it is broken, as text."""
        if self.in_a_row > 1:
            return f"{self.in_a_row} comparisons in a row"
        return "this comparison"

    def followed_by(self, excess: float, measurement: Measurement) -> "Broken":
        """Return the state after one more judgement that broke the limit."""
        suspects = (*self.suspects, measurement)
        return Broken(excess, self.in_a_row + 1, suspects[-LASTING:])


class ParityJudge:
    """Decides, from successive measurements, whether both sides still compute the same
    model. It judges all servers together, and each by itself over the publications in
    which it was compared, since one of many may be faulty. Where a publication has too
    few tokens, those of the next ones are gathered until they are enough. served_head,
    learner_head: that side's LM head should be FP32. fp8: servers compute in FP8
    (Serving.fp8_keys).
    """

    def __init__(
        self, dtype: str, experts: bool, served_head: bool, learner_head: bool, fp8: bool = False
    ) -> None:
        self.limits = LIMITS["fp8" if fp8 else dtype, experts]
        self._dtype = dtype
        self._heads: dict[str, str] = {}  # the side, by the name of its FP32 head
        if served_head and dtype != "fp32":
            self._heads["server head"] = "server"
        if learner_head and dtype != "fp32":
            self._heads["learner head"] = "learner"
        self._gathering: dict[Limit, Measurement] = {}
        self._broken: dict[Limit, Broken] = {}
        self._newest: deque[Measurement] = deque(maxlen=LASTING)

    def judge(self, measurement: Measurement) -> ParityVerdict:
        """Return the verdict on the publications so far; `measurement` is from the
        latest. A limit that was broken stays so while tokens are gathered for its next
        judgement.
        """
        parts = measurement.by_server()
        judged: list[Limit] = []
        for server, part in parts.items():
            judged += self._judge_part(server, part)
        # those of these servers that were not judged, as tokens are still gathered
        unjudged = [limit for limit in self._gathering if limit.server in parts]
        broken: dict[Limit, Broken] = {}
        for limit in (*judged, *unjudged):
            if limit in self._broken:
                broken[limit] = self._broken[limit]
        if not broken:
            return ParityVerdict()
        # only what was judged now may end the run
        judged_broken = [limit for limit in judged if limit in broken]
        lasting = [limit for limit in judged_broken if broken[limit].in_a_row >= LASTING]
        at_once = [limit for limit in judged_broken if broken[limit].excess >= AT_ONCE]
        worst = max(lasting or at_once or broken, key=lambda limit: broken[limit].excess)
        return ParityVerdict(self._text(worst), bool(lasting or at_once))

    def _judge_part(self, server: int | None, part: Measurement) -> Iterator[Limit]:
        """Judge each limit for which a server's measurements have enough tokens by now;
        yield those that were judged.
        """
        for quantity in (*LIMITED, "routing", *self._heads):
            limit = Limit(quantity, server)
            if not self._tokens(quantity, part):
                continue
            gathered = part
            if earlier := self._gathering.pop(limit, None):
                gathered = Measurement.concatenate([earlier, part])
            if self._tokens(quantity, gathered) < FEWEST_TOKENS:
                self._gathering[limit] = gathered
                continue
            excess = self._excess(quantity, gathered)
            previous = self._broken.pop(limit, Broken())
            if excess >= 1:
                self._broken[limit] = previous.followed_by(excess, gathered)
            yield limit

    def metrics(self, measurement: Measurement) -> dict[str, float]:
        """Return the metrics of a publication that was judged, how many tokens wait for
        a judgement, and the signs for `named_cause` from the last LASTING publications
        together.
        """
        self._newest.append(measurement)
        newest = RolloutScores.concatenate([m.scores for m in self._newest])
        signs = _signs(newest, "kernels")
        signs["parity_growth"] = _growth_of_logit_error(newest)
        for side in self._heads.values():
            signs[f"parity_grid/{side}"] = grid_share(newest.gap(side), self._dtype)
        parts = measurement.by_server().values()
        for cause in ("kernels", "decode"):
            errors = [logit_error(*part.scores.pair(cause)) for part in parts]
            # that of the worst server, without those of too few tokens (NaN)
            signs[f"parity_logit/{cause}"] = float(np.fmax.reduce(errors))
        signs |= self._unjudged(measurement)
        row = measurement.metrics()
        row |= {name: sign for name, sign in signs.items() if not np.isnan(sign)}
        return row

    def _unjudged(self, measurement: Measurement) -> dict[str, float]:
        """Return for each measured cause how many tokens are gathered for its next
        judgement; 0 if it was just judged.
        """
        row = {}
        for cause in LIMITED:
            if self._tokens(cause, measurement):
                gathered = self._gathering.get(Limit(cause, None))
                tokens = self._tokens(cause, gathered) if gathered else 0
                row[f"parity_unjudged/{cause}"] = float(tokens)
        return row

    def _tokens(self, quantity: str, m: Measurement) -> int:
        """Return how many tokens, or choices of experts, a measurement has to judge
        this limit by.
        """
        if quantity == "routing":
            return m.choices
        if quantity in self._heads:
            return len(grid_steps(m.scores.gap(self._heads[quantity]), self._dtype))
        d = m.distribution(quantity)
        return d.tokens if d else 0

    def _excess(self, quantity: str, m: Measurement) -> float:
        """Return the factor by which a measurement exceeds a limit. It is 1 for a head
        or routing, and below 1 for a limit that is kept.
        """
        if quantity == "routing":
            assert m.routing is not None
            return float(m.routing > self.limits.routing)
        if quantity in self._heads:
            share = grid_share(m.scores.gap(self._heads[quantity]), self._dtype)
            return float(share > GRID_LIMIT)
        d = m.distribution(quantity)
        assert d is not None
        excess_of_mean = d.mean / self.limits.mean_of(quantity, d.tokens)
        excess_of_median = d.p50 / self.limits.p50_of(d.tokens)
        return max(excess_of_mean, excess_of_median)

    def _text(self, limit: Limit) -> str:
        """Return a text that says what differs, by how much, since when, and the likely
        cause. A head of this server that breaks its limit, too, is named first.
        """
        server = "the servers" if limit.server is None else f"server {limit.server}"
        for head, side in self._heads.items():
            if broken := self._broken.get(Limit(head, limit.server)):
                owner = "the learner" if side == "learner" else server
                return (
                    f"version {broken.suspects[-1].version}: logits of {owner} lie on the grid of"
                    f" {self._dtype} numbers ({broken.duration}). Likely cause: one-sided head:"
                    f" {owner} did not compute the LM head in FP32, as model.fp32_head asks"
                )
        broken = self._broken[limit]
        m = broken.suspects[-1]
        difference = self._difference_text(limit.quantity, m, server)
        cause = likely_cause(broken.suspects, self.limits, limit.quantity)
        return f"version {m.version}: {difference}, {broken.duration}. Likely cause: {cause}"

    def _difference_text(self, quantity: str, m: Measurement, server: str) -> str:
        """Return by how much a measurement exceeds a limit, as text."""
        if quantity == "routing":
            return (
                f"{m.routing:.1%} of the choices of experts differ (limit"
                f" {self.limits.routing:.1%})"
            )
        d = m.distribution(quantity)
        assert d is not None
        sides = f"sampling and scoring of {server}"
        if quantity == "kernels":
            sides = f"{server} and the learner"
        mean = self.limits.mean_of(quantity, d.tokens)
        p50 = self.limits.p50_of(d.tokens)
        return (
            f"{sides} differ by {d.mean:.3g} in log-prob on average, {d.p50:.3g} in the median"
            f" (limits for {self._dtype} and {d.tokens} tokens: {mean:.3g} and {p50:.3g})"
        )


GRID_LIMIT = 0.6
"""If more than this share of logit differences is on the half-precision grid, a head is
not FP32. By chance, a tenth is.
"""
STEPS_PER_UNIT = {"bf16": 2.0**9, "fp16": 2.0**12}
"""Number of grid steps in an interval of length 1: the spacing of numbers just above
0.25.
"""
GRID_TOLERANCE = 0.05


def grid_steps(gap: np.ndarray, dtype: str) -> np.ndarray:
    """Return differences of two logits [n] in spacings of `dtype`, without those that
    say nothing: 0 or not finite.
    """
    chosen = gap[np.isfinite(gap) & (gap != 0)]
    return chosen.astype(np.float64) * STEPS_PER_UNIT[dtype]


def grid_share(gap: np.ndarray, dtype: str) -> float:
    """Return the share of differences of two logits [n] that are a multiple of the
    spacing of `dtype`; NaN for too few. A head that rounds its logits to bf16 or fp16
    leaves them on a grid, and log-softmax in FP32 preserves their differences.
    """
    steps = grid_steps(gap, dtype)
    if len(steps) < FEWEST_TOKENS:
        return float("nan")
    distances = np.abs(steps - np.round(steps))
    return float(np.mean(distances < GRID_TOLERANCE))


UNCERTAIN = 1e-3
FEWEST_UNCERTAIN = 8
"""The smallest 1 - p at which a logit's error exceeds the rounding of log-probs, and
how many such tokens are needed.
"""
SAME_BITS_LIMIT = 0.5
TEMPERATURE_LIMIT = 0.35
POSITION_LIMIT = 1.5
"""Above these a sign names a cause: the share of scores with the same bits, the share
of variance that a line explains, and the growth along sequences.
"""


def likely_cause(measurements: Sequence[Measurement], limits: ParityLimits, quantity: str) -> str:
    """Return the likeliest cause of measurements that exceed the limit on `quantity`,
    and the numbers that point to it.
    """
    together = Measurement.concatenate(measurements)
    signs = _signs(together.scores, quantity)
    routing = together.routing or 0.0
    cause = named_cause(signs, routing > limits.routing, quantity == "decode")
    # Unknown for a single server or a dense model.
    experts = f"; experts that differ: {routing:.1%}" if together.choices else ""
    return (
        f"{cause} (same bits at two versions: {signs['parity_same_bits']:.0%}; explained by the"
        f" log-prob: {signs['parity_line']:.0%}; last third of positions over first:"
        f" {signs['parity_growth']:.2g}{experts})"
    )


def _growth_of_logit_error(scores: RolloutScores) -> float:
    """Return the error of logits in the last third of the positions over that in the
    first third.
    """
    first, second = scores.pair("kernels")
    is_early, is_late = _outer_thirds(scores.position)
    early_error = logit_error(first[is_early], second[is_early])
    late_error = logit_error(first[is_late], second[is_late])
    return late_error / early_error if early_error else 1.0


def _outer_thirds(position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens [n] are in the first third of the positions, and in the
    last.
    """
    low, high = np.quantile(position, (1 / 3, 2 / 3))
    return position <= low, position >= high


def _signs(scores: RolloutScores, quantity: str) -> dict[str, float]:
    """Return the share of scores with the same bits at two versions, the share of
    variance that a line in the log-prob explains, and the growth along sequences.
    """
    if quantity == "decode":
        return {
            "parity_same_bits": 0.0,  # one version only
            "parity_line": explained_by_logprob(*scores.pair("decode")),
            # Its error grows along the sequence anyway, with the length of the cache.
            "parity_growth": 1.0,
        }
    first, second = scores.pair("kernels")
    return {
        "parity_same_bits": same_bits(scores),
        "parity_line": explained_by_logprob(first, second),
        "parity_growth": growth_along_sequence(first, second, scores.position),
    }


def named_cause(signs: Mapping[str, float], routing: bool, decoding: bool = False) -> str:
    """Return the likeliest cause of a difference. signs: metrics of a row. routing: too
    many choices of experts differ. decoding: the difference is between a server's
    sampling and its own scores.
    """
    for side in ("server", "learner"):
        if signs.get(f"parity_grid/{side}", 0.0) > GRID_LIMIT:
            return (
                f"one-sided head: logits of the {side} lie on the grid of low-precision numbers,"
                " and should be FP32"
            )
    if signs.get("parity_same_bits", 0.0) > SAME_BITS_LIMIT:
        return (
            "stale server: its scores did not change with the last publications, so it computes"
            " with older weights"
        )
    if signs.get("parity_line", 0.0) > TEMPERATURE_LIMIT:
        return "temperature: one side divides its logits by another temperature, or scales them"
    if signs.get("parity_growth", 1.0) > POSITION_LIMIT:
        return (
            "RoPE: differences grow along the sequence; compare rope_theta, rope_scaling, positions"
            " of both sides"
        )
    if routing:
        return (
            "routing: the sides choose different experts; compare router weights, biases and their"
            " precision"
        )
    if decoding:
        return (
            "dtype: the server's cache or decoding kernel has less precision than its prefill"
            " (kv_cache_dtype)"
        )
    return (
        "dtype: one side computes in less precision than model.dtype, or with another kernel or"
        " epsilon"
    )


def logit_error(first: np.ndarray, second: np.ndarray) -> float:
    """Return the error of logits, from log-probs [n] of the same tokens: the median of
    |difference| / (1 - p) over tokens of which the policy is not certain; NaN for too
    few. An error e in a token's logit changes its log-prob by (1 - p) e, so unlike the
    mean difference this does not fall as the policy grows certain.
    """
    uncertain = -np.expm1(np.minimum(second, 0.0, dtype=np.float64))
    is_valid = np.isfinite(first) & np.isfinite(second) & (uncertain > UNCERTAIN)
    if is_valid.sum() < FEWEST_UNCERTAIN:
        return float("nan")
    differences = np.abs(first[is_valid] - second[is_valid])
    return float(np.median(differences / uncertain[is_valid]))


def same_bits(scores: RolloutScores) -> float:
    """Return the share of tokens that a server scores with the same bits at two
    versions, of the server with the largest share. Tokens of which the policy is
    certain are left out, since their log-probs round to the same number, and so are
    servers with too few others.
    """
    changed = scores.select(scores.lag > 0)
    uncertainty = -np.expm1(changed.rescored)
    is_valid = ~np.isnan(changed.sampled_at) & (uncertainty > UNCERTAIN)
    is_same = changed.sampled_at == changed.rescored
    shares = [0.0]
    for server in np.unique(changed.server):
        of_server = is_same[is_valid & (changed.server == server)]
        if len(of_server) >= FEWEST_UNCERTAIN:
            shares.append(float(of_server.mean()))
    return max(shares)


def explained_by_logprob(first: np.ndarray, second: np.ndarray) -> float:
    """Return R² of the line through (second, first - second): 1 if the difference is
    linear in the log-prob.
    """
    is_valid = np.isfinite(first) & np.isfinite(second)
    x = second[is_valid].astype(np.float64)
    d = (first - second)[is_valid].astype(np.float64)
    if len(d) < FEWEST_TOKENS or not x.std() or not d.std():
        return 0.0
    return float(np.corrcoef(x, d)[0, 1] ** 2)


def growth_along_sequence(first: np.ndarray, second: np.ndarray, position: np.ndarray) -> float:
    """Return the mean |difference| in the last third of the positions over that in the
    first third.
    """
    is_valid = np.isfinite(first) & np.isfinite(second)
    size = np.abs(first - second)[is_valid]
    if len(size) < FEWEST_TOKENS:
        return 1.0
    is_early, is_late = _outer_thirds(position[is_valid])
    early_mean = float(size[is_early].mean())
    late_mean = size[is_late].mean()
    return float(late_mean / max(early_mean, 1e-12))


def pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each measured cause's distribution over the publications in rows of
    metrics: means over all tokens, medians over publications of the quantiles, the
    largest difference (max) and mean (worst_mean), and how many there were.
    """
    by_cause = {}
    for cause in CAUSES:
        keys = {field.name: f"parity_{field.name}/{cause}" for field in fields(Distribution)}
        measured = [
            row for row in rows if set(keys.values()) <= row.keys() and row[keys["tokens"]] > 0
        ]
        if measured:
            by_cause[cause] = _pooled_cause(measured, keys)
    return by_cause


def _pooled_cause(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> dict[str, float]:
    """Return one cause's distribution over rows of metrics. keys: in a row, by
    statistic.
    """
    columns: dict[str, np.ndarray] = {}
    for name, key in keys.items():
        columns[name] = np.array([row[key] for row in rows], np.float64)
    tokens = columns["tokens"]
    statistics: dict[str, float] = {}
    for name in ("mean", "share", "k3"):
        statistics[name] = float(np.average(columns[name], weights=tokens))
    for name in ("p50", "p99", "p999"):
        statistics[name] = float(np.median(columns[name]))
    statistics["worst_mean"] = float(columns["mean"].max())
    statistics["max"] = float(columns["max"].max())
    statistics["tokens"] = float(tokens.sum())
    statistics["publications"] = float(len(rows))
    return statistics


def kernels_text(row: Mapping[str, float | None]) -> str:
    """Return the mean |difference| of kernels in a row of metrics as text: "same bits"
    for 0. It says so if tokens are still too few to judge it.
    """
    mean = row.get("parity_mean/kernels")
    if mean is None or np.isnan(mean):
        return "not measured"
    text = "same bits" if mean == 0 else f"{mean:.1e}"
    tokens = row.get("parity_unjudged/kernels")
    if tokens:
        text += f" (not judged yet: {tokens:.0f} of {FEWEST_TOKENS} tokens)"
    return text
