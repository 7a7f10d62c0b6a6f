"""Trains the tiny twin of a shipped recipe for any number of steps, and prints the
results.

    python -m benchmarks.recipe_twins scalerl-8b --steps 200 [--directory DIR]
    [learner.optimizer.lr=1e-3 …]

The twin, its model and its data are those of tests/recipe_twins.py: the recipe's own
algorithm and precision on two CPU cores. It prints steps, seconds, pass rates, every
metric whose name begins with `parity` (median and largest), and warnings.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from megarl.core import recipe as recipes
from megarl.core.base.rundir import RunDir, latest_rows
from tests.e2e.runs import warnings
from tests.recipe_twins import twin
from tests.twin_models import write_workplace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "recipe", choices=recipes.shipped(), metavar="RECIPE", help="name of a shipped recipe"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/recipe-twins"),
        help="for models, data and runs",
    )
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, after the twin's own")
    options = parser.parse_intermixed_args()
    lengths = (
        f"run.steps={options.steps}",
        f"evaluation.every={options.steps}",
        f"checkpoint.every={options.steps}",
    )
    overrides = [*twin(options.recipe), *lengths, *options.overrides]
    recipe = recipes.load(options.recipe, overrides)
    write_workplace(options.directory, [Path(recipe.model.path).name])
    begin = time.monotonic()
    command = [sys.executable, "-m", "megarl", "train", options.recipe, *overrides]
    status = subprocess.run(command, cwd=options.directory, check=False).returncode
    if status == 0:
        report(RunDir(options.directory / recipe.run.path), time.monotonic() - begin)
    return status


def report(rundir: RunDir, seconds: float) -> None:
    rows = latest_rows(rundir.metrics)
    scores = latest_rows(rundir.eval)
    print(f"\n{'steps':<32}{len(rows)}")
    print(
        f"{'seconds':<32}{seconds:.0f},"
        f" {statistics.median(row['step_seconds'] for row in rows):.2f} a step"
    )
    print(
        f"{'pass rate, held out':<32}{scores[0]['pass_rate']:.3f} → {scores[-1]['pass_rate']:.3f}"
    )
    rates = [row["pass_rate_train"] for row in rows]
    tenth = -(-len(rows) // 10)
    first = statistics.mean(rates[:tenth])
    last = statistics.mean(rates[-tenth:])
    print(f"{'pass rate, training, tenths':<32}{first:.3f} → {last:.3f}")
    for name in sorted({key for row in rows for key in row if key.startswith("parity")}):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            print(f"{name:<32}{statistics.median(values):.3g} median, {max(values):.3g} largest")
    for text, count in warnings(rundir).most_common():
        print(f"{count:>5} × {text}")


if __name__ == "__main__":
    sys.exit(main())
