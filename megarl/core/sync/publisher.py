"""Publication of the learner's weights to the servers, in flight: requests continue
across it.

    process_group.py, while the servers generate
        transport ─► checksums ─► pause all ─► swap ─► continue ─► Published
    the same, to servers of several GPUs (Recipe.generates_meanwhile)
        pause all ─► transport ─► checksums ─► swap ─► continue ─► Published
    cuda_ipc, disk: no memory for a second copy
        pause all ─► transport ─► checksums ─► continue ─► Published
          └ a server that fails is left out: its requests are aborted

With weights.full_every some publications send only what changed, as deltas
(sync/delta.py).

The law of errors: whatever happens to one server, the others end up running with the
new version, and the caller gets a result for each server within bounded time. The
result of a server that did not get all new weights has an error, and so have those of
all servers if the learner could not compute the checksums of what it sent.

An example. A learner of two tensor-parallel ranks has trained step 6, so its weights
are version 7; servers a and b still have version 6. The controller replies
`Publish(version=7, servers=(a, b))` to `Next(step=7)`; both ranks get it and call
`publish`. Each step of staging (sync/staging.py) runs in a thread on each server,
which still generates and answers when it has ended:

    rank 0                            rank 1        servers a and b
 1  begin (version 7) ───────────────────────────►  drop earlier staged weights; the
                                                    first time, make the copy
    waits for both answers;
    tells who failed ──────────────►  waits
 2  join ────────────────────────────────────────►  become ranks 1 and 2 of a group
                                                    whose rank 0 is ours
    waits until the group is formed (only the first time: it is kept)
 3  receive ─────────────────────────────────────►  wait for broadcasts
    all-gathers bucket 0 ◄─────────►  all-gathers
    begins to broadcast its names,
    types, shapes, bytes ────────────────────────►  load them into the copy while the
                                                    next arrive
    all-gathers bucket 1 meanwhile ◄► all-gathers
    waits for the broadcast, then sends bucket 1 in the same way;
    after the last bucket, the end ──────────────►  answer
 4  tells the result ◄─────────────►  waits
    (if b failed: 1 to 3 again from bucket 0, with only a)
 5  checksums ───────────────────────────────────►  answer with a checksum of every
                                                    parameter of the copy
    compares them with those of what was sent, and with each other: a server with a
    wrong checksum is not asked to swap
 6  POST /pause_generation ──────────────────────►  stop sampling, keep requests and
                                                    their KV cache, answer
    waits for both answers;
    tells who failed ──────────────►  waits, is done
 7  swap (version 7) ────────────────────────────►  write the copy to the parameters,
                                                    answer
 8  POST /continue_generation ───────────────────►  go on; their next tokens are
                                                    labelled version 7
    returns Published(version=7, …), which the learner sends to the controller: from
    then on requests may rely on version 7

Requests go to a and b all the time, and only experience the pause: their tokens before
6 have version 6, those after 8 version 7. With `cuda_ipc` and `disk`, new ones wait for
Published. With several pipeline stages, or data-parallel copies that divide the layers,
each source rank has a group: 2 happens for one after the other, 3 for all at once.
"""

import logging
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mode

import torch.distributed as dist
from torch.nn import Module

from megarl.core.base.messages import Publish, Published, ServerResult
from megarl.core.base.ranks import from_rank_0
from megarl.core.base.rundir import Endpoints, RunDir
from megarl.core.client.client import HeldChecksums, ServerClient
from megarl.core.client.fleet import Fleet
from megarl.core.client.membership import listed
from megarl.core.models.families import Family
from megarl.core.recipe import Recipe
from megarl.core.sync.checksum import multiplies_exactly
from megarl.core.sync.cuda_ipc import CudaIpcTransport
from megarl.core.sync.disk import DiskTransport
from megarl.core.sync.process_group import ProcessGroupTransport
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import Sent, Transport, differing, differing_experts, open_fleet

log = logging.getLogger(__name__)


