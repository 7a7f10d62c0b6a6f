"""Which request may go to which server now. Each server has up to `limit` places for
requests; the oldest claim goes first.

    claim(order, may_use) ─► await claim.place() ─► (server, its version)
        ─► request ─► give_back(server)

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
from megarl.core.client.membership import Membership, ServerLoad

Order = tuple[int, int, int]
"""(0 for an evaluation, else 1; ticket; sample). The smallest goes first."""
MayUse = Callable[[int, int], bool]
"""Returns whether a request may go to a server with this id and this version."""
DECREASE = 0.75
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


def _order(claim: Claim) -> Order:
    """Return what claims are sorted by."""
    return claim.order


@dataclass
class Use:
    """A server's places, its running requests, and totals since the start."""

    limit: int
    running: int = 0
    peak: int = 0  # the most requests that ran at once since the last observation
    queued: bool = False  # whether requests were waiting at the last observation
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
        time_now = time.monotonic()
        elapsed = time_now - self.since
        if self.running:
            self.busy_seconds += elapsed
            self.place_seconds += self.running * elapsed
        self.since = time_now
        self.running += by
        self.peak = max(self.peak, self.running)

    @property
    def free(self) -> int:
        """The places that no request has."""
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
        # There may be more room. Whoever waits for this clears it.
        self.changed = asyncio.Event()
        # At the last `refresh`: each server's version, each version's free places.
        self._serving: dict[int, int] = {}
        self._open: Counter[int] = Counter()
        # How many claims wait at each server.
        self._waiting: Counter[int] = Counter()
        self.refresh()

    def add(self, server: int) -> None:
        """Give a server that has joined its places."""
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
        granted = asyncio.get_running_loop().create_future()
        claim = Claim(order, may_use, home, granted, self)
        if not self._grant(claim, self._serving):
            insort(self.claims, claim, key=_order)
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Forget a claim, if it still waits."""
        self.note_wait(claim, None)
        # several claims may have the same order, as those of an agent's requests
        position = bisect_left(self.claims, claim.order, key=_order)
        while position < len(self.claims) and self.claims[position].order == claim.order:
            if self.claims[position] is claim:
                del self.claims[position]
                return
            position += 1

    async def take(self, order: Order, may_use: MayUse) -> tuple[int, int]:
        """Wait for a place and return (server, version of its weights). The caller must
        give it back.
        """
        return await self.claim(order, may_use).place()

    def give_back(self, server: int) -> None:
        """Return a place, which the oldest claim that may use it gets at once."""
        self._change(server, -1)
        self.changed.set()
        if not self.use[server].free or self.membership.serving_version(server) is None:
            return
        for claim in self.claims:
            # one that may use any server, or waits at this one
            may_take = claim.home is None or claim.waits_at == server
            if not may_take or claim.granted.cancelled():
                continue
            if self._grant(claim, (server,)):
                self.claims.remove(claim)
                return

    def refresh(self) -> None:
        """Give out places. Call this whenever a server's state has changed, or which
        servers an older claim may use.
        """
        self.changed.set()
        self._serving = self.membership.serving()
        self._open = Counter()
        for server, version in self._serving.items():
            self._open[version] += self.use[server].free
        still_waiting = []
        for claim in self.claims:
            if claim.granted.cancelled():
                continue
            if not self._grant(claim, self._serving):
                still_waiting.append(claim)
        self.claims = still_waiting

    def observe(self, server: int, load: ServerLoad, retracted: bool) -> None:
        """Adapt a server's places to its load; `refresh` then gives them out.
        retracted: it retracted requests since its last observation.
        """
        use = self.use[server]
        queued_before = use.queued
        peak_running = use.peak
        use.queued = load.waiting > 0
        use.peak = use.running
        # not until enough requests have ended for the fewer places
        last_decrease_took_effect = use.running <= use.limit
        overloaded = retracted or (queued_before and use.queued)
        if overloaded:
            reduced_limit = use.limit
            if last_decrease_took_effect:
                reduced_limit = int(min(peak_running, use.limit) * DECREASE)
            requests_in_progress = use.running - load.waiting
            use.limit = max(1, min(reduced_limit, requests_in_progress))
            return
        all_places_were_taken = peak_running >= use.limit
        if last_decrease_took_effect and all_places_were_taken and load.usage < ROOM:
            use.limit = min(self.limit, use.limit + max(1, self.limit // GROWTH))

    def note_wait(self, claim: Claim, server: int | None) -> None:
        """Note for which server the claim waits now; None: for no particular one, or no
        longer. A count per server is kept, because counting all claims for every claim
        would take minutes in a large fleet.
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
        home = None
        if claim.home is not None:
            home = claim.home()
            servers = [server for server in servers if server == home]
        versions = self._suitable(claim, servers)
        if not versions:
            self.note_wait(claim, home)
            return False
        self.note_wait(claim, None)
        server = max(versions, key=lambda candidate: self.use[candidate].free)
        self._change(server, +1)
        claim.granted.set_result((server, versions[server]))
        return True

    def _suitable(self, claim: Claim, servers: Collection[int]) -> dict[int, int]:
        """Return the versions of those of these servers that suit the claim."""
        versions = {}
        for server in servers:
            version = self.membership.serving_version(server)
            if version is None or not self.use[server].free:
                continue
            if claim.may_use(server, version):
                versions[server] = version
        return versions

    def _change(self, server: int, by: int) -> None:
        """Note that `by` more requests run on the server, and count its free places."""
        use = self.use[server]
        free_before = use.free
        use.change(by)
        if server in self._serving:
            self._open[self._serving[server]] += use.free - free_before

    def free(self, version_suits: Callable[[int], bool]) -> int:
        """Return the free places on servers of suitable versions, less all waiting
        claims; may be negative.
        """
        suitable = [places for version, places in self._open.items() if version_suits(version)]
        return sum(suitable) - len(self.claims)

    def emptiest(self, version_suits: Callable[[int], bool]) -> int | None:
        """Return the server of a suitable version with the most places left after its
        running and waiting requests.
        """
        serving = self.membership.serving()
        suitable = [server for server, version in serving.items() if version_suits(version)]
        return max(suitable, key=self._unclaimed, default=None)

    def _unclaimed(self, server: int) -> int:
        """Return how many places the server's running and waiting requests leave."""
        use = self.use[server]
        return use.limit - use.running - self._waiting[server]


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
            claim = self._claims.pop(rollout, None) or self._claim(rollout)
            server, _ = await claim.place()
            try:
                if self.began is not None:  # not the group's first request
                    await self._cached.wait()
            except asyncio.CancelledError:
                self._places.give_back(server)
                raise
            version = self._places.membership.serving_version(server)
            if version is not None and self._may_use(server, version):
                if self.began is None:
                    self.began = version
                return server, version
            # Since the place was given, the server was lost or a publication began.
            self._places.give_back(server)

    def let_others_begin(self) -> None:
        """Let the group's other rollouts begin: its first request has a token, so that
        the prompt is cached, or has ended.
        """
        self._cached.set()

    def close(self) -> None:
        """Drop the claims of rollouts that have not begun."""
        while self._claims:
            _, claim = self._claims.popitem()
            claim.drop()

    def _claim(self, rollout: int) -> Claim:
        """Claim a place for a rollout of the group, on the group's server."""
        return self._places.claim((1, self._ticket, rollout), self._may_use, self._home)

    def _eligible(self, version: int) -> bool:
        """Return whether the group may be sampled with weights of this version."""
        return self._admission.eligible(self._ticket, version)

    def _may_use(self, _server: int, version: int) -> bool:
        """Return whether the group may use a server of this version (a MayUse)."""
        return self._eligible(version)

    def _home(self) -> int | None:
        """Return the group's server; if it may no longer be used, first choose another
        one for the whole group.
        """
        version = self._places.membership.serving_version(self.server)
        if version is None or not self._eligible(version):
            self.server = self._places.emptiest(self._eligible)
        return self.server


class Waits:
    """Adds up the seconds in which at least one request of a session waits for a place
    on a server.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._total = 0.0  # of the waits that are over

    async def measure(self, take: Callable[[], Awaitable[tuple[int, int]]]) -> tuple[int, int]:
        """Wait for a place as `take` does, and count the time."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            return await take()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._total += time.monotonic() - self._since

    def seconds(self) -> float:
        """Return the seconds until now."""
        if not self._waiting:
            return self._total
        return self._total + time.monotonic() - self._since
