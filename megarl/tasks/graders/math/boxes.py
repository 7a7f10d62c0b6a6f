r"""What a text says in its boxes.

\boxed{5}                     5
\boxed{3}, \boxed{4}          a list
2 \cdot \boxed{5}             the whole formula around the box
x = \boxed{5} cm             5: a name before it and words around it say nothing else
not \boxed{5}, \boxed{5} or 6  nothing
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from megarl.tasks.graders.math import names
from megarl.tasks.graders.math.compare import equal
from megarl.tasks.graders.math.readings import reading

BOX = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*\{|\\(?:boxed|fbox)(?![a-zA-Z])\s*([^\s{$]+)|\\.|[{}]",
    re.DOTALL,
)
OPENED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
BETWEEN = re.compile(r"\$|\\[()\[\]]|\\(?:quad|qquad|text|mathrm|,|;|:| )|[{}*~\s]")
JOINED = re.compile(r"(?:[,;]?(?:and|or)?|&)(?P<name>[A-Za-z](?:_\w+)?=)?")
NAME_BEFORE = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?)\s*=\s*(?:\$|\\[(\[])?\s*$")
DOLLARS = re.compile(
    r"\$\$(.{1,2000}?)\$\$|(?<!\\)\$(?![\s$])([^$]{0,2000}?[^$\s\\])\$(?!\d)"
    r"|\\\[(.{1,2000}?)\\\]|\\\((.{1,2000}?)\\\)",
    re.DOTALL,
)

SPACING = re.compile(
    r"\\[,;:! ]|~|\\(?:displaystyle|quad|qquad|left|right|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])"
)
SEPARATOR = re.compile(
    r"\\\\|&|\\(?:text|mathrm|textbf)\s*\{[^{}]*\}|\\(?:Rightarrow|implies|therefore|to|rightarrow|iff|Longrightarrow"
    r"|longrightarrow|in|colon)(?![A-Za-z])|[;:→⇒∴]|\\(?:begin|end)\s*\{\w+\*?\}(?:\{\w+\})?"
)
"""What parts formulas within dollars."""
OPENING = re.compile(
    r"(?:\\(?:mathbf|text|textbf|mathrm|underline|boldsymbol|bm|textcolor\s*\{\w+\}|color\s*\{\w+\})\s*\{"
    r"|(?<![A-Za-z0-9}^_\s])\{|^\{)\s*$"
)
"""A brace before a box that only sets its type."""
END_OF_TEXT = re.compile(r"\s*<[/|].*$")
"""A token that ends a text, as models write it out: `</s>`, `<|im_end|>`."""
ARROW = re.compile(r"(?:[=-]+>|→|⇒)\s*$")
EMPHASIS = re.compile(r"(?:\*\*|__|(?:(?<=\s)|^)[*_\"'(\[])+$")
BULLET_ALONE = re.compile(r"\s*(?:[-+*>•]|\d+[.)])\s+")
ENDS_BEFORE_BOX = re.compile(r"(?:[=≈]|\\approx|\\sim|\\in)\s*$")
"""What may stand before a box within a formula."""
OPERATOR = r"[-+*/^<>±×·÷≤≥≠√_−]|\\(?:cdot|times|div|ast|pm|mp|neq?|leq?|geq?|lt|gt|sqrt|frac|log|ln|sin|cos|tan)(?![A-Za-z])"
LEFT_OF_LINE = re.compile(rf"(?:{OPERATOR})\s*[({{]?\s*$|[\w)\]}}{{]$")
"""What belongs to a box that follows it in a line without dollars."""
SCALE = rf"(?:{'|'.join([*names.SCALES, 'dozen', 'squared', 'cubed', 'factorial', 'percent'])})\b"
RIGHT_OF_LINE = re.compile(
    rf"[\w^_/%°]|[.:,]\d|\s*(?:[+*/^=<>×·÷≤≥≠±≈%°]|-\s*\d|\\(?:%|approx|pi|equiv)|{OPERATOR.partition('|')[2]}"
    rf"|\\(?:text|mathrm)\s*\{{\s*{SCALE}|{SCALE})"
)
NO_FORMULA = r"\\(?:text|mathrm|textbf|blacksquare|square|Box|checkmark|qed|tag)(?![A-Za-z])"
RIGHT_OF_FORMULA = re.compile(
    rf"(?:\\(?:text|mathrm)\s*\{{\s*)?{SCALE}|(?!{NO_FORMULA}|[.,;:]\s*$|[.;](?!\d)|,(?!\s*[\d\\(]))\S"
)
EXCLAMATION = re.compile(r"[A-Za-z]{2,}[^A-Za-z]*$")
RUN_BEFORE = re.compile(r"(?:(?<=\s)|^)(?![A-Za-z]{2,}\s)[^\s]+(?:\s+[^\sA-Za-z]\S*)*\s*$")
DENIED_BEFORE = re.compile(
    r"(?i)\b(?:(?:not|isn't|never|cannot\s+be|can't\s+be|unlike)\s+(?:\w+\s+)?|(?:or|nor|either|twice|double)\s+"
    r"|(?:less|more|greater|fewer)\s+than\s+|half\s+of\s+|or\s*\}\s*)[$\\(\[*\s]*$"
)
DENIED_BEHIND = re.compile(
    r"(?i)[\s$\\)\]*_,]*(?:is\s+(?:not|wrong|incorrect|excluded)\b|isn't\b|cannot\s+be\b|\?|\(?(?:perhaps|maybe)\s"
    r"|\(?or\s+(?:perhaps|maybe|possibly)\b)"
)
OTHER_BEHIND = re.compile(
    r"(?:[\s$\\)\]*_,]|\\text\s*\{)*\(?or(?:\s|\}|\\)+(?=[$\\(\d-])(?P<other>\S+)"
)
"""Another answer behind the box: `or 6`."""
OFFERED = re.compile(
    r"(?i)\bor\b[^.]{0,15}$|\b(?:either|might|could|maybe|perhaps|probably|possibly|alternatively)\b"
)
CLOSING_BRACE = re.compile(r"^\s*\}")
CLOSING_EMPHASIS = re.compile(r"^(?:\*\*|__|[*_\"')\]](?=\s|$|[.,]))+")
END_OF_FORMULA = re.compile(r"\\\\|&|\\(?:Rightarrow|implies|end|qquad|quad)(?![A-Za-z])|[;→⇒]")
END_OF_RUN = re.compile(r"\s+(?=[A-Za-z]{2,})(?!" + SCALE + r")|[.,;](?:\s|$)")
WIDEST = 2_000
"""Characters on each side of a box in which its formula begins and ends."""
LONGEST_RUN = 300
"""The same, in a line without dollars."""
LONGEST_BETWEEN = 80
"""Characters between two boxes that are offered together."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a text by its positions: `text` from `start` to `end`, with its
    marks.
    """

    text: str
    start: int
    end: int


class BoxedParts(NamedTuple):
    """The outermost boxes of a text, and whether the last one is closed."""

    spans: list[Excerpt]
    is_closed: bool


class _OpenBox(NamedTuple):
    """Where a box and its content begin."""

    start: int
    content_start: int


def has_closed_box(text: str) -> bool:
    """Return whether there is a box, and the last one is closed."""
    boxes = _boxes(text)
    return bool(boxes.spans) and boxes.is_closed


def boxed(text: str) -> str | None:
    """Return what is in the last box with the formula around it, or in the boxes that
    make a list.

    None if the last box is not closed, denied, or one of several that are offered.
    """
    boxes = _boxes(text)
    if not boxes.spans or not boxes.is_closed:
        return None
    listed = last_list(text, boxes.spans, may_touch=True)
    if _is_offered(text, boxes.spans, listed) or _is_denied(text, listed):
        return None
    if len(listed) == 1:
        return _with_formula(text, listed[0])
    named = [_with_name(text, span) for span in listed]
    return ", ".join(dict.fromkeys(named))


def last_list(text: str, spans: list[Excerpt], may_touch: bool) -> list[Excerpt]:
    """Return the last of these parts, with those before it that belong to the same
    list. may_touch: parts with nothing between them do so too.
    """
    listed = [spans[-1]]
    for span in reversed(spans[:-1]):
        between = BETWEEN.sub("", text[span.end : listed[0].start])
        if not JOINED.fullmatch(between) or not (between or may_touch):
            break
        listed.insert(0, span)
    return listed


def _with_name(text: str, span: Excerpt) -> str:
    """Return a box's content, behind the name that stands before the box, if one does:
    of `x = \\boxed{5}` it is `x = 5`.
    """
    prefix = text[max(0, span.start - 40) : span.start]
    name = NAME_BEFORE.search(prefix)
    if name is None or "=" in span.text:
        return span.text
    return f"{name[1]} = {span.text}"


def _boxes(text: str) -> BoxedParts:
    """Find the outermost boxes in one pass over braces and boxes. A box without braces,
    `\\boxed 5`, has the next word, and a box in another one is part of its content.
    """
    spans: list[Excerpt] = []
    braces: list[_OpenBox | None] = []  # None: a brace that opens no box
    open_boxes = 0
    for match in BOX.finditer(text):
        if match[0] == "{":
            braces.append(None)
        elif match[0] == "}":
            box = braces.pop() if braces else None
            if box is not None:
                open_boxes -= 1
                if not open_boxes:
                    content = text[box.content_start : match.start()]
                    spans.append(Excerpt(content, box.start, match.end()))
        elif match[0].endswith("{") and len(match[0]) > 2:  # a box, and no `\{`
            braces.append(_OpenBox(match.start(), match.end()))
            open_boxes += 1
        elif match[1] and not open_boxes:
            spans.append(Excerpt(match[1].rstrip(".,;:!?"), match.start(), match.end()))
    return BoxedParts(spans, is_closed=open_boxes == 0)


def _is_offered(text: str, spans: list[Excerpt], listed: list[Excerpt]) -> bool:
    """Return whether the last box is one of several between which the text does not
    choose.
    """
    if len(spans) == len(listed) or len({span.text for span in spans}) == 1:
        return False
    preceding = spans[-len(listed) - 1]  # the last box before the list
    between = text[preceding.end : listed[0].start]
    return len(between) <= LONGEST_BETWEEN and OFFERED.search(between) is not None


def _is_denied(text: str, listed: list[Excerpt]) -> bool:
    """Return whether the words around the boxes deny them, or add another answer that
    is not the same.
    """
    start = listed[0].start
    end = listed[-1].end
    prefix = text[max(0, start - LONGEST_BETWEEN) : start]
    suffix = text[end : end + LONGEST_BETWEEN]
    if DENIED_BEFORE.search(prefix) or DENIED_BEHIND.match(suffix):
        return True
    addition = OTHER_BEHIND.match(suffix)
    if addition is None:
        return False
    content = reading(listed[-1].text).answer
    alternative = reading(addition["other"].strip(".,;)")).answer
    return content is None or alternative is None or not equal(content, alternative)


def _with_formula(text: str, span: Excerpt) -> str | None:
    """Return the box's content, or the formula that it is a part of, in dollars or in
    its line. None if digits touch it, or a word such as `million` follows the dollars.
    """
    paragraph_start = text.rfind("\n\n", 0, span.start)
    offset = max(0, span.start - WIDEST, paragraph_start)
    nearby = text[offset : span.end + WIDEST]
    box_start = span.start - offset
    box_end = span.end - offset
    for match in DOLLARS.finditer(nearby):
        if match.start() > box_start or match.end() < box_end:
            continue
        if re.match(rf"\s*{SCALE}", nearby[match.end() :]):
            return None
        # The one group of DOLLARS that matched has what stands between the marks.
        group = next(n for n, content in enumerate(match.groups(), 1) if content is not None)
        prefix = nearby[match.start(group) : box_start]
        return _in_formula(prefix, span, nearby[box_end : match.end(group)])
    run_before = text[max(0, span.start - LONGEST_RUN) : span.start]
    run_after = text[span.end : span.end + LONGEST_RUN]
    prefix = run_before.rpartition("\n")[2]
    suffix = run_after.partition("\n")[0]
    return _in_line(prefix, span, suffix)


def _in_formula(prefix: str, span: Excerpt, suffix: str) -> str | None:
    """Return the box with what belongs to it of the formula around it: nothing behind =
    or before a full stop. None if digits touch it. prefix, suffix: what stands between
    the dollars before and behind the box.
    """
    prefix = SEPARATOR.split(SPACING.sub(" ", prefix))[-1].strip()
    suffix = SPACING.sub(" ", suffix)
    while opening := OPENING.search(prefix):  # braces that only set the box's type
        prefix = prefix[: opening.start()].rstrip()
        suffix = CLOSING_BRACE.sub("", suffix)
    stop = END_OF_FORMULA.search(suffix)
    if stop:
        suffix = suffix[: stop.start()]
    suffix = suffix.strip()
    has_prefix = bool(prefix.strip(" ,.")) and ENDS_BEFORE_BOX.search(prefix) is None
    if not has_prefix and not RIGHT_OF_FORMULA.match(suffix):
        return span.text
    return _combined(prefix, span, suffix)


def _in_line(prefix: str, span: Excerpt, suffix: str) -> str | None:
    """Return the box with what belongs to it of a line without dollars: operators and
    what they join to it. None if digits touch it. prefix, suffix: the line before and
    behind the box.
    """
    prefix = SPACING.sub(" ", prefix)
    suffix = END_OF_TEXT.sub("", SPACING.sub(" ", suffix))
    if BULLET_ALONE.fullmatch(prefix):
        prefix = ""
    while opening := OPENING.search(prefix):  # braces that only set the box's type
        prefix = prefix[: opening.start()]
        suffix = CLOSING_BRACE.sub("", suffix)
    prefix = ARROW.sub("", prefix)
    plain_prefix = EMPHASIS.sub("", prefix)
    if plain_prefix != prefix:
        suffix = CLOSING_EMPHASIS.sub("", suffix)
    # Behind a word, as in "the answer is \boxed{5}!", the sign ends a sentence.
    is_factorial = suffix.startswith("!") and EXCLAMATION.search(plain_prefix) is None
    has_prefix = LEFT_OF_LINE.search(plain_prefix) is not None
    if not (has_prefix or is_factorial or RIGHT_OF_LINE.match(suffix)):
        return span.text
    run = RUN_BEFORE.search(plain_prefix) if has_prefix else None
    return _combined(run[0] if run else "", span, END_OF_RUN.split(suffix)[0])


def _combined(prefix: str, span: Excerpt, suffix: str) -> str | None:
    """Return a formula with the content of its box, in brackets unless it is one number
    or letter; None if digits of both touch.
    """
    if re.search(r"[\d.]$", prefix) or re.match(r"\.?\d", suffix):
        return None
    content = span.text
    if not re.fullmatch(r"[\d.]+|[A-Za-z]", content.strip()):
        content = f"({content})"
    return f"{prefix} {content}{suffix}"
