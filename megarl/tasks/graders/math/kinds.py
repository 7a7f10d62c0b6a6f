"""The kinds of answer that the grader knows. An answer is read into one of them, or not
at all.

| kind | examples |
|---|---|
| `Expression` | `85`, `3\\sqrt{2}`, `x^2+1`, `12 \\text{ cm}` |
| `Listing` | `3, 5`, `\\{1, 2\\}`, `(1, 2)`, `\\langle 1, 2 \\rangle`, `x = 2, y = 3` |
| `RealInterval`, `Combination` | `[0, 1)`, `(-\\infty, 0) \\cup (1, \\infty)` |
| `Relation` | `y = 2x + 3`, `-1 < x < 3`, `x \\in \\mathbb{R}` |
| `Congruence` | `x \\equiv 3 \\pmod 7` |
| `Matrix` | `\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}` |
| `Piecewise` | `\\begin{cases} 0 & x < 0 \\\\ 1 & x \\ge 0 \\end{cases}` |
| `Builder` | `\\{x \\mid x > 3\\}` |
| `Labelled` | `(C)`, `\\textbf{(C)}\\ 12` |
| `Numeral` | `52_8` |
| `Ratio` | `3 : 4`, `6:30 \\text{ p.m.}` |
| `Words` | `Monday`, `\\text{even}` |
"""

from dataclasses import dataclass
from enum import Enum

from megarl.tasks.graders.math.formulas import Formula


class Bracket(Enum):
    """What stands around a list."""

    NONE = ""
    ROUND = "("
    SQUARE = "["
    SET = "{"
    ANGLE = "<"


class Joint(Enum):
    """What stands between the items of a list."""

    COMMA = ","
    AND = "and"
    OR = "or"


@dataclass(frozen=True, slots=True)
class Expression:
    """A formula. unit: its unit in a standard form, "" for none."""

    formula: Formula
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers: a tuple, a set, a vector, named values, or just several."""

    items: tuple["MathAnswer", ...]
    bracket: Bracket = Bracket.NONE
    joint: Joint = Joint.COMMA


@dataclass(frozen=True, slots=True)
class RealInterval:
    """An interval of real numbers."""

    low: Formula
    high: Formula
    low_closed: bool
    high_closed: bool


@dataclass(frozen=True, slots=True)
class Combination:
    """Sets joined by `union`, `intersection` or `without`."""

    operator: str
    parts: tuple["MathAnswer", ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain of sides with a sign between each two: `=`, `<`, `<=`, `>`, `>=`, `!=`,
    `in`, `~`.
    """

    sides: tuple["MathAnswer", ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Congruence:
    """A number that is congruent to residues."""

    number: Formula | None
    residues: tuple[Formula, ...]
    modulus: Formula


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of formulas, all of one length."""

    rows: tuple[tuple[Formula, ...], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A value, and where it holds; None for everywhere else."""

    value: "MathAnswer"
    condition: "MathAnswer | None"


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A function by cases."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Builder:
    """The set of all elements that meet a condition."""

    element: "MathAnswer"
    condition: "MathAnswer"


@dataclass(frozen=True, slots=True)
class Labelled:
    """The letter of a choice, with the choice's own value if it is written."""

    letter: str
    value: "MathAnswer | None"


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits in a base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Parts with colons between them; suffix: `am` or `pm` of a time of day, or ""."""

    terms: tuple[Formula, ...]
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Words without mathematics."""

    words: tuple[str, ...]


type MathAnswer = (
    Expression
    | Listing
    | RealInterval
    | Combination
    | Relation
    | Congruence
    | Matrix
    | Piecewise
    | Builder
    | Labelled
    | Numeral
    | Ratio
    | Words
)
