"""Rank 0's link against a real ROUTER socket that answers, is silent, or comes back."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import Ack, Next, Reply, Request, Wait, from_frames, to_frames
from megarl.core.base.rundir import LinkKeys
from megarl.core.base.types import decode, encode
from megarl.run.process import free_ports

KEYS = LinkKeys.new()
NEXT = Next(incarnation="a", step=3, version=3)


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def serve(
    address: str, replies: list[list[bytes] | None], slow_s: float = 0.0
) -> Callable[[], list[list[bytes]]]:
    """A ROUTER that gives these replies in turn (None: silence), each after slow_s,
    then closes; what it heard, once it has.
    """
    heard: list[list[bytes]] = []

    def run() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 1000
            socket.curve_secretkey = KEYS.controller_secret.encode()
            socket.curve_server = True
            socket.bind(address)
            for reply in replies:
                peer, empty, *frames = socket.recv_multipart()
                heard.append(frames)
                time.sleep(slow_s)
                if reply is not None:
                    socket.send_multipart([peer, empty, *reply])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> list[list[bytes]]:
        thread.join(10)
        return heard

    return join


@pytest.fixture
def link(address: str) -> Iterator[ControllerLink]:
    link = ControllerLink(
        address, KEYS, lambda: "", resend_s=1.0, limit_s=60
    )  # on a busy machine a handshake takes a while
    yield link
    link.close()


def test_a_reply_is_the_controllers(address: str, link: ControllerLink) -> None:
    heard = serve(address, [to_frames(Wait(reason="no batch"))])
    reply: Any = decode(link.ask(NEXT), Reply)
    assert isinstance(reply, Wait)
    assert reply.reason == "no batch"
    assert [from_frames(f, Request).step for f in heard()] == [3]


def test_an_unanswered_request_is_sent_again(address: str, link: ControllerLink) -> None:
    heard = serve(address, [None, None, to_frames(Ack())])
    assert link.ask(NEXT) == encode(Ack())
    assert len(set(map(tuple, heard()))) == 1
    assert len(heard()) == 3


def test_a_reply_that_takes_longer_than_until_the_next_try_arrives(
    address: str, link: ControllerLink, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch of long rollouts has gigabytes, to be read, encrypted and sent. The next
    one is asked for only once.
    """
    serve(address, [to_frames(Ack())] * 20, slow_s=1.3)
    assert link.ask(NEXT) == encode(Ack())
    assert "sending it again" in caplog.text
    caplog.clear()
    assert link.ask(NEXT) == encode(Ack())
    assert not caplog.text


def test_a_controller_that_comes_late_or_again_is_heard(address: str, link: ControllerLink) -> None:
    answer: list[bytes] = []
    asking = threading.Thread(target=lambda: answer.append(link.ask(NEXT)))
    asking.start()
    asking.join(0.5)  # nobody listens yet
    serve(address, [to_frames(Ack())])()
    asking.join(10)
    serve(address, [to_frames(Ack())])
    answer.append(link.ask(NEXT))
    assert answer == [encode(Ack())] * 2


def test_silence_has_a_limit_that_is_named(address: str) -> None:
    link = ControllerLink(address, KEYS, lambda: "", resend_s=0.2, limit_s=0.5)
    with pytest.raises(MegarlError, match=r"has not answered Next for 0.5 s.*resume=auto"):
        link.ask(NEXT)
    link.close()


def test_waiting_ends_when_someone_wants_the_learner_to_stop(address: str) -> None:
    reasons = iter(["", "", "RUN/stop exists"])
    link = ControllerLink(address, KEYS, lambda: next(reasons))
    with pytest.raises(Interrupted, match="RUN/stop exists"):
        link.ask(NEXT)
    link.close()


def test_another_schema_is_refused(address: str, link: ControllerLink) -> None:
    serve(address, [[b"megarl 0", b"\x80"]])
    with pytest.raises(MegarlError, match="another protocol"):
        link.ask(NEXT)


DROPPED = """
import gc
from megarl.core.base.link import ControllerLink
from megarl.core.base.rundir import LinkKeys
from megarl.core.controller.conversation import Link
from megarl.run.process import free_ports

address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
keys = LinkKeys.new()
for link in (Link(address, keys), ControllerLink(address, keys, lambda: "")):
    link.itself = link
del link
gc.collect()
print("collected", flush=True)
"""


@pytest.mark.processes
def test_links_that_nobody_closes_are_collected_without_a_wait() -> None:
    """As after an error: its traceback holds the link, in a cycle, and the order in
    which a cycle is collected is not known.
    """
    done = subprocess.run(
        [sys.executable, "-c", DROPPED], stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.stdout == "collected\n"
    assert done.returncode == 0
