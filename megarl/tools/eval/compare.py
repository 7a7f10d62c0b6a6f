"""`megarl answers compare OUT_A OUT_B`: how much better B is than A on the prompts of
both, with a page that shows why.

OUT_A/SUITE, OUT_B/SUITE ─[read_side]─► answers by prompt
                         ─[compare]───► SideBySide ─► table on the screen, page

The prompts are the random sample, and a prompt that is hard for one model is often hard
for the other. So the uncertainty comes from how the difference varies between prompts,
and is smaller than the two scores' own intervals suggest.

The page is one HTML file that opens offline (comparison.html), to read failures side by
side. 500 prompts with twice 16 answers of 8,000 tokens are half a gigabyte of text. So
if all completions together exceed a limit, the page has only the beginning and end of
long ones. Each prompt's data are a script of their own, which is parsed when the prompt
is opened.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from msgspec import UNSET
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.evaluation.answers import Answer, Result, SuiteDir, suites_in
from megarl.core.evaluation.metrics import Choice, Estimate, Outcome, choices, over_prompts, student
from megarl.core.recipe import flat
from megarl.core.telemetry import pictures

METHOD = (
    "Intervals are of 95 %, over prompts. The difference is paired, prompt by prompt: Student's t,"
    " with Bonett and Price's two added prompts."
)
TEMPLATE = Path(__file__).with_name("comparison.html")
LARGEST = 64_000_000
"""Most characters of all completions in a page."""
SHORTEST = 1000
"""Characters that a completion keeps at least, however many completions there are."""
LONGEST_ASKED = 20_000
"""Characters shown of a prompt or an expected answer; tests of a program can be
megabytes.
"""
LINE = 160
"""Characters of a prompt in the list."""
EXAMPLES = 5
"""Prompts shown on the screen."""
SHOWN = 120
"""Characters of a prompt or an answer on the screen."""
ONE_SIDED = {"prompts", "suite.data", "suite.heldout", "suite.prompt", "suite.trusted_grader"}
"""Settings that only a suite has, or only a task of a run: that one side lacks them is
no difference.
"""


class Side(NamedTuple):
    """One model's answers, indexed by prompt and then by sample. result: None if the
    evaluation has not ended.
    """

    name: str
    folder: Path
    answers: Mapping[str, Sequence[Answer]]
    result: Result | None

    def firsts(self, prompts: Sequence[str]) -> list[Answer]:
        """Return the first answer to each prompt."""
        return [self.answers[name][0] for name in prompts]

    def counts(self, prompts: Sequence[str]) -> list[int]:
        """Return how many answers each prompt has."""
        return [len(self.answers[name]) for name in prompts]


class Quantity(NamedTuple):
    """A quantity over the common prompts. share: it is one, from 0 to 1; if not, only
    the difference has an interval.
    """

    name: str
    a: Estimate
    b: Estimate
    difference: Estimate
    share: bool


class SideBySide(NamedTuple):
    """A comparison of two sides. prompts: ids, in order. notes: caveats that a reader
    must know before trusting the table.
    """

    suite: str
    a: Side
    b: Side
    prompts: Sequence[str]
    quantities: Sequence[Quantity]
    notes: Sequence[str]


def main(folder_a: Path, folder_b: Path, suite: str | None, page: Path | None) -> int:
    """Print a table and write a page for each suite to which both have answers; return
    0. page: the page's path.
    """
    suites = common_suites(folder_a, folder_b, suite)
    if page is not None and len(suites) > 1:
        raise MegarlError(
            f"-o: {page} is one page, both have answers to {', '.join(suites)}; choose one with"
            " --suite"
        )
    if page is not None and not page.parent.is_dir():
        raise MegarlError(f"-o: {page.parent}: no such directory")
    console = terminal.console()
    for name in suites:
        comparison = compare(name, read_side(folder_a, name), read_side(folder_b, name))
        target = page or folder_b / f"compare-{name}.html"
        limit = write_comparison(comparison, target)
        show(comparison, console)
        about = f"{target.stat().st_size / 1e6:.2g} MB"
        if limit is not None:
            about += f", completions cut to {limit:,} characters"
        console.print(f"{target} ({about})\n", highlight=False, soft_wrap=True)
    return 0


def common_suites(folder_a: Path, folder_b: Path, suite: str | None) -> list[str]:
    """Return the suites to which both have answers, or the one asked for; MegarlError
    if there is none.
    """
    a_has = _suites(folder_a, suite)
    b_has = _suites(folder_b, suite)
    both = [name for name in a_has if name in b_has and suite in (None, name)]
    if not both:
        only = f"{folder_a} has answers to {', '.join(a_has)}, {folder_b} to {', '.join(b_has)}"
        raise MegarlError(f"{only}: nothing to compare")
    return both


def _suites(folder: Path, suite: str | None) -> list[str]:
    """Return the suites with answers. MegarlError if there are none or, unless it is
    None, if `suite` is not among them.
    """
    names = suites_in(folder)
    is_there = bool(names) if suite is None else suite in names
    if is_there:
        return names
    to_suite = f"to {suite} " if suite else ""
    contents = "is neither OUT of `megarl eval` nor RUN/evaluations/step-N"
    if names:
        contents = f"has {', '.join(names)}"
    raise MegarlError(f"{folder}: no answers {to_suite}in it; it {contents}")


def read_side(folder: Path, suite: str) -> Side:
    """Read a model's answers to a suite, and its result if the evaluation has ended."""
    place = SuiteDir(folder, suite)
    result = None
    name = folder.name
    if place.result.exists():
        result = place.read_result()
        name = result.model
    answers: dict[str, list[Answer]] = {}
    for answer in place.read_answers():
        answers.setdefault(answer.id, []).append(answer)
    return Side(name, folder, answers, result)


