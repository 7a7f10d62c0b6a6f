"""Formulas read from tokens: a recursive-descent parser for LaTeX and plain text.

    sum       product  + - ± ∓  product …
    product   factor   * / mod, or nothing between  factor …
    factor    atom     with ^ ! % ° behind it
    atom      number, variable, function with its argument, fraction, root, brackets,
              bars

What stands in brackets may be no formula, but a tuple, a set or a matrix: `structure`
reads those (reader.py). Each method returns a formula or another answer, having
consumed its tokens, or raises CannotRead.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from megarl.tasks.graders.math import names
from megarl.tasks.graders.math.cursor import Cursor
from megarl.tasks.graders.math.formulas import (
    IMAGINARY,
    INFINITY,
    MINUS_PLUS,
    PI,
    PLUS_MINUS,
    Apply,
    E,
    Formula,
    Number,
    Symbol,
    integer,
)
from megarl.tasks.graders.math.kinds import Expression, MathAnswer, Matrix, Numeral
from megarl.tasks.graders.math.tokens import CannotRead, Gap, Token, TokenKind, digits_of

type Parsed = Formula | MathAnswer
MOST_DIGITS = 4_000
MOST_EXPONENT = 10_000
MOST_POSTFIXES = 4
MODULO = ("mod", r"\mod", r"\bmod")
SIGNS_OF_TERMS = ("+", "-", r"\pm", r"\mp")
SUMS = {r"\sum": "sum", r"\prod": "prod"}
CONSTANTS = {r"\pi": PI, r"\infty": INFINITY}
ENCLOSURES = {
    r"\lfloor": ("floor", r"\rfloor"),
    r"\lceil": ("ceil", r"\rceil"),
    r"\|": ("norm", r"\|"),
}
"""Functions written as signs around their argument: the function, and the sign that
closes it.
"""
ATOM_COMMANDS = (
    frozenset(rf"\{name}" for name in names.GREEK_LETTERS)
    | {name for name in names.FUNCTIONS if name.startswith("\\")}
    | names.ACCENTS
    | names.SHAPES
    | SUMS.keys()
    | {r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\lfloor", r"\lceil", r"\ell", r"\|"}
)
NO_FACTORS = (
    names.ENGLISH | names.AND | names.OR | names.CONDITIONS | names.ELSEWHERE | names.FILLERS
)


def formula_of(value: Parsed) -> Formula:
    """Return the value if it is a formula. CannotRead if it is another answer."""
    if isinstance(value, Number | Symbol | Apply):
        return value
    raise CannotRead(f"{type(value).__name__} within a formula")


class FormulaParser(Cursor):
    """Reads formulas. letters: variables that the question names, which are no units
    here.
    """

    def __init__(self, tokens: tuple[Token, ...], letters: frozenset[str] = frozenset()) -> None:
        super().__init__(tokens)
        self.letters = letters
        self.bars = 0
        """Open bars, in which another bar closes."""
        self.bar_divides = False
        """Whether a bar or colon separates a set's element from its condition."""

    def sum(self) -> Parsed:
        """Read terms with signs between them."""
        with self.nested():
            first = self._signed(self.product)
            if not self.at(*SIGNS_OF_TERMS):
                return first
            terms = [formula_of(first)]
            while self.at(*SIGNS_OF_TERMS):
                terms.append(formula_of(self._signed(self._signed_product, leading=False)))
            return Apply("+", tuple(terms))

    def _signed_product(self) -> Parsed:
        """Read a product, perhaps with a sign of its own: `5 + -3`."""
        if self.accept("-"):
            return self._negative(self.product())
        return self.product()

    def _signed(self, read: Callable[[], Parsed], leading: bool = True) -> Parsed:
        """Read what `read` reads, perhaps with a sign before it. leading: whether this
        is a sum's first term, before which a `+` needs a factor.
        """
        if self.accept("+"):
            if leading and not self._starts_factor():
                raise CannotRead("a sign before nothing")
            return read()
        if self.accept("-"):
            return self._negative(read())
        if self.accept(r"\pm"):
            return Apply(PLUS_MINUS, (formula_of(read()),))
        if self.accept(r"\mp"):
            return Apply(MINUS_PLUS, (formula_of(read()),))
        return read()

    def _negative(self, value: Parsed) -> Parsed:
        """Return the value with a minus. Signs of percent and degrees stay outside it,
        where `expression` makes units of them.
        """
        if isinstance(value, Matrix):
            return scaled(value, integer(-1))
        formula = formula_of(value)
        if isinstance(formula, Apply) and formula.head in ("%", "degree"):
            return Apply(formula.head, (Apply("-", formula.arguments),))
        return Apply("-", (formula,))

    def product(self) -> Parsed:
        """Read factors with `*`, `/`, `mod` or nothing between them."""
        value = self.factor()
        fraction_end = -1  # the position behind the last `/` and its divisor
        while True:
            if self.accept("*"):
                value = multiplied(value, self._signed_factor())
            elif self.accept("/"):
                divisor = formula_of(self._signed_factor())
                value = Apply("/", (formula_of(value), divisor))
                fraction_end = self.position
            elif self.at("%", r"\degree") and not self._is_temperature():
                value = self._with_percent_or_degree(value)
            elif self.at(*MODULO):
                self.take()
                value = Apply("mod", (formula_of(value), formula_of(self._signed_factor())))
            elif isinstance(value, Number) and self.peek().text in names.SCALES:
                value = Number(value.value * names.SCALES[self.take().text])
            elif self._multiplies():
                if fraction_end == self.position:
                    self._check_fraction_before(value)
                value = multiplied(value, self.factor())
            else:
                return value

    def _with_percent_or_degree(self, value: Parsed) -> Formula:
        """Read a sign of percent or degrees, which belongs to the whole product before
        it, `value`.
        """
        head = "%" if self.take().text == "%" else "degree"
        formula = formula_of(value)
        if isinstance(formula, Apply) and formula.head in ("%", "degree"):
            raise CannotRead("two signs behind a number")
        return Apply(head, (formula,))

    def _check_fraction_before(self, value: Parsed) -> None:
        """CannotRead for `1/2x`, which may be a half of x or one by 2x. A fraction of
        numbers is a factor before a gap, a bracket, π or a root: `1/2 x`.
        """
        has_numbers_alone = isinstance(value, Apply) and all(
            isinstance(part, Number) for part in value.arguments
        )
        is_apart = self.peek().gap is not Gap.NONE or self.at("(", r"\pi", r"\sqrt", "pi", "sqrt")
        if not (has_numbers_alone and is_apart):
            raise CannotRead("a product behind a fraction bar")

    def _signed_factor(self) -> Parsed:
        """Read a factor behind `*`, `/` or `mod`, perhaps with a sign: `2 * -3`."""
        if self.accept("-"):
            return Apply("-", (formula_of(self.factor()),))
        self.accept("+")
        return self.factor()

    def _multiplies(self) -> bool:
        """Return whether a factor follows without a sign, as in `2x`. CannotRead if it
        is a number, as in `x 2`, or stands in another paragraph.
        """
        if self.unit_follows() or (self.at("(") and self.peek(1).text in MODULO):
            return False
        token = self.peek()
        if token.kind is TokenKind.NUMBER and not self._is_factorial_behind_another():
            raise CannotRead("a number behind a factor without a sign")
        if not self._starts_factor():
            return False
        if token.gap is Gap.LINE:
            raise CannotRead("a factor in another paragraph")
        return True

    def _is_factorial_behind_another(self) -> bool:
        """Return whether the next number is the second of `3! 4!`."""
        follows_factorial = self.previous is not None and self.previous.text == "!"
        return follows_factorial and self.peek(1).text == "!"

    def _starts_factor(self) -> bool:
        """Return whether the next token can begin a factor."""
        token = self.peek()
        if token.kind is TokenKind.NUMBER:
            return True
        if token.kind is TokenKind.WORD:
            return self._is_factor_word(token)
        if token.kind is TokenKind.COMMAND:
            return token.text in ATOM_COMMANDS or token.text.startswith(r"\begin{")
        if token.text == "|":  # else it closes a bar, or ends a set's element
            return not self.bars and not self.bar_divides
        return token.text in ("(", "{", "[")

    def _is_factor_word(self, token: Token) -> bool:
        """Return whether a word can begin a factor: variables, functions and constants,
        but neither upright words nor words of prose.
        """
        if len(token.text) == 1:
            return True
        if token.text in names.FUNCTIONS or token.text in names.INFINITE:
            return True
        if token.text.startswith("\\"):
            return True
        return not token.upright and token.text.lower() not in NO_FACTORS

    def factor(self) -> Parsed:
        """Read an atom and what stands behind it."""
        with self.nested():
            value = self.atom()
            return self._with_postfixes(value)

    def _with_postfixes(self, value: Parsed) -> Parsed:
        """Read what stands behind a factor: powers, `!`, and the base of a numeral
        (`52_8`).
        """
        for _ in range(MOST_POSTFIXES):
            if self.at("^"):
                value = self._power(value)
            elif self._is_factorial():
                self.take()
                head = "!!" if self.accept("!") else "!"
                value = Apply(head, (formula_of(value),))
            elif self.at("_") and isinstance(value, Number):
                value = self._numeral(value)
            else:
                return value
        raise CannotRead("too many signs behind a factor")

    def _is_factorial(self) -> bool:
        """Return whether `!` comes next, and not `!=`."""
        if not self.at("!"):
            return False
        following = self.peek(1)
        return following.text != "=" or following.gap is not Gap.NONE

    def _is_temperature(self) -> bool:
        """Return whether the sign that comes next belongs to a scale at the end of the
        text: the `°` of `20 °C`.
        """
        is_scale = self.peek(1).text in ("C", "F", "K")
        return is_scale and self.peek(2).kind is TokenKind.END

    def _power(self, value: Parsed) -> Parsed:
        """Read the exponent behind a value, or the `T` of a transposed matrix.
        CannotRead for another power of a matrix, and for two exponents.
        """
        self.expect("^")
        if isinstance(value, Matrix) and self.accept("T", r"\top"):
            return transposed(value)
        if isinstance(value, Matrix):
            raise CannotRead("a power of a matrix")
        if not isinstance(value, Number | Symbol | Apply):
            return self.raised(value)
        exponent = self._exponent()
        if self.at("^"):
            raise CannotRead("two exponents")
        return Apply("^", (value, exponent))

    def raised(self, value: MathAnswer) -> Parsed:
        """Read the exponent of an answer that is no formula: a transposed tuple."""
        raise CannotRead("a power of no formula")

    def _exponent(self) -> Formula:
        """Read what stands behind `^`, with braces or without: `2^{-1}`, `2^-10`."""
        if self.accept("-"):
            return Apply("-", (formula_of(self._exponent()),))
        return self.argument(whole_numbers=True)

    def argument(self, whole_numbers: bool = False) -> Formula:
        """Read what belongs to a command: a group in braces, a digit, a letter or
        another command.

        whole_numbers: take all digits of a number without braces, as in plain text.
        """
        token = self.peek()
        if token.text == "{":
            self.take()
            return self._group()
        if token.kind is TokenKind.NUMBER:
            return number_of(self.take() if whole_numbers else self.split_number())
        if token.kind is TokenKind.WORD or token.text in ATOM_COMMANDS or token.text == "(":
            with self.nested():
                return formula_of(self.atom())
        raise CannotRead(f"{token.text!r} as an argument")

    def _group(self) -> Formula:
        """Read the rest of a group in braces that holds one formula. In it, a `|`
        closes no bar that was opened outside.
        """
        with self.nested():
            outer_bars = self.bars
            self.bars = 0
            value = formula_of(self.sum())
            for command, head in ((r"\choose", "binom"), (r"\over", "/")):
                if self.accept(command):
                    value = Apply(head, (value, formula_of(self.sum())))
            self.bars = outer_bars
            self.expect("}")
            return value

    def atom(self) -> Parsed:
        """Read the smallest part of a formula."""
        token = self.peek()
        if token.kind is TokenKind.NUMBER:
            return self._number()
        if token.kind is TokenKind.WORD:
            return self._word()
        if token.kind is TokenKind.COMMAND:
            return self._command()
        if token.text == "|":
            return self._absolute()
        if token.text in ("(", "[", "{"):
            return self.structure()
        raise CannotRead(f"{token.text!r} where a formula should begin")

    def structure(self) -> Parsed:
        """Read what stands in brackets, or an environment."""
        raise NotImplementedError

    def unit_follows(self) -> bool:
        """Return whether a unit comes next."""
        return False

    def _number(self) -> Parsed:
        """Read a number, or a mixed one: `1\\frac{1}{4}`, `1 1/4`."""
        number = number_of(self.take())
        is_whole = number.value.denominator == 1
        if is_whole and self.at(r"\frac") and not self.unit_follows():
            return self._mixed(number)
        following = self.peek()
        if is_whole and following.kind is TokenKind.NUMBER and following.gap is Gap.BLANK:
            return self._mixed_in_plain_text(number)
        return number

    def _mixed(self, number: Number) -> Parsed:
        """Read the fraction of `1\\frac{1}{4}` and return the mixed number. CannotRead
        for an improper fraction of numbers. Before one with variables, return the
        number alone: the fraction is its factor.
        """
        start = self.position
        fraction = self._command()
        if is_proper(fraction):
            return Number(number.value + quotient(fraction))
        if is_numeric_fraction(fraction):
            raise CannotRead("a number before an improper fraction")
        self.position = start
        return number

    def _mixed_in_plain_text(self, number: Number) -> Parsed:
        """Read the `1/4` of `1 1/4` and return the mixed number. CannotRead for other
        numbers side by side.
        """
        above = number_of(self.take())
        if self.accept("/") and self.peek().kind is TokenKind.NUMBER:
            fraction = Apply("/", (above, number_of(self.take())))
            if is_proper(fraction):
                return Number(number.value + quotient(fraction))
        raise CannotRead("two numbers side by side")

    def _numeral(self, number: Number) -> Parsed:
        """Read the base behind a number: `52_8`, `(52)_8`, `52_{\\text{eight}}`.
        CannotRead for another subscript.
        """
        is_in_brackets = self.previous is None or self.previous.kind is not TokenKind.NUMBER
        digits = str(number.value) if is_in_brackets else digits_of(self.peek(-1).text)
        self.expect("_")
        subscript = self.subscript()
        base = int(subscript) if subscript.isdigit() else names.BASES.get(subscript, 0)
        if not digits.isdigit() or not 2 <= base <= 36:
            raise CannotRead("a subscript of a number that is no base")
        return Numeral(digits.lstrip("0") or "0", base)

    def subscript(self) -> str:
        """Read a subscript behind its `_` as text, without the braces and round
        brackets around it. CannotRead if it is empty or a sign.
        """
        if not self.accept("{"):
            token = self.take()
            if token.kind not in (TokenKind.NUMBER, TokenKind.WORD):
                is_greek = token.text.lstrip("\\") in names.GREEK_LETTERS
                if not is_greek and token.text not in ("*", r"\infty"):
                    raise CannotRead("a subscript")
            return token.text
        depth = 1
        words = []
        while depth:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            words.append(token.text)
        inside = "".join(words[:-1])
        if not inside:
            raise CannotRead("an empty subscript")
        return inside[1:-1] if inside.startswith("(") and inside.endswith(")") else inside

    def _word(self) -> Parsed:
        """Read a function with its arguments, a constant or variables. CannotRead for a
        word of prose.
        """
        token = self.peek()
        text = token.text
        if text in names.FUNCTIONS:
            self.take()
            return self._function(names.FUNCTIONS[text])
        if text in names.INFINITE:
            self.take()
            return INFINITY
        if text.startswith("\\") or len(text) == 1:
            self.take()
            return self._symbol(text)
        if text == "pi":
            self.take()
            return PI
        if text in names.GREEK_LETTERS:
            self.take()
            return self._symbol(text)
        if token.upright or text.lower() in NO_FACTORS:
            raise CannotRead(f"the word {text!r}")
        return self._variables(token)

    def _variables(self, token: Token) -> Parsed:
        """Read letters side by side: capitals name one thing (`AB`), others are factors
        (`xy`).
        """
        if token.text.isupper() and self.peek(1).text != "_":
            self.take()
            return Symbol(token.text)
        lower = token.text.lower()
        longest = 3 if token.gap is Gap.NONE else 2  # words of prose stand apart
        if len(token.text) > longest and not is_run_of_variables(lower):
            raise CannotRead(f"the word {token.text!r}")
        letters = [Token(TokenKind.WORD, token.text[0], token.gap)]
        letters += [Token(TokenKind.WORD, letter) for letter in token.text[1:]]
        self.replace(*letters)
        return self._word()  # the first letter: `product` reads the others as factors

    def _symbol(self, name: str) -> Parsed:
        """Read what belongs to a name whose first letter or Greek letter is read. It
        may be a constant (e, i), a variable, or a function with its arguments.
        """
        if name == "e":
            return E
        if name == "i" and not self.at("_"):
            return IMAGINARY
        name = self._full_name(name)
        if self.at("(") and self.peek().gap is Gap.NONE and self._is_called(name):
            return self._call(name)
        return Symbol(name)

    def _full_name(self, name: str) -> str:
        """Return the name with what belongs to it: primes and a subscript, or the sign
        of a set of numbers, `\\mathbb{Z}^+`.
        """
        is_set = name in names.NUMBER_SETS
        if is_set and self.at("^") and self.peek(1).text in ("+", "-", "*"):
            self.take()
            return f"{name}^{self.take().text}"
        following = [self.peek(n).text for n in range(4)]
        if is_set and following[:2] == ["^", "{"] and following[3] == "}":
            if following[2] not in ("+", "-", "*"):
                return name
            self.position += 4
            return f"{name}^{following[2]}"
        while self.at("'"):
            self.take()
            name += "'"
        if self.accept("_"):
            name = f"{name}_{self.subscript()}"
        while self.at("'"):
            self.take()
            name += "'"
        return name

    def _is_called(self, name: str) -> bool:
        """Return whether the bracket behind a name has a function's argument: behind f
        and g always, behind others where the value is stated, `T(n) =`.
        """
        if name[0] in names.CALLED and name.rstrip("'") in names.CALLED:
            return True
        is_simple = self.peek(1).kind in (TokenKind.NUMBER, TokenKind.WORD)
        return is_simple and self.peek(2).text == ")" and self.peek(3).text == "="

    def _call(self, name: str) -> Parsed:
        arguments = self.arguments()
        return Apply(f"call {name}", arguments)

    def arguments(self) -> tuple[Formula, ...]:
        """Read formulas in round brackets with commas between them."""
        self.expect("(")
        arguments = [formula_of(self.sum())]
        while self.accept(",", ";"):
            arguments.append(formula_of(self.sum()))
        self.expect(")")
        return tuple(arguments)

    def _command(self) -> Parsed:
        """Read what a command begins: a fraction, a function, a name, or else a
        structure.
        """
        text = self.take().text
        if text in (r"\frac", r"\sqrt", r"\binom"):
            return self._fraction_or_root(text)
        if text in CONSTANTS:
            return CONSTANTS[text]
        if text in names.FUNCTIONS:
            return self._function(names.FUNCTIONS[text])
        if text in names.ACCENTS:
            return self._accented(text)
        if text in names.SHAPES:
            return Symbol(f"{text} {self._named_points()}")
        if text in SUMS:
            return self._series(SUMS[text])
        if text in ENCLOSURES:
            return self._enclosed(*ENCLOSURES[text])
        name = text.removeprefix("\\")
        if name in names.GREEK_LETTERS or name == "ell":
            return self._symbol(name)
        self.position -= 1  # `structure` takes the command itself
        return self.structure()

    def _fraction_or_root(self, command: str) -> Formula:
        """Read the arguments of `\\frac`, `\\sqrt` or `\\binom`."""
        if command == r"\frac":
            return self._fraction()
        if command == r"\sqrt":
            return self._root()
        return Apply("binom", (self.argument(), self.argument()))

    def _fraction(self) -> Formula:
        """Read both arguments of `\\frac`. CannotRead for `\\frac{dy}{dx}`."""
        is_derivative = self.at("{") and self.peek(1).text in ("d", r"\partial")
        if is_derivative:
            raise CannotRead("a derivative")
        above = self.argument()
        below = self.argument()
        return Apply("/", (above, below))

    def _root(self) -> Formula:
        """Read `\\sqrt{2}` or `\\sqrt[3]{2}` behind the command. CannotRead for
        `\\sqrt12`, which may be the root of 1, times 2.
        """
        degree: Formula = integer(2)
        if self.accept("["):
            degree = formula_of(self.sum())
            self.expect("]")
        token = self.peek()
        is_number = token.kind is TokenKind.NUMBER and len(token.text) > 1
        if is_number and token.gap is Gap.NONE:
            raise CannotRead("a root of several digits without braces")
        radicand = self.argument(whole_numbers=True)
        if degree == integer(2):
            return Apply("sqrt", (radicand,))
        return Apply("root", (radicand, degree))

    def _named_points(self) -> str:
        """Read the points of a shape: the `ABC` of `\\triangle ABC`."""
        token = self.take()
        if token.kind is not TokenKind.WORD:
            raise CannotRead("a shape without points")
        return token.text

    def _accented(self, accent: str) -> Formula:
        """Read the name under an accent: `\\overline{AB}`. `\\hat i` is the unit vector
        `\\vec i`. CannotRead if no name stands there.
        """
        if self.accept("{"):
            words = []
            while not self.accept("}"):
                words.append(self.take().text)
        else:
            words = [self.take().text]
        inside = "".join(words).removeprefix("\\vec ")
        if not inside.isalpha() and inside != "0":
            raise CannotRead("an accent over no name")
        name = self._full_name(f"{accent} {inside}")
        if inside in ("i", "j", "k") and name in (rf"\hat {inside}", rf"\vec {inside}"):
            name = f"\\vec {inside}"
        return Symbol(name)

    def _absolute(self) -> Parsed:
        """Read `|x|`. While a bar is open, the next one closes it."""
        self.expect("|")
        self.bars += 1
        inside = formula_of(self.sum())
        self.bars -= 1
        self.expect("|")
        return Apply("abs", (inside,))

    def _enclosed(self, head: str, close: str) -> Formula:
        """Read up to the sign `close` and return the function `head` of that; the sign
        that opens is read. In between, a `|` closes no bar that was opened outside.
        """
        outer_bars = self.bars
        self.bars = 0
        inside = formula_of(self.sum())
        self.bars = outer_bars
        self.expect(close)
        return Apply(head, (inside,))

    def _function(self, name: str) -> Parsed:
        """Read a function's base, power and arguments: `\\log_2 8`, `\\sin^2 2x`,
        `gcd(12, 18)`.
        """
        base = None
        if name == "log" and self.accept("_"):
            base = self._base()
        power = None
        if self.accept("^"):
            power = self._exponent()
        if power == Apply("-", (integer(1),)):  # `\sin^{-1}` is the arcsine
            if name not in names.INVERSES:
                raise CannotRead("the inverse of a function")
            name = names.INVERSES[name]
            power = None
        arguments = self._function_arguments(name)
        if base is not None:
            arguments = (*arguments, base)
        value = Apply(name, arguments)
        if power is None:
            return value
        return Apply("^", (value, power))

    def _base(self) -> Formula:
        """Read a logarithm's base. Of a number it is all digits if the argument stands
        apart, as 10 in `\\log_10 100`, else the first digit, as 2 in `\\log_28`.
        """
        token = self.peek()
        following = self.peek(1)
        argument_follows = following.text in ("(", "{", "^") or following.text in ATOM_COMMANDS
        if following.gap is Gap.BLANK:
            argument_follows = True
        is_whole = token.kind is TokenKind.NUMBER and argument_follows
        return self.argument(whole_numbers=is_whole)

    def _function_arguments(self, name: str) -> tuple[Formula, ...]:
        """Read a function's arguments, with or without brackets. CannotRead if there
        are several and it takes one, or one and it takes several.
        """
        if self.at("("):
            arguments = self.arguments()
        elif name in ("max", "min", "gcd", "lcm") and self.accept(r"\{"):
            arguments = self._in_set_braces()
        elif name in ("sqrt", "cbrt") and self.peek().kind is TokenKind.NUMBER:
            arguments = (number_of(self.take()),)
        elif name in ("sqrt", "cbrt"):
            arguments = (self.argument(),)
        else:
            arguments = (self._bare_argument(),)
        if (len(arguments) > 1) != (name in names.LISTS):
            raise CannotRead(f"the number of arguments of {name}")
        return arguments

    def _in_set_braces(self) -> tuple[Formula, ...]:
        """Read the rest of a function's arguments in braces: `\\max\\{1, 2\\}`."""
        arguments = [formula_of(self.sum())]
        while self.accept(","):
            arguments.append(formula_of(self.sum()))
        self.expect(r"\}")
        return tuple(arguments)

    def _bare_argument(self) -> Formula:
        """Read an argument without brackets: factors side by side, up to a sign or a
        function.
        """
        if self.at("-"):
            raise CannotRead("a sign behind a function")
        value = formula_of(self.factor())
        while self._multiplies():
            token = self.peek()
            if token.text in names.FUNCTIONS or token.text == "(":
                break
            value = formula_of(multiplied(value, self.factor()))
        if self.at("%", r"\degree"):
            return self._with_percent_or_degree(value)
        return value

    def _series(self, head: str) -> Formula:
        """Read `\\sum_{k=1}^{n} k^2` behind its command. head: `sum` or `prod`."""
        self.expect("_")
        self.expect("{")
        token = self.take()
        if token.kind is not TokenKind.WORD or len(token.text) != 1:
            raise CannotRead("an index")
        self.expect("=")
        low = formula_of(self.sum())
        self.expect("}")
        self.expect("^")
        high = self._exponent()
        body = formula_of(self.product())
        return Apply(head, (Symbol(token.text), low, high, body))


