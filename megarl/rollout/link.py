"""The controller's end of the conversation with the learner: a ZeroMQ ROUTER that takes requests and sends replies.

    learner's REQ socket ──► [peer, "", schema, body] ──► receive() ─► (peer, Request)
                         ◄── [peer, "", schema, body] ◄── reply(peer, Reply)

Frames that are none of this schema come from something else: counted, logged and dropped.
"""

import logging

import msgspec
import zmq
import zmq.asyncio

from megarl.errors import MegarlError
from megarl.messages import Reply, Request, from_frames, to_frames

log = logging.getLogger(__name__)


class Link:
    """Bound to `endpoint` (tcp://host:port) until closed. `malformed` counts what was dropped."""

    def __init__(self, endpoint: str) -> None:
        self.malformed = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
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

    async def reply(self, peer: bytes, reply: Reply) -> None:
        """Send; a peer that is gone is passed over, for it will ask again."""
        await self._socket.send_multipart([peer, b"", *to_frames(reply)])

    def close(self) -> None:
        self._context.destroy(linger=1000)
