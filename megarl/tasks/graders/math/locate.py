r"""Which part of a text is its answer.

    <answer>…</answer>              the last one, and in it what follows
    \boxed{…}                       the last one; several with hardly a word between
                                    them are a list
    Answer: …  #### …               the last answer line
    nothing but a formula           all of it
    … $…$ …                         the last formula in dollars
    … 85 …                          the last number or formula of the prose

Only a box, an answer line and a lone formula may hold what has still to be computed;
from prose only a value counts.
"""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megarl.tasks.graders.math import names
from megarl.tasks.graders.math.boxes import (
    DOLLARS,
    OPENED,
    Excerpt,
    boxed,
    has_closed_box,
    last_list,
)
from megarl.tasks.graders.math.layout import UNICODE, without_emphasis


class AnswerPlace(Enum):
    """Where an answer stands, which says how much is believed."""

    BOX = "box"
    LINE = "line"
    ALONE = "alone"
    PROSE = "prose"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that states the answer. preceding, following: what else stands in its
    sentence, in prose.
    """

    text: str
    place: AnswerPlace
    preceding: str = ""
    following: str = ""


LONGEST_LINE = 2_000
LONGEST_SENTENCE = 400
"""Characters on each side of a value that may deny it."""
MOST_PROSE = 20_000
"""Characters at the end of a long answer in which a formula is looked for."""
LINE = re.compile(
    r"(?im)(?:^|(?<=[.!?* \t]))[*_#> \t]{0,8}(?:(?:the|final|correct|right|my|so|thus)["
    r" \t]{1,3}){0,4}"
    r"(?:final[ \t]{1,3}answer|answer|ans)(?:[ \t]{1,3}(?:choice|option))?[*_]{0,3}["
    r" \t]{0,3}:[*_\s]*"
    r"|####[ \t]*|答案(?:是|为|為)?[:：]?"
)
SENTENCE = re.compile(
    r"(?i)\b(?:answer|correct\s{1,3}(?:choice|option))(?:\s{1,3}(?:to|for|of)\b[^.\n:$\\\d]{0,60}?)?[*_]{0,3}\s{1,3}"
    r"(?:is|are|equals|will be|must be|should be)(?![A-Za-z])"
    r"(?:\s{1,3}(?:therefore|thus|simply|clearly|just|then|indeed|hence|exactly|equal"
    r" to|option|choice)){0,3}[:\s*_}]*"
)
LETTER_IS_CORRECT = re.compile(
    r"(?i:\b(?:option|choice|answer))\s*\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right)"
)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
STOP = re.compile(r"[.!?;](?=\s|$)|\n\s*\n")
CLAUSE = re.compile(
    r",?\s{1,3}(?:because|since|as|so|which|where|and\s+not|but|not|i\.e\.|that|when|if|after|rounded|assuming|given)\b"
    r"|,\s{1,3}(?=[a-z]{3,})|\s\("
)
APPROXIMATION = re.compile(
    r"(?i)[\s,(]*(?:which\s+is\s+)?(?:approximately|about|roughly|≈)\s+\$?(-?[\d.,]*\d)"
)
OFFERS_ANOTHER = re.compile(
    r"(?i)^\W*(?:or|alternatively|otherwise|else|perhaps|maybe|possibly|probably)\b.{0,40}?[\d$\\]"
    r"|\bthen\s+\W*\d|\bbut\s+(?:many|some|others?|maybe|perhaps)\b|^[*_\s]*\?|\bif\b.*\b(?:otherwise|else)\b"
)
"""What behind an answer offers another one, or a condition."""
SUPPOSED = re.compile(
    r"(?i)\b(?:let|when|if|suppose|assume|assuming|whether)\b[^,]*$"
    r"|\b(?:no|anything\s+but|all\s+but|nowhere\s+near|far\s+from)\s*\W*$"
    r"|\b(?:divid|multipl)\w*\s+(?:\w+\s+){0,2}by\s*\W*$|\b(?:could|might|may)\s+be\s*\W*$"
    r"|\b(?:perhaps|maybe|possibly|probably|either)\b[^,.:;=]{0,30}$|(?:^|\s)\d+\.\s*$"
)
"""What before a number in prose says that it is no answer."""
DENIED = re.compile(
    r"(?i)\W*(?:is|are)\s+(?:not|excluded|wrong|impossible|incorrect|rejected)\b|.*\?\s*$"
)
OPENING_BRACKET = re.compile(r"[({\[]")
CLOSING_BRACKET = re.compile(r"[)}\]]")
ENUMERATED = re.compile(r"(?:\d+[.)]\s*(?:[A-Za-z]\s+)?){2,}")
RESTATED = re.compile(r",?\s{0,2}\(?i\.e\.[^.;!?]*")
FOREIGN = re.compile("([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+)")
BULLET = re.compile(r"^\s*(?:[-•*>]\s+)(?=[\d\\$(\[A-Za-z])")


def passages(answer: str) -> Iterator[Passage]:
    """Iterate over readings of the place that states the answer; the first that can be
    read counts.
    """
    if "<answer>" in answer:
        answer = answer.rpartition("<answer>")[2].partition("</answer>")[0]
    if OPENED.search(answer):
        yield from _readings_of_box(boxed(answer) or "")
        return
    line = answer_line(answer)
    if line is not None:
        yield from _readings_of_line(line)
        return
    yield from _readings_of_prose(answer)


def _readings_of_box(content: str) -> Iterator[Passage]:
    """Iterate over a box's content, and over what follows a mark such as `Answer:` in
    it.
    """
    yield Passage(content, AnswerPlace.BOX)
    line = answer_line(content)
    if line is not None:
        yield Passage(line, AnswerPlace.BOX)


def has_complete_answer(text: str) -> bool:
    """Return whether a text that was cut off states its answer completely.

    It does in a closed box, in `<answer>…</answer>`, or in an answer line that has
    ended.
    """
    if "<answer>" in text:
        return "</answer>" in text.rpartition("<answer>")[2]
    if OPENED.search(text):
        return has_closed_box(text)
    match = _last(LINE, text) or _last(SENTENCE, text)
    if match is None:
        return False
    following = text[match.end() :].lstrip()
    first_line, line_end, _ = following.partition("\n")
    return bool(first_line.strip() and line_end)


def answer_line(text: str) -> str | None:
    """Return what follows the mark of the last answer line, None if there is no such
    line.
    """
    match = _last(LINE, text) or _last(SENTENCE, text)
    if match is None:
        letter = _last(LETTER_IS_CORRECT, text)
        return letter[1] if letter else None
    line = text[match.end() :].lstrip(" \t\n:*_")
    return without_emphasis(line[:LONGEST_LINE]).strip(" *_`").rstrip(" .*_`")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _readings_of_line(line: str) -> Iterator[Passage]:
    """Iterate over what an answer line may state: its paragraph, line, sentence,
    clause, or a value in it.
    """
    paragraph = re.split(r"\n\s*\n", line)[0]
    first_line = line.split("\n")[0]
    sentence = STOP.split(first_line)[0]
    clause = CLAUSE.split(sentence)[0]
    yield Passage(without_emphasis(paragraph), AnswerPlace.LINE)
    for text in dict.fromkeys((first_line, sentence, clause)):  # each different one
        remainder = first_line[len(text) :]
        approximation = APPROXIMATION.match(remainder)
        if approximation:
            text = f"{text} \\approx {approximation[1]}"
        elif OFFERS_ANOTHER.search(remainder):
            return
        yield Passage(without_emphasis(text), AnswerPlace.LINE)
    if not OFFERS_ANOTHER.search(sentence):
        yield from _values(sentence)


def _readings_of_prose(answer: str) -> Iterator[Passage]:
    """Iterate over what an answer without a mark may state: all of it, if it is short,
    or the last value in it.
    """
    stripped = answer.strip()
    if len(stripped) <= LONGEST_LINE:
        yield Passage(without_emphasis(BULLET.sub("", stripped)), AnswerPlace.ALONE)
    yield from _values(stripped[-MOST_PROSE:])


def _values(text: str) -> Iterator[Passage]:
    """Iterate over the last formula in dollars or, if there are none, the last number
    or formula in the words: one passage, or none if the text does not state it.
    """
    formulas = [_span(match) for match in DOLLARS.finditer(text)]
    if formulas:
        passage = _last_in_dollars(text, formulas)
    else:
        passage = _last_in_words(RESTATED.sub("", text))
    is_enumeration = ENUMERATED.fullmatch(text.strip()) is not None  # `1. 2. 3.`
    if passage is not None and not is_enumeration and not _is_doubtful(passage):
        yield passage


def _is_doubtful(passage: Passage) -> bool:
    """Return whether the sentence asks, supposes or denies rather than states."""
    is_supposed = SUPPOSED.search(passage.preceding) is not None
    return is_supposed or DENIED.match(passage.following) is not None


def _span(match: re.Match[str]) -> Excerpt:
    """Return what a match of DOLLARS found: the formula, with the marks' positions."""
    text = next(group for group in match.groups() if group is not None)
    return Excerpt(text, match.start(), match.end())


