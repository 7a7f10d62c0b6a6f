"""Answers read whole: text ─► tokens ─► an answer of one kind, or CannotRead.

list        item , item …       also `;`, `and`, `or`
item        label, relation or set, with its unit or condition
relation    side = < ≤ ∈ ≡ …  side
side        sets with ∪ ∩ ∖ between them, or a sum (expressions.py)
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megarl.tasks.graders.math import names
from megarl.tasks.graders.math.expressions import MODULO, Parsed, expression, formula_of
from megarl.tasks.graders.math.formulas import Apply, Formula, Number, Symbol
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
    Piece,
    Piecewise,
    Ratio,
    RealInterval,
    Relation,
    Words,
)
from megarl.tasks.graders.math.layout import plain
from megarl.tasks.graders.math.tokens import CannotRead, Gap, Token, TokenKind, tokens_of
from megarl.tasks.graders.math.units import UnitParser

RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\leq": "<=",
    r"\geq": ">=",
    r"\neq": "!=",
    r"\in": "in",
    r"\approx": "~",
    r"\subset": "subset",
    r"\subseteq": "subset=",
    r"\notin": "notin",
    r"\parallel": "parallel",
    r"\perp": "perp",
}
SET_OPERATORS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "without"}
SEPARATORS = (",", ";", r"\\", r"\quad")
MATRICES = frozenset({"pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"})
SYSTEMS = frozenset(
    {"cases", "dcases", "rcases", "aligned", "align", "gathered", "split", "gather"}
)
MOST_ITEMS = 300
MOST_WORDS = 6
LETTERS_OF_CHOICES = frozenset("ABCDEFGHIJ")


@dataclass(frozen=True)
class QuestionWords:
    """What the question says about its words. letters: its variables; nouns: its
    words.
    """

    letters: frozenset[str] = frozenset()
    nouns: frozenset[str] = frozenset()


NO_QUESTION = QuestionWords()


def read(text: str, question: QuestionWords = NO_QUESTION) -> MathAnswer:
    """Return the answer that the whole text is. CannotRead if any part is not
    understood.
    """
    tokens = tokens_of(plain(text))
    if len(tokens) == 1:
        raise CannotRead("nothing")
    words = only_words(tokens)
    if words:
        return words
    parser = AnswerParser(tokens, question)
    answer = parser.answer()
    if not parser.at_end():
        raise CannotRead(f"{parser.peek().text!r} behind the answer")
    return answer


def only_words(tokens: tuple[Token, ...]) -> Words | None:
    """Return the words if the text has nothing else, else None. tokens: with END."""
    inside = [token for token in tokens[:-1] if token.text not in ('"', "'", "!", ".", "-")]
    if not inside or len(inside) > MOST_WORDS:
        return None
    if any(token.kind not in (TokenKind.WORD, TokenKind.FOREIGN) for token in inside):
        return None
    if any(token.kind is TokenKind.FOREIGN for token in inside):
        return Words(tuple(token.text for token in inside))
    if not any(is_word(token) for token in inside):
        return None
    lower_words = {token.text.lower() for token in inside}
    joins = bool(lower_words & (names.AND | names.OR))
    if joins and not all(map(is_word, inside)):  # `x and y` is a list
        return None
    return Words(tuple(token.text for token in inside))


def is_word(token: Token) -> bool:
    """Return whether this token is a word rather than a name in mathematics."""
    text = token.text
    if len(text) == 1 or text.startswith("\\") or text in names.FUNCTIONS or text == "pi":
        return False
    if text in names.INFINITE or text in names.GREEK_LETTERS:
        return False
    if token.upright or text.lower() in names.ENGLISH:
        return True
    if text.isupper() or len(text) > 3:
        return True
    return len(text) == 3 and not _are_variables(text)


def _are_variables(letters: str) -> bool:
    """Return whether three letters are variables that often stand side by side."""
    return any(set(letters) <= set(run) for run in ("abc", "xyz", "pqr", "mnp", "xyt"))


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()


class AnswerParser(UnitParser):
    """Reads answers of all kinds."""

    def __init__(self, tokens: tuple[Token, ...], question: QuestionWords) -> None:
        super().__init__(tokens, question.letters, question.nouns)
        self._angles = 0
        """Open angle brackets written as `<`, in which `>` closes."""
        self._items_read = 0
        self._joined_by_logic = False
        """Whether ∧ or ∨ was read."""

    def answer(self) -> MathAnswer:
        """Read a whole answer: an item or several."""
        self.accept("=")
        labelled = self._labelled()
        if labelled:
            return labelled
        return self.items()

    def items(self) -> MathAnswer:
        """Read items up to something that does not continue the list."""
        with self.nested():
            items = [self._item()]
            joints = []
            while joint := self._joint(items[-1]):
                items.append(self._item())
                joints.append(joint)
                self._items_read += 1
                if self._items_read > MOST_ITEMS:
                    raise CannotRead(f"more than {MOST_ITEMS} items")
        if not joints:
            return items[0]
        if self._joined_by_logic and not all(isinstance(item, Relation) for item in items):
            raise CannotRead("a sign of logic between no relations")
        joint = next((joint for joint in joints if joint is not Joint.COMMA), Joint.COMMA)
        return Listing(tuple(_flat(items)), Bracket.NONE, joint)

    def _joint(self, item: MathAnswer) -> Joint | None:
        """Move behind what separates the item just read from the next one, and return
        it; None if no item follows. Nothing separates those of `3 hours 20 minutes`.
        """
        if isinstance(item, Expression) and item.unit and self.peek().kind is TokenKind.NUMBER:
            return self._joint_of_units(item.unit)
        has_comma = False
        while self.accept(*SEPARATORS):
            has_comma = True
        word = ""
        if not self.at_end():
            word = self.peek().text.lower()
        if word in names.AND or word in names.OR:
            if word in (r"\land", r"\lor"):
                self._joined_by_logic = True
            self.take()
            while self.accept(r"\quad"):
                pass
            return Joint.AND if word in names.AND else Joint.OR
        if word in names.FILLERS and self._skip_fillers():
            return Joint.COMMA
        if not has_comma:
            return None
        if self.at_end():
            raise CannotRead("nothing behind a comma")
        return Joint.COMMA

    def _joint_of_units(self, unit: str) -> Joint:
        """Return the joint between quantities side by side, of which the first, with
        this unit, is read and the second comes next. CannotRead unless both have units
        of the closed list.
        """
        if unit not in names.UNITS.values():
            raise CannotRead("a number behind a word")
        start = self.position
        second = self._operand()
        if not isinstance(second, Expression) or second.unit not in names.UNITS.values():
            raise CannotRead("a number behind a unit")
        self.position = start
        return Joint.AND

    def _skip_fillers(self) -> bool:
        """Move behind words such as `where`; return False, and stay, if nothing follows
        them.
        """
        start = self.position
        while self.peek().text.lower() in names.FILLERS:
            self.take()
        if self.at_end():
            self.position = start
            return False
        return True

    def _item(self) -> MathAnswer:
        """Read an item of a list: `…`, `k is an integer`, or a relation."""
        if self.accept(r"\ldots"):
            return Words(("…",))
        membership = self._membership_in_words()
        if membership is not None:
            return membership
        return self._relation()

    def _membership_in_words(self) -> MathAnswer | None:
        """Read `k is an integer` or `integer k`, as `k \\in \\mathbb{Z}`."""
        texts = [self.peek(n).text for n in range(4)]
        words = [text.lower() for text in texts]
        if words[0] in ("integer", "integers") and _is_letter(texts[1]):
            self.position += 2
            return _integer(texts[1])
        if not _is_letter(texts[0]):
            return None
        if words[1:4] == ["is", "an", "integer"]:
            self.position += 4
            return _integer(texts[0])
        if words[1:3] == ["an", "integer"]:
            self.position += 3
            return _integer(texts[0])
        return None

    def _labelled(self) -> Labelled | None:
        """Read the label of a choice at the beginning, with the choice's value if it is
        written: `(C)`, `C.`, `\\textbf{(C)}\\ 12`. Return None, and stay, if there is
        no label; a letter in brackets may be a factor, as in `(C)+1`.
        """
        opens = self.at("(")
        letter = self.peek(1) if opens else self.peek()
        if letter.text not in LETTERS_OF_CHOICES or letter.kind is not TokenKind.WORD:
            return None
        if opens:
            is_closed = self.peek(2).text == ")"
            label_length = 3
        else:
            is_closed = self.peek(1).text in (".", ")", ":")
            label_length = 2
        if not is_closed:
            return None
        following = self.peek(label_length)
        if following.kind is TokenKind.END:
            self.position += label_length
            return Labelled(letter.text, None)
        is_apart = following.gap is not Gap.NONE or letter.upright
        if not is_apart or following.text in ("+", "*", "/", "^", "=", "!", "_", "<", ">"):
            return None
        self.position += label_length
        self.accept(":")
        return Labelled(letter.text, self._value_of_choice())

    def _value_of_choice(self) -> MathAnswer:
        """Read what stands behind a choice's label: words alone, or items."""
        count = len(self._tokens) - self.position
        remaining = tuple(self.peek(n) for n in range(count))
        words = only_words(remaining)
        if words:
            self.position += len(remaining) - 1  # up to END
            return words
        return self.items()

    def _relation(self) -> MathAnswer:
        """Read sides with the signs between them, `-1 < x < 3`, one side alone, or a
        congruence, `5 \\pmod 7`.
        """
        sides = [self._side()]
        signs: list[str] = []
        while True:
            token = self.peek()
            if token.text == r"\equiv":
                return self._congruence(sides[-1])
            if token.text == ">" and self._angles:  # it closes a vector
                break
            if token.text not in RELATIONS or token.kind is TokenKind.END:
                break
            self.take()
            signs.append(RELATIONS[token.text])
            sides.append(self._side())
        modulus = self._modulus()
        if modulus:
            if signs:
                raise CannotRead("a modulus behind a relation")
            residue = _formula_without_unit(sides[0])
            return Congruence(None, (residue,), modulus)
        return Relation(tuple(sides), tuple(signs)) if signs else sides[0]

    def _congruence(self, number: MathAnswer) -> MathAnswer:
        """Read `≡ 1, 3 (mod 8)` behind the number that is congruent to that. In a chain
        the last residues count. CannotRead without a modulus.
        """
        residues: list[Formula] = []
        while self.accept(r"\equiv"):
            residues = [formula_of(self.sum())]
        self.accept(r"\quad")
        modulus = self._modulus()
        while modulus is None and self.accept(",", "or", "and"):
            self.accept("or", "and")
            residues.append(formula_of(self.sum()))
            modulus = self._modulus()
        last = residues[-1]
        if modulus is None and isinstance(last, Apply) and last.head == "mod":
            residues[-1], modulus = last.arguments  # `5 mod 7`
        if modulus is None:
            raise CannotRead("a congruence without a modulus")
        return Congruence(_formula_without_unit(number), tuple(residues), modulus)

    def _modulus(self) -> Formula | None:
        """Read `\\pmod{7}` or `(mod 7)`; None if neither comes next."""
        if self.accept(r"\pmod"):
            return self.argument(whole_numbers=True)
        if self.at("(") and self.peek(1).text in MODULO:
            self.position += 2
            modulus = formula_of(self.sum())
            self.expect(")")
            return modulus
        return None

    def _side(self) -> MathAnswer:
        """Read a set, a formula with its unit, or a ratio."""
        value = self._operand()
        while self.peek().text in SET_OPERATORS:
            operator = SET_OPERATORS[self.take().text]
            value = combined(operator, value, self._operand())
        return value

    def _operand(self) -> MathAnswer:
        """Read what may stand beside a set's operator: a set, a name in words, a ratio,
        or a formula with its currency or unit.
        """
        if self.accept("]"):
            return self._french_interval()
        name = self._name_in_words()
        if name is not None:
            return name
        if self.peek().text in names.NUMBER_SETS and self.peek(1).text == "-":
            return self._set_without()
        currency = self.currency()
        value = self.sum()
        if isinstance(value, Number | Symbol | Apply):
            if self.at(":") and not self.bar_divides and not currency:
                return self._ratio(value)
            return self.with_unit(value, currency)
        if currency:
            raise CannotRead("a currency before no number")
        return expression(value)

    def _set_without(self) -> MathAnswer:
        """Read `\\mathbb{R} - \\{0\\}`."""
        number_set = Expression(Symbol(self.take().text))
        self.expect("-")
        return combined("without", number_set, self._operand())

    def _name_in_words(self) -> Expression | None:
        """Read upright words before a sign of equality as a name: `\\text{Total} =
        34`.
        """
        length = 0
        while self.peek(length).kind is TokenKind.WORD and self.peek(length).upright:
            length += 1
        words = [self.peek(n) for n in range(length)]
        if self.peek(length).text != "=" or not any(is_word(word) for word in words):
            return None
        self.position += length
        return Expression(Symbol(" ".join(word.text.lower() for word in words)))

    def _ratio(self, first: Formula) -> MathAnswer:
        """Read the rest of `3 : 4`, or of a time of day, `6:30 p.m.`"""
        terms = [first]
        while self.accept(":"):
            terms.append(formula_of(self.sum()))
        return Ratio(tuple(terms), self._half_of_day())

    def unit_follows(self) -> bool:
        """Return whether a unit or a half of the day comes next."""
        start = self.position
        half = self._half_of_day()
        self.position = start
        return bool(half) or super().unit_follows()

    def _half_of_day(self) -> str:
        """Read `am`, `p.m.` or the like; return `am` or `pm`, "" if none comes next."""
        for half in ("am", "pm"):
            if self.peek().text.lower() == half:
                self.take()
                return half
            dotted = [self.peek(n).text.lower() for n in range(3)]
            if dotted == [half[0], ".", half[1]]:
                self.position += 3
                self.accept(".")
                return half
        return ""

    def _french_interval(self) -> MathAnswer:
        """Read `]1, 2[`, in which brackets that turn away leave out the end."""
        low, high = self._two_ends()
        if not self.at("[", "]"):
            raise CannotRead("an interval that does not close")
        return RealInterval(low, high, False, self.take().text == "]")

    def _two_ends(self) -> tuple[Formula, Formula]:
        """Read both ends of an interval: `1, 2` or `1; 2`."""
        low = formula_of(self.sum())
        if not self.accept(",", ";"):
            raise CannotRead("an interval of one end")
        return low, formula_of(self.sum())

    def raised(self, value: MathAnswer) -> Parsed:
        """Read the `T` behind a tuple, which makes it a column."""
        if isinstance(value, Listing) and self.accept("T", r"\top"):
            return Listing(value.items, Bracket.ANGLE)
        raise CannotRead("a power of no formula")

    def _starts_factor(self) -> bool:
        """Return whether the next token can begin a factor: behind another token no
        `[`, which may close an interval.
        """
        token = self.peek()
        if token.kind is TokenKind.SIGN and token.text == "[" and self.previous is not None:
            return False
        return super()._starts_factor()

    def atom(self) -> Parsed:
        """Read an atom; also what begins with `<`, as a vector in plain text."""
        if self.at("<"):
            self.take()
            self._angles += 1
            items = self._bracketed_items()
            self._angles -= 1
            self.expect(">")
            return Listing(items, Bracket.ANGLE)
        return super().atom()

    def structure(self) -> Parsed:
        """Read brackets or an environment, whose first token comes next. In them, a `|`
        or colon has nothing to do with what is open outside.
        """
        token = self.take()
        outer_bars = self.bars
        outer_bar_divides = self.bar_divides
        self.bars = 0
        self.bar_divides = False
        try:
            return self._structure(token)
        finally:
            self.bars = outer_bars
            self.bar_divides = outer_bar_divides

    def _structure(self, token: Token) -> Parsed:
        """Read the rest of what this token begins: brackets, `\\emptyset` or an
        environment. CannotRead if it begins none of them.
        """
        if token.text in ("(", "["):
            return self._bracketed(token.text)
        if token.text == "{":
            return self._braced()
        if token.text == r"\{":
            return self._set()
        if token.text == r"\langle":
            items = self._bracketed_items()
            self.expect(r"\rangle")
            return Listing(items, Bracket.ANGLE)
        if token.text == r"\emptyset":
            return Listing((), Bracket.SET)
        if token.text.startswith(r"\begin{"):
            return self._environment(token.text.removeprefix(r"\begin{").removesuffix("}"))
        raise CannotRead(f"the command {token.text}")

    def _bracketed_items(self) -> tuple[MathAnswer, ...]:
        """Read the items up to a closing angle bracket, which stays. CannotRead if
        `and` or `or` joins them.
        """
        inside = self.items()
        if isinstance(inside, Listing) and inside.bracket is Bracket.NONE:
            if inside.joint is not Joint.COMMA:
                raise CannotRead("a word between items in brackets")
            return inside.items
        return (inside,)

    def _bracketed(self, opening: str) -> Parsed:
        """Read what stands behind `(` or `[`: one value in brackets, a tuple, or an
        interval. CannotRead if the brackets do not match.
        """
        inside = self.items()
        if not self.at(")", "]", "["):
            raise CannotRead("a bracket that does not close")
        brackets = opening + self.take().text
        if not isinstance(inside, Listing) or inside.bracket is not Bracket.NONE:
            if brackets not in ("()", "[]"):
                raise CannotRead("brackets that do not match")
            return _grouped(inside)
        if inside.joint is not Joint.COMMA:
            raise CannotRead("a word between items in brackets")
        if brackets == "()":
            return Listing(inside.items, Bracket.ROUND)
        if brackets == "[]":
            return Listing(inside.items, Bracket.SQUARE)
        if len(inside.items) != 2:
            raise CannotRead("an interval of other than two ends")
        low = _formula_without_unit(inside.items[0])
        high = _formula_without_unit(inside.items[1])
        return RealInterval(low, high, brackets[0] == "[", brackets[1] == "]")

    def _braced(self) -> Parsed:
        """Read the rest of a group in braces; with commas or a condition it is a set,
        as in plain text: `{1, 2}`, `{x | x > 3}`.
        """
        if self.at("}"):
            raise CannotRead("an empty group")
        self.bar_divides = True  # in the elements; `structure` restores it on an error
        inside = self.items()
        self.bar_divides = False
        if self.accept("|", r"\mid"):
            builder = Builder(inside, self.items())
            self.expect("}")
            return builder
        for command, head in ((r"\choose", "binom"), (r"\over", "/")):
            if self.accept(command):
                first = _formula_without_unit(inside)
                inside = Expression(Apply(head, (first, formula_of(self.sum()))))
        self.expect("}")
        if isinstance(inside, Listing) and inside.bracket is Bracket.NONE:
            return Listing(inside.items, Bracket.SET)
        return _grouped(inside)

    def _set(self) -> Parsed:
        """Read a set after its opening brace, or a system of equations."""
        if self.accept(r"\}"):
            return Listing((), Bracket.SET)
        if self.peek().text.startswith(r"\begin{"):
            self.take()
            system = self._system()
            self.accept(r"\}")
            return system
        self.bar_divides = True  # a bar or colon ends the elements; `structure` restores it
        elements = self.items()
        if self.accept(r"\mid", "|", ":"):
            self.bar_divides = False
            condition = self.items()
            self.expect(r"\}")
            return Builder(elements, condition)
        self.expect(r"\}")
        if isinstance(elements, Listing) and elements.bracket is Bracket.NONE:
            if elements.joint is not Joint.COMMA:
                raise CannotRead("a word between the elements of a set")
            return Listing(elements.items, Bracket.SET)
        return Listing((elements,), Bracket.SET)

    def _environment(self, name: str) -> Parsed:
        """Read the rest of an environment, to its end. CannotRead if it is unknown."""
        if name in MATRICES:
            return self._matrix()
        if name in SYSTEMS:
            return self._system()
        raise CannotRead(f"the environment {name}")

    def _matrix(self) -> Matrix:
        """Read a matrix up to the end of its environment. CannotRead if its rows have
        several lengths.
        """
        rows = []
        row = [formula_of(self.sum())]
        while not self._at_end_of_environment():
            if self.accept("&"):
                row.append(formula_of(self.sum()))
                continue
            self.expect(r"\\")
            if self._at_end_of_environment():
                break  # a line break behind the last row
            rows.append(tuple(row))
            row = [formula_of(self.sum())]
        self.take()
        rows.append(tuple(row))
        if len({len(row) for row in rows}) != 1:
            raise CannotRead("rows of several lengths")
        return Matrix(tuple(rows))

    def _at_end_of_environment(self) -> bool:
        return self.peek().text.startswith(r"\end{")

    def _system(self) -> MathAnswer:
        """Read the rows of a system, or the pieces of a function, up to the end of the
        environment. One row is that relation alone. CannotRead if only some rows have a
        condition.
        """
        rows: list[MathAnswer | Piece] = []
        while not self._at_end_of_environment():
            rows.append(self._row())
            if not self.accept(r"\\") and not self._at_end_of_environment():
                raise CannotRead("a row that does not end")
            if len(rows) > MOST_ITEMS:
                raise CannotRead("too many rows")
        self.take()
        pieces = [row for row in rows if isinstance(row, Piece)]
        if pieces and len(pieces) == len(rows):
            return Piecewise(tuple(pieces))
        if pieces or not rows:
            raise CannotRead("rows of which some have a condition")
        answers = [row for row in rows if not isinstance(row, Piece)]
        return answers[0] if len(answers) == 1 else Listing(tuple(answers), Bracket.NONE, Joint.AND)

    def _row(self) -> "MathAnswer | Piece":
        """Read a row of a system: a relation, or a value and where it holds."""
        self.accept("&")
        value = self._relation()
        if self.at("&") and self.peek(1).text in RELATIONS:  # aligned at the sign
            self.take()
            sign = RELATIONS[self.take().text]
            self.accept("&")
            return Relation((value, self._side()), (sign,))
        while self.accept(",", "&", r"\quad", ";"):
            pass
        if self.at(r"\\") or self._at_end_of_environment():
            return value
        return Piece(value, self._condition())

    def _condition(self) -> MathAnswer | None:
        """Read where a function's piece holds, up to the end of its row; None for
        everywhere else.
        """
        while self.peek().text.lower() in names.CONDITIONS:
            self.take()
        if self.peek().text.lower() in names.ELSEWHERE:
            self.take()
            self.accept(".", ",")
            return None
        words = self._condition_in_words()
        if words is not None:
            return words
        conditions = [self._relation()]
        joint = Joint.COMMA
        while self.at(",", "and", "or", r"\land", r"\lor"):
            word = self.take().text
            if self.at(r"\\") or self._at_end_of_environment():
                break
            if word in names.OR:
                joint = Joint.OR
            elif word in names.AND:
                joint = Joint.AND
            conditions.append(self._relation())
        self.accept(".", ",", ";")
        if len(conditions) == 1:
            return conditions[0]
        return Listing(tuple(conditions), Bracket.NONE, joint)

    def _condition_in_words(self) -> Words | None:
        """Read a condition such as `n is even`, up to the end of its row."""
        words: list[Token] = []
        while self.peek(len(words)).kind is TokenKind.WORD:
            words.append(self.peek(len(words)))
        following = self.peek(len(words)).text
        row_ends = following == r"\\" or following.startswith(r"\end{")
        if not row_ends or not any(is_word(word) for word in words):
            return None
        self.position += len(words)
        return Words(tuple(word.text for word in words))


