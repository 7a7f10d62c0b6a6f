"""Calls to several servers from synchronous code: one that is silent costs the others
nothing, and no call is made twice.
"""

import socket
import threading
import time
from contextlib import closing

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.client.client import ServerClient, ServerSaid
from megarl.core.client.fleet import Fleet, collect
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready

LIMIT_S = 60.0
YES = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull"
NO = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 15\r\n\r\n{"message":"x"}'
SILENCE = b""


def scripted(*answers: bytes) -> tuple[str, list[bytes]]:
    """A server that gives its first connection these answers in turn, then ends it; its
    address, and what it heard.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    heard = list[bytes]()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for answer in answers:
                heard.append(connection.recv(1 << 16))
                connection.sendall(answer)
                if answer == SILENCE:
                    time.sleep(60)
            heard.append(connection.recv(1 << 16))
        while True:
            heard.append(listener.accept()[0].recv(1 << 16))

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", heard


def fleet_of(*urls: str, silent: int | None = None) -> Fleet:
    """silent: the server whose limit is a second; on a busy machine the others may take
    longer to answer.
    """
    limits = {silent: 1.0}
    clients = (
        ServerClient(ServerAddress(id=i, url=u), "user", "admin", limits.get(i, LIMIT_S))
        for i, u in enumerate(urls)
    )
    return Fleet(list(clients), 7)


def test_each_server_costs_no_more_than_its_own_limit() -> None:
    urls = [
        scripted(YES)[0],
        scripted(SILENCE)[0],
        f"http://127.0.0.1:{free_ports(1)[0]}",
        scripted(NO)[0],
    ]
    with closing(fleet_of(*urls, silent=1)) as fleet:
        results, errors = collect(
            fleet.start(fleet.servers, lambda server: server.pause("in_place"))
        )
    assert list(results) == [0]
    said = {i: f"publishing version 7 to server {i} ({urls[i]}): pause: " for i in errors}
    assert str(errors[1]) == said[1] + "no answer within 1 s (weights.timeout_s)"
    assert str(errors[2]).startswith(said[2] + "ClientConnectorError")
    assert str(errors[3]) == said[3] + "400: x"
    assert [type(errors[i]) for i in (1, 2, 3)] == [MegarlError, MegarlError, ServerSaid]


def test_an_error_is_told_before_a_silent_servers_limit() -> None:
    with closing(fleet_of(scripted(NO)[0], scripted(SILENCE)[0])) as fleet:
        calls = fleet.start(fleet.servers, lambda server: server.pause("in_place"))
        until = time.monotonic() + LIMIT_S / 2
        while not calls.errors and time.monotonic() < until:
            time.sleep(0.01)
        assert (list(calls.results), list(calls.errors)) == ([], [0])


def test_a_call_whose_connection_ends_is_not_made_again() -> None:
    """The connection has been kept from the call before, which is when an HTTP client
    may try another one.
    """
    url, heard = scripted(YES)
    with closing(fleet_of(url)) as fleet:
        assert fleet.call_each([0], lambda server: server.pause("in_place"))[1] == {}
        (error,) = fleet.call_each([0], lambda server: server.end_update())[1].values()
        assert "end: ServerDisconnectedError" in str(error)
        time.sleep(0.25)
    assert [each.split()[1] for each in heard] == [b"/pause_generation", b"/end_weight_update"]
    assert all(b"Authorization: Bearer admin" in each for each in heard)


def test_closing_waits_for_no_call() -> None:
    url, heard = scripted(SILENCE)
    fleet = fleet_of(url)
    call = fleet.start([0], lambda server: server.end_update()).end
    while not heard:
        time.sleep(0.01)
    assert not call.done()
    fleet.close()
    assert call.done(), "not its limit of a minute later"
    assert "publish" not in {thread.name for thread in threading.enumerate()}


def test_waiting_for_a_server_ends_with_its_process() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(MegarlError, match="ended with status 3 before it was ready"):
        wait_ready(url, 60, lambda: 3)
    with pytest.raises(
        MegarlError,
        match=r"not ready within 0.2 s; if it only needs more, raise weights\.timeout_s",
    ):
        wait_ready(url, 0.2)
    assert wait_ready(scripted(YES)[0], 60) < 60
