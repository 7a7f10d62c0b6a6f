"""`megarl data inspect`: lengths, difficulties, answer types and samples of a source,
or of a recipe's tasks and traces.

    inspect ─► survey of a source ─[look]─► PromptStatistics, 16 bytes per row and a few
    samples ─► show
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from typing import cast, get_args

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError, printable
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.recipe import ColumnName, Recipe, load
from megarl.tasks.data.contamination import overlap_with
from megarl.tasks.data.golds import Accepted, described, is_plain, unreadable
from megarl.tasks.data.mappings import MAPPINGS, mapping_of
from megarl.tasks.data.prompts import Render, in_parts, renderer, rows_with_tokens
from megarl.tasks.data.rows import PromptRow, digest
from megarl.tasks.data.sources import is_source, problem
from megarl.tasks.data.survey import Reader, Survey, chosen, survey
from megarl.tasks.data.traces import (
    MAX_TOKENS,
    are_traces,
    each_trace,
    read_untemplated,
    templated,
)

MOST_TOKENS = 1 << 17
"""Texts that must be longer are not encoded; the least number of their tokens is shown.
"""
BARS = 8
BAR = 32  # most bars of a histogram, and characters of the longest
# characters shown of a sample's prompt and of its answer; the number of the others is
# shown
SHOWN_TEXT = 400

ANSWERS: tuple[tuple[str, str], ...] = (
    ("whole number", r"[-+]?\d+"),
    ("decimal", r"[-+]?\d*[.,]\d+"),
    ("fraction", r"[-+]?(\d+\s*/\s*\d+|\\d?frac\s*\{?\s*-?\d+\s*\}?\s*\{?\s*\d+\s*\}?)"),
    ("choice", r"\(?[A-J]\)?|\\text\{\(?[A-J]\)?\}"),
    ("list or interval", r"[\[({\\].*,.*[\])}]|[^\\{]+(,[^,]+)+"),
    ("expression", r".*[\\^_=+*/{}].*"),
    ("word", r"[^\W\d]+"),
)
"""Kinds of answers, each with a pattern for the whole text; the first that matches is
the answer's kind.
"""
SEVERAL = "several accepted"
JSON_LIST = "JSON text of a list"
ONE_ANSWER = (
    f"{JSON_LIST}: each is one answer, as of several parts; if any of its items is right, "
    "use mapping: verl, or write the list itself"
)


def kind_of_answer(text: str) -> str:
    """Return one of the kinds in `ANSWERS`, `unit tests` for tests of code,
    `reasoning-gym problem`, JSON_LIST, or `text` for anything else.
    """
    plain = text.strip().strip("$").strip()
    with suppress(ValueError):  # it is no JSON
        if plain.startswith("{") and "tests" in json.loads(plain):
            return "unit tests"
        if plain.startswith("{") and "family" in json.loads(plain):
            return "reasoning-gym problem"
    with suppress(ValueError):  # it is no JSON
        if plain.startswith('["') and isinstance(json.loads(plain), list):
            return JSON_LIST
    return next((name for name, form in ANSWERS if re.fullmatch(form, plain, re.DOTALL)), "text")


@dataclass
class PromptStatistics:
    """Statistics of a prompt set.

    samples: number of rows to show; sampled: these rows, each after its hash and its
    number, which order them. prompt_lengths, answer_lengths: in tokens or characters.
    prompts_by_formulas: how many prompts have these accepted answers, of which none is
    plainly a number.
    """

    samples: int
    prompt_lengths: array[int] = field(default_factory=lambda: array("L"))
    answer_lengths: array[int] = field(default_factory=lambda: array("L"))
    difficulties: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    sampled: list[tuple[int, int, PromptRow]] = field(default_factory=list)
    prompts_by_formulas: Counter[Accepted] = field(default_factory=Counter)

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return len(self.prompt_lengths)

    def add(self, row: PromptRow, prompt_length: int, answer_length: int) -> None:
        """Add a row with the lengths of its prompt and its answer."""
        self.prompt_lengths.append(prompt_length)
        self.answer_lengths.append(answer_length)
        self.difficulties[row.difficulty] += 1
        kind = SEVERAL if row.alternatives else kind_of_answer(row.answer)
        self.kinds[kind] += 1
        # Such as unit tests, which no grader reads as mathematics.
        is_record = row.answer.startswith('{"')
        if not is_record and not is_plain(row.answers):
            self.prompts_by_formulas[row.answers] += 1
        # The smallest hashes give the same sample each time.
        entry = (digest(f"sample/{row.id}"), self.prompts, row)
        self.sampled = nsmallest(self.samples, [*self.sampled, entry])


def inspect(
    source: str,
    overrides: Sequence[str],
    columns: Sequence[str],
    mapping: str,
    tokenizer: Path | None,
    samples: int,
) -> int:
    """Print what a source or a recipe holds; return 0. overrides: of a recipe; columns,
    mapping: how a source is read, as in `reader`; tokenizer: a model directory, None to
    count characters; samples: rows shown of each set.
    """
    console = terminal.console()
    if not is_source(source):
        if mapping or columns:
            raise MegarlError(
                "--mapping, --column: not with a recipe, whose tasks have them"
                " (data.tasks.NAME.mapping, .columns)"
            )
        _inspect_recipe(load(source, overrides), tokenizer, samples, console)
        return 0
    counter = load_tokenizer(tokenizer) if tokenizer else None
    if not mapping and not columns and are_traces(source):
        _inspect_traces(source, counter, samples, [], console)
        return 0
    surveyed = survey(source, reader(mapping, columns))
    statistics, _ = look(surveyed, transcript, counter, samples, console)
    unit = "tokens" if counter else "characters"
    show(source, statistics, console, unit, None, transcript)
    return 0


def transcript(row: PromptRow) -> str:
    """Show a prompt without a template."""
    return row.transcript


def prompt_text(row: PromptRow) -> str:
    """Show what precedes a trace's completion."""
    return row.prompt