def _last_in_dollars(text: str, formulas: list[Excerpt]) -> Passage | None:
    """Return the last formula in dollars, with those before it in the same list; None
    if the words around it do not leave it as it is. formulas: all in the text.
    """
    listed = last_list(text, formulas, may_touch=False)
    prefix = text[: listed[0].start]
    suffix = text[listed[-1].end :]
    if not _may_stand(prefix.split(), suffix.split()):
        return None
    return Passage(
        ", ".join(span.text for span in listed),
        AnswerPlace.PROSE,
        _sentence_before(prefix),
        _sentence_behind(suffix),
    )


def _may_stand(prefix: list[str], suffix: list[str]) -> bool:
    """Return whether the words around a value leave it as it is: not `at least 5`, not
    `5 million`.
    """
    return _may_follow(prefix) and _may_precede(suffix)


def _may_follow(prefix: list[str]) -> bool:
    """Return whether a value may stand behind these words: not behind `at least`, `half
    of` or `from 3 to`.
    """
    words = [word.strip("*_(,.;:\"'").lower() for word in prefix[-4:]]
    last = words[-1] if words else ""
    if last in names.BEFORE or names.NEGATIONS & set(words[-3:]):
        return False
    if last == "of" and len(words) > 1 and words[-2] not in names.TOTALS:
        return False
    is_end_of_range = last == "to" and "from" in words
    return not is_end_of_range


