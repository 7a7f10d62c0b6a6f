"""Whether two formulas are equal: by their exact values, or by values of many digits at
several points.

Constants are compared at two precisions: the difference of equal ones shrinks with the
precision, that of others stays. Formulas with variables are compared at rational
points, the first positive, one negative, others mixed (Schwartz 1980, Zippel 1979); if
they have values at too few of them, as (-1)^n, at natural numbers.
"""

import math
from collections.abc import Iterator
from fractions import Fraction

from megarl.tasks.graders.math.evaluation import (
    CONTEXT,
    Budget,
    Complex,
    Evaluator,
    NoValue,
    Numeric,
    OutsideDomain,
    Real,
    as_real,
    variable,
)
from megarl.tasks.graders.math.formulas import (
    IMAGINARY,
    TWO_VALUED,
    Apply,
    Formula,
    Number,
    heads,
    parts,
    symbols,
)

PRECISION = 240
"""Bits of the first evaluation; the second has twice as many."""
MOST_SPREAD = 8_000
"""The largest difference, in bits, between the magnitudes of a sum's terms."""
POINTS = 8
INDEXED = frozenset({"sum", "prod"})
"""What has values at natural numbers alone."""
JUMPING = frozenset({"abs", "max", "min", "floor", "ceil", "sign"})
"""Functions by cases, which may agree with another formula on one side of a jump."""
STEPPED = JUMPING | {"sqrt", "root"}
EXTREMES = tuple(Fraction(10) ** exponent for exponent in (-3, 0, 4, 12) for _ in range(4))
"""Sizes of variables at which formulas by cases are compared."""
ENOUGH = 3
"""Points at which both formulas must have a value."""