def reader(mapping: str, columns: Sequence[str]) -> Reader:
    """Return a function that reads rows of this published set, or with these columns,
    each FIELD=COLUMN; without either, megarl's own rows. MegarlError if there is no
    such set or field.
    """
    if mapping and mapping not in MAPPINGS:
        raise MegarlError(f"--mapping: {mapping!r} is not one of {', '.join(MAPPINGS)}")
    paths = dict(column.partition("=")[::2] for column in columns)
    for name, path in paths.items():
        if name not in get_args(ColumnName) or not path:
            raise MegarlError(
                f"--column: write FIELD=COLUMN, with a field of {', '.join(get_args(ColumnName))}"
            )
    return mapping_of(mapping, cast(dict[ColumnName, str], paths))


def _inspect_recipe(recipe: Recipe, model: Path | None, samples: int, console: Console) -> None:
    """Print each task as a run of the recipe would use it: in its template, without
    prompts of evaluation sets. model: whose tokenizer to use; None: the recipe's.
    """
    tokenizer = load_tokenizer(model or recipe.model.path)
    evaluation = overlap_with(recipe.data.decontaminate)
    for name, task in recipe.data.tasks.items():
        read = mapping_of(task.mapping, task.columns)
        render = renderer(task, tokenizer)
        rows_held_out = task.heldout if isinstance(task.heldout, int) else 0
        surveyed = survey(task.train, read, rows_held_out, evaluation)
        train, heldout = look(surveyed, render, tokenizer, samples, console)
        if isinstance(task.heldout, str):  # a set of its own
            heldout, _ = look(survey(task.heldout, read), render, tokenizer, samples, console)
        limit = recipe.length.prompt_tokens
        for part, statistics in (("train", train), ("heldout", heldout)):
            title = f"{name}.{part}"
            show(title, statistics, console, "tokens", limit, render, task.grader)
    if recipe.sft.data and problem(recipe.sft.data) is None:
        _inspect_traces(recipe.sft.data, tokenizer, samples, recipe.data.decontaminate, console)


def _inspect_traces(
    source: str,
    tokenizer: Tokenizer | None,
    samples: int,
    decontaminate: Sequence[str],
    console: Console,
) -> None:
    """Print traces as `megarl sft` would use them."""
    surveyed = survey(
        source, read_untemplated, evaluation=overlap_with(decontaminate), repeats=True
    )
    if tokenizer is not None:
        surveyed = templated(surveyed, tokenizer)
    statistics, _ = look(surveyed, None, tokenizer, samples, console)
    unit = "tokens" if tokenizer else "characters"
    show(source, statistics, console, unit, MAX_TOKENS, None)


