"""The servers' memory of keys and values, lent to the learner for a step (serving.release_memory).

    pause, requests retracted ─► release ─► the learner trains ─► it gives back what it does not hold ─► resume ─► continue

Requests that were retracted wait without any memory and are recomputed afterwards; in the set-ups that allow this only those of
an evaluation can be under way. A learner that dies in between leaves the servers paused, until the next one's publication wakes
them (publisher.py). A server that does not answer has nothing to lend.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist

from megarl.core.base.messages import ServerAddress
from megarl.core.base.ranks import gathered
from megarl.core.base.rundir import Endpoints
from megarl.core.recipe import Recipe
from megarl.core.server.client import Fleet, ServerClient

log = logging.getLogger(__name__)


class Lending:
    """Of one learner rank."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints) -> None:
        self._on, self._limit_s = recipe.serving.release_memory, recipe.weights.timeout_s
        self._endpoints = endpoints

    @contextmanager
    def borrowed(self, version: int) -> Iterator[None]:
        """The servers' memory is free within. version: of the weights, for errors. COLLECTIVE."""
        if not self._on:
            yield
            return
        lent: list[int] = []
        if dist.get_rank() == 0:
            with closing(self._fleet(version)) as fleet:
                lenders, failed = fleet.each(fleet.servers, _release)
            lent = list(lenders)
            for error in failed.values():
                log.warning("not borrowed: %s", error)
        gathered(None)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        gathered(None)
        if lent:
            with closing(self._fleet(version)) as fleet:
                failed = fleet.each(lent, _resume)[1]
            for error in failed.values():
                log.warning("not given back: %s", error)

    def _fleet(self, version: int) -> Fleet:
        keys = (self._endpoints.api_key, self._endpoints.admin_key)
        addresses = [ServerAddress(id=i, url=url) for i, url in enumerate(self._endpoints.servers)]
        return Fleet([ServerClient(a, *keys, self._limit_s) for a in addresses], version)


async def _release(server: ServerClient) -> None:
    await server.pause("retract")
    await server.release_memory()


async def _resume(server: ServerClient) -> None:
    await server.resume_memory()
    await server.resume()
