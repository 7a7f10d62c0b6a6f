"""Decides which rows of a source are kept and which are held out, in one pass, so that
a second one can stream them.

    source ──► mapping ──► PromptRow ──► survey: 35 bytes per row ──► chosen: the kept rows again, one at a time, in order

Rows are left out if they do not fit their schema, if the prompt or answer is empty,
damaged or stands for none, if the answer is too large, if they repeat an earlier prompt
or id, or if the prompt is in an evaluation set. They are counted, and the first few for
each reason reported. If a prompt is repeated with another answer, the first row is
still kept, but the repeats are counted separately, because one of the answers is wrong.

The held-out rows are those whose prompts have the smallest hashes: the source's order
does not matter, and since all copies of a prompt have the same hash, no prompt is on
both sides.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megarl.core.base.errors import SHOWN, MegarlError, listed
from megarl.tasks.data.contamination import Hit, Overlap
from megarl.tasks.data.damage import NO_ANSWERS, eaten_command, eaten_in_answer
from megarl.tasks.data.rows import LARGEST_ANSWER, PromptRow, UnfitError, digest, fingerprint
from megarl.tasks.data.sources import Numbered, Unreadable, stream

log = logging.getLogger(__name__)

BLOCK = 1 << 16
"""Rows examined at once."""

type Reader = Callable[[Any], PromptRow]

MALFORMED = "not of the schema"
EMPTY_PROMPT = "empty prompt"
EMPTY_ANSWER = "empty answer"
NO_ANSWER = "no answer"
LARGE_ANSWER = "answer too large"
CONTAMINATED = "of an evaluation set"
REPEATED = "repeated prompt"
CONTRADICTED = "repeated prompt with another answer"
REPEATED_ID = "repeated id"
UNFIT = frozenset({MALFORMED, EMPTY_PROMPT, EMPTY_ANSWER})
FAULTS = UNFIT | {LARGE_ANSWER, REPEATED, CONTRADICTED, REPEATED_ID}
"""Reasons for which a source may be refused as a whole, instead of leaving out the
rows.
"""


@dataclass
class LeftOut:
    """The rows left out: their count by reason, and the first few for each reason, as
    (number, what is wrong).
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, reason: str, number: int, what: str) -> None:
        self.counts[reason] += 1
        shown = self.first.setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append((number, what))

    def named(self) -> list[str]:
        """Return the first few rows for all reasons, as `number: what is wrong`,
        ordered by number. What is wrong with several rows is said once.
        """
        rows: dict[str, list[int]] = {}
        for number, what in sorted(pair for shown in self.first.values() for pair in shown):
            rows.setdefault(what, []).append(number)
        return [f"{first}: {what}{_the_same(others)}" for what, (first, *others) in rows.items()]


def _the_same(numbers: list[int]) -> str:
    """Return a text that names further rows with the same fault."""
    return f" (the same in {', '.join(map(str, numbers))})" if numbers else ""


@dataclass
class RowShape:
    """Whether any usable row has a prompt of several messages, or several accepted
    answers.
    """

    has_messages: bool = False
    has_alternatives: bool = False

    def add(self, row: PromptRow) -> None:
        self.has_messages |= bool(row.messages)
        self.has_alternatives |= bool(row.alternatives)


class Survey(NamedTuple):
    """The result of a survey. again: the number of kept rows that repeat an earlier
    one. kept, heldout [rows] bool: for all rows in the source's order, unreadable ones
    included; held-out rows are also kept.
    """

    source: str
    read: Reader
    kept: np.ndarray
    heldout: np.ndarray
    left_out: LeftOut
    shape: RowShape
    again: int = 0


class _Hashes:
    """The data kept in memory for each row: its number, whether it is usable, and
    hashes of its prompt, id and answer.
    """

    def __init__(self) -> None:
        self.numbers, self.usable = array("Q"), array("b")
        self.prompts, self.ids, self.answers = array("Q"), array("Q"), array("Q")

    def add(self, number: int, row: PromptRow | None) -> None:
        self.numbers.append(number)
        self.usable.append(row is not None)
        self.prompts.append(fingerprint(row.identity) if row else 0)
        self.ids.append(digest(row.id) if row else 0)
        self.answers.append(digest("\0".join(map(str.strip, row.answers))) if row else 0)


def survey(
    source: str,
    read: Reader,
    heldout: int = 0,
    evaluation: Overlap | None = None,
    rows: Iterable[Numbered] | None = None,
    removed: Callable[[PromptRow, int, Hit], object] | None = None,
    repeats: bool = False,
    largest: float = LARGEST_ANSWER,
) -> Survey:
    """Decide in one pass over the source which rows are kept, and which are held out.
    rows: the source's rows, if the caller reads them (to show progress). removed:
    called for each row found in an evaluation set. repeats: keep and count rows with
    the same id. largest: the most characters in an answer.
    """
    left_out = LeftOut()
    columns = _Hashes()
    shape = RowShape()
    for number, raw in stream(source) if rows is None else rows:
        row = _row(raw, read, number, left_out, largest)
        hit = evaluation.find(row.prompt) if row and evaluation else None
        if row and hit:
            left_out.add(
                CONTAMINATED, number, f"{row.id!r} shares {hit.shared!r} with {hit.evaluation}"
            )
            if removed:
                removed(row, number, hit)
        columns.add(number, None if hit else row)
        if row and not hit:
            shape.add(row)
    if not columns.numbers:
        raise MegarlError(f"{source}: no rows in it")
    kept = np.array(columns.usable, bool)
    again = 0
    if repeats:
        again = len(_repeats(columns.ids, kept)[0])
    else:
        _leave_out_repeats(columns, kept, left_out)
    held = _held_out(source, heldout, columns.prompts, kept)
    return Survey(source, read, kept, held, left_out, shape, again)


