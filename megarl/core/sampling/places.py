"""Who may send a request to which server now. A server has a fixed number of places; the oldest claim goes first.

    take(order, may_use) ─► waits ─► (server, its version) ─► request ─► give_back(server)

A claim says by `may_use(server, version)` which servers suit it; that is asked again each time, at the moment a place is
given, so a leg, a retry or the wait for a publication can never end on a server that has ceased to be eligible.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.core.server.membership import Membership

Order = tuple[int, int, int]
"""(0 for evaluation else 1, ticket, sample): smaller goes first."""
MayUse = Callable[[int, int], bool]


@dataclass(eq=False)
class _Claim:
    order: Order
    may_use: MayUse
    granted: "asyncio.Future[tuple[int, int]]"


@dataclass
class Use:
    """What a server has been doing: requests running now, and totals since the start (seconds with any, place-seconds)."""

    running: int = 0
    busy_seconds: float = 0.0
    place_seconds: float = 0.0
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)

    def change(self, by: int) -> None:
        """`by` more requests run from now on; 0 brings the totals up to date."""
        now = time.monotonic()
        if self.running:
            self.busy_seconds += now - self.since
            self.place_seconds += self.running * (now - self.since)
        self.since = now
        self.running += by


class Places:
    """The places of all servers, `limit` each, and the claims that wait for one.

    `changed` is set whenever there may be more room; who waits for that clears it.
    """

    def __init__(self, membership: Membership, limit: int) -> None:
        self._membership = membership
        self.limit = limit
        self.use = {server: Use() for server in membership.members}
        self._claims: list[_Claim] = []
        self.changed = asyncio.Event()

    async def take(self, order: Order, may_use: MayUse) -> tuple[int, int]:
        """A place, as (server, version of its weights), once there is one. To be given back."""
        claim = _Claim(order, may_use, asyncio.get_running_loop().create_future())
        insort(self._claims, claim, key=lambda c: c.order)
        self.refresh()
        try:
            return await claim.granted
        except asyncio.CancelledError:
            if claim.granted.done() and not claim.granted.cancelled():
                self.give_back(claim.granted.result()[0])
            self._claims = [c for c in self._claims if c is not claim]
            raise

    def give_back(self, server: int) -> None:
        self.use[server].change(-1)
        self.refresh()

    def refresh(self) -> None:
        """Give out places; to be called whenever a server's state has changed."""
        self.changed.set()
        clean = self._membership.clean()
        free = {s: self.limit - self.use[s].running for s in clean if self.use[s].running < self.limit}
        if not free or not self._claims:
            return
        left = []
        for claim in self._claims:
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
        self._claims = left

    def free(self, version_suits: Callable[[int], bool]) -> int:
        """Places left on servers whose version suits, when all claims have been met; negative if those are more."""
        clean = self._membership.clean()
        return sum(self.limit - self.use[s].running for s, v in clean.items() if version_suits(v)) - len(self._claims)

    def emptiest(self, version_suits: Callable[[int], bool]) -> int | None:
        """The server with most places free, of those whose version suits."""
        suited = [s for s, v in self._membership.clean().items() if version_suits(v)]
        return min(suited, key=lambda s: self.use[s].running, default=None)

    @property
    def waiting(self) -> int:
        return len(self._claims)