def compare(suite: str, a: Side, b: Side) -> SideBySide:
    """Compare two sides on their common prompts. MegarlError if there are none, or if
    their expected answers differ.
    """
    if a.name == b.name:
        a = a._replace(name=str(a.folder))
        b = b._replace(name=str(b.folder))
    prompts = sorted(a.answers.keys() & b.answers.keys(), key=_by_numbers)
    if not prompts:
        raise MegarlError(
            f"{a.folder} and {b.folder} have no prompt of {suite} in common: their sets are"
            " different"
        )
    _check_expected(suite, a, b, prompts)
    caveats = list(notes(a, b, prompts))
    return SideBySide(suite, a, b, prompts, quantities(a, b, prompts), caveats)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts test/2 before test/10: the name's parts, each with
    its value as a number, 0 for other text.
    """
    key = []
    for part in re.split(r"(\d+)", name):
        number = int(part) if part.isdecimal() else 0
        key.append((number, part))
    return key


def _check_expected(suite: str, a: Side, b: Side, prompts: Sequence[str]) -> None:
    """Raise MegarlError if both sides do not expect the same answer to each prompt."""
    pairs = zip(a.firsts(prompts), b.firsts(prompts), strict=True)
    mismatches = [(of_a, of_b) for of_a, of_b in pairs if of_a.expected != of_b.expected]
    if not mismatches:
        return
    of_a, of_b = mismatches[0]
    raise MegarlError(
        f"{a.folder} and {b.folder}: {len(mismatches)} prompts of {suite} expect another answer:"
        f" {of_a.id!r} expects {of_a.expected[:60]!r} in one and {of_b.expected[:60]!r} in the"
        " other; the two sets differ"
    )


type Outcomes = Sequence[Sequence[Outcome]]
"""A side's outcomes, by prompt and then by sample."""


