"""`megarl data inspect`: lengths, difficulties, answer types and samples of a source, or of a recipe's tasks and traces.

Seen      statistics of one prompt set, gathered row by row: 8 bytes a row and a few samples      show   prints them with rich
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from itertools import batched

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.core.base.tokenizer import Tokenizer
from megarl.tasks.data.prompts import BATCH, Render
from megarl.tasks.data.rows import Row, digest
from megarl.tasks.data.survey import Survey, chosen
from megarl.tasks.data.traces import templated

BARS, BAR = 8, 32
"""Most bars of a histogram, and characters of the longest."""
SHOWN_TEXT = 400
"""Characters shown of a sample's prompt and answer; the rest is counted."""

ANSWERS: tuple[tuple[str, str], ...] = (
    ("whole number", r"[-+]?\d+"),
    ("decimal", r"[-+]?\d*[.,]\d+"),
    ("fraction", r"[-+]?(\d+\s*/\s*\d+|\\d?frac\s*\{?\s*-?\d+\s*\}?\s*\{?\s*\d+\s*\}?)"),
    ("choice", r"\(?[A-J]\)?|\\text\{\(?[A-J]\)?\}"),
    ("list or interval", r"[\[({\\].*,.*[\])}]|[^\\{]+(,[^,]+)+"),
    ("expression", r".*[\\^_=+*/{}].*"),
    ("word", r"[^\W\d]+"),
)
"""Kinds of answers by the form of the whole text; the first that fits."""


def kind_of_answer(text: str) -> str:
    """Return one of `ANSWERS`; `unit tests` for those of code; `text` for anything else."""
    plain = text.strip().strip("$").strip()
    if plain.startswith("{") and _is_tests(plain):
        return "unit tests"
    return next((name for name, form in ANSWERS if re.fullmatch(form, plain, re.DOTALL)), "text")


def _is_tests(text: str) -> bool:
    try:
        return "tests" in json.loads(text)
    except ValueError:
        return False


@dataclass
class Seen:
    """Statistics of one prompt set. lengths: of its prompts, in tokens if there is a tokenizer, else in characters."""

    samples: int
    lengths: array[int] = field(default_factory=lambda: array("L"))
    answers: array[int] = field(default_factory=lambda: array("L"))
    difficulties: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    _sampled: list[tuple[int, int, Row]] = field(default_factory=list)

    def add(self, row: Row, length: int, answer: int | None = None) -> None:
        """Add a row. answer: its length; by default in characters."""
        self.lengths.append(length)
        self.answers.append(len(row.answer) if answer is None else answer)
        self.difficulties[row.difficulty] += 1
        self.kinds[kind_of_answer(row.answer)] += 1
        if self.samples:  # those with the smallest hashes: the same each time
            entry = (-digest(f"sample/{row.id}"), len(self.lengths), row)
            if len(self._sampled) < self.samples:
                heappush(self._sampled, entry)
            else:
                heappushpop(self._sampled, entry)

    @property
    def sampled(self) -> list[Row]:
        return [row for _, _, row in sorted(self._sampled, key=lambda entry: -entry[0])]


def look(found: Survey, render: Render, tokenizer: Tokenizer | None, samples: int) -> tuple[Seen, Seen]:
    """Return statistics of what is trained on and what is held out of a source."""
    seen = Seen(samples), Seen(samples)
    for part in batched(chosen(found), BATCH):
        for (row, held), length in zip(part, _lengths(part, render, tokenizer), strict=True):
            seen[held].add(row, length)
    return seen


def _lengths(part: tuple[tuple[Row, bool], ...], render: Render, tokenizer: Tokenizer | None) -> Iterator[int]:
    return _lengths_of([render(row.prompt) for row, _ in part], tokenizer)


def _lengths_of(texts: list[str], tokenizer: Tokenizer | None) -> Iterator[int]:
    return map(len, texts if tokenizer is None else tokenizer.encode_all(texts))


# The view


def show(name: str, seen: Seen, console: Console, unit: str, limit: int | None, render: Render) -> None:
    """Print one prompt set. limit: longest prompt that is trained on, in tokens."""
    if not seen.lengths:
        console.print(f"[bold]{name}[/]: no rows")
        return
    lengths = np.array(seen.lengths)
    parts: list[RenderableType] = [_lengths_view("prompts", lengths, unit)]
    if limit is not None and unit == "tokens":
        over = int((lengths > limit).sum())
        parts.append(
            Text(f"{over:,} longer than length.prompt_tokens={limit}: left out", style="yellow" if over else "dim")
        )
    parts.append(_lengths_view("answers", np.array(seen.answers), "characters"))
    parts.append(_bars("answer types", seen.kinds.most_common()))
    parts.append(_bars("difficulty", _difficulties(seen.difficulties)))
    console.print(
        Panel(Group(*parts), title=Text(f"{len(lengths):,} rows · {name}"), title_align="left", border_style="dim")
    )
    for row in seen.sampled:
        console.print(_sample(row, render))


