"""Servers release their KV memory while the learner trains a step
(Recipe.lends_memory).

    pause, requests retracted ─► release ─► the learner trains
        ─► it frees its unused memory ─► resume ─► continue

Retracted requests wait without any memory and are recomputed afterwards; in the
configurations that allow this, only requests of an evaluation can be running. A learner
that dies in between leaves the servers paused until the next learner's publication
wakes them (publisher.py). A server that does not answer is left as it is.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist

from megarl.core.base.messages import ServerAddress
from megarl.core.base.ranks import gathered
from megarl.core.base.rundir import Endpoints
from megarl.core.client.client import ServerClient
from megarl.core.client.fleet import Call
from megarl.core.client.membership import listed
from megarl.core.recipe import Recipe
from megarl.core.sync.transport import open_fleet

log = logging.getLogger(__name__)

LEAST_RELEASED = 2 << 20
"""Bytes. torch_memory_saver releases whole pages of the GPU, of 2 MiB, two for each
layer or more.
"""


class Offload:
    """One learner rank's part in lending the servers' memory."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints) -> None:
        self._on = recipe.lends_memory
        self._limit_s = recipe.weights.timeout_s
        self._endpoints = endpoints
        self._width = recipe.resources.server_tensor_parallel
        self._measured = False

    @contextmanager
    def released(self, version: int) -> Iterator[None]:
        """Free the servers' memory within this context. version: of the weights, for
        error messages. COLLECTIVE.
        """
        if not self._on:
            yield
            return
        leader = dist.get_rank() == 0
        gathered(None)  # no rank's memory changes while another's is measured
        free_before = _free_bytes()
        servers: list[int] = []
        if leader:
            servers = self._call_each(range(len(self._endpoints.servers)), _release, version)
        gathered(None)
        if torch.cuda.is_available() and not self._measured:
            released = gathered(_free_bytes() - free_before)
            if leader:
                self._compare(servers, released)
            self._measured = True
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        gathered(None)
        if servers:
            self._call_each(servers, _resume, version)

    def _compare(self, servers: Iterable[int], released: Sequence[int]) -> None:
        """Warn of servers that said they had released memory, while a GPU of theirs has
        no more of it free than before.

        released: bytes, by rank. The ranks of server i are on the GPUs of the learner's
        ranks from i times its width on (run/placement.py).
        """
        faulty = []
        for i in servers:
            on_its_gpus = released[i * self._width : (i + 1) * self._width]
            if min(on_its_gpus) < LEAST_RELEASED:
                faulty.append(i)
        if faulty:
            log.warning(
                "memory: %s released nothing, though asked to lend KV memory for the step, and the"
                " learner may run out of it. torch_memory_saver's library has to be preloaded into"
                " a server's ranks (LD_PRELOAD in /proc/PID/environ names it, /proc/PID/maps shows"
                " it) and needs libcudart.so.13: add its folder to LD_LIBRARY_PATH, or set"
                " pipeline.k to 1 or more, with which servers keep their memory",
                listed(faulty),
            )

    def _call_each(self, ids: Iterable[int], call: Call[None], version: int) -> list[int]:
        """Call these servers; return the ids of those for which the call succeeded."""
        servers = [ServerAddress(id=i, url=self._endpoints.servers[i]) for i in ids]
        with closing(open_fleet(servers, self._endpoints, self._limit_s, version)) as fleet:
            done, failed = fleet.call_each(fleet.servers, call)
        for error in failed.values():
            log.warning("memory: %s", error)
        return list(done)


def _free_bytes() -> int:
    """Return the bytes that are free on this rank's GPU, for all its processes; 0
    without a GPU.
    """
    if not torch.cuda.is_available():
        return 0
    free, _total = torch.cuda.mem_get_info()
    return free


async def _release(server: ServerClient) -> None:
    """Make a server give up its KV memory, and its requests what they have in it."""
    await server.pause("retract")
    await server.release_memory()


async def _resume(server: ServerClient) -> None:
    """Give a server its memory back, and let it go on."""
    await server.resume_memory()
    await server.resume()