def quantities(a: Side, b: Side, prompts: Sequence[str]) -> list[Quantity]:
    """Return the quantities compared. The k in `mean@k` is the least number of answers
    that a prompt has on either side.
    """
    of_a = _outcomes(a, prompts)
    of_b = _outcomes(b, prompts)
    k = min(*map(len, of_a), *map(len, of_b))
    name = f"mean@{k}" if k > 1 else "right"
    rows = [_share(name, of_a, of_b, _share_right, 1 / k)]
    if k > 1:
        rows += _chosen(of_a, of_b, k)
    everything = [*chain.from_iterable(of_a), *chain.from_iterable(of_b)]
    if any(outcome.by_length is not None for outcome in everything):
        rows.append(_share("by length", of_a, of_b, _share_by_length, 1 / k))
    rows.append(_share("truncated", of_a, of_b, _share_truncated, 1 / k))
    rows.append(_tokens(of_a, of_b))
    return rows


def _outcomes(side: Side, prompts: Sequence[str]) -> Outcomes:
    """Return the outcomes of a side's answers to these prompts."""
    return [list(map(Outcome.of, side.answers[name])) for name in prompts]


def _share(
    name: str,
    a: Outcomes,
    b: Outcomes,
    value_of: Callable[[Sequence[Outcome]], float],
    step: float,
    k: int = 1,
) -> Quantity:
    """Compare a share. value_of: returns it for a prompt's answers; step: how much one
    answer changes it at most; k: how many answers decide it, as in pass@k.
    """
    values_a = [value_of(answers) for answers in a]
    values_b = [value_of(answers) for answers in b]
    score_a = over_prompts(values_a, sum(map(len, a)), k)
    score_b = over_prompts(values_b, sum(map(len, b)), k)
    difference = paired_difference(values_a, values_b, step)
    return Quantity(name, score_a, score_b, difference, share=True)


def _chosen(a: Outcomes, b: Outcomes, k: int) -> list[Quantity]:
    """Compare by each way to choose among k answers that both sides have: the choice by
    reward needs rewards, which one side may lack.
    """
    ways_a = choices(list(chain.from_iterable(a)))
    ways_b = choices(list(chain.from_iterable(b)))
    rows = []
    for name, choose in ways_a.items():
        if name in ways_b:
            value_of = partial(_value_of_choice, choose, k)
            rows.append(_share(f"{name}@{k}", a, b, value_of, 1.0, k))
    return rows


def _value_of_choice(choose: Choice, k: int, answers: Sequence[Outcome]) -> float:
    """Return the score of a prompt if one of k answers is chosen: for `partial`, which
    gives the first two arguments.
    """
    return choose(answers, k)


def _share_by_length(answers: Sequence[Outcome]) -> float:
    return fmean(bool(outcome.by_length) for outcome in answers)


def _share_right(answers: Sequence[Outcome]) -> float:
    return fmean(outcome.correct for outcome in answers)


def _share_truncated(answers: Sequence[Outcome]) -> float:
    return fmean(outcome.truncated for outcome in answers)


def _tokens(a: Outcomes, b: Outcomes) -> Quantity:
    """Compare the mean length of a prompt's answers. The sides' own means have no
    interval (NaN), only the difference has one.
    """
    values_a = _mean_tokens(a)
    values_b = _mean_tokens(b)
    mean_a = Estimate(fmean(values_a), math.nan, math.nan)
    mean_b = Estimate(fmean(values_b), math.nan, math.nan)
    difference = paired_difference(values_a, values_b, 0.0)
    return Quantity("tokens", mean_a, mean_b, difference, share=False)


def _mean_tokens(outcomes: Outcomes) -> list[float]:
    """Return the mean length of each prompt's answers."""
    means = []
    for answers in outcomes:
        means.append(fmean(outcome.tokens for outcome in answers))
    return means


def notes(a: Side, b: Side, prompts: Sequence[str]) -> Iterator[str]:
    """Yield what a reader must know before trusting the table."""
    for side in (a, b):
        yield from _notes_of_side(side, prompts)
    counts_a = a.counts(prompts)
    counts_b = b.counts(prompts)
    if len({*counts_a, *counts_b}) > 1:
        yield (f"Answers a prompt: {_range(counts_a)} of {a.name}, {_range(counts_b)} of {b.name}.")
    pairs = zip(a.firsts(prompts), b.firsts(prompts), strict=True)
    reworded = sum(of_a.prompt != of_b.prompt for of_a, of_b in pairs)
    if reworded:
        yield (
            f"Worded differently, or in another template, on the two sides: {reworded} of"
            f" {len(prompts)} prompts."
        )
    yield from _differing_settings(a, b)


