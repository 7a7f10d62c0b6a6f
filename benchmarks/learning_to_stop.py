"""When do `length_fall` and `entropy_fall` fire, with and without the rule that
learning is no fault?

    python -m benchmarks.learning_to_stop benchmarks/results/corpus [RUN ...]

Records of clean runs, as they are and with one change from step 90 on, and run
directories. A row says in how many runs each signal fired `before` the rule, and fires
`now`.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import read
from megarl.core.base.rundir import Row, RunDir, latest_rows
from megarl.run import health

BEGIN = 90
"""The step from which on a record is changed. By then the norm is known."""
NAMES = ("length_fall", "entropy_fall")


@dataclass(frozen=True)
class Disturbance:
    """What happens to a clean run. more_right: added to the pass rate.
    truncated_before: added to the share of answers that are cut off before the change.
    """

    name: str
    length: float = 1.0
    entropy: float = 1.0
    more_right: float = 0.0
    truncated_before: float = 0.0

    def of(self, row: Row) -> Row:
        """Return the row as the change leaves it."""
        if row["step"] < BEGIN:
            cut_off = row["truncation_rate"] + self.truncated_before
            return row | {"truncation_rate": min(1.0, cut_off)}
        right = row["pass_rate_train"] + self.more_right
        changed = {
            "completion_tokens_mean": row["completion_tokens_mean"] * self.length,
            "pass_rate_train": min(1.0, max(0.0, right)),
        }
        if "entropy" in row:  # a step without a group in the loss has none
            changed["entropy"] = row["entropy"] * self.entropy
        return row | changed


DISTURBANCES = (
    Disturbance("clean, as recorded"),
    Disturbance("answers shorter by 40 %, as many right", length=0.6),
    Disturbance("the same, .2 fewer right", length=0.6, more_right=-0.2),
    Disturbance("the same, .2 more right", length=0.6, more_right=0.2),
    Disturbance("the same, as many right, .3 fewer cut off", length=0.6, truncated_before=0.3),
    Disturbance("a twentieth of the entropy, as many right", entropy=0.05),
    Disturbance("the same, .2 fewer right", entropy=0.05, more_right=-0.2),
    Disturbance("the same, .2 more right", entropy=0.05, more_right=0.2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args()
    records = [list(read(path).steps) for path in sorted(options.records.glob("*.jsonl.gz"))]
    print(
        "| runs | "
        + " | ".join(f"{name}, before | now" for name in NAMES)
        + " |\n"
        + "|---" * 5
        + "|"
    )
    for kind in DISTURBANCES:
        show(f"{len(records)} {kind.name}", [[kind.of(row) for row in steps] for steps in records])
    for run in options.runs:
        show(run.name, [latest_rows(RunDir(run).metrics)])


def show(name: str, runs: Sequence[Sequence[Row]]) -> None:
    before = fired(runs, lambda signal: signal._replace(learning=False))
    now = fired(runs, lambda signal: signal)
    cells = [f"{before[signal]} | {now[signal]}" for signal in NAMES]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def fired(
    runs: Iterable[Sequence[Row]], changed: Callable[[health.Signal], health.Signal]
) -> dict[str, int]:
    """Return in how many runs each of NAMES fired, with signals changed like that."""
    usual = health.SIGNALS
    health.SIGNALS = tuple(changed(signal) for signal in usual if signal.name in NAMES)  # type: ignore[misc]
    try:
        found = [{alarm.name for alarm in health.Health(rows).history} for rows in runs]
    finally:
        health.SIGNALS = usual  # type: ignore[misc]
    return {name: sum(name in names for names in found) for name in NAMES}


if __name__ == "__main__":
    main()
