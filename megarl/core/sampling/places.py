"""Which request may go to which server now. Each server has up to `limit` places for
requests; the oldest claim goes first.

    claim(order, may_use) ─► await claim.place() ─► (server, its version) ─► request ─► give_back(server)

When a ticket is admitted, its group claims the first place of each of its rollouts
(`GroupPlaces`), so the number of free places is always up to date. `may_use(server,
version)` tells which servers suit a claim. It is called whenever a place is given, and
again before a group's request is sent, so no leg, retry or wait can end on a server
that is no longer eligible.

The number of a server's places adapts to its load (`observe`), by additive increase and
multiplicative decrease (Chiu and Jain, 1989). It falls by a quarter when the server has
retracted requests for lack of KV memory, or had requests waiting at two observations in
a row. It rises by 1/GROWTH of the limit when all places were taken and less than ROOM
of the KV memory was. A decrease must take effect before the next one, and leaves no
more places than the server has requests in progress.
"""

import asyncio
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from megarl.core.base.admission import Admission
from megarl.core.server.membership import Membership, ServerLoad

Order = tuple[int, int, int]
"""(0 for an evaluation, else 1; ticket; sample). The smallest goes first."""
MayUse = Callable[[int, int], bool]
KEPT = 0.75
"""Share of the places that remains after a decrease."""
SHORT_PROMPT = 16
"""A shorter prompt is computed sooner than another request's copy can be used, even on
a CPU.
"""
GROWTH = 32
ROOM = 0.85
"""A server gets more places only below this share of used KV memory: running requests
grow and fill the rest.
"""


@dataclass(eq=False)
class Claim:
    """A claim on a place. From its creation on, one place fewer counts as free. home:
    returns the only server it may use now, an answer that changes only at a `refresh`;
    without it, the claim may use any server that suits. waits_at: that server while the
    claim waits for a place there.
    """

    order: Order
    may_use: MayUse
    home: Callable[[], int | None] | None
    granted: "asyncio.Future[tuple[int, int]]"
    places: "Places"
    waits_at: int | None = None

    async def place(self) -> tuple[int, int]:
        """Wait for a place and return (server, version of its weights). The caller must
        give it back.
        """
        try:
            return await self.granted
        except asyncio.CancelledError:
            self.drop()
            raise

    def drop(self) -> None:
        """Withdraw the claim, and give back its place if it already has one."""
        if self.granted.done() and not self.granted.cancelled():
            self.places.give_back(self.granted.result()[0])
        self.granted.cancel()
        self.places.withdraw(self)


@dataclass
class Use:
    """A server's places, its running requests, and totals since the start."""

    limit: int
    running: int = 0
    peak: int = 0  # the most requests that ran at once since the last observation
    queued: bool = False  # whether requests were waiting then
    reusable: int = 0  # input tokens that a request of the same group had sent or received before
    cached: int = 0  # how many of them were in the server's cache
    busy_seconds: float = 0.0  # with any request
    place_seconds: float = 0.0
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)

    def change(self, by: int) -> None:
        """Note that `by` more requests are running from now on; with 0, just bring the
        totals up to date.
        """
        now = time.monotonic()
        if self.running:
            self.busy_seconds += now - self.since
            self.place_seconds += self.running * (now - self.since)
        self.since = now
        self.running += by
        self.peak = max(self.peak, self.running)

    @property
    def free(self) -> int:
        return max(0, self.limit - self.running)