def _may_precede(suffix: list[str]) -> bool:
    """Return whether a value may stand before these words: not before `million`, nor
    `and a half`. Of Chinese words the first character decides.
    """
    words = [word.strip(".,;:!?*_)\"'").lower() for word in suffix[:3]]
    if not words:
        return True
    first_character = suffix[0][0]
    considered = {words[0], first_character}
    if words[0] == "and":
        considered.update(words)
    return not names.AFTER & considered


def _last_in_words(text: str) -> Passage | None:
    """Return the last run of words that belong to a formula; None if there is none, or
    the words around it do not leave it as it is.
    """
    words = _words(FOREIGN.sub(r" \1 ", text))
    run = _last_run(words)
    if run is None:
        return None
    start = run.start
    end = run.stop
    while start < end and (_is_joint(words[start]) or words[start] == "*"):
        start += 1
    while end > start and _is_joint(words[end - 1]):
        end -= 1
    if not _may_stand(words[:start], words[end:]):
        return None
    last_word = words[end - 1]
    ends_sentence = re.search(r"[.!?]\*{0,2}$", last_word) is not None
    if not ends_sentence:
        following = _sentence_behind(" ".join(words[end:]))
    else:
        following = "?" if "?" in last_word else ""
    value = " ".join(words[start:end]).strip(" ,;:?*_\"'").rstrip(" .,;:?*_")
    return Passage(value, AnswerPlace.PROSE, _sentence_before(" ".join(words[:start])), following)


