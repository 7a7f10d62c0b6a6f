"""Parity: whether servers and learner compute the same model. Pure functions of scores; controller/parity.py gets them.

A few finished rollouts of each batch are scored on both sides. Every trained token then has up to four log-probs, and each
neighbouring pair differs for one cause:

    behaviour     the server sampled the token                           (decode, version u)
        │  decode; stale_kv where the rollout or its group's prompt began before version u: its keys and values are older
    sampled_at    the same server, asked about the finished rollout      (prefill, version u)
        │  staleness: u against v
    served        a server, asked again once version v was published     (prefill, version v)
        │  kernels: other kernels, other precision, or a fault
    learner       the learner, with the weights it has just published    (version v)

`total` is behaviour against learner, which is what the importance ratio sees. Whether weights arrived, checksums tell.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

CAUSES = ("kernels", "decode", "stale_kv", "staleness", "total")
SHARE_ABOVE = 0.1
LASTING = 3
"""Publications in a row that must break a limit before the run ends: one unlucky rollout breaks it once."""
AT_ONCE = 20.0
"""One publication that exceeds a limit by this factor ends the run."""
FEWEST_TOKENS = 32
"""A mean over fewer tokens is not judged."""


@dataclass(frozen=True)
class ParityLimits:
    """The largest mean and median of |difference| of the log-probs that rounding explains, for kernels and for decode.

    routing: the largest share of (token, layer) choices of experts that may differ. The mean sees a few tokens that are far
    off. Where rounding makes a token choose another expert, that token is far off too; so with experts the mean's limit must be
    loose, and the median, which such tokens do not move, is the sharper one.
    """

    mean: float
    p50: float
    routing: float = 1.0

    def mean_of(self, cause: str) -> float:
        """Return the mean's limit for a cause. One server differs less from itself (decode) than from the learner."""
        return self.mean * (0.8 if cause == "decode" else 1.0)


LIMITS = {
    ("fp32", False): ParityLimits(mean=1e-4, p50=1e-4),
    ("fp32", True): ParityLimits(mean=1e-2, p50=1e-4, routing=0.005),
    ("bf16", False): ParityLimits(mean=0.05, p50=0.035),
    ("bf16", True): ParityLimits(mean=0.4, p50=0.12, routing=0.1),
    ("fp16", False): ParityLimits(mean=0.006, p50=0.005),
    ("fp16", True): ParityLimits(mean=0.1, p50=0.012, routing=0.05),
}
"""By model.dtype, and whether the model has experts. benchmarks/README.md has the distributions they were drawn from."""


@dataclass(frozen=True)
class Distribution:
    """|difference| of log-probs over `tokens` tokens.

    share: above SHARE_ABOVE. k3: estimate of KL(first || second) in nats, the mean of exp(d) - 1 - d with d = second - first
    (http://joschu.net/blog/kl-approx.html).
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
        """Compare log-probs [n] of the same tokens. Pairs with a nan are left out; None if nothing is left.

        An infinite log-prob is a difference like any other, and makes mean and maximum infinite.
        """
        known = ~(np.isnan(first) | np.isnan(second))
        if not known.any():
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            d = second[known].astype(np.float64) - first[known].astype(np.float64)
            size = np.where(np.isnan(d), np.inf, np.abs(d))
            p50, p99, p999 = np.quantile(size, (0.5, 0.99, 0.999), method="higher")
            k3 = np.mean(np.exp(d) - 1 - d)
        above, largest = float(np.mean(size > SHARE_ABOVE)), float(size.max())
        return cls(float(size.mean()), float(p50), float(p99), float(p999), largest, above, float(k3), len(d))


@dataclass(frozen=True)
class RolloutScores:
    """The trained tokens of one rollout, [n] each; nan where a score is not known.

    behaviour, sampled_at, served, learner: log-probs, as at the top of this file. lag: versions between u and v. position:
    index in the whole sequence. stale: whether the rollout, or the first one of its group, began before version u. server:
    which one gave `served`; it also sampled the rollout's end, unless that server was unavailable. served_gap, learner_gap: the
    log-prob less that of one fixed token in the same place, which is the difference of two logits.
    """

    behaviour: np.ndarray
    sampled_at: np.ndarray
    served: np.ndarray
    learner: np.ndarray
    lag: np.ndarray
    position: np.ndarray
    stale: np.ndarray
    server: np.ndarray
    served_gap: np.ndarray
    learner_gap: np.ndarray

    def pair(self, cause: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the two scores that differ for this cause, of the tokens it concerns."""
        match cause:
            case "kernels":
                return self.served, self.learner
            case "decode":
                return self.behaviour[~self.stale], self.sampled_at[~self.stale]
            case "stale_kv":
                return self.behaviour[self.stale], self.sampled_at[self.stale]
            case "staleness":
                return self.sampled_at[self.lag > 0], self.served[self.lag > 0]
            case _:
                return self.behaviour, self.learner


