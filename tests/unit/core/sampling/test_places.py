"""Places: the oldest claim first, never on a server that does not suit at that moment,
none lost.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.admission import Admission
from megarl.core.base.messages import ServerAddress
from megarl.core.client.membership import Membership
from megarl.core.sampling.places import Claim, GroupPlaces, Places, Waits


def clean(*versions: int) -> Membership:
    members = Membership([ServerAddress(id=n, url="") for n in range(len(versions))])
    for server, version in enumerate(versions):
        members.answered(server)
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
        places = Places(clean(0), limit=1)
        served = []

        async def one(order: tuple[int, int, int]) -> None:
            server, _ = await places.take(order, anywhere)
            served.append(order)
            await asyncio.sleep(0)
            places.give_back(server)

        orders = [(1, 0, 0), (1, 9, 1), (1, 9, 0), (1, 2, 0), (0, 5, 0)]
        await asyncio.gather(*(one(order) for order in orders))
        assert served == [orders[0], *sorted(orders[1:])]

    run(scenario)


def test_a_request_while_weights_are_staged_has_the_old_version() -> None:
    async def scenario() -> None:
        members = Membership([ServerAddress(id=0, url="")], staged=True)
        members.answered(0)
        for version in (3, 4):
            members.publish([0], version, "a")
            if version == 3:
                members.published(0, version, "a", "")
        assert await Places(members, limit=1).take((1, 0, 0), anywhere) == (0, 3)

    run(scenario)


def test_a_claim_waits_for_a_server_that_suits_it() -> None:
    async def scenario() -> None:
        members = clean(3, 5)
        places = Places(members, limit=1)
        assert await places.take((1, 0, 0), lambda _, version: version >= 5) == (1, 5)
        waiting = asyncio.create_task(places.take((1, 1, 0), lambda _, version: version >= 5))
        await settle()
        assert not waiting.done(), "server 0 has a place, but of version 3"
        assert places.free(lambda version: version <= 5) == 0, (
            "that place is claimed, as far as anybody can tell"
        )
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
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 3),
)
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


def test_a_group_waits_for_its_first_request_and_stays_where_its_prompt_is() -> None:
    async def scenario() -> None:
        places = Places(clean(0, 0, 0), limit=4)
        admission = Admission(1, 8)
        for _ in range(2):
            await places.take((0, 0, 0), lambda server, _: server == 0)
        group = GroupPlaces(places, admission, admission.admit(), rollouts=3)
        home = group.server
        assert home in (1, 2), "the emptiest"
        first = await group.take(1)
        others = [asyncio.create_task(group.take(n)) for n in (0, 2)]
        await settle()
        assert not any(task.done() for task in others), "they would compute the prompt once more"
        group.let_others_begin()
        assert [first, *await asyncio.gather(*others)] == [(home, 0)] * 3
        assert places.use[home].running == 3
        await places.take((1, 9, 0), lambda server, _: server == home)
        turn = asyncio.create_task(group.take(2))
        await settle()
        assert not turn.done(), (
            "its server is full, and others, which have places, do not have its prefix"
        )
        places.give_back(home)
        assert await turn == (home, 0)

    run(scenario)


def test_a_group_whose_server_is_lost_moves_as_a_whole() -> None:
    async def scenario() -> None:
        members = clean(0, 0, 0)
        places = Places(members, limit=8)
        admission = Admission(1, 8)
        group = GroupPlaces(places, admission, admission.admit(), rollouts=4)
        home, _ = await group.take(0)
        group.let_others_begin()
        members.lose(home)
        places.refresh()
        moved = {(await group._claim(n).place())[0] for n in range(4)}
        assert len(moved) == 1
        assert home not in moved

    run(scenario)


@pytest.mark.parametrize("waiting", ["before its first request", "for the prompt in the cache"])
def test_a_place_is_not_used_once_its_server_may_not_be(waiting: str) -> None:
    """It was given before the server was lost; started again, the server has no weights
    of the run until it is published to.
    """

    async def scenario() -> None:
        members = clean(0)
        places = Places(members, limit=4)
        admission = Admission(1, 8)
        group = GroupPlaces(places, admission, admission.admit(), rollouts=2)
        assert places.use[0].running == 2
        if waiting == "before its first request":
            request = None
        else:
            await group.take(0)
            request = asyncio.create_task(group.take(1))
            await settle()
        members.lose(0)
        members.answered(0)
        places.refresh()
        group.let_others_begin()
        request = request or asyncio.create_task(group.take(1))
        await settle()
        assert not request.done()
        members.publish([0], 2, "a")
        members.published(0, 2, "a", "")
        places.refresh()
        assert await request == (0, 2)
        assert places.use[0].running == 2
        assert group.began == (2 if waiting == "before its first request" else 0)

    run(scenario)


def test_a_group_leaves_a_server_that_the_lag_forbids() -> None:
    async def scenario() -> None:
        members = clean(0, 0)
        places = Places(members, limit=8)
        admission = Admission(1, 1)
        tickets = [admission.admit() for _ in range(2)]
        group = GroupPlaces(places, admission, tickets[1], rollouts=2)
        home, _ = await group.take(0)
        group.let_others_begin()
        for version, server in ((1, home), (5, 1 - home)):
            members.publish([server], version, "a")
            members.published(server, version, "a", "")
        places.refresh()
        assert (await group._claim(1).place()) == (home, 1), "still within the lag"
        late = [admission.admit() for _ in range(4)][-1]
        other = GroupPlaces(places, admission, late, rollouts=1)
        assert await other.take(0) == (1 - home, 5), "version 1 is too old for step 5"

    run(scenario)


def test_cancelling_a_wait_for_the_first_request_gives_the_place_back() -> None:
    async def scenario() -> None:
        places = Places(clean(0), limit=4)
        admission = Admission(1, 8)
        group = GroupPlaces(places, admission, admission.admit(), rollouts=2)
        await group.take(0)
        waiting = asyncio.create_task(group.take(1))
        await settle()
        waiting.cancel()
        await settle()
        assert places.use[0].running == 1

    run(scenario)


def test_groups_of_a_lost_server_spread_over_full_ones() -> None:
    """Their requests wait where the fewest run and wait: all at one server they would
    wait long, and others stand idle.
    """

    async def scenario() -> None:
        members = clean(0, 0, 0)
        places = Places(members, limit=4)
        admission = Admission(1, 8)
        groups = [GroupPlaces(places, admission, admission.admit(), rollouts=2) for _ in range(6)]
        for group in groups:
            await group.take(0)
            group.let_others_begin()
            await group.take(1)
        assert [use.running for use in places.use.values()] == [4, 4, 4]
        moved = [group for group in groups if group.server == 0]
        members.lose(0)
        places.refresh()
        for _ in range(4):
            places.give_back(0)
        waiting = [asyncio.create_task(group.take(n)) for group in moved for n in range(2)]
        await settle()
        assert sorted(group.server or 0 for group in moved) == [1, 2]
        assert not any(task.done() for task in waiting)
        for server in (1, 1, 2, 2):
            places.give_back(server)
        assert sorted(await asyncio.gather(*waiting)) == [(1, 0), (1, 0), (2, 0), (2, 0)]

    run(scenario)


class Watched(list[Claim]):
    """Counts how often all claims are gone through. A fleet has tens of thousands, and
    a loop over each would hold it up.
    """

    passes = 0

    def __iter__(self) -> Iterator[Claim]:
        self.passes += 1
        return super().__iter__()


def test_a_group_that_chooses_a_server_does_not_go_through_all_claims() -> None:
    """After a restart of the learner all requests of a fleet wait, and all groups
    choose at once.
    """

    async def scenario() -> None:
        members = Membership([ServerAddress(id=n, url="") for n in range(2)])
        places = Places(members, limit=100)
        admission = Admission(1, 20)
        groups = [GroupPlaces(places, admission, admission.admit(), rollouts=2) for _ in range(20)]
        places.claims = watched = Watched(places.claims)
        for server in range(2):
            members.answered(server)
            members.publish([server], 0, "a")
            members.published(server, 0, "a", "")
        places.refresh()
        assert not places.claims
        assert watched.passes == 1
        assert sorted(group.server or 0 for group in groups) == [0] * 10 + [1] * 10

    run(scenario)


def test_a_claim_that_is_dropped_does_not_go_through_all_claims() -> None:
    """At the end of a run all of them are."""

    async def scenario() -> None:
        members = Membership([ServerAddress(id=0, url="")])
        places = Places(members, limit=100)
        admission = Admission(1, 20)
        groups = [GroupPlaces(places, admission, admission.admit(), rollouts=2) for _ in range(20)]
        twins = [places.claim((1, 7, 0), anywhere) for _ in range(2)]
        places.claims = watched = Watched(places.claims)
        for group in groups:
            group.close()
        for _ in range(2):
            twins[1].drop()
        assert watched.passes == 0
        assert places.claims == [twins[0]]

    run(scenario)


WORK = st.sampled_from(["admit", "end", "publish", "lose", "find", "close", "cancel"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WORK, st.integers(0, 99)), min_size=10, max_size=60), st.integers(1, 3))
def test_no_claim_waits_for_a_place_that_is_free(work: list[tuple[str, int]], limit: int) -> None:
    async def scenario() -> None:
        members = clean(0, 0, 0)
        places = Places(members, limit)
        admission = Admission(2, 2)
        version = 0
        groups: list[GroupPlaces] = []
        for what, n in work:
            server = n % 3
            taken = [s for s, use in places.use.items() if use.running]
            if what == "admit" and admission.can_admit(version):
                groups.append(GroupPlaces(places, admission, admission.admit(), rollouts=1 + n % 4))
            elif what == "end" and taken:
                places.give_back(taken[n % len(taken)])
            elif what == "publish" and members.members[server].state != "lost":
                version = max(version, members.members[server].version + 1)
                members.publish([server], version, "a")
                members.published(server, version, "a", "")
                places.refresh()
            elif what in ("lose", "find"):
                members.lose(server) if what == "lose" else members.answered(server)
                places.refresh()
            elif what == "close" and groups:
                groups.pop(n % len(groups)).close()
            elif what == "cancel" and places.claims:
                places.claims[n % len(places.claims)].granted.cancel()
            for claim in places.claims:
                assert claim.home is not None
                home = claim.home()
                held = members.serving_version(home)
                if home is not None and held is not None and not claim.granted.cancelled():
                    assert not (places.use[home].free and claim.may_use(home, held))

    run(scenario)


def test_a_place_given_back_is_offered_to_those_who_wait_for_it() -> None:
    """None of hundreds of claims at other servers is asked: a fleet gives back hundreds
    of places a second.
    """

    async def scenario() -> None:
        places = Places(clean(0, 0), limit=1)
        asked = list[int]()

        def claim(order: int, home: int) -> Claim:
            return places.claim((1, order, 0), anywhere, lambda: asked.append(order) or home)

        claims = [claim(order, order % 2) for order in range(400)]
        assert [n for n, each in enumerate(claims) if each.granted.done()] == [0, 1]
        asked.clear()
        places.give_back(1)
        assert asked == [3]
        assert claims[3].granted.result() == (1, 0)

    run(scenario)


def test_waits_that_overlap_are_counted_once() -> None:
    async def scenario() -> None:
        waits = Waits()
        free = asyncio.Event()
        began = time.monotonic()

        async def take() -> tuple[int, int]:
            await free.wait()
            return 0, 7

        taken = [asyncio.create_task(waits.measure(take)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert 0.04 < waits.seconds() <= time.monotonic() - began, "also while they last"
        free.set()
        assert await asyncio.gather(*taken) == [(0, 7)] * 2
        whole = waits.seconds()
        assert whole <= time.monotonic() - began
        await asyncio.sleep(0.01)
        assert waits.seconds() == whole

    run(scenario)
