"""Units behind numbers: `12 \\text{ cm}^2`, `5 m/s`, `\\$12`, `12 apples`, `90^\\circ
C`.
"""

from megarl.tasks.graders.math import names
from megarl.tasks.graders.math.expressions import FormulaParser
from megarl.tasks.graders.math.formulas import Apply, Formula, integer
from megarl.tasks.graders.math.kinds import Expression
from megarl.tasks.graders.math.tokens import CannotRead, Gap, Token, TokenKind

BEFORE_NUMBERS = frozenset(
    {"=", "-", ",", ";", "(", r"\approx", "+", "$", "<", ">", r"\leq", r"\geq"}
)
"""What may stand before a number that is one by itself."""
CURRENCIES = frozenset("$€£¥₹")
MOST_UNIT_WORDS = 6


class UnitParser(FormulaParser):
    """Reads units. letters: variables of the question; nouns: its words, which may be
    counted.
    """

    def __init__(
        self,
        tokens: tuple[Token, ...],
        letters: frozenset[str] = frozenset(),
        nouns: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(tokens, letters)
        self.nouns = nouns

    def currency(self) -> str:
        """Read a currency before a number and return its standard form, "" if there is
        none.
        """
        if self.at("US", "USD") and self.peek(1).text in CURRENCIES:
            self.take()
        if self.peek().text in CURRENCIES and self.peek().kind is not TokenKind.END:
            return names.UNITS[self.take().text]
        if self.at("USD", "EUR", "GBP") and self.peek(1).kind is TokenKind.NUMBER:
            return names.UNITS[self.take().text.lower()]
        return ""

    def with_unit(self, formula: Formula, currency: str) -> Expression:
        """Read the magnitude (`million`) and the unit behind a formula, if there are
        any. currency: what stands before it, "" for none. CannotRead for two units.
        """
        if self._is_magnitude():
            power = Apply("^", (integer(10), integer(names.MAGNITUDES[self.take().text])))
            formula = Apply("*", (formula, power))
        if isinstance(formula, Apply) and formula.head in ("%", "degree"):
            unit = "percent" if formula.head == "%" else "degree"
            if self.at(r"\degree") or self.unit_follows():
                raise CannotRead("two units")
            return Expression(formula.arguments[0], _one_unit(currency, unit))
        if self.at(r"\degree") and self._is_temperature():
            self.take()
            return Expression(formula, names.LETTER_UNITS[self.take().text])
        if self.unit_follows():
            return Expression(formula, _one_unit(currency, self._unit()))
        return Expression(formula, currency)

    def unit_follows(self) -> bool:
        """Return whether the next token is a unit: from the closed list, or a noun of
        the question.
        """
        token = self.peek()
        if token.kind is TokenKind.FOREIGN:
            return True
        if token.text in CURRENCIES and token.kind is TokenKind.SIGN:
            return True
        if token.text == r"\frac":
            return self._is_quotient_of_units()
        if token.kind is not TokenKind.WORD or self.previous is None:
            return False
        if self._is_magnitude():
            return True
        if len(token.text) == 1:
            return self._is_letter_unit(token)
        return self._is_unit_word(token)

    def _is_magnitude(self) -> bool:
        """Return whether `million` or its like comes next, behind a number."""
        token = self.peek()
        is_word = token.kind is TokenKind.WORD and token.text in names.MAGNITUDES
        return is_word and self.previous is not None and self.previous.kind is TokenKind.NUMBER

    def _is_quotient_of_units(self) -> bool:
        """Return whether `\\frac{\\text{m}}{\\text{s}}` comes next."""
        opening, above, closing, second_opening, below, second_closing = (
            self.peek(n) for n in range(1, 7)
        )
        braces = [opening.text, closing.text, second_opening.text, second_closing.text]
        are_upright = above.upright and below.upright
        return braces == ["{", "}", "{", "}"] and are_upright and self.previous is not None

    def _is_unit_word(self, token: Token) -> bool:
        """Return whether a word of several letters is a unit: one from the closed
        lists, or a noun of the question that is counted.
        """
        word = token.text if token.text in names.UNITS else token.text.lower()
        if word in names.AFTER or (word in names.FUNCTIONS and not self._is_time(word)):
            return False
        if word in names.POWERS or word in names.NOUNS:
            return True
        if word in names.UNITS:
            is_apart = token.upright or token.gap is not Gap.NONE
            return is_apart or word not in names.ONLY_APART
        counted = word in self.nouns and word not in names.ENGLISH and len(word) > 2
        return counted and word not in names.CONDITIONS | names.ELSEWHERE | names.FILLERS

    def _is_time(self, word: str) -> bool:
        """Return whether the word that comes next is `min` or `sec` without an
        argument, so that it is a unit. Before a number it is one behind another number,
        as in `5 min 20 sec`.
        """
        if word not in ("min", "sec"):
            return False
        following = self.peek(1)
        if following.kind is TokenKind.NUMBER or following.text == r"\quad":
            return self.previous is None or self.previous.kind is TokenKind.NUMBER
        return following.kind is not TokenKind.COMMAND and following.text not in ("(", "{")

    def _is_letter_unit(self, token: Token) -> bool:
        """Return whether one letter is a unit: upright, or else behind a number and a
        blank, at the end of the item, and no variable of the question.
        """
        if token.text not in names.LETTER_UNITS:
            return False
        if token.upright:
            return True
        if token.gap is not Gap.BLANK or token.text in self.letters:
            return False
        return self._behind_a_number() and self._ends_here(1)

    def _behind_a_number(self) -> bool:
        """Return whether the token before this one is a number by itself, no exponent
        or part.
        """
        if self.peek(-1).kind is not TokenKind.NUMBER:
            return False
        return self.position < 2 or self.peek(-2).text in BEFORE_NUMBERS

    def _ends_here(self, ahead: int) -> bool:
        """Return whether the item ends behind this letter, perhaps with a power or
        divisor.
        """
        following = self.peek(ahead)
        if following.text == "^":
            return True
        if following.text == "/":
            return self.peek(ahead + 1).kind is TokenKind.WORD
        closes = following.text in (",", ";", ")", r"\approx", "}", "and", "or", r"\\", r"\quad")
        return following.kind is TokenKind.END or closes

    def _unit(self) -> str:
        """Read a unit and return it in a standard form, its bases with their powers in
        order of the alphabet: `hour^-1 mile`, `meter^2`.
        """
        if self.accept(r"\frac"):
            return self._quotient_of_units()
        powers: dict[str, int] = {}
        sign = 1  # -1 behind a division sign
        power = 1  # of the next base: 2 behind `square`
        for _ in range(MOST_UNIT_WORDS):
            token = self.peek()
            word = token.text.lower()
            is_power_before = word in names.POWERS and not word.endswith("ed")
            if token.kind is TokenKind.WORD and is_power_before:
                self.take()
                power = names.POWERS[word]
                self.accept(".")
                continue
            base = self._base_unit()
            power = self._unit_power(power)
            powers[base] = powers.get(base, 0) + sign * power
            sign = 1
            power = 1
            if self.at("/", "per"):
                self.take()
                sign = -1
                continue
            self.accept("*")
            if not self._continues():
                return _spelled(powers)
        raise CannotRead("a unit of many words")

    def _quotient_of_units(self) -> str:
        """Read both units of a `\\frac`, and return them in the standard form."""
        self.expect("{")
        above = self._base_unit()
        self.expect("}")
        self.expect("{")
        below = self._base_unit()
        self.expect("}")
        return _spelled({above: 1, below: -1})

    def _continues(self) -> bool:
        """Return whether the next token belongs to this unit."""
        token = self.peek()
        if token.kind is TokenKind.WORD and len(token.text) == 1:
            return token.upright and token.text in names.LETTER_UNITS
        return token.kind is TokenKind.WORD and self._is_unit_word(token)

    def _base_unit(self) -> str:
        """Read one unit without its power, and return its name in a standard form.
        CannotRead if it is unknown.
        """
        token = self.take()
        if token.kind is TokenKind.FOREIGN:
            return self._foreign_unit(token)
        if token.text in CURRENCIES:
            return names.UNITS[token.text]
        if token.kind is not TokenKind.WORD:
            raise CannotRead("no unit")
        if len(token.text) == 1:
            return names.LETTER_UNITS.get(token.text) or _no_unit(token)
        lower = token.text.lower()
        for table in (names.UNITS, names.NOUNS):
            word = table.get(token.text) or table.get(lower)
            if word:
                return word
        if lower in self.nouns:
            return lower.removesuffix("s")
        return _no_unit(token)

    def _foreign_unit(self, token: Token) -> str:
        """Read the rest of a unit or noun in another script, whose first token is read.
        CannotRead if it is unknown.
        """
        word = token.text
        while self.peek().kind is TokenKind.FOREIGN:
            word += self.take().text
        if word in names.UNITS or word in names.NOUNS:
            return names.UNITS.get(word) or names.NOUNS[word]
        raise CannotRead(f"the word {word!r}")

    def _unit_power(self, power: int) -> int:
        """Read the power behind a unit, `^2`, `^{-1}` or `squared`. power: what to
        return if none follows.
        """
        if self.accept("^"):
            has_braces = self.accept("{")
            is_negative = self.accept("-")
            token = self.take()
            is_digit = token.kind is TokenKind.NUMBER and token.text.isdigit()
            if not is_digit or len(token.text) > 1:
                raise CannotRead("the power of a unit")
            if has_braces:
                self.expect("}")
            return -int(token.text) if is_negative else int(token.text)
        word = self.peek().text.lower()
        if word in ("squared", "cubed") and self.peek().kind is TokenKind.WORD:
            self.take()
            return names.POWERS[word]
        return power


def _no_unit(token: Token) -> str:
    raise CannotRead(f"the unit {token.text!r}")


def _one_unit(first: str, second: str) -> str:
    """Return the one of two units that is written, "" if none is. CannotRead if they
    differ.
    """
    if first and second and first != second:
        raise CannotRead("two units")
    return first or second


def _spelled(powers: dict[str, int]) -> str:
    """Return the standard form of a unit with these powers of its bases."""
    items = sorted((base, power) for base, power in powers.items() if power)
    return " ".join(base if power == 1 else f"{base}^{power}" for base, power in items)
