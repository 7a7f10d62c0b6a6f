"""Runs all parts in turn, within the given time. The results are written after each
part; rows of the part under way are in a file of their own, which stays if everything
is killed.

A later run on the same machine, day, commit and versions adds its parts to the file, or
replaces them, so that parts can be divided among commands if a command must not take
long. If anything else has changed, it begins a new file.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import machine, process, report
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.rows import Outcome
from megarl.run.process import adopt_orphans

RESULTS = Path(__file__).parents[1] / "results"
BUSY = 3
"""Factor on the time limit of a tiny part, because CPUs may be shared."""
LEAST_S = 10
"""A part is not begun with less time than this, in which it would not get beyond its
imports.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="measure a GPU with megarl"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes on the CPU: shows that everything runs"
    )
    parser.add_argument("--minutes", type=float, default=30, help="for everything")
    parser.add_argument("--spent", type=float, default=0, help="seconds of that which are gone")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, in this order")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    unknown = [name for name in options.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)}: known are {', '.join(PARTS)}")
    adopt_orphans()  # of parts that are killed
    deadline = time.monotonic() + 60 * options.minutes - options.spent
    parts = {name: PARTS[name] for name in options.parts.split(",")}
    outcomes = measure(parts, deadline, options.tiny, options.output)
    sys.exit(any(o.ending not in ("measured", "absent") for o in outcomes))


def measure(parts: Mapping[str, Part], deadline: float, tiny: bool, folder: Path) -> list[Outcome]:
    """Measure these parts. deadline: by time.monotonic()."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    facts = machine.facts(tiny)
    path, earlier = place(folder, f"gpu-{date}-{machine.slug(facts)}", facts)
    kept = [outcome for outcome in earlier if outcome.part not in parts]
    outcomes: list[Outcome] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        under_way = Path(f"{path}.{name}.jsonl")
        left = deadline - time.monotonic()
        limit = min(part.limit_s * (BUSY if tiny else 1), left)
        if left < LEAST_S:
            outcomes.append(Outcome(name, "not run", f"{max(left, 0):.0f} s were left"))
        else:
            print(f"{name}: at most {limit:.0f} s", flush=True)
            outcomes.append(process.run(name, part.module, limit, tiny, under_way))
        print(f"{name}: {outcomes[-1].ending} {outcomes[-1].why}".rstrip(), flush=True)
        report.write(path, date, facts, [*kept, *outcomes])
        under_way.unlink(missing_ok=True)
    print(f"\n{Path(f'{path}.md').read_text()}\n{path}.md, {path}.json")
    return outcomes


def place(folder: Path, name: str, facts: dict[str, Any]) -> tuple[Path, list[Outcome]]:
    """Return the path of this machine's results, without suffix, and the results that
    are already there.
    """
    for n in itertools.count(1):
        path = folder / (name if n == 1 else f"{name}-{n}")
        file = Path(f"{path}.json")
        if not file.exists():
            return path, []
        tree = json.loads(file.read_text())
        if tree["machine"] == facts:
            return path, report.outcomes(tree)
    raise AssertionError


if __name__ == "__main__":
    main()
