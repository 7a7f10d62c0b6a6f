"""Whether a formula is a value, in which nothing is left to compute, and one writing
for equal sums and products.
"""

from fractions import Fraction
from typing import Any

from megarl.tasks.graders.math.answers import formulas_in, mapped, named
from megarl.tasks.graders.math.equality import Equality, is_whole_fraction, needs_computing
from megarl.tasks.graders.math.evaluation import Budget, TooMuchWork
from megarl.tasks.graders.math.formulas import PI, Apply, Formula, Number, Symbol, heads, symbols
from megarl.tasks.graders.math.kinds import MathAnswer, Relation

ROOTS = frozenset({"sqrt", "cbrt", "root"})
OF_NUMBERS = frozenset(
    {"ln", "log", "lg", "exp", "sin", "cos", "tan", "arcsin", "arccos", "arctan"}
)
"""Functions whose values at most numbers have no simpler form."""
LOGARITHM = ("Apply(head='log'", "Apply(head='ln'", "Apply(head='lg'")
"""How the `repr` of a logarithm begins."""
LARGEST_RADICAND = 10**6
NEUTRAL = {"+": Fraction(0), "*": Fraction(1)}
"""The operand that changes nothing."""


def has_steps_left(answer: MathAnswer) -> bool:
    """Return whether a number in the answer has still to be computed, or whether it
    takes too much work to say so.
    """
    equality = Equality(Budget())
    formulas = formulas_in(named(answer).value)
    try:
        return any(needs_computing(formula, equality) for formula in formulas)
    except TooMuchWork:
        return True


def all_values(answer: MathAnswer) -> bool:
    """Return whether all formulas of an answer, or of what it names, are values."""
    return not has_steps_left(answer) and all(map(is_value, formulas_in(named(answer).value)))


def is_value(formula: Formula) -> bool:
    """Return whether this is a number as one writes a result: 5, 2/3, 3√2, 1 + 2i, π/4,
    e^2, 4 · 10^5.
    """
    if isinstance(formula, Number | Symbol):
        return not symbols(formula) - {"infinity"}  # no variable
    arguments = formula.arguments
    if formula.head in ("-", "%", "degree", "plus-minus", "minus-plus"):
        return all(map(is_value, arguments))
    if formula.head == "/":
        return _is_fraction(formula)
    if formula.head == "+":
        return _is_sum(formula)
    if formula.head == "*":
        return _is_product(formula)
    if formula.head == "^":
        return isinstance(arguments[0], Number | Symbol) and all(map(is_value, arguments))
    if formula.head in ROOTS:
        return _is_simple_root(formula)
    return formula.head in OF_NUMBERS and all(isinstance(part, Number) for part in arguments)


def _is_fraction(formula: Apply) -> bool:
    """Return whether a quotient is a fraction as one writes a result: of two values, no
    integer in truth (18/3), and below the bar only numbers, roots and their products.
    """
    above, below = formula.arguments
    if is_whole_fraction(formula):
        return False
    return is_value(above) and is_value(below) and heads(below) <= ROOTS | {"*"}


def _is_sum(formula: Apply) -> bool:
    """Return whether a sum has one rational term at most, no two like terms and, since
    two can be joined, one logarithm at most.
    """
    irrational_parts = [_irrational_part(term) for term in formula.arguments]
    logarithms = [part for part in irrational_parts if part.startswith(LOGARITHM)]
    has_like_terms = len(set(irrational_parts)) < len(irrational_parts)
    if has_like_terms or len(logarithms) > 1:
        return False
    return all(map(is_value, formula.arguments))


def _is_product(formula: Apply) -> bool:
    """Return whether a product has one number, one root and one sum at most."""
    number_count = 0
    root_count = 0
    sum_count = 0
    for factor in formula.arguments:
        if not _irrational_part(factor):
            number_count += 1
        if isinstance(factor, Apply) and factor.head in ROOTS:
            root_count += 1
        if isinstance(factor, Apply) and factor.head == "+":
            sum_count += 1
    if max(number_count, root_count, sum_count) > 1:
        return False
    return all(map(is_value, formula.arguments))


def _irrational_part(term: Formula) -> str:
    """Return what stands beside a term's number, √2 of 3√2, as text that like terms
    have in common; "" if nothing does. Of a quotient it is that of the numerator.
    """
    if isinstance(term, Number):
        return ""
    if isinstance(term, Apply) and term.head in ("-", "/", "%"):
        return _irrational_part(term.arguments[0])
    if isinstance(term, Apply) and term.head == "*":
        return " ".join(sorted(filter(None, map(_irrational_part, term.arguments))))
    return repr(term)


def _is_simple_root(formula: Apply) -> bool:
    """Return whether no square, or power of the root's degree, can be taken out of an
    integer under a root. Of other radicands, only sums that are values and π are
    simple.
    """
    radicand = formula.arguments[0]
    if isinstance(radicand, Apply):
        return radicand.head == "+" and is_value(radicand)
    if isinstance(radicand, Symbol):
        return radicand == PI
    if radicand.value.denominator != 1 or not 1 < radicand.value < LARGEST_RADICAND:
        return False
    degree = _degree(formula)
    number = radicand.value.numerator
    largest_factor = round(number ** (1 / max(2, degree)))
    return all(number % factor**degree for factor in range(2, largest_factor + 1))


def _degree(root: Apply) -> int:
    """Return a root's degree; 3 for a cube root, and where the degree is no number."""
    if root.head == "sqrt":
        return 2
    last = root.arguments[-1]
    if root.head == "root" and isinstance(last, Number):
        return int(last.value)
    return 3


def canonical(answer: MathAnswer) -> Any:
    """Return the answer, or the value that it names, in a form that is the same
    whatever the order of terms, factors and sides of an equation. It can only be
    compared.
    """
    value = mapped(named(answer).value, _canonical)
    if isinstance(value, Relation) and value.signs == ("=",):
        return tuple(sorted(map(repr, value.sides)))
    return repr(value)


def _canonical(formula: Formula) -> Formula:
    """Return the formula with one order in its sums and products, in which nested ones
    are dissolved and neutral operands left out. The negative of a number is a number.
    """
    if not isinstance(formula, Apply):
        return formula
    arguments = tuple(map(_canonical, formula.arguments))
    if formula.head == "-" and isinstance(arguments[0], Number):
        return Number(-arguments[0].value)
    if formula.head not in NEUTRAL:
        return Apply(formula.head, arguments)
    flat: list[Formula] = []
    for argument in arguments:
        if isinstance(argument, Apply) and argument.head == formula.head:
            flat += argument.arguments
        else:
            flat.append(argument)
    operands = [part for part in flat if part != Number(NEUTRAL[formula.head])]
    if len(operands) == 1:
        return operands[0]
    return Apply(formula.head, tuple(sorted(operands, key=repr)))
