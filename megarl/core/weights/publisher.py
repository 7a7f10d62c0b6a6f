"""Publication of the learner's weights to the servers, in flight: requests go on over it.

    pause all ─► transport (process_group.py | cuda_ipc.py | disk.py) ─► checksums ─► continue ─► Published
                 └ a server that fails is left out; its half-replaced weights answer nobody: its requests are aborted

The law of errors: whatever happens to one server, the others end with the new version, running, and the caller gets a result
for each server within bounded time. A server that did not get the new weights, whole, has an error in its result.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
from torch.nn import Module

from megarl.core.base.messages import Publish, Published, ServerResult
from megarl.core.base.ranks import from_rank_0
from megarl.core.base.rundir import Endpoints, RunDir
from megarl.core.models.family import Family
from megarl.core.recipe import Recipe
from megarl.core.server.client import Fleet, ServerClient
from megarl.core.server.served import rotary_head_dim
from megarl.core.weights.checksum import differing
from megarl.core.weights.cuda_ipc import CudaIpcTransport
from megarl.core.weights.disk import DiskTransport
from megarl.core.weights.process_group import ProcessGroupTransport
from megarl.core.weights.transport import Sent, Transport

log = logging.getLogger(__name__)


def transport_of(recipe: Recipe, chunks: Sequence[Module], family: Family) -> Transport:
    """That of weights.transport."""
    weights, source = recipe.weights, Path(recipe.model.path)
    flush, bucket_bytes = weights.pause == "retract", weights.bucket_mb << 20
    if weights.transport == "disk":
        return DiskTransport(chunks, family, source, RunDir(recipe.run.path).weights, flush)
    turned = rotary_head_dim(family.architecture)
    if weights.transport == "cuda_ipc":
        return CudaIpcTransport(chunks, family, bucket_bytes, flush, turned)
    return ProcessGroupTransport(chunks, family, bucket_bytes, weights.timeout_s, flush, turned)


class Publisher:
    """Of one learner rank; `publish` is collective over all of them."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints, chunks: Sequence[Module], family: Family) -> None:
        self._endpoints = endpoints
        self._pause = recipe.weights.pause
        self._limit_s = recipe.weights.timeout_s
        self._wakes = recipe.serving.release_memory
        self._transport = transport_of(recipe, chunks, family)

    def publish(self, command: Publish, incarnation: str) -> Published | None:
        """Bring the command's servers to the weights this learner has now. COLLECTIVE; only rank 0 gets the result.

        Errors of servers are in the result. Raises only for what is wrong on the learner's side.
        """
        keys = (self._endpoints.api_key, self._endpoints.admin_key)
        clients = [ServerClient(a, *keys, self._limit_s) for a in command.servers]
        with closing(Fleet(clients, command.version)) as fleet:
            return self._publish(fleet, command, incarnation)

    def _publish(self, fleet: Fleet, command: Publish, incarnation: str) -> Published | None:
        leader = dist.get_rank() == 0
        errors: dict[int, str] = {}
        checksums: dict[int, str] = {}
        sent: Sent | None = None
        started = time.monotonic()
        try:
            if leader:
                _, failed = fleet.each(list(fleet.servers), self._stop)
                errors |= {i: str(error) for i, error in failed.items()}
            errors = from_rank_0(errors)
            paused = time.monotonic()
            sent = self._transport.send(fleet, [i for i in fleet.servers if i not in errors], command.version)
            errors |= sent.errors
            if leader:
                checksums = self._compare(fleet, sent, errors, command.version)
            transferred = time.monotonic()
        finally:
            if leader:
                dirty = [i for i in fleet.servers if sent is None or i in errors]
                fleet.each(dirty, lambda server: server.abort_all())
                _, failed = fleet.each(list(fleet.servers), lambda server: server.resume())
                errors |= {i: errors.get(i, str(error)) for i, error in failed.items()}
        resumed = time.monotonic()
        if not leader:
            return None
        for text in errors.values():
            log.error("%s", text)
        return Published(
            incarnation=incarnation,
            version=command.version,
            results=tuple(
                ServerResult(id=i, error=errors.get(i, ""), checksum=checksums.get(i, "")) for i in fleet.servers
            ),
            pause_seconds=paused - started,
            transfer_seconds=transferred - paused,
            resume_seconds=resumed - transferred,
            bytes_sent=sent.bytes,
        )

    async def _stop(self, server: ServerClient) -> None:
        """Pause it, with all its memory, of which a learner that has died may have borrowed a part."""
        await server.pause(self._pause)
        if self._wakes:
            await server.resume_memory()

    def _compare(self, fleet: Fleet, sent: Sent, errors: dict[int, str], version: int) -> dict[int, str]:
        """Checksum of each server; adds those to `errors` that differ from what was sent, or from the other servers."""
        answers, failed = fleet.each([i for i in fleet.servers if i not in errors], lambda server: server.checksums())
        errors |= {i: str(error) for i, error in failed.items()}
        for i, (_, parameters) in answers.items():
            wrong = differing(sent.checksums, parameters or {})
            if wrong:
                errors[i] = f"publishing version {version} to server {i}: checksum: {len(wrong)} differ, as {wrong[0]}"
        sums = {i: whole for i, (whole, _) in answers.items() if i not in errors}
        common = max(set(sums.values()), key=list(sums.values()).count, default="")
        for i, whole in sums.items():
            if whole != common:
                errors[i] = f"publishing version {version} to server {i}: checksum: {whole[:12]}, others {common[:12]}"
        return sums
