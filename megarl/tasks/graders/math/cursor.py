"""A position in the tokens of an answer."""

from collections.abc import Iterator
from contextlib import contextmanager

from megarl.tasks.graders.math.tokens import MOST_DEPTH, CannotRead, Gap, Token, TokenKind


class Cursor:
    """Reads tokens one by one. CannotRead where the grammar expects something else."""

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self._tokens = list(tokens)
        self.position = 0
        self._depth = 0

    def peek(self, ahead: int = 0) -> Token:
        """Return the token at this distance without moving; END behind the last."""
        index = min(self.position + ahead, len(self._tokens) - 1)
        return self._tokens[index]

    @property
    def previous(self) -> Token | None:
        """The token that was read last; None before the first."""
        return self._tokens[self.position - 1] if self.position else None

    def take(self) -> Token:
        """Return the next token and move behind it. CannotRead at the end."""
        token = self.peek()
        if token.kind is TokenKind.END:
            raise CannotRead("the text ends early")
        self.position += 1
        return token

    def at(self, *texts: str) -> bool:
        """Return whether the next token is one of these."""
        token = self.peek()
        return token.text in texts and token.kind is not TokenKind.END

    def at_end(self) -> bool:
        """Return whether all tokens are read."""
        return self.peek().kind is TokenKind.END

    def accept(self, *texts: str) -> bool:
        """Move behind the next token if it is one of these; return whether it was."""
        is_next = self.at(*texts)
        self.position += is_next
        return is_next

    def expect(self, text: str) -> None:
        """Move behind this token. CannotRead if another one comes next."""
        if not self.accept(text):
            raise CannotRead(f"{self.peek().text!r} instead of {text!r}")

    def replace(self, *tokens: Token) -> None:
        """Put these tokens in the place of the next one."""
        self._tokens[self.position : self.position + 1] = tokens

    def split_number(self) -> Token:
        """Take the first digit of the next number, as `\\frac12` does, and leave the
        others as a number of their own. Take one that is no integer whole.
        """
        token = self.peek()
        if len(token.text) > 1 and token.text.isdigit():
            remainder = Token(TokenKind.NUMBER, token.text[1:], Gap.NONE, token.upright)
            self.replace(
                Token(TokenKind.NUMBER, token.text[0], token.gap, token.upright), remainder
            )
        return self.take()

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Count one level of nesting in the `with` block. CannotRead if it is one too
        many.
        """
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise CannotRead(f"nested more than {MOST_DEPTH} deep")
        try:
            yield
        finally:
            self._depth -= 1
