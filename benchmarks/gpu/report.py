"""Writes results as JSON, with all data, and as a table for people."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Outcome, Row

SCHEMA = 1


def write(path: Path, date: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write PATH.json and PATH.md."""
    parts = [
        asdict(o) | {"rows": [asdict(r) | {"ratio": r.ratio} for r in o.rows]} for o in outcomes
    ]
    tree = {"schema": SCHEMA, "date": date, "machine": facts, "parts": parts}
    for suffix, text in (
        ("json", json.dumps(tree, indent=2) + "\n"),
        ("md", markdown(date, facts, outcomes)),
    ):
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text)
        os.replace(partial, f"{path}.{suffix}")


def outcomes(tree: dict[str, Any]) -> list[Outcome]:
    """Return the outcomes in a report's JSON."""
    names = [field.name for field in fields(Row)]
    return [
        Outcome(**part | {"rows": [Row(**{n: row[n] for n in names}) for row in part["rows"]]})
        for part in tree["parts"]
    ]


def markdown(date: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    measured = [_cells(o.part, row) for o in outcomes for row in o.rows]
    lines = [
        f"# {facts['gpu']}, {date}",
        "",
        (
            f"Driver {facts['driver']}, CUDA {facts['cuda']}, Python {facts['python']},"
            f" {facts['cpus']} CPUs, kernel {facts['kernel']}."
        ),
        f"{versions}.",
        *(
            [f"Of the stack: {', '.join(facts['stack'])}; the others were there."]
            if facts["stack"]
            else []
        ),
        f"Commit {facts['commit']}.",
        "",
        *_table(("part", "what", "figure", "reference", "ratio", "sizes"), measured),
        "",
        *_table(("part", "ended", "seconds", "why, remarks"), [_ending(o) for o in outcomes]),
    ]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Format with four significant digits, or with all digits before the point."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cells(part: str, row: Row) -> tuple[str, ...]:
    reference = row.reference
    if row.reference_figure is not None:
        reference = f"{row.reference}: {number(row.reference_figure)} {row.unit}".rstrip()
    ratio = "" if row.ratio is None else number(row.ratio)
    return part, row.what, f"{number(row.figure)} {row.unit}".rstrip(), reference, ratio, row.sizes


def _ending(outcome: Outcome) -> tuple[str, ...]:
    why = "; ".join(filter(None, [outcome.why, *outcome.remarks]))
    return outcome.part, outcome.ending, f"{outcome.seconds:.0f}", why


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["Nothing was measured."]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *escaped)]
