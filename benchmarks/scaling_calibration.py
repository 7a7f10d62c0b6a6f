"""How often the 95 % intervals of `megarl scaling fit` hold the truth, on synthetic runs of each published row.

    python -m benchmarks.scaling_calibration [--draws 400] [--workers 2]

A run of H GPU-hours has 32 evaluations, and one each 100 steps where the paper tells the steps (74 of the long run,
71 of the 17Bx16), each binomial of 16,000 samples, R_0 too. The default window is fitted to the first half of the compute. H is
what the paper says or 16,000, and 45,000 for 32k tokens: half of 16,000 would end before C_mid, which is the last row.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from megarl.lab.scaling.extrapolate import predict
from megarl.lab.scaling.fit import fit
from megarl.lab.scaling.published import Law, law_named, published, synthetic

RESULTS = Path(__file__).parent / "results" / "scaling_calibration.json"
EVALUATIONS = {"batch-2048": 74, "scout-17bx16": 71}
HOURS = {"context-32k": 45_000.0}


def runs() -> Iterator[tuple[str, Law, float, int]]:
    """Name, law, hours and number of evaluations."""
    for law in published():
        if law.C_mid is not None:
            yield law.name, law, law.hours or HOURS.get(law.name, 16_000.0), EVALUATIONS.get(law.name, 32)
    yield "context-32k, 16,000 h", law_named("context-32k"), 16_000.0, 32


def draw(seed: int, law: Law, hours: float, evaluations: int) -> tuple[bool, bool, bool, bool, float, float, float]:
    """Whether A, B, C_mid and the score at all of the compute were inside; width and error of A, error of that score."""
    curve = synthetic(law, np.linspace(hours / evaluations, hours, evaluations), seed)
    found = fit([curve], end=hours / 2)
    end = predict(found, np.array([hours]))
    score = law(np.array([hours]))[0]
    return (
        found.A_interval[0] <= law.A <= found.A_interval[1],
        found.B_interval[0] <= law.B <= found.B_interval[1],
        found.C_mid_interval[0] <= (law.C_mid or 0) <= found.C_mid_interval[1],
        bool(end.low[0] <= score <= end.high[0]),
        found.A_interval[1] - found.A_interval[0],
        found.A - law.A,
        float(end.pass_rate[0] - score),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rows = []
    print(
        "| run | A | B | C_mid | score at all of it | width of A | rms error of A | rms error of the score |\n"
        + "|---" * 8
        + "|"
    )
    with ProcessPoolExecutor(options.workers) as pool:
        for n, (name, law, hours, evaluations) in enumerate(runs()):
            one = partial(draw, law=law, hours=hours, evaluations=evaluations)
            found = np.array(
                list(pool.map(one, range(10_000 * n, 10_000 * n + options.draws), chunksize=10)), dtype=np.float64
            )
            covered, width = found[:, :4].mean(0), float(np.median(found[:, 4]))
            errors = np.sqrt((found[:, 5:] ** 2).mean(0))
            rows.append([name, *covered.round(4).tolist(), width, *errors.tolist()])
            shown = " | ".join(f"{100 * share:.1f}" for share in covered)
            print(f"| {name} | {shown} | {width:.3f} | {errors[0]:.4f} | {errors[1]:.4f} |", flush=True)
    regular = np.array([row[1:5] for row in rows[:-1]])
    print(f"| all but the last | {' | '.join(f'{100 * share:.1f}' for share in regular.mean(0))} | | | |")
    keys = ("run", "A", "B", "C_mid", "score", "median_width_A", "rms_error_A", "rms_error_score")
    RESULTS.write_text(
        json.dumps({"draws": options.draws, "rows": [dict(zip(keys, r, strict=True)) for r in rows]}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
