"""The servers of a run: clients, states, health, and which version each has.

    GET /health each 2 s, or tokens ─► seen | lost ─┐
    a request fails ─────────────────► lost ─────────┼─► Membership ─► changed()
    the learner publishes ───────────────────────────┘
    GET /v1/loads each 5 s, retracted requests ──────► Places.observe

A server that comes back, or is met for the first time, first aborts all its requests, because nobody waits for them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.recipe import Recipe
from megarl.core.sampling.places import Places
from megarl.core.server.client import ServerClient
from megarl.core.server.membership import Membership, ServerLoad
from megarl.core.server.relay import Fan
from megarl.core.telemetry.spans import Spans

log = logging.getLogger(__name__)

POLL_S = 2.0
POLL_AFTER_MISS_S = 0.5
LOAD_S = 5.0
MISSES = 5
"""Consecutive missed health checks after which a server is lost: on a busy machine one or two mean nothing."""


class Servers:
    """All servers of the endpoints. `changed` is called when a server's state has changed."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints, changed: Callable[[], None], spans: Spans) -> None:
        width = recipe.resources.server_tensor_parallel
        addresses = [ServerAddress(id=n, url=u, tensor_parallel=width) for n, u in enumerate(endpoints.servers)]
        self.membership = Membership(addresses)
        self.clients = {a.id: ServerClient(a, endpoints.api_key, endpoints.admin_key) for a in addresses}
        self._lives = dict.fromkeys(self.clients, 0)
        self._changed, self._spans, self._healthy = changed, spans, time.monotonic()
        self._told_to_retract = recipe.lends_memory

    def life(self, server: int) -> int:
        """Return a number that changes when the server is lost or its requests are aborted."""
        return self._lives[server]

    def server_lost(self, server: int, life: int, reason: str) -> None:
        """Note that a request or health check failed that began in this life of the server."""
        if life == self._lives[server]:
            log.warning("server %d is lost: %s", server, reason)
            self._lives[server] += 1
            self.membership.lost(server)
            self._spans.event(f"server {server}/busy", "lost", reason=reason)
            self._changed()

    async def abort(self, servers: Iterable[int]) -> None:
        """Abort their requests, which continue elsewhere from what has arrived."""
        for server in servers:
            self._lives[server] += 1
            try:
                await self.clients[server].abort_all()
            except MegarlError as error:
                log.warning("could not abort the requests of server %d: %s", server, error)

    def seconds_without(self) -> float:
        """Return how long no server has been healthy."""
        if self.membership.healthy():
            self._healthy = time.monotonic()
        return time.monotonic() - self._healthy

    async def watch(self, server: int) -> None:
        """Check its health for ever, except while it is published to: it then stands still and may be slow to answer."""
        member, client, misses = self.membership.members[server], self.clients[server], 1
        while True:
            await asyncio.sleep(POLL_AFTER_MISS_S if misses else POLL_S)
            if member.state == "publishing":
                continue
            spoke = member.state == "clean" and time.monotonic() - client.heard < POLL_S
            life, healthy = self._lives[server], spoke or await client.health()
            if healthy and member.state in ("starting", "lost"):
                await self._greet(server)
            misses = 0 if healthy or member.state == "publishing" else misses + 1
            if misses >= MISSES and member.state not in ("starting", "lost"):
                self.server_lost(server, life, f"it missed {misses} health checks")

    async def observe(self, places: Places) -> None:
        """Adapt the places of servers to their load, for ever. A learner on their GPU has them put requests back on purpose."""
        retractions = dict[int, int]()
        while True:
            await asyncio.sleep(LOAD_S)
            fan = Fan[ServerLoad](self.clients, set())
            await fan.run(self.membership.clean(), lambda client: client.current_load())
            for server, load in fan.results.items():
                before, retractions[server] = retractions.get(server, 0), self.clients[server].retractions
                places.observe(server, load, retractions[server] > before and not self._told_to_retract)
            places.refresh()

    async def _greet(self, server: int) -> None:
        try:
            await self.clients[server].abort_all()
        except MegarlError as error:
            log.warning("server %d is healthy but does not obey: %s", server, error)
            return
        self.membership.seen(server)
        self._spans.event(f"server {server}/busy", "up")
        log.info("server %d at %s is up", server, self.clients[server].address.url)
        self._changed()

    async def close(self) -> None:
        """Drop all connections; the servers abort the requests on them."""
        for client in self.clients.values():
            await client.close()
