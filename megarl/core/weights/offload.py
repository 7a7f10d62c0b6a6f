"""Servers release their KV memory while the learner trains a step (Recipe.lends_memory).

    pause, requests retracted ─► release ─► the learner trains ─► it frees its unused memory ─► resume ─► continue

Retracted requests wait without any memory and are recomputed afterwards; in the configurations that allow this, only requests
of an evaluation can be running. A learner that dies in between leaves the servers paused until the next learner's publication
wakes them (publisher.py). A server that does not answer is left as it is.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist

from megarl.core.base.messages import ServerAddress
from megarl.core.base.ranks import gathered
from megarl.core.base.rundir import Endpoints
from megarl.core.recipe import Recipe
from megarl.core.server.client import ServerClient
from megarl.core.server.fleet import Call
from megarl.core.weights.transport import open_fleet

log = logging.getLogger(__name__)


class Offload:
    """One learner rank's part in lending the servers' memory."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints) -> None:
        self._on, self._limit_s = recipe.lends_memory, recipe.weights.timeout_s
        self._endpoints = endpoints

    @contextmanager
    def released(self, version: int) -> Iterator[None]:
        """Free the servers' memory within this context. version: of the weights, for error messages. COLLECTIVE."""
        if not self._on:
            yield
            return
        leader = dist.get_rank() == 0
        servers = self._each(range(len(self._endpoints.servers)), _release, version) if leader else []
        gathered(None)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        gathered(None)
        if servers:
            self._each(servers, _resume, version)

    def _each(self, ids: Iterable[int], call: Call[None], version: int) -> list[int]:
        """Call these servers; return the ids of those for which the call succeeded."""
        servers = [ServerAddress(id=i, url=self._endpoints.servers[i]) for i in ids]
        with closing(open_fleet(servers, self._endpoints, self._limit_s, version)) as fleet:
            done, failed = fleet.each(fleet.servers, call)
        for error in failed.values():
            log.warning("memory: %s", error)
        return list(done)


async def _release(server: ServerClient) -> None:
    await server.pause("retract")
    await server.release_memory()


async def _resume(server: ServerClient) -> None:
    await server.resume_memory()
    await server.resume()
