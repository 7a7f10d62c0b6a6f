"""Values of formulas: exact fractions as long as possible, then numbers of many digits.

Every operation is bounded: exact numbers have at most MOST_BITS bits, exponents and
arguments of functions are limited, and a verdict may take MOST_STEPS operations. What
is beyond has no value here (`NoValue`).
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from megarl.tasks.graders.math.formulas import Apply, Formula, Number, Symbol, symbols

CONTEXT = mpmath.ctx_mp.MPContext()
"""Its precision is set before each evaluation; others who use mpmath keep theirs."""
Real = CONTEXT.mpf
Complex = CONTEXT.mpc
type Numeric = Any
"""A Fraction, a Real or a Complex."""
MOST_BITS = 80_000
MOST_STEPS = 150_000
MOST_TERMS = 2_000
LARGEST_LOG = 1e9
"""The natural logarithm of a power's magnitude, or that with a minus."""
LARGEST_ARGUMENT = 10**6
"""The argument of a factorial or a binomial coefficient."""
LARGEST_EXACT_FACTORIAL = 8_000
LARGEST_ANGLE = 10**15
LARGEST_OF_TANH = 20
"""Beyond, tanh cannot be told from 1."""
SMALLEST_EXPONENT = -60
"""The binary exponent below which a function's argument is near 0."""
EXPONENT_AT_POLES = 100
"""The binary exponent above which a function's value is that of a pole, rounded."""


class NoValue(Exception):
    """The formula has no value here: a division by zero, or a number beyond the
    bounds.
    """


class OutsideDomain(NoValue):
    """A logarithm of a negative real number."""


class TooMuchWork(Exception):
    """A verdict takes more operations than it may."""


