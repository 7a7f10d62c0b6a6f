"""Texts with their spelling and the answer that they are read as; short ones are
remembered.
"""

from dataclasses import dataclass
from functools import lru_cache

from megarl.tasks.graders.math.kinds import MathAnswer
from megarl.tasks.graders.math.layout import plain
from megarl.tasks.graders.math.reader import NO_QUESTION, QuestionWords, read
from megarl.tasks.graders.math.tokens import MOST_CHARACTERS, CannotRead, spelled

LONGEST_REMEMBERED = 200


@dataclass(frozen=True)
class TextReading:
    """A text as it is spelled, and the answer that it is; None if it cannot be read."""

    spelling: tuple[str, ...] | None
    answer: MathAnswer | None


def reading(text: str, question: QuestionWords = NO_QUESTION) -> TextReading:
    """Read a text; short ones are remembered, because many answers share one expected
    answer.
    """
    if len(text) <= LONGEST_REMEMBERED:
        return _remembered(text, question)
    return _read_anew(text, question)


def _read_anew(text: str, question: QuestionWords) -> TextReading:
    """Read a text that is not remembered. It has no spelling if it is too long, empty
    or cannot be divided into tokens.
    """
    if len(text) > MOST_CHARACTERS:
        return TextReading(None, None)
    try:
        spelling = spelled(plain(text))
    except CannotRead:
        return TextReading(None, None)
    try:
        return TextReading(spelling or None, read(text, question))
    except (CannotRead, RecursionError):
        return TextReading(spelling or None, None)


_remembered = lru_cache(maxsize=1024)(_read_anew)
