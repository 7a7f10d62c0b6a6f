"""The conversation with the learner: a ZeroMQ ROUTER that takes requests and sends
replies.

    any connection ──► CURVE: does it have the learner's key?
                                                      no: closed, refused() + 1
    learner's REQ socket ──► [peer, "", schema, body] ──► receive() ─► (peer, Request)
                                                      invalid: dropped, `malformed` + 1
                         ◄── [peer, "", schema, body] ◄── reply(peer, Reply)

Messages under another key are never read; a message that is too long closes its
connection.

    learner ── Next ──► held at most HOLD_S, decided again at every change ──► reply
            ── Experts ──► read from the journal, in a thread
            ── Published, Scored, Stopped ──► noted and acknowledged
    servers ── Join, Leave ──► answered at once

Only the newest learner is listened to: a new incarnation supersedes the one before.
"""

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import (
    LARGEST_REQUEST,
    Ack,
    Experts,
    FromServer,
    Next,
    Published,
    Refused,
    Reply,
    Request,
    Scored,
    Stop,
    Stopped,
    Wait,
    from_frames,
    to_frames,
)
from megarl.core.base.rundir import LinkKeys
from megarl.core.base.types import encode
from megarl.core.controller.decision import Decision

log = logging.getLogger(__name__)

DOMAIN = "megarl"
EVENTS = "inproc://connections"
_open_contexts: set[zmq.asyncio.Context] = set()
"""Contexts of links that are not closed. One that is collected closes itself, and waits
without a limit if a socket of it is collected later.
"""


