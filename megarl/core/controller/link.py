"""The controller's end of the conversation with the learner: a ZeroMQ ROUTER that takes requests and sends replies.

    anybody's connection ──► CURVE: does it have the learner's key? ──no──► closed, refused() + 1
    learner's REQ socket ──► [peer, "", schema, body] ──► receive() ─► (peer, Request)      else: dropped, `malformed` + 1
                         ◄── [peer, "", schema, body] ◄── reply(peer, Reply)

What comes from another key, or from none, is never read. What is too long ends its connection.
"""

import logging
import struct

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import LARGEST_REQUEST, Reply, Request, from_frames, to_frames
from megarl.core.base.rundir import LinkKeys

log = logging.getLogger(__name__)

DOMAIN = "megarl"
EVENTS = "inproc://connections"


class Link:
    """Bound to `endpoint` (tcp://host:port) until closed. `malformed` counts messages that were dropped."""

    def __init__(self, endpoint: str, keys: LinkKeys) -> None:
        self.malformed = self._refused = 0
        self._context = zmq.asyncio.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, _Only(keys.learner.encode()))
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
            raise MegarlError(f"cannot listen on {endpoint}: {error}; does another controller run?") from None

    async def receive(self) -> tuple[bytes, Request]:
        """The next well-formed request and who sent it."""
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                if frames[:1] != [b""]:
                    raise msgspec.DecodeError("no empty delimiter frame: not from a REQ socket")
                return peer, from_frames(frames[1:], Request)
            except msgspec.MsgspecError as error:
                self.malformed += 1
                log.warning("dropped a malformed request (%d so far): %s", self.malformed, error)

    def refused(self) -> int:
        """Connections so far that have not shown the learner's key; one that is about to counts for this moment, too."""
        before = self._refused
        while self._events.poll(0):
            event, _ = struct.unpack("=hi", self._events.recv_multipart()[0])
            self._refused += 1 if event == zmq.EVENT_ACCEPTED else -1
        if self._refused.bit_length() > before.bit_length():  # somebody who tries on and on must not fill the log
            log.warning("connections without the learner's key so far: %d", self._refused)
        return self._refused

    async def reply(self, peer: bytes, reply: Reply) -> None:
        """Send; a peer that is gone is passed over, for it will ask again."""
        await self._socket.send_multipart([peer, b"", *to_frames(reply)])

    def close(self) -> None:
        self._authenticator.stop()
        self._events.close()  # the context knows only of sockets that it made
        self._context.destroy(linger=1000)


class _Only:
    """What pyzmq asks about each peer's public key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key
