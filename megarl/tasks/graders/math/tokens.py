"""The tokens of an answer. Each character belongs to one, except for a closed list of
layout.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megarl.tasks.graders.math.names import words_of


class CannotRead(Exception):
    """The text is not read whole by the grammar, so it is no answer of a known kind."""


class TokenKind(Enum):
    """What a token is."""

    NUMBER = "number"
    WORD = "word"
    """Letters: a variable, several variables, a function, a unit or a word."""
    COMMAND = "command"
    """A command of LaTeX with its backslash; `\\begin{…}` has its environment."""
    SIGN = "sign"
    FOREIGN = "foreign"
    """Letters of other scripts."""
    END = "end"


class Gap(Enum):
    """The white space before a token."""

    NONE = ""
    BLANK = " "
    LINE = "\n"


@dataclass(frozen=True, slots=True)
class Token:
    """kind, text: a number's text keeps its commas; upright: set in `\\text` or
    `\\mathrm`.
    """

    kind: TokenKind
    text: str
    gap: Gap = Gap.NONE
    upright: bool = False


MOST_CHARACTERS = 20_000
MOST_TOKENS = 6_000
MOST_DEPTH = 60
THIN = r"(?:\\[,;:! ]|\{\\?,\}|~|,|[ ])"
"""What may stand between groups of three digits."""
RECURRING = (
    r"\d*\.\d*\\(?:overline|bar)\s*\{\d+\}"
    r"|\d*\.\d*\\(?:overline|bar)\s+\d"
    r"|\d*\.\d*\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?"
    r"|\d*\.\d*\(\d+\)"
)
LEXEME = re.compile(
    rf"""
    (?P<gap>\s+)
  | (?P<recurring>{RECURRING})
  | (?P<number>
        (?:
            (?<![\d.,])\d{{1,3}}(?P<thin>\\,\\!|\\!,|,\\!|{THIN})\d{{3}}(?:(?P=thin)\d{{3}})*(?!\d)
          | \d+
        )
        (?:\.\d+)?(?:[eE][+-]?\d{{1,9}}(?![\d.A-Za-z]))?
      | \.\d+(?:[eE][+-]?\d{{1,9}}(?![\d.A-Za-z]))?
    )
  | (?P<begin>\\begin\s*\{{[A-Za-z]+\*?\}})
  | (?P<end>\\end\s*\{{[A-Za-z]+\*?\}})
  | (?P<letters>\\(?:mathbb|mathcal|mathfrak|mathscr|Bbb)\s*(?:\{{\s*[A-Za-z]\s*\}}|[A-Za-z]))
  | (?P<command>\\(?:[A-Za-z]+\*?|.))
  | (?P<dots>\.\.\.+)
  | (?P<power>\*\*)
  | (?P<relation><=|>=|!=|==)
  | (?P<word>[A-Za-z]+)
  | (?P<sign>[^\w\s\\])
  | (?P<underscore>_)
  | (?P<foreign>\w)
    """,
    re.VERBOSE | re.DOTALL,
)
SPACING = {"\\ ", "\\\n"} | words_of(
    r"\, \; \: \! \> \/ \quad \qquad \enspace \thinspace \medspace \thickspace \negthinspace"
)
DROPPED = words_of(
    r"\left \right \middle \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr \Biggl"
    r" \Biggr \bigm \Bigm "
    r"\displaystyle \textstyle \scriptstyle \limits \nolimits \mathstrut \strut \hline \centering"
    r" \noindent \null "
    r"\hfill \allowbreak \nobreak \ensuremath \boldsymbol \bm \pmb \underline \boxed \fbox \small"
    r" \large \Large "
    r"\normalsize \mathop \mathrel \mathbin \mathord \relax \protect"
)
UPRIGHT = words_of(
    r"\text \textrm \textbf \textit \textsf \texttt \textup \textnormal \mathrm \mathbf \mathit"
    r" \mathsf \mathtt "
    r"\mathnormal \operatorname \operatorname* \mbox \hbox \emph \textmd \textsc"
)
SWITCHES = words_of(r"\rm \bf \it \sf \tt \bfseries \itshape \rmfamily")
BOLD = frozenset(
    {r"\mathbf", r"\textbf", r"\boldsymbol", r"\bm", r"\pmb", r"\vec", r"\hat", r"\widehat"}
)
SPELLINGS = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\le": r"\leq",
    r"\leqslant": r"\leq",
    r"\leqq": r"\leq",
    "<=": r"\leq",
    r"\ge": r"\geq",
    r"\geqslant": r"\geq",
    r"\geqq": r"\geq",
    ">=": r"\geq",
    r"\ne": r"\neq",
    "!=": r"\neq",
    r"\lt": "<",
    r"\gt": ">",
    "==": "=",
    r"\times": "*",
    r"\cdot": "*",
    r"\ast": "*",
    r"\cdotp": "*",
    r"\bullet": "*",
    r"\div": "/",
    r"\colon": ":",
    r"\rightarrow": r"\to",
    r"\longrightarrow": r"\to",
    r"\Rightarrow": r"\implies",
    r"\varnothing": r"\emptyset",
    r"\dots": r"\ldots",
    r"\cdots": r"\ldots",
    r"\dotsc": r"\ldots",
    r"\dotsb": r"\ldots",
    r"\vdots": r"\ldots",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\Vert": r"\|",
    r"\lVert": r"\|",
    r"\rVert": r"\|",
    r"\%": "%",
    r"\$": "$",
    r"\#": "#",
    r"\_": "_",
    r"\&": r"\and",
    r"\wedge": r"\land",
    r"\vee": r"\lor",
    r"\backslash": r"\setminus",
    r"\smallsetminus": r"\setminus",
    r"\thickapprox": r"\approx",
    r"\simeq": r"\approx",
    r"\prime": "'",
    r"\cr": r"\\",
    r"\newline": r"\\",
    r"\tabularnewline": r"\\",
    r"\imath": "i",
    r"\jmath": "j",
    r"\bigcup": r"\cup",
    r"\bigcap": r"\cap",
    r"\infin": r"\infty",
    r"\gets": r"\leftarrow",
    r"\degrees": r"\degree",
    r"\textdegree": r"\degree",
    r"\ni": r"\owns",
    r"\textdollar": "$",
    r"\pounds": "£",
    r"\euro": "€",
    r"\yen": "¥",
    r"\dotsm": r"\ldots",
    r"\tg": r"\tan",
    r"\ctg": r"\cot",
    r"\arctg": r"\arctan",
    r"\cosec": r"\csc",
    r"\widetilde": r"\tilde",
    r"\widehat": r"\hat",
    r"\overrightarrow": r"\vec",
}
WIDE = frozenset({r"\quad", r"\qquad"})
WIDE_GAP = Token(TokenKind.SIGN, r"\quad")


def tokens_of(text: str) -> tuple[Token, ...]:
    """Return the tokens of a text in plain spelling, with an END. CannotRead if it is
    too long.
    """
    if len(text) > MOST_CHARACTERS:
        raise CannotRead(f"longer than {MOST_CHARACTERS:,} characters")
    tokens = list(_upright(_lexemes(text)))
    if len(tokens) > MOST_TOKENS:
        raise CannotRead(f"longer than {MOST_TOKENS:,} tokens")
    while tokens and tokens[-1].text in {".", ",", ";", r"\quad"}:
        tokens.pop()  # what ends a sentence is no part of the answer
    return (*tokens, Token(TokenKind.END, ""))


def spelled(text: str) -> tuple[str, ...]:
    """Return the text in its normal spelling: two texts that differ in layout alone are
    equal.
    """
    words = []
    for token in tokens_of(text):
        if token.text == r"\quad" or token.kind is TokenKind.END:
            continue
        word = token.text
        if token.kind is TokenKind.NUMBER:
            word = digits_of(word)
        elif token.kind is TokenKind.WORD and len(word) > 1 and not word.isupper():
            word = word.lower()  # single letters and capitals are names
        words.append(word)
        if words[-1] == "}" and len(words) > 2 and words[-3] == "{":
            words[-3:] = [words[-2]]  # braces around one token say nothing
    return tuple(words)


def digits_of(number: str) -> str:
    """Return a number's text without the separators of its groups of three digits. One
    with a marked period, `0.(3)`, keeps the marks.
    """
    if "\\overline" in number or "\\bar" in number or "\\dot" in number or "(" in number:
        return re.sub(r"\s", "", number)
    return re.sub(r"[^\d.eE+-]", "", number)


def _lexemes(text: str) -> Iterator[Token]:
    """Iterate over the text's tokens, with braces and commands of type still among
    them. CannotRead at a character that begins none.
    """
    gap = Gap.NONE  # before the next token
    depth = 0  # open brackets, in which a comma separates
    position = 0
    while position < len(text):
        match = LEXEME.match(text, position)
        if match is None:
            raise CannotRead(f"the character {text[position]!r}")
        kind = str(match.lastgroup)
        lexeme = match[0]
        has_bare_comma = "," in lexeme and "{" not in lexeme and "!" not in lexeme
        if kind == "number" and depth and has_bare_comma:
            lexeme = lexeme[: lexeme.index(",")]
        position += len(lexeme)
        if kind == "gap":
            gap = Gap.LINE if gap is Gap.LINE or "\n\n" in lexeme else Gap.BLANK
            continue
        if lexeme in SPACING or lexeme == "~":
            if lexeme in WIDE:
                yield WIDE_GAP
            elif gap is Gap.NONE and lexeme != r"\!":  # `\!` is a negative space
                gap = Gap.BLANK
            continue
        token = _token(kind, lexeme, gap)
        depth = max(0, depth + BRACKETS.get(token.text, 0))
        yield token
        gap = Gap.NONE


BRACKETS = {"(": 1, "[": 1, r"\{": 1, r"\langle": 1, ")": -1, "]": -1, r"\}": -1, r"\rangle": -1}


def _token(kind: str, lexeme: str, gap: Gap) -> Token:
    """Return the token of a lexeme, in its usual spelling. kind: the name of the group
    in LEXEME that matched.
    """
    if kind in ("number", "recurring"):
        return Token(TokenKind.NUMBER, lexeme, gap)
    if kind in ("begin", "end"):
        environment = re.sub(r"[\s*]", "", lexeme)  # `\begin{align*}` is `\begin{align}`
        return Token(TokenKind.COMMAND, environment, gap)
    if kind == "letters":  # a letter of any such type: `\mathcal R`, `\mathbb{R}`
        letter = lexeme.rstrip("} ")[-1]
        return Token(TokenKind.WORD, rf"\mathbb{{{letter}}}", gap)
    if kind == "dots":
        return Token(TokenKind.COMMAND, r"\ldots", gap)
    if kind == "power":
        return Token(TokenKind.SIGN, "^", gap)
    if kind == "foreign":
        return Token(TokenKind.FOREIGN, lexeme, gap)
    if kind == "word":
        return Token(TokenKind.WORD, lexeme, gap)
    spelling = SPELLINGS.get(lexeme, lexeme)
    if len(spelling) == 1 and spelling.isalpha():
        return Token(TokenKind.WORD, spelling, gap)
    if spelling.startswith("\\"):
        return Token(TokenKind.COMMAND, spelling, gap)
    return Token(TokenKind.SIGN, spelling, gap)


def _upright(lexemes: Iterator[Token]) -> Iterator[Token]:
    """Drop layout; mark what stands in `\\text{…}` and its like, and drop those
    braces. A bold i, j or k alone is a unit vector: `\\mathbf{i}` becomes `\\vec i`.

    A line before a dropped token counts as before the next one. A blank does not: `f
    \\left(x\\right)` is f(x).
    """
    stream = list(lexemes)
    upright_depths: list[int] = []  # of the open braces of `\text{…}`
    depth = 0
    follows_line = False
    position = 0
    while position < len(stream):
        token = stream[position]
        position += 1
        following = stream[position].text if position < len(stream) else ""
        if token.text in UPRIGHT and following == "{":
            position += 1
            depth += 1
            upright_depths.append(depth)
            follows_line |= token.gap is Gap.LINE
            if token.text in BOLD and _holds_unit_vector(stream, position):
                gap = Gap.LINE if follows_line else Gap.NONE
                yield Token(TokenKind.WORD, f"\\vec {stream[position].text}", gap)
                position += 1
                follows_line = False
            continue
        if token.text in DROPPED or token.text in SWITCHES:
            if token.text in (r"\left", r"\right") and following == ".":
                position += 1  # `\left.` is a bracket that is not drawn
            follows_line |= token.gap is Gap.LINE
            continue
        if token.text == "{":
            depth += 1
        elif token.text == "}":
            depth -= 1
            if upright_depths and upright_depths[-1] == depth + 1:
                upright_depths.pop()
                follows_line |= token.gap is Gap.LINE
                continue
        gap = Gap.LINE if follows_line else token.gap
        yield Token(token.kind, token.text, gap, bool(upright_depths))
        follows_line = False


def _holds_unit_vector(stream: list[Token], position: int) -> bool:
    """Return whether braces whose content begins at `position` hold i, j or k alone."""
    is_alone = position + 1 < len(stream) and stream[position + 1].text == "}"
    return is_alone and stream[position].text in ("i", "j", "k")
