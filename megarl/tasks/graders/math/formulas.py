"""Formulas as trees: numbers, symbols, and operations or functions applied to
formulas.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written: an integer, a decimal or a mixed number. decimals: its
    written ones.
    """

    value: Fraction
    decimals: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable (`x`, `x_1`, `AB`), or one of the constants `e`, `i`, `pi` and
    `infinity`.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation: `+`, `-` (of one argument), `*`, `/`, `^`, a function's name, `call
    f`.
    """

    head: str
    arguments: tuple["Formula", ...]


type Formula = Number | Symbol | Apply
PI = Symbol("pi")
E = Symbol("e")
IMAGINARY = Symbol("i")
INFINITY = Symbol("infinity")
CONSTANTS = frozenset({"pi", "e", "i"})
PLUS_MINUS = "plus-minus"
MINUS_PLUS = "minus-plus"
TWO_VALUED = frozenset({PLUS_MINUS, MINUS_PLUS})


def integer(value: int) -> Number:
    """Return an integer as a formula."""
    return Number(Fraction(value))


def parts(formula: Formula) -> Iterator[Formula]:
    """Iterate over the formula and everything in it."""
    yield formula
    if isinstance(formula, Apply):
        for argument in formula.arguments:
            yield from parts(argument)


def symbols(formula: Formula) -> frozenset[str]:
    """Return the names of the formula's free variables; constants and the index of a
    sum are none.
    """
    if isinstance(formula, Symbol):
        return frozenset({formula.name}) - CONSTANTS
    if not isinstance(formula, Apply):
        return frozenset()
    names = frozenset().union(*map(symbols, formula.arguments))
    if formula.head in ("sum", "prod"):
        return names - symbols(formula.arguments[0])
    return names


def heads(formula: Formula) -> frozenset[str]:
    """Return the operations and functions that occur in the formula."""
    return frozenset(part.head for part in parts(formula) if isinstance(part, Apply))


def renamed(formula: Formula, names: dict[str, str]) -> Formula:
    """Return the formula with variables renamed."""
    if isinstance(formula, Symbol):
        return Symbol(names.get(formula.name, formula.name))
    if isinstance(formula, Apply):
        arguments = tuple(renamed(argument, names) for argument in formula.arguments)
        return Apply(formula.head, arguments)
    return formula


def with_sign(formula: Formula, plus: bool) -> Formula:
    """Return the formula with the upper (`plus`) or the lower sign for each ± and ∓."""
    if not isinstance(formula, Apply):
        return formula
    arguments = tuple(with_sign(argument, plus) for argument in formula.arguments)
    if formula.head not in TWO_VALUED:
        return Apply(formula.head, arguments)
    is_positive = plus == (formula.head == PLUS_MINUS)  # the upper sign of ∓ is minus
    return arguments[0] if is_positive else Apply("-", arguments)
