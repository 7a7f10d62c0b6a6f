"""Which request may go to which server now. A server has places, at most `limit`; the oldest claim goes first.

    claim(order, may_use) ─► await claim.place() ─► (server, its version) ─► request ─► give_back(server)

A group claims the first places of all its rollouts when its ticket is admitted (`GroupPlaces`), so the free places are known
at once. `may_use(server, version)` says which servers suit a claim. It is asked whenever a place is given, and again before a
group's request is sent, so no leg, retry or wait for a publication can end on a server that is no longer eligible.

How many places a server has follows what it bears (`observe`), by additive increase and multiplicative decrease (Chiu and
Jain, 1989): a quarter fewer when it has retracted requests for want of KV, or lets requests wait at two observations; one in
GROWTH more when all its places were taken and ROOM of its KV was not. A decrease must take effect before the next one. None
leaves more places than the requests that the server works on.
"""

import asyncio
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from megarl.core.base.admission import Admission
from megarl.core.server.membership import Membership, ServerLoad

Order = tuple[int, int, int]
"""(0 for evaluation else 1, ticket, sample): smaller goes first."""
MayUse = Callable[[int, int], bool]
KEPT = 0.75
"""Part of the places that a decrease leaves."""
SHORT_PROMPT = 32
"""Tokens below which a prompt is computed as fast as waited for; SGLang, too, looks for common prefixes only from there on."""
GROWTH = 32
ROOM = 0.85
"""Share of its KV in use up to which a server gets more places: requests grow, and fill the rest."""


@dataclass(eq=False)
class Claim:
    """A claim on a place, which counts from its creation. home: the only server that it may use now; None: any that suits."""

    order: Order
    may_use: MayUse
    home: Callable[[], int | None]
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
    """A server's places, its requests running now, and totals since the start (seconds with any request, place-seconds).

    peak: the most requests that ran at once since the last observation. queued: whether requests waited at it.
    reusable: input tokens that a request of the same group had sent or received before. cached: those of them that the server
    still had in its cache.
    """

    limit: int
    running: int = 0
    peak: int = 0
    queued: bool = False
    reusable: int = 0
    cached: int = 0
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
        self.peak = max(self.peak, self.running)

    @property
    def free(self) -> int:
        return max(0, self.limit - self.running)


class Places:
    """The places of all servers, at most `limit` each, and the claims that wait for one.

    `changed` is set whenever there may be more room; whoever waits for it clears it.
    """

    def __init__(self, membership: Membership, limit: int) -> None:
        self.membership = membership
        self.limit = limit
        self.use = {server: Use(limit) for server in membership.members}
        self.claims: list[Claim] = []
        self.changed = asyncio.Event()
        self._serving: dict[int, int] = {}  # version of each, and free places of each version, since `refresh`
        self._open: Counter[int] = Counter()
        self.refresh()

    def add(self, server: int) -> None:
        """Take in a server that has joined."""
        self.use[server] = Use(self.limit)

    def forget(self, server: int) -> None:
        """Remove a server that has left, of which no place is taken."""
        del self.use[server]
        self.refresh()

    def claim(self, order: Order, may_use: MayUse, home: Callable[[], int | None] = lambda: None) -> Claim:
        """Return a claim on a place, to be awaited or dropped. It needs a running event loop."""
        claim = Claim(order, may_use, home, asyncio.get_running_loop().create_future(), self)
        if not self._grant(claim, self._serving):
            insort(self.claims, claim, key=lambda c: c.order)
        return claim

    async def take(self, order: Order, may_use: MayUse) -> tuple[int, int]:
        """Wait for a place and return (server, version of its weights). It must be given back."""
        return await self.claim(order, may_use).place()

    def give_back(self, server: int) -> None:
        self._change(server, -1)
        self.changed.set()
        self._give_out((server,))

    def refresh(self) -> None:
        """Give out places. Call this whenever a server's state, or what an older claim may use, has changed."""
        self.changed.set()
        self._serving, self._open = self.membership.serving(), Counter()
        for server, version in self._serving.items():
            self._open[version] += self.use[server].free
        self._give_out(self._serving)

    def observe(self, server: int, load: ServerLoad, retracted: bool) -> None:
        """Adapt a server's places to its load; `refresh` then gives them out. retracted: it has put requests back meanwhile."""
        use = self.use[server]
        waited, use.queued, peak, use.peak = use.queued, load.waiting > 0, use.peak, use.running
        if retracted or (waited and use.queued):
            fewer = int(min(peak, use.limit) * KEPT) if use.running <= use.limit else use.limit
            use.limit = max(1, min(fewer, use.running - load.waiting))
        elif use.running <= use.limit <= peak and load.usage < ROOM:
            use.limit = min(self.limit, use.limit + max(1, self.limit // GROWTH))

    def _give_out(self, servers: Iterable[int]) -> None:
        """Give free places of these servers to waiting claims, the oldest first."""
        free = {s for s in servers if self.use[s].free and self.membership.serving_version(s) is not None}
        if free and self.claims:
            self.claims = [c for c in self.claims if not c.granted.cancelled() and not self._grant(c, free)]

    def _grant(self, claim: Claim, servers: Collection[int]) -> bool:
        """Give the claim a place on the emptiest of these servers that suits it, if there is one."""
        home = claim.home()
        suited = {
            s: version
            for s in (servers if home is None else (home,) if home in servers else ())
            if self.use[s].free
            and (version := self.membership.serving_version(s)) is not None
            and claim.may_use(s, version)
        }
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
        """Return the places left on servers of suitable version when all claims are met; negative if there are more claims."""
        return sum(places for version, places in self._open.items() if version_suits(version)) - len(self.claims)

    def emptiest(self, version_suits: Callable[[int], bool]) -> int | None:
        """Return the server with most free places among those of suitable version."""
        suited = [s for s, v in self.membership.serving().items() if version_suits(v)]
        return max(suited, key=lambda s: self.use[s].limit - self.use[s].running, default=None)


class GroupPlaces:
    """The places of a ticket's rollouts: claims for all first requests, made on admission, then one for each later request.

    The group stays on one server while that is eligible (affinity), because its cache has the prompt's keys and values. It
    has them once the first request has a token (`cached`): until then the others wait, or each would compute the prompt.
    server: that one; began: its version at the group's first request; both None before.
    """

    def __init__(self, places: Places, admission: Admission, ticket: int, rollouts: int) -> None:
        self._places, self._admission, self._ticket = places, admission, ticket
        self.server: int | None = None
        self.began: int | None = None
        self._cached = asyncio.Event()
        self._claims = {n: self._claim(n) for n in range(rollouts)}

    async def take(self, rollout: int) -> tuple[int, int]:
        """Wait for a place for the next request of this rollout: (server, version of its weights). It must be given back."""
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
            self._places.give_back(server)  # it was lost, or is published to, since the place was given

    def cached(self) -> None:
        """Note that a request has a token, or has ended."""
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
        """Return the group's server, and choose another one for all of the group if it may not be used."""
        held = self._places.membership.serving_version(self.server)
        if held is None or not self._admission.eligible(self._ticket, held):
            self.server = self._places.emptiest(lambda version: self._admission.eligible(self._ticket, version))
        return self.server