@dataclass(frozen=True)
class Measurement:
    """The scores of one publication's rollouts.

    choices, differing: (token, layer) choices of experts compared, and those whose sets of experts differ.
    """

    version: int
    scores: RolloutScores
    rollouts: int = 1
    choices: int = 0
    differing: int = 0

    @classmethod
    def of(
        cls, version: int, rollouts: Sequence[RolloutScores], choices: int = 0, differing: int = 0
    ) -> "Measurement | None":
        """Join the scores of rollouts; None without any."""
        return cls(version, _joined(rollouts), len(rollouts), choices, differing) if rollouts else None

    def of_server(self, server: int) -> "Measurement":
        """Return this server's part. Choices of experts are only known for all servers together."""
        mine = self.scores.server == server
        return Measurement(self.version, RolloutScores(**{name: v[mine] for name, v in vars(self.scores).items()}))

    def distribution(self, cause: str) -> Distribution | None:
        return Distribution.of(*self.scores.pair(cause))

    @property
    def routing(self) -> float | None:
        """The share of (token, layer) choices that differ; None for a dense model."""
        return self.differing / self.choices if self.choices else None

    def metrics(self) -> dict[str, float]:
        """Return `parity_STATISTIC/CAUSE` for each cause that was measured, for the row of metrics."""
        found = {"parity_rollouts": float(self.rollouts)}
        for cause in CAUSES:
            if (d := self.distribution(cause)) is not None:
                found |= {f"parity_{name}/{cause}": float(value) for name, value in vars(d).items()}
        if self.routing is not None:
            found["parity_routing"] = self.routing
        return found


def _joined(rollouts: Sequence[RolloutScores]) -> RolloutScores:
    return RolloutScores(*(np.concatenate([vars(r)[name] for r in rollouts]) for name in vars(rollouts[0])))


@dataclass(frozen=True)
class ParityVerdict:
    """warning: what is wrong now, empty if nothing is. ends: whether it has lasted, so that the run must end."""

    warning: str = ""
    ends: bool = False


Broken = tuple[str, int | None]
"""What is broken, and on which server; None: on all servers together."""


