"""Simulates a server's requests, token by token, in virtual time. One decode step gives
each running request one token.

    generate(context, tokens) ─► joins the running requests
                              ─► returns `tokens` decode steps later: tokens by version
    pause() … resume(version)    nothing is decoded in between; requests then continue
                                 with the new weights

The seconds of a decode step depend on the running requests and on the context that they
hold. They are recomputed whenever a request comes or goes, and every STRIDE steps, so
the number of events depends on requests, not on tokens.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

StepSeconds = Callable[[float, float], float]
"""(running requests, tokens of context that they hold in total) -> seconds of one
decode step.
"""
STRIDE = 256
TINY = 1e-9


class _Decoding(NamedTuple):
    ends: float  # in decode steps of this server since the start
    order: int  # unique, so that a comparison never reaches the later fields
    began: float
    context: int  # tokens before the first decoded one
    done: "asyncio.Future[None]"


class SimulatedServer:
    """A simulated server. busy_seconds: time not paused and with any request;
    running_seconds: that, summed over requests.
    """

    def __init__(self, step_seconds: StepSeconds) -> None:
        self._step_seconds = step_seconds
        self._running: list[_Decoding] = []
        self._order = itertools.count()
        self._steps = 0.0  # decode steps until `_since`
        self._since = 0.0
        self._rate = 0.0  # decode steps per second since then
        self._starts = 0.0  # sum over running requests of (began - context)
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._versions = [(0.0, 0)]  # (decode step, version of the weights from then on)
        self.busy_seconds = 0.0
        self.running_seconds = 0.0

    async def generate(self, context: int, tokens: int) -> dict[int, int]:
        """Return how many tokens of a request were sampled with each version of the
        weights, after they are decoded.
        """
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = _Decoding(self._steps + tokens, next(self._order), self._steps, context, done)
        heapq.heappush(self._running, request)
        self._starts += request.began - context
        self._plan()
        await done
        return self._sampled(request.began, request.ends)

    def pause(self) -> None:
        """Decode nothing until `resume`."""
        self._advance()
        self._paused = True
        self._plan()

    def resume(self, version: int) -> None:
        """Go on, with the weights of this version."""
        self._advance()
        self._paused = False
        self._versions.append((self._steps, version))
        oldest = min((request.began for request in self._running), default=self._steps)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            del self._versions[0]  # it was replaced before the oldest running request began
        self._plan()

    def _sampled(self, began: float, ends: float) -> dict[int, int]:
        """Return tokens by version of the weights. began, ends: in decode steps."""
        counts: dict[int, int] = {}
        borders = [*(start for start, _ in self._versions[1:]), ends]
        start = began
        for (_, version), border in zip(self._versions, borders, strict=True):
            end = min(max(border, start), ends)
            count = round(end - began) - round(start - began)
            if count:
                counts[version] = counts.get(version, 0) + count
            start = end
        return counts

    def _advance(self) -> None:
        """Advance the count of decode steps to now, and end requests that have all
        their tokens.
        """
        time = asyncio.get_running_loop().time()
        elapsed = time - self._since
        if self._rate:
            self.busy_seconds += elapsed
            self.running_seconds += elapsed * len(self._running)
            self._steps += elapsed * self._rate
        self._since = time
        end = self._steps + TINY * max(1.0, self._steps)
        while self._running and self._running[0].ends <= end:
            request = heapq.heappop(self._running)
            self._starts -= request.began - request.context
            if not request.done.done():
                request.done.set_result(None)

    def _plan(self) -> None:
        """Compute the rate from now on, and schedule the next update."""
        if self._timer is not None:
            self._timer.cancel()
        count = len(self._running)
        if not count or self._paused:
            self._rate = 0.0
            return
        stride = min(self._running[0].ends - self._steps, STRIDE)
        context_tokens = count * (self._steps + stride / 2) - self._starts
        seconds = self._step_seconds(count, context_tokens)
        self._rate = 1 / seconds
        self._timer = asyncio.get_running_loop().call_later(stride * seconds, self._wake)

    def _wake(self) -> None:
        self._advance()
        self._plan()