def combined(operator: str, first: MathAnswer, second: MathAnswer) -> Combination:
    """Return two sets joined by `union`, `intersection` or `without`. Several unions
    are one Combination, and so are several intersections. CannotRead for both without
    brackets, and for what is no set.
    """
    for part in (first, second):
        if isinstance(part, Expression) and not isinstance(part.formula, Symbol):
            raise CannotRead("a formula where a set should stand")
    if operator == "without" or not isinstance(first, Combination):
        return Combination(operator, (first, second))
    if first.operator != operator:
        raise CannotRead("unions and intersections without brackets")
    return Combination(operator, (*first.parts, second))


def _flat(items: Iterable[MathAnswer]) -> Iterable[MathAnswer]:
    """Iterate over items; those of a list without brackets become items of this one."""
    for item in items:
        if isinstance(item, Listing) and item.bracket is Bracket.NONE:
            yield from item.items
        else:
            yield item


def _grouped(inside: MathAnswer) -> Parsed:
    """Return what stands alone in brackets. A formula without a unit is a formula
    again, which may be part of another one; so is one in degrees.
    """
    if isinstance(inside, Expression) and not inside.unit:
        return inside.formula
    if isinstance(inside, Expression) and inside.unit == "degree":
        return Apply("degree", (inside.formula,))
    return inside


def _formula_without_unit(answer: MathAnswer) -> Formula:
    if isinstance(answer, Expression) and not answer.unit:
        return answer.formula
    raise CannotRead("no formula where one should stand")


def _integer(letter: str) -> Relation:
    """Return the relation that a letter is an integer."""
    sides = (Expression(Symbol(letter)), Expression(Symbol(r"\mathbb{Z}")))
    return Relation(sides, ("in",))


WORD = re.compile(r"[A-Za-z]+")
LETTER_IN_FORMULA = re.compile(r"(?<![A-Za-z\\'’])([A-Za-z])(?![A-Za-z])")
UNIT_IN_PROSE = re.compile(r"(?:\d|\bin)\s+[A-Za-z]\b")


@lru_cache(maxsize=64)
def question_of(prompt: str) -> QuestionWords:
    """Return the letters that stand alone in a prompt, except for units in its prose,
    and its words of three letters or more.
    """
    if not prompt:
        return NO_QUESTION
    nouns = frozenset(word.lower() for word in WORD.findall(prompt) if len(word) > 2)
    return QuestionWords(
        frozenset(LETTER_IN_FORMULA.findall(UNIT_IN_PROSE.sub(" ", prompt))), nouns
    )
