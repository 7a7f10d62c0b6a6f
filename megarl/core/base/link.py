"""The client side of requests to the controller (megarl/core/base/messages.py): ask,
wait, ask again. Learner rank 0 has one, and so has each server that joins a run.

All requests are idempotent, so a request without an answer is sent again over a new
socket: a late answer to the first one reaches a closed socket, and a controller that
was restarted in between simply gets the request for the first time.
"""

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.messages import LARGEST_REPLY, Request, body_of, to_frames
from megarl.core.base.rundir import LinkKeys

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often `interrupted` is called while waiting."""
LAST_WORD_S = 5.0


class ControllerLink:
    """A connection to the controller at `address` (tcp://host:port), which must prove
    its identity with the key in `keys`. interrupted: returns a reason to give up
    waiting, or "". limit_s: how long the controller may be silent. resend_s: how long
    before a request is sent again; then twice as long, and from then on twice as long
    as any reply took: a batch of long rollouts has gigabytes.
    """

    def __init__(
        self,
        address: str,
        keys: LinkKeys,
        interrupted: Callable[[], str],
        *,
        resend_s: float = 30.0,
        limit_s: float = 600.0,
    ) -> None:
        self.address = address
        self._keys = keys
        self.interrupted = interrupted
        self.resend_s = resend_s
        self.limit_s = limit_s
        # The process's own context. One of the link's would be closed when it is
        # collected, perhaps before its socket, and closing waits, without a limit, for
        # all sockets.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = self._connect()

    def ask(self, request: Request) -> bytes:
        """Return the controller's Reply, still encoded. Raises Interrupted, or
        MegarlError after `limit_s` of silence.
        """
        return self.ask_for_data(request)[0]

    def ask_for_data(self, request: Request) -> list[bytes]:
        """Return the encoded Reply, as `ask`, and the frames that follow it."""
        frames = to_frames(request)
        name = type(request).__name__
        limit = time.monotonic() + self.limit_s
        # Not only while waiting: the controller may always answer at once.
        self._check_interrupted()
        self._socket.send_multipart(frames)
        sent = time.monotonic()
        patience_s = self.resend_s
        while not self._socket.poll(int(1000 * LOOK_S)):
            self._check_interrupted()
            if time.monotonic() >= limit:
                raise MegarlError(
                    f"the controller at {self.address} has not answered {name} for {self.limit_s:g}"
                    " s; look at logs/controller/ of the run, then start again with"
                    " run.resume=auto"
                )
            if time.monotonic() >= sent + patience_s:
                log.warning("no answer to %s within %g s; sending it again", name, patience_s)
                self._reconnect()
                self._socket.send_multipart(frames)
                sent = time.monotonic()
                patience_s = min(2 * patience_s, self.limit_s / 2)
        reply_s = time.monotonic() - sent
        self.resend_s = max(self.resend_s, min(2 * reply_s, self.limit_s / 2))
        try:
            frames = self._socket.recv_multipart()
            return [body_of(frames[:2]), *frames[2:]]
        except msgspec.DecodeError as error:  # both sides should have one version
            raise MegarlError(
                f"the controller at {self.address} speaks another protocol: {error}"
            ) from None

    def tell(self, request: Request) -> None:
        """Send a last message over a new socket; it need not arrive."""
        self._reconnect()
        self._socket.send_multipart(to_frames(request))
        self._socket.poll(int(1000 * LAST_WORD_S))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _check_interrupted(self) -> None:
        """Raise Interrupted if there is a reason to give up waiting."""
        reason = self.interrupted()
        if reason:
            raise Interrupted(reason)

    def _reconnect(self) -> None:
        """Replace the socket: one that has asked cannot ask again before its answer."""
        self._socket.close()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket:
        """Make a socket that is connected to the controller, and encrypted."""
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0  # closing does not wait for a controller that is gone
        socket.maxmsgsize = LARGEST_REPLY
        socket.curve_serverkey = self._keys.controller.encode()
        socket.curve_publickey = self._keys.learner.encode()
        socket.curve_secretkey = self._keys.learner_secret.encode()
        socket.connect(self.address)
        return socket