@dataclass
class Budget:
    """The operations that a verdict may still take."""

    steps: int = MOST_STEPS

    def spend(self, steps: int = 1) -> None:
        """Count operations. TooMuchWork if there were too many."""
        self.steps -= steps
        if self.steps < 0:
            raise TooMuchWork

    def spend_on(self, bits: int) -> None:
        """Count an operation on numbers of this many bits: as one below 2,048, and
        beyond in proportion to their square, as its time grows.
        """
        self.spend(1 + (bits >> 10) ** 2 // 4)


def as_real(value: Numeric) -> Numeric:
    """Return a fraction as a Real; other values as they are."""
    if isinstance(value, Fraction):
        return Real(value.numerator) / value.denominator
    return value


@dataclass
class Evaluator:
    """Evaluates formulas at a point.

    point: the variables' values; real: whether a root of a negative number has no
    value, because the formula is about real variables.
    """

    point: Mapping[str, Numeric]
    real: bool
    budget: Budget
    spread: int = 0
    """The largest difference, in bits, between the magnitudes of a sum's terms that are
    not exact.
    """
    bits: int = 0
    """The length of the longest exact number."""

    def value(self, formula: Formula) -> Numeric:
        """Return the formula's value. NoValue if it has none."""
        if isinstance(formula, Number):
            return self.noted(formula.value)
        if isinstance(formula, Symbol):
            return self._symbol(formula.name)
        if formula.head.startswith("call "):
            return self._opaque(formula)
        if formula.head in ("sum", "prod"):
            return self._series(formula)
        operation = OPERATIONS.get(formula.head)
        if operation is None:
            return self._opaque(formula)
        arguments = [self.value(argument) for argument in formula.arguments]
        if formula.head == "/":
            self._check_not_zero(formula.arguments[1], arguments[1])
        if formula.head == "^":
            self._check_power(formula, *arguments)
        try:
            return self.noted(operation(self, *arguments))
        except (
            ZeroDivisionError,
            ValueError,
            OverflowError,
            TypeError,
            mpmath.libmp.NoConvergence,
        ) as error:
            raise NoValue(str(error)) from None

    def _check_power(self, formula: Apply, base: Numeric, exponent: Numeric) -> None:
        """Raise NoValue for 0^x, whose value the sign of x decides, and for a power
        with exponent 0 whose base may be 0.
        """
        if not base and symbols(formula.arguments[1]):
            raise NoValue("a power of zero with a variable")
        if not exponent:
            self._check_not_zero(formula.arguments[0], base)

    def _check_not_zero(self, formula: Formula, value: Numeric) -> None:
        """Raise NoValue if a formula's value is not exact and cannot be told from 0: it
        shrinks as the precision grows. An exact 0 is left to the operations.
        """
        if isinstance(value, Fraction):
            return
        is_far_from_zero = value and magnitude(value) > -CONTEXT.prec // 4
        if is_far_from_zero:
            return
        precision = CONTEXT.prec
        CONTEXT.prec = 2 * precision
        try:
            finer = Evaluator(self.point, self.real, self.budget).value(formula)
        finally:
            CONTEXT.prec = precision
        if not value or not finer or magnitude(finer) < magnitude(value) - precision // 4:
            raise NoValue("a divisor that cannot be told from 0")

    def noted(self, value: Numeric) -> Numeric:
        """Return the value in its simplest type, and note its length: an integer
        becomes a Fraction, a too long Fraction a Real, and so does a Complex without
        imaginary part. NoValue if it is infinite.
        """
        if isinstance(value, int):
            return Fraction(value)
        if isinstance(value, Fraction):
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
            self.budget.spend_on(bits)
            self.bits = max(self.bits, bits)
            return value if bits <= MOST_BITS else as_real(value)
        self.budget.spend_on(CONTEXT.prec)
        if isinstance(value, Complex) and not value.imag:
            return self.noted(value.real)
        if not CONTEXT.isfinite(value):
            raise NoValue("an infinite number")
        return value

    def _symbol(self, name: str) -> Numeric:
        """Return the value of a variable or constant; of a name that the point lacks,
        always the same number.
        """
        if name in self.point:
            return self.point[name]
        if name == "pi":
            return +CONTEXT.pi  # the plus rounds the constant to the present precision
        if name == "e":
            return +CONTEXT.e
        if name == "i":
            return Complex(0, 1)
        return variable(name, 0)

    def _opaque(self, formula: Apply) -> Numeric:
        """Return a number for what has no known value: the same one for equal
        arguments.
        """
        arguments = [self.value(argument) for argument in formula.arguments]
        words = [formula.head, *(self.key(argument) for argument in arguments)]
        return hashed(words)

    def key(self, value: Numeric) -> str:
        """Return a text that equal values have in common, up to rounding."""
        if isinstance(value, Fraction):
            return str(value)
        return str(CONTEXT.nstr(value, 25))

    def _series(self, formula: Apply) -> Numeric:
        """Return a finite sum or product. For one with other bounds return a number
        that is the same for equal bounds and terms that agree at two values of the
        index.
        """
        index, low, high, body = formula.arguments
        assert isinstance(index, Symbol)
        first = self.value(low)
        last = self.value(high)
        if self._can_be_added(first, last, high):
            return self._added(formula.head, index.name, body, int(first), int(last))
        samples = []
        for label in ("3", "7"):
            at_sample = self._with(index.name, hashed(["index", label]))
            samples.append(self.key(at_sample.value(body)))
        return hashed([formula.head, self.key(first), self.key(last), *samples])

    def _can_be_added(self, first: Numeric, last: Numeric, high: Formula) -> bool:
        """Return whether a series runs over few enough integers. high: the formula of
        its last index; ∞ has a number for a value, as variables have.
        """
        are_exact = isinstance(first, Fraction) and isinstance(last, Fraction)
        if not are_exact or high == Symbol("infinity"):
            return False
        are_integers = first.denominator == last.denominator == 1
        return are_integers and 0 <= last - first < MOST_TERMS

    def _added(self, head: str, name: str, body: Formula, first: int, last: int) -> Numeric:
        """Return the sum or product (head: `sum` or `prod`) of the values of `body`, in
        which the variable `name` goes from `first` to `last`.
        """
        if head == "sum":
            combine = OPERATIONS["+"]
            total: Numeric = Fraction(0)
        else:
            combine = OPERATIONS["*"]
            total = Fraction(1)
        for n in range(first, last + 1):
            at_n = self._with(name, Fraction(n))
            total = combine(self, total, at_n.value(body))
            self.spread = max(self.spread, at_n.spread)
        return self.noted(total)

    def _with(self, name: str, value: Numeric) -> "Evaluator":
        """Return an evaluator at this point, with one variable's value added."""
        point = {**self.point, name: value}
        return Evaluator(point, self.real, self.budget)


def magnitude(value: Numeric) -> int:
    """Return the binary exponent of a value that is not zero."""
    if isinstance(value, Fraction):
        return value.numerator.bit_length() - value.denominator.bit_length()
    return int(CONTEXT.mag(value))


def variable(name: str, number: int, integers: bool = False) -> Fraction:
    """Return a variable's value at the point of this number, always the same one.

    integers: it is one from 3 to 25; else a fraction up to 4 in size, positive at the
    points 0 to 2, negative at point 3 and of either sign beyond.
    """
    digest = hashlib.blake2b(f"{name} {number}".encode(), digest_size=8).digest()
    word = int.from_bytes(digest)
    if integers:
        return Fraction(3 + word % 23)
    value = Fraction(1 + word % 3989, 1009)
    random_bit = bool(word & (1 << 40))
    is_negative = number == 3 or (number > 3 and random_bit)
    return -value if is_negative else value


def hashed(words: list[str]) -> Fraction:
    """Return a number between 1 and 2 that looks random, the same one for the same
    words.
    """
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=6).digest()
    return 1 + Fraction(int.from_bytes(digest), 1 << 48)


