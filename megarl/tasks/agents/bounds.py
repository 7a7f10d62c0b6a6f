"""How long a request may be. Checked before it is parsed, rendered or tokenised, so
that a request that is much too long for the context costs little time and memory.

    bytes of the body ─► number of messages and tools
      └ all requests       ─► tokens, counted piece by piece (rendering.py)
        together: ByteBudget
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.recipe.generation import Length
from megarl.tasks.agents.errors import ContextFull, WireError

BYTES_PER_TOKEN = 32
"""Most bytes of a body per token of the context. Conversations have about eight;
escapes such as `\\u00e9`, tools and ids add to them.
"""
SMALLEST_LIMIT = 1 << 20
"""Bytes that every body may have, however short the context."""
LARGEST_BODY = 32 << 20
"""Bytes that no body may exceed. A conversation of 500 turns and 193,000 tokens has 1.5
million.
"""
LARGEST_REWARD = 1 << 16
"""Bytes of a body that posts a reward."""
IN_FLIGHT = 128 << 20
"""Bytes of all bodies that are read, parsed and rendered at a time."""
WAIT_LIMIT_S = 600.0
"""Seconds for which a request may wait until others have been read and rendered."""
MOST_STOPS = 64
"""Most stop texts of a request. OpenAI allows four."""


@dataclass(frozen=True)
class RequestBounds:
    """The bounds of one session's requests. prompt_tokens: the longest prompt that
    leaves room for an answer.
    """

    prompt_tokens: int

    @staticmethod
    def of(length: Length) -> "RequestBounds":
        """Return the bounds for a recipe's context. Servers refuse prompts that come
        closer to it.
        """
        return RequestBounds(length.context_tokens - KEPT_FROM_INPUT - 1)

    @property
    def body_bytes(self) -> int:
        """The most bytes of a body."""
        return min(LARGEST_BODY, max(SMALLEST_LIMIT, BYTES_PER_TOKEN * self.prompt_tokens))

    def check_bytes(self, size: int) -> None:
        """Raise ContextFull if a body of `size` bytes is too long for the context, and
        WireError if it is too long for any.
        """
        if size > LARGEST_BODY:
            raise WireError(413, f"the body is longer than {LARGEST_BODY:,} bytes", "too_large")
        if size > self.body_bytes:
            raise ContextFull(size // BYTES_PER_TOKEN, self.prompt_tokens, at_least=True)

    def check_count(self, count: int) -> None:
        """Raise ContextFull if there are more messages, or tools, than the prompt may
        have tokens.
        """
        if count > self.prompt_tokens:
            raise ContextFull(count, self.prompt_tokens, at_least=True)


class ByteBudget:
    """A number of bytes that requests share: first come, first served."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncIterator[None]:
        """Wait until `count` bytes are free, and occupy them while the block runs.
        WireError if they are not free within WAIT_LIMIT_S.
        """
        count = min(count, self._size)  # a larger request has all bytes for itself
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._admit()
        try:
            await _admitted(turn)
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += count
            turn.cancel()  # if it still waits, `_admit` passes over it
            self._admit()

    def _admit(self) -> None:
        """Let in those who wait, first come, first served, as far as bytes are free."""
        while self._waiting:
            count, turn = self._waiting[0]
            gave_up = turn.done()  # cancelled as it waited
            if not gave_up and count > self._free:
                return
            self._waiting.popleft()
            if not gave_up:
                self._free -= count
                turn.set_result(None)


async def _admitted(turn: asyncio.Future[None]) -> None:
    """Wait for a request's turn. WireError if it does not come within WAIT_LIMIT_S."""
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            await turn
    except TimeoutError:
        raise WireError(
            503,
            f"other requests were being read and rendered for {WAIT_LIMIT_S:g} s",
            "overloaded",
        ) from None
