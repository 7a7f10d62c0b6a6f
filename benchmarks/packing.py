"""How evenly do micro-batches keep the ranks busy, packed by cost and by tokens alone?

    python -m benchmarks.packing [--seeds 5] [--json FILE]

Sequences are as in ScaleRL: 48 prompts x 16, log-normal, cut off at a context of
16,384. Costs are floating-point operations of the real models. Nothing is trained; a
case takes a second.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megarl.core.algorithm.packing import BY_TOKENS, Cost, cost_of, pack, step_cost
from megarl.core.base import architecture

CONTEXT = 16_384
ROLLOUTS = 768
MEDIAN = 6000
SPREAD = 0.6
MICROBATCH = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        measured(model, ranks, one_size, options.seeds)
        for model in ("llama-3.1-8b", "llama-4-scout")
        for one_size in (False, True)
        for ranks in (4, 16)
    ]
    print(
        "| model | ranks | size | packed by | slowest rank / mean | in step / mean | micro-batches"
        " | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        for by in ("tokens", "cost"):
            found = row[by]
            print(
                f"| {row['model']} | {row['ranks']} | {'one' if row['one_size'] else 'any'} | {by}"
                f" | {found['slowest']:.4f} | {found['in_step']:.4f} | {found['microbatches']:.0f}"
                f" | {found['seconds']:.3f} |"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def lengths(seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SPREAD, ROLLOUTS)
    return np.clip(drawn, 64, CONTEXT).astype(int).tolist()


def measured(model: str, ranks: int, one_size: bool, seeds: int) -> dict:
    """Return means over seeds. one_size: all micro-batches of a pipeline are as large
    as the fullest.
    """
    cost = cost_of(architecture.read(model))
    row: dict = {"model": model, "ranks": ranks, "one_size": one_size}
    for name, by in (("tokens", BY_TOKENS), ("cost", cost)):
        found = [case(lengths(seed), ranks, by, cost, one_size) for seed in range(seeds)]
        row[name] = {key: float(np.mean([f[key] for f in found])) for key in found[0]}
    return row


def case(
    tokens: Sequence[int], ranks: int, by: Cost, cost: Cost, one_size: bool
) -> dict[str, float]:
    """Return costs relative to the mean. slowest: of the busiest rank; in_step: of a
    step whose ranks wait in each round.
    """
    begin = time.perf_counter()
    packed = pack(tokens, MICROBATCH, ranks, by, one_size and by is cost)
    seconds = time.perf_counter() - begin
    totals = [sum(cost.of(tokens[i]) for m in rank for i in m) for rank in packed]
    return {
        "slowest": max(totals) / np.mean(totals),
        "in_step": step_cost(packed, tokens, cost, one_size) / np.mean(totals),
        "microbatches": len(packed[0]),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
