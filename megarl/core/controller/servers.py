"""The servers of a run: clients, states, health, and which version each has.

    GET /health each 2 s, or tokens ─► seen | lost ─┐
    a request fails ─────────────────► lost ─────────┼─► Membership ─► changed()
    the learner publishes ───────────────────────────┘
    GET /v1/loads each 5 s, retracted requests ──────► Places.observe

Connections to a lost server that does not answer are dropped: if its machine is gone,
nothing else ends the requests on them. A server that comes back, or answers for the
first time, first aborts all its requests, because nobody waits for them.

    Join ──► a new member: watched, published to, sent requests
                  │ it neither answers nor announces itself
    Leave ────────┴► no new requests; running ones are aborted and continue elsewhere
                      ─► forgotten
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import (
    Ack,
    FromServer,
    Join,
    Joined,
    Leave,
    Refused,
    Reply,
    ServerAddress,
    Wait,
)
from megarl.core.base.rundir import Endpoints
from megarl.core.client.client import ServerClient
from megarl.core.client.fleet import Fan
from megarl.core.client.membership import FORGET_S, Membership, ServerLoad
from megarl.core.recipe import START_LIMIT_RULE, Recipe
from megarl.core.sampling.places import Places
from megarl.core.telemetry.spans import spans

log = logging.getLogger(__name__)

POLL_S = 2.0
POLL_AFTER_MISS_S = 0.5
LOAD_S = 5.0
MISSES = 5
"""Consecutive missed health checks after which a server is lost: on a busy machine one
or two mean nothing.
"""
DRAIN_S = 5.0
DRAIN_POLL_S = 0.05
"""How long a leaving server may take to abort its requests before connections are
closed, and the interval of checks.
"""
CLOSE_S = 1.0
"""How long connections may take to close: one to a dead machine would try for minutes
to send its remaining data.
"""


class Servers:
    """The servers in the endpoints, and those that join. changed: called when a
    server's state has changed.
    """

    def __init__(self, recipe: Recipe, endpoints: Endpoints, changed: Callable[[], None]) -> None:
        self._width = recipe.resources.server_tensor_parallel
        self._start_s = recipe.start_limit_s
        addresses = [
            ServerAddress(id=server, url=url, tensor_parallel=self._width)
            for server, url in enumerate(endpoints.servers)
        ]
        self.membership = Membership(addresses, recipe.stages_weights)
        self.places = Places(self.membership, recipe.serving.max_running_requests)
        self._endpoints = endpoints
        self.clients = {address.id: self._client(address) for address in addresses}
        # How often each server was lost or its requests aborted. A number stays when a
        # joined server is forgotten, because another may get its id.
        self._life_counts: defaultdict[int, int] = defaultdict(int)
        self._refused: dict[str, str] = {}  # reasons, by the life of a joined server
        self._healthy = time.monotonic()
        self._changed = changed
        self._lends_memory = recipe.lends_memory

    def _client(self, address: ServerAddress) -> ServerClient:
        """Make the client of a server."""
        return ServerClient(address, self._endpoints.api_key, self._endpoints.admin_key)

    async def run(self) -> None:
        """Watch all servers for ever, and forget joined servers that are gone."""
        async with asyncio.TaskGroup() as self._tasks:
            for server in self.clients:
                self._tasks.create_task(self.watch(server), name=f"watch {server}")
            self._tasks.create_task(self.observe(), name="load of servers")
            while True:
                await asyncio.sleep(POLL_S)
                self._part_with_absent(time.monotonic())

    def _part_with_absent(self, time_now: float) -> None:
        """Go on without joined servers that are silent, or have never answered."""
        for server in self.membership.silent(time_now):
            reason = f"it does not answer and has sent no sign of life for {FORGET_S:g} s"
            self._part(server, reason)
        for server in self.membership.stuck(time_now, self._start_s):
            reason = f"it did not answer for {self._start_s:g} s ({START_LIMIT_RULE})"
            self.dismiss(server, reason)

    def life(self, server: int) -> int:
        """Return a number that changes when the server is lost or its requests are
        aborted.
        """
        return self._life_counts[server]

    def server_lost(self, server: int, life: int, reason: str) -> None:
        """Note the failure of a request or health check that began in this life of the
        server. One that began in an earlier life says nothing of this one.
        """
        if life == self._life_counts[server]:
            log.warning("server %d is lost: %s", server, reason)
            self._life_counts[server] += 1
            self.membership.lose(server)
            spans.event(f"server {server}/busy", "lost", reason=reason)
            self._changed()

    async def answers(self, server: int) -> bool:
        """Return whether the server answers a health check. If not, mark it as lost."""
        life = self._life_counts[server]
        healthy = await self.clients[server].health()
        if not healthy:
            self.server_lost(server, life, "it does not answer")
        return healthy

    async def abort(self, server: int) -> bool:
        """Abort the server's requests, which then continue elsewhere from their last
        token. Return whether this succeeded.
        """
        self._life_counts[server] += 1
        try:
            await self.clients[server].abort_all()
        except MegarlError as error:
            log.warning("could not abort the requests of server %d: %s", server, error)
            return False
        return True

    def seconds_without(self) -> float:
        """Return how long no server has been healthy."""
        if self.membership.healthy():
            self._healthy = time.monotonic()
        return time.monotonic() - self._healthy

    async def watch(self, server: int) -> None:
        """Check the server's health as long as it is a member, except during a
        publication, in which it is paused.
        """
        member = self.membership.members[server]
        client = self.clients[server]
        misses = 1  # ask soon at first
        while self.membership.members.get(server) is member:
            await asyncio.sleep(POLL_AFTER_MISS_S if misses else POLL_S)
            if member.state in ("publishing", "leaving"):
                continue
            has_just_sent = member.state == "clean" and time.monotonic() - client.heard < POLL_S
            life = self._life_counts[server]
            healthy = has_just_sent or await client.health()
            if healthy and member.away:
                await self._greet(server)
            if healthy or member.state == "publishing":  # it has begun meanwhile
                misses = 0
            else:
                misses += 1
            if misses >= MISSES and not member.away:
                self.server_lost(server, life, f"it missed {misses} health checks")
            if misses and member.state == "lost":
                await self._disconnect(server)

    async def observe(self) -> None:
        """Adapt the places of servers to their load, for ever. Retractions forced by a
        learner on the same GPU do not count.
        """
        retractions = dict[int, int]()
        while True:
            await asyncio.sleep(LOAD_S)
            clients = dict(self.clients)  # a copy: servers may leave while they are asked
            fan = Fan[ServerLoad](clients, set(), self.membership.joined_servers())
            await fan.run(self.membership.clean(), lambda client: client.current_load())
            # Some may have left in between.
            for server in fan.results.keys() & self.clients.keys():
                earlier_retractions = retractions.get(server, 0)
                retractions[server] = self.clients[server].retractions
                retracted = retractions[server] > earlier_retractions and not self._lends_memory
                self.places.observe(server, fan.results[server], retracted)
            self.places.refresh()

    async def _greet(self, server: int) -> None:
        """Use a server that has come back, once its old requests are aborted."""
        aborted = await self.abort(server)
        member = self.membership.members.get(server)
        is_settled = member is None or not member.away  # it has left meanwhile, or was greeted
        if not aborted or is_settled:
            return
        self.membership.answered(server)
        spans.event(f"server {server}/busy", "up")
        log.info("server %d at %s is up", server, self.clients[server].address.url)
        self._changed()

    async def _disconnect(self, server: int) -> None:
        """Drop the connections to the server. This ends the requests on them, even if
        its machine is gone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.clients[server].close()

    # Servers that the run did not start.

    def answer(self, message: FromServer) -> Reply:
        """Return the answer to a server that joins, is still there, or leaves."""
        if isinstance(message, Leave):
            return self._leave(message)
        return self._join(message)

    def _join(self, message: Join) -> Joined | Wait | Refused:
        """Add a server to the run, or note its sign of life. The reply is Refused to
        one that was dismissed, and Wait as long as another server has its address.

        Two things may be new: the server, or only its process. A server that is started
        again at the same address keeps its id and client, and its life's name is new.
        """
        if message.life in self._refused:
            return Refused(error=self._refused[message.life])
        member = self.membership.members.get(message.server)
        is_new_life = member is None or member.life != message.life
        try:
            server = self.membership.join(
                message.url, message.life, message.server, self._width, time.monotonic()
            )
        except ValueError as error:
            return Wait(reason=str(error))
        if server not in self.clients:
            self.clients[server] = self._client(self.membership.members[server].address)
            self.places.add(server)
            self._tasks.create_task(self.watch(server), name=f"watch {server}")
        if is_new_life:
            log.info("server %d at %s joins", server, message.url)
            self._life_counts[server] += 1
            self._changed()
        return Joined(server=server)

    def _leave(self, message: Leave) -> Ack | Wait:
        """Answer a server that leaves: Ack once it is forgotten, before that Wait, so
        that it asks again.
        """
        members = self.membership.joined_servers().items()
        leaving = [server for server, member in members if member.life == message.life]
        if not leaving:
            return Ack()
        for server in leaving:
            self._part(server, "it says goodbye")
        return Wait(reason="requests or weights are under way")

    def dismiss(self, server: int, reason: str) -> None:
        """Go on without a joined server. If its process sends another message, it is
        refused for this reason.
        """
        life = self.membership.members[server].life
        self._refused[life] = f"the run goes on without this server: {reason}"
        self._part(server, reason)

    def _part(self, server: int, reason: str) -> None:
        """Start to remove a joined server, unless it is leaving already: several events
        may ask for this.
        """
        if self.membership.leaves(server):
            return
        log.info("server %d leaves: %s", server, reason)
        self.membership.leave(server)
        self._life_counts[server] += 1
        spans.event(f"server {server}/busy", "left", reason=reason)
        self._tasks.create_task(self._forget(server), name=f"forget {server}")
        self._changed()

    async def _forget(self, server: int) -> None:
        """Have the server's requests continue elsewhere; forget it once none is left
        and no learner sends it weights.
        """
        member = self.membership.members[server]
        use = self.places.use[server]
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self.abort(server)
                while use.running:
                    await asyncio.sleep(DRAIN_POLL_S)
        while use.running or member.receives:
            await self._disconnect(server)  # ends the requests that are left
            await asyncio.sleep(DRAIN_POLL_S)
        await self._disconnect(server)
        self.membership.forget(server)
        self.places.forget(server)
        del self.clients[server]
        log.info("server %d is forgotten", server)
        self._changed()

    async def close(self) -> None:
        """Drop all connections; the servers abort the requests on them."""
        await asyncio.gather(*map(self._disconnect, self.clients))