class ParityJudge:
    """Decides from one measurement after another whether the two sides still compute the same model.

    All servers together are judged, and each by itself over the publications in which it was compared: of many servers one
    may be faulty.
    """

    def __init__(self, dtype: str, experts: bool, served_head: bool, learner_head: bool) -> None:
        """dtype: model.dtype. served_head, learner_head: whether that side's LM head should be FP32."""
        self.limits = LIMITS[dtype, experts]
        self._dtype = dtype
        self._fp32_heads = {"server": served_head, "learner": learner_head}
        self._in_a_row: dict[Broken, int] = {}
        self._suspects: dict[int | None, list[Measurement]] = {}
        self._newest: deque[Measurement] = deque(maxlen=LASTING)

    def judge(self, measurement: Measurement) -> ParityVerdict:
        """Return the verdict on the publications so far; `measurement` is from the latest."""
        servers = np.unique(measurement.scores.server).tolist()
        scopes: list[int | None] = [None, *(servers if len(servers) > 1 or self._suspects.keys() - {None} else ())]
        excess: dict[Broken, float] = {}
        for scope in scopes:
            found = dict(self._excesses(measurement if scope is None else measurement.of_server(scope)))
            excess |= {(what, scope): factor for what, factor in found.items()}
            self._suspects[scope] = [*self._suspects.get(scope, []), measurement][-LASTING:] if found else []
        seen = {key: n for key, n in self._in_a_row.items() if key[1] not in scopes}
        self._in_a_row = seen | {key: self._in_a_row.get(key, 0) + 1 for key in excess}
        if not excess:
            return ParityVerdict()
        lasting = [key for key in excess if self._in_a_row[key] >= LASTING]
        at_once = [key for key, factor in excess.items() if factor >= AT_ONCE]
        worst = max(lasting or at_once or excess, key=excess.__getitem__)
        return ParityVerdict(self._text(worst, measurement), bool(lasting or at_once))

    def metrics(self, measurement: Measurement) -> dict[str, float]:
        """Return the metrics of a publication, and of the last LASTING together the signs for `named_cause`."""
        self._newest.append(measurement)
        pooled = _joined([m.scores for m in self._newest])
        same, line, _ = _signs(pooled, "kernels")
        served, learner = pooled.pair("kernels")
        early, late = np.quantile(pooled.position, (1 / 3, 2 / 3))
        thirds = pooled.position <= early, pooled.position >= late
        first, last = (logit_error(served[third], learner[third]) for third in thirds)
        servers = [measurement, *map(measurement.of_server, np.unique(measurement.scores.server).tolist())]
        errors = {c: [logit_error(*m.scores.pair(c)) for m in servers] for c in ("kernels", "decode")}
        signs = {f"parity_logit/{cause}": float(np.fmax.reduce(values)) for cause, values in errors.items()}
        signs |= {"parity_same_bits": same, "parity_line": line, "parity_growth": last / first if first else 1.0}
        signs |= self._grids(measurement)
        return measurement.metrics() | {name: sign for name, sign in signs.items() if not np.isnan(sign)}

    def _grids(self, m: Measurement) -> dict[str, float]:
        """Return the share of logits on the grid of `dtype`, by side, where the head should be FP32; nan for too few."""
        gaps = {"server": m.scores.served_gap, "learner": m.scores.learner_gap}
        judged = {side: gap for side, gap in gaps.items() if self._dtype != "fp32" and self._fp32_heads[side]}
        return {f"parity_grid/{side}": grid_share(gap, self._dtype) for side, gap in judged.items()}

    def _excesses(self, m: Measurement) -> Iterator[tuple[str, float]]:
        """Yield what is broken, and by which factor it exceeds its limit; 1 for a head or routing, which is broken or not."""
        for name, share in self._grids(m).items():
            if share > GRID_LIMIT:
                yield f"{name.removeprefix('parity_grid/')} head", 1.0
        for cause in ("kernels", "decode"):
            d = m.distribution(cause)
            if d is not None and d.tokens >= FEWEST_TOKENS:
                excess = max(d.mean / self.limits.mean_of(cause), d.p50 / self.limits.p50)
                if excess > 1:
                    yield cause, excess
        if m.routing is not None and m.routing > self.limits.routing:
            yield "routing", 1.0

    def _text(self, broken: Broken, m: Measurement) -> str:
        """Say in one sentence what differs, by how much, since when, and what the likely cause is."""
        what, server = broken
        heads = [w for w, s in self._in_a_row if w.endswith("head") and s == server]
        rows = self._in_a_row[broken]
        since = f"{rows} comparisons in a row" if rows > 1 else "this comparison"
        where = "the servers" if server is None else f"server {server}"
        m = m if server is None else m.of_server(server)
        if heads:
            side = "the learner" if heads[0] == "learner head" else where
            return (
                f"version {m.version}: logits of {side} lie on the grid of {self._dtype} numbers ({since}). Likely cause: "
                f"one-sided head: {side} did not compute the LM head in FP32, as model.fp32_head asks"
            )
        if what == "routing":
            said = f"{m.routing:.1%} of the choices of experts differ (limit {self.limits.routing:.1%})"
        else:
            d = m.distribution(what)
            assert d is not None
            sides = f"{where} and the learner" if what == "kernels" else f"sampling and scoring of {where}"
            said = (
                f"{sides} differ by {d.mean:.3g} in log-prob on average, {d.p50:.3g} in the median (limits for {self._dtype}: "
                f"{self.limits.mean_of(what):g} and {self.limits.p50:g})"
            )
        suspects = [s if server is None else s.of_server(server) for s in self._suspects[server]]
        return f"version {m.version}: {said}, {since}. Likely cause: {likely_cause(suspects, self.limits, what)}"


