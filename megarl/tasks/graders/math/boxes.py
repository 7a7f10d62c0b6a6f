r"""What a text says in its boxes.

\boxed{5}                     5
\boxed{3}, \boxed{4}          a list
2 \cdot \boxed{5}             the whole formula around the box
x = \boxed{5} cm             5: a name before it and words around it say nothing else
not \boxed{5}, \boxed{5} or 6  nothing
"""

import re
from dataclasses import dataclass

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
WIDEST = 2_000
"""Characters on each side of a box in which its formula begins and ends."""
LONGEST_RUN = 300
"""The same, in a line without dollars."""
LONGEST_BETWEEN = 80
"""Characters between two boxes that are offered together."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a text by its positions: `text` from `begin` to `end`, with its marks."""

    text: str
    begin: int
    end: int


def has_closed_box(text: str) -> bool:
    """Return whether there is a box, and the last one is closed."""
    spans, closed = _boxes(text)
    return bool(spans) and closed


def boxed(text: str) -> str | None:
    """Return what is in the last box with the formula around it, or in the boxes that
    make a list.

    None if the last box is not closed, denied, or one of several that are offered.
    """
    spans, closed = _boxes(text)
    if not spans or not closed:
        return None
    listed = [spans[-1]]
    for span in reversed(spans[:-1]):
        between = BETWEEN.sub("", text[span.end : listed[0].begin])
        if not JOINED.fullmatch(between):
            break
        listed.insert(0, span)
    if _is_offered(text, spans, listed) or _is_denied(text, listed):
        return None
    if len(listed) == 1:
        return _with_formula(text, listed[0])
    named = [_with_name(text, span) for span in listed]
    return ", ".join(dict.fromkeys(named))


def _with_name(text: str, span: Excerpt) -> str:
    name = NAME_BEFORE.search(text[max(0, span.begin - 40) : span.begin])
    return f"{name[1]} = {span.text}" if name and "=" not in span.text else span.text


def _boxes(text: str) -> tuple[list[Excerpt], bool]:
    """Return the outermost boxes, and whether the last one is closed, in one pass."""
    spans: list[Excerpt] = []
    braces: list[tuple[int, int] | None] = []  # begin and begin of the content of a box
    open_boxes = 0
    for match in BOX.finditer(text):
        if match[0] == "{":
            braces.append(None)
        elif match[0] == "}":
            box = braces.pop() if braces else None
            if box is not None:
                open_boxes -= 1
                if not open_boxes:
                    spans.append(Excerpt(text[box[1] : match.start()], box[0], match.end()))
        elif match[0].endswith("{") and len(match[0]) > 2:
            braces.append((match.start(), match.end()))
            open_boxes += 1
        elif match[1] and not open_boxes:
            spans.append(Excerpt(match[1].rstrip(".,;:!?"), match.start(), match.end()))
    return spans, open_boxes == 0


def _is_offered(text: str, spans: list[Excerpt], listed: list[Excerpt]) -> bool:
    """Return whether the last box is one of several between which the text does not
    choose.
    """
    if len(spans) == len(listed) or len({span.text for span in spans}) == 1:
        return False
    between = text[spans[-len(listed) - 1].end : listed[0].begin]
    return len(between) <= LONGEST_BETWEEN and OFFERED.search(between) is not None


def _is_denied(text: str, listed: list[Excerpt]) -> bool:
    """Return whether the words around the boxes deny them, or add another answer that
    is not the same.
    """
    begin = listed[0].begin
    end = listed[-1].end
    before = text[max(0, begin - LONGEST_BETWEEN) : begin]
    behind = text[end : end + LONGEST_BETWEEN]
    if DENIED_BEFORE.search(before) or DENIED_BEHIND.match(behind):
        return True
    addition = OTHER_BEHIND.match(behind)
    if addition is None:
        return False
    content = reading(listed[-1].text).answer
    other = reading(addition["other"].strip(".,;)")).answer
    return content is None or other is None or not equal(content, other)


def _with_formula(text: str, span: Excerpt) -> str | None:
    """Return the box's content, or the formula that it is a part of; None if digits
    touch it.
    """
    begin = max(0, span.begin - WIDEST, text.rfind("\n\n", 0, span.begin))
    nearby = text[begin : span.end + WIDEST]
    for match in DOLLARS.finditer(nearby):
        if match.start() <= span.begin - begin and span.end - begin <= match.end():
            number = next(n for n, group in enumerate(match.groups(), 1) if group is not None)
            if re.match(rf"\s*{SCALE}", nearby[match.end() :]):
                return None
            left = nearby[match.start(number) : span.begin - begin]
            return _in_formula(left, span, nearby[span.end - begin : match.end(number)])
    left = text[max(0, span.begin - LONGEST_RUN) : span.begin].rpartition("\n")[2]
    right = text[span.end : span.end + LONGEST_RUN].partition("\n")[0]
    return _in_line(left, span, right)


def _in_formula(left: str, span: Excerpt, right: str) -> str | None:
    left = SEPARATOR.split(SPACING.sub(" ", left))[-1].strip()
    right = SPACING.sub(" ", right)
    while opening := OPENING.search(left):
        left = left[: opening.start()].rstrip()
        right = re.sub(r"^\s*\}", "", right)
    stop = re.search(r"\\\\|&|\\(?:Rightarrow|implies|end|qquad|quad)(?![A-Za-z])|[;→⇒]", right)
    right = (right[: stop.start()] if stop else right).strip()
    has_left = bool(left.strip(" ,.")) and ENDS_BEFORE_BOX.search(left) is None
    has_right = RIGHT_OF_FORMULA.match(right) is not None
    return _joined(left, span, right) if has_left or has_right else span.text


def _in_line(left: str, span: Excerpt, right: str) -> str | None:
    left = SPACING.sub(" ", left)
    right = END_OF_TEXT.sub("", SPACING.sub(" ", right))
    if BULLET_ALONE.fullmatch(left):
        left = ""
    while opening := OPENING.search(left):
        left = left[: opening.start()]
        right = re.sub(r"^\s*\}", "", right)
    left = ARROW.sub("", left)
    plain_left = EMPHASIS.sub("", left)
    right = (
        re.sub(r"^(?:\*\*|__|[*_\"')\]](?=\s|$|[.,]))+", "", right) if plain_left != left else right
    )
    is_factorial = right.startswith("!") and EXCLAMATION.search(plain_left) is None
    has_left = LEFT_OF_LINE.search(plain_left) is not None
    if not (has_left or is_factorial or RIGHT_OF_LINE.match(right)):
        return span.text
    before = RUN_BEFORE.search(plain_left) if has_left else None
    behind = re.split(r"\s+(?=[A-Za-z]{2,})(?!" + SCALE + ")|[.,;](?:\\s|$)", right)[0]
    return _joined(before[0] if before else "", span, behind)


def _joined(left: str, span: Excerpt, right: str) -> str | None:
    """Return a formula with the content of its box; None if digits of both touch."""
    if re.search(r"[\d.]$", left) or re.match(r"\.?\d", right):
        return None
    content = span.text if re.fullmatch(r"[\d.]+|[A-Za-z]", span.text.strip()) else f"({span.text})"
    return f"{left} {content}{right}"