class Equality:
    """Compares formulas within the budget of one verdict."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def same(self, first: Formula, second: Formula) -> bool:
        """Return whether the two formulas are equal wherever they have values."""
        if first == second:
            return True
        if heads(first) & TWO_VALUED or heads(second) & TWO_VALUED:
            return False
        names = symbols(first) | symbols(second)
        if not names:
            return self._same_constants(first, second)
        has_same_names = symbols(first) == symbols(second)
        if not has_same_names and "infinity" in names:  # ∞ has a value as variables have
            return False
        return self._same_at_points(first, second, names)

    def constant(self, formula: Formula) -> Numeric:
        """Return the value of a formula without variables. NoValue if it has none."""
        return self._evaluator({}, False, PRECISION).value(formula)

    def proportional(self, first: Formula, second: Formula, positive: bool = False) -> bool:
        """Return whether one formula is the other times a constant that is not zero.
        positive: the constant must be positive, too.
        """
        names = symbols(first) | symbols(second)
        if not names or symbols(first) != symbols(second):
            return False
        ratios = []
        for values in self._values(names, first, second, integers=False):
            if values is None or not values[0] or not values[1]:
                continue
            ratios.append(self._quotient(*values))
        if len(ratios) < ENOUGH:
            return False
        if positive and not all(map(_is_positive, ratios)):
            return False
        return all(self._close(ratio, ratios[0]) for ratio in ratios[1:])

    def _quotient(self, above: Numeric, below: Numeric) -> Numeric:
        if isinstance(above, Fraction) and isinstance(below, Fraction):
            return above / below
        return as_real(above) / as_real(below)

    def _evaluator(self, point: dict[str, Numeric], real: bool, precision: int) -> Evaluator:
        """Return an evaluator at a point, and set the precision, in bits, for all."""
        CONTEXT.prec = precision
        return Evaluator(point, real, self.budget)

    def _same_constants(self, first: Formula, second: Formula) -> bool:
        """Compare formulas without variables, complex values included; False if one has
        no value.
        """
        try:
            return self._same_values({}, False, first, second)
        except NoValue:
            return False

    def _same_values(
        self, point: dict[str, Numeric], real: bool, first: Formula, second: Formula
    ) -> bool:
        """Return whether both have the same value at a point. real: as in Evaluator.
        NoValue if one has none.

        Values that are not exact are equal if their difference shrinks with the
        precision: it is computed with one, two and at least four times as many bits.
        """
        evaluator = self._evaluator(point, real, PRECISION)
        a = evaluator.value(first)
        b = evaluator.value(second)
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return a == b
        if evaluator.spread > MOST_SPREAD:
            return False
        real_a = as_real(a)
        real_b = as_real(b)
        coarse = abs(real_a - real_b)
        scale = max(abs(real_a), abs(real_b))
        precision = PRECISION
        loses_few_bits = evaluator.spread < PRECISION // 4
        if loses_few_bits and coarse > scale * Real(2) ** (-PRECISION // 4):
            return False  # the difference is too large for an error of rounding
        if not loses_few_bits:
            precision += evaluator.spread
            coarse = self._difference(point, real, precision, first, second)
        fine = self._difference(point, real, 2 * precision, first, second)
        noise = max(coarse, scale * Real(2) ** -precision)
        if fine > noise * Real(2) ** (-precision // 2):
            return False
        # A difference may be as small as the smallest exact number in the formulas.
        finest_precision = 4 * precision + 3 * evaluator.bits
        finest = self._difference(point, real, finest_precision, first, second)
        return finest <= scale * Real(2) ** (-finest_precision * 3 // 4)

    def _difference(
        self,
        point: dict[str, Numeric],
        real: bool,
        precision: int,
        first: Formula,
        second: Formula,
    ) -> Numeric:
        """Return the distance between both values at a point, computed with `precision`
        bits. real: as in Evaluator. NoValue if one has none.
        """
        evaluator = self._evaluator(point, real, precision)
        a = as_real(evaluator.value(first))
        b = as_real(evaluator.value(second))
        return abs(a - b)

    def _same_at_points(self, first: Formula, second: Formula, names: frozenset[str]) -> bool:
        """Compare formulas with the variables `names`: at rational points, or at
        natural numbers if they have values at too few of the others; formulas by cases
        at extreme points, too.
        """
        real = not _has_imaginary(first) and not _has_imaginary(second)
        operations = heads(first) | heads(second)
        if operations & STEPPED and not self._same_at_extremes(first, second, names, real):
            return False
        agreeing: int | None = 0
        if not operations & INDEXED:
            agreeing = self._points_of_agreement(first, second, names, real, integers=False)
        if agreeing is None:
            return False
        if agreeing < ENOUGH:
            agreeing = self._points_of_agreement(first, second, names, real, integers=True)
        return agreeing is not None and agreeing >= ENOUGH

    def _same_at_extremes(
        self, first: Formula, second: Formula, names: frozenset[str], real: bool
    ) -> bool:
        """Compare at points of both signs and of very different sizes. Where only one
        of two formulas by cases has a value, they differ.
        """
        may_jump = bool((heads(first) | heads(second)) & JUMPING)
        for number, size in enumerate(EXTREMES):
            point = _extreme_point(sorted(names), number, size)
            try:
                if not self._same_values(dict(point), real, first, second):
                    return False
            except NoValue:
                if may_jump and self._has_value(point, first) != self._has_value(point, second):
                    return False
        return True

    def _points_of_agreement(
        self, first: Formula, second: Formula, names: frozenset[str], real: bool, integers: bool
    ) -> int | None:
        """Return at how many points both have the same value; None if they differ at
        one, or one has a logarithm of a negative number where the other has a value.
        integers: the points are integers.
        """
        agreeing = 0
        for number in range(POINTS):
            point = {name: variable(name, number, integers) for name in names}
            try:
                if not self._same_values(dict(point), real, first, second):
                    return None
                agreeing += 1
            except OutsideDomain:
                if self._has_value(point, first) != self._has_value(point, second):
                    return None
            except NoValue:
                continue
        return agreeing

    def _has_value(self, point: dict[str, Fraction], formula: Formula) -> bool:
        """Return whether a formula has a real value at a point."""
        try:
            self._evaluator(dict(point), True, PRECISION).value(formula)
        except NoValue:
            return False
        return True

    def _values(
        self, names: frozenset[str], first: Formula, second: Formula, integers: bool
    ) -> Iterator[tuple[Numeric, Numeric] | None]:
        """Iterate over both formulas' values at several points; None where one has
        none.
        """
        real = not _has_imaginary(first) and not _has_imaginary(second)
        for number in range(POINTS):
            point: dict[str, Numeric] = {name: variable(name, number, integers) for name in names}
            evaluator = self._evaluator(point, real, PRECISION)
            try:
                yield evaluator.value(first), evaluator.value(second)
            except NoValue:
                yield None

    def _close(self, a: Numeric, b: Numeric) -> bool:
        """Return whether two values are equal, those that are not exact in half of
        their digits.
        """
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return a == b
        first = as_real(a)
        second = as_real(b)
        largest_difference = abs(first) * Real(2) ** (-PRECISION // 2)
        return abs(first - second) <= largest_difference


def _extreme_point(names: list[str], number: int, size: Fraction) -> dict[str, Fraction]:
    """Return values of this size. Their signs are the bits of the point's number."""
    point = {}
    for place, name in enumerate(names):
        is_positive = bool((number >> place) & 1)
        value = abs(variable(name, number)) * size
        point[name] = value if is_positive else -value
    return point


