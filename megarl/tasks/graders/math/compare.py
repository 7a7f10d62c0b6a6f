"""Whether two answers are equal: within a kind, or across kinds that write the same
thing.

x = 5                      ─►  5                      a single value may be named
x = 2, y = 3               ─►  (2, 3)                 in the order of the names
-1 < x < 3                 ─►  (-1, 3)                a set of real numbers
\\frac{3 \\pm \\sqrt5}{2}   ─►  two values
(1, 2), \\langle 1, 2 \\rangle, a column                a vector
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, TypeGuard

from megarl.tasks.graders.math.equality import Equality
from megarl.tasks.graders.math.evaluation import (
    MOST_STEPS,
    Budget,
    Complex,
    NoValue,
    Real,
    TooMuchWork,
    as_real,
)
from megarl.tasks.graders.math.formulas import (
    TWO_VALUED,
    Apply,
    Formula,
    Number,
    Symbol,
    heads,
    integer,
    parts,
    renamed,
    symbols,
    with_sign,
)
from megarl.tasks.graders.math.kinds import (
    Bracket,
    Builder,
    Combination,
    Congruence,
    Expression,
    Joint,
    Labelled,
    Listing,
    MathAnswer,
    Matrix,
    Numeral,
    Piece,
    Piecewise,
    Ratio,
    RealInterval,
    Relation,
    Words,
)
from megarl.tasks.graders.math.realsets import (
    ORDERS,
    SWAPPED,
    NoRealSet,
    RealSets,
    same_stretches,
)

COORDINATES = frozenset("xyz")
LETTERS = frozenset("abcdfghjklmnopqrstuvwABCDEFGHIJKLMNOPQRSTUVWXYZ")
ARTICLES = frozenset({"the", "a", "an"})
SHORT_WORDS = frozenset(
    {"yes", "no", "true", "false", "none", "dne", "even", "odd", "both", "neither"}
)
UNIT_VECTORS = ("\\vec i", "\\vec j", "\\vec k")
DEGREES = ({"degree", "celsius"}, {"degree", "fahrenheit"})
VECTORS = frozenset({Bracket.ROUND, Bracket.SQUARE, Bracket.ANGLE})


@dataclass(frozen=True)
class NamedAnswer:
    """An answer with the name that it has; None if it has none."""

    name: str | None
    value: MathAnswer


def equal(gold: MathAnswer, answer: MathAnswer) -> bool:
    """Return whether the answer equals the expected one. One that takes too much work
    does not.
    """
    try:
        return Comparison().same(gold, answer)
    except (TooMuchWork, RecursionError):
        return False


class Comparison:
    """Compares two answers within one budget."""

    def __init__(self) -> None:
        self._equality = Equality(Budget())
        self._sets = RealSets(self._equality)

    @property
    def steps(self) -> int:
        """The operations done so far."""
        return MOST_STEPS - self._equality.budget.steps

    def same(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Return whether two answers are equal."""
        gold = normal(gold)
        answer = normal(answer)
        if not self._approximations_hold(answer):
            return False
        if isinstance(gold, Labelled) or isinstance(answer, Labelled):
            return self._same_choice(gold, answer)
        if _is_approximate(gold) or _is_approximate(answer):
            return self._same_approximations(gold, answer)
        if not self._is_consistent(answer) or (is_solved(gold) and not is_solved(answer)):
            return False
        return self._same_named(gold, answer) or self._same_kind(gold, answer)

    def _is_consistent(self, answer: MathAnswer) -> bool:
        """Return whether the numbers of a chain are equal: not of 6 = 5."""
        if not isinstance(answer, Relation) or set(answer.signs) != {"="}:
            return True
        constants = [
            side
            for side in answer.sides
            if isinstance(side, Expression) and _is_constant_side(side)
        ]
        if len({side.unit for side in constants}) > 1:
            return True
        return all(self._equality.same(constants[-1].formula, c.formula) for c in constants[:-1])

    def _same_choice(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        gold_letter = _letter(gold)
        letter = _letter(answer)
        value = answer.value if isinstance(answer, Labelled) else answer
        gold_value = gold.value if isinstance(gold, Labelled) else gold
        if isinstance(gold, Labelled) and isinstance(answer, Labelled):
            if gold.letter != answer.letter:
                return False
            if gold.value is None or answer.value is None:
                return True
            return self.same(gold.value, answer.value)
        if gold_letter and letter:
            return gold_letter == letter
        return gold_value is not None and value is not None and self.same(gold_value, value)

    def _same_approximations(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare chains with ≈: the exact form counts, and for an expected decimal its
        rounding.
        """
        is_decimal = _is_decimal(named(gold).value)
        for expected in _sides_of_approximation(gold, with_rounding=True):
            for value in _sides_of_approximation(answer, with_rounding=is_decimal):
                if self.same(expected, value):
                    return True
        return False

    def _approximations_hold(self, answer: MathAnswer) -> bool:
        """Return whether each ≈ stands between a name or an exact form and its correct
        rounding.
        """
        return all(
            self._approximation_holds(part) for part in relations_in(answer) if "~" in part.signs
        )

    def _approximation_holds(self, relation: Relation) -> bool:
        at = relation.signs.index("~")
        if at + 1 != len(relation.signs) or set(relation.signs[:at]) - {"="}:
            return False
        exact = relation.sides[at]
        if not isinstance(exact, Expression):
            return False
        if _name(exact) and not _is_constant(exact.formula):
            return at == 0
        rounded = relation.sides[-1]
        if isinstance(exact.formula, Number) and _is_short(exact.formula.value):
            return _is_conversion(exact, rounded)
        return self._rounds(exact, rounded)

    def _rounds(self, exact: Expression, rounded: MathAnswer) -> bool:
        """Return whether a decimal is what an exact number rounds to."""
        if not isinstance(rounded, Expression):
            return False
        if exact.unit and rounded.unit and exact.unit != rounded.unit:
            return False
        if symbols(exact.formula) or not _is_decimal_formula(rounded.formula):
            return False
        try:
            decimal = self._equality.constant(rounded.formula)
            value = self._equality.constant(exact.formula)
        except NoValue:
            return False
        if not isinstance(decimal, Fraction) or isinstance(value, Complex):
            return False
        needed = next((n for n in range(30) if (decimal * 10**n).denominator == 1), None)
        if needed is None:
            return False
        written = [part.decimals for part in parts(rounded.formula) if isinstance(part, Number)]
        decimals = max(needed, *written)
        half_a_digit = Real(10) ** -decimals / 2
        return bool(abs(as_real(value) - as_real(decimal)) <= half_a_digit)

    def _same_named(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare answers of which at least one has a name, `x = 5`."""
        first_value = named(gold)
        second_value = named(answer)
        if first_value.value is gold and second_value.value is answer:
            return False
        if first_value.name and second_value.name and first_value.name != second_value.name:
            return False
        if first_value.name and not second_value.name and not _names_a_value(first_value):
            return False
        if second_value.name and not first_value.name and not _stands_for(second_value):
            return False
        return self._same_kind(normal(first_value.value), normal(second_value.value))

    def _same_kind(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        for compare in (
            self._same_expressions,
            self._same_listings,
            self._same_vectors,
            self._same_assignments,
            self._same_relations,
            self._same_congruences,
            self._same_structures,
            self._same_real_sets,
        ):
            verdict = compare(gold, answer)
            if verdict is not None:
                return verdict
        return False

    def _same_expressions(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        if not isinstance(gold, Expression) or not isinstance(answer, Expression):
            return None
        if _is_constant(gold.formula) and symbols(answer.formula) - symbols(gold.formula):
            return False
        for share, number in ((gold, answer), (answer, gold)):
            if share.unit == "percent" and not number.unit:
                return self._same_percentages(share.formula, number.formula)
        return same_units(gold.unit, answer.unit) and self._equality.same(
            gold.formula, answer.formula
        )

    def _same_percentages(self, share: Formula, number: Formula) -> bool:
        """Compare a percentage with a number: one below 1 is a fraction of the whole,
        others are percent.
        """
        try:
            value = self._equality.constant(number)
        except NoValue:
            return self._equality.same(share, number)
        is_fraction = not isinstance(value, Complex) and not symbols(number) and abs(value) < 1
        if is_fraction:
            share = Apply("/", (share, integer(100)))
        return self._equality.same(share, number)

    def _same_listings(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        if not isinstance(gold, Listing) or not isinstance(answer, Listing):
            return None
        brackets = {gold.bracket, answer.bracket}
        if brackets <= {Bracket.NONE, Bracket.SET}:
            return self._same_unordered(gold, answer)
        if not brackets <= VECTORS:
            return self._same_assignments(gold, answer) or False
        if len(gold.items) != len(answer.items):
            return False
        if Bracket.SQUARE in brackets and len(brackets) > 1 and len(gold.items) < 3:
            return False
        return self._same_in_order(gold.items, answer.items)

    def _same_unordered(self, gold: Listing, answer: Listing) -> bool:
        gold_items, answer_items = _with_bound_names(gold.items, answer.items)
        if _memberships(gold_items) or _memberships(answer_items):
            return self._same_families(gold_items, answer_items)
        if any(item == Words(("…",)) for item in (*gold_items, *answer_items)):
            return self._same_in_order(gold_items, answer_items)
        joints = {gold.joint, answer.joint}
        if Joint.OR in joints and Joint.AND in joints and _has_inequality(gold_items):
            return False
        if gold.joint is not answer.joint and _has_inequality(gold_items):
            by_sets = self._same_real_sets(gold, answer)
            if by_sets is not None or Joint.OR in joints:
                return bool(by_sets)
        if gold.bracket is answer.bracket is Bracket.SET:
            gold_items = self._distinct(gold_items)
            answer_items = self._distinct(answer_items)
        gold_values = self._in_order_of_value(gold_items)
        values = self._in_order_of_value(answer_items)
        if gold_values is not None and values is not None:
            return self._same_in_order(gold_values, values)
        return self._same_multiset(gold_items, answer_items, self._same_item)

    def _same_families(self, gold: Sequence[MathAnswer], answer: Sequence[MathAnswer]) -> bool:
        """Compare `x = k\\pi, k \\in \\mathbb{Z}` with others: the sets, then what is
        left.
        """
        if not self._same_multiset(_memberships(gold), _memberships(answer), self.same):
            return False
        remaining = [item for item in gold if item not in _memberships(gold)]
        others = [item for item in answer if item not in _memberships(answer)]
        if len(remaining) == len(others) == 1:
            return self.same(remaining[0], others[0])
        return self._same_multiset(remaining, others, self._same_item)

    def _same_item(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare items of lists, in which a value and a named value are not the same."""
        gold_is_named = named(gold).name is not None
        if gold_is_named is not (named(answer).name is not None):
            return False
        return self.same(gold, answer)

    def _distinct(self, items: Sequence[MathAnswer]) -> Sequence[MathAnswer]:
        distinct: list[MathAnswer] = []
        ordered = self._in_order_of_value(items)
        if ordered is not None:
            pairs = itertools.pairwise(ordered)
            return [*ordered[:1], *(item for before, item in pairs if not self.same(before, item))]
        for item in items:
            if not any(self.same(item, second_value) for second_value in distinct):
                distinct.append(item)
        return distinct

    def _in_order_of_value(self, items: Sequence[MathAnswer]) -> list[MathAnswer] | None:
        """Return real constants by size, each evaluated once; None if the items are
        something else.
        """
        sized = []
        for number, item in enumerate(items):
            if not isinstance(item, Expression) or item.unit or not _is_constant_side(item):
                return None
            if heads(item.formula) & TWO_VALUED:
                return None
            try:
                value = as_real(self._equality.constant(item.formula))
            except NoValue:
                return None
            if isinstance(value, Complex):
                return None
            sized.append((value, number))
        return [items[number] for _, number in sorted(sized)]

    def _same_multiset[T](
        self, gold: Sequence[T], answer: Sequence[T], same: Callable[[T, T], bool]
    ) -> bool:
        if len(gold) != len(answer):
            return False
        remaining = list(answer)
        for item in gold:
            match = next(
                (n for n, second_value in enumerate(remaining) if same(item, second_value)), None
            )
            if match is None:
                return False
            del remaining[match]
        return True

    def _same_in_order(self, gold: Sequence[MathAnswer], answer: Sequence[MathAnswer]) -> bool:
        if len(gold) != len(answer):
            return False
        return all(self._same_item(a, b) for a, b in zip(gold, answer, strict=True))

    def _same_vectors(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            return self._same_matrices(gold, answer)
        entries = _entries(gold)
        others = _entries(answer)
        if entries is None or others is None:
            return self._same_by_unit_vectors(gold, answer)
        if isinstance(gold, Listing) and isinstance(answer, Listing):
            return None
        if len(entries) != len(others):
            return False
        pairs = zip(entries, others, strict=True)
        return all(self._equality.same(a, b) for a, b in pairs)

    def _same_matrices(self, gold: Matrix, answer: Matrix) -> bool:
        if len(gold.rows) != len(answer.rows) or len(gold.rows[0]) != len(answer.rows[0]):
            return False
        for row, second_value in zip(gold.rows, answer.rows, strict=True):
            if not all(self._equality.same(a, b) for a, b in zip(row, second_value, strict=True)):
                return False
        return True

    def _same_by_unit_vectors(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare `2\\mathbf{i} + 3\\mathbf{j}` with a vector."""
        for first_value, second_value in ((gold, answer), (answer, gold)):
            entries = _entries(first_value)
            if entries is None or not isinstance(second_value, Expression) or len(entries) > 3:
                continue
            if symbols(second_value.formula) & set(UNIT_VECTORS):
                terms = [
                    Apply("*", (entry, Symbol(unit)))
                    for entry, unit in zip(entries, UNIT_VECTORS, strict=False)
                ]
                return self._equality.same(Apply("+", tuple(terms)), second_value.formula)
        return None

    def _same_assignments(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare named values with each other, or with a tuple in the order of the
        names.
        """
        first_value = assignments(gold)
        second_value = assignments(answer)
        if first_value is not None and second_value is not None:
            if first_value.keys() != second_value.keys():
                return False
            return all(self.same(first_value[name], second_value[name]) for name in first_value)
        for names, values in ((first_value, answer), (second_value, gold)):
            if names is None or not isinstance(values, Listing):
                continue
            in_order = list(names) == sorted(names)
            if values.bracket not in (Bracket.ROUND, Bracket.ANGLE) or not in_order:
                return False
            return self._same_in_order(tuple(names.values()), values.items)
        return None

    def _same_relations(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        if not isinstance(gold, Relation) or not isinstance(answer, Relation):
            return None
        gold = ascending(gold)
        answer = ascending(answer)
        are_inequalities = set(gold.signs) <= ORDERS and set(answer.signs) <= ORDERS
        by_sets = self._same_real_sets(gold, answer) if are_inequalities else None
        if by_sets is not None:
            return by_sets
        if gold.signs != answer.signs:
            return False
        links = zip(_links(gold), _links(answer), strict=True)
        if len(gold.signs) > 1:
            return all(self.same(a, b) for a, b in zip(gold.sides, answer.sides, strict=True))
        return all(self._same_link(sign, a, b) for (sign, *a), (_, *b) in links)

    def _same_link(
        self, sign: str, gold: Sequence[MathAnswer], answer: Sequence[MathAnswer]
    ) -> bool:
        if all(self.same(a, b) for a, b in zip(gold, answer, strict=True)):
            return True
        if sign in ("=", "!=") and self.same(gold[0], answer[1]) and self.same(gold[1], answer[0]):
            return True
        if sign in ("=", "!=") and _is_value_of_letter(gold):
            return False
        difference = _difference(gold)
        second_value = _difference(answer)
        if difference is None or second_value is None or sign not in ORDERS | {"=", "!="}:
            return False
        return self._equality.proportional(difference, second_value, positive=sign in ORDERS)

    def _same_congruences(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        if isinstance(gold, Congruence) and isinstance(answer, Congruence):
            lefts = (gold.left, answer.left)
            if lefts != (None, None) and not self._same_left(*lefts):
                return False
            if not self._equality.same(gold.modulus, answer.modulus):
                return False
            reduced = [self._reduced(c) for c in (gold, answer)]
            return self._same_multiset(reduced[0], reduced[1], self._equality.same)
        for congruence, value in ((gold, answer), (answer, gold)):
            if isinstance(congruence, Congruence) and isinstance(value, Expression):
                if congruence is gold or not _is_constant(congruence.left):
                    return False
                single = len(congruence.residues) == 1 and self._is_true(congruence)
                return single and self._equality.same(congruence.residues[0], value.formula)
        return None

    def _is_true(self, congruence: Congruence) -> bool:
        """Return whether a number is congruent to the residue, if both are integers."""
        assert congruence.left is not None
        difference = Apply("+", (congruence.left, Apply("-", (congruence.residues[0],))))
        try:
            return not self._equality.constant(Apply("mod", (difference, congruence.modulus)))
        except NoValue:
            return False

    def _same_left(self, gold: Formula | None, answer: Formula | None) -> bool:
        if gold is None or answer is None:
            return isinstance(gold or answer, Symbol)
        return self._equality.same(gold, answer)

    def _reduced(self, congruence: Congruence) -> list[Formula]:
        """Return the residues as the smallest natural numbers, if they are integers."""
        reduced: list[Formula] = []
        for residue in congruence.residues:
            remainder = Apply("mod", (residue, congruence.modulus))
            try:
                value = self._equality.constant(remainder)
            except NoValue:
                value = None
            is_integer = isinstance(value, Fraction) and not symbols(remainder)
            reduced.append(Number(value) if is_integer else residue)
        return reduced

    def _same_structures(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        if type(gold) is not type(answer):
            return None
        if isinstance(gold, Words) and isinstance(answer, Words):
            return same_words(gold, answer)
        if isinstance(gold, Numeral):
            return gold == answer
        if isinstance(gold, Ratio) and isinstance(answer, Ratio):
            if gold.suffix != answer.suffix or len(gold.terms) != len(answer.terms):
                return False
            return all(map(self._equality.same, gold.terms, answer.terms))
        if isinstance(gold, Piecewise) and isinstance(answer, Piecewise):
            return self._same_multiset(gold.pieces, answer.pieces, self._same_piece)
        if isinstance(gold, RealInterval) and isinstance(answer, RealInterval):
            return self._same_intervals(gold, answer)
        if isinstance(gold, Builder) and isinstance(answer, Builder):
            return self._same_builders(gold, answer)
        return None

    def _same_piece(self, gold: Piece, answer: Piece) -> bool:
        if not self.same(gold.value, answer.value):
            return False
        if gold.condition is None or answer.condition is None:
            return gold.condition is answer.condition
        return self.same(gold.condition, answer.condition)

    def _same_intervals(self, gold: RealInterval, answer: RealInterval) -> bool:
        closed = (gold.low_closed, gold.high_closed) == (answer.low_closed, answer.high_closed)
        low = self._equality.same(gold.low, answer.low)
        return closed and low and self._equality.same(gold.high, answer.high)

    def _same_builders(self, gold: Builder, answer: Builder) -> bool:
        by_sets = self._same_real_sets(gold, answer)
        if by_sets is not None:
            return by_sets
        first_value = _with_one_name(gold)
        second_value = _with_one_name(answer)
        return self.same(first_value.element, second_value.element) and self.same(
            first_value.condition, second_value.condition
        )

    def _same_real_sets(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare sets of real numbers; None if not both are."""
        variable = self._sets.variable(gold)
        second_value = self._sets.variable(answer)
        if variable is not None and second_value is not None and variable != second_value:
            return False
        try:
            return same_stretches(self._sets.of(gold), self._sets.of(answer))
        except NoRealSet:
            return self._same_symbolic_sets(gold, answer)

    def _same_symbolic_sets(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare sets whose ends have variables, part by part."""
        first_value = _as_interval(gold)
        second_value = _as_interval(answer)
        if first_value and second_value:
            return self._same_intervals(first_value, second_value)
        if not isinstance(gold, Combination) or not isinstance(answer, Combination):
            return None
        if gold.operator != answer.operator:
            return False
        if gold.operator == "without":
            return self._same_in_order(gold.parts, answer.parts)
        return self._same_multiset(gold.parts, answer.parts, self.same)


def same_units(gold: str, answer: str) -> bool:
    """Return whether two units are the same, or only one number has a unit."""
    return not gold or not answer or gold == answer or {gold, answer} in DEGREES


def same_words(gold: Words, answer: Words) -> bool:
    """Return whether two texts are the same but for capitals and an article."""
    return _plain_words(gold) == _plain_words(answer)


def _plain_words(text: Words) -> list[str]:
    words = [
        word.lower() if not word.isupper() or word.lower() in SHORT_WORDS else word
        for word in text.words
    ]
    if len(words) > 1 and words[0].lower() in ARTICLES:
        return words[1:]
    return words


def normal(answer: MathAnswer) -> MathAnswer:
    """Return the answer with ± as two values, and names repeated: `x = 3, 5` is x = 3,
    x = 5.
    """
    if isinstance(answer, Listing):
        items: list[MathAnswer] = []
        spread = answer.bracket in (Bracket.NONE, Bracket.SET)
        for item in answer.items:
            items += _two_values(item) if spread else [item]
        if answer.bracket is Bracket.NONE:
            items = _with_names(items)
            items = _as_solutions(items, answer.joint)
        answer = replace(answer, items=tuple(items))
        if spread:
            return answer
    values = _two_values(answer)
    return values[0] if len(values) == 1 else Listing(tuple(values))


def _two_values(answer: MathAnswer) -> list[MathAnswer]:
    """Return both values of an answer with one ±; the answer itself without one."""
    signs = 0

    def count(formula: Formula) -> Formula:
        nonlocal signs
        signs += sum(isinstance(part, Apply) and part.head in TWO_VALUED for part in parts(formula))
        return formula

    mapped(answer, count)
    if not signs or (signs > 1 and not _opposed(answer)):
        return [answer]
    upper = mapped(answer, lambda formula: with_sign(formula, plus=True))
    lower = mapped(answer, lambda formula: with_sign(formula, plus=False))
    return [upper, lower]


def _opposed(answer: MathAnswer) -> bool:
    """Return whether all the signs ± and ∓ belong together: one of each in the answer."""
    seen_heads: list[str] = []

    def collect(formula: Formula) -> Formula:
        seen_heads.extend(
            p.head for p in parts(formula) if isinstance(p, Apply) and p.head in TWO_VALUED
        )
        return formula

    mapped(answer, collect)
    return sorted(seen_heads) == sorted(TWO_VALUED)


def _as_solutions(items: list[MathAnswer], joint: Joint) -> list[MathAnswer]:
    """Return `x=1, y=2 or x=2, y=1` as two solutions; other items as they are."""
    item_names = [named(item).name for item in items]
    if joint is not Joint.OR or None in item_names:
        return items
    length = len(set(item_names))
    if (
        length < 2
        or len(items) == length
        or item_names != item_names[:length] * (len(items) // length)
    ):
        return items
    return [Listing(tuple(items[n : n + length])) for n in range(0, len(items), length)]


def _with_names(items: list[MathAnswer]) -> list[MathAnswer]:
    """Return items in which values behind a single named value have its name too."""
    first = items[0] if items else None
    if not isinstance(first, Relation) or first.signs != ("=",):
        return items
    if any(isinstance(item, Relation | Words) for item in items[1:]):
        return items
    return [first, *(Relation((first.sides[0], item), ("=",)) for item in items[1:])]


def mapped(answer: Any, change: Callable[[Formula], Formula]) -> Any:
    """Return the answer with all its formulas changed."""
    if isinstance(answer, Number | Symbol | Apply):
        return change(answer)
    if isinstance(answer, tuple):
        return tuple(mapped(item, change) for item in answer)
    if not hasattr(answer, "__dataclass_fields__"):
        return answer
    return replace(
        answer,
        **{field.name: mapped(getattr(answer, field.name), change) for field in fields(answer)},
    )


def named(answer: MathAnswer) -> NamedAnswer:
    """Return an answer's value with its name: x and 5 for `x = 5`; of a computation its
    result.
    """
    if isinstance(answer, Listing) and answer.bracket is Bracket.NONE and answer.items:
        items = [named(item) for item in answer.items]
        names = {item.name for item in items}
        if len(names) == 1 and None not in names:
            return NamedAnswer(
                names.pop(), replace(answer, items=tuple(item.value for item in items))
            )
        return NamedAnswer(None, answer)
    if not isinstance(answer, Relation):
        return NamedAnswer(None, answer)
    first = answer.sides[0]
    if answer.signs == ("in",) and (name := _name(first)):
        is_set = not isinstance(answer.sides[1], Expression)
        return NamedAnswer(name, answer.sides[1]) if is_set else NamedAnswer(None, answer)
    if set(answer.signs) != {"="}:
        return NamedAnswer(None, answer)
    middle = answer.sides[1:-1]
    if not all(_is_constant_side(side) for side in middle):
        return NamedAnswer(None, answer)
    if _is_constant_side(first):
        return NamedAnswer(None, answer.sides[-1])
    if name := _name(first):
        return NamedAnswer(name, answer.sides[-1])
    return NamedAnswer(None, answer)


def _name(side: MathAnswer) -> str | None:
    """Return the name that a side is: a variable, a function of something, a tuple of
    variables.
    """
    if isinstance(side, Listing) and side.bracket is Bracket.ROUND:
        names = [_name(item) for item in side.items]
        return None if None in names else f"({','.join(map(str, names))})"
    if not isinstance(side, Expression) or side.unit:
        return None
    if isinstance(side.formula, Symbol):
        return side.formula.name if symbols(side.formula) else None
    if isinstance(side.formula, Apply) and side.formula.head in ("+", "*", "abs"):
        return repr(side.formula) if _is_asked_for(side.formula) else None
    if isinstance(side.formula, Apply) and side.formula.head.startswith("call "):
        return repr(side.formula)
    return None


def _is_asked_for(formula: Apply) -> bool:
    """Return whether this is what questions ask for: m + n, abc, |AB|; no curve's
    equation.
    """
    if formula.head == "abs":
        return isinstance(formula.arguments[0], Symbol) and formula.arguments[0].name.isupper()
    terms = [
        part
        for part in parts(formula)
        if not isinstance(part, Apply) or part.head not in ("+", "*")
    ]
    variables = [term for term in terms if isinstance(term, Symbol)]
    simple = all(isinstance(term, Symbol | Number) for term in terms)
    names = {variable.name[0] for variable in variables}
    return simple and len(variables) > 1 and not names & COORDINATES and names <= LETTERS


def _names_a_value(named_answer: NamedAnswer) -> bool:
    """Return whether a named answer's value may stand alone: not if it is a curve, `y =
    2x + 3`.
    """
    return named_answer.name not in COORDINATES or not _symbols_of(named_answer.value) & COORDINATES


def _stands_for(named_answer: NamedAnswer) -> bool:
    """Return whether a name is just one for the value: of a tuple the names are in
    order.
    """
    name = named_answer.name or ""
    if name.startswith("("):
        names = name[1:-1].split(",")
        return names == sorted(names)
    return True


def assignments(answer: MathAnswer) -> dict[str, MathAnswer] | None:
    """Return the values of several names; None if the answer is something else."""
    if isinstance(answer, Relation) and set(answer.signs) == {"="}:
        first = answer.sides[0]
        last = answer.sides[-1]
        if len(answer.signs) == 1 and _is_tuple(first) and _is_tuple(last):
            return _paired(first.items, last.items)
        if len(answer.signs) > 1 and all(_name(side) for side in answer.sides[:-1]):
            return _paired(answer.sides[:-1], (last,) * (len(answer.sides) - 1))
        return None
    if not isinstance(answer, Listing) or answer.bracket is not Bracket.NONE:
        return None
    values: dict[str, MathAnswer] = {}
    for item in answer.items:
        first_value = named(item)
        several = (
            assignments(item) if first_value.name is None else {first_value.name: first_value.value}
        )
        if several is None or several.keys() & values.keys():
            return None
        if any(name.startswith("(") for name in several):
            return None
        values |= several
    return values


def _is_tuple(answer: MathAnswer) -> TypeGuard[Listing]:
    return isinstance(answer, Listing) and answer.bracket in VECTORS


def _paired(
    names: Sequence[MathAnswer], values: Sequence[MathAnswer]
) -> dict[str, MathAnswer] | None:
    words = [_name(name) for name in names]
    if None in words or len(set(words)) != len(words) or len(words) != len(values):
        return None
    return dict(zip(map(str, words), values, strict=True))


def ascending(relation: Relation) -> Relation:
    """Return the relation turned so that it does not begin with > or ≥."""
    if relation.signs[0] not in (">", ">="):
        return relation
    signs = tuple(SWAPPED.get(sign, sign) for sign in reversed(relation.signs))
    return Relation(tuple(reversed(relation.sides)), signs)


def _links(relation: Relation) -> list[tuple[Any, ...]]:
    pairs = zip(relation.signs, relation.sides, relation.sides[1:], strict=False)
    return [(sign, left, right) for sign, left, right in pairs]


def _difference(sides: Sequence[MathAnswer]) -> Formula | None:
    left, right = sides
    if not isinstance(left, Expression) or not isinstance(right, Expression):
        return None
    if left.unit or right.unit:
        return None
    return Apply("+", (left.formula, Apply("-", (right.formula,))))


def _entries(answer: MathAnswer) -> tuple[Formula, ...] | None:
    """Return the entries of a vector: a tuple, or a matrix of one row or column."""
    if isinstance(answer, Matrix):
        if len(answer.rows[0]) == 1:
            return tuple(row[0] for row in answer.rows)
        return answer.rows[0] if len(answer.rows) == 1 else None
    if not isinstance(answer, Listing) or answer.bracket not in VECTORS:
        return None
    formulas = [
        item.formula for item in answer.items if isinstance(item, Expression) and not item.unit
    ]
    return tuple(formulas) if len(formulas) == len(answer.items) > 1 else None


def _as_interval(answer: MathAnswer) -> RealInterval | None:
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


def _with_bound_names(
    gold: Sequence[MathAnswer], answer: Sequence[MathAnswer]
) -> tuple[Sequence[MathAnswer], Sequence[MathAnswer]]:
    """Return items in which a family's parameter has one name: k in `(k, 2k), k ∈ ℤ`."""
    gold_name = _parameter(gold)
    name = _parameter(answer)
    if gold_name is None or name is None or gold_name == name:
        return gold, answer
    if any(gold_name in _symbols_of(item) for item in answer):
        return gold, answer
    change = {name: gold_name}
    return gold, [mapped(item, lambda formula: renamed(formula, change)) for item in answer]


def _memberships(items: Sequence[MathAnswer]) -> list[MathAnswer]:
    return [item for item in items if isinstance(item, Relation) and item.signs == ("in",)]


def _parameter(items: Sequence[MathAnswer]) -> str | None:
    names = [
        item.sides[0].formula.name
        for item in items
        if isinstance(item, Relation)
        and item.signs == ("in",)
        and isinstance(item.sides[0], Expression)
        and isinstance(item.sides[0].formula, Symbol)
    ]
    return names[0] if len(names) == 1 and len(items) > 1 else None


def _symbols_of(answer: MathAnswer) -> frozenset[str]:
    names: set[str] = set()

    def collect(formula: Formula) -> Formula:
        names.update(symbols(formula))
        return formula

    mapped(answer, collect)
    return frozenset(names)


def _with_one_name(builder: Builder) -> Builder:
    """Return the set with its element's variable under a name that no text has."""
    element = builder.element
    if isinstance(element, Relation):
        element = element.sides[0]
    if isinstance(element, Expression) and isinstance(element.formula, Symbol):
        change = {element.formula.name: "element"}
        renamed_builder = mapped(builder, lambda formula: renamed(formula, change))
        assert isinstance(renamed_builder, Builder)
        return renamed_builder
    return builder


def _letter(answer: MathAnswer) -> str:
    if isinstance(answer, Labelled):
        return answer.letter
    if isinstance(answer, Expression) and isinstance(answer.formula, Symbol) and not answer.unit:
        name = answer.formula.name
        return name if len(name) == 1 and name in "ABCDEFGHIJ" else ""
    return ""


def _has_inequality(items: Sequence[MathAnswer]) -> bool:
    return any(isinstance(item, Relation) and set(item.signs) & ORDERS for item in items)


def _is_approximate(answer: MathAnswer) -> bool:
    return isinstance(answer, Relation) and "~" in answer.signs


def _sides_of_approximation(answer: MathAnswer, with_rounding: bool) -> list[MathAnswer]:
    """Return what a chain with ≈ says: its exact part and, if asked for, its rounding."""
    if not isinstance(answer, Relation) or not _is_approximate(answer):
        return [answer]
    at = answer.signs.index("~")
    exact: MathAnswer = answer.sides[0]
    if at:
        exact = Relation(answer.sides[: at + 1], answer.signs[:at])
    rounded = answer.sides[at + 1]
    if isinstance(exact, Expression) and _name(exact) and not _is_constant(exact.formula):
        return [Relation((exact, rounded), ("=",))]
    return [exact, rounded] if with_rounding else [exact]


def _is_decimal(answer: MathAnswer) -> bool:
    if not isinstance(answer, Expression) or not isinstance(answer.formula, Number):
        return False
    return answer.formula.value.denominator != 1 and _is_short(answer.formula.value)


def _is_conversion(exact: Expression, converted: MathAnswer) -> bool:
    """Return whether a quantity is given in a second unit: 12 m ≈ 39 feet."""
    if not isinstance(converted, Expression) or "percent" in (exact.unit, converted.unit):
        return False
    return bool(exact.unit and converted.unit) and exact.unit != converted.unit


def _is_decimal_formula(formula: Formula) -> bool:
    """Return whether a formula is an integer or a decimal, perhaps with a sign or a
    power of ten.
    """
    if isinstance(formula, Apply) and formula.head == "-":
        return _is_decimal_formula(formula.arguments[0])
    return isinstance(formula, Number) or heads(formula) <= {"*", "^", "-"}


def _is_short(value: Fraction) -> bool:
    """Return whether a number has finitely many decimals."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


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
    """Return whether each inequality has a letter alone between numbers: not 2x + 1 >
    7.
    """
    relations = [part for part in relations_in(answer) if set(part.signs) & (ORDERS | {"!="})]
    return all(map(_is_bare_side, (side for part in relations for side in part.sides)))


def _is_bare_side(side: MathAnswer) -> bool:
    if not isinstance(side, Expression):
        return False
    formula = side.formula
    if isinstance(formula, Apply) and formula.head == "abs":
        formula = formula.arguments[0]
    return isinstance(formula, Symbol) or not symbols(formula) - {"infinity"}


def _is_value_of_letter(sides: Sequence[MathAnswer]) -> bool:
    """Return whether this is `x = 5`: a letter alone, and a number."""
    for letter, value in (sides, tuple(reversed(sides))):
        if _name(letter) and isinstance(letter, Expression) and isinstance(letter.formula, Symbol):
            return _is_constant_side(value)
    return False


def _is_constant(formula: Formula | None) -> bool:
    return formula is not None and not symbols(formula) and not heads(formula) & {"call f"}


def _is_constant_side(side: MathAnswer) -> bool:
    return isinstance(side, Expression) and _is_constant(side.formula)
