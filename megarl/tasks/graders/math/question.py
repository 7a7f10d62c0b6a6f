"""What the question says about its answers.

repeated     a formula of the question is no answer, unless it is the expected one:
             2x + 3 = 13
computed     "What is 30 + 27?" takes a value alone, not 20 + 37
form         "Write 0.75 as a fraction" does not take 0.75
options      of "(A) 10 (B) 12" the answer "(A) 12" has the wrong letter
unit         "How many minutes" does not take 90 hours
kind         "Find the vertex" does not take an interval
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megarl.tasks.graders.math import names
from megarl.tasks.graders.math.answers import formulas_in, named, relations_in
from megarl.tasks.graders.math.boxes import DOLLARS
from megarl.tasks.graders.math.compare import equal
from megarl.tasks.graders.math.equality import Equality
from megarl.tasks.graders.math.evaluation import Budget, TooMuchWork
from megarl.tasks.graders.math.formulas import Apply, Formula, integer, symbols
from megarl.tasks.graders.math.kinds import (
    Bracket,
    Expression,
    Labelled,
    Listing,
    MathAnswer,
    RealInterval,
    Relation,
)
from megarl.tasks.graders.math.layout import plain
from megarl.tasks.graders.math.locate import OPERATORS, AnswerPlace, Passage, is_formula_word
from megarl.tasks.graders.math.readings import TextReading, reading
from megarl.tasks.graders.math.realsets import ORDERS
from megarl.tasks.graders.math.tokens import CannotRead, spelled
from megarl.tasks.graders.math.values import all_values, canonical, has_steps_left

LONGEST_PROMPT = 20_000
MOST_FORMULAS = 100
SHORT_PROMPT = 400
"""Characters of a prompt that asks for one computation in words."""
FEWEST_WORDS_REPEATED = 3
ARITHMETIC = re.compile(
    r"(?:[(\d{]|\\(?:frac|sqrt|left|binom)(?![A-Za-z]))"
    r"(?:[\d.,()+\-*/^×·÷−{}! \t]|\\(?:times|cdot|div|frac|sqrt|left|right|binom)(?![A-Za-z]))*"
)
"""A run of numbers and signs in a prompt without dollars."""
COMPUTATION_IN_WORDS = re.compile(
    r"(?i)\b(?:plus|minus|times|sum|product|difference|quotient|multipl\w+|divided?|add|subtract|squared|cubed"
    r"|square\s+root|cube\s+root|factorial|percent\s+of)\b|%\s+of\b"
)
FORM = re.compile(
    r"(?i)\bas\s+an?\s+(?:\w+\s+){0,2}(?:fraction|decimal|percent|percentage|mixed\s+number|logarithm|product|power)\b"
    r"|\bscientific\s+notation|\bfactor(?:ize|ise|ization|isation)?\b|\bexpand\b|\brationali[sz]e|\bsimplify\b"
    r"|\b(?:vertex|standard|slope-intercept)\s+form\b|\bin\s+base\b|\bpartial\s+fractions\b"
)
OPTION = re.compile(r"\(([A-J])\)|(?<![A-Za-z\d])([A-J])[.):](?=\s)")
AROUND_OPTION = re.compile(r"\\text(?:bf|rm)?\s*\{\s*$|^\s*\}|\\qquad|\\quad|\\ ")
HOW_MANY = re.compile(r"(?i)\bhow\s+(?:many|much)((?:\s+[A-Za-z]+){1,4})(?!\s*(?:/|\^))")
IN_UNITS = re.compile(r"(?i)\bin\s+(square\s+|cubic\s+)?([A-Za-z]+)\b(?!\s*(?:/|per\b|and\b|\^))")
SQUARE_OR_CUBIC = {"square": "^2", "cubic": "^3"}
NO_NOUNS = frozenset({"does", "is", "was", "has"})
COUNT = "count"
"""What "how many apples" asks for: no measure."""
ASKED_PERCENT = re.compile(r"(?i)\b(?:what|which)\s+percent|\bpercentage\b|\bas\s+a\s+percent")
PERCENT = re.compile(r"(?i)percent|%")
POINT = re.compile(
    r"(?i)\b(?:find|what\s+(?:is|are)|determine|compute|give|state)\s+(?:\w+\s+){0,3}"
    r"(?:points?|vertex|vertices|intersections?|coordinates|ordered\s+pairs?|cent(?:er|re))\b"
)
INTERVAL = re.compile(r"(?i)\bintervals?\b")
ASKED_LETTER = re.compile(
    r"(?i:\b(?:find|solve\s+for|the\s+value\s+of)\s+)\$?([a-z])\$?\s*(?=[.?,]|$)"
)
CUE = re.compile(
    r"(?i)[=:]\s*\W*$|\b(?:is|are|was|were|be|equals?|get|gets|gives?|totals?|makes?|leaves?|left|answer|therefore|so"
    r"|thus|hence|obtain|have\s+left|only|remain\w*)\b[^.!?]{0,60}$"
)
MEASURES = frozenset(names.UNITS.values()) - {"unit"}


@dataclass(frozen=True)
class PromptReading:
    """What is read in a prompt once for all its answers.

    spelling: its tokens as one text; statements: its formulas in canonical form;
    constants: what it has to compute; options: letter ─► what it stands for; unit: the
    unit asked for, "" for none.
    """

    text: str
    spelling: str
    statements: frozenset[str]
    constants: tuple[Formula, ...]
    options: dict[str, TextReading]
    unit: str

    def contains(self, spelling: tuple[str, ...] | None) -> bool:
        """Return whether a text stands in the prompt, layout aside."""
        return spelling is not None and _as_one_text(spelling) in self.spelling


@lru_cache(maxsize=64)
def question_in(prompt: str) -> PromptReading:
    """Read a prompt."""
    text = prompt[-LONGEST_PROMPT:]
    answers = list(_formulas_of(text))
    statements = frozenset(str(canonical(answer)) for answer in answers)
    constants = tuple(dict.fromkeys(_constants_of(answers)))
    return PromptReading(
        text, _spelling_of(text), statements, constants, _options_of(text), _unit_asked(text)
    )


def permits(prompt: str, gold: TextReading, candidate: TextReading, passage: Passage) -> bool:
    """Return whether an answer may count for this question, whatever its value."""
    assert gold.answer is not None
    assert candidate.answer is not None
    if passage.place is AnswerPlace.PROSE and has_steps_left(candidate.answer):
        return False
    if not prompt:
        return True
    question = question_in(prompt)
    return (
        not _repeats(question, gold.answer, candidate)
        and _is_computed(question, gold.answer, candidate.answer)
        and _fits_options(question, candidate.answer)
        and _has_unit_asked(question, gold.answer, candidate.answer)
        and _is_of_kind_asked(question, candidate.answer)
        and is_believed(prompt, candidate, passage)
    )


def repeats_prompt(answer: str, prompt: str) -> bool:
    """Return whether an answer of several words is a part of the prompt, white space
    aside.
    """
    words = answer.split()
    return len(words) >= FEWEST_WORDS_REPEATED and " ".join(words) in " ".join(prompt.split())


def _repeats(question: PromptReading, gold: MathAnswer, candidate: TextReading) -> bool:
    """Return whether an answer is a formula of the question rather than the expected
    one.
    """
    assert candidate.answer is not None
    answer = candidate.answer
    if canonical(answer) == canonical(gold):
        return False
    asks_for_form = FORM.search(question.text) is not None
    if asks_for_form and question.contains(candidate.spelling):
        return True
    if _is_plain(answer) or not _is_stated(question, answer):
        return False
    if isinstance(answer, Relation) and set(answer.signs) == {"="}:
        if all_values(answer.sides[-1]):
            return named(answer).value is answer  # `f(2) = 5` is a result all the same
    return True


def _is_stated(question: PromptReading, answer: MathAnswer) -> bool:
    """Return whether an answer, or each item of it, stands in the question."""
    if str(canonical(answer)) in question.statements:
        return True
    if isinstance(answer, Listing) and answer.bracket is Bracket.NONE:
        return all(_is_stated(question, item) for item in answer.items)
    return False


def _is_plain(answer: MathAnswer) -> bool:
    """Return whether an answer consists of values, and of letters alone with signs
    between them.
    """
    relations = list(relations_in(answer))
    if not relations:
        return all_values(answer) or isinstance(answer, Labelled)
    sides = [side for relation in relations for side in relation.sides]
    return all(all_values(side) or _is_letter(side) for side in sides)


def _is_letter(side: MathAnswer) -> bool:
    """Return whether a side is a variable alone."""
    if not isinstance(side, Expression) or len(symbols(side.formula)) != 1:
        return False
    return not isinstance(side.formula, Apply)


def _is_computed(question: PromptReading, gold: MathAnswer, answer: MathAnswer) -> bool:
    """Return whether an answer is a value, if the question asks to compute the expected
    one. A short question may do so in words, others in a formula of this value.
    """
    if not all_values(gold) or all_values(answer):
        return True
    value = named(gold).value
    if any(symbols(formula) for formula in formulas_in(value)):
        return True
    if canonical(gold) == canonical(answer):
        return True
    if len(question.text) <= SHORT_PROMPT and COMPUTATION_IN_WORDS.search(question.text):
        return False
    return not isinstance(value, Expression) or not _computes(question, value.formula)


def _computes(question: PromptReading, value: Formula) -> bool:
    """Return whether a computation of the question has this value."""
    return any(_same(value, constant) for constant in question.constants)


def _same(first: Formula, second: Formula) -> bool:
    """Return whether two formulas are equal; False if that takes too much work."""
    try:
        return Equality(Budget()).same(first, second)
    except (TooMuchWork, RecursionError):
        return False


def _fits_options(question: PromptReading, answer: MathAnswer) -> bool:
    """Return whether a letter and the value behind it are one option."""
    if not isinstance(answer, Labelled) or answer.value is None:
        return True
    option = question.options.get(answer.letter)
    if option is None or option.answer is None:
        return True
    return equal(option.answer, answer.value)


def _has_unit_asked(question: PromptReading, gold: MathAnswer, answer: MathAnswer) -> bool:
    """Return whether an answer's unit fits the question. It does if one of the two is
    no formula, if the answer has no unit, or if the expected answer has one, since the
    comparison judges that.
    """
    gold = named(gold).value
    answer = named(answer).value
    if not isinstance(gold, Expression) or not isinstance(answer, Expression):
        return True
    # If percent are asked for, 50 and 50 % are the same.
    if question.unit == "percent" and "percent" in (gold.unit, answer.unit):
        return gold.unit in ("", "percent") and _same(gold.formula, answer.formula)
    if gold.unit or not answer.unit:
        return True
    # 50 % counts for 1/2 if the question names neither a unit nor percent.
    if answer.unit == "percent" and not PERCENT.search(question.text):
        hundredth = Apply("/", (answer.formula, integer(100)))
        return question.unit == "" and _same(gold.formula, hundredth)
    parts = set(answer.unit.split())
    # The measure asked for may be squared or cubed ("meter^2").
    if question.unit.partition("^")[0] in MEASURES:
        return question.unit in parts or {question.unit, answer.unit} == {"degree", "celsius"}
    return not question.unit or not parts & MEASURES


def _is_of_kind_asked(question: PromptReading, answer: MathAnswer) -> bool:
    """Return whether an answer is no interval or inequality where only a point is asked
    for, no point where only an interval is, and has no other letter than the one asked
    for.
    """
    asks_for_point = POINT.search(question.text) is not None
    asks_for_interval = INTERVAL.search(question.text) is not None
    relations = list(relations_in(answer))
    if asks_for_point and not asks_for_interval:
        has_order = any(set(relation.signs) & ORDERS for relation in relations)
        if has_order or isinstance(answer, RealInterval):
            return False
    if asks_for_interval and not asks_for_point:
        if any(isinstance(relation.sides[0], Listing) for relation in relations):
            return False
    letter = ASKED_LETTER.search(question.text)
    name = named(answer).name
    if letter is None or name is None:
        return True
    is_letter = len(name) == 1 and name.islower()
    return not is_letter or name == letter[1]


def is_believed(prompt: str, candidate: TextReading, passage: Passage) -> bool:
    """Return whether an answer in prose, if the question has it too, is stated as a
    result there rather than repeated. Other answers are believed.
    """
    if not prompt or passage.place is not AnswerPlace.PROSE:
        return True
    question = question_in(prompt)
    if not question.contains(candidate.spelling):
        return True
    return CUE.search(passage.preceding) is not None or "=" in passage.text


def _formulas_of(text: str) -> Iterator[MathAnswer]:
    """Iterate over the formulas of a prompt, and over the items and sides of those."""
    texts = [next(filter(None, match.groups())) for match in DOLLARS.finditer(text)]
    texts += [match[0] for match in ARITHMETIC.finditer(text)]
    texts += _runs(text)
    for formula_text in list(dict.fromkeys(texts))[-MOST_FORMULAS:]:
        trimmed = formula_text.strip(" .=?,:;\n")
        if len(trimmed) < 2:
            continue
        answer = reading(trimmed).answer
        if answer is not None:
            yield from _with_parts(answer)


def _with_parts(answer: MathAnswer) -> Iterator[MathAnswer]:
    """Iterate over an answer, the items of its lists and the sides of its relations."""
    yield answer
    if isinstance(answer, Listing) and answer.bracket is Bracket.NONE:
        for item in answer.items:
            yield from _with_parts(item)
    if isinstance(answer, Relation):
        yield from answer.sides


def _runs(text: str) -> list[str]:
    """Return the runs of words that belong to formulas, outside of dollars. Any other
    word ends a run, as a line break in the place of each formula in dollars does.
    """
    runs: list[str] = []
    run_words: list[str] = []
    for word in DOLLARS.sub(" \n ", text).split(" "):
        if word and (is_formula_word(word) or OPERATORS.fullmatch(word) or word.startswith("\\")):
            run_words.append(word)
            continue
        runs.append(" ".join(run_words))
        run_words = []
    runs.append(" ".join(run_words))
    return [run for run in runs if run]


def _constants_of(answers: list[MathAnswer]) -> Iterator[Formula]:
    """Iterate over the computations of a prompt: formulas without letters that are no
    values.
    """
    for answer in answers:
        if not isinstance(answer, Expression) or symbols(answer.formula):
            continue
        if not all_values(answer):
            yield answer.formula


def _spelling_of(text: str) -> str:
    """Return a prompt's tokens as one text, with a line break for each line that has no
    tokens of mathematics.
    """
    words: list[str] = []
    for line in text.split("\n"):
        try:
            words += spelled(plain(line))
        except CannotRead:
            words.append("\n")
    return _as_one_text(tuple(words))


def _as_one_text(spelling: tuple[str, ...]) -> str:
    """Return tokens as a text in which other such texts are found at whole tokens;
    braces and multiplication signs do not count.
    """
    return "\0" + "\0".join(word for word in spelling if word not in "{}*") + "\0"


def _options_of(text: str) -> dict[str, TextReading]:
    """Return the options of a prompt, letter ─► what it stands for; {} unless there are
    two or more, from A on in the order of the alphabet.
    """
    matches = list(OPTION.finditer(text))
    letters = [match[1] or match[2] for match in matches]
    if "".join(letters) != "ABCDEFGHIJ"[: len(letters)] or len(letters) < 2:
        return {}
    ends = [match.start() for match in matches[1:]] + [len(text)]
    options = {}
    for letter, match, end in zip(letters, matches, ends, strict=True):
        option = text[match.end() : end].split("\n")[0]
        option = AROUND_OPTION.sub(" ", AROUND_OPTION.sub(" ", option)).strip(" $,;.")
        options[letter] = reading(option)
    return options


def _unit_asked(text: str) -> str:
    """Return the measure that the last question of a prompt asks for, COUNT, or "" if
    it names none.
    """
    if ASKED_PERCENT.search(text):
        return "percent"
    units = []  # with their positions
    for match in HOW_MANY.finditer(text):
        units.append((match.start(), _unit_counted(match[1].lower().split())))
    for match in IN_UNITS.finditer(text):
        measure = _measure(match[2])
        if measure and (match[2].endswith("s") or len(match[2]) < 3):
            power = SQUARE_OR_CUBIC.get((match[1] or "").strip().lower(), "")
            units.append((match.start(), measure + power))
    _, unit = max(units, default=(0, ""))
    return unit


def _unit_counted(words: list[str]) -> str:
    """Return the measure among the words behind "how many", "meter^2" for square
    meters; COUNT for a noun, "" if that is not clear. words: in small letters.
    """
    for number, word in enumerate(words):
        measure = _measure(word)
        if measure:
            if words[number + 1 : number + 2] in (["per"], ["and"]):
                return ""  # of a quotient of units, or of two
            power = ""
            if number:
                power = SQUARE_OR_CUBIC.get(words[number - 1], "")
            return measure + power
        if word in names.NOUNS:
            return COUNT
    is_plural = words[0].endswith("s") and words[0] not in NO_NOUNS
    return COUNT if is_plural else ""


def _measure(word: str) -> str:
    """Return the standard form of a unit's name, "" if the word is none, or is rather
    one of these words of prose.
    """
    if word.lower() in ("in", "cup", "second", "unit", "units"):
        return ""
    return names.UNITS.get(word) or names.UNITS.get(word.lower()) or ""