def look_at_traces(found: Survey, tokenizer: Tokenizer | None, samples: int) -> Seen:
    """Return statistics of a source of traces: lengths of what precedes the completions and, as `answers`, of these."""
    seen = Seen(samples)
    for part in batched(chosen(found if tokenizer is None else templated(found, tokenizer)), BATCH):
        completions = _lengths_of([row.answer for row, _ in part], tokenizer)
        for (row, _), prompt, completion in zip(part, _lengths(part, str, tokenizer), completions, strict=True):
            seen.add(row, prompt, completion)
    return seen


def show_traces(name: str, seen: Seen, console: Console, unit: str, limit: int | None) -> None:
    """Print traces. limit: longest that is learnt, in tokens, its end token included."""
    prompts, completions = np.array(seen.lengths), np.array(seen.answers)
    parts = [_lengths_view("prompts", prompts, unit), _lengths_view("completions", completions, unit)]
    if limit is not None:
        over = int((prompts + completions + 1 > limit).sum())
        parts.append(Text(f"{over:,} longer than sft.max_length={limit}: left out", style="yellow" if over else "dim"))
    console.print(
        Panel(Group(*parts), title=Text(f"{len(prompts):,} traces · {name}"), title_align="left", border_style="dim")
    )
    for row in seen.sampled:
        text = Text(_shortened(row.prompt, SHOWN_TEXT))
        text.append(f"\n→ {_shortened(row.answer, SHOWN_TEXT)}", style="green")
        console.print(Panel(text, border_style="dim"))


def show_left_out(found: Survey, console: Console) -> None:
    """Print how many rows are not used, by reason, with the first of each."""
    counts = found.left_out.counts
    again = f"; {found.again:,} repeat an earlier one" if found.again else ""
    if not counts:
        console.print(f"{found.source}: {len(found.kept):,} rows, none left out{again}", soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("left out", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("first")
    for reason, count in counts.most_common():
        number, what = found.left_out.first[reason][0]
        table.add_row(reason, f"{count:,}", Text(_shortened(f"{number}: {what}", 100)))
    console.print(f"{found.source}: {len(found.kept):,} rows, {counts.total():,} left out{again}", soft_wrap=True)
    console.print(table)


def _lengths_view(name: str, lengths: np.ndarray, unit: str) -> RenderableType:
    """Show quantiles, and a histogram with equal steps."""
    at = {"shortest": 0, "median": 50, "90 %": 90, "99 %": 99, "longest": 100}
    quantiles = " · ".join(f"{q} {int(np.percentile(lengths, p, method='lower')):,}" for q, p in at.items())
    counts, edges = np.histogram(lengths, bins=min(BARS, max(1, len(np.unique(lengths)))))
    bars = [(f"{int(np.ceil(a)):,} …", int(n)) for a, n in zip(edges, counts, strict=False)]
    return Group(Text(f"{name}, {unit}: {quantiles}"), _bars("", bars))


def _difficulties(found: Counter[int]) -> list[tuple[str, int]]:
    """Return counts by difficulty; if there are many, in equal steps."""
    if len(found) <= BARS + 2:
        return [(str(value), found[value]) for value in sorted(found)]
    counts, edges = np.histogram(list(found), bins=BARS, weights=list(found.values()))
    return [(f"{int(np.ceil(a)):,} …", int(n)) for a, n in zip(edges, counts, strict=False)]


def _bars(name: str, counted: list[tuple[str, int]]) -> RenderableType:
    most = max(count for _, count in counted)
    total = sum(count for _, count in counted)
    table = Table(box=None, show_header=False, padding=(0, 1), title=name or None, title_justify="left", title_style="")
    table.add_column(justify="right", no_wrap=True)
    for label, count in counted:
        bar = "█" * max(round(BAR * count / most), count > 0)
        table.add_row(label, Text(bar, style="blue"), f"{count:,}", Text(f"{count / total:.1%}", style="dim"))
    return table


def _sample(row: Row, render: Callable[[str], str]) -> RenderableType:
    text = Text(_shortened(render(row.prompt), SHOWN_TEXT))
    text.append(f"\n→ {_shortened(row.answer, SHOWN_TEXT)}", style="green")
    return Panel(text, title=Text(f"{row.id} · difficulty {row.difficulty}"), title_align="left", border_style="dim")


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more)"
