"""Calls to several servers at once.

    Fleet   synchronous, for the learner: an event loop in a thread, a Fan for each call
    Fan     drives coroutines that ask one question after the other
            (ServerClient.asking)

Equal questions to many servers are sent as one call to one of them, which relays it
(relay.py), and equal answers come back as one. Questions go directly if there are at
most DIRECT servers, if they are for a single server, or if they are for a joined
server, because a gate passes calls on only to the run's own servers.

If a relay is lost or refuses, those of its servers that have not answered are asked
directly from then on. A question that must not be asked twice raises RelayLost instead:
it is unknown whether those servers got it.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from megarl.core.base.errors import MegarlError
from megarl.core.client.client import ServerClient
from megarl.core.client.membership import DIRECT, GROUP
from megarl.core.client.relay import (
    RELAY_LOST,
    RelayedAnswer,
    RelayedCall,
    ServerAnswer,
    ServerQuestion,
)

CLOSE_LIMIT_S = 5.0

type Call[T] = Callable[[ServerClient], Coroutine[Any, Any, T]]
"""A coroutine for one server. It may await only questions to that server."""


class _RelayedGroup(NamedTuple):
    """Servers that are asked the same by one call. The first one relays it, if there
    are several.
    """

    question: ServerQuestion
    ids: list[int]


class Fan[T]:
    """Calls of one kind to several servers. clients, results and errors so far: by
    server id. direct: the set of groups whose relay was lost; it outlives the Fan.
    joined_ids: the servers that the run did not start. context: begins each error.
    """

    def __init__(
        self,
        clients: Mapping[int, ServerClient],
        direct: set[int],
        joined_ids: Container[int] = (),
        context: str = "",
    ) -> None:
        self._clients = clients
        self._direct = direct
        self._joined_ids = joined_ids
        self._context = context
        self.results: dict[int, T] = {}
        self.errors: dict[int, MegarlError] = {}
        self._running: dict[int, Coroutine[Any, ServerAnswer | None, T]] = {}

    async def run(self, ids: Iterable[int], call: Call[T]) -> None:
        """Make the call to each of these servers; return when all have ended."""
        self._running = {i: call(self._clients[i].asking) for i in ids}
        try:
            await self._ask(self._proceed(self._running, None))
        finally:
            for unfinished in self._running.values():
                unfinished.close()

    def _proceed(
        self, ids: Iterable[int], answer: ServerAnswer | None
    ) -> dict[int, ServerQuestion]:
        """Resume these servers' calls with the answer. Return the questions that they
        ask next, by server id.
        """
        questions = {}
        for i in list(ids):
            try:
                questions[i] = self._running[i].send(answer)
                continue
            except StopIteration as end:
                self.results[i] = end.value
            except MegarlError as error:
                error.args = (f"{self._context}{error}",)
                self.errors[i] = error
            del self._running[i]
        return questions

    async def _ask(self, questions: Mapping[int, ServerQuestion]) -> None:
        """Ask all these questions at once, then those that follow from the answers."""
        groups: list[_RelayedGroup] = []
        for question, equal in itertools.groupby(questions, key=lambda i: questions[i]):
            groups += [_RelayedGroup(question, ids) for ids in self._grouped(list(equal))]
        if len(groups) == 1:
            await self._ask_group(groups[0])
        elif groups:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(self._ask_group(group))

    def _grouped(self, ids: list[int]) -> list[list[int]]:
        """Return these servers in groups. The first of a group is its relay; a group of
        one is asked directly.
        """
        if len(self._clients) <= DIRECT:
            return [[i] for i in ids]
        single: list[list[int]] = []
        groups: dict[int, list[int]] = {}
        for i in ids:
            number = i // GROUP
            if i in self._joined_ids or number in self._direct:
                single.append([i])
            else:
                groups.setdefault(number, []).append(i)
        return [*groups.values(), *single]

    async def _ask_group(self, group: "_RelayedGroup") -> None:
        question, ids = group
        relay_id = ids[0]
        if len(ids) == 1:
            answer = await self._clients[relay_id].exchange(question)
            await self._ask(self._proceed(ids, answer))
            return
        unanswered = set(ids)
        urls = [self._clients[i].address.url for i in ids]
        call = RelayedCall(question.path, question.body.decode(), urls, question.limit_s)

        async def pass_on(answer: RelayedAnswer) -> None:
            answering = [ids[position] for position in answer.positions]
            unanswered.difference_update(answering)
            await self._ask(self._proceed(answering, ServerAnswer(answer.status, answer.text)))

        await self._clients[relay_id].relay(call, question.key, pass_on)
        if not unanswered:
            return
        self._direct.add(relay_id // GROUP)
        if question.once:
            loss = ServerAnswer(RELAY_LOST, f"the relay, server {relay_id}, was lost")
            await self._ask(self._proceed(sorted(unanswered), loss))
        else:
            await self._ask(dict.fromkeys(sorted(unanswered), question))


class Calls[T](NamedTuple):
    """Calls under way in another thread. results, errors: so far, by server id."""

    results: dict[int, T]
    errors: dict[int, MegarlError]
    end: Future[None]


class Fleet:
    """Synchronous calls to several servers at once, to bring them to weights of
    `version`, by an event loop in its own thread. `close` ends it before any later
    fork; a process that ends without `close` does not wait for it. joined_ids: as in
    Fan.
    """

    def __init__(
        self, servers: Iterable[ServerClient], version: int, joined_ids: Container[int] = ()
    ) -> None:
        self.servers = {s.address.id: s for s in servers}
        self.version = version
        self._joined_ids = joined_ids
        self._direct: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def start[T](self, ids: Iterable[int], call: Call[T]) -> Calls[T]:
        """Start the call to each of these servers."""
        context = f"publishing version {self.version} to "
        fan = Fan[T](self.servers, self._direct, self._joined_ids, context)
        end = asyncio.run_coroutine_threadsafe(fan.run(ids, call), self._loop)
        return Calls(fan.results, fan.errors, end)

    def call_each[T](
        self, ids: Iterable[int], call: Call[T]
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Call each of these servers and wait. Return results and texts of errors, by
        server id.
        """
        results, errors = collect(self.start(ids, call))
        return results, {i: str(error) for i, error in errors.items()}

    def close(self) -> None:
        """Close all connections and drop the calls that use them."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        async def until_closed() -> None:
            await self._closing.wait()
            for server in self.servers.values():
                await server.close()

        asyncio.run(until_closed(), loop_factory=lambda: self._loop)


def collect[T](calls: Calls[T]) -> tuple[dict[int, T], dict[int, MegarlError]]:
    """Wait for all calls and return their results and errors. Each call has its own
    time limit.
    """
    calls.end.result()
    return calls.results, calls.errors
