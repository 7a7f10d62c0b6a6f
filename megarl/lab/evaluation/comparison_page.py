"""The page of a comparison: one HTML file that opens offline (comparison.html), to read failures side by side.

A set of 500 prompts with twice 16 answers of 8,000 tokens is half a gigabyte of text. So if all completions together exceed a
limit, each shows only its beginning and end. Each prompt is a script of its own, read when the prompt is opened.
"""

from html import escape
from pathlib import Path

from msgspec import UNSET

from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.metrics import Outcome
from megarl.lab.evaluation.compare import METHOD, SideBySide, cells
from megarl.lab.report import pictures

TEMPLATE = Path(__file__).with_name("comparison.html")
LARGEST = 64_000_000  # characters of all completions in a page
SHORTEST = 1000  # characters that a completion keeps at least, however many there are
LONGEST_ASKED = 20_000  # characters of a prompt or an expected answer; the tests of a program can be megabytes
LINE = 160  # characters of a prompt in the list


def write_comparison(comparison: SideBySide, target: Path) -> int | None:
    """Write the page; return how many characters of a completion it keeps, or None if all."""
    sides = (comparison.a, comparison.b)
    sizes = [len(answer.completion) for name in comparison.prompts for side in sides for answer in side.answers[name]]
    longest = max(SHORTEST, LARGEST // len(sizes))
    limit = None if sum(sizes) <= LARGEST or max(sizes) <= longest else longest
    prompts = "\n".join(
        f'<script type="application/json" class="prompt">{pictures.embedded(_prompt(comparison, name, limit))}</script>'
        for name in comparison.prompts
    )
    pictures.write_page(
        TEMPLATE,
        target,
        title=escape(f"{comparison.suite}: {comparison.a.name} and {comparison.b.name}"),
        data=pictures.embedded(_overview(comparison, limit)),
        prompts=prompts,
    )
    return limit


def _overview(comparison: SideBySide, limit: int | None) -> dict[str, object]:
    """Return the page's data. prompts: [id, start of text, A right, A answers, B right, B answers, truncated of both]."""
    said, both = list(comparison.notes), (comparison.a.answers, comparison.b.answers)
    if any(len(answers[name]) > 1 for answers in both for name in comparison.prompts):
        said.append("In the list a side is right where at least half of its answers are.")
    if limit is not None:
        text = "are shown by begin and end; all is in answers.jsonl."
        said.append(f"Completions of more than {limit:,} characters {text}")
    return {
        "suite": comparison.suite,
        "a": {"name": comparison.a.name, "folder": str(comparison.a.folder)},
        "b": {"name": comparison.b.name, "folder": str(comparison.b.folder)},
        "table": [[one.name, *cells(one)] for one in comparison.quantities],
        "notes": [*said, METHOD],
        "prompts": _lines(comparison),
    }


def _lines(comparison: SideBySide) -> list[list[str | int]]:
    """Return the list of prompts, without the words that all begin with, which belong to a template."""
    sides = [(comparison.a.answers[name], comparison.b.answers[name]) for name in comparison.prompts]
    texts = [a[0].prompt.split() for a, _ in sides]
    begin = next((n for n, words in enumerate(zip(*texts, strict=False)) if len(set(words)) > 1), 0)
    lines: list[list[str | int]] = []
    for name, (a, b), words in zip(comparison.prompts, sides, texts, strict=True):
        counts = [n for answers in (a, b) for n in (sum(x.correct for x in answers), len(answers))]
        lines.append([name, " ".join(words[begin:])[:LINE], *counts, sum(x.truncated for x in (*a, *b))])
    return lines


def _prompt(comparison: SideBySide, name: str, limit: int | None) -> dict[str, object]:
    a, b = comparison.a.answers[name], comparison.b.answers[name]
    return {
        "prompts": [shortened(x[0].prompt, LONGEST_ASKED) for x in (a, b)],
        "expected": shortened(a[0].expected, LONGEST_ASKED),
        "a": [_answer(answer, limit) for answer in a],
        "b": [_answer(answer, limit) for answer in b],
    }


def _answer(answer: Answer, limit: int | None) -> dict[str, object]:
    result: dict[str, object] = {
        "text": shortened(answer.completion, limit),
        "answer": shortened(answer.answer, limit),
        "right": answer.correct,
        "tokens": answer.tokens,
        "marks": _marks(answer),
    }
    if answer.choices is not UNSET:
        scored = ("choices", "loglikelihoods", "chosen", "chosen_normalised")
        result |= {key: getattr(answer, key) for key in scored} | {"right_normalised": Outcome.of(answer).by_length}
    return result


def _marks(answer: Answer) -> list[str]:
    remarks = {
        "truncated": answer.truncated,
        "interrupted": answer.interrupted,
        "no answer found": not answer.format_ok and not answer.void,
        "grader timed out": answer.grader_timeout,
        "grader failed": answer.grader_error,
        f"void: {answer.void}": answer.void,
    }
    return [text for text, holds in remarks.items() if holds]


def shortened(text: str, limit: int | None) -> list[str | int]:
    """Return [text] or, above the limit, [start, characters left out, end].

    The start gets a quarter of the limit; the answer is near the end.
    """
    if limit is None or len(text) <= limit:
        return [text]
    begin = limit // 4
    return [text[:begin], len(text) - limit, text[begin - limit :]]
