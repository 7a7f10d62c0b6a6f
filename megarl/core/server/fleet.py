"""Calls to several servers at once.

    Fleet    synchronous, from the learner: an event loop in a thread, a Fan for each call
    Fan      drives coroutines that ask one question after the other (ServerClient.asking)

Equal questions of many servers go out as one call to one of them, which relays it (relay.py), and equal answers come back as
one. Up to DIRECT servers, and questions that only one server is asked, go directly; so does all that a joined server is asked,
because a gate passes calls on only to the run's own.

If a relay is lost or refuses, those of its servers that have not answered are asked directly, from then on always. A question
that must not be asked twice gets RelayLost instead: the caller does not know whether those servers have heard it.
"""

import asyncio
import threading
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.server.client import ServerClient
from megarl.core.server.membership import DIRECT, GROUP
from megarl.core.server.relay import RELAY_LOST, RelayedAnswer, RelayedCall, ServerAnswer, ServerQuestion

CLOSE_LIMIT_S = 5.0

type Call[T] = Callable[[ServerClient], Coroutine[Any, Any, T]]
"""What to do with each server. It may await nothing but calls of that server."""


class Fan[T]:
    """Calls of one kind to several servers. results, errors: by server id, so far.

    clients: by server id. direct: groups whose relay was lost, which outlives the Fan. joined: those of the servers that are
    not the run's own. context: begins each error's text.
    """

    def __init__(
        self, clients: Mapping[int, ServerClient], direct: set[int], joined: Container[int] = (), context: str = ""
    ) -> None:
        self._clients, self._direct, self._joined, self._context = clients, direct, joined, context
        self.results: dict[int, T] = {}
        self.errors: dict[int, MegarlError] = {}
        self._running: dict[int, Coroutine[Any, ServerAnswer | None, T]] = {}

    async def run(self, ids: Iterable[int], call: Call[T]) -> None:
        """Run `call` with each of these servers to its end. It may await nothing but calls of its server."""
        self._running = {i: call(self._clients[i].asking) for i in ids}
        try:
            await self._ask(self._proceed(self._running, None))
        finally:
            for unfinished in self._running.values():
                unfinished.close()

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
            del self._running[i]
        return asked

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
            alone = i in self._joined or i // GROUP in self._direct
            groups.setdefault(-1 - i if alone else i // GROUP, []).append(i)
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


class Calls[T](NamedTuple):
    """Calls under way in another thread. results, errors: by server id, so far."""

    results: dict[int, T]
    errors: dict[int, MegarlError]
    over: Future[None]


class Fleet:
    """Synchronous calls to several servers at once, to bring them to weights of `version`.

    An event loop in its own thread makes the calls. `close` ends the thread before any later fork; a process that ends
    without `close` does not wait for it.
    """

    def __init__(self, servers: Iterable[ServerClient], version: int, joined: Container[int] = ()) -> None:
        """joined: see Fan."""
        self.servers, self.version, self._joined = {s.address.id: s for s in servers}, version, joined
        self._direct: set[int] = set()
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def start[T](self, ids: Iterable[int], call: Call[T]) -> Calls[T]:
        """Begin calls. Each may await nothing but its server."""
        fan = Fan[T](self.servers, self._direct, self._joined, f"publishing version {self.version} to ")
        return Calls(fan.results, fan.errors, asyncio.run_coroutine_threadsafe(fan.run(ids, call), self._loop))

    def each[T](self, ids: Iterable[int], call: Call[T]) -> tuple[dict[int, T], dict[int, str]]:
        """Return results and texts of errors by server id."""
        results, errors = collect(self.start(ids, call))
        return results, {i: str(error) for i, error in errors.items()}

    def close(self) -> None:
        """Close all connections and drop the calls that use them."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._over.wait()
        for server in self.servers.values():
            await server.close()


def collect[T](calls: Calls[T]) -> tuple[dict[int, T], dict[int, MegarlError]]:
    """Wait for all of them; each call has its own limit."""
    calls.over.result()
    return calls.results, calls.errors
