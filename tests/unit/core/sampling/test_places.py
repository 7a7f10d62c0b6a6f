"""Places: the oldest claim first, never on a server that does not suit at that moment, none lost."""

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.messages import ServerAddress
from megarl.core.sampling.places import Places
from megarl.core.server.membership import Membership


def clean(*versions: int) -> Membership:
    members = Membership([ServerAddress(id=n, url="") for n in range(len(versions))])
    for server, version in enumerate(versions):
        members.seen(server)
        members.publish([server], version, "a")
        members.published(server, version, "a", "")
    return members


def anywhere(_server: int, _version: int) -> bool:
    return True


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), 10)

    asyncio.run(limited())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_oldest_claim_goes_first_and_evaluation_before_all() -> None:
    async def scenario() -> None:
        places, served = Places(clean(0), limit=1), []

        async def one(order: tuple[int, int, int]) -> None:
            server, _ = await places.take(order, anywhere)
            served.append(order)
            await asyncio.sleep(0)
            places.give_back(server)

        orders = [(1, 0, 0), (1, 9, 1), (1, 9, 0), (1, 2, 0), (0, 5, 0)]
        await asyncio.gather(*(one(order) for order in orders))
        assert served == [orders[0], *sorted(orders[1:])]

    run(scenario)


def test_a_claim_waits_for_a_server_that_suits_it() -> None:
    async def scenario() -> None:
        members = clean(3, 5)
        places = Places(members, limit=1)
        assert await places.take((1, 0, 0), lambda _, version: version >= 5) == (1, 5)
        waiting = asyncio.create_task(places.take((1, 1, 0), lambda _, version: version >= 5))
        await settle()
        assert not waiting.done(), "server 0 has a place, but of version 3"
        assert places.free(lambda version: version <= 5) == 0, "that place is claimed, as far as anybody can tell"
        members.publish([0], 6, "a")
        members.published(0, 6, "a", "")
        places.refresh()
        assert await waiting == (0, 6)

    run(scenario)


def test_a_server_that_is_published_to_gets_nothing() -> None:
    async def scenario() -> None:
        members = clean(0)
        places = Places(members, limit=4)
        members.publish([0], 1, "a")
        waiting = asyncio.create_task(places.take((1, 0, 0), anywhere))
        await settle()
        assert not waiting.done()
        assert places.emptiest(lambda _: True) is None
        members.published(0, 1, "a", "")
        places.refresh()
        assert await waiting == (0, 1)

    run(scenario)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=30), st.integers(1, 3))
def test_cancelled_claims_leave_no_place_taken(claims: list[tuple[int, bool]], limit: int) -> None:
    async def scenario() -> None:
        places = Places(clean(0, 0), limit)

        async def one(ticket: int) -> None:
            server, _ = await places.take((1, ticket, 0), anywhere)
            assert places.use[server].running <= limit
            try:
                await asyncio.sleep(0)
            finally:
                places.give_back(server)

        tasks = []
        for ticket, cancelled in claims:
            tasks.append(asyncio.create_task(one(ticket)))
            await asyncio.sleep(0)
            if cancelled:
                tasks[len(tasks) // 2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not places.claims
        assert [use.running for use in places.use.values()] == [0, 0]

    run(scenario)
