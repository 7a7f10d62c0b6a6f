"""Calls to many servers through some of them, so that a thousand cost the caller about as much as twenty.

    caller ── POST /relay: the call, 64 addresses ──► gate of server 0 ── the call ──► gates of servers 0 … 63
           ◄── an error at once, the rest together ◄──                ◄── an answer each ◄──

`Fan` is the caller's side. It drives coroutines that ask one question after the other (ServerClient.asking), so equal
questions of many servers go out as one relayed call, and equal answers come back as one. Up to DIRECT servers, and questions
that only one server is asked, go directly.

`relayed` is the gate's side (proxy.py): it passes a call on with the key that it came with, and each gate checks that itself.

If a relay is lost or refuses, those of its servers that have not answered are asked directly, from then on always. A question
that must not be asked twice gets RelayLost instead: the caller does not know whether those servers have heard it.
"""

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.server.membership import DIRECT, GROUP

if TYPE_CHECKING:
    from megarl.core.server.client import ServerClient

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


class Fan[T]:
    """Calls of one kind to several servers. results, errors: by server id. failed: done at the first error or the end.

    clients: by server id. direct: groups whose relay was lost, which outlives the Fan. context: begins each error's text.
    """

    def __init__(self, clients: Mapping[int, "ServerClient"], direct: set[int], context: str = "") -> None:
        self._clients, self._direct, self._context = clients, direct, context
        self.results: dict[int, T] = {}
        self.errors: dict[int, MegarlError] = {}
        self.failed: Future[None] = Future()
        self._running: dict[int, Coroutine[Any, ServerAnswer | None, T]] = {}

    async def run(self, ids: Iterable[int], call: Callable[["ServerClient"], Coroutine[Any, Any, T]]) -> None:
        """Run `call` with each of these servers to its end. It may await nothing but calls of its server."""
        self._running = {i: call(self._clients[i].asking) for i in ids}
        try:
            await self._ask(self._proceed(self._running, None))
        finally:
            for unfinished in self._running.values():
                unfinished.close()
            self._note_failure()

    def _proceed(self, ids: Iterable[int], answer: ServerAnswer | None) -> dict[int, ServerQuestion]:
        """Continue these servers' calls with the answer. Return the questions that they ask next."""
        asked = {}
        for i in list(ids):
            try:
                asked[i] = self._running[i].send(answer)
                continue
            except StopIteration as end:
                self.results[i] = end.value
            except MegarlError as error:
                error.args = (f"{self._context}{error}",)
                self.errors[i] = error
                self._note_failure()
            del self._running[i]
        return asked

    def _note_failure(self) -> None:
        if not self.failed.done():
            self.failed.set_result(None)

    async def _ask(self, asked: Mapping[int, ServerQuestion]) -> None:
        """Ask all of them at once, and go on with what follows."""
        same: list[tuple[ServerQuestion, list[int]]] = []
        for i, question in asked.items():
            if not same or question != same[-1][0]:
                same.append((question, []))
            same[-1][1].append(i)
        groups = [(question, group) for question, ids in same for group in self._grouped(ids)]
        if len(groups) == 1:
            await self._ask_group(*groups[0])
        elif groups:
            async with asyncio.TaskGroup() as tasks:
                for question, group in groups:
                    tasks.create_task(self._ask_group(question, group))

    def _grouped(self, ids: list[int]) -> list[list[int]]:
        """Return these servers in groups of which the first is the relay, or of one, which is asked directly."""
        if len(self._clients) <= DIRECT:
            return [[i] for i in ids]
        groups: dict[int, list[int]] = {}
        for i in ids:
            groups.setdefault(-1 - i if i // GROUP in self._direct else i // GROUP, []).append(i)
        return list(groups.values())

    async def _ask_group(self, question: ServerQuestion, ids: list[int]) -> None:
        if len(ids) == 1:
            return await self._ask(self._proceed(ids, await self._clients[ids[0]].exchange(question)))
        left = set(ids)
        body = "" if question.body is None else msgspec.json.encode(question.body).decode()
        call = RelayedCall(question.path, body, [self._clients[i].address.url for i in ids], question.limit_s)

        async def heard(said: RelayedAnswer) -> None:
            some = [ids[p] for p in said.positions]
            left.difference_update(some)
            await self._ask(self._proceed(some, ServerAnswer(said.status, said.text)))

        await self._clients[ids[0]].relay(call, question.key, heard)
        if left:
            self._direct.add(ids[0] // GROUP)
            if question.once:
                lost = ServerAnswer(RELAY_LOST, f"the relay, server {ids[0]}, was lost")
                await self._ask(self._proceed(sorted(left), lost))
            else:
                await self._ask(dict.fromkeys(sorted(left), question))
