"""The controller's link against strangers: random bytes, no key, a wrong key, nonsense
by the right key, too much of it.

In all of it a learner with the right key goes on talking.
"""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import (
    LARGEST_REQUEST,
    Ack,
    Next,
    Request,
    Stopped,
    from_frames,
    to_frames,
)
from megarl.core.base.rundir import LinkKeys
from megarl.core.base.types import encode
from megarl.core.controller.conversation import Link
from megarl.run.process import free_ports

pytestmark = pytest.mark.processes

LIMIT_S = 20.0
KEYS = LinkKeys.new()
STRANGER = LinkKeys.new()


class Controller:
    """A link that acknowledges everything; `heard` are the steps that learners spoke
    of.
    """

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.link = Link(self.address, KEYS)
        self.heard: list[int] = []
        self._task = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            peer, request = await self.link.receive()
            assert isinstance(request, Next)
            self.heard.append(request.step)
            await self.link.reply(peer, Ack())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                assert not self._task.done(), self._task
                await asyncio.sleep(0.01)

    async def serves(self, step: int, keys: LinkKeys = KEYS) -> None:
        """A learner asks and is answered."""

        def ask() -> bytes:
            link = ControllerLink(self.address, keys, lambda: "", limit_s=LIMIT_S)
            try:
                return link.ask(Next(incarnation="a", step=step, version=step))
            finally:
                link.close()

        assert await asyncio.to_thread(ask) == encode(Ack())
        assert self.heard[-1] == step

    def close(self) -> None:
        self._task.cancel()
        self.link.close()


@asynccontextmanager
async def controller() -> AsyncIterator[Controller]:
    made = Controller()
    try:
        yield made
    finally:
        made.close()