def _differing_settings(a: Side, b: Side) -> Iterator[str]:
    """Yield each setting that is not the same on both sides, the model aside; none if
    the settings of one side are not known yet.
    """
    if a.result is None or b.result is None:
        return
    settings_a = flat({**a.result.settings, "model": None})
    settings_b = flat({**b.result.settings, "model": None})
    on_both_sides = settings_a.keys() & settings_b.keys()
    one_sided = ONE_SIDED - on_both_sides
    keys = settings_a.keys() | settings_b.keys()
    for key in sorted(keys - one_sided):
        of_a = settings_a.get(key)
        of_b = settings_b.get(key)
        if of_a != of_b:
            yield f"{key}: {of_a} of {a.name}, {of_b} of {b.name}."


def _notes_of_side(side: Side, prompts: Sequence[str]) -> Iterator[str]:
    """Yield what a reader must know of one side: prompts that only it has, an
    evaluation that still runs, void answers. prompts: those compared.
    """
    left_out = len(side.answers) - len(prompts)
    if left_out:
        noun = "prompt" if left_out == 1 else "prompts"
        yield f"Left out: {left_out} {noun} that only {side.name} has answers to."
    if side.result is None:
        yield f"{side.name}: the evaluation has not ended; these are its answers so far."
    answers = chain.from_iterable(side.answers[name] for name in prompts)
    void = sum(bool(answer.void) for answer in answers)
    if void:
        yield (
            f"{side.name}: void answers, which could not be generated or judged and count as"
            f" wrong: {void}."
        )


def _range(counts: Sequence[int]) -> str:
    """Return `4`, or `2 to 4`."""
    if min(counts) == max(counts):
        return str(counts[0])
    return f"{min(counts)} to {max(counts)}"


