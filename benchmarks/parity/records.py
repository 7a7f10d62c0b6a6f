"""Recorded comparisons of a real model: what is kept of them, what follows for the
limits, and how a run would have ended.

    python -m benchmarks.parity.records keep clean.jsonl
    benchmarks/results/parity/real-bf16.csv.gz python -m benchmarks.parity.records
    limits benchmarks/results/parity/real-bf16.csv.gz python -m
    benchmarks.parity.records judge faults.jsonl

The first file of `keep`, and that of `judge`, is what benchmarks/parity/real.py wrote.
`keep` leaves the differences of each token; `limits` draws comparisons of several sizes
from them; `judge` gives the comparisons of four rollouts each to the judge.
"""

import argparse
import csv
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from megarl.core.base.messages import PARITY_ROLLOUTS
from megarl.core.base.terminal import say
from megarl.core.evaluation.parity import (
    GRID_TOLERANCE,
    LIMITED,
    LIMITS,
    Measurement,
    ParityJudge,
    RolloutScores,
    grid_steps,
)

STATES_OF_A_SEED = 1000
"""Numbers of states that are kept for each seed, so that files of several seeds can be
joined.
"""


@dataclass(frozen=True)
class ComparedRollout:
    """A rollout's scores by both sides: log-probs [tokens] as in `RolloutScores`.
    state: the number of the weights that sampled it; kind: how they were made.
    """

    state: int
    kind: str
    fault: str  # that both sides' scores were made with; empty for none
    first: int  # tokens of the prompt
    behaviour: list[float]
    sampled_at: list[float]
    served: list[float]
    learner: list[float]
    served_gap: list[float]
    learner_gap: list[float]

    def scores(self, server: int = 0) -> RolloutScores:
        count = len(self.behaviour)
        return RolloutScores(
            behaviour=np.float32(self.behaviour),
            sampled_at=np.float32(self.sampled_at),
            rescored=np.float32(self.served),
            learner=np.float32(self.learner),
            lag=np.ones(count, np.int64),
            position=self.first + np.arange(count),
            stale=np.zeros(count, bool),
            server=np.full(count, server),
            served_gap=np.float32(self.served_gap),
            learner_gap=np.float32(self.learner_gap),
        )


UNITS = {"bf16": 1e-4, "fp8": 1e-4, "fp32": 1e-8}
"""The size of the steps in which `keep` writes differences."""
LOGPROB_UNIT = 0.01


def read(file: Path) -> list[ComparedRollout]:
    return [ComparedRollout(**json.loads(line)) for line in file.read_text().splitlines()]


def keep(options: argparse.Namespace) -> None:
    """Write, for each rollout, the differences of its tokens, their log-probs and how
    many of its logits lie on the grid.
    """
    unit = UNITS[options.dtype]
    with (
        gzip.GzipFile(options.kept, "wb", mtime=0) as packed,
        io.TextIOWrapper(packed, newline="\n") as file,
    ):
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            (
                "state",
                "kind",
                "first",
                "logprob",
                "kernels",
                "decode",
                "served_grid",
                "learner_grid",
            )
        )
        for rollout in read(options.gathered):
            scores = rollout.scores()
            columns = [integers(scores.learner, LOGPROB_UNIT)]
            for cause in LIMITED:
                first, second = scores.pair(cause)
                columns.append(integers(second - first, unit))
            grids = [on_grid(scores.gap(side), options.dtype) for side in ("server", "learner")]
            rows.writerow((rollout.state, rollout.kind, rollout.first, *columns, *grids))


def integers(values: np.ndarray, unit: float) -> str:
    return " ".join(str(round(float(value) / unit)) for value in values)


def on_grid(gap: np.ndarray, dtype: str) -> str:
    """Return how many differences of logits lie on the grid of bf16 numbers, and of how
    many.
    """
    if dtype in ("fp32", "fp8"):
        return ""
    steps = grid_steps(gap, dtype)
    return f"{int(np.sum(np.abs(steps - np.round(steps)) < GRID_TOLERANCE))}/{len(steps)}"


@dataclass(frozen=True)
class KeptRollout:
    """A rollout of a kept file. Differences [tokens] by cause, in log-prob."""

    state: int
    kind: str
    first: int
    logprob: np.ndarray
    differences: dict[str, np.ndarray]

    def scores(self, scale: float = 1.0, tokens: int | None = None) -> RolloutScores:
        """Return scores with these differences, times `scale`, of the first `tokens`
        tokens; gaps are unknown.
        """
        logprob = self.logprob[:tokens]
        apart = {cause: scale * each[:tokens] for cause, each in self.differences.items()}
        count = len(logprob)
        return RolloutScores(
            behaviour=logprob - apart["decode"],
            sampled_at=logprob,
            rescored=logprob - apart["kernels"],
            learner=logprob,
            lag=np.ones(count, np.int64),
            position=self.first + np.arange(count),
            stale=np.zeros(count, bool),
            server=np.zeros(count, np.int64),
            served_gap=np.full(count, np.nan),
            learner_gap=np.full(count, np.nan),
        )


def kept(file: Path, dtype: str) -> list[KeptRollout]:
    """Return the rollouts of a kept file."""
    found = []
    with gzip.open(file, "rt") as lines:
        for row in csv.DictReader(lines):
            logprob = LOGPROB_UNIT * np.array(row["logprob"].split(), np.float64)
            differences = {
                cause: UNITS[dtype] * np.array(row[cause].split(), np.float64) for cause in LIMITED
            }
            found.append(
                KeptRollout(int(row["state"]), row["kind"], int(row["first"]), logprob, differences)
            )
    return found


