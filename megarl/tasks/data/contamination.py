"""Finds prompts of evaluation sets among training prompts, by shared n-grams of words.

As in GPT-3 (arXiv 2005.14165, appendix C), words are lower-cased and stripped of
punctuation; a training text that shares 13 consecutive words with an evaluation text is
contaminated; and an evaluation text of 8 to 12 words is searched for as a whole. An
even shorter one matches only if it is the entire training text. GPT-3 cut out parts of
long documents; here the document is the prompt, so all of it is removed. N-grams in
more than `COMMON` different evaluation texts belong to their instruction ("Solve the
following math problem step by step…"), identify none of them, and are not searched for.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from megarl.core.base.errors import MegarlError
from megarl.tasks.data.conversations import messages_of
from megarl.tasks.data.rows import Raw, UnfitError, collapsed, words
from megarl.tasks.data.sources import Unreadable, stream

NGRAM = 13
SHORTEST = 8
COMMON = 10
QUESTIONS = ("prompt", "problem", "question", "question_content", "text")
"""Columns with the text of an evaluation row; the first that the row has is used. They
cover AIME, MATH-500, GSM8K, LiveCodeBench, HumanEval, MBPP.
"""


class Hit(NamedTuple):
    """The evaluation text with which a training text shares words, and those words."""

    evaluation: str
    shared: str


class Overlap:
    """The n-grams of named evaluation texts. `len` is the number of texts."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._names: list[str] = []
        self._whole: dict[str, int] = {}
        grams: dict[int, dict[str, int]] = {}
        texts_with: Counter[str] = Counter()
        distinct: set[str] = set()  # some published sets repeat a problem many times
        for name, text in texts:
            spoken = words(text)
            length = min(len(spoken), NGRAM)
            if length < SHORTEST:
                self._whole.setdefault(collapsed(text).casefold(), len(self._names))
            elif (whole := " ".join(spoken)) not in distinct:
                distinct.add(whole)
                own = {" ".join(spoken[n : n + length]) for n in range(len(spoken) - length + 1)}
                texts_with.update(own)
                for gram in own:
                    grams.setdefault(length, {}).setdefault(gram, len(self._names))
            self._names.append(name)
        self._grams = {
            length: {gram: at for gram, at in owners.items() if texts_with[gram] <= COMMON}
            for length, owners in grams.items()
        }
        # Joining 13 words is what takes time, and most texts do not share even the
        # first two words of any n-gram.
        self._begin = {
            tuple(gram.split(" ", 2)[:2]) for owners in self._grams.values() for gram in owners
        }

    def __len__(self) -> int:
        return len(self._names)

    def find(self, text: str) -> Hit | None:
        """Return an evaluation text with which this text overlaps, or None."""
        at = self._whole.get(collapsed(text).casefold())
        if at is not None:
            return Hit(self._names[at], collapsed(text))
        spoken = words(text)
        begins = [n for n, pair in enumerate(pairwise(spoken)) if pair in self._begin]
        for length, grams in self._grams.items():
            for n in begins:
                gram = " ".join(spoken[n : n + length])
                if gram in grams:
                    return Hit(self._names[grams[gram]], gram)
        return None


def overlap_with(sources: Iterable[str]) -> Overlap | None:
    """Index all texts of these sources; None if there are no sources."""
    names = list(sources)
    return Overlap(pair for source in names for pair in _texts(source)) if names else None


def _texts(source: str) -> Iterator[tuple[str, str]]:
    number = 0
    for number, row in stream(source):
        if isinstance(row, Unreadable):
            raise MegarlError(f"{source}:{number}: {row.why}")
        yield f"{source}:{number}", question(row, f"{source}:{number}")
    if not number:
        raise MegarlError(f"{source}: no rows in it to decontaminate against")


def question(row: Raw, place: str) -> str:
    """Return the text of an evaluation row; messages are joined. place: for the error.

    MegarlError if the row has no text.
    """
    try:
        value = next((row[name] for name in QUESTIONS if name in row), None)
        if isinstance(value, list):
            value = "\n".join(message["content"] for message in messages_of(value))
    except UnfitError as error:
        raise MegarlError(f"{place}: {error}") from None
    if not isinstance(value, str):
        columns = ", ".join(QUESTIONS)
        raise MegarlError(f"{place}: no text to decontaminate against in a column {columns}")
    return value