def _last_run(words: list[str]) -> range | None:
    """Return the places of the last words side by side of which one shows that they are
    a formula; None if there are none.
    """
    end = len(words)
    while end:
        start = end
        while start and _continues(words, start, end):
            start -= 1
        if any(is_strong(word) for word in words[start:end]):
            return range(start, end)
        end = min(start, end - 1)  # before this run, or one word back if it is empty
    return None


def _sentence_before(text: str) -> str:
    """Return the beginning of the sentence that a text ends in."""
    return SENTENCE_END.split(text[-LONGEST_SENTENCE:])[-1]


def _sentence_behind(text: str) -> str:
    """Return the rest of the sentence that a text begins in."""
    text = text[:LONGEST_SENTENCE]
    match = SENTENCE_END.search(f"{text} ")  # the blank ends a sentence at the text's end
    return text[: match.end()] if match else text


def _words(text: str) -> list[str]:
    """Split at white space outside of brackets. One that is not closed in its line, or
    within LONGEST_LINE characters, counts as closed there.
    """
    words: list[str] = []
    depth = 0  # open brackets
    for word in re.findall(r"\S+|\n", text):
        if word == "\n":
            depth = 0
            continue
        if depth > 0 and words:
            words[-1] += f" {word}"
        else:
            words.append(word)
            depth = 0
        depth += len(OPENING_BRACKET.findall(word)) - len(CLOSING_BRACKET.findall(word))
        if len(words[-1]) > LONGEST_LINE:
            depth = 0
    return words


def _continues(words: list[str], start: int, end: int) -> bool:
    """Return whether the word before `start` belongs to the run of words up to
    `end`.
    """
    word = words[start - 1]
    run_is_empty = start == end
    if not run_is_empty and re.search(r"[.;:!?]\*{0,2}$", word):
        return False  # it ends a sentence before the run
    if _is_joint(word):  # it belongs to the run between two parts of a formula
        return not run_is_empty and start > 1 and is_formula_word(words[start - 2])
    return is_formula_word(word)


def _is_joint(word: str) -> bool:
    return word.lower() in ("and", "or")


LETTERS = re.compile(r"(?<!\\)(?<![A-Za-z\\])[A-Za-z]{2,}")
OPERATORS = re.compile(r"[-+*/=<>^|±×·÷≈≤≥≠∈∪]+")


def _bare(word: str) -> str:
    return word.strip(".,;:!?*_\"'`")


def is_formula_word(word: str) -> bool:
    """Return whether a word between blanks may be part of a formula: a number, a
    command, an operator, or a letter that is no word (a, A, I).
    """
    bare = _bare(word)
    if word == "*":
        return True
    if not bare:
        return False
    if OPERATORS.fullmatch(word) or OPERATORS.fullmatch(bare):
        return True
    if len(bare) == 1 and bare.isalpha() and bare.isascii():
        return bare not in "aAI"
    return is_strong(word)


def is_strong(word: str) -> bool:
    """Return whether a word shows by itself that it is part of a formula: by a digit or
    a command, and no letters side by side but names, units and pairs of variables.
    """
    bare = re.sub(r"\\(?:text|mathrm|operatorname|textbf|begin|end)\s*\{[^{}]*\}", "", _bare(word))
    spelled = bare.translate(UNICODE)
    if not re.search(r"\d|\\[A-Za-z]+", spelled):
        return False
    words = LETTERS.findall(re.sub(r"\\[A-Za-z]+", " ", spelled))
    return all(_is_name(letters) for letters in words)


def _is_name(letters: str) -> bool:
    """Return whether letters side by side may stand in a formula: a function, a unit,
    or two letters that make no ordinal of the number before them (1st).
    """
    lower = letters.lower()
    if letters in names.FUNCTIONS or lower in names.UNITS or letters == "pi":
        return True
    return len(letters) < 3 and lower not in {"st", "nd", "rd", "th"}
