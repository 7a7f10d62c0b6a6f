"""What one answer is by itself: the formulas and relations in it, its name and value,
its entries, its letter.

x = 5                      ─►  5                      a single value may be named
x = 3, 5                   ─►  x = 3, x = 5           names are repeated
\\frac{3 \\pm \\sqrt5}{2}   ─►  two values
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, TypeGuard

from megarl.tasks.graders.math.formulas import (
    TWO_VALUED,
    Apply,
    Formula,
    Number,
    Symbol,
    heads,
    parts,
    renamed,
    symbols,
    with_sign,
)
from megarl.tasks.graders.math.kinds import (
    Bracket,
    Builder,
    Expression,
    Joint,
    Labelled,
    Listing,
    MathAnswer,
    Matrix,
    RealInterval,
    Relation,
    Words,
)
from megarl.tasks.graders.math.realsets import ORDERS, SWAPPED

COORDINATES = frozenset("xyz")
LETTERS = frozenset("abcdfghjklmnopqrstuvwABCDEFGHIJKLMNOPQRSTUVWXYZ")
CHOICES = frozenset("ABCDEFGHIJ")
VECTORS = frozenset({Bracket.ROUND, Bracket.SQUARE, Bracket.ANGLE})


@dataclass(frozen=True)
class NamedAnswer:
    """An answer's value, and the name that the answer gives it, if any."""

    name: str | None
    value: MathAnswer


def normal(answer: MathAnswer) -> MathAnswer:
    """Return the answer with ± as two values, and names repeated: `x = 3, 5` is x = 3,
    x = 5.
    """
    if isinstance(answer, Listing) and answer.bracket in (Bracket.NONE, Bracket.SET):
        items: list[MathAnswer] = []
        for item in answer.items:
            items += _two_values(item)
        if answer.bracket is Bracket.NONE:
            items = _as_solutions(_with_names(items), answer.joint)
        return replace(answer, items=tuple(items))
    values = _two_values(answer)
    return values[0] if len(values) == 1 else Listing(tuple(values))


def _two_values(answer: MathAnswer) -> list[MathAnswer]:
    """Return both values of an answer with one ±, or with one ± and one ∓, whose upper
    signs belong together; else the answer itself.
    """
    signs: list[str] = []
    for formula in formulas_in(answer):
        for part in parts(formula):
            if isinstance(part, Apply) and part.head in TWO_VALUED:
                signs.append(part.head)
    if not signs or (len(signs) > 1 and sorted(signs) != sorted(TWO_VALUED)):
        return [answer]
    upper = mapped(answer, lambda formula: with_sign(formula, plus=True))
    lower = mapped(answer, lambda formula: with_sign(formula, plus=False))
    return [upper, lower]


