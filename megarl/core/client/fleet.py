"""Calls to several servers at once.

    Fleet   synchronous, for the learner: an event loop in a thread, a Fan for each call
    Fan     asynchronous; sends the questions of all calls (ServerClient.asking)

Equal questions to many servers are sent as one call to one of them, which relays it
(relay.py), and equal answers come back as one. Questions go directly if there are at
most DIRECT servers, if they are for a single server, or if they are for a joined
server, because a gate passes calls on only to the run's own servers.

If a relay is lost or refuses, those of its servers that have not answered are asked
directly from then on. A question that must not be asked twice raises RelayLost instead:
it is unknown whether those servers got it.
"""

import asyncio
import threading
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from megarl.core.base.errors import MegarlError
from megarl.core.client.client import ServerClient
from megarl.core.client.membership import DIRECT, RELAYED
from megarl.core.client.relay import (
    RELAY_LOST,
    RelayedAnswer,
    RelayedCall,
    ServerAnswer,
    ServerQuestion,
)

CLOSE_LIMIT_S = 5.0

type Call[T] = Callable[[ServerClient], Coroutine[Any, Any, T]]
"""A coroutine for one server."""


class _WaitingQuestion(NamedTuple):
    """A question that is to be sent, and the future that its answer completes."""

    question: ServerQuestion
    answer: asyncio.Future[ServerAnswer]


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
        self._waiting: dict[int, _WaitingQuestion] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self, ids: Iterable[int], call: Call[T]) -> None:
        """Make the call to each of these servers; return when all have ended."""
        async with self._tasks:
            for i in ids:
                self._tasks.create_task(self._call(i, call))

    async def _call(self, i: int, call: Call[T]) -> None:
        """Make the call to server i, and keep its result or error."""
        client = self._clients[i].asking(partial(self._ask, i))
        try:
            self.results[i] = await call(client)
        except MegarlError as error:
            error.args = (f"{self._context}{error}",)
            self.errors[i] = error

    async def _ask(self, i: int, question: ServerQuestion) -> ServerAnswer:
        """Return server i's answer. All that is asked in one turn of the event loop is
        sent at its end, so that equal questions go together.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        waiting = _WaitingQuestion(question, loop.create_future())
        self._waiting[i] = waiting
        return await waiting.answer

    def _send(self) -> None:
        """Send all waiting questions."""
        waiting = self._waiting
        self._waiting = {}
        ids_of: dict[ServerQuestion, list[int]] = {}
        for i, entry in waiting.items():
            if not entry.answer.cancelled():
                ids_of.setdefault(entry.question, []).append(i)
        for question, ids in ids_of.items():
            for group in self._grouped(ids):
                answers = {i: waiting[i].answer for i in group}
                self._tasks.create_task(self._ask_group(question, answers))

    def _grouped(self, ids: list[int]) -> list[list[int]]:
        """Return these servers in groups. The first of a group is its relay; a group of
        one is asked directly.
        """
        if len(self._clients) <= DIRECT:
            return [[i] for i in ids]
        single: list[list[int]] = []  # joined servers, and those whose relay was lost
        groups: dict[int, list[int]] = {}
        for i in ids:
            number = i // RELAYED
            if i in self._joined_ids or number in self._direct:
                single.append([i])
            else:
                groups.setdefault(number, []).append(i)
        return [*groups.values(), *single]

    async def _ask_group(
        self, question: ServerQuestion, answers: Mapping[int, asyncio.Future[ServerAnswer]]
    ) -> None:
        """Ask these servers the same. answers: completed by theirs, by server id."""
        ids = list(answers)
        relay_id = ids[0]
        if len(ids) == 1:
            answers[relay_id].set_result(await self._clients[relay_id].exchange(question))
            return
        urls = [self._clients[i].address.url for i in ids]
        call = RelayedCall(question.path, question.body.decode(), urls, question.limit_s)

        def pass_on(relayed: RelayedAnswer) -> None:
            """Complete the answers of the servers that gave this one."""
            for position in relayed.positions:
                answer = answers[ids[position]]
                if not answer.done():
                    answer.set_result(ServerAnswer(relayed.status, relayed.text))

        await self._clients[relay_id].relay(call, question.key, pass_on)
        unanswered = {i: answer for i, answer in answers.items() if not answer.done()}
        if not unanswered:
            return
        self._direct.add(relay_id // RELAYED)
        for i, answer in unanswered.items():
            if question.once:
                reason = f"the relay, server {relay_id}, was lost"
                answer.set_result(ServerAnswer(RELAY_LOST, reason))
            else:
                self._tasks.create_task(self._ask_group(question, {i: answer}))


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
        """Run the event loop until `close`: the body of the thread."""

        async def until_closed() -> None:
            """Wait for `close`, then drop all connections."""
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
