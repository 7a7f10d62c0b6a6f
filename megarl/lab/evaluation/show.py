"""What a user sees of an evaluation: progress while it runs, and a table of the results."""

import time
from collections.abc import Sequence
from typing import Any

from rich import progress as rich
from rich.console import Console
from rich.table import Table

from megarl.core.evaluation.answers import Answer, Result
from megarl.core.evaluation.score import Questions

LINE_S = 30.0
"""Seconds between lines of non-interactive output."""


class Progress:
    """Shows for each suite the answers so far, and how many are right."""

    def __init__(self, questions: Sequence[Questions[Any]], console: Console) -> None:
        self._console, self._live = console, console.is_terminal
        counts = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[right]}"))
        times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
        name = rich.TextColumn("{task.description}")
        self._shown = rich.Progress(name, *counts, *times, console=console, disable=not self._live)
        self._right = {q.name: sum(a.correct for a in q.answered) for q in questions}
        self._done = {q.name: len(q.prompts) * q.samples - len(q.open) for q in questions}
        self._total = {q.name: len(q.prompts) * q.samples for q in questions}
        self._tasks = {
            name: self._shown.add_task(name, total=total, completed=self._done[name], right="")
            for name, total in self._total.items()
        }
        self._last = time.monotonic()

    def __enter__(self) -> "Progress":
        self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.stop()

    def count(self, answer: Answer) -> None:
        """Count one more answer."""
        name = answer.suite
        self._done[name] += 1
        self._right[name] += answer.correct
        self._shown.update(self._tasks[name], advance=1, right=f"{self._right[name] / self._done[name]:.1%} right")
        if not self._live and time.monotonic() - self._last >= LINE_S:
            self._last = time.monotonic()
            parts = [f"{n}: {self._done[n]} of {total} answers" for n, total in self._total.items()]
            self._console.print(" · ".join(parts), highlight=False, soft_wrap=True)


def table(results: Sequence[Result]) -> Table:
    """Make a table with one column per suite."""
    shown = Table(box=None, padding=(0, 2), pad_edge=False, title=results[0].model, title_justify="left")
    shown.add_column("", style="dim", no_wrap=True)
    for result in results:
        shown.add_column(result.suite, justify="right", no_wrap=True)
    for label, cells in rows(results):
        shown.add_row(label, *cells)
    return shown


def rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Return label and one cell per result; rows that no result has are left out."""
    table_rows = [("prompts × answers", [f"{r.metrics['n_prompts']:.0f} × {r.samples}" for r in results])]
    table_rows.append(("mean@k", [_rate(r, "pass_rate") for r in results]))
    if any("pass_rate_by_length" in r.metrics for r in results):
        table_rows.append(("choice by length", [_rate(r, "pass_rate_by_length") for r in results]))
    for kind in ("pass", "maj", "best"):
        ks = sorted({int(name.partition("@")[2]) for r in results for name in r.metrics if _is_estimate(name, kind)})
        table_rows += [(f"{kind}@{k}", [_rate(r, f"{kind}@{k}") for r in results]) for k in ks if k > 1]
    for label, name in (
        ("truncated", "truncation_rate"),
        ("interrupted", "interruption_rate"),
        ("no answer", "format_error_rate"),
        ("grader ran out of time", "grader_timeout_rate"),
        ("grader failed", "grader_error_rate"),
        ("could not be generated", "void_rate"),
    ):
        if any(r.metrics.get(name) for r in results):
            table_rows.append((label, [f"{r.metrics.get(name, 0.0):.1%}" for r in results]))
    lengths = ("completion_tokens_mean", "completion_tokens_p50", "completion_tokens_p95")
    table_rows.append(
        ("tokens: mean, median, 95 %", [" · ".join(f"{r.metrics[n]:,.0f}" for n in lengths) for r in results])
    )
    table_rows.append(
        ("entropy, nats a token", [f"{r.metrics['entropy']:.3f}" if "entropy" in r.metrics else "–" for r in results])
    )
    return table_rows


def _is_estimate(name: str, kind: str) -> bool:
    return name.startswith(f"{kind}@") and name.partition("@")[2].isdigit()


def _rate(result: Result, name: str) -> str:
    """Format a rate with its 95 % interval."""
    if name not in result.metrics:
        return "–"
    low, high = result.metrics[f"{name}_low"], result.metrics[f"{name}_high"]
    return f"{result.metrics[name]:.3f} [{low:.3f}, {high:.3f}]"