def number_of(token: Token) -> Number:
    """Return the value of a number's token, and the decimals with which it is written;
    0 with a power of ten, `1.5e3`, or a marked period.
    """
    text = digits_of(token.text)
    if len(text) > MOST_DIGITS:
        raise CannotRead(f"more than {MOST_DIGITS:,} digits")
    if "\\" in text or "(" in text:
        return Number(_recurring(text))
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MOST_EXPONENT:
        raise CannotRead("an exponent of more than four digits")
    decimals = 0 if exponent else len(mantissa.partition(".")[2])
    return Number(Fraction(mantissa) * Fraction(10) ** int(exponent or 0), decimals)


def _recurring(text: str) -> Fraction:
    """Return the value of a decimal with a marked period: `0.1\\overline{6}` or
    `0.1(6)` is 1/10 + 6/90.
    """
    integer_digits, _, decimals = text.partition(".")
    mark = re.search(r"\\[a-z]+|\(", decimals)
    assert mark
    before_period = decimals[: mark.start()]
    period = re.sub(r"\\[a-z]+|[{}()]", "", decimals[mark.start() :])
    fixed_digits = integer_digits + before_period
    scale = 10 ** len(before_period)
    nines = 10 ** len(period) - 1
    return Fraction(int(fixed_digits or "0"), scale) + Fraction(int(period), scale * nines)