def survey_of(
    source: str,
    read: Reader,
    heldout: int = 0,
    evaluation: Overlap | None = None,
    refuse: frozenset[str] = FAULTS,
    repeats: bool = False,
) -> Survey:
    """Survey a source that a run will use: log the rows left out. MegarlError if one is
    left out for a reason in `refuse`.
    """
    result = survey(source, read, heldout, evaluation, repeats=repeats)
    faults = sum(count for reason, count in result.left_out.counts.items() if reason in refuse)
    if faults:
        result.left_out.first = {
            reason: first for reason, first in result.left_out.first.items() if reason in refuse
        }
        head = f"{source}: {faults} fault{'s' * (faults > 1)}:"
        raise MegarlError(
            listed(head, [f"{source}:{line}" for line in result.left_out.named()], faults)
        )
    for reason, count in result.left_out.counts.items():
        places = [f"{source}:{number}: {what}" for number, what in result.left_out.first[reason]]
        log.warning("%s", listed(f"{source}: {count} rows left out ({reason}):", places, count))
    if result.again:
        log.info("%s: %d rows repeat an earlier one", source, result.again)
    return result


def chosen(survey: Survey) -> Iterator[tuple[PromptRow, bool]]:
    """Yield the kept rows, each with whether it is held out."""
    if not survey.kept.any():
        named = [f"{survey.source}:{line}" for line in survey.left_out.named()]
        raise MegarlError(
            listed(f"{survey.source}: none of its {len(survey.kept)} rows can be used:", named)
        )
    for n, (_, raw) in enumerate(stream(survey.source)):
        if n == len(survey.kept):
            raise MegarlError(
                f"{survey.source}: grew while it was read; start again when it is complete"
            )
        if survey.kept[n]:
            yield survey.read(raw), bool(survey.heldout[n])


def _row(
    raw: Any, read: Reader, number: int, left_out: LeftOut, largest: float
) -> PromptRow | None:
    if isinstance(raw, Unreadable):
        left_out.add(MALFORMED, number, f"not a row: {raw.why}")
        return None
    try:
        row = read(raw)
    except UnfitError as error:
        left_out.add(MALFORMED, number, str(error))
        return None
    if not row.prompt.strip():
        left_out.add(EMPTY_PROMPT, number, f"the prompt of {row.id!r} is empty")
    elif not row.answer.strip():
        left_out.add(EMPTY_ANSWER, number, f"the answer of {row.id!r} is empty")
    elif max(map(len, row.answers)) > largest:
        left_out.add(LARGE_ANSWER, number, f"the answer of {row.id!r} is too large")
    elif row.answer.strip().casefold() in NO_ANSWERS:
        what = (
            f"the answer of {row.id!r} is {row.answer!r}, which NuminaMath writes where there is"
            " none"
        )
        left_out.add(NO_ANSWER, number, what)
    elif eaten := eaten_command(row.identity) or next(
        filter(None, map(eaten_in_answer, row.answers)), None
    ):
        what = f"{row.id!r} has {eaten!r}; in JSON a command of LaTeX has two backslashes"
        left_out.add(MALFORMED, number, what)
    else:
        return row
    return None


def _leave_out_repeats(columns: _Hashes, kept: np.ndarray, left_out: LeftOut) -> None:
    """Set `kept` [rows] to False for the rows whose prompt or id an earlier row has,
    and add them to `left_out`.
    """
    again, first = _repeats(columns.prompts, kept)
    kept[again] = False
    answers = np.frombuffer(columns.answers, np.uint64)
    other = answers[again] != answers[first]
    of_id = _repeats(columns.ids, kept)
    kept[of_id[0]] = False
    prompt = "its prompt was on line {}; leave one out"
    name = "its id was on line {}; ids must differ"
    for reason, what, rows, earlier in (
        (REPEATED, prompt, again[~other], first[~other]),
        (CONTRADICTED, prompt, again[other], first[other]),
        (REPEATED_ID, name, *of_id),
    ):
        if len(rows):
            left_out.counts[reason] += len(rows)
            pairs = zip(rows[:SHOWN], earlier[:SHOWN], strict=True)
            left_out.first[reason] = [
                (columns.numbers[n], what.format(columns.numbers[at])) for n, at in pairs
            ]


def _repeats(column: "array[int]", live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the live rows whose key an earlier live row has, in order, and for each
    the first row with that key.
    """
    keys = np.frombuffer(column, np.uint64)
    ordered = np.sort(keys[live])
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    blocks = range(
        0, len(keys), BLOCK
    )  # few rows repeat, so no array as long as the source is made for them
    among = [
        np.flatnonzero(live[n : n + BLOCK] & np.isin(keys[n : n + BLOCK], several)) + n
        for n in blocks
    ]
    rows = np.concatenate(among)
    _, begins, group = np.unique(keys[rows], return_index=True, return_inverse=True)
    first = rows[begins[group]]
    return rows[rows != first], first[rows != first]


def _held_out(source: str, count: int, prompts: "array[int]", kept: np.ndarray) -> np.ndarray:
    """Return [rows] bool: True for the `count` kept rows whose prompts have the
    smallest hashes.
    """
    held = np.zeros(len(kept), bool)
    rows = np.flatnonzero(kept)
    if count >= len(rows) > 0:  # if no row can be used, `chosen` says why
        raise MegarlError(
            f"{source}: {count} rows to hold out of {len(rows)} that can be used leave none to"
            " train on"
        )
    if count and len(rows):
        hashes = np.frombuffer(prompts, np.uint64)[rows]
        held[rows[np.argpartition(hashes, count - 1)[:count]]] = True
    return held
