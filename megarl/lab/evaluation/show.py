"""What `megarl eval` shows: progress while it runs, and a table of the results."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from re import fullmatch

from rich import progress as rich
from rich.console import Console
from rich.table import Column, Table

from megarl.core.evaluation.answers import Answer, Result
from megarl.lab.evaluation.suites import SuiteQuestions

LINE_S = 30.0  # seconds between lines of non-interactive output


@contextmanager
def counted(questions: Sequence[SuiteQuestions], console: Console) -> Iterator[Callable[[Answer], None]]:
    """Show for each suite the answers so far, and how many are right; give what counts one more answer."""
    counts = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[right]}"))
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    live, last = console.is_terminal, time.monotonic()
    shown = rich.Progress(rich.TextColumn("{task.description}"), *counts, *times, console=console, disable=not live)
    right = {q.name: sum(a.correct for a in q.answered) for q in questions}
    bars = {}
    for q in questions:
        total = len(q.prompts) * q.samples
        shown.add_task(q.name, total=total, completed=total - len(q.open), right="")
        bars[q.name] = shown.tasks[-1]

    def count(answer: Answer) -> None:
        nonlocal last
        bar = bars[answer.suite]
        right[answer.suite] += answer.correct
        shown.update(bar.id, advance=1, right=f"{right[answer.suite] / (bar.completed + 1):.1%} right")
        if not live and time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            parts = [f"{name}: {bar.completed} of {bar.total} answers" for name, bar in bars.items()]
            console.print(" · ".join(parts), highlight=False, soft_wrap=True)

    with shown:
        yield count


def table(results: Sequence[Result]) -> Table:
    """Make a table with one column per suite."""
    columns = [Column("", style="dim", no_wrap=True)]
    columns += [Column(result.suite, justify="right", no_wrap=True) for result in results]
    shown = Table(*columns, box=None, padding=(0, 2), pad_edge=False, title=results[0].model, title_justify="left")
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
        ks = sorted({int(m[1]) for r in results for name in r.metrics if (m := fullmatch(rf"{kind}@(\d+)", name))})
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
    entropies = [f"{r.metrics['entropy']:.3f}" if "entropy" in r.metrics else "–" for r in results]
    return [
        *table_rows,
        ("tokens: mean, median, 95 %", [" · ".join(f"{r.metrics[n]:,.0f}" for n in lengths) for r in results]),
        ("entropy, nats a token", entropies),
    ]


def _rate(result: Result, name: str) -> str:
    """Format a rate with its 95 % interval."""
    if name not in result.metrics:
        return "–"
    low, high = result.metrics[f"{name}_low"], result.metrics[f"{name}_high"]
    return f"{result.metrics[name]:.3f} [{low:.3f}, {high:.3f}]"
