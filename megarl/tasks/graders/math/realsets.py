"""Sets of real numbers as unions of intervals with numbers as ends."""

from dataclasses import dataclass

from megarl.tasks.graders.math.equality import Equality
from megarl.tasks.graders.math.evaluation import CONTEXT, Complex, NoValue, Numeric, Real, as_real
from megarl.tasks.graders.math.formulas import INFINITY, Apply, Formula, Symbol, integer, symbols
from megarl.tasks.graders.math.kinds import (
    Bracket,
    Builder,
    Combination,
    Expression,
    Joint,
    Listing,
    MathAnswer,
    RealInterval,
    Relation,
)

INFINITE = CONTEXT.inf
NEARLY = Real(10) ** -50
ORDERS = frozenset({"<", "<=", ">", ">="})
SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}


@dataclass(frozen=True)
class Stretch:
    """The numbers between two ends; one number if the ends are the same. low_closed,
    high_closed: whether the end itself belongs to it.
    """

    low: Numeric
    high: Numeric
    low_closed: bool
    high_closed: bool

    @property
    def empty(self) -> bool:
        """Whether no number lies between the ends."""
        if nearly(self.low, self.high):
            return not (self.low_closed and self.high_closed)
        return bool(self.low > self.high)


type Stretches = tuple[Stretch, ...]
EVERYTHING = (Stretch(-INFINITE, INFINITE, False, False),)


class NoRealSet(Exception):
    """The answer is no set of real numbers whose ends can be computed."""


def nearly(a: Numeric, b: Numeric) -> bool:
    """Return whether two ends are the same number, up to rounding in the 50th digit."""
    if CONTEXT.isinf(a) or CONTEXT.isinf(b):
        return bool(a == b)
    largest = max(abs(a), abs(b), 1)
    return bool(abs(a - b) <= NEARLY * largest)