def run(test: Callable[[Controller], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with controller() as it:
            await test(it)

    asyncio.run(whole())


def send_raw(port: int, data: bytes) -> None:
    """Bytes to the bare TCP port, until it has closed the connection or said nothing
    for a while.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as raw, suppress(OSError):
        raw.sendall(data)
        raw.settimeout(0.2)
        while raw.recv(4096):
            pass


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""How a peer of ZMTP 3.1 begins; mechanism, role and filler follow."""


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=300),
            st.binary(max_size=200).map(lambda tail: GREETING + tail),
            st.binary(max_size=200).map(
                lambda tail: GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + tail
            ),
            st.binary(max_size=300).map(
                lambda tail: GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + tail
            ),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_random_bytes_reach_nobody(connections: list[bytes]) -> None:
    async def test(it: Controller) -> None:
        for data in connections:
            await asyncio.to_thread(send_raw, it.port, data)
        await it.serves(7)
        assert it.heard == [7]
        await it.until(lambda: it.link.refused() == len(connections))
        assert it.link.malformed == 0

    run(test)


def plain(address: str, keys: LinkKeys | None, kind: int = zmq.DEALER) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.linger = 0
    if keys is not None:
        socket.curve_serverkey = keys.controller.encode()
        socket.curve_publickey, socket.curve_secretkey = (
            keys.learner.encode(),
            keys.learner_secret.encode(),
        )
    socket.connect(address)
    return socket


@pytest.mark.parametrize(
    "keys",
    [
        None,
        STRANGER,
        msgspec.structs.replace(STRANGER, controller=KEYS.controller),
        msgspec.structs.replace(KEYS, controller=STRANGER.controller),
        msgspec.structs.replace(KEYS, learner_secret=STRANGER.learner_secret),
    ],
    ids=[
        "no CURVE",
        "other keys",
        "another learner",
        "another controller",
        "the learner's name without its secret",
    ],
)
def test_without_the_learners_key_nothing_is_read_and_it_is_counted(keys: LinkKeys | None) -> None:
    async def test(it: Controller) -> None:
        with plain(it.address, keys) as stranger:
            frames = [b"", *to_frames(Next(incarnation="x", step=666, version=1))]
            # It is not waited for: seen once, it did not end while the stranger was
            # refused.
            sending = asyncio.ensure_future(stranger.send_multipart(frames))
            await it.until(lambda: it.link.refused() > 0)
            await it.serves(8)
            sending.cancel()
        assert it.heard == [8]
        assert it.link.malformed == 0

    run(test)


def test_a_learner_does_not_believe_another_controller() -> None:
    async def test(it: Controller) -> None:
        link = ControllerLink(it.address, STRANGER, lambda: "", resend_s=0.2, limit_s=0.5)
        with pytest.raises(MegarlError, match=r"has not answered Next for 0\.5 s"):
            await asyncio.to_thread(link.ask, Next(incarnation="a", step=1, version=1))
        link.close()
        assert it.heard == []

    run(test)


FRAMES = st.lists(st.binary(max_size=200), min_size=1, max_size=4)
NEARLY = st.binary(max_size=100).map(lambda body: [b"", to_frames(Ack())[0], body])


@settings(max_examples=40)
@given(st.lists(st.one_of(FRAMES, NEARLY), min_size=1, max_size=8))
def test_nonsense_by_the_right_key_is_counted_and_dropped(messages: list[list[bytes]]) -> None:
    nonsense = [frames for frames in messages if not sound(frames)]

    async def test(it: Controller) -> None:
        with plain(it.address, KEYS) as peer:
            for frames in nonsense:
                await peer.send_multipart(frames)
            await it.until(lambda: it.link.malformed == len(nonsense))
            await it.serves(9)
        assert it.heard == [9]

    run(test)


def sound(frames: list[bytes]) -> bool:
    try:
        from_frames(frames[1:], Request)
    except msgspec.MsgspecError:
        return False
    return frames[0] == b""


def test_what_is_too_long_ends_its_connection_and_is_never_held() -> None:
    async def test(it: Controller) -> None:
        with plain(it.address, KEYS) as peer:
            await peer.send_multipart([b"", to_frames(Ack())[0], bytes(LARGEST_REQUEST + 1)])
            await it.serves(10)
            await asyncio.sleep(0.3)
        assert it.heard == [10]
        assert it.link.malformed == 0

    run(test)


@pytest.mark.parametrize(
    "request_",
    [
        Next(incarnation="x" * 65, step=0, version=0),
        Next(incarnation="x", step=-1, version=0),
        Next(incarnation="x", step=0, version=-1),
        Stopped(incarnation="x", step=-1),
    ],
)
def test_requests_that_cannot_be_are_malformed(request_: Request) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_frames(to_frames(request_), Request)


def test_bytes_that_come_twice_are_heard_once() -> None:
    """Somebody between the two repeats a learner's bytes: that ends the connection, and
    the learner asks again over another.
    """

    async def test(it: Controller) -> None:
        repeating = asyncio.Event()
        connections = 0

        async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter, asked: bool) -> None:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    to.write(data)
                    if asked and repeating.is_set():
                        repeating.clear()
                        to.write(data)
                    await to.drain()
            to.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            theirs, ours = await asyncio.open_connection("127.0.0.1", it.port)
            await asyncio.gather(copy(reader, ours, asked=True), copy(theirs, writer, asked=False))

        (port,) = free_ports(1)
        async with await asyncio.start_server(between, "127.0.0.1", port):
            link = ControllerLink(
                f"tcp://127.0.0.1:{port}", KEYS, lambda: "", resend_s=1.0, limit_s=LIMIT_S
            )
            try:
                for step in (1, 2, 3):
                    if step == 2:
                        repeating.set()
                    said = await asyncio.to_thread(
                        link.ask, Next(incarnation="a", step=step, version=step)
                    )
                    assert said == encode(Ack())
                assert not repeating.is_set()
                assert connections > 1, "the repeated bytes ended the first"
                assert [step for step, _ in itertools.groupby(it.heard)] == [1, 2, 3]
                assert it.heard.count(2) > 1, "the learner asked twice, over two connections"
                assert it.link.malformed == 0
            finally:
                link.close()

    run(test)