GRID_LIMIT = 0.6
"""With a larger share of logit differences on the half-precision grid, a head is not FP32. By chance a tenth are."""
GRID = {"bf16": 2.0**9, "fp16": 2.0**12}
"""Steps of the grid per 1: the spacing of numbers of 0.25 and more."""
GRID_TOLERANCE = 0.05


def grid_share(gap: np.ndarray, dtype: str) -> float:
    """Return the share of differences of two logits [n] that are a multiple of the spacing of `dtype`; nan for too few.

    A head that rounds its logits to bf16 or fp16 leaves them on a grid, whatever noise the body has, and log-softmax in FP32
    keeps their differences. Differences of FP32 logits lie anywhere.
    """
    steps = gap[np.isfinite(gap) & (gap != 0)].astype(np.float64) * GRID[dtype]
    if len(steps) < FEWEST_TOKENS:
        return float("nan")
    return float(np.mean(np.abs(steps - np.round(steps)) < GRID_TOLERANCE))


UNCERTAIN, FEWEST_UNCERTAIN = 1e-3, 8
"""Least 1 - p of a token that shows a logit's error beside the rounding of log-probs, and how many of them are enough."""
SAME_BITS_LIMIT, TEMPERATURE_LIMIT, POSITION_LIMIT = 0.5, 0.35, 1.5


def likely_cause(measurements: Sequence[Measurement], limits: ParityLimits, what: str) -> str:
    """Return the likeliest cause of measurements that break the limit of `what`, and the numbers that point to it.

    stale server   its scores are the same bits at two versions
    temperature    differences follow the log-prob itself: a straight line explains most of them
    RoPE           differences grow along the sequence; not for decode, whose error grows with what it reads from the cache
    routing        more choices of experts differ than rounding explains
    dtype          none of these: noise that is everywhere alike
    """
    same, line, growth = _signs(_joined([m.scores for m in measurements]), what)
    choices = sum(m.choices for m in measurements)
    routing = sum(m.differing for m in measurements) / choices if choices else 0.0
    signs = {"parity_same_bits": same, "parity_line": line, "parity_growth": growth}
    return (
        f"{named_cause(signs, routing > limits.routing, what == 'decode')} (same bits at two versions: {same:.0%}; explained "
        f"by the log-prob: {line:.0%}; last third of positions over first: {growth:.2g}; experts that differ: {routing:.1%})"
    )


def _signs(scores: RolloutScores, what: str) -> tuple[float, float, float]:
    """Return the share of same bits at two versions, of variance on a line through the log-prob, and growth along sequences."""
    decoding = what == "decode"
    first, second = scores.pair("decode" if decoding else "kernels")
    earlier, later = scores.pair("staleness")
    known = ~(np.isnan(earlier) | np.isnan(later))
    same = float(np.mean(earlier[known] == later[known])) if known.any() and not decoding else 0.0
    growth = 1.0 if decoding else growth_along_sequence(first, second, scores.position)
    return same, explained_by_logprob(first, second), growth


