"""Calls to many servers through some of them, so that a thousand cost the caller about as much as twenty.

    caller ── POST /relay: the call, 64 addresses ──► gate of server 0 ── the call ──► gates of servers 0 … 63
           ◄── an error at once, the rest together ◄──                ◄── an answer each ◄──

The caller's side is fleet.py. `relayed` is the gate's side (proxy.py): it passes a call on with the key that it came with, and
each gate checks that itself. No gate passes a call on to a server that has joined.
"""

import asyncio
import types
from collections.abc import AsyncIterator, Generator
from typing import NamedTuple

import aiohttp
import msgspec

from megarl.core.base.errors import MegarlError

GRACE_S = 5.0
"""A relay may take this much longer than the servers behind it."""
KEEP_ALIVE_S = 2.0
"""Idle connections are dropped after this time. The server closes them after 5 s; a request on a closed one would be lost."""
OK = 200
SILENT, UNREACHABLE, RELAY_LOST = 0, -1, -2
"""In place of a status: no answer within the limit; no connection, or a lost one; nobody knows."""


class RelayLost(MegarlError):
    """The server that relayed this call is gone, and the call must not be made twice."""


class ServerQuestion(NamedTuple):
    """A call. Without a body it is a GET. once: it must not be repeated when nobody knows whether the server has heard it."""

    path: str
    body: object
    key: str
    limit_s: float
    once: bool = False


class ServerAnswer(NamedTuple):
    """A reply's status and text. Where there was none, one of the numbers above, and why."""

    status: int
    text: str


class RelayedCall(msgspec.Struct):
    """The body of POST /relay. body: JSON, empty for a GET."""

    path: str
    body: str
    urls: list[str]
    limit_s: float


class RelayedAnswer(msgspec.Struct):
    """A line of the reply: the same answer from these of its servers, by their positions."""

    positions: list[int]
    status: int
    text: str


async def exchange(session: aiohttp.ClientSession, url: str, body: bytes, key: str, limit_s: float) -> ServerAnswer:
    """Make one call. An empty body makes it a GET."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    limit, method = aiohttp.ClientTimeout(total=limit_s), "POST" if body else "GET"
    try:
        async with session.request(
            method, url, data=body or None, headers=headers, timeout=limit, allow_redirects=False
        ) as reply:
            return ServerAnswer(reply.status, await reply.text(errors="replace"))
    except TimeoutError:
        return ServerAnswer(SILENT, f"no answer within {limit_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return ServerAnswer(UNREACHABLE, f"{type(error).__name__}: {error}")


async def relayed(session: aiohttp.ClientSession, call: RelayedCall, key: str) -> AsyncIterator[bytes]:
    """Make the call to all its servers at once, and yield the lines of the reply: errors as they come, good answers at last."""
    good: dict[str, list[int]] = {}

    async def one(position: int, url: str) -> RelayedAnswer:
        answer = await exchange(session, url + call.path, call.body.encode(), key, call.limit_s)
        return RelayedAnswer([position], *answer)

    calls = [asyncio.create_task(one(position, url)) for position, url in enumerate(call.urls)]
    try:
        for done in asyncio.as_completed(calls):
            answer = await done
            if answer.status == OK:
                good.setdefault(answer.text, []).extend(answer.positions)
            else:
                yield msgspec.json.encode(answer) + b"\n"
        for text, positions in good.items():
            yield msgspec.json.encode(RelayedAnswer(positions, OK, text)) + b"\n"
    finally:
        for task in calls:
            task.cancel()


@types.coroutine
def ask(question: ServerQuestion) -> Generator[ServerQuestion, ServerAnswer, ServerAnswer]:
    """Hand a question to the Fan that drives the caller, and return the answer."""
    return (yield question)