def _as_solutions(items: list[MathAnswer], joint: Joint) -> list[MathAnswer]:
    """Return `x=1, y=2 or x=2, y=1` as two solutions, each a list; other items as they
    are.
    """
    item_names = [named(item).name for item in items]
    if joint is not Joint.OR or None in item_names:
        return items
    unknowns = len(set(item_names))
    if unknowns < 2 or len(items) == unknowns:
        return items
    names_repeat = item_names == item_names[:unknowns] * (len(items) // unknowns)
    if not names_repeat:
        return items
    starts = range(0, len(items), unknowns)
    return [Listing(tuple(items[start : start + unknowns])) for start in starts]


def _with_names(items: list[MathAnswer]) -> list[MathAnswer]:
    """Return items in which values behind a single named value have its name too: `x =
    3, 5`. Items with several names, or with words, stay as they are.
    """
    first = items[0] if items else None
    if not isinstance(first, Relation) or first.signs != ("=",):
        return items
    if any(isinstance(item, Relation | Words) for item in items[1:]):
        return items
    name = first.sides[0]
    return [first, *(Relation((name, value), ("=",)) for value in items[1:])]


def mapped(answer: Any, change: Callable[[Formula], Formula]) -> Any:
    """Return the answer with all its formulas changed. It may be a formula, an answer,
    a part of one, or a tuple of those.
    """
    if isinstance(answer, Number | Symbol | Apply):
        return change(answer)
    if isinstance(answer, tuple):
        return tuple(mapped(item, change) for item in answer)
    if not hasattr(answer, "__dataclass_fields__"):
        return answer
    changed = {field.name: mapped(getattr(answer, field.name), change) for field in fields(answer)}
    return replace(answer, **changed)


def formulas_in(answer: Any) -> Iterator[Formula]:
    """Iterate over all formulas of an answer."""
    if isinstance(answer, Number | Symbol | Apply):
        yield answer
    elif isinstance(answer, tuple):
        for item in answer:
            yield from formulas_in(item)
    elif hasattr(answer, "__dataclass_fields__"):
        for field in fields(answer):
            yield from formulas_in(getattr(answer, field.name))


def named(answer: MathAnswer) -> NamedAnswer:
    """Return an answer's value with its name: x and 5 for `x = 5` or `x = 2 + 3 = 5`.
    Of a computation, `2 + 3 = 5`, it is the result, without a name; other answers are
    values themselves.
    """
    if isinstance(answer, Listing) and answer.bracket is Bracket.NONE and answer.items:
        return _named_listing(answer)
    if not isinstance(answer, Relation):
        return NamedAnswer(None, answer)
    first = answer.sides[0]
    if answer.signs == ("in",):
        name = name_of(first)
        if name and not isinstance(answer.sides[1], Expression):
            return NamedAnswer(name, answer.sides[1])
    between = answer.sides[1:-1]
    if set(answer.signs) != {"="} or not all(map(is_constant_side, between)):
        return NamedAnswer(None, answer)
    if is_constant_side(first):
        return NamedAnswer(None, answer.sides[-1])
    name = name_of(first)
    if name:
        return NamedAnswer(name, answer.sides[-1])
    return NamedAnswer(None, answer)


def _named_listing(answer: Listing) -> NamedAnswer:
    """Return the values of a list under the one name that all of them have; the list
    itself without a name if they have several or none.
    """
    items = [named(item) for item in answer.items]
    name = items[0].name
    if name is None or any(item.name != name for item in items):
        return NamedAnswer(None, answer)
    return NamedAnswer(name, replace(answer, items=tuple(item.value for item in items)))


def name_of(side: MathAnswer) -> str | None:
    """Return the name that a side is: a variable, `f(x)`, a tuple of names, or what
    questions ask for, such as m + n. None if it is something else.
    """
    if isinstance(side, Listing) and side.bracket is Bracket.ROUND:
        names = [name_of(item) for item in side.items]
        if None in names:
            return None
        return f"({','.join(map(str, names))})"
    if not isinstance(side, Expression) or side.unit:
        return None
    formula = side.formula
    if isinstance(formula, Symbol):
        return formula.name if symbols(formula) else None
    if not isinstance(formula, Apply):
        return None
    is_name = formula.head.startswith("call ")
    if formula.head in ("+", "*", "abs"):
        is_name = _is_asked_for(formula)
    return repr(formula) if is_name else None


def _is_asked_for(formula: Apply) -> bool:
    """Return whether this is what questions ask for: m + n, abc, |AB|; no curve's
    equation.
    """
    if formula.head == "abs":
        return isinstance(formula.arguments[0], Symbol) and formula.arguments[0].name.isupper()
    variables = []
    for part in parts(formula):
        if isinstance(part, Symbol):
            variables.append(part)
        elif isinstance(part, Apply) and part.head not in ("+", "*"):
            return False
    names = {variable.name[0] for variable in variables}
    return len(variables) > 1 and not names & COORDINATES and names <= LETTERS


def names_a_value(answer: NamedAnswer) -> bool:
    """Return whether a named answer's value may stand alone: not if it is a curve, `y =
    2x + 3`.
    """
    return answer.name not in COORDINATES or not symbols_of(answer.value) & COORDINATES


def stands_for(answer: NamedAnswer) -> bool:
    """Return whether the named value alone says the same. That of a tuple of names does
    if they are in alphabetic order: `(x, y) = (1, 2)` is (1, 2).
    """
    name = answer.name or ""
    if not name.startswith("("):
        return True
    names = name[1:-1].split(",")
    return names == sorted(names)


def assignments(answer: MathAnswer) -> dict[str, MathAnswer] | None:
    """Return the values of several names, `x = 1, y = 2`, by name; None if a name
    occurs twice, or the answer is something else.
    """
    if isinstance(answer, Relation) and set(answer.signs) == {"="}:
        return _assigned_in_chain(answer)
    if not isinstance(answer, Listing) or answer.bracket is not Bracket.NONE:
        return None
    values: dict[str, MathAnswer] = {}
    for item in answer.items:
        named_item = named(item)
        if named_item.name is None:
            assigned = assignments(item)
        else:
            assigned = {named_item.name: named_item.value}
        if assigned is None or assigned.keys() & values.keys():
            return None
        if any(name.startswith("(") for name in assigned):
            return None
        values |= assigned
    return values


def _assigned_in_chain(relation: Relation) -> dict[str, MathAnswer] | None:
    """Return the values of `(x, y) = (1, 2)` or `x = y = 1`; None for others."""
    *names, value = relation.sides
    if len(names) > 1:
        if not all(map(name_of, names)):
            return None
        return _paired(names, [value] * len(names))
    if _is_tuple(names[0]) and _is_tuple(value):
        return _paired(names[0].items, value.items)
    return None


def _is_tuple(answer: MathAnswer) -> TypeGuard[Listing]:
    return isinstance(answer, Listing) and answer.bracket in VECTORS


def _paired(
    names: Sequence[MathAnswer], values: Sequence[MathAnswer]
) -> dict[str, MathAnswer] | None:
    """Return name ─► value; None unless there are as many of both, and the names are
    names, each another one.
    """
    words = [name_of(name) for name in names]
    if len(words) != len(values) or len(set(words)) != len(words):
        return None
    if None in words:
        return None
    return dict(zip(map(str, words), values, strict=True))


def ascending(relation: Relation) -> Relation:
    """Return the relation turned so that it does not begin with > or ≥."""
    if relation.signs[0] not in (">", ">="):
        return relation
    signs = tuple(SWAPPED.get(sign, sign) for sign in reversed(relation.signs))
    return Relation(tuple(reversed(relation.sides)), signs)


def difference_of(sides: Sequence[MathAnswer]) -> Formula | None:
    """Return the difference of two sides; None if one has a unit or is no formula."""
    first, second = sides
    if not isinstance(first, Expression) or not isinstance(second, Expression):
        return None
    if first.unit or second.unit:
        return None
    return Apply("+", (first.formula, Apply("-", (second.formula,))))


def entries_of(answer: MathAnswer) -> tuple[Formula, ...] | None:
    """Return the entries of a vector: a tuple of two formulas or more, or a matrix of
    one row or column. None for other answers.
    """
    if isinstance(answer, Matrix):
        if len(answer.rows[0]) == 1:
            return tuple(row[0] for row in answer.rows)
        return answer.rows[0] if len(answer.rows) == 1 else None
    if not _is_tuple(answer) or len(answer.items) < 2:
        return None
    formulas = []
    for item in answer.items:
        if not isinstance(item, Expression) or item.unit:
            return None
        formulas.append(item.formula)
    return tuple(formulas)


def as_interval(answer: MathAnswer) -> RealInterval | None:
    """Return an interval, or a pair in round or square brackets as one; None for other
    answers.
    """
    if isinstance(answer, RealInterval):
        return answer
    if not isinstance(answer, Listing) or len(answer.items) != 2:
        return None
    closed = answer.bracket is Bracket.SQUARE
    if not closed and answer.bracket is not Bracket.ROUND:
        return None
    low, high = answer.items
    if not isinstance(low, Expression) or not isinstance(high, Expression):
        return None
    return RealInterval(low.formula, high.formula, closed, closed)


def memberships(items: Sequence[MathAnswer]) -> list[MathAnswer]:
    """Return the items that say what a letter is in: `k \\in \\mathbb{Z}`."""
    return [item for item in items if isinstance(item, Relation) and item.signs == ("in",)]


def parameter_of(items: Sequence[MathAnswer]) -> str | None:
    """Return the letter of the only membership among several items: k in `x = 2k, k
    \\in \\mathbb{Z}`. None if there is none, or more than one.
    """
    names = []
    for item in items:
        if not isinstance(item, Relation) or item.signs != ("in",):
            continue
        side = item.sides[0]
        if isinstance(side, Expression) and isinstance(side.formula, Symbol):
            names.append(side.formula.name)
    return names[0] if len(names) == 1 and len(items) > 1 else None


def symbols_of(answer: MathAnswer) -> frozenset[str]:
    """Return the variables of all formulas of an answer."""
    return frozenset[str]().union(*map(symbols, formulas_in(answer)))


def with_one_name(builder: Builder) -> Builder:
    """Return the set with its element's variable under a name that no text has."""
    element = builder.element
    if isinstance(element, Relation):
        element = element.sides[0]
    if not isinstance(element, Expression) or not isinstance(element.formula, Symbol):
        return builder
    change = {element.formula.name: "element"}
    renamed_builder = mapped(builder, lambda formula: renamed(formula, change))
    assert isinstance(renamed_builder, Builder)
    return renamed_builder


def letter_of(answer: MathAnswer) -> str:
    """Return the letter of a labelled choice, or a letter alone; "" for others."""
    if isinstance(answer, Labelled):
        return answer.letter
    if isinstance(answer, Expression) and isinstance(answer.formula, Symbol) and not answer.unit:
        if answer.formula.name in CHOICES:
            return answer.formula.name
    return ""


def value_of_choice(answer: MathAnswer) -> MathAnswer | None:
    """Return the value of a labelled choice, None if only its letter is written; of
    other answers the answer itself.
    """
    return answer.value if isinstance(answer, Labelled) else answer


def has_inequality(items: Sequence[MathAnswer]) -> bool:
    """Return whether one of the items is an inequality."""
    relations = [item for item in items if isinstance(item, Relation)]
    return any(set(relation.signs) & ORDERS for relation in relations)


def is_approximate(answer: MathAnswer) -> bool:
    """Return whether an answer is a chain with ≈."""
    return isinstance(answer, Relation) and "~" in answer.signs


def sides_of_approximation(answer: MathAnswer, with_rounding: bool) -> list[MathAnswer]:
    """Return what a chain with ≈ says: what stands before the sign and, if asked for,
    its rounding. `x ≈ 3.1` is taken for `x = 3.1`; an answer without ≈ says itself.
    """
    if not isinstance(answer, Relation) or not is_approximate(answer):
        return [answer]
    place = answer.signs.index("~")
    exact: MathAnswer = answer.sides[0]
    if place > 0:  # other signs before it: `x = π ≈ 3.1`
        exact = Relation(answer.sides[: place + 1], answer.signs[:place])
    rounded = answer.sides[place + 1]
    if isinstance(exact, Expression) and name_of(exact) and not is_constant(exact.formula):
        return [Relation((exact, rounded), ("=",))]
    return [exact, rounded] if with_rounding else [exact]


def decimals_needed(value: Fraction) -> int | None:
    """Return how many decimals write a number exactly; None if 29 do not."""
    for decimals in range(30):
        if (value * 10**decimals).denominator == 1:
            return decimals
    return None


def is_decimal(answer: MathAnswer) -> bool:
    """Return whether an answer is a decimal, and no integer."""
    if not isinstance(answer, Expression) or not isinstance(answer.formula, Number):
        return False
    return answer.formula.value.denominator != 1 and has_finite_decimals(answer.formula.value)


def is_conversion(exact: Expression, converted: MathAnswer) -> bool:
    """Return whether a quantity is given in a second unit, percent aside: 12 m ≈ 39
    feet.
    """
    if not isinstance(converted, Expression) or "percent" in (exact.unit, converted.unit):
        return False
    return bool(exact.unit and converted.unit) and exact.unit != converted.unit


def is_decimal_formula(formula: Formula) -> bool:
    """Return whether a formula is an integer or a decimal, perhaps with a sign or a
    power of ten.
    """
    if isinstance(formula, Apply) and formula.head == "-":
        return is_decimal_formula(formula.arguments[0])
    return isinstance(formula, Number) or heads(formula) <= {"*", "^", "-"}


def has_finite_decimals(value: Fraction) -> bool:
    """Return whether a number has finitely many decimals: whether its denominator is a
    product of twos and fives.
    """
    remaining = value.denominator
    for prime in (2, 5):
        while remaining % prime == 0:
            remaining //= prime
    return remaining == 1


def relations_in(answer: Any) -> Iterator[Relation]:
    """Iterate over the relations of an answer, those in lists and sets too."""
    if isinstance(answer, Relation):
        yield answer
    if isinstance(answer, tuple):
        for item in answer:
            yield from relations_in(item)
    elif hasattr(answer, "__dataclass_fields__") and not isinstance(
        answer, Number | Symbol | Apply
    ):
        for field in fields(answer):
            yield from relations_in(getattr(answer, field.name))


def is_solved(answer: MathAnswer) -> bool:
    """Return whether the sides of each inequality are letters, absolute values of those
    or numbers: not 2x + 1 > 7.
    """
    for relation in relations_in(answer):
        is_inequality = set(relation.signs) & (ORDERS | {"!="})
        if is_inequality and not all(map(_is_bare_side, relation.sides)):
            return False
    return True


def _is_bare_side(side: MathAnswer) -> bool:
    """Return whether a side is a letter, its absolute value, or a number."""
    if not isinstance(side, Expression):
        return False
    formula = side.formula
    if isinstance(formula, Apply) and formula.head == "abs":
        formula = formula.arguments[0]
    return isinstance(formula, Symbol) or not symbols(formula) - {"infinity"}


def is_value_of_letter(sides: Sequence[MathAnswer]) -> bool:
    """Return whether this is `x = 5`: a letter alone, and a number."""
    first, second = sides
    for side, value in ((first, second), (second, first)):
        is_symbol = isinstance(side, Expression) and isinstance(side.formula, Symbol)
        if is_symbol and name_of(side):  # no constant such as π
            return is_constant_side(value)
    return False


def is_constant(formula: Formula | None) -> bool:
    """Return whether a formula has no variables, and no function `f`."""
    return formula is not None and not symbols(formula) and not heads(formula) & {"call f"}


def is_constant_side(side: MathAnswer) -> TypeGuard[Expression]:
    """Return whether a side is a formula without variables."""
    return isinstance(side, Expression) and is_constant(side.formula)
