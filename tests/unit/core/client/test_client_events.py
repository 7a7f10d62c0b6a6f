"""Server-sent events cut anywhere, and the client's answers to a server that
misbehaves.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.messages import ServerAddress
from megarl.core.client import client
from megarl.core.client.client import ServerClient, ServerLost, ServerRefused, events
from megarl.run.process import free_ports


@given(
    st.lists(st.text('abc{}:" ', min_size=1, max_size=20), max_size=6),
    st.lists(st.integers(1, 30), max_size=20),
)
def test_events_do_not_depend_on_where_the_stream_is_cut(
    bodies: list[str], cuts: list[int]
) -> None:
    data = b"".join(b"data: " + body.encode() + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"

    async def pieces() -> AsyncIterator[bytes]:
        at = 0
        for cut in cuts:
            yield data[at : at + cut]
            at += cut
        yield data[at:]

    async def parsed() -> list[bytes]:
        return [event async for event in events(pieces())]

    assert asyncio.run(parsed()) == [body.encode() for body in bodies]


@pytest.mark.timeout(30)
def test_a_long_event_is_joined_once() -> None:
    """The experts of 128k tokens take 67 MB, in pieces of 64 kB. Joined at each piece,
    they would be copied for a minute.
    """
    body = b"x" * 2**27
    piece = 2**16

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: "
        for at in range(0, len(body), piece):
            yield body[at : at + piece]
        yield b"\n"
        yield b"\n"

    async def parsed() -> list[bytes]:
        return [event async for event in events(pieces())]

    assert asyncio.run(parsed()) == [body]


def chunk(tokens: list[int], finish: dict[str, Any] | None = None) -> bytes:
    entries = [[-0.5 * t, t, None] for t in tokens]
    spans = [{"version": "3", "start": 0, "end": 4}]
    meta = {
        "id": "x",
        "finish_reason": finish,
        "output_token_logprobs": entries,
        "weight_versions": spans,
    }
    return (
        b"data: "
        + json.dumps({"output_ids": tokens, "meta_info": meta, "text": ""}).encode()
        + b"\n\n"
    )


def answered(
    *pieces: bytes,
    status: int = 200,
    text: str = "",
    cut: bool = False,
    stall: bool = False,
    apart_s: float = 0.0,
) -> object:
    """What `generate` returns or raises when a server sends exactly these pieces."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if status != 200:
            return web.Response(status=status, text=text)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(apart_s)
        if stall:
            await asyncio.sleep(30)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    async def run() -> object:
        app = web.Application()
        app.router.add_post("/generate", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            address = ServerAddress(id=0, url=f"http://127.0.0.1:{port}")
            async with ServerClient(
                address, "user", "admin", timeout_s=2.0 if stall or apart_s else 60.0
            ) as client:
                return await client.generate([1, 2], 4)
        except (ServerLost, ServerRefused) as error:
            return error
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_chunks_are_joined() -> None:
    done = answered(
        chunk([5, 6]), chunk([7, 8], {"type": "stop", "matched": 8}), b"data: [DONE]\n\n"
    )
    assert done.tokens.tolist() == [5, 6, 7, 8]  # type: ignore[attr-defined]
    assert done.logprobs.tolist() == [-2.5, -3.0, -3.5, -4.0]  # type: ignore[attr-defined]
    assert done.spans == ((3, 0, 4),)  # type: ignore[attr-defined]
    assert done.finish == "stop"  # type: ignore[attr-defined]


def test_a_request_may_take_longer_than_a_server_may_be_silent() -> None:
    """128k tokens take hours. A limit on the whole request would make its server count
    as lost, with all its other requests.
    """
    done = answered(
        *(chunk([n]) for n in range(5)), chunk([7, 8], {"type": "stop", "matched": 8}), apart_s=0.5
    )
    assert done.tokens.tolist() == [0, 1, 2, 3, 4, 7, 8]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [{}, {"cut": True}, {"stall": True}])
def test_a_lost_server_leaves_what_had_arrived(how: dict[str, bool]) -> None:
    lost = answered(chunk([5, 6]), chunk([7]), **how)  # type: ignore[arg-type]
    assert isinstance(lost, ServerLost)
    assert lost.tokens.tolist() == [5, 6, 7]
    assert lost.logprobs.tolist() == [-2.5, -3.0, -3.5]


@pytest.mark.parametrize(("status", "alone"), [(None, False), (500, True), (503, True)])
def test_an_aborted_request_gives_back_its_last_token(status: int | None, alone: bool) -> None:
    """SGLang gives a status if something is wrong with the request, and none if all
    requests were to be aborted.
    """
    lost = answered(
        chunk([5, 6]), chunk([7], {"type": "abort", "message": "Aborted", "status_code": status})
    )
    assert isinstance(lost, ServerLost)
    assert lost.tokens.tolist() == [5, 6]
    assert lost.server_is_alive == alone


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, ServerRefused), (401, ServerRefused), (500, ServerLost), (503, ServerLost)],
)
def test_statuses(status: int, kind: type[Exception]) -> None:
    error = answered(status=status, text="why it is so")
    assert isinstance(error, kind)
    assert "why it is so" in str(error)


def test_an_error_in_the_stream_is_a_refusal() -> None:
    error = answered(
        b'data: {"error": {"message": "too long", "code": 400}}\n\n', b"data: [DONE]\n\n"
    )
    assert isinstance(error, ServerRefused)
    assert "too long" in str(error)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("output_token_logprobs", "log-probs that are NaN: its weights"),
        ("cached_tokens", "was lost: ValidationError"),
    ],
)
def test_log_probs_that_are_no_numbers_are_named(field: str, says: str) -> None:
    value = [[None, 7, None]] if field.endswith("logprobs") else None
    event = (
        b"data: " + json.dumps({"output_ids": [7], "meta_info": {field: value}}).encode() + b"\n\n"
    )
    lost = answered(chunk([5, 6]), event)
    assert isinstance(lost, ServerLost)
    assert says in str(lost)
    assert lost.tokens.tolist() == [5, 6]


def test_a_connection_to_a_machine_that_is_gone_ends() -> None:
    with client._socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT) == 3


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_first_request_is_sampled_like_an_evaluations(top_p: float) -> None:
    """Or the kernels of its nucleus would be compiled, for minutes, while a server is
    to answer.
    """
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body | body.pop("sampling_params"))
        return web.Response(body=chunk([7], {"type": "length"}) if "stream" in body else b"{}")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with ServerClient(
            ServerAddress(id=0, url=f"http://127.0.0.1:{port}"), "u", "a"
        ) as client:
            await client.generate([1, 2], 1, top_p=top_p)
            await client.warm_up(top_p)
        await runner.cleanup()

    asyncio.run(run())
    chosen = [
        {name: body[name] for name in ("top_p", "top_k", "return_logprob", "return_sampling_mask")}
        for body in asked
    ]
    assert len(chosen) == 2
    assert chosen[0] == chosen[1]