def look(
    surveyed: Survey,
    render: Render | None,
    tokenizer: Tokenizer | None,
    samples: int,
    console: Console,
) -> tuple[PromptStatistics, PromptStatistics]:
    """Print which rows are left out; return statistics of the training rows and the
    held-out ones. render: shows a row's prompt as it is counted, None for traces;
    tokenizer: None to count characters.
    """
    counts = surveyed.left_out.counts
    left_out = f"{counts.total():,}" if counts else "none"
    text = f"{surveyed.source}: {len(surveyed.is_kept):,} rows, {left_out} left out"
    if surveyed.repeats:
        text += f"; {surveyed.repeats:,} repeat an earlier one"
    console.print(text, markup=False, soft_wrap=True)
    if counts:
        columns = (
            Column("left out", no_wrap=True),
            Column("rows", justify="right", no_wrap=True),
            Column("first"),
        )
        table = Table(*columns, box=None, padding=(0, 2), pad_edge=False)
        for reason, count in counts.most_common():
            number, detail = surveyed.left_out.first[reason][0]
            first = Text(_shortened(f"{number}: {detail}", 100))
            table.add_row(Text(reason), f"{count:,}", first)
        console.print(table)
    return _statistics(surveyed, render, tokenizer, samples)


def _statistics(
    surveyed: Survey, render: Render | None, tokenizer: Tokenizer | None, samples: int
) -> tuple[PromptStatistics, PromptStatistics]:
    """Return statistics of the training rows and the held-out ones, as `look` does."""
    # By whether rows are held out: those of False, those of True.
    parts = PromptStatistics(samples), PromptStatistics(samples)
    if tokenizer is None:
        for row, is_held_out in chosen(surveyed):
            text = prompt_text(row) if render is None else render(row)
            parts[is_held_out].add(row, len(text), len(row.answer))
    elif render is None:  # of a trace the answer is counted in tokens, too
        for batch in in_parts(each_trace(chosen(surveyed)), _characters):
            prompt_lengths = token_counts([row.prompt for row, _ in batch], tokenizer)
            answer_lengths = token_counts([row.answer for row, _ in batch], tokenizer)
            for n, (row, is_held_out) in enumerate(batch):
                parts[is_held_out].add(row, prompt_lengths[n], answer_lengths[n])
    else:
        for encoded in rows_with_tokens(surveyed, render, tokenizer, MOST_TOKENS):
            row = encoded.row
            parts[encoded.is_held_out].add(row, encoded.length, len(row.answer))
    return parts


def _characters(chosen_row: tuple[PromptRow, bool]) -> int:
    """Return the length of a row of `chosen`, for `in_parts`."""
    row, _ = chosen_row
    return len(row.prompt) + len(row.answer)


