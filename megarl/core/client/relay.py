"""Calls to many servers, passed on by some of them, so that calling a thousand costs
the caller about as much as twenty.

    caller ── POST /relay: the call, 64 addresses ──► gate of server 0
                                                         ── the call ──► gates 0 … 63
                                                         ◄── an answer each ──
           ◄── errors at once, the rest together ────

The caller's side is fleet.py. `relayed` is the gate's side (proxy.py): it passes a call
on with the same key, which each gate checks itself. No gate passes a call on to a
joined server.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import msgspec

from megarl.core.base.errors import MegarlError

GRACE_S = 5.0
"""A relay may take this much longer than the servers behind it."""
KEEP_ALIVE_S = 2.0
"""Idle connections are dropped after this time. The server closes them after 5 s; a
request on a closed one would be lost.
"""
OK = 200
SILENT = 0
UNREACHABLE = -1
RELAY_LOST = -2
"""Used as status codes: no answer within the limit; no connection, or a lost one;
unknown, as the relay was lost.
"""


class RelayLost(MegarlError):
    """The server that relayed this call is gone, and the call must not be repeated."""


class ServerQuestion(NamedTuple):
    """A call. body: JSON; a GET if empty. once: it must not be repeated if it is
    unknown whether the server got it.
    """

    path: str
    body: bytes
    key: str
    limit_s: float
    once: bool = False


class ServerAnswer(NamedTuple):
    """A reply's status and text. Without a reply, one of the codes above and the
    reason.
    """

    status: int
    text: str


class RelayedCall(msgspec.Struct):
    """The body of POST /relay. body: JSON, empty for a GET."""

    path: str
    body: str
    urls: list[str]
    limit_s: float


class RelayedAnswer(msgspec.Struct):
    """A line of the reply. positions: indices in `RelayedCall.urls` of the servers that
    gave this answer.
    """

    positions: list[int]
    status: int
    text: str


async def exchange(
    session: aiohttp.ClientSession, server: str, question: ServerQuestion
) -> ServerAnswer:
    """Ask a server. Failures are answers, too."""
    method = "POST" if question.body else "GET"
    url = server + question.path
    headers = {"Authorization": f"Bearer {question.key}", "Content-Type": "application/json"}
    limit = aiohttp.ClientTimeout(total=question.limit_s)
    try:
        async with session.request(
            method,
            url,
            data=question.body or None,
            headers=headers,
            timeout=limit,
            allow_redirects=False,
        ) as reply:
            return ServerAnswer(reply.status, await reply.text(errors="replace"))
    except TimeoutError:
        return ServerAnswer(SILENT, f"no answer within {question.limit_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return ServerAnswer(UNREACHABLE, f"{type(error).__name__}: {error}")


async def relayed(
    session: aiohttp.ClientSession, call: RelayedCall, key: str
) -> AsyncIterator[bytes]:
    """Make the call to all its servers at once, and yield the lines of the reply:
    errors as they come, then good answers.
    """
    question = ServerQuestion(call.path, call.body.encode(), key, call.limit_s)
    good: dict[str, list[int]] = {}

    async def ask_server(position: int, url: str) -> RelayedAnswer:
        status, text = await exchange(session, url, question)
        return RelayedAnswer([position], status, text)

    tasks = [asyncio.create_task(ask_server(i, url)) for i, url in enumerate(call.urls)]
    try:
        for finished in asyncio.as_completed(tasks):
            answer = await finished
            if answer.status == OK:
                good.setdefault(answer.text, []).extend(answer.positions)
            else:
                yield msgspec.json.encode(answer) + b"\n"
        for text, positions in good.items():
            yield msgspec.json.encode(RelayedAnswer(positions, OK, text)) + b"\n"
    finally:
        for task in tasks:
            task.cancel()
