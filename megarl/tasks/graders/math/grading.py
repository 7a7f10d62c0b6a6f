"""The verdict on one answer."""

import re

from megarl.tasks.graders.math.compare import equal
from megarl.tasks.graders.math.kinds import Expression, Listing, MathAnswer
from megarl.tasks.graders.math.locate import passages
from megarl.tasks.graders.math.question import LONGEST_PROMPT, is_believed, permits, repeats_prompt
from megarl.tasks.graders.math.reader import question_of
from megarl.tasks.graders.math.readings import reading

GOLD_MARK = re.compile(r"^\s*####\s*")
UPRIGHT_LETTER = re.compile(r"\\(?:text|mathrm)\s*\{\s*~?[A-Za-z]\s*\}")
GROUPS = re.compile(r"[1-9]\d{0,2}(?:,[1-9]\d{2})+")
DECIMAL_COMMA = re.compile(r"-?\d+,(?:\d{1,2}|\d{4,})")


def is_equal(answer: str, expected: str, prompt: str = "") -> bool:
    """Return whether an answer is right by what it says in a box, an answer line,
    dollars or prose. The first place of these that can be read decides.

    answer: what the policy said behind its thinking trace; expected: the data set's
    answer; prompt: the question, if it is known: what repeats it is no answer, and its
    nouns may stand behind a number.
    """
    question = question_of(prompt[-LONGEST_PROMPT:])
    gold = reading(GOLD_MARK.sub("", expected), question)
    for passage in passages(answer):
        candidate = reading(passage.text, question)
        same_text = candidate.spelling is not None and candidate.spelling == gold.spelling
        if same_text and not _adds_a_unit(candidate.answer, gold.answer, passage.text):
            return is_believed(prompt, candidate, passage)
        if candidate.answer is None:
            continue
        if gold.answer is None:
            return False
        if repeats_prompt(answer, prompt) or not permits(prompt, gold, candidate, passage):
            return False
        if equal(gold.answer, candidate.answer) or _same_decimal(passage.text, gold.answer):
            return True
        return _same_list(expected, gold.answer, passage.text, candidate.answer)
    return False


def readable(expected: str) -> bool:
    """Return whether the grader can read an expected answer as mathematics or words.

    If not, an answer is right only if it is the same text. The time is linear in the
    text, less than 1 ms for a usual answer, and bounded: what is longer than 20,000
    characters is not readable.
    """
    return reading(GOLD_MARK.sub("", expected)).answer is not None


def _adds_a_unit(answer: MathAnswer | None, gold: MathAnswer | None, text: str) -> bool:
    """Return whether an upright letter in the answer's text is read as a unit, while
    the expected answer, spelled the same, has a variable there.
    """
    if not isinstance(answer, Expression) or not isinstance(gold, Expression):
        return False
    return bool(answer.unit) and not gold.unit and UPRIGHT_LETTER.search(text) is not None


def _same_list(expected: str, gold: MathAnswer, text: str, answer: MathAnswer) -> bool:
    """Compare a list with a number whose commas may rather separate items: 123,456 with
    123, 456. An expected number is taken for a list only if that has three items or
    more: 12,345 is a number. text, expected: as answer and gold are written.
    """
    if isinstance(gold, Listing) and GROUPS.fullmatch(text.strip(" $.")):
        listed_answer = reading(text.replace(",", ", ")).answer
        return listed_answer is not None and equal(gold, listed_answer)
    if isinstance(answer, Listing) and GROUPS.fullmatch(expected.strip(" $.")):
        listed_gold = reading(expected.replace(",", ", ")).answer
        if isinstance(listed_gold, Listing) and len(listed_gold.items) > 2:
            return equal(listed_gold, answer)
    return False


def _same_decimal(text: str, gold: MathAnswer) -> bool:
    """Return whether this is the expected decimal with a comma: 1,5 for 1.5."""
    if not DECIMAL_COMMA.fullmatch(text.strip(" $.")):
        return False
    decimal = reading(text.replace(",", ".")).answer
    is_decimal = isinstance(gold, Expression) and not gold.unit
    return is_decimal and decimal is not None and equal(gold, decimal)
