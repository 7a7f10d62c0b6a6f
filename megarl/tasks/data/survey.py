"""Decides which rows of a source are kept and which are held out, in one pass, so that
a second one can stream them.

    source ──► mapping ──► PromptRow ──► survey: 35 bytes per row
        ──► chosen: the kept rows again, one at a time, in order

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

    def add(self, reason: str, number: int, fault: str) -> None:
        """Count the row of this number."""
        self.counts[reason] += 1
        examples = self.first.setdefault(reason, [])
        if len(examples) < SHOWN:
            examples.append((number, fault))

    def named(self) -> list[str]:
        """Return the first few rows for all reasons, as `number: what is wrong`,
        ordered by number. What is wrong with several rows is said once.
        """
        pairs: list[tuple[int, str]] = []
        for examples in self.first.values():
            pairs += examples
        numbers_by_fault: dict[str, list[int]] = {}
        for number, fault in sorted(pairs):
            numbers_by_fault.setdefault(fault, []).append(number)
        return [_numbered(fault, numbers) for fault, numbers in numbers_by_fault.items()]


def _numbered(fault: str, numbers: list[int]) -> str:
    """Return a text that names the rows with this fault."""
    first, *others = numbers
    text = f"{first}: {fault}"
    if others:
        text += f" (the same in {', '.join(map(str, others))})"
    return text


@dataclass
class RowShape:
    """Whether any usable row has a prompt of several messages, or several accepted
    answers.
    """

    has_messages: bool = False
    has_alternatives: bool = False

    def add(self, row: PromptRow) -> None:
        """Note a usable row."""
        self.has_messages |= bool(row.messages)
        self.has_alternatives |= bool(row.alternatives)


class Survey(NamedTuple):
    """The result of a survey. is_kept, is_held_out [rows] bool: for all rows in the
    source's order, unreadable ones included; held-out rows are also kept. repeats: the
    number of kept rows that repeat an earlier one.
    """

    source: str
    read: Reader
    is_kept: np.ndarray
    is_held_out: np.ndarray
    left_out: LeftOut
    shape: RowShape
    repeats: int = 0


class _Hashes:
    """The data kept in memory for each row: its number, whether it is usable, and
    hashes of its prompt, id and answer.
    """

    def __init__(self) -> None:
        self.numbers = array("Q")
        self.usable = array("b")
        self.prompts = array("Q")
        self.ids = array("Q")
        self.answers = array("Q")

    def add(self, number: int, row: PromptRow | None) -> None:
        """Note the row of this number; None if it cannot be used."""
        self.numbers.append(number)
        self.usable.append(row is not None)
        if row is None:
            for column in (self.prompts, self.ids, self.answers):
                column.append(0)
            return
        self.prompts.append(fingerprint(row.identity))
        self.ids.append(digest(row.id))
        self.answers.append(digest("\0".join(map(str.strip, row.answers))))


def survey(
    source: str,
    read: Reader,
    heldout: int = 0,
    evaluation: Overlap | None = None,
    rows: Iterable[Numbered] | None = None,
    removed: Callable[[PromptRow, int, Hit], object] | None = None,
    repeats: bool = False,
    largest_answer: float = LARGEST_ANSWER,
) -> Survey:
    """Decide in one pass over the source which rows are kept, and which are held out.
    heldout: how many of them are. evaluation: the sets that no kept row may be of.
    rows: the source's rows, if the caller reads them (to show progress). removed:
    called for each row found in an evaluation set. repeats: keep and count rows with
    the same id, instead of leaving out repeated prompts and ids. largest_answer: the
    most characters in an answer. MegarlError if the source is empty, or none would be
    left to train on.
    """
    left_out = LeftOut()
    columns = _Hashes()
    shape = RowShape()
    if rows is None:
        rows = stream(source)
    for number, raw in rows:
        row = _row(raw, read, number, left_out, largest_answer)
        if row and evaluation:
            hit = evaluation.find(row.prompt)
            if hit:
                fault = f"{row.id!r} shares {hit.shared!r} with {hit.evaluation}"
                left_out.add(CONTAMINATED, number, fault)
                if removed:
                    removed(row, number, hit)
                row = None
        columns.add(number, row)
        if row:
            shape.add(row)
    if not columns.numbers:
        raise MegarlError(f"{source}: no rows in it")
    is_kept = np.array(columns.usable, bool)
    repeat_count = 0
    if repeats:
        repeat_count = len(_repeats(columns.ids, is_kept).rows)
    else:
        _leave_out_repeats(columns, is_kept, left_out)
    is_held_out = _held_out(source, heldout, columns.prompts, is_kept)
    return Survey(source, read, is_kept, is_held_out, left_out, shape, repeat_count)


def survey_of(
    source: str,
    read: Reader,
    heldout: int = 0,
    evaluation: Overlap | None = None,
    refuse: frozenset[str] = FAULTS,
    repeats: bool = False,
) -> Survey:
    """Survey a source that a run will use, as `survey` does, and log the rows left out.
    MegarlError if one is left out for a reason in `refuse`.
    """
    result = survey(source, read, heldout, evaluation, repeats=repeats)
    left_out = result.left_out
    _check_faults(source, left_out, refuse)
    for reason, count in left_out.counts.items():
        places = [f"{source}:{number}: {fault}" for number, fault in left_out.first[reason]]
        log.warning("%s", listed(f"{source}: {count} rows left out ({reason}):", places, count))
    if result.repeats:
        log.info("%s: %d rows repeat an earlier one", source, result.repeats)
    return result


def _check_faults(source: str, left_out: LeftOut, refuse: frozenset[str]) -> None:
    """Raise MegarlError if rows are left out for reasons in `refuse`."""
    refused = LeftOut()
    for reason in left_out.counts.keys() & refuse:
        refused.counts[reason] = left_out.counts[reason]
        refused.first[reason] = left_out.first[reason]
    faults = refused.counts.total()
    if faults:
        head = f"{source}: {faults} {'fault' if faults == 1 else 'faults'}:"
        places = [f"{source}:{line}" for line in refused.named()]
        raise MegarlError(listed(head, places, faults))


def chosen(survey: Survey) -> Iterator[tuple[PromptRow, bool]]:
    """Yield the kept rows, each with whether it is held out. MegarlError if there are
    none, or if the source has grown since it was surveyed.
    """
    rows = len(survey.is_kept)
    if not survey.is_kept.any():
        named = [f"{survey.source}:{line}" for line in survey.left_out.named()]
        raise MegarlError(listed(f"{survey.source}: none of its {rows} rows can be used:", named))
    for n, (_, raw) in enumerate(stream(survey.source)):
        if n == rows:
            raise MegarlError(
                f"{survey.source}: grew while it was read; start again when it is complete"
            )
        if survey.is_kept[n]:
            yield survey.read(raw), bool(survey.is_held_out[n])


def _row(
    raw: Any, read: Reader, number: int, left_out: LeftOut, largest_answer: float
) -> PromptRow | None:
    """Return the row that `read` makes of a source's; None if it does not fit or has a
    fault, which is then added to `left_out`. number: that of the row in the source;
    largest_answer: the most characters in an answer.
    """
    if isinstance(raw, Unreadable):
        left_out.add(MALFORMED, number, f"not a row: {raw.problem}")
        return None
    try:
        row = read(raw)
    except UnfitError as error:
        left_out.add(MALFORMED, number, str(error))
        return None
    fault = _fault(row, largest_answer)
    if fault:
        left_out.add(fault.reason, number, fault.text)
        return None
    return row


class _RowFault(NamedTuple):
    """A reason for which a row is left out, and what is wrong with this row."""

    reason: str
    text: str


def _fault(row: PromptRow, largest_answer: float) -> _RowFault | None:
    """Return what is wrong with a row by itself, if anything is. largest_answer: the
    most characters in an answer.
    """
    if not row.prompt.strip():
        return _RowFault(EMPTY_PROMPT, f"the prompt of {row.id!r} is empty")
    if not row.answer.strip():
        return _RowFault(EMPTY_ANSWER, f"the answer of {row.id!r} is empty")
    if max(map(len, row.answers)) > largest_answer:
        return _RowFault(LARGE_ANSWER, f"the answer of {row.id!r} is too large")
    if row.answer.strip().casefold() in NO_ANSWERS:
        return _RowFault(
            NO_ANSWER,
            f"the answer of {row.id!r} is {row.answer!r}, which NuminaMath writes where there is"
            " none",
        )
    damage = _damage(row)
    if damage:
        return _RowFault(
            MALFORMED, f"{row.id!r} has {damage!r}; in JSON a command of LaTeX has two backslashes"
        )
    return None


def _damage(row: PromptRow) -> str | None:
    """Return what is left of a damaged command of LaTeX in a row, or None."""
    damage = eaten_command(row.identity)
    if damage:
        return damage
    for answer in row.answers:
        damage = eaten_in_answer(answer)
        if damage:
            return damage
    return None


def _leave_out_repeats(columns: _Hashes, is_kept: np.ndarray, left_out: LeftOut) -> None:
    """Set `is_kept` [rows] to False for the rows whose prompt or id an earlier kept row
    has, and add them to `left_out`.
    """
    of_prompt = _repeats(columns.prompts, is_kept)
    is_kept[of_prompt.rows] = False
    answers = np.frombuffer(columns.answers, np.uint64)
    contradicts = answers[of_prompt.rows] != answers[of_prompt.earlier]
    of_id = _repeats(columns.ids, is_kept)  # among the rows that are still kept
    is_kept[of_id.rows] = False
    prompt_fault = "its prompt was on line {}; leave one out"
    id_fault = "its id was on line {}; ids must differ"
    for reason, fault, repeats in (
        (REPEATED, prompt_fault, of_prompt.filtered(~contradicts)),
        (CONTRADICTED, prompt_fault, of_prompt.filtered(contradicts)),
        (REPEATED_ID, id_fault, of_id),
    ):
        if not len(repeats.rows):
            continue
        left_out.counts[reason] += len(repeats.rows)
        pairs = zip(repeats.rows[:SHOWN], repeats.earlier[:SHOWN], strict=True)
        left_out.first[reason] = [
            (columns.numbers[row], fault.format(columns.numbers[earlier])) for row, earlier in pairs
        ]


class _Repeats(NamedTuple):
    """Rows [repeats] whose key an earlier row has, in order, and for each the first row
    with that key.
    """

    rows: np.ndarray
    earlier: np.ndarray

    def filtered(self, condition: np.ndarray) -> "_Repeats":
        """Return those for which a condition [repeats] holds."""
        return _Repeats(self.rows[condition], self.earlier[condition])


def _repeats(column: "array[int]", is_kept: np.ndarray) -> _Repeats:
    """Find the kept rows whose key an earlier kept row has. column [rows]: the keys, 64
    bits each. is_kept [rows] bool.
    """
    keys = np.frombuffer(column, np.uint64)
    ordered = np.sort(keys[is_kept])
    equals_next = ordered[1:] == ordered[:-1]
    repeated_keys = np.unique(ordered[1:][equals_next])
    del ordered, equals_next
    # Few rows repeat, so no array as long as the source is made for them.
    blocks = []
    for start in range(0, len(keys), BLOCK):
        block = slice(start, start + BLOCK)
        has_repeated_key = is_kept[block] & np.isin(keys[block], repeated_keys)
        blocks.append(np.flatnonzero(has_repeated_key) + start)
    rows = np.concatenate(blocks)
    # For each of these rows, the place in `rows` of the first one with its key.
    _, first_places, group = np.unique(keys[rows], return_index=True, return_inverse=True)
    first = rows[first_places[group]]
    return _Repeats(rows, first).filtered(rows != first)


def _held_out(source: str, count: int, prompts: "array[int]", is_kept: np.ndarray) -> np.ndarray:
    """Return [rows] bool: True for the `count` kept rows whose prompts have the
    smallest hashes. MegarlError if no other row would be kept.
    """
    is_held_out = np.zeros(len(is_kept), bool)
    rows = np.flatnonzero(is_kept)
    if count >= len(rows) > 0:  # if no row can be used, `chosen` says why
        raise MegarlError(
            f"{source}: {count} rows to hold out of {len(rows)} that can be used leave none to"
            " train on"
        )
    if count and len(rows):
        hashes = np.frombuffer(prompts, np.uint64)[rows]
        smallest = np.argpartition(hashes, count - 1)[:count]
        is_held_out[rows[smallest]] = True
    return is_held_out