def named_cause(signs: Mapping[str, float], routing: bool, decoding: bool = False) -> str:
    """Return the likeliest cause of a difference. signs: metrics of a row; routing: too many choices of experts differ."""
    for side in ("server", "learner"):
        if signs.get(f"parity_grid/{side}", 0.0) > GRID_LIMIT:
            return f"one-sided head: logits of the {side} lie on the grid of low-precision numbers, and should be FP32"
    if signs.get("parity_same_bits", 0.0) > SAME_BITS_LIMIT:
        return "stale server: its scores did not change with the last publications, so it computes with older weights"
    if signs.get("parity_line", 0.0) > TEMPERATURE_LIMIT:
        return "temperature: one side divides its logits by another temperature, or scales them"
    if signs.get("parity_growth", 1.0) > POSITION_LIMIT:
        return "RoPE: differences grow along the sequence; compare rope_theta, rope_scaling, positions of both sides"
    if routing:
        return "routing: the sides choose different experts; compare router weights, biases and their precision"
    if decoding:
        return "dtype: the server's cache or decoding kernel has less precision than its prefill (kv_cache_dtype)"
    return "dtype: one side computes in less precision than model.dtype, or with another kernel or epsilon"


def logit_error(first: np.ndarray, second: np.ndarray) -> float:
    """Return how far logits are off, from log-probs [n] of the same tokens: the median of |difference| / (1 - p) over tokens of
    which the policy is not certain; nan for too few.

    An error e of a token's logit moves its log-prob by (1 - p) e. So this does not change as the policy grows certain, which
    lets the mean fall and scatter, and a few tokens that other experts computed do not move it.
    """
    uncertain = -np.expm1(np.minimum(second, 0.0, dtype=np.float64))
    known = np.isfinite(first) & np.isfinite(second) & (uncertain > UNCERTAIN)
    if known.sum() < FEWEST_UNCERTAIN:
        return float("nan")
    return float(np.median(np.abs(first[known] - second[known]) / uncertain[known]))


def explained_by_logprob(first: np.ndarray, second: np.ndarray) -> float:
    """Return R² of the line through (second, first - second): 1 if the difference is linear in the log-prob."""
    known = np.isfinite(first) & np.isfinite(second)
    x, d = second[known].astype(np.float64), (first - second)[known].astype(np.float64)
    if len(d) < FEWEST_TOKENS or not x.std() or not d.std():
        return 0.0
    return float(np.corrcoef(x, d)[0, 1] ** 2)


def growth_along_sequence(first: np.ndarray, second: np.ndarray, position: np.ndarray) -> float:
    """Return the mean |difference| in the last third of the positions over that in the first third."""
    known = np.isfinite(first) & np.isfinite(second)
    size, at = np.abs(first - second)[known], position[known]
    if len(size) < FEWEST_TOKENS:
        return 1.0
    low, high = np.quantile(at, (1 / 3, 2 / 3))
    early, late = size[at <= low], size[at >= high]
    return float(late.mean() / max(float(early.mean()), 1e-12))


def pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each cause's distribution over the publications in rows of metrics; causes that were never measured are left out.

    mean, share, k3: over all tokens. p50, p99, p999: medians of the publications. max, worst_mean (the largest mean of a
    publication), tokens and publications: of all.
    """
    found = {}
    for cause in CAUSES:
        keys = {field.name: f"parity_{field.name}/{cause}" for field in fields(Distribution)}
        measured = [row for row in rows if all(key in row for key in keys.values()) and row[keys["tokens"]] > 0]
        if measured:
            column = {name: np.array([row[key] for row in measured], np.float64) for name, key in keys.items()}
            found[cause] = {
                **{s: float(np.average(column[s], weights=column["tokens"])) for s in ("mean", "share", "k3")},
                **{s: float(np.median(column[s])) for s in ("p50", "p99", "p999")},
                "worst_mean": float(column["mean"].max()),
                "max": float(column["max"].max()),
                "tokens": float(column["tokens"].sum()),
                "publications": float(len(measured)),
            }
    return found


def shown(row: Mapping[str, float | None]) -> str:
    """Return the mean |difference| of kernels in a row of metrics, in words: 0 is "same bits"."""
    mean = row.get("parity_mean/kernels")
    if mean is None or np.isnan(mean):
        return "not measured"
    return "same bits" if mean == 0 else f"{mean:.1e}"