class Link:
    """A socket bound to `endpoint` (tcp://host:port) until closed. malformed: number of
    dropped messages.
    """

    def __init__(self, endpoint: str, keys: LinkKeys) -> None:
        self.malformed = 0
        self._refused = 0
        self._context = zmq.asyncio.Context()
        _open_contexts.add(self._context)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        learner = keys.learner.encode()
        credentials = SimpleNamespace(callback=lambda _domain, key: key == learner)
        self._authenticator.configure_curve_callback(DOMAIN, credentials)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.controller_secret.encode())
        self._socket.monitor(EVENTS, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events = zmq.Socket(self._context, zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop the link
        self._events.connect(EVENTS)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise MegarlError(
                f"cannot listen on {endpoint}: {error}; is another controller running?"
            ) from None

    async def receive(self) -> tuple[bytes, Request]:
        """Return the next valid request and the peer that the reply goes to."""
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                return peer, _request(frames)
            except msgspec.MsgspecError as error:
                self.malformed += 1
                log.warning("dropped a malformed request (%d so far): %s", self.malformed, error)

    def refused(self) -> int:
        """Return how many connections have not shown the learner's key, perhaps not
        yet.
        """
        refused_before = self._refused
        while self._events.poll(0):
            # the event's number and a value, as zmq_socket_monitor(3) describes them
            event, _ = struct.unpack("=hi", self._events.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._refused += 1
            else:  # a handshake has succeeded
                self._refused -= 1
        # Only at each doubling, so that the log does not fill.
        if self._refused.bit_length() > refused_before.bit_length():
            log.warning("connections without the learner's key so far: %d", self._refused)
        return self._refused

    async def reply(self, peer: bytes, reply: Reply, data: Sequence[bytes] = ()) -> None:
        """Send a reply, and data in frames of their own, which are not copied. If the
        peer is gone, ZeroMQ drops the reply; a peer that comes back asks again.
        """
        frames = [peer, b"", *to_frames(reply), *data]
        await self._socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        """Close the socket after at most a second for what is still to be sent."""
        self._authenticator.stop()
        # The context closes only sockets that it made.
        self._events.close()
        self._context.destroy(linger=1000)
        _open_contexts.discard(self._context)


def _request(frames: list[bytes]) -> Request:
    """Decode the frames after the peer's. MsgspecError if they are no request."""
    if frames[:1] != [b""]:
        raise msgspec.DecodeError("no empty delimiter frame: not from a REQ socket")
    return from_frames(frames[1:], Request)


HOLD_S = 1.0
"""Longest time that a `Next` is held before the answer is Wait: the learner checks for
RUN/stop between its requests.
"""


class ConversationOver(Exception):
    """Raised to end the task group when the controller's work is done."""


class _WaitingNext(NamedTuple):
    """A Next that has not been answered yet."""

    peer: bytes
    request: Next
    until: float  # time.monotonic()


class Answers(Protocol):
    """Who knows the answers: the controller."""

    def of_server(self, message: FromServer) -> Reply:
        """Answer a server that joins or leaves."""

    def new_learner(self) -> None:
        """Take note that another learner speaks from now on."""

    def learner_left(self, step: int) -> None:
        """Take note that the learner has left at this step."""

    async def experts(self, request: Experts) -> tuple[Reply, list[bytes]]:
        """Return the answer to this request, and the frames that follow it."""

    async def published(self, result: Published) -> None:
        """Take note of a publication."""

    def scored(self, result: Scored) -> None:
        """Take note of the learner's log-probs for parity."""

    def evaluate_if_due(self, version: int) -> None:
        """Start the evaluations that are due at this version."""

    def decide(self, request: Next) -> Decision:
        """Return what the learner is to do next; pure."""

    async def carry_out(self, decision: Decision, request: Next) -> Reply:
        """Do what the decision needs and return the reply."""


class Conversation:
    """The conversation over `link`. incarnation: the learner's, or empty. Set `changed`
    when what answers depend on changes.
    """

    def __init__(self, link: Link, answers: Answers) -> None:
        self._link = link
        self._answers = answers
        self._superseded = set[str]()
        self.incarnation = ""
        self._waiting: _WaitingNext | None = None
        self.changed = asyncio.Event()

    async def listen(self) -> None:
        """Receive requests until the learner leaves."""
        while True:
            peer, request = await self._link.receive()
            if isinstance(request, FromServer):
                await self._link.reply(peer, self._answers.of_server(request))
                continue
            if request.incarnation in self._superseded:
                error = (
                    f"a newer learner ({self.incarnation}) has taken over; this one should have"
                    " ended"
                )
                await self._link.reply(peer, Refused(error=error))
                continue
            if request.incarnation != self.incarnation:
                await self._meet(request.incarnation)
            if isinstance(request, Next):
                self._waiting = _WaitingNext(peer, request, time.monotonic() + HOLD_S)
                self.changed.set()
                continue
            if isinstance(request, Experts):
                await self._link.reply(peer, *await self._answers.experts(request))
                continue
            await self._note(request)
            await self._link.reply(peer, Ack())
            if isinstance(request, Stopped):
                log.info("the learner has left at step %d", request.step)
                self._answers.learner_left(request.step)
                raise ConversationOver

    async def _note(self, request: Published | Scored | Stopped) -> None:
        """Pass a result on; a goodbye has none."""
        if isinstance(request, Published):
            await self._answers.published(request)
        if isinstance(request, Scored):
            self._answers.scored(request)

    async def answer(self) -> None:
        """Answer the waiting `Next` when something changes or its time is up, until the
        answer is that the run has failed.
        """
        while True:
            self.changed.clear()
            timeout = None
            if self._waiting is not None:
                await self._decide(self._waiting)
            if self._waiting is not None:
                timeout = max(0.0, self._waiting.until - time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), timeout)

    async def _decide(self, waiting: _WaitingNext) -> None:
        """Answer this `Next`, unless the answer is to wait and its time is not up.
        Raise ConversationOver once the run has failed.
        """
        self._answers.evaluate_if_due(waiting.request.version)
        decision = self._answers.decide(waiting.request)
        if isinstance(decision, Wait) and time.monotonic() < waiting.until:
            return
        self._waiting = None
        reply = await self._answers.carry_out(decision, waiting.request)
        asked_again = self._waiting
        if asked_again is not None and encode(asked_again.request) == encode(waiting.request):
            # It took long, as for a batch of long rollouts, and the learner listens on
            # a new socket.
            waiting = asked_again
            self._waiting = None
        await self._link.reply(waiting.peer, reply)
        if isinstance(reply, Stop) and reply.error:
            # After an error the learner sends no `Stopped`.
            raise ConversationOver

    async def _meet(self, incarnation: str) -> None:
        """Listen to this learner from now on."""
        superseded = ""
        if self.incarnation:
            superseded = f"; {self.incarnation} is superseded"
            self._superseded.add(self.incarnation)
        log.info("learner %s speaks%s", incarnation, superseded)
        if self._waiting is not None:
            error = "a newer learner has taken over"
            await self._link.reply(self._waiting.peer, Refused(error=error))
        self._waiting = None
        self.incarnation = incarnation
        self._answers.new_learner()