class Places:
    """The places of all servers, at most `limit` each, and the claims that wait for
    one.
    """

    def __init__(self, membership: Membership, limit: int) -> None:
        self.membership = membership
        self.limit = limit
        self.use = {server: Use(limit) for server in membership.members}
        self.claims: list[Claim] = []
        self.changed = asyncio.Event()  # there may be more room; whoever waits for it clears it
        self._serving: dict[
            int, int
        ] = {}  # version of each server, and free places of each version, at `refresh`
        self._open: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()  # claims that wait at each server
        self.refresh()

    def add(self, server: int) -> None:
        self.use[server] = Use(self.limit)

    def forget(self, server: int) -> None:
        """Remove a server that has left. None of its places may be taken."""
        del self.use[server]
        self.refresh()

    def claim(
        self, order: Order, may_use: MayUse, home: Callable[[], int | None] | None = None
    ) -> Claim:
        """Return a claim on a place, to be awaited or dropped. It needs a running event
        loop.
        """
        claim = Claim(order, may_use, home, asyncio.get_running_loop().create_future(), self)
        if not self._grant(claim, self._serving):
            insort(self.claims, claim, key=lambda c: c.order)
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Forget a claim, if it still waits."""
        self.wait(claim, None)
        n = bisect_left(self.claims, claim.order, key=lambda c: c.order)
        while n < len(self.claims) and self.claims[n].order == claim.order:
            if self.claims[n] is claim:
                del self.claims[n]
                return
            n += 1

    async def take(self, order: Order, may_use: MayUse) -> tuple[int, int]:
        """Wait for a place and return (server, version of its weights). The caller must
        give it back.
        """
        return await self.claim(order, may_use).place()

    def give_back(self, server: int) -> None:
        self._change(server, -1)
        self.changed.set()
        if (
            self.claims
            and self.use[server].free
            and self.membership.serving_version(server) is not None
        ):
            for claim in self.claims:
                here = claim.home is None or claim.waits_at == server
                if here and not claim.granted.cancelled() and self._grant(claim, (server,)):
                    self.claims.remove(claim)
                    return

    def refresh(self) -> None:
        """Give out places. Call this whenever a server's state has changed, or which
        servers an older claim may use.
        """
        self.changed.set()
        self._serving, self._open = self.membership.serving(), Counter()
        for server, version in self._serving.items():
            self._open[version] += self.use[server].free
        self.claims = [
            c
            for c in self.claims
            if not c.granted.cancelled() and not self._grant(c, self._serving)
        ]

    def observe(self, server: int, load: ServerLoad, retracted: bool) -> None:
        """Adapt a server's places to its load; `refresh` then gives them out.
        retracted: it retracted requests since then.
        """
        use = self.use[server]
        waited, use.queued, peak, use.peak = use.queued, load.waiting > 0, use.peak, use.running
        if retracted or (waited and use.queued):
            fewer = int(min(peak, use.limit) * KEPT) if use.running <= use.limit else use.limit
            use.limit = max(1, min(fewer, use.running - load.waiting))
        elif use.running <= use.limit <= peak and load.usage < ROOM:
            use.limit = min(self.limit, use.limit + max(1, self.limit // GROWTH))

    def wait(self, claim: Claim, server: int | None) -> None:
        """Note where the claim waits now. Counted here, because to count all claims for
        each would take a fleet minutes.
        """
        if claim.waits_at is not None:
            self._waiting[claim.waits_at] -= 1
        if server is not None:
            self._waiting[server] += 1
        claim.waits_at = server

    def _grant(self, claim: Claim, servers: Collection[int]) -> bool:
        """Give the claim a place on the suitable server of these with the most free
        places. Return whether there was one.
        """
        home = claim.home() if claim.home else None
        if claim.home:
            servers = () if home is None or home not in servers else (home,)
        suited = {
            s: version
            for s in servers
            if self.use[s].free
            and (version := self.membership.serving_version(s)) is not None
            and claim.may_use(s, version)
        }
        self.wait(claim, None if suited else home)
        if not suited:
            return False
        server = max(suited, key=lambda s: self.use[s].free)
        self._change(server, +1)
        claim.granted.set_result((server, suited[server]))
        return True

    def _change(self, server: int, by: int) -> None:
        use = self.use[server]
        before = use.free
        use.change(by)
        if server in self._serving:
            self._open[self._serving[server]] += use.free - before

    def free(self, version_suits: Callable[[int], bool]) -> int:
        """Return the free places on servers of suitable versions, less all waiting
        claims; may be negative.
        """
        return sum(
            places for version, places in self._open.items() if version_suits(version)
        ) - len(self.claims)

    def emptiest(self, version_suits: Callable[[int], bool]) -> int | None:
        """Return the server of a suitable version with the most places left after its
        running and waiting requests.
        """
        suited = [s for s, v in self.membership.serving().items() if version_suits(v)]
        return max(
            suited,
            key=lambda s: self.use[s].limit - self.use[s].running - self._waiting[s],
            default=None,
        )


class GroupPlaces:
    """The places of a ticket's rollouts: claims for all first requests, made on
    admission, then one for each later request.

    The group stays on one server, `server`, while that is eligible: its cache has the
    prompt's keys and values once the first request has a token (`cached`). Until then
    the other requests wait, or each would compute the prompt. began: the server's
    version at the group's first request. Both are None before it.
    """

    def __init__(self, places: Places, admission: Admission, ticket: int, rollouts: int) -> None:
        self._places = places
        self._admission = admission
        self._ticket = ticket
        self.server: int | None = None
        self.began: int | None = None
        self._cached = asyncio.Event()
        self._claims = {n: self._claim(n) for n in range(rollouts)}

    async def take(self, rollout: int) -> tuple[int, int]:
        """As Places.take, for this rollout's next request."""
        while True:
            server, _ = await (self._claims.pop(rollout, None) or self._claim(rollout)).place()
            try:
                if self.began is not None:
                    await self._cached.wait()
            except asyncio.CancelledError:
                self._places.give_back(server)
                raise
            version = self._places.membership.serving_version(server)
            if version is not None and self._may_use(server, version):
                self.began = version if self.began is None else self.began
                return server, version
            self._places.give_back(
                server
            )  # since the place was given, the server was lost or a publication began

    def cached(self) -> None:
        """Note that the group's first request has a token or has ended."""
        self._cached.set()

    def close(self) -> None:
        """Drop the claims of rollouts that have not begun."""
        while self._claims:
            self._claims.popitem()[1].drop()

    def _claim(self, rollout: int) -> Claim:
        return self._places.claim((1, self._ticket, rollout), self._may_use, self._home)

    def _may_use(self, _server: int, version: int) -> bool:
        return self._admission.eligible(self._ticket, version)

    def _home(self) -> int | None:
        """Return the group's server; if it may no longer be used, first choose another
        one for the whole group.
        """
        held = self._places.membership.serving_version(self.server)
        if held is None or not self._admission.eligible(self._ticket, held):
            self.server = self._places.emptiest(
                lambda version: self._admission.eligible(self._ticket, version)
            )
        return self.server


class Waits:
    """Adds up the seconds in which at least one request of a session waits for a place
    on a server.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._before = 0.0

    async def taken(self, take: Callable[[], Awaitable[tuple[int, int]]]) -> tuple[int, int]:
        """Wait for a place as `take` does, and count the time."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            return await take()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._before += time.monotonic() - self._since

    def seconds(self) -> float:
        return self._before + (time.monotonic() - self._since if self._waiting else 0.0)
