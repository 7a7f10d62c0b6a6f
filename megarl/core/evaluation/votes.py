"""The vote of each answer to a prompt in maj@k: one text for all equal answers.

    answer ─► right?            the expected answer
           ─► extracted         the last box; else the last formula in dollars; else the
                                last number; else all of it
           ─► seen before?      the earlier text, if it is the same, the same number, or
                                equal by the grader of mathematics
           ─► otherwise         its own text: a new vote

Answers come one by one, and a vote is never taken back: if an answer equals two others
that differ (a grader's equality is not transitive), the earlier one counts.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from megarl.core.base.contracts import Grader, GraderDown, last_box
from megarl.core.evaluation.metrics import Outcome

OPENING = re.compile(r"\$|\\[(\[]")
MARKS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
"""Pairs of marks that open and close a formula."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
WITHOUT_VOTES = ("code", "format")
"""Graders without majority votes: two right programs need not be the same text."""


class Votes:
    """The votes of one suite or task. name: of its grader, which compares formulas.
    answered: earlier answers.
    """

    def __init__(self, name: str, grader: Grader, answered: Iterable[Outcome] = ()) -> None:
        self._name = name
        self._grader = grader
        self._seen: defaultdict[str, list[str]] = defaultdict(list)
        self._one_by_one: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        for answer in answered:
            votes = self._seen[answer.id]
            if answer.vote and not answer.correct and answer.vote not in votes:
                votes.append(answer.vote)

    async def of(self, id: str, answer: str, expected: str, correct: bool) -> str:
        """Return the vote of this answer to the prompt `id`; "" for none."""
        if self._name in WITHOUT_VOTES or not answer:
            return ""
        if self._name != "math":
            return answer
        if correct:
            return expected
        async with self._one_by_one[id]:
            vote = extracted(answer)
            for earlier in self._seen[id]:
                if await self._same(vote, earlier):
                    return earlier
            self._seen[id].append(vote)
            return vote

    async def _same(self, vote: str, earlier: str) -> bool:
        """Return whether a vote equals an earlier one: as text, as a number, or else by
        the grader; False if the grader is down.
        """
        if vote == earlier:
            return True
        a = number(vote)
        b = number(earlier)
        if a is not None and b is not None:
            return a == b
        try:
            return await self._grader.agrees(f"${vote}$", earlier)
        except GraderDown:
            return False


def extracted(answer: str) -> str:
    """Return the part of an answer that states the result."""
    box = (last_box(answer) or "").strip()
    if box:
        return box
    formula = last_formula(answer)
    if formula is not None:
        return formula.strip()
    numbers = NUMBER.findall(answer)
    return numbers[-1] if numbers else answer.strip()


def last_formula(text: str) -> str | None:
    """Return the content of the last formula in dollars or LaTeX's own marks, in time
    linear in the text.
    """
    formula = None
    at = 0
    # where each closing mark is last: no search beyond that, so the time stays linear
    closings = {close: text.rfind(close) for _, close in MARKS}
    while opening := OPENING.search(text, at):
        at = opening.start() + 1
        for mark, close in MARKS:
            start = opening.start() + len(mark)
            if text.startswith(mark, opening.start()) and closings[close] > start:
                end = text.index(close, start + 1)
                formula = text[start:end]
                at = end + len(close)
                break
    return formula


def number(text: str) -> Decimal | None:
    """Return the number that the text is, with or without thousands separators; None if
    it is not a finite number.
    """
    try:
        number = Decimal(text.replace(",", "").replace("\\!", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
