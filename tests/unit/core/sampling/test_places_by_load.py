"""A server's number of places follows its load: on a queueing stand-in with a KV cache,
compared with every fixed number.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from megarl.core.client.membership import ServerLoad
from megarl.core.sampling.places import DECREASE, GROWTH, ROOM, Places
from tests.unit.core.sampling.test_places import anywhere, clean

CAP = 128
EVERY = 20
"""Ticks between observations. A request has a token a tick."""
PREFILL = 100
KV = 12_000
"""Tokens: 58 requests of 400, which hold 208 in the mean."""


@dataclass
class QueueingServer:
    """Stands in for a server whose requests hold KV: prompt, and a token more each
    tick, until `length`.

    One that finds no room waits; when the KV is full the youngest is put back and must
    compute all of its tokens again. Computing PREFILL tokens of an input takes as long
    as a token of each running request, which stand still meanwhile.
    """

    kv: int
    length: int
    prompt: int = 16
    running: list[int] = field(default_factory=list)  # tokens of each, oldest request first
    waiting: deque[int] = field(default_factory=deque)
    retractions: int = 0
    finished: int = 0
    to_compute: int = 0

    def tick(self) -> int:
        """Return how many requests have ended in it."""
        while self.waiting and sum(self.running) + self.prompt + max(0, self.waiting[0]) <= self.kv:
            self.running.append(max(self.prompt, self.waiting.popleft()))
            self.to_compute += self.running[-1]
        if self.to_compute >= PREFILL:
            self.to_compute -= PREFILL
            return 0
        while sum(self.running) + len(self.running) > self.kv:
            self.waiting.appendleft(self.running.pop())
            self.retractions += 1
        self.running = [tokens + 1 for tokens in self.running]
        ended = sum(tokens >= self.length for tokens in self.running)
        self.running = [tokens for tokens in self.running if tokens < self.length]
        self.finished += ended
        return ended

    def load(self) -> ServerLoad:
        return ServerLoad(sum(self.running) / self.kv, len(self.waiting))


async def driven(
    servers: list[QueueingServer], places: Places, ticks: int, adapts: bool = True
) -> list[list[int]]:
    """Always more claims than places. Returns the places of each server after each
    observation.
    """
    seen = []
    retractions = [0] * len(servers)
    for tick in range(ticks):
        while any(use.free for use in places.use.values()):
            server, _ = await places.take((1, 0, 0), anywhere)
            servers[server].waiting.append(0)
        for number, queue in enumerate(servers):
            for _ in range(queue.tick()):
                places.give_back(number)
            assert places.use[number].limit <= CAP
            assert places.use[number].running <= CAP
        if tick % EVERY == EVERY - 1 and adapts:
            for number, queue in enumerate(servers):
                places.observe(number, queue.load(), queue.retractions > retractions[number])
                retractions[number] = queue.retractions
            places.refresh()
            seen.append([use.limit for use in places.use.values()])
    return seen


def served(kv: int, length: int, limit: int, adapts: bool) -> tuple[QueueingServer, list[int]]:
    server = QueueingServer(kv, length)
    seen = asyncio.run(driven([server], Places(clean(0), limit), 6000, adapts))
    return server, [each for (each,) in seen]


def test_places_converge_to_what_the_best_fixed_number_gives() -> None:
    """The best of all fixed numbers is known only afterwards; with the cap most
    requests are put back again and again.
    """
    fixed = {limit: served(KV, 400, limit, adapts=False)[0] for limit in range(16, CAP + 1, 8)}
    best = max(server.finished for server in fixed.values())
    adapted, _ = served(KV, 400, CAP, adapts=True)
    assert fixed[CAP].finished < 0.93 * best, "or there would be nothing to gain"
    assert adapted.finished >= 0.97 * best
    assert adapted.retractions < 0.4 * fixed[CAP].retractions


def test_places_do_not_thrash() -> None:
    tail = served(KV, 400, CAP, adapts=True)[1][100:]
    cuts = sum(after <= (DECREASE + 0.05) * before for before, after in pairwise(tail))
    assert 0 < cuts <= len(tail) / 10
    assert min(tail) >= 0.35 * max(tail)
    assert max(b - a for a, b in pairwise(tail)) <= CAP // GROWTH, "places come one step at a time"


def test_a_server_with_room_keeps_all_places() -> None:
    server, seen = served(60_000, 400, CAP, adapts=True)
    assert set(seen) == {CAP}
    assert server.retractions == 0


def test_longer_contexts_mean_fewer_places() -> None:
    long = QueueingServer(KV, 800)
    short = QueueingServer(KV, 200)
    seen = asyncio.run(driven([long, short], Places(clean(0, 0), CAP), 6000))
    means = [sum(column) / len(column) for column in zip(*seen[100:], strict=True)]
    assert means[0] < 0.5 * means[1]


def test_places_come_back_after_a_restart_and_with_shorter_requests() -> None:
    async def scenario() -> None:
        server = QueueingServer(KV, 800)
        places = Places(clean(0), CAP)
        await driven([server], places, 3000)
        scarce = places.use[0].limit
        assert scarce < CAP / 2
        for _ in range(places.use[0].running):  # it is lost, and comes back with nothing
            places.give_back(0)
        server.running, server.waiting, server.length = [], deque(), 60
        (seen,) = zip(*(await driven([server], places, 3000)), strict=True)
        assert seen[-1] == CAP
        assert seen[0] <= scarce + CAP // GROWTH, "it is not sure at once"

    asyncio.run(scenario())


def test_what_an_observation_changes() -> None:
    async def scenario() -> None:
        places = Places(clean(0), 32)
        use = places.use[0]

        def observed(usage: float = 0.5, waiting: int = 0, retracted: bool = False) -> int:
            places.observe(0, ServerLoad(usage, waiting), retracted)
            places.refresh()
            return use.limit

        for _ in range(32):
            await places.take((1, 0, 0), anywhere)
        assert observed(waiting=3) == 32, "requests that wait once may just have come"
        assert observed(waiting=3) == int(32 * DECREASE)
        assert observed(waiting=3, retracted=True) == int(32 * DECREASE), (
            "more run than may: the decrease has not taken effect"
        )
        for _ in range(8):
            places.give_back(0)
        assert observed(retracted=True) == int(24 * DECREASE)
        for _ in range(6):
            places.give_back(0)
        assert observed(usage=ROOM) == 18, "its KV will fill by itself"
        assert observed() == 19
        assert observed() == 19, "places that nobody took say nothing"
        assert places.free(lambda _: True) == 1

    asyncio.run(scenario())
