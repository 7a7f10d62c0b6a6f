"""The conversation with the learner: who it is, what it has asked, when it is answered.

    learner ── Next ──────────────► held, at most HOLD_S ── decide, again whenever something has changed ──► the reply
            ── Published, Scored, Stopped ► taken in, acknowledged

Only one learner is listened to, the one that spoke last: a new incarnation supersedes the one before.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from megarl.core.base.messages import Ack, Next, Published, Refused, Reply, Scored, Stop, Stopped, Wait
from megarl.core.controller.decision import Decision
from megarl.core.controller.link import Link

log = logging.getLogger(__name__)

HOLD_S = 1.0
"""How long a question is held before the answer is Wait: the learner looks for RUN/stop between questions."""


class End(Exception):
    """Leaves the task group: the controller's work is done."""


class Answers(Protocol):
    """Who knows what to say."""

    def new_learner(self) -> None:
        """Another learner speaks: the earlier one is gone, and what it was publishing will not end."""

    def published(self, result: Published) -> None:
        """A publication is over."""

    def scored(self, result: Scored) -> None:
        """The learner has scored the rollouts it was given."""

    def left(self, step: int) -> None:
        """The learner has saved and leaves."""

    def decide(self, asked: Next) -> Decision:
        """As things stand now."""

    async def carry_out(self, decision: Decision, asked: Next) -> Reply:
        """What has to happen before the learner is told, and what it is told."""


@dataclass
class _Question:
    """A Next that waits for its answer."""

    peer: bytes
    asked: Next
    until: float  # time.monotonic()


class Conversation:
    """Over `link`. `incarnation`: of the learner that speaks now, empty before the first."""

    def __init__(self, link: Link, answers: Answers) -> None:
        self._link, self._answers = link, answers
        self.incarnation, self._superseded = "", set[str]()
        self._question: _Question | None = None
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something that the answer may depend on has changed."""
        self._changed.set()

    async def listen(self) -> None:
        """Take requests until the learner leaves (End)."""
        while True:
            peer, request = await self._link.receive()
            if request.incarnation in self._superseded:
                error = f"a newer learner ({self.incarnation}) has taken over; this one should have ended"
                await self._link.reply(peer, Refused(error=error))
                continue
            if request.incarnation != self.incarnation:
                await self._meet(request.incarnation)
            match request:
                case Next():
                    self._question = _Question(peer, request, time.monotonic() + HOLD_S)
                    self._changed.set()
                case Published():
                    self._answers.published(request)
                    await self._link.reply(peer, Ack())
                case Scored():
                    self._answers.scored(request)
                    await self._link.reply(peer, Ack())
                case Stopped():
                    log.info("the learner has left at step %d", request.step)
                    await self._link.reply(peer, Ack())
                    self._answers.left(request.step)
                    raise End

    async def answer(self) -> None:
        """Answer the question that waits whenever something has changed, or its time is up; End after an error."""
        while True:
            self._changed.clear()
            if self._question:
                decision = self._answers.decide(self._question.asked)
                if not isinstance(decision, Wait) or time.monotonic() >= self._question.until:
                    question, self._question = self._question, None
                    reply = await self._answers.carry_out(decision, question.asked)
                    await self._link.reply(question.peer, reply)
                    if isinstance(reply, Stop) and reply.error:
                        raise End  # a learner that is told so says no goodbye
            timeout = max(0.0, self._question.until - time.monotonic()) if self._question else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)

    async def _meet(self, incarnation: str) -> None:
        log.info("learner %s speaks%s", incarnation, f"; {self.incarnation} is superseded" if self.incarnation else "")
        if self.incarnation:
            self._superseded.add(self.incarnation)
        if self._question:
            await self._link.reply(self._question.peer, Refused(error="a newer learner has taken over"))
        self._question, self.incarnation = None, incarnation
        self._answers.new_learner()
