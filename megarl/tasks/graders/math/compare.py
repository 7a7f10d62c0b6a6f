"""Whether two answers are equal: within a kind, or across kinds that write the same
thing.

x = 5                      ─►  5                      a single value may be named
x = 2, y = 3               ─►  (2, 3)                 in the order of the names
-1 < x < 3                 ─►  (-1, 3)                a set of real numbers
\\frac{3 \\pm \\sqrt5}{2}   ─►  two values
(1, 2), \\langle 1, 2 \\rangle, a column                a vector
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

from megarl.tasks.graders.math.answers import (
    VECTORS,
    as_interval,
    ascending,
    assignments,
    decimals_needed,
    difference_of,
    entries_of,
    has_finite_decimals,
    has_inequality,
    is_approximate,
    is_constant,
    is_constant_side,
    is_conversion,
    is_decimal,
    is_decimal_formula,
    is_solved,
    is_value_of_letter,
    letter_of,
    mapped,
    memberships,
    name_of,
    named,
    names_a_value,
    normal,
    parameter_of,
    relations_in,
    sides_of_approximation,
    stands_for,
    symbols_of,
    value_of_choice,
    with_one_name,
)
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
from megarl.tasks.graders.math.realsets import ORDERS, NoRealSet, RealSets, same_stretches

ARTICLES = frozenset({"the", "a", "an"})
SHORT_WORDS = frozenset(
    {"yes", "no", "true", "false", "none", "dne", "even", "odd", "both", "neither"}
)
UNIT_VECTORS = ("\\vec i", "\\vec j", "\\vec k")
DEGREES = ({"degree", "celsius"}, {"degree", "fahrenheit"})
ELLIPSIS = Words(("…",))


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
        if is_approximate(gold) or is_approximate(answer):
            return self._same_approximations(gold, answer)
        if not self._is_consistent(answer) or (is_solved(gold) and not is_solved(answer)):
            return False
        return self._same_named(gold, answer) or self._same_kind(gold, answer)

    def _is_consistent(self, answer: MathAnswer) -> bool:
        """Return whether the numbers in a chain of equations are equal, as those in `x
        = 6 = 5` are not. Numbers of several units are not compared.
        """
        if not isinstance(answer, Relation) or set(answer.signs) != {"="}:
            return True
        constants = [side for side in answer.sides if is_constant_side(side)]
        units = {side.unit for side in constants}
        if len(units) > 1:
            return True
        return all(
            self._equality.same(constants[-1].formula, side.formula) for side in constants[:-1]
        )

    def _same_choice(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare answers of which at least one is labelled: by the letters if both
        have one, else by the values. Two labelled answers must agree in both, as far as
        both are written.
        """
        if isinstance(gold, Labelled) and isinstance(answer, Labelled):
            if gold.letter != answer.letter:
                return False
            if gold.value is None or answer.value is None:
                return True
            return self.same(gold.value, answer.value)
        gold_letter = letter_of(gold)
        letter = letter_of(answer)
        if gold_letter and letter:
            return gold_letter == letter
        gold_value = value_of_choice(gold)
        value = value_of_choice(answer)
        return gold_value is not None and value is not None and self.same(gold_value, value)

    def _same_approximations(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare answers of which at least one is a chain such as √2 ≈ 1.41. An answer
        is right if it equals either side of an expected chain. Of a chain as an answer
        only the exact side counts, and the rounded one if a decimal is expected.
        """
        expected_value = named(gold).value
        expects_decimal = is_decimal(expected_value)
        for expected in sides_of_approximation(gold, with_rounding=True):
            for value in sides_of_approximation(answer, with_rounding=expects_decimal):
                if self.same(expected, value):
                    return True
        return False

    def _approximations_hold(self, answer: MathAnswer) -> bool:
        """Return whether each ≈ stands between a name or an exact form and its correct
        rounding.
        """
        approximations = [part for part in relations_in(answer) if "~" in part.signs]
        return all(map(self._approximation_holds, approximations))

    def _approximation_holds(self, relation: Relation) -> bool:
        """Return whether a chain's ≈ is its last sign, with nothing but = before it,
        and stands between a name and a value, `x ≈ 3.1`, or between an exact number and
        its rounding or its value in a second unit.
        """
        place = relation.signs.index("~")
        preceding = relation.signs[:place]
        is_last = place + 1 == len(relation.signs)
        if not is_last or set(preceding) - {"="}:
            return False
        exact = relation.sides[place]
        if not isinstance(exact, Expression):
            return False
        if name_of(exact) and not is_constant(exact.formula):
            return place == 0
        rounded = relation.sides[-1]
        if isinstance(exact.formula, Number) and has_finite_decimals(exact.formula.value):
            return is_conversion(exact, rounded)
        return self._rounds(exact, rounded)

    def _rounds(self, exact: Expression, rounded: MathAnswer) -> bool:
        """Return whether a decimal is what an exact number rounds to, at the decimals
        with which it is written: 2.50 has two.
        """
        if not isinstance(rounded, Expression):
            return False
        if exact.unit and rounded.unit and exact.unit != rounded.unit:
            return False
        if symbols(exact.formula) or not is_decimal_formula(rounded.formula):
            return False
        try:
            decimal = self._equality.constant(rounded.formula)
            value = self._equality.constant(exact.formula)
        except NoValue:
            return False
        if not isinstance(decimal, Fraction) or isinstance(value, Complex):
            return False
        decimals = decimals_needed(decimal)
        if decimals is None:
            return False
        for part in parts(rounded.formula):
            if isinstance(part, Number):
                decimals = max(decimals, part.decimals)
        half_a_digit = Real(10) ** -decimals / 2
        return bool(abs(as_real(value) - as_real(decimal)) <= half_a_digit)

    def _same_named(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare the values of answers of which at least one has a name, `x = 5`, or
        is a computation, `2 + 3 = 5`. False if neither is one, if the names differ, or
        if a value without its name would say something else.
        """
        named_gold = named(gold)
        named_answer = named(answer)
        if named_gold.value is gold and named_answer.value is answer:
            return False
        if named_gold.name and named_answer.name:
            names_allow = named_gold.name == named_answer.name
        elif named_gold.name:
            names_allow = names_a_value(named_gold)
        elif named_answer.name:
            names_allow = stands_for(named_answer)
        else:
            names_allow = True
        if not names_allow:
            return False
        return self._same_kind(normal(named_gold.value), normal(named_answer.value))

    def _same_kind(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare answers by the first comparison that is meant for such a pair;
        unequal if none is.
        """
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
        """Compare formulas with their units; a percentage may equal a plain number.
        None unless both answers are formulas.
        """
        if not isinstance(gold, Expression) or not isinstance(answer, Expression):
            return None
        if is_constant(gold.formula) and symbols(answer.formula) - symbols(gold.formula):
            return False  # a number was asked for, not `5 + 0x`
        for share, number in ((gold, answer), (answer, gold)):
            if share.unit == "percent" and not number.unit:
                return self._same_percentages(share.formula, number.formula)
        return same_units(gold.unit, answer.unit) and self._equality.same(
            gold.formula, answer.formula
        )

    def _same_percentages(self, share: Formula, number: Formula) -> bool:
        """Compare a percentage, `share` without its sign, with a number: a number below
        1 is a fraction of the whole, others are percent.
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
        """Compare lists; None unless both answers are lists. Sets and items without
        brackets may have any order, tuples and vectors not. A pair in square brackets
        is an interval, which equals none in other brackets. A vector equals a list in
        other brackets only as coordinates: (1, 2) and `x = 1, y = 2`.
        """
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
        """Compare items without brackets or in a set's braces, in any order unless some
        are left out (…). Inequalities joined by `and` or `or` are compared as sets of
        real numbers.
        """
        gold_items, answer_items = _with_bound_names(gold.items, answer.items)
        if memberships(gold_items) or memberships(answer_items):
            return self._same_families(gold_items, answer_items)
        if ELLIPSIS in gold_items or ELLIPSIS in answer_items:
            return self._same_in_order(gold_items, answer_items)
        joints = {gold.joint, answer.joint}
        if joints == {Joint.OR, Joint.AND} and has_inequality(gold_items):
            return False
        if gold.joint is not answer.joint and has_inequality(gold_items):
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
        gold_sets = memberships(gold)
        sets = memberships(answer)
        if not self._same_multiset(gold_sets, sets, self.same):
            return False
        gold_items = [item for item in gold if item not in gold_sets]
        items = [item for item in answer if item not in sets]
        if len(gold_items) == len(items) == 1:
            return self.same(gold_items[0], items[0])
        return self._same_multiset(gold_items, items, self._same_item)

    def _same_item(self, gold: MathAnswer, answer: MathAnswer) -> bool:
        """Compare items of lists, in which a value and a named value are not the
        same.
        """
        gold_is_named = named(gold).name is not None
        is_named = named(answer).name is not None
        return gold_is_named is is_named and self.same(gold, answer)

    def _distinct(self, items: Sequence[MathAnswer]) -> Sequence[MathAnswer]:
        """Return the items without repetitions; real constants by size, so that only
        neighbours have to be compared.
        """
        ordered = self._in_order_of_value(items)
        if ordered is not None:
            distinct = ordered[:1]
            for previous, item in itertools.pairwise(ordered):
                if not self.same(previous, item):
                    distinct.append(item)
            return distinct
        distinct = []
        for item in items:
            if not any(self.same(item, earlier) for earlier in distinct):
                distinct.append(item)
        return distinct

    def _in_order_of_value(self, items: Sequence[MathAnswer]) -> list[MathAnswer] | None:
        """Return real constants by size, each evaluated once; None if the items are
        something else.
        """
        sized = []
        for number, item in enumerate(items):
            if not isinstance(item, Expression) or item.unit or not is_constant_side(item):
                return None
            if heads(item.formula) & TWO_VALUED:
                return None
            try:
                value = as_real(self._equality.constant(item.formula))
            except NoValue:
                return None
            if isinstance(value, Complex):
                return None
            sized.append((value, number))  # the number orders equal values
        return [items[number] for _, number in sorted(sized)]

    def _same_multiset[T](
        self, gold: Sequence[T], answer: Sequence[T], same: Callable[[T, T], bool]
    ) -> bool:
        """Return whether each item has an equal of its own in the answer, in any order.
        same: compares two items.
        """
        if len(gold) != len(answer):
            return False
        remaining = list(answer)
        for item in gold:
            match = next(
                (n for n, candidate in enumerate(remaining) if same(item, candidate)), None
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
        """Compare matrices, or vectors of which one is a tuple and the other a row, a
        column or a sum of unit vectors; None for other answers, and for two tuples.
        """
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            return self._same_matrices(gold, answer)
        gold_entries = entries_of(gold)
        entries = entries_of(answer)
        if gold_entries is None or entries is None:
            return self._same_by_unit_vectors(gold, answer)
        if isinstance(gold, Listing) and isinstance(answer, Listing):
            return None
        if len(gold_entries) != len(entries):
            return False
        return all(map(self._equality.same, gold_entries, entries))

    def _same_matrices(self, gold: Matrix, answer: Matrix) -> bool:
        """Compare matrices: their sizes, then entry by entry."""
        if len(gold.rows) != len(answer.rows):
            return False
        if len(gold.rows[0]) != len(answer.rows[0]):
            return False
        for gold_row, row in zip(gold.rows, answer.rows, strict=True):
            if not all(map(self._equality.same, gold_row, row)):
                return False
        return True

    def _same_by_unit_vectors(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare `2\\mathbf{i} + 3\\mathbf{j}` with a vector. None unless one answer
        is a vector of up to three entries and the other has unit vectors.
        """
        for vector, sum_of_units in ((gold, answer), (answer, gold)):
            entries = entries_of(vector)
            if entries is None or not isinstance(sum_of_units, Expression) or len(entries) > 3:
                continue
            if symbols(sum_of_units.formula) & set(UNIT_VECTORS):
                terms = []
                for entry, unit in zip(entries, UNIT_VECTORS, strict=False):
                    terms.append(Apply("*", (entry, Symbol(unit))))
                return self._equality.same(Apply("+", tuple(terms)), sum_of_units.formula)
        return None

    def _same_assignments(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare named values, `x = 1, y = 2`, with each other, or with a tuple in the
        order of the names, which must be the alphabet's. None for other answers.
        """
        gold_values = assignments(gold)
        values = assignments(answer)
        if gold_values is not None and values is not None:
            if gold_values.keys() != values.keys():
                return False
            return all(self.same(gold_values[name], values[name]) for name in gold_values)
        for assigned, coordinates in ((gold_values, answer), (values, gold)):
            if assigned is None or not isinstance(coordinates, Listing):
                continue
            is_sorted = list(assigned) == sorted(assigned)
            if coordinates.bracket not in (Bracket.ROUND, Bracket.ANGLE) or not is_sorted:
                return False
            return self._same_in_order(tuple(assigned.values()), coordinates.items)
        return None

    def _same_relations(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare relations: inequalities as sets of real numbers if possible, chains
        side by side, others as `_same_link` does. None unless both answers are
        relations.
        """
        if not isinstance(gold, Relation) or not isinstance(answer, Relation):
            return None
        gold = ascending(gold)
        answer = ascending(answer)
        if set(gold.signs) <= ORDERS and set(answer.signs) <= ORDERS:
            by_sets = self._same_real_sets(gold, answer)
            if by_sets is not None:
                return by_sets
        if gold.signs != answer.signs:
            return False
        if len(gold.signs) > 1:
            return all(self.same(a, b) for a, b in zip(gold.sides, answer.sides, strict=True))
        return self._same_link(gold.signs[0], gold.sides, answer.sides)

    def _same_link(
        self, sign: str, gold: Sequence[MathAnswer], answer: Sequence[MathAnswer]
    ) -> bool:
        """Compare relations of two sides with the same sign between them: side by side,
        or by the differences of their sides, which may have a common factor: 2x < 6 is
        x < 3. An expected `x = 5` equals no multiple of itself.
        """
        if all(self.same(a, b) for a, b in zip(gold, answer, strict=True)):
            return True
        if sign in ("=", "!="):
            gold_first, gold_second = gold
            first, second = answer
            if self.same(gold_first, second) and self.same(gold_second, first):
                return True
            if is_value_of_letter(gold):
                return False
        gold_difference = difference_of(gold)
        difference = difference_of(answer)
        if gold_difference is None or difference is None or sign not in ORDERS | {"=", "!="}:
            return False
        return self._equality.proportional(gold_difference, difference, positive=sign in ORDERS)

    def _same_congruences(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare congruences, or an expected number with a true congruence: 3 with
        `17 \\equiv 3 \\pmod 7`. None for other answers.
        """
        if isinstance(gold, Congruence) and isinstance(answer, Congruence):
            return self._same_residues(gold, answer)
        if isinstance(gold, Congruence) and isinstance(answer, Expression):
            return False
        if isinstance(gold, Expression) and isinstance(answer, Congruence):
            if not is_constant(answer.number) or len(answer.residues) != 1:
                return False
            return self._is_true(answer) and self._equality.same(answer.residues[0], gold.formula)
        return None

    def _same_residues(self, gold: Congruence, answer: Congruence) -> bool:
        """Compare congruences: what is congruent, the modulus, and the residues in any
        order, of which 9 and 2 are the same modulo 7.
        """
        if gold.number is not None or answer.number is not None:
            if not self._same_number(gold.number, answer.number):
                return False
        if not self._equality.same(gold.modulus, answer.modulus):
            return False
        return self._same_multiset(self._reduced(gold), self._reduced(answer), self._equality.same)

    def _is_true(self, congruence: Congruence) -> bool:
        """Return whether a congruence of a number with one residue is true; False
        unless both are integers.
        """
        assert congruence.number is not None
        difference = Apply("+", (congruence.number, Apply("-", (congruence.residues[0],))))
        try:
            return not self._equality.constant(Apply("mod", (difference, congruence.modulus)))
        except NoValue:
            return False

    def _same_number(self, gold: Formula | None, answer: Formula | None) -> bool:
        """Compare what is congruent, None if it is not written. A letter may be left
        out.
        """
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
            if isinstance(value, Fraction) and not symbols(remainder):
                reduced.append(Number(value))
            else:
                reduced.append(residue)
        return reduced

    def _same_structures(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare words, numerals, ratios, functions by cases, intervals or builders,
        part by part; None for answers of two kinds, or of other kinds.
        """
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
        """Compare values and conditions; None stands for everywhere else."""
        if not self.same(gold.value, answer.value):
            return False
        if gold.condition is None or answer.condition is None:
            return gold.condition is answer.condition
        return self.same(gold.condition, answer.condition)

    def _same_intervals(self, gold: RealInterval, answer: RealInterval) -> bool:
        """Compare the ends, and whether they belong to the intervals."""
        if gold.low_closed != answer.low_closed or gold.high_closed != answer.high_closed:
            return False
        low = self._equality.same(gold.low, answer.low)
        return low and self._equality.same(gold.high, answer.high)

    def _same_builders(self, gold: Builder, answer: Builder) -> bool:
        """Compare `\\{x \\mid x > 3\\}` with another such set: as sets of real numbers
        if possible, else element and condition, whatever the variable's name.
        """
        by_sets = self._same_real_sets(gold, answer)
        if by_sets is not None:
            return by_sets
        gold = with_one_name(gold)
        answer = with_one_name(answer)
        if not self.same(gold.element, answer.element):
            return False
        return self.same(gold.condition, answer.condition)

    def _same_real_sets(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare sets of real numbers; inequalities of two variables describe
        different ones. None if not both are such sets.
        """
        gold_variable = self._sets.variable(gold)
        variable = self._sets.variable(answer)
        if gold_variable is not None and variable is not None and gold_variable != variable:
            return False
        try:
            return same_stretches(self._sets.of(gold), self._sets.of(answer))
        except NoRealSet:
            return self._same_symbolic_sets(gold, answer)

    def _same_symbolic_sets(self, gold: MathAnswer, answer: MathAnswer) -> bool | None:
        """Compare sets whose ends have variables, part by part. None unless both are
        intervals, or both joined from sets.
        """
        gold_interval = as_interval(gold)
        interval = as_interval(answer)
        if gold_interval and interval:
            return self._same_intervals(gold_interval, interval)
        if not isinstance(gold, Combination) or not isinstance(answer, Combination):
            return None
        if gold.operator != answer.operator:
            return False
        if gold.operator == "without":
            return self._same_in_order(gold.parts, answer.parts)
        return self._same_multiset(gold.parts, answer.parts, self.same)


def same_units(gold: str, answer: str) -> bool:
    """Return whether two units are the same, or one of them is not written ("")."""
    return not gold or not answer or gold == answer or {gold, answer} in DEGREES


def same_words(gold: Words, answer: Words) -> bool:
    """Return whether two texts are the same but for capitals and an article."""
    return _plain_words(gold) == _plain_words(answer)


def _plain_words(text: Words) -> list[str]:
    """Return the words without an article at the beginning, in small letters but for
    those all in capitals: ABC is a name, NO is none.
    """
    words = []
    for word in text.words:
        is_name = word.isupper() and word.lower() not in SHORT_WORDS
        words.append(word if is_name else word.lower())
    if len(words) > 1 and words[0].lower() in ARTICLES:
        return words[1:]
    return words


def _with_bound_names(
    gold: Sequence[MathAnswer], answer: Sequence[MathAnswer]
) -> tuple[Sequence[MathAnswer], Sequence[MathAnswer]]:
    """Return items in which a family's parameter has one name: k in `(k, 2k), k ∈
    ℤ`.
    """
    gold_name = parameter_of(gold)
    name = parameter_of(answer)
    if gold_name is None or name is None or gold_name == name:
        return gold, answer
    if any(gold_name in symbols_of(item) for item in answer):
        return gold, answer
    change = {name: gold_name}
    return gold, [mapped(item, lambda formula: renamed(formula, change)) for item in answer]
