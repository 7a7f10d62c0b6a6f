"""`megarl answers compare OUT_A OUT_B`: how much better B is than A on the prompts of
both, with a page that shows why.

OUT_A/SUITE, OUT_B/SUITE ─[read_side]─► answers by prompt ─[compare]─► SideBySide ─► table on the screen, page

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
from megarl.core.evaluation.metrics import Estimate, Outcome, choices, over_prompts, student
from megarl.core.recipe import flat
from megarl.lab import pictures

METHOD = (
    "Intervals are of 95 %, over prompts. The difference is paired, prompt by prompt: Student's t,"
    " with Bonett and Price's two added prompts."
)
TEMPLATE = Path(__file__).with_name("comparison.html")
LARGEST = 64_000_000  # characters of all completions in a page
SHORTEST = 1000  # characters that a completion keeps at least, however many completions there are
# characters shown of a prompt or an expected answer; tests of a program can be
# megabytes
LONGEST_ASKED = 20_000
LINE = 160  # characters of a prompt in the list
EXAMPLES = 5  # prompts shown on the screen
SHOWN = 120  # characters of a prompt or an answer on the screen
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


def main(out_a: Path, out_b: Path, suite: str | None, page: Path | None) -> int:
    """Print a table and write a page for each suite to which both have answers; return
    0. page: the page's path.
    """
    suites = common_suites(out_a, out_b, suite)
    if page is not None and len(suites) > 1:
        raise MegarlError(
            f"-o: {page} is one page, both have answers to {', '.join(suites)}; choose one with"
            " --suite"
        )
    if page is not None and not page.parent.is_dir():
        raise MegarlError(f"-o: {page.parent}: no such directory")
    console = terminal.console()
    for name in suites:
        comparison = compare(name, *(read_side(out, name) for out in (out_a, out_b)))
        target = page or out_b / f"compare-{name}.html"
        kept = write_comparison(comparison, target)
        show(comparison, console)
        size = f"{target.stat().st_size / 1e6:.2g} MB"
        cut = "" if kept is None else f", completions cut to {kept:,} characters"
        console.print(f"{target} ({size}{cut})\n", highlight=False, soft_wrap=True)
    return 0


def common_suites(out_a: Path, out_b: Path, suite: str | None) -> list[str]:
    """Return the suites to which both have answers, or the one asked for; MegarlError
    if there is none.
    """
    a_has = suites_in(out_a)
    b_has = suites_in(out_b)
    for out, names in ((out_a, a_has), (out_b, b_has)):
        if suite not in names if suite else not names:
            wanted = f"to {suite} " if suite else ""
            other = "is neither OUT of `megarl eval` nor RUN/evaluations/step-N"
            has = f"has {', '.join(names)}" if names else other
            raise MegarlError(f"{out}: no answers {wanted}in it; it {has}")
    if not (both := [name for name in a_has if name in b_has and suite in (None, name)]):
        only = f"{out_a} has answers to {', '.join(a_has)}, {out_b} to {', '.join(b_has)}"
        raise MegarlError(f"{only}: nothing to compare")
    return both


def read_side(out: Path, suite: str) -> Side:
    folder = SuiteDir(out, suite)
    result = folder.read_result() if folder.result.exists() else None
    answers: dict[str, list[Answer]] = {}
    for answer in folder.read_answers():
        answers.setdefault(answer.id, []).append(answer)
    return Side(result.model if result else out.name, out, answers, result)


def compare(suite: str, a: Side, b: Side) -> SideBySide:
    """Compare two sides on their common prompts. MegarlError if there are none, or if
    their expected answers differ.
    """
    if a.name == b.name:
        a, b = (side._replace(name=str(side.folder)) for side in (a, b))
    both = sorted(
        a.answers.keys() & b.answers.keys(),  # by their numbers, test/2 before test/10
        key=lambda name: [
            (int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)
        ],
    )
    if not both:
        raise MegarlError(
            f"{a.folder} and {b.folder} have no prompt of {suite} in common: their sets are"
            " different"
        )
    if other := [
        name for name in both if a.answers[name][0].expected != b.answers[name][0].expected
    ]:
        first, second = (side.answers[other[0]][0].expected[:60] for side in (a, b))
        another = (
            f"{len(other)} prompts of {suite} expect another answer: {other[0]!r} expects {first!r}"
            " in one"
        )
        also = f"{second!r} in the other; the two sets differ"
        raise MegarlError(f"{a.folder} and {b.folder}: {another} and {also}")
    return SideBySide(suite, a, b, both, quantities(a, b, both), list(notes(a, b, both)))


def quantities(a: Side, b: Side, prompts: Sequence[str]) -> list[Quantity]:
    """Return the quantities compared. The k in `mean@k` is the number of answers that
    every prompt has on both sides.
    """
    ours, theirs = (
        [[Outcome.of(answer) for answer in side.answers[name]] for name in prompts]
        for side in (a, b)
    )
    every = list(chain.from_iterable(ours + theirs))
    k = min(map(len, ours + theirs))

    def share(name: str, value_of: Callable[[Sequence[Outcome]], float], of: int = 1) -> Quantity:
        x = [value_of(each) for each in ours]
        y = [value_of(each) for each in theirs]
        a_score = over_prompts(x, sum(map(len, ours)), of)
        b_score = over_prompts(y, sum(map(len, theirs)), of)
        return Quantity(name, a_score, b_score, paired_difference(x, y, of / k), share=True)

    rows = [
        share(f"mean@{k}" if k > 1 else "right", lambda answers: fmean(o.correct for o in answers))
    ]
    # Rewards may be on one side only.
    ways = [choices(list(chain.from_iterable(side))) for side in (ours, theirs)]
    for name, chosen in ways[0].items():
        if name in ways[1] and k > 1:
            rows.append(share(f"{name}@{k}", lambda answers, of=chosen: of(answers, k), k))  # type: ignore[misc]
    if any(o.by_length is not None for o in every):
        rows.append(share("by length", lambda answers: fmean(bool(o.by_length) for o in answers)))
    rows.append(share("truncated", lambda answers: fmean(o.truncated for o in answers)))
    x, y = ([fmean(o.tokens for o in answers) for answers in side] for side in (ours, theirs))
    a_mean, b_mean = (Estimate(fmean(side), math.nan, math.nan) for side in (x, y))
    return [*rows, Quantity("tokens", a_mean, b_mean, paired_difference(x, y, 0.0), share=False)]


def notes(a: Side, b: Side, prompts: Sequence[str]) -> Iterator[str]:
    for side in (a, b):
        if alone := len(side.answers) - len(prompts):
            yield (
                f"Left out: {alone} prompt{'s' * (alone > 1)} that only {side.name} has answers to."
            )
        if side.result is None:
            yield f"{side.name}: the evaluation has not ended; these are its answers so far."
        if void := sum(bool(answer.void) for name in prompts for answer in side.answers[name]):
            yield (
                f"{side.name}: void answers, which could not be generated or judged and count as"
                f" wrong: {void}."
            )
    counts = [sorted({len(side.answers[name]) for name in prompts}) for side in (a, b)]
    if counts[0] != counts[1] or len(counts[0]) > 1:
        a_has, b_has = (" to ".join(map(str, sorted({each[0], each[-1]}))) for each in counts)
        yield f"Answers a prompt: {a_has} of {a.name}, {b_has} of {b.name}."
    if reworded := sum(a.answers[name][0].prompt != b.answers[name][0].prompt for name in prompts):
        yield (
            f"Worded differently, or in another template, on the two sides: {reworded} of"
            f" {len(prompts)} prompts."
        )
    if a.result and b.result:
        ours, theirs = (flat({**result.settings, "model": None}) for result in (a.result, b.result))
        one_sided = ONE_SIDED - (ours.keys() & theirs.keys())
        for key in sorted((ours.keys() | theirs.keys()) - one_sided):
            if ours.get(key) != theirs.get(key):
                yield f"{key}: {ours.get(key)} of {a.name}, {theirs.get(key)} of {b.name}."


def show(comparison: SideBySide, console: Console) -> None:
    a = comparison.a.name
    b = comparison.b.name
    console.print(
        f"{comparison.suite}: {len(comparison.prompts)} prompts. A is {a}, B is {b}.",
        highlight=False,
    )
    scores = [Column(heading, justify="right", no_wrap=True) for heading in ("A", "B", "B − A")]
    table = Table(Column("", no_wrap=True), *scores, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for one in comparison.quantities:
        table.add_row(one.name, *cells(one))
    console.print(table)
    console.print(_examples(comparison))
    for line in (*comparison.notes, METHOD):
        console.print(line, highlight=False)


def _examples(comparison: SideBySide) -> Table:
    """Return the first answers of both sides to a few prompts: first of those where one
    is right and one is wrong.
    """
    firsts = {
        name: (comparison.a.answers[name][0], comparison.b.answers[name][0])
        for name in comparison.prompts
    }
    differing = [name for name, (a, b) in firsts.items() if a.correct != b.correct]
    alike = [name for name in firsts if name not in set(differing)]
    texts = dict(
        zip(firsts, _without_template([a.prompt for a, _ in firsts.values()]), strict=True)
    )
    columns = [Column(heading, ratio=1) for heading in ("prompt", "A answers", "B answers")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for name in [*differing, *alike][:EXAMPLES]:
        answers = [_verdict(answer) for answer in firsts[name]]
        table.add_row(Text(_one_line(texts[name])), *answers)
    return table


def _verdict(answer: Answer) -> Text:
    style = "green" if answer.correct else "red"
    mark = "right" if answer.correct else "wrong"
    return Text.assemble((f"{mark}: ", style), _one_line(answer.completion))


def _without_template(prompts: Sequence[str]) -> list[str]:
    """Return the prompts without what all begin with, in whole words, and without what
    all end with.
    """
    if len(set(prompts)) == 1:
        return list(prompts)
    begin = prompts[0][: _equal_characters(prompts)]
    words = begin.rfind(" ") + 1
    rest = [prompt[words:] for prompt in prompts]
    end = _equal_characters([text[::-1] for text in rest])
    return [text[: len(text) - end] for text in rest]


def _equal_characters(texts: Sequence[str]) -> int:
    """Return with how many equal characters all of these texts begin."""
    first = min(texts)
    last = max(texts)  # all others lie between these two
    pairs = zip(first, last, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(first))


def _one_line(text: str) -> str:
    """Return the text with spaces for line breaks; of a long one, its beginning and its
    end.
    """
    short = " ".join(text.split())
    return short if len(short) <= SHOWN else f"{short[: SHOWN // 2]} … {short[-SHOWN // 2 :]}"


def cells(one: Quantity) -> tuple[str, str, str]:
    d = one.difference
    if one.share:
        a, b = (f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]" for score in (one.a, one.b))
        return a, b, f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
    return (
        f"{one.a.mean:,.0f}",
        f"{one.b.mean:,.0f}",
        f"{d.mean:+,.0f} [{d.low:+,.0f}, {d.high:+,.0f}]",
    )


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
    spread = np.concatenate([differences, (step, -step)]) if step else differences
    variance = float(spread.var(ddof=0 if step else 1)) if len(spread) > 1 else math.inf
    half = student(len(differences) - 1) * math.sqrt(variance / len(spread))
    centre = float(spread.mean())
    most = 1.0 if step else math.inf  # two shares differ by 1 at most
    return Estimate(mean, max(-most, min(mean, centre - half)), min(most, max(mean, centre + half)))


def write_comparison(comparison: SideBySide, target: Path) -> int | None:
    """Write the page; return how many characters of each completion it keeps, or None
    if it keeps all.
    """
    sides = (comparison.a, comparison.b)
    sizes = [
        len(answer.completion)
        for name in comparison.prompts
        for side in sides
        for answer in side.answers[name]
    ]
    longest = max(SHORTEST, LARGEST // len(sizes))
    limit = None if sum(sizes) <= LARGEST or max(sizes) <= longest else longest
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
    """Return the page's data, in which each of the prompts is [id, start of text, A
    right, A answers, B right, B answers, truncated in both].
    """
    said = list(comparison.notes)
    both = (comparison.a.answers, comparison.b.answers)
    if any(len(answers[name]) > 1 for answers in both for name in comparison.prompts):
        said.append("In the list a side is right where at least half of its answers are.")
    if limit is not None:
        long = f"Completions of more than {limit:,} characters"
        said.append(f"{long} show only their beginning and end; answers.jsonl has all.")
    return {
        "suite": comparison.suite,
        "a": {"name": comparison.a.name, "folder": str(comparison.a.folder)},
        "b": {"name": comparison.b.name, "folder": str(comparison.b.folder)},
        "table": [[one.name, *cells(one)] for one in comparison.quantities],
        "notes": [*said, METHOD],
        "prompts": _lines(comparison),
    }


def _lines(comparison: SideBySide) -> list[list[str | int]]:
    """Return the list of prompts. The words with which all of them begin, which belong
    to a template, are left out.
    """
    sides = [
        (comparison.a.answers[name], comparison.b.answers[name]) for name in comparison.prompts
    ]
    texts = [a[0].prompt.split() for a, _ in sides]
    begin = next((n for n, words in enumerate(zip(*texts, strict=False)) if len(set(words)) > 1), 0)
    lines: list[list[str | int]] = []
    for name, (a, b), words in zip(comparison.prompts, sides, texts, strict=True):
        counts = [n for answers in (a, b) for n in (sum(x.correct for x in answers), len(answers))]
        lines.append(
            [name, " ".join(words[begin:])[:LINE], *counts, sum(x.truncated for x in (*a, *b))]
        )
    return lines


def _prompt(comparison: SideBySide, name: str, limit: int | None) -> dict[str, object]:
    a = comparison.a.answers[name]
    b = comparison.b.answers[name]
    return {
        "prompts": [shortened(x[0].prompt, LONGEST_ASKED) for x in (a, b)],
        "expected": shortened(a[0].expected, LONGEST_ASKED),
        "a": [_answer(answer, limit) for answer in a],
        "b": [_answer(answer, limit) for answer in b],
    }


def _answer(answer: Answer, limit: int | None) -> dict[str, object]:
    marks = {
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
    begin = limit // 4
    return [text[:begin], len(text) - limit, text[begin - limit :]]