def _add(evaluator: Evaluator, *terms: Numeric) -> Numeric:
    """Return the terms' sum. If it is not exact, note the largest difference between
    the magnitudes of terms and sum: the bits that may be lost.
    """
    total = terms[0]
    for term in terms[1:]:
        total = _both(evaluator, total, term, lambda a, b: a + b)
    if not isinstance(total, Fraction):
        exponents = [magnitude(term) for term in terms if term]
        exponents.append(magnitude(total) if total else -CONTEXT.prec)
        evaluator.spread = max(evaluator.spread, max(exponents) - min(exponents))
    return total


def _both(
    evaluator: Evaluator, a: Numeric, b: Numeric, operate: Callable[[Numeric, Numeric], Numeric]
) -> Numeric:
    """Operate on two exact fractions, or else on two numbers of the same precision."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return operate(a, b)
    return operate(as_real(a), as_real(b))


def _multiply(evaluator: Evaluator, *factors: Numeric) -> Numeric:
    """Return the factors' product; each product on the way is bounded as the last."""
    product = factors[0]
    for factor in factors[1:]:
        product = evaluator.noted(_both(evaluator, product, factor, lambda a, b: a * b))
    return product


def _divide(evaluator: Evaluator, a: Numeric, b: Numeric) -> Numeric:
    if not b:
        raise NoValue("a division by zero")
    return _both(evaluator, a, b, lambda c, d: c / d)


def _power(evaluator: Evaluator, base: Numeric, exponent: Numeric) -> Numeric:
    """Return a power, exact if it has few bits. NoValue if it is beyond the bounds, if
    the base is zero and the exponent not positive or, among real numbers, for a root of
    a negative number.
    """
    exact = _exact_power(base, exponent)
    if exact is not None:
        return exact
    if not base:
        if _real_part(exponent) > 0:
            return Fraction(0)
        raise NoValue("a power of zero")
    rounded_base = as_real(base)
    logarithm = CONTEXT.log(abs(rounded_base)) * abs(as_real(exponent))
    if abs(logarithm) > LARGEST_LOG:
        raise NoValue("a power beyond the bounds")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return CONTEXT.power(rounded_base, int(exponent))
    if evaluator.real and _is_negative(base):
        raise NoValue("a root of a negative number")
    return CONTEXT.power(rounded_base, as_real(exponent))


