"""A calculator for use in the middle of a thought: the policy writes `[123*456]`, and
`56088` is inserted after it.

`]` stops the turn, so it must always be a separate token, as in the quickstart's
character tokenizer. The reply to anything that cannot be calculated is `?`. A turn that
ends with the end token is the last one.
"""

import ast
import operator
from collections.abc import Callable

import numpy as np

from megarl.core.base.contracts import DONE, Environment, Observation
from megarl.core.base.errors import MegarlError
from megarl.tasks.environments.framing import Setting

OPEN = "["
CLOSE = "]"
UNKNOWN = "?"
LONGEST = 200
"""Most characters in an expression, which also bounds the digits of its value and the
time.
"""


def _divide(dividend: int, divisor: int) -> int:
    """Divide. ValueError if there is a remainder, ZeroDivisionError for a divisor 0."""
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise ValueError("not a whole number")
    return quotient


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: operator.mod,
}


class Calculator(Environment):
    """Evaluates + - * / % and parentheses over integers. A division with a remainder is
    an error.
    """

    def __init__(self, setting: Setting) -> None:
        self._tokenizer = setting.tokenizer
        self._reply_tokens = setting.reply_tokens
        closing = self._tokenizer.ids(CLOSE)
        if len(closing) != 1:
            raise MegarlError(f"calculator needs {CLOSE!r} as one token")
        self.stop_tokens = (int(closing[0]),)

    async def step(self, tokens: np.ndarray) -> Observation:
        """Return the value of the expression that the turn ends with, `[123*456]`; `?`
        if it has none or one of too many tokens. A turn without `]` at its end is the
        last one.
        """
        if int(tokens[-1]) not in self.stop_tokens:
            return DONE
        _, bracket, expression = self._tokenizer.decode(tokens[:-1]).rpartition(OPEN)
        value = calculated(expression) if bracket else None
        if value is not None:
            reply = self._tokenizer.ids(str(value))
            if len(reply) <= self._reply_tokens:
                return Observation(reply)
        return Observation(self._tokenizer.ids(UNKNOWN), error=True)


def calculated(expression: str) -> int | None:
    """Return the expression's value; None if it has none."""
    if len(expression) > LONGEST:
        return None
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    """Return the value of a parsed expression. ValueError if it has anything but whole
    numbers, the operators and a minus before them.
    """
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not arithmetic of whole numbers")
