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

type Owners = dict[str, int]
"""The number of the first evaluation text that has an n-gram, by n-gram."""


class Hit(NamedTuple):
    """The evaluation text with which a training text shares words, and those words."""

    evaluation: str
    shared: str


class Overlap:
    """The n-grams of named evaluation texts. `len` is the number of texts."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._names: list[str] = []
        self._short_texts: Owners = {}
        owners_by_length: dict[int, Owners] = {}
        texts_with: Counter[str] = Counter()
        distinct: set[str] = set()  # some published sets repeat a problem many times
        for number, (name, text) in enumerate(texts):
            self._names.append(name)
            text_words = words(text)
            if len(text_words) < SHORTEST:  # it matches as a whole only
                self._short_texts.setdefault(collapsed(text).casefold(), number)
                continue
            normal_form = " ".join(text_words)
            if normal_form in distinct:
                continue
            distinct.add(normal_form)
            length = min(len(text_words), NGRAM)
            grams = _grams(text_words, length)
            texts_with.update(grams)
            owners = owners_by_length.setdefault(length, {})
            for gram in grams:
                owners.setdefault(gram, number)
        self._grams = {
            length: _without_common(owners, texts_with)
            for length, owners in owners_by_length.items()
        }
        # Joining 13 words is what takes time, and most texts do not share even the
        # first two words of any n-gram.
        self._beginnings = {
            _first_words(gram) for owners in self._grams.values() for gram in owners
        }

    def __len__(self) -> int:
        return len(self._names)

    def find(self, text: str) -> Hit | None:
        """Return an evaluation text with which this text overlaps, or None."""
        number = self._short_texts.get(collapsed(text).casefold())
        if number is not None:
            return Hit(self._names[number], collapsed(text))
        text_words = words(text)
        starts = [n for n, pair in enumerate(pairwise(text_words)) if pair in self._beginnings]
        for length, owners in self._grams.items():
            for start in starts:
                gram = " ".join(text_words[start : start + length])
                if gram in owners:
                    return Hit(self._names[owners[gram]], gram)
        return None


def _grams(text_words: list[str], length: int) -> set[str]:
    """Return the distinct n-grams of this length, their words joined by spaces."""
    starts = range(len(text_words) - length + 1)
    return {" ".join(text_words[start : start + length]) for start in starts}


def _without_common(owners: Owners, texts_with: Counter[str]) -> Owners:
    """Return the n-grams that belong to no instruction. texts_with: in how many texts
    an n-gram is.
    """
    return {gram: number for gram, number in owners.items() if texts_with[gram] <= COMMON}


def _first_words(gram: str) -> tuple[str, ...]:
    """Return an n-gram's first two words."""
    return tuple(gram.split(" ", 2)[:2])


def overlap_with(sources: Iterable[str]) -> Overlap | None:
    """Index all texts of these sources; None if there are no sources."""
    names = list(sources)
    if not names:
        return None
    return Overlap(pair for source in names for pair in _texts(source))


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of an evaluation set, each behind the place where it stands.
    MegarlError if the set is empty, or a row has no text.
    """
    number = 0
    for number, row in stream(source):
        place = f"{source}:{number}"
        if isinstance(row, Unreadable):
            raise MegarlError(f"{place}: {row.problem}")
        yield place, question(row, place)
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