def _exact_power(base: Numeric, exponent: Numeric) -> Fraction | None:
    """Return the power if it is a fraction of few bits, else None. NoValue for a power
    of zero whose exponent is not positive.
    """
    if not isinstance(exponent, Fraction) or not isinstance(base, Fraction):
        return None
    if exponent.denominator != 1:
        root = _exact_root(base, exponent.denominator)
        if root is None:
            return None
        base = root
    power = exponent.numerator
    if not base and power <= 0:
        raise NoValue("a power of zero")
    if abs(power).bit_length() > 40:  # only these have few bits, whatever the power
        return base if base in (0, 1) else None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(power) > MOST_BITS and abs(base) != 1:
        return None
    return base**power


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the root of a fraction if it is a fraction too, else None; None also for
    negative fractions, and for degrees above 64.
    """
    if value < 0 or degree > 64:
        return None
    above = _integer_root(value.numerator, degree)
    below = _integer_root(value.denominator, degree)
    if above is None or below is None:
        return None
    return Fraction(above, below)


def _integer_root(value: int, degree: int) -> int | None:
    """Return the root of a natural number if it is an integer, else None."""
    if degree == 2:
        root = math.isqrt(value)
    else:
        root = _newton_root(value, degree)
    return root if root**degree == value else None


def _newton_root(value: int, degree: int) -> int:
    """Return the integer part of a root of a natural number, by Newton's method from
    above.
    """
    if value < 2:
        return value
    bits_of_root = -(-value.bit_length() // degree)  # rounded up
    guess = 1 << bits_of_root
    while True:
        quotient = value // guess ** (degree - 1)
        better = ((degree - 1) * guess + quotient) // degree
        if better >= guess:
            return guess
        guess = better


def _is_negative(value: Numeric) -> bool:
    return not isinstance(value, Complex) and value < 0


def _real_part(value: Numeric) -> Numeric:
    return value.real if isinstance(value, Complex) else value


def _sqrt(evaluator: Evaluator, value: Numeric) -> Numeric:
    return _root(evaluator, value, Fraction(2))


def _cbrt(evaluator: Evaluator, value: Numeric) -> Numeric:
    return _root(evaluator, value, Fraction(3))


def _root(evaluator: Evaluator, value: Numeric, degree: Numeric) -> Numeric:
    """Return a root, exact if it is a fraction. An odd root of a negative number is
    negative; an even one has no value among real numbers.
    """
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= 10**6:
        return _power(evaluator, value, _divide(evaluator, Fraction(1), degree))
    if degree % 2 and _is_negative(value):
        return -_root(evaluator, -value, degree)
    if isinstance(value, Fraction):
        exact = _exact_root(value, int(degree))
        if exact is not None:
            return exact
    if evaluator.real and _is_negative(value):
        raise NoValue("a root of a negative number")
    if degree == 2:
        return CONTEXT.sqrt(as_real(value))
    return CONTEXT.root(as_real(value), int(degree))


def _ln(evaluator: Evaluator, value: Numeric) -> Numeric:
    """Return the natural logarithm. NoValue for zero; OutsideDomain, among real
    numbers, for a negative one.
    """
    if not value:
        raise NoValue("the logarithm of zero")
    if evaluator.real and _is_negative(value):
        raise OutsideDomain("the logarithm of a negative number")
    if value == 1:
        return Fraction(0)
    return CONTEXT.ln(as_real(value))


def _log(evaluator: Evaluator, value: Numeric, base: Numeric | None = None) -> Numeric:
    """Return a logarithm. One without a base may mean 10 or e, so it is taken to a base
    that is neither, the same in all formulas.
    """
    if base is None:
        base = Fraction(3989, 1009)
    return _divide(evaluator, _ln(evaluator, value), _ln(evaluator, base))


def _lg(evaluator: Evaluator, value: Numeric) -> Numeric:
    return _log(evaluator, value, Fraction(10))


def _exp(evaluator: Evaluator, value: Numeric) -> Numeric:
    e = +CONTEXT.e  # the plus rounds the constant to the present precision
    return _power(evaluator, e, value)


def _elementary(name: str) -> Callable[..., Numeric]:
    """Return the operation that computes a function of mpmath, such as `sin`."""

    def function(evaluator: Evaluator, value: Numeric) -> Numeric:
        """Return the function's value. NoValue if the argument is very large, nearly 0
        or near a pole, or if the value is complex among real numbers.
        """
        number = as_real(value)
        if abs(number) > LARGEST_ANGLE or (name == "tanh" and abs(number) > LARGEST_OF_TANH):
            raise NoValue("an argument beyond the bounds")
        if number and magnitude(number) < SMALLEST_EXPONENT:
            raise NoValue("an argument that cannot be told from 0")
        result = getattr(CONTEXT, name)(number)
        if evaluator.real and isinstance(result, Complex):
            raise NoValue("a complex value")
        if result and magnitude(result) > EXPONENT_AT_POLES:
            raise NoValue("a pole")
        return result

    return function


def _factorial(evaluator: Evaluator, value: Numeric) -> Numeric:
    """Return a factorial, of a fraction by the gamma function. NoValue for a number
    that is not exact, a negative integer, or one beyond the bounds.
    """
    if not isinstance(value, Fraction):
        raise NoValue("a factorial of a number that is not exact")
    if value.denominator != 1:
        return CONTEXT.factorial(as_real(value))
    if not 0 <= value <= LARGEST_ARGUMENT:
        raise NoValue("a factorial beyond the bounds")
    if value <= LARGEST_EXACT_FACTORIAL:
        evaluator.budget.spend(int(value) // 10)
        return Fraction(math.factorial(int(value)))
    return CONTEXT.factorial(int(value))


def _double_factorial(evaluator: Evaluator, value: Numeric) -> Numeric:
    """Return n!! = n (n − 2) (n − 4) … for n up to 2,000. NoValue for others."""
    number = _as_integer(value)
    if not 0 <= number <= 2_000:
        raise NoValue("a factorial beyond the bounds")
    return Fraction(math.prod(range(number, 0, -2)))


def _binomial(evaluator: Evaluator, n: Numeric, k: Numeric) -> Numeric:
    """Return a binomial coefficient; of numbers that are no integers by the gamma
    function. NoValue for integers unless 0 ≤ k ≤ n, and for a large n.
    """
    if _is_integer(n) and _is_integer(k):
        if not 0 <= n <= LARGEST_ARGUMENT or not 0 <= k <= n:
            raise NoValue("a binomial coefficient beyond the bounds")
        if n <= LARGEST_EXACT_FACTORIAL:
            evaluator.budget.spend(int(min(k, n - k)) // 10)
            return Fraction(math.comb(int(n), int(k)))
    return CONTEXT.binomial(as_real(n), as_real(k))


def _is_integer(value: Numeric) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _as_integer(value: Numeric) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1:
        raise NoValue("no integer")
    return value.numerator


def _gcd(evaluator: Evaluator, *values: Numeric) -> Numeric:
    return Fraction(math.gcd(*map(_as_integer, values)))


def _lcm(evaluator: Evaluator, *values: Numeric) -> Numeric:
    return Fraction(math.lcm(*map(_as_integer, values)))


def _mod(evaluator: Evaluator, value: Numeric, modulus: Numeric) -> Numeric:
    """Return the remainder of two integers. NoValue for others, and modulo 0."""
    number = _as_integer(modulus)
    if not number:
        raise NoValue("modulo zero")
    return Fraction(_as_integer(value) % number)


def _floor(evaluator: Evaluator, value: Numeric) -> Numeric:
    """Return the largest integer up to the value; of a value that is not exact and
    nearly an integer, that integer.
    """
    if isinstance(value, Fraction):
        return Fraction(math.floor(value))
    nearest = CONTEXT.nint(value)
    if abs(value - nearest) < Real(10) ** -30:
        return Fraction(int(nearest))
    return Fraction(int(CONTEXT.floor(value)))


def _ceil(evaluator: Evaluator, value: Numeric) -> Numeric:
    return -_floor(evaluator, -value)


def _absolute(evaluator: Evaluator, value: Numeric) -> Numeric:
    return abs(value)


def _maximum(evaluator: Evaluator, *values: Numeric) -> Numeric:
    return max(values, key=as_real)


def _minimum(evaluator: Evaluator, *values: Numeric) -> Numeric:
    return min(values, key=as_real)


def _negate(evaluator: Evaluator, value: Numeric) -> Numeric:
    return -value


def _percent(evaluator: Evaluator, value: Numeric) -> Numeric:
    return value / 100


def _degrees(evaluator: Evaluator, value: Numeric) -> Numeric:
    return as_real(value) * CONTEXT.pi / 180


def _re(evaluator: Evaluator, value: Numeric) -> Numeric:
    return _real_part(value)


def _im(evaluator: Evaluator, value: Numeric) -> Numeric:
    return value.imag if isinstance(value, Complex) else Fraction(0)


OPERATIONS: dict[str, Callable[..., Numeric]] = {
    "+": _add,
    "-": _negate,
    "*": _multiply,
    "/": _divide,
    "^": _power,
    "mod": _mod,
    "%": _percent,
    "degree": _degrees,
    "!": _factorial,
    "!!": _double_factorial,
    "sqrt": _sqrt,
    "cbrt": _cbrt,
    "root": _root,
    "abs": _absolute,
    "floor": _floor,
    "ceil": _ceil,
    "ln": _ln,
    "log": _log,
    "lg": _lg,
    "exp": _exp,
    "binom": _binomial,
    "gcd": _gcd,
    "lcm": _lcm,
    "max": _maximum,
    "min": _minimum,
    "re": _re,
    "im": _im,
    "sin": _elementary("sin"),
    "cos": _elementary("cos"),
    "tan": _elementary("tan"),
    "cot": _elementary("cot"),
    "sec": _elementary("sec"),
    "csc": _elementary("csc"),
    "arcsin": _elementary("asin"),
    "arccos": _elementary("acos"),
    "arctan": _elementary("atan"),
    "arccot": _elementary("acot"),
    "sinh": _elementary("sinh"),
    "cosh": _elementary("cosh"),
    "tanh": _elementary("tanh"),
    "arcsinh": _elementary("asinh"),
    "arccosh": _elementary("acosh"),
    "arctanh": _elementary("atanh"),
}
