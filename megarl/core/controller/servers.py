"""The servers of a run: clients, states, health, and which version each has.

    GET /health each 2 s ─► seen | lost ─┐
    a request fails ───────► lost ────────┼─► Membership ─► changed()
    the learner publishes ────────────────┘

A server that comes back, or is met for the first time, first aborts all its requests, because nobody waits for them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Published, ServerAddress, ServerResult
from megarl.core.base.rundir import Endpoints
from megarl.core.controller.metrics import ComputeClock, Spent
from megarl.core.journal.records import PublishedVersion
from megarl.core.journal.writer import JournalWriter
from megarl.core.recipe import Recipe
from megarl.core.server.client import ServerClient
from megarl.core.server.membership import Membership
from megarl.core.telemetry.spans import Spans

log = logging.getLogger(__name__)

POLL_S = 2.0
POLL_AFTER_MISS_S = 0.5
MISSES = 5
"""Consecutive missed health checks after which a server is lost: on a busy machine one or two mean nothing."""


class Servers:
    """All servers of the endpoints. `changed` is called when a server's state has changed."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints, changed: Callable[[], None], spans: Spans) -> None:
        width = recipe.resources.server_tensor_parallel
        addresses = [ServerAddress(id=n, url=u, tensor_parallel=width) for n, u in enumerate(endpoints.servers)]
        self.membership = Membership(addresses)
        self.clients = {
            a.id: ServerClient(a, endpoints.api_key, endpoints.admin_key, recipe.serving.request_timeout_s)
            for a in addresses
        }
        self._lives = dict.fromkeys(self.clients, 0)
        self._changed, self._spans = changed, spans
        self._healthy = time.monotonic()

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
            if member.state != "publishing":
                life = self._lives[server]
                healthy = await client.health()
                if healthy and member.state in ("starting", "lost"):
                    await self._greet(server)
                misses = 0 if healthy or member.state == "publishing" else misses + 1
                if misses >= MISSES and member.state not in ("starting", "lost"):
                    self.server_lost(server, life, f"it missed {misses} health checks")

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


PUBLISH_TRIES = 3
"""Consecutive publications that may fail on a server while no other works."""


class Publications:
    """Results of the publications of a run. `fail` is called to end the run."""

    def __init__(
        self, servers: Servers, records: JournalWriter, compute: ComputeClock, fail: Callable[[str], None]
    ) -> None:
        self._servers, self._records, self._compute, self._fail = servers, records, compute, fail
        self._spent: dict[int, Spent] = {}  # at the first publication of each version in this life

    def spent(self, version: int) -> Spent:
        """Return the compute when this version was first published in this life."""
        return self._spent[version]

    def over(self, result: Published) -> bool:
        """Note the result of a publication; return whether any server has the new weights."""
        clean = [r for r in result.results if self._is_clean(r, result)]
        if clean:
            self._compute.published()
            spent = self._spent.setdefault(result.version, self._compute.spent())
            self._records.write(
                PublishedVersion(
                    version=result.version,
                    time=time.time(),
                    compute_hours=spent.total,
                    startup_hours=spent.startup,
                    evaluation_hours=spent.evaluation,
                    servers=tuple(self._servers.clients[r.id].address.url for r in clean),
                    pause_seconds=result.pause_seconds,
                    transfer_seconds=result.transfer_seconds,
                    resume_seconds=result.resume_seconds,
                )
            )
        self._give_up_if_none_works(result)
        return bool(clean)

    def _is_clean(self, r: ServerResult, result: Published) -> bool:
        clean = self._servers.membership.published(r.id, result.version, result.incarnation, r.error)
        if r.error:
            log.warning("version %d did not reach server %d: %s", result.version, r.id, r.error)
        return clean

    def _give_up_if_none_works(self, result: Published) -> None:
        """End the run if no server is clean and one of these has failed too often."""
        membership = self._servers.membership
        for r in result.results:
            if r.error and not membership.clean() and membership.members[r.id].failures >= PUBLISH_TRIES:
                self._fail(f"weights did not reach server {r.id} {PUBLISH_TRIES} times in a row: {r.error}")
