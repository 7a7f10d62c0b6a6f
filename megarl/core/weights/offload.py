"""The servers' memory of keys and values, lent to the learner for a step (serving.release_memory).

    pause, requests retracted ─► release ─► the learner trains ─► it gives back what it does not hold ─► resume ─► continue

Requests that were retracted wait without any memory and are recomputed afterwards; in the set-ups that allow this only those of
an evaluation can be under way. A learner that dies in between leaves the servers paused, until the next one's publication wakes
them (publisher.py). A server that does not answer has nothing to lend.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megarl.core.base.messages import ServerAddress
from megarl.core.base.ranks import gathered
from megarl.core.base.rundir import Endpoints
from megarl.core.recipe import Recipe
from megarl.core.server.client import Fleet, Server

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
        fleet = self._fleet(version) if dist.get_rank() == 0 else None
        lent: list[int] = []
        if fleet is not None:
            lenders, failed = fleet.each(list(fleet.servers), _release)
            lent = list(lenders)
            for error in failed.values():
                log.warning("not borrowed: %s", error)
        gathered(None)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        gathered(None)
        if fleet is not None:
            for error in fleet.each(lent, _resume)[1].values():
                log.warning("not given back: %s", error)
            fleet.close()

    def _fleet(self, version: int) -> Fleet:
        keys = (self._endpoints.api_key, self._endpoints.admin_key)
        return Fleet(
            [
                Server(ServerAddress(id=i, url=url), version, *keys, self._limit_s)
                for i, url in enumerate(self._endpoints.servers)
            ]
        )


def _release(server: Server) -> None:
    server.pause("retract")
    server.release_memory()


def _resume(server: Server) -> None:
    server.resume_memory()
    server.resume()