class Publisher:
    """One rank's part in publication; `publish` is collective over all ranks."""

    def __init__(
        self, recipe: Recipe, endpoints: Endpoints, chunks: Sequence[Module], family: Family
    ) -> None:
        # Tried now, and not in the first publication.
        multiplies_exactly(next(chunks[0].parameters()).device)
        weights = recipe.weights
        self._endpoints = endpoints
        self._limit_s = weights.timeout_s
        self._wakes = recipe.lends_memory
        self._meanwhile = recipe.generates_meanwhile
        bucket_bytes = weights.bucket_mb << 20
        fp8 = recipe.serving.quantization == "fp8"
        served_weights = ServedWeights(chunks, family, fp8, recipe.expert_ranks)
        self._last = LastSent(weights.full_every)
        self._transport: Transport
        if weights.transport == "disk":
            directory = RunDir(recipe.run.path).weights
            self._transport = DiskTransport(
                served_weights, self._last, Path(recipe.model.path), directory
            )
        elif weights.transport == "cuda_ipc":
            self._transport = CudaIpcTransport(served_weights, self._last, bucket_bytes)
        else:
            links = recipe.resources.server_tensor_parallel
            self._transport = ProcessGroupTransport(
                served_weights, self._last, bucket_bytes, weights.timeout_s, links
            )

    def publish(self, command: Publish, incarnation: str) -> Published | None:
        """Send the learner's present weights to the command's servers. COLLECTIVE; only
        rank 0 gets the result, with the errors of servers. Raises only for faults on
        the learner's side.
        """
        fleet = open_fleet(command.servers, self._endpoints, self._limit_s, command.version)
        with closing(fleet):
            return self._publish(fleet, command, incarnation)

    def _publish(self, fleet: Fleet, command: Publish, incarnation: str) -> Published | None:
        """Publish to the servers of the fleet, as `publish` describes. Whatever fails,
        all servers are resumed, after those without all new weights have aborted their
        requests.
        """
        leader = dist.get_rank() == 0
        errors: dict[int, str] = {}
        checksums: dict[int, str] = {}
        sent: Sent | None = None
        started = time.monotonic()
        self._last.sends_all = from_rank_0(leader and self._needs_whole(fleet))

        def send() -> Sent:
            sent = self._transport.send(fleet, _without(fleet.servers, errors), command.version)
            errors.update(sent.errors)
            if leader:
                checksums.update(self._compare(fleet, sent, errors))
            return sent

        if self._meanwhile:
            sent = send()
        pausing = time.monotonic()
        try:
            errors |= self._pause(fleet, _without(fleet.servers, errors))
            paused = time.monotonic()
            if not self._meanwhile:
                sent = send()
            arrived = time.monotonic()
            if self._transport.staged and leader:
                complete = _without(fleet.servers, errors)
                _, failed = fleet.call_each(complete, lambda server: server.swap(command.version))
                errors |= failed
        finally:
            if leader:
                dirty = [i for i in fleet.servers if sent is None or i in errors]
                fleet.call_each(dirty, lambda server: server.abort_all())
                _, failed = fleet.call_each(fleet.servers, lambda server: server.resume())
                errors = failed | errors
        resumed = time.monotonic()
        if not leader:
            return None
        for text in errors.values():
            log.error("%s", text)
        results = tuple(
            ServerResult(id=i, error=errors.get(i, ""), checksum=checksums.get(i, ""))
            for i in fleet.servers
        )
        self._last.arrived(command.version, {i: checksums[i] for i in _without(checksums, errors)})
        assert sent is not None
        return Published(
            incarnation=incarnation,
            version=command.version,
            results=results,
            pause_seconds=paused - pausing,
            transfer_seconds=pausing - started + arrived - paused,
            resume_seconds=resumed - arrived,
            bytes_sent=sent.bytes,
            staged=self._meanwhile,
        )

    def _needs_whole(self, fleet: Fleet) -> bool:
        """Return whether some server's checksum shows that it does not have the weights
        to which deltas would be added.
        """
        expected = self._last.expected(fleet.servers)
        if expected is None:
            return True
        answers, failed = fleet.call_each(fleet.servers, lambda server: server.checksums())
        wrong = [i for i, answer in answers.items() if answer.combined != expected[i]]
        if wrong:
            log.warning(
                "%s: not the weights that were sent; sending all values of version %d",
                listed(wrong),
                fleet.version,
            )
        return bool(wrong or failed)

    def _pause(self, fleet: Fleet, ids: Iterable[int]) -> dict[int, str]:
        """Pause these servers; return errors by server id. COLLECTIVE."""
        errors: dict[int, str] = {}
        if dist.get_rank() == 0:
            _, errors = fleet.call_each(ids, self._pause_one)
        return from_rank_0(errors)

    async def _pause_one(self, server: ServerClient) -> None:
        """Pause the server in place: its requests will keep their old keys and values,
        as in PipelineRL (arXiv 2509.19128). Also resume its memory, a part of which a
        dead learner may have left released.
        """
        await server.pause("in_place")
        if self._wakes:
            await server.resume_memory()

    def _compare(self, fleet: Fleet, sent: Sent, errors: dict[int, str]) -> dict[int, str]:
        """Return each server's checksum; add to `errors` servers whose own is not that
        of what was sent, or not the others'.
        """
        checksums: dict[int, str] = {}
        problems: dict[int, str] = {}
        receivers = _without(fleet.servers, errors)
        if sent.unchecked:
            problem = f"the learner could not compute what to expect: {sent.unchecked}"
            problems = dict.fromkeys(receivers, problem)
        else:
            answers, failed = fleet.call_each(receivers, self._received_checksums)
            errors |= failed
            for i, answer in answers.items():
                wrong = _wrong_parameters(sent, answer)
                if wrong:
                    problems[i] = f"{len(wrong)} differ, such as {wrong[0]}"
                else:
                    checksums[i] = answer.combined
            problems |= _minority(checksums)
        for i, problem in problems.items():
            errors[i] = f"publishing version {fleet.version} to server {i}: checksum: {problem}"
        return checksums

    async def _received_checksums(self, server: ServerClient) -> HeldChecksums:
        if self._transport.staged:
            return await server.staged_checksums()
        return await server.checksums()


def _without(ids: Iterable[int], errors: Container[int]) -> list[int]:
    """Return the servers that have no error."""
    return [i for i in ids if i not in errors]


def _minority(checksums: Mapping[int, str]) -> dict[int, str]:
    """Describe the servers whose checksum is not the commonest one, by server id."""
    if not checksums:
        return {}
    common = mode(checksums.values())
    return {
        i: f"{checksum[:12]}, others {common[:12]}"
        for i, checksum in checksums.items()
        if checksum != common
    }


def _wrong_parameters(sent: Sent, answer: HeldChecksums) -> list[str]:
    """Return the parameters of a server whose checksums are not those of what was sent,
    as far as these are known: of one rank all of them, of several only whole experts,
    since other parameters are divided.
    """
    if len(answer.by_rank) == 1:
        return differing(sent.checksums, answer.by_rank[0])
    return differing_experts(sent.experts, answer.by_rank)