def same_stretches(first: Stretches, second: Stretches) -> bool:
    """Return whether two sets in normal form are the same."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a.low_closed != b.low_closed or a.high_closed != b.high_closed:
            return False
        if not nearly(a.low, b.low) or not nearly(a.high, b.high):
            return False
    return True


def united(stretches: Stretches) -> Stretches:
    """Return the union in its normal form: sorted, without empty stretches or any that
    overlap or touch.
    """
    merged: list[Stretch] = []
    filled = [stretch for stretch in stretches if not stretch.empty]
    # Of stretches with the same low end, one that has this end comes first.
    for stretch in sorted(filled, key=lambda stretch: (stretch.low, not stretch.low_closed)):
        last = merged[-1] if merged else None
        if last is None or not _touch(last, stretch):
            merged.append(stretch)
        elif nearly(stretch.high, last.high):
            closed = last.high_closed or stretch.high_closed
            merged[-1] = Stretch(last.low, last.high, last.low_closed, closed)
        elif stretch.high > last.high:
            merged[-1] = Stretch(last.low, stretch.high, last.low_closed, stretch.high_closed)
    return tuple(merged)


def _touch(first: Stretch, second: Stretch) -> bool:
    """Return whether two stretches make one. second: begins where `first` does, or
    above.
    """
    if nearly(first.high, second.low):
        return first.high_closed or second.low_closed
    return bool(second.low < first.high)


def intersected(first: Stretches, second: Stretches) -> Stretches:
    """Return what lies in both sets."""
    return united(tuple(_overlap(a, b) for a in first for b in second))


def _overlap(a: Stretch, b: Stretch) -> Stretch:
    """Return what lies in both, which may be an empty stretch. If both have the same
    end, it belongs to the overlap only if it belongs to both.
    """
    low = max(a.low, b.low)
    high = min(a.high, b.high)
    low_closed = all(part.low_closed for part in (a, b) if nearly(part.low, low))
    high_closed = all(part.high_closed for part in (a, b) if nearly(part.high, high))
    return Stretch(low, high, low_closed, high_closed)


def complement(stretches: Stretches) -> Stretches:
    """Return all real numbers outside the set."""
    remaining: Stretches = EVERYTHING
    for stretch in stretches:
        outside = (
            Stretch(-INFINITE, stretch.low, False, not stretch.low_closed),
            Stretch(stretch.high, INFINITE, not stretch.high_closed, False),
        )
        remaining = intersected(remaining, outside)
    return remaining


class RealSets:
    """Reads answers as sets of real numbers."""

    def __init__(self, equality: Equality) -> None:
        self._equality = equality

    def of(self, answer: MathAnswer) -> Stretches:
        """Return the set of real numbers that an answer describes. NoRealSet if it is
        none.
        """
        if isinstance(answer, RealInterval):
            return self._interval(answer.low, answer.high, answer.low_closed, answer.high_closed)
        if isinstance(answer, Expression) and answer.formula == Symbol(r"\mathbb{R}"):
            return EVERYTHING
        if isinstance(answer, Combination):
            return self._combination(answer)
        if isinstance(answer, Listing):
            return self._listing(answer)
        if isinstance(answer, Relation):
            return self._solutions(answer)
        if isinstance(answer, Builder):
            return self._builder(answer)
        raise NoRealSet

    def variable(self, answer: MathAnswer) -> str | None:
        """Return the one variable of the relations that the answer is; "" if they have
        none or several, None if the answer is no relation.
        """
        if isinstance(answer, Relation):
            names = frozenset[str]()
            for side in answer.sides:
                if isinstance(side, Expression):
                    names |= symbols(side.formula)
            variables = [name for name in names - {"infinity"} if not name.startswith("\\mathbb")]
            return variables[0] if len(variables) == 1 else ""
        if isinstance(answer, Listing) and answer.bracket is Bracket.NONE:
            distinct = {self.variable(item) for item in answer.items}
            return distinct.pop() if len(distinct) == 1 else ""
        return None

    def _interval(
        self, low: Formula, high: Formula, low_closed: bool, high_closed: bool
    ) -> Stretches:
        """Return an interval as a set. NoRealSet if it is empty, as (3, 1)."""
        stretch = Stretch(self._end(low), self._end(high), low_closed, high_closed)
        if stretch.empty:
            raise NoRealSet
        return (stretch,)

    def _end(self, formula: Formula) -> Numeric:
        """Return the value of an interval's end, which may be infinite. NoRealSet if it
        has variables, or no real value.
        """
        if formula == INFINITY or formula == Apply("+", (INFINITY,)):
            return INFINITE
        if formula == Apply("-", (INFINITY,)):
            return -INFINITE
        if symbols(formula):
            raise NoRealSet
        try:
            value = self._equality.constant(formula)
        except NoValue:
            raise NoRealSet from None
        return _real_end(value)

    def _combination(self, answer: Combination) -> Stretches:
        """Return the union, intersection or difference of sets, from the left."""
        result, *others = (self._member(part) for part in answer.parts)
        for second in others:
            if answer.operator == "union":
                result = united((*result, *second))
            elif answer.operator == "intersection":
                result = intersected(result, second)
            else:
                result = intersected(result, complement(second))
        return result

    def _member(self, part: MathAnswer) -> Stretches:
        """Return one of the sets that a combination joins, which may list its numbers:
        `\\{0\\}`.
        """
        if isinstance(part, Listing) and part.bracket is Bracket.SET:
            return self._points(part)
        return self.of(part)

    def _points(self, listing: Listing) -> Stretches:
        """Return the listed numbers as a set. NoRealSet unless all are numbers."""
        points = []
        for item in listing.items:
            if not isinstance(item, Expression) or item.unit:
                raise NoRealSet
            value = self._end(item.formula)
            points.append(Stretch(value, value, True, True))
        return united(tuple(points))

    def _listing(self, listing: Listing) -> Stretches:
        """Return a pair in round or square brackets as an interval, or inequalities of
        one variable, joined by `and` or `or`, as their solutions. NoRealSet for other
        lists.
        """
        if listing.bracket in (Bracket.ROUND, Bracket.SQUARE) and len(listing.items) == 2:
            low, high = listing.items
            if isinstance(low, Expression) and isinstance(high, Expression):
                closed = listing.bracket is Bracket.SQUARE
                return self._interval(low.formula, high.formula, closed, closed)
        if listing.bracket is not Bracket.NONE or listing.joint is Joint.COMMA:
            raise NoRealSet
        if self.variable(listing) == "":
            raise NoRealSet
        sets = [self.of(item) for item in listing.items]
        result = sets[0]
        for second in sets[1:]:
            if listing.joint is Joint.OR:
                result = united((*result, *second))
            else:
                result = intersected(result, second)
        return result

    def _builder(self, builder: Builder) -> Stretches:
        """Return the set that `\\{x \\mid x > 3\\}` describes. NoRealSet unless the
        element is the condition's one variable, perhaps with `\\in \\mathbb{R}`.
        """
        element = builder.element
        if isinstance(element, Relation):
            if element.signs != ("in",) or element.sides[1] != Expression(Symbol(r"\mathbb{R}")):
                raise NoRealSet
            element = element.sides[0]
        if not isinstance(element, Expression) or not isinstance(element.formula, Symbol):
            raise NoRealSet
        if self.variable(builder.condition) != element.formula.name:
            raise NoRealSet
        return self.of(builder.condition)

    def _solutions(self, relation: Relation) -> Stretches:
        """Return the numbers that meet a chain of inequalities, linear in one variable,
        or the set of `x \\in (0, 1)`. NoRealSet for other relations.
        """
        first = relation.sides[0]
        is_symbol = isinstance(first, Expression) and isinstance(first.formula, Symbol)
        if relation.signs == ("in",) and is_symbol:
            return self.of(relation.sides[1])
        name = self.variable(relation)
        if not name or not set(relation.signs) <= ORDERS | {"!="}:
            raise NoRealSet
        result: Stretches = EVERYTHING
        for place, sign in enumerate(relation.signs):
            first = relation.sides[place]
            second = relation.sides[place + 1]
            result = intersected(result, self._half_line(name, first, sign, second))
        return result

    def _half_line(self, name: str, first: MathAnswer, sign: str, second: MathAnswer) -> Stretches:
        """Return the values of the variable `name` that meet one inequality, linear or
        of an absolute value. NoRealSet for others, and with units.
        """
        if not isinstance(first, Expression) or not isinstance(second, Expression):
            raise NoRealSet
        if first.unit or second.unit:
            raise NoRealSet
        if _is_absolute(second.formula) and not _is_absolute(first.formula):
            return self._half_line(name, second, SWAPPED[sign], first)
        if isinstance(first.formula, Apply) and first.formula.head == "abs":
            return self._within(name, first.formula.arguments[0], sign, second.formula)
        for formula, is_right_side in ((first.formula, False), (second.formula, True)):
            if formula in (INFINITY, Apply("-", (INFINITY,))):
                return self._all_if_true(formula, is_right_side, sign)
        difference = Apply("+", (first.formula, Apply("-", (second.formula,))))
        slope, at_zero = self._line(name, difference)
        bound = -at_zero / slope
        if sign == "!=":
            return complement((Stretch(bound, bound, True, True),))
        is_below_bound = (sign in ("<", "<=")) == (slope > 0)
        has_bound = sign in ("<=", ">=")
        if is_below_bound:
            return (Stretch(-INFINITE, bound, False, has_bound),)
        return (Stretch(bound, INFINITE, has_bound, False),)

    def _within(self, name: str, inside: Formula, sign: str, bound: Formula) -> Stretches:
        """Return the values of `name` for which the absolute value of `inside` is below
        (|x| < 2 is x < 2 and x > -2) or above the bound (x > 2 or x < -2). NoRealSet
        for a negative bound, and for ≠.
        """
        if symbols(bound) or self._end(bound) < 0:
            raise NoRealSet
        opposite = Expression(Apply("-", (bound,)))
        at_bound = self._half_line(name, Expression(inside), sign, Expression(bound))
        at_opposite = self._half_line(name, Expression(inside), SWAPPED[sign], opposite)
        if sign in ("<", "<="):
            return intersected(at_bound, at_opposite)
        if sign in (">", ">="):
            return united((*at_bound, *at_opposite))
        raise NoRealSet

    def _all_if_true(self, infinity: Formula, is_right_side: bool, sign: str) -> Stretches:
        """Return all numbers for an inequality with ∞ or -∞ that is true of each, x < ∞
        or -∞ < x. NoRealSet for others.
        """
        is_positive = infinity == INFINITY
        is_upper_bound = is_right_side == (sign == "<")
        if sign not in ("<", ">") or is_positive != is_upper_bound:
            raise NoRealSet
        return EVERYTHING

    def _line(self, name: str, formula: Formula) -> tuple[Numeric, Numeric]:
        """Return slope and value at zero of a linear function of the variable `name`.
        NoRealSet for others, by the values at four points, and for a constant.
        """
        at_0, at_1, at_2, at_minus_7 = (self._value_at(name, formula, x) for x in (0, 1, 2, -7))
        slope = at_1 - at_0
        is_straight = nearly(at_2 - at_1, slope)
        is_straight = is_straight and nearly(at_minus_7 - at_0, -7 * slope)
        if not is_straight or nearly(slope, Real(0)):
            raise NoRealSet
        return slope, at_0

    def _value_at(self, name: str, formula: Formula, x: int) -> Numeric:
        """Return the formula's value where the variable `name` is x. NoRealSet if it
        has none, or a complex one.
        """
        try:
            value = self._equality.constant(_placed(formula, name, integer(x)))
        except NoValue:
            raise NoRealSet from None
        return _real_end(value)


def _is_absolute(formula: Formula) -> bool:
    return isinstance(formula, Apply) and formula.head == "abs"


def _real_end(value: Numeric) -> Numeric:
    """Return a value as a Real. NoRealSet if it is complex."""
    if isinstance(value, Complex):
        raise NoRealSet
    return as_real(value)


def _placed(formula: Formula, name: str, value: Formula) -> Formula:
    """Return the formula with a value in a variable's place."""
    if formula == Symbol(name):
        return value
    if isinstance(formula, Apply):
        arguments = tuple(_placed(argument, name, value) for argument in formula.arguments)
        return Apply(formula.head, arguments)
    return formula