def comparisons(rollouts: Sequence[KeptRollout]) -> list[list[KeptRollout]]:
    """Return the rollouts of each comparison: PARITY_ROLLOUTS of one state of the
    weights.
    """
    by_state: dict[int, list[KeptRollout]] = {}
    for rollout in rollouts:
        by_state.setdefault(rollout.state, []).append(rollout)
    found = []
    for each in by_state.values():
        whole = len(each) - len(each) % PARITY_ROLLOUTS
        found += [each[at : at + PARITY_ROLLOUTS] for at in range(0, whole, PARITY_ROLLOUTS)]
    return found


def drawn(
    rollouts: Sequence[KeptRollout], cause: str, tokens: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return means and medians [DRAWS] of |difference| over `tokens` tokens. Each draw
    takes a state of the weights, and then rollouts of this state, with replacement,
    until there are enough tokens: tokens of one answer, and answers of one policy, are
    alike, and so they are in a run.
    """
    by_state: dict[int, list[np.ndarray]] = {}
    for rollout in rollouts:
        by_state.setdefault(rollout.state, []).append(np.abs(rollout.differences[cause]))
    states = list(by_state.values())
    random = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    medians = np.empty(DRAWS)
    for draw in range(DRAWS):
        state = states[random.integers(len(states))]
        taken: list[np.ndarray] = []
        while sum(map(len, taken)) < tokens:
            taken.append(state[random.integers(len(state))])
        sizes = np.concatenate(taken)[:tokens]
        means[draw] = sizes.mean()
        medians[draw] = np.median(sizes)
    return means, medians


DRAWS = 2_000
RATE = 1e-3
"""The rate of broken limits per comparison for which quantiles are given."""
TOKENS = (32, 64, 128, 256, 1024)


def beyond(values: np.ndarray, limit: float) -> float:
    """Return the probability of more than `limit`, by the gamma distribution with the
    mean and variance of the values.
    """
    return float(gamma_of(values).sf(limit))


def gamma_of(values: np.ndarray):  # type: ignore[no-untyped-def]
    return stats.gamma(values.mean() ** 2 / values.var(), scale=values.var() / values.mean())


def limits(options: argparse.Namespace) -> None:
    """Print what the kept comparisons say about limits."""
    rollouts = kept(options.kept, options.dtype)
    groups = comparisons(rollouts)
    limited = LIMITS[options.dtype, False]
    for cause in LIMITED:
        sizes = [np.abs(np.concatenate([r.differences[cause] for r in group])) for group in groups]
        means = np.array([size.mean() for size in sizes])
        lengths = [len(size) for size in sizes]
        said = f"{len(groups)} comparisons of {min(lengths)} to {max(lengths)} tokens"
        say(f"{cause}: {said}, mean {np.concatenate(sizes).mean():.3g}, worst {means.max():.3g}")
        for tokens in TOKENS:
            many_means, many_medians = drawn(rollouts, cause, tokens)
            for name, values, limit in (
                ("mean", many_means, limited.mean_of(cause, tokens)),
                ("median", many_medians, limited.p50_of(tokens)),
            ):
                quantile = gamma_of(values).ppf(1 - RATE)
                far = f"{quantile:.3g} at {RATE:g}, largest drawn {values.max():.3g}"
                chance = f"limit {limit:.3g} at {beyond(values, limit):.1e}"
                say(
                    f"  {tokens:5} tokens, {name:6}: {values.mean():.3g} ± {values.std():.2g};"
                    f" {far}; {chance}"
                )


def measurements(rollouts: Sequence[ComparedRollout], server: int = 0) -> list[Measurement]:
    """Return the rollouts as a run's comparisons, PARITY_ROLLOUTS each."""
    found = []
    for at in range(0, len(rollouts) - PARITY_ROLLOUTS + 1, PARITY_ROLLOUTS):
        scores = RolloutScores.concatenate(
            [each.scores(server) for each in rollouts[at : at + PARITY_ROLLOUTS]]
        )
        found.append(Measurement(len(found) + 1, scores, PARITY_ROLLOUTS))
    return found


def judge(options: argparse.Namespace) -> None:
    """Print how a run would have ended with the comparisons of each fault."""
    rollouts = read(options.gathered)
    for fault in dict.fromkeys(rollout.fault for rollout in rollouts):
        found = judged(measurements([r for r in rollouts if r.fault == fault]), options.dtype)
        say(json.dumps({"fault": fault} | found))


def judged(given: Sequence[Measurement], dtype: str) -> dict[str, object]:
    """Return how many comparisons were warned of, after which one the run ended, and
    the message.
    """
    one = ParityJudge(dtype, False, True, True)
    warned = 0
    for count, measurement in enumerate(given, 1):
        verdict = one.judge(measurement)
        warned += bool(verdict.warning)
        if verdict.ends:
            return {"comparisons": count, "warned": warned, "ended": verdict.warning}
    return {"comparisons": len(given), "warned": warned, "ended": ""}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    keeping = commands.add_parser("keep")
    keeping.add_argument("gathered", type=Path)
    keeping.add_argument("kept", type=Path)
    keeping.set_defaults(run=keep)
    limiting = commands.add_parser("limits")
    limiting.add_argument("kept", type=Path)
    limiting.set_defaults(run=limits)
    judging = commands.add_parser("judge")
    judging.add_argument("gathered", type=Path)
    judging.set_defaults(run=judge)
    for command in (keeping, limiting, judging):
        command.add_argument("--dtype", default="bf16", choices=UNITS)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
