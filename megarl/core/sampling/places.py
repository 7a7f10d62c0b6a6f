"""Which request may go to which server now. A server has a fixed number of places; the oldest claim goes first.

    claim(order, may_use) ─► await claim.place() ─► (server, its version) ─► request ─► give_back(server)

A group claims the first places of all its rollouts when its ticket is admitted (`GroupPlaces`), so the free places are known
at once. `may_use(server, version)` says which servers suit a claim. It is asked whenever a place is given, so no leg, retry
or wait for a publication can end on a server that is no longer eligible.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.core.base.admission import Admission
from megarl.core.server.membership import Membership

Order = tuple[int, int, int]
"""(0 for evaluation else 1, ticket, sample): smaller goes first."""
MayUse = Callable[[int, int], bool]


@dataclass(eq=False)
class Claim:
    """A claim on a place, which counts from its creation."""

    order: Order
    may_use: MayUse
    granted: "asyncio.Future[tuple[int, int]]"
    places: "Places"

    async def place(self) -> tuple[int, int]:
        """Wait for a place and return (server, version of its weights). It must be given back."""
        try:
            return await self.granted
        except asyncio.CancelledError:
            self.drop()
            raise

    def drop(self) -> None:
        """Withdraw the claim, and give back a place that it already has."""
        if self.granted.done() and not self.granted.cancelled():
            self.places.give_back(self.granted.result()[0])
        self.granted.cancel()
        self.places.claims = [c for c in self.places.claims if c is not self]


@dataclass
class Use:
    """A server's load: requests running now, and totals since the start (seconds with any request, place-seconds)."""

    running: int = 0
    busy_seconds: float = 0.0
    place_seconds: float = 0.0
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)

    def change(self, by: int) -> None:
        """Note that `by` more requests run from now on; 0 brings the totals up to date."""
        now = time.monotonic()
        if self.running:
            self.busy_seconds += now - self.since
            self.place_seconds += self.running * (now - self.since)
        self.since = now
        self.running += by


class Places:
    """The places of all servers, `limit` each, and the claims that wait for one.

    `changed` is set whenever there may be more room; whoever waits for it clears it.
    """

    def __init__(self, membership: Membership, limit: int) -> None:
        self.membership = membership
        self.limit = limit
        self.use = {server: Use() for server in membership.members}
        self.claims: list[Claim] = []
        self.changed = asyncio.Event()

    def add(self, server: int) -> None:
        """Take in a server that has joined."""
        self.use[server] = Use()

    def forget(self, server: int) -> None:
        """Remove a server that has left, of which no place is taken."""
        del self.use[server]

    def claim(self, order: Order, may_use: MayUse) -> Claim:
        """Return a claim on a place, to be awaited or dropped. It needs a running event loop."""
        claim = Claim(order, may_use, asyncio.get_running_loop().create_future(), self)
        insort(self.claims, claim, key=lambda c: c.order)
        self.refresh()
        return claim

    async def take(self, order: Order, may_use: MayUse) -> tuple[int, int]:
        """Wait for a place and return (server, version of its weights). It must be given back."""
        return await self.claim(order, may_use).place()

    def give_back(self, server: int) -> None:
        self.use[server].change(-1)
        self.refresh()

    def refresh(self) -> None:
        """Give out places. Call this whenever a server's state has changed."""
        self.changed.set()
        clean = self.membership.clean()
        free = {s: self.limit - self.use[s].running for s in clean if self.use[s].running < self.limit}
        if not free or not self.claims:
            return
        left = []
        for claim in self.claims:
            if claim.granted.cancelled():
                continue
            suited = [s for s in free if claim.may_use(s, clean[s])]
            if not suited:
                left.append(claim)
                continue
            server = max(suited, key=free.__getitem__)
            self.use[server].change(+1)
            claim.granted.set_result((server, clean[server]))
            free[server] -= 1
            if not free[server]:
                del free[server]
        self.claims = left

    def free(self, version_suits: Callable[[int], bool]) -> int:
        """Return the places left on servers of suitable version when all claims are met; negative if there are more claims."""
        clean = self.membership.clean()
        return sum(self.limit - self.use[s].running for s, v in clean.items() if version_suits(v)) - len(self.claims)

    def emptiest(self, version_suits: Callable[[int], bool]) -> int | None:
        """Return the server with most free places among those of suitable version."""
        suited = [s for s, v in self.membership.clean().items() if version_suits(v)]
        return min(suited, key=lambda s: self.use[s].running, default=None)


class GroupPlaces:
    """The places of a ticket's rollouts: claims for all first requests, made on admission, then one for each later request.

    The group stays on one server while that is eligible (affinity), because its cache has the prompt's keys and values.
    server: that one; began: its version at the group's first request; both None before.
    """

    def __init__(self, places: Places, admission: Admission, ticket: int, rollouts: int) -> None:
        self._places, self._admission, self._ticket = places, admission, ticket
        self.server = places.emptiest(lambda version: admission.eligible(ticket, version))
        self.began: int | None = None
        self._claims = {n: places.claim((1, ticket, n), self._may_use) for n in range(rollouts)}

    async def take(self, rollout: int) -> tuple[int, int]:
        """Wait for a place for the next request of this rollout: (server, version of its weights). It must be given back."""
        claim = self._claims.pop(rollout, None) or self._places.claim((1, self._ticket, rollout), self._may_use)
        server, version = await claim.place()
        self.server = server
        if self.began is None:
            self.began = version
        return server, version

    def close(self) -> None:
        """Drop the claims of rollouts that have not begun."""
        while self._claims:
            self._claims.popitem()[1].drop()

    def _may_use(self, server: int, version: int) -> bool:
        if server != self.server:
            held = self._places.membership.clean_version(self.server)
            if held is not None and self._admission.eligible(self._ticket, held):
                return False
        return self._admission.eligible(self._ticket, version)