def _has_imaginary(formula: Formula) -> bool:
    return IMAGINARY in parts(formula)


def _is_positive(value: Numeric) -> bool:
    return not isinstance(value, Complex) and value > 0


def needs_computing(formula: Formula, equality: Equality) -> bool:
    """Return whether a step is left that makes one rational number of others: 2 + 3,
    √16, 5!.

    Fractions, signs and powers of ten behind a factor are no such steps. In a formula
    without variables and without a value, one is always left.
    """
    if not isinstance(formula, Apply):
        return False
    arguments = formula.arguments
    if formula.head in ("-", "%", "degree"):
        return needs_computing(arguments[0], equality)
    if any(needs_computing(argument, equality) for argument in arguments):
        return not _is_scientific(formula)  # the 10^5 of 4 · 10^5 may stay
    if formula.head == "/":
        return is_whole_fraction(formula)
    if _is_scientific(formula):
        return False
    if formula.head in ("+", "*"):
        rational = [argument for argument in arguments if _is_rational(argument)]
        return len(rational) > 1
    if symbols(formula):
        return False
    try:
        if isinstance(equality.constant(formula), Fraction):
            return True
        return _is_nearly_rational(formula, equality)
    except NoValue:
        return True


def is_whole_fraction(formula: Apply) -> bool:
    """Return whether a fraction of two numbers is an integer that has to be computed:
    18/3, and neither 18/1 nor 18/0.
    """
    above, below = formula.arguments
    if not isinstance(above, Number) or not isinstance(below, Number) or below.value in (0, 1):
        return False
    return (above.value / below.value).denominator == 1


def _is_rational(formula: Formula) -> bool:
    """Return whether the formula is made of numbers alone by signs and division."""
    if isinstance(formula, Apply):
        return formula.head in ("-", "/") and all(map(_is_rational, formula.arguments))
    return isinstance(formula, Number)


def _is_nearly_rational(formula: Formula, equality: Equality) -> bool:
    """Return whether a value of many digits is an integer or a fraction with a
    denominator of 1 to 10. False for complex values; NoValue if there is no value.
    """
    value = equality.constant(formula)
    if not isinstance(value, Real):
        return False
    common_multiple = math.factorial(7)  # 5040, which 1 to 10 divide
    scaled = value * common_multiple
    return bool(abs(scaled - CONTEXT.nint(scaled)) < Real(10) ** -40)


def _is_scientific(formula: Apply) -> bool:
    """Return whether this is a number times a power of ten."""
    if formula.head != "*" or len(formula.arguments) != 2:
        return False
    factor, power = formula.arguments
    if not isinstance(power, Apply) or power.head != "^" or not _is_rational(factor):
        return False
    base, exponent = power.arguments
    return isinstance(base, Number) and base.value == 10 and _is_rational(exponent)