def show(comparison: SideBySide, console: Console) -> None:
    """Print the table, a few answers, and the notes."""
    a = comparison.a.name
    b = comparison.b.name
    console.print(
        f"{comparison.suite}: {len(comparison.prompts)} prompts. A is {a}, B is {b}.",
        highlight=False,
    )
    scores = [Column(heading, justify="right", no_wrap=True) for heading in ("A", "B", "B − A")]
    table = Table(Column("", no_wrap=True), *scores, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for quantity in comparison.quantities:
        table.add_row(quantity.name, *cells(quantity))
    console.print(table)
    console.print(_examples(comparison))
    for line in (*comparison.notes, METHOD):
        console.print(line, highlight=False)


class _Example(NamedTuple):
    """A prompt without its template, and the first answer of each side."""

    prompt: str
    a: Answer
    b: Answer


def _examples(comparison: SideBySide) -> Table:
    """Return the first answers of both sides to a few prompts: first of those where one
    is right and one is wrong.
    """
    answers_a = comparison.a.firsts(comparison.prompts)
    answers_b = comparison.b.firsts(comparison.prompts)
    texts = _without_template([answer.prompt for answer in answers_a])
    rows = list(map(_Example, texts, answers_a, answers_b))
    rows.sort(key=lambda row: row.a.correct == row.b.correct)
    columns = [Column(heading, ratio=1) for heading in ("prompt", "A answers", "B answers")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for row in rows[:EXAMPLES]:
        table.add_row(Text(_one_line(row.prompt)), _verdict(row.a), _verdict(row.b))
    return table


def _verdict(answer: Answer) -> Text:
    """Return `right: ` or `wrong: ` and the answer, on one line."""
    style = "green" if answer.correct else "red"
    mark = "right" if answer.correct else "wrong"
    return Text.assemble((f"{mark}: ", style), _one_line(answer.completion))


def _without_template(prompts: Sequence[str]) -> list[str]:
    """Return the prompts without what all begin with, in whole words, and without what
    all end with. If all are equal, nothing tells what the template is.
    """
    if len(set(prompts)) == 1:
        return list(prompts)
    common_start = prompts[0][: _equal_characters(prompts)]
    whole_words = common_start.rfind(" ") + 1  # characters of the start that are left out
    texts = [prompt[whole_words:] for prompt in prompts]
    reversed_texts = [text[::-1] for text in texts]
    common_end = _equal_characters(reversed_texts)
    return [text[: len(text) - common_end] for text in texts]


def _equal_characters(texts: Sequence[str]) -> int:
    """Return with how many equal characters all of these texts begin."""
    first = min(texts)
    last = max(texts)  # all others lie between these two
    for count, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return count
    return len(first)


def _one_line(text: str) -> str:
    """Return the text with spaces for line breaks; of a long one, its beginning and its
    end.
    """
    short = " ".join(text.split())
    if len(short) <= SHOWN:
        return short
    return f"{short[: SHOWN // 2]} … {short[-SHOWN // 2 :]}"


def cells(quantity: Quantity) -> tuple[str, str, str]:
    """Return the texts of A, B and B − A, with their intervals."""
    d = quantity.difference
    if quantity.share:
        difference = f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
        return _with_interval(quantity.a), _with_interval(quantity.b), difference
    difference = f"{d.mean:+,.0f} [{d.low:+,.0f}, {d.high:+,.0f}]"
    return f"{quantity.a.mean:,.0f}", f"{quantity.b.mean:,.0f}", difference


def _with_interval(score: Estimate) -> str:
    return f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]"


def paired_difference(a: Sequence[float], b: Sequence[float], step: float) -> Estimate:
    """Return the mean of b - a over prompts, with its 95 % interval. a, b: [prompts],
    the same prompts in the same order.

    step: how much one answer changes a prompt's value: 1/k for a share of k answers.
    The interval is Student's, for the differences plus two added prompts, one better
    and one worse by one step. With one answer per prompt these are the
    pseudo-observations of Bonett and Price (2012) for paired proportions; without them,
    the interval for a few prompts that mostly agree would be much too narrow, or empty.
    A step of 0, for values that vary freely, such as lengths, adds none.
    """
    differences = np.subtract(b, a)
    mean = float(differences.mean())
    samples = differences
    freedom_lost = 1
    bound = math.inf
    if step:
        samples = np.concatenate([differences, (step, -step)])
        freedom_lost = 0
        bound = 1.0  # two shares differ by 1 at most
    variance = math.inf  # as nothing tells it
    if len(samples) > 1:
        variance = float(samples.var(ddof=freedom_lost))
    error = math.sqrt(variance / len(samples))
    half = student(len(differences) - 1) * error
    centre = float(samples.mean())  # the added prompts draw it to 0
    low = max(-bound, min(mean, centre - half))
    high = min(bound, max(mean, centre + half))
    return Estimate(mean, low, high)


def write_comparison(comparison: SideBySide, target: Path) -> int | None:
    """Write the page; return how many characters of each completion it keeps, or None
    if it keeps all.
    """
    sizes = []
    for side in (comparison.a, comparison.b):
        for name in comparison.prompts:
            sizes += [len(answer.completion) for answer in side.answers[name]]
    longest = max(SHORTEST, LARGEST // len(sizes))
    limit = None
    if sum(sizes) > LARGEST and max(sizes) > longest:
        limit = longest
    script = Markup('<script type="application/json" class="prompt">{}</script>')
    prompts = Markup("\n").join(
        script.format(pictures.embedded(_prompt(comparison, name, limit)))
        for name in comparison.prompts
    )
    pictures.write_page(
        TEMPLATE,
        target,
        title=f"{comparison.suite}: {comparison.a.name} and {comparison.b.name}",
        data=pictures.embedded(_overview(comparison, limit)),
        prompts=prompts,
    )
    return limit


def _overview(comparison: SideBySide, limit: int | None) -> dict[str, object]:
    """Return the page's data except for the prompts' texts and answers. limit: the
    characters that completions keep, None if they keep all.
    """
    lines = list(comparison.notes)
    sides = (comparison.a, comparison.b)
    if max(max(side.counts(comparison.prompts)) for side in sides) > 1:
        lines.append("In the list a side is right where at least half of its answers are.")
    if limit is not None:
        long = f"Completions of more than {limit:,} characters"
        lines.append(f"{long} show only their beginning and end; answers.jsonl has all.")
    return {
        "suite": comparison.suite,
        "a": {"name": comparison.a.name, "folder": str(comparison.a.folder)},
        "b": {"name": comparison.b.name, "folder": str(comparison.b.folder)},
        "table": [[quantity.name, *cells(quantity)] for quantity in comparison.quantities],
        "notes": [*lines, METHOD],
        "prompts": _lines(comparison),
    }


def _lines(comparison: SideBySide) -> list[list[str | int]]:
    """Return the page's list of prompts, each as [id, start of text, A right, A
    answers, B right, B answers, truncated in both]. The words with which all texts
    begin, which belong to a template, are left out.
    """
    texts = [answer.prompt.split() for answer in comparison.a.firsts(comparison.prompts)]
    start = 0  # number of the first word that is not the same in all texts
    for index, words_of_all in enumerate(zip(*texts, strict=False)):
        if len(set(words_of_all)) > 1:
            start = index
            break
    lines: list[list[str | int]] = []
    for name, words in zip(comparison.prompts, texts, strict=True):
        a = comparison.a.answers[name]
        b = comparison.b.answers[name]
        text = " ".join(words[start:])[:LINE]
        right_a = sum(answer.correct for answer in a)
        right_b = sum(answer.correct for answer in b)
        truncated = sum(answer.truncated for answer in (*a, *b))
        lines.append([name, text, right_a, len(a), right_b, len(b), truncated])
    return lines


def _prompt(comparison: SideBySide, name: str, limit: int | None) -> dict[str, object]:
    """Return a prompt with the answers of both sides, for the page. limit: most
    characters of a completion; None: all.
    """
    a = comparison.a.answers[name]
    b = comparison.b.answers[name]
    wordings = (a[0].prompt, b[0].prompt)
    return {
        "prompts": [shortened(wording, LONGEST_ASKED) for wording in wordings],
        "expected": shortened(a[0].expected, LONGEST_ASKED),
        "a": [_answer(answer, limit) for answer in a],
        "b": [_answer(answer, limit) for answer in b],
    }


def _answer(answer: Answer, limit: int | None) -> dict[str, object]:
    """Return an answer for the page. limit: as in `_prompt`."""
    marks = {  # what is unusual about an answer: whether it is so of this one
        "truncated": answer.truncated,
        "interrupted": answer.interrupted,
        "no answer found": not answer.format_ok and not answer.void,
        "grader timed out": answer.grader_timeout,
        "grader failed": answer.grader_error,
        f"void: {answer.void}": answer.void,
    }
    result: dict[str, object] = {
        "text": shortened(answer.completion, limit),
        "answer": shortened(answer.answer, limit),
        "right": answer.correct,
        "tokens": answer.tokens,
        "marks": [text for text, holds in marks.items() if holds],
    }
    if answer.choices is not UNSET:
        scored = ("choices", "loglikelihoods", "chosen", "chosen_normalised")
        result |= {key: getattr(answer, key) for key in scored} | {
            "right_normalised": answer.by_length
        }
    return result


def shortened(text: str, limit: int | None) -> list[str | int]:
    """Return [text] or, above the limit, [start, characters left out, end]; the end is
    longer, since the answer is there.
    """
    if limit is None or len(text) <= limit:
        return [text]
    start = limit // 4
    end = limit - start
    left_out = len(text) - limit
    return [text[:start], left_out, text[-end:]]
