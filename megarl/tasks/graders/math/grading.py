"""The verdict on one answer."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megarl.tasks.graders.math.compare import equal, mapped, named
from megarl.tasks.graders.math.equality import Equality, needs_computing
from megarl.tasks.graders.math.evaluation import Budget, TooMuchWork
from megarl.tasks.graders.math.formulas import Formula, Number, parts
from megarl.tasks.graders.math.kinds import Expression, Listing, MathAnswer, Relation
from megarl.tasks.graders.math.layout import plain
from megarl.tasks.graders.math.locate import DOLLARS, AnswerPlace, Passage, passages
from megarl.tasks.graders.math.reader import NO_QUESTION, QuestionWords, question_of, read
from megarl.tasks.graders.math.tokens import MOST_CHARACTERS, CannotRead, spelled

GOLD_MARK = re.compile(r"^\s*####\s*")
UPRIGHT_LETTER = re.compile(r"\\(?:text|mathrm)\s*\{\s*~?[A-Za-z]\s*\}")
GROUPS = re.compile(r"[1-9]\d{0,2}(?:,[1-9]\d{2})+")
DECIMAL_COMMA = re.compile(r"-?\d+,(?:\d{1,2}|\d{4,})")
MOST_FORMULAS_OF_PROMPT = 100
LONGEST_PROMPT = 20_000
LONGEST_REMEMBERED = 200
ARITHMETIC = re.compile(
    r"(?:[(\d{]|\\(?:frac|sqrt|left|binom)(?![A-Za-z]))"
    r"(?:[\d.,()+\-*/^×·÷−{}! \t]|\\(?:times|cdot|div|frac|sqrt|left|right|binom)(?![A-Za-z]))*"
)
"""A run of numbers and signs in a prompt without dollars."""


@dataclass(frozen=True)
class TextReading:
    """A text as it is spelled, and the answer that it is; None if it cannot be read."""

    spelling: tuple[str, ...] | None
    answer: MathAnswer | None


def is_equal(answer: str, expected: str, prompt: str = "") -> bool:
    """Return whether an answer is right, with what it says in a box, an answer line, dollars or prose.

    answer: what the policy said behind its thinking trace; expected: the data set's answer; prompt: the question,
    if it is known: what repeats it is no answer, and its nouns may stand behind a number.
    """
    question = question_of(prompt[-LONGEST_PROMPT:])
    gold = reading(GOLD_MARK.sub("", expected), question)
    for passage in passages(answer):
        candidate = reading(passage.text, question)
        same_text = candidate.spelling is not None and candidate.spelling == gold.spelling
        if same_text and not _adds_a_unit(candidate.answer, gold.answer, passage.text):
            return True
        if candidate.answer is None:
            continue
        if gold.answer is None:
            return False
        if not may_count(candidate.answer, passage, prompt):
            return False
        if equal(gold.answer, candidate.answer) or _same_decimal(passage.text, gold.answer):
            return True
        return _same_list(expected, gold.answer, passage.text, candidate.answer)
    return False


def readable(expected: str) -> bool:
    """Return whether the grader can read an expected answer as mathematics or words.

    If not, an answer is right only if it is the same text. The time is linear in the text, less than 1 ms for a
    usual answer, and bounded: what is longer than 20,000 characters is not readable.
    """
    return reading(GOLD_MARK.sub("", expected), NO_QUESTION).answer is not None


def reading(text: str, question: QuestionWords) -> TextReading:
    """Read a text; short ones are remembered, because many answers share one expected answer."""
    if len(text) <= LONGEST_REMEMBERED:
        return _remembered(text, question)
    return _read_anew(text, question)


def _read_anew(text: str, question: QuestionWords) -> TextReading:
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


def may_count(answer: MathAnswer, passage: Passage, prompt: str) -> bool:
    """Return whether this is an answer, rather than the question or what has still to be computed."""
    if passage.place is AnswerPlace.PROSE:
        return not has_steps_left(answer)
    return not (prompt and has_steps_left(answer) and restates(answer, prompt))


def has_steps_left(answer: MathAnswer) -> bool:
    """Return whether a number in the answer has still to be computed."""
    equality = Equality(Budget())
    has_steps = False

    def look(formula: Formula) -> Formula:
        nonlocal has_steps
        has_steps = has_steps or needs_computing(formula, equality)
        return formula

    try:
        mapped(named(answer).value, look)
    except TooMuchWork:
        return True
    return has_steps


def restates(answer: MathAnswer, prompt: str) -> bool:
    """Return whether the numbers of a computation in the question are all in the answer's."""
    numbers = _numbers(named(answer).value)
    return any(not computation - numbers for computation in _computations_of(prompt[-LONGEST_PROMPT:]))


def _numbers(answer: MathAnswer) -> Counter[Fraction]:
    """Return the numbers that are written in an answer, and how often."""
    numbers: Counter[Fraction] = Counter()

    def count(formula: Formula) -> Formula:
        numbers.update(part.value for part in parts(formula) if isinstance(part, Number))
        return formula

    mapped(answer, count)
    return numbers


@lru_cache(maxsize=64)
def _computations_of(prompt: str) -> tuple[Counter[Fraction], ...]:
    """Return the numbers of each formula of a prompt that has to be computed."""
    texts = [next(filter(None, match.groups())) for match in DOLLARS.finditer(prompt)]
    texts += [match[0] for match in ARITHMETIC.finditer(prompt)]
    computations = []
    for text in texts[-MOST_FORMULAS_OF_PROMPT:]:
        candidate = reading(text.strip(" .=?,"), NO_QUESTION).answer if len(text) > 2 else None
        if candidate is None:
            continue
        if isinstance(candidate, Relation):
            candidate = candidate.sides[0]
        if has_steps_left(candidate) and (numbers := _numbers(candidate)):
            computations.append(numbers)
    return tuple(computations)


def _adds_a_unit(answer: MathAnswer | None, gold: MathAnswer | None, text: str) -> bool:
    """Return whether an upright letter is a unit in the answer, but a variable in the expected one."""
    if not isinstance(answer, Expression) or not isinstance(gold, Expression):
        return False
    return bool(answer.unit) and not gold.unit and UPRIGHT_LETTER.search(text) is not None


def _same_list(expected: str, gold: MathAnswer, text: str, answer: MathAnswer) -> bool:
    """Compare lists of numbers of three digits, whose commas look like those within one number."""
    if isinstance(gold, Listing) and GROUPS.fullmatch(text.strip(" $.")):
        listed = reading(text.replace(",", ", "), NO_QUESTION).answer
        return listed is not None and equal(gold, listed)
    if isinstance(answer, Listing) and GROUPS.fullmatch(expected.strip(" $.")):
        listed = reading(expected.replace(",", ", "), NO_QUESTION).answer
        several = isinstance(listed, Listing) and len(listed.items) > 2
        return several and listed is not None and equal(listed, answer)
    return False


def _same_decimal(text: str, gold: MathAnswer) -> bool:
    """Return whether this is the expected decimal with a comma: 1,5 for 1.5."""
    if not DECIMAL_COMMA.fullmatch(text.strip(" $.")):
        return False
    decimal = reading(text.replace(",", "."), NO_QUESTION).answer
    is_decimal = isinstance(gold, Expression) and not gold.unit
    return is_decimal and decimal is not None and equal(gold, decimal)