def is_run_of_variables(letters: str) -> bool:
    """Return whether these letters side by side are variables rather than a word."""
    return any(set(letters) <= set(run) for run in ("abcd", "xyzw", "pqrst", "mnpq"))


def is_numeric_fraction(value: Parsed) -> bool:
    """Return whether this is a fraction of two numbers."""
    if not isinstance(value, Apply) or value.head != "/":
        return False
    return all(isinstance(part, Number) for part in value.arguments)


def is_proper(value: Parsed) -> bool:
    """Return whether this is a fraction of integers between 0 and 1."""
    if not is_numeric_fraction(value):
        return False
    assert isinstance(value, Apply)
    above, below = (part.value for part in value.arguments if isinstance(part, Number))
    return above.denominator == below.denominator == 1 and 0 < above < below


def quotient(value: Parsed) -> Fraction:
    """Return the value of a fraction of numbers."""
    assert isinstance(value, Apply)
    above, below = (part.value for part in value.arguments if isinstance(part, Number))
    return above / below


def multiplied(first: Parsed, second: Parsed) -> Parsed:
    """Return the product of two formulas, or of a formula and a matrix. If the first is
    a product, it gets one factor more.
    """
    if isinstance(second, Matrix):
        return scaled(second, formula_of(first))
    if isinstance(first, Matrix):
        return scaled(first, formula_of(second))
    factor = formula_of(first)
    last_factor = formula_of(second)
    if isinstance(factor, Apply) and factor.head == "*":
        return Apply("*", (*factor.arguments, last_factor))
    return Apply("*", (factor, last_factor))


def scaled(matrix: Matrix, factor: Formula) -> Matrix:
    """Return the matrix with all entries multiplied by the factor."""
    rows = []
    for row in matrix.rows:
        rows.append(tuple(Apply("*", (factor, entry)) for entry in row))
    return Matrix(tuple(rows))


def transposed(matrix: Matrix) -> Matrix:
    """Return the transposed matrix."""
    return Matrix(tuple(zip(*matrix.rows, strict=True)))


def expression(value: Parsed) -> MathAnswer:
    """Return the value as an answer; percent and degree signs become units."""
    if not isinstance(value, Number | Symbol | Apply):
        return value
    if isinstance(value, Apply) and value.head in ("%", "degree"):
        unit = "percent" if value.head == "%" else "degree"
        return Expression(value.arguments[0], unit)
    return Expression(value)