def token_counts(texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the numbers of tokens of texts. A text that must have more than
    MOST_TOKENS is not encoded; its number is the least that it can have.
    """
    too_long = [tokenizer.least_tokens(len(text)) > MOST_TOKENS for text in texts]
    short = [text for text, skipped in zip(texts, too_long, strict=True) if not skipped]
    encoded = iter(tokenizer.encode_all(short))
    counts = []
    for text, skipped in zip(texts, too_long, strict=True):
        if skipped:
            counts.append(tokenizer.least_tokens(len(text)))
        else:
            counts.append(len(next(encoded)))
    return counts


def _about_unread(statistics: PromptStatistics, unread: Collection[Accepted]) -> str:
    """Return a sentence on the prompts whose accepted answers are in `unread`: the
    grader can read none of these.
    """
    by_formulas = statistics.prompts_by_formulas
    prompts = sum(by_formulas[accepted] for accepted in unread)
    examples = (" or ".join(accepted) for accepted in by_formulas if accepted in unread)
    return (
        f"{described(prompts, statistics.prompts, examples)}: only the same text is right"
        " (data.unreadable)"
    )


def show(
    name: str,
    statistics: PromptStatistics,
    console: Console,
    unit: str,
    limit: int | None,
    render: Render | None,
    grader: str = "math",
) -> None:
    """Print one prompt set, or traces if render is None. unit: tokens or characters;
    limit: the most tokens in a prompt or trace that is used, None if there is no limit;
    grader: that of the task, which decides what is said of answers.
    """
    if not statistics.prompts:
        console.print(Text.assemble((name, "bold"), ": no rows"))
        return
    prompt_lengths = np.array(statistics.prompt_lengths)
    answer_lengths = np.array(statistics.answer_lengths)
    parts = [_lengths_view("prompts", prompt_lengths, unit)]
    if render:
        rows_name = "rows"
        limit_name = f"length.prompt_tokens={limit}"
        tokens = prompt_lengths
        parts += _answer_views(statistics, grader)
    else:
        rows_name = "traces"
        limit_name = f"{limit} tokens"
        tokens = prompt_lengths + answer_lengths + 1  # with the end token
        parts.append(_lengths_view("completions", answer_lengths, unit))
    if limit is not None and unit == "tokens":
        too_long = int((tokens > limit).sum())
        style = "yellow" if too_long else "dim"
        parts.append(Text(f"{too_long:,} longer than {limit_name}: left out", style=style))
    _print_framed(f"{statistics.prompts:,} {rows_name} · {name}", Group(*parts), console)
    for _, _, row in statistics.sampled:
        text = Text(_shortened((render or prompt_text)(row), SHOWN_TEXT))
        text.append(f"\n→ {_shortened(' or '.join(row.answers), SHOWN_TEXT)}", style="green")
        title = f"{printable(row.id)} · difficulty {row.difficulty}" if render else ""
        _print_framed(title, text, console)


def _answer_views(statistics: PromptStatistics, grader: str) -> list[RenderableType]:
    """Return views of answers and difficulties: lengths in characters, types, answers
    that may not mean what the user thinks, and difficulties.
    """
    parts = [
        _lengths_view("answers", np.array(statistics.answer_lengths), "characters"),
        _bars("answer types", statistics.kinds.most_common()),
    ]
    if in_json := statistics.kinds[JSON_LIST]:
        parts.append(Text(f"{in_json:,} answers are {ONE_ANSWER}", style="yellow"))
    if grader == "math" and (unread := unreadable(statistics.prompts_by_formulas)):
        parts.append(Text(_about_unread(statistics, unread), style="yellow"))
    counts = statistics.difficulties
    difficulties = [(str(value), count) for value, count in sorted(counts.items())]
    if len(counts) > BARS + 2:  # a few bars more are still better than steps
        difficulties = _in_steps(counts, BARS)
    parts.append(_bars("difficulty", difficulties))
    return parts


def _print_framed(title: str, content: RenderableType, console: Console) -> None:
    console.print(Panel(content, title=Text(title), title_align="left", border_style="dim"))


def _lengths_view(name: str, lengths: np.ndarray, unit: str) -> RenderableType:
    """Return quantiles and a histogram of lengths."""
    percentiles = {"shortest": 0, "median": 50, "90 %": 90, "99 %": 99, "longest": 100}
    texts = []
    for label, percent in percentiles.items():
        value = int(np.percentile(lengths, percent, method="lower"))
        texts.append(f"{label} {value:,}")
    different = max(1, len(np.unique(lengths)))  # no more bars than lengths
    bars = _in_steps(Counter(lengths.tolist()), min(BARS, different))
    return Group(Text(f"{name}, {unit}: {' · '.join(texts)}"), _bars("", bars))


def _in_steps(counted: Mapping[int, int], bars: int) -> list[tuple[str, int]]:
    """Return a histogram with `bars` equal steps: the smallest whole number in each
    step, as a label, and its count. counted: how often each number occurs.
    """
    counts, edges = np.histogram(list(counted), bins=bars, weights=list(counted.values()))
    labelled = []
    for start, count in zip(edges[:-1], counts, strict=True):
        labelled.append((f"{int(np.ceil(start)):,} …", int(count)))
    return labelled


def _bars(name: str, counted: list[tuple[str, int]]) -> RenderableType:
    """Return a histogram with a bar for each label and count. name: "" for none."""
    counts = [count for _, count in counted]
    highest = max(counts)
    total = sum(counts)
    table = Table(
        box=None,
        show_header=False,
        padding=(0, 1),
        title=name or None,
        title_justify="left",
        title_style="",
    )
    table.add_column(justify="right", no_wrap=True)
    for label, count in counted:
        width = round(BAR * count / highest)
        if count > 0:  # something to see, however few there are
            width = max(width, 1)
        bar = Text("█" * width, style="blue")
        share = Text(f"{count / total:.1%}", style="dim")
        table.add_row(label, bar, f"{count:,}", share)
    return table


def _shortened(text: str, limit: int) -> str:
    """Return a text for the terminal; of one with more than `limit` characters, its
    beginning and the number of the others.
    """
    if len(text) > limit:
        text = f"{text[:limit]} … ({len(text) - limit:,} characters more)"
    return printable(text)
