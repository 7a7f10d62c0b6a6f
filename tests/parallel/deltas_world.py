"""One rank of test_deltas: a learner of TP x PP x EP publishes deltas over a history of
kills, and all servers always hold its bits.

`python -m tests.parallel.deltas_world MODEL RANKS PUBLICATIONS KILLS` with MODEL a
Hugging Face directory of bf16, to servers of RANKS ranks.

The servers are stand-ins in rank 0's process, and so is the way to them: no HTTP, no
group. What they stand in for is the loader of SGLang and what it may do to a tensor
(join it with others, keep only a rank's part of it). Publisher, LastSent and the codec
are the real ones.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Publish, Published, ServerAddress
from megarl.core.base.ranks import gathered
from megarl.core.client.client import HeldChecksums
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.models.families import Family
from megarl.core.recipe import Recipe
from megarl.core.sync.checksum import checksum, written
from megarl.core.sync.delta import load
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served import as_held, place
from megarl.core.sync.transport import Sent, SentChecksums
from tests.stack.publish_world import nudge

NO_ENDPOINTS: Any = None
CHECKPOINT_EVERY = 25


class StandIn(Module):
    """A server: parameters as SGLang joins them, or each tensor's rows divided among
    the ranks.
    """

    def __init__(
        self, number: int, ranks: int, family: Family, tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        super().__init__()
        self.address = ServerAddress(number, "", tensor_parallel=ranks)
        self.family = family
        self.dies_after = -1
        held = {
            where: torch.zeros(0, dtype=torch.bfloat16) for where, _, _ in self._pieces(tensors)
        }
        for where, start, piece in self._pieces(tensors):
            short = start + piece.numel() - len(held[where])
            held[where] = torch.cat([held[where], torch.zeros(max(0, short), dtype=piece.dtype)])
        for where, values in held.items():
            self.register_parameter(where.replace(".", "/"), Parameter(values, requires_grad=False))
        self.load_weights(tensors)

    def _pieces(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int, Tensor]]:
        """Where each tensor goes: name of a parameter, first element."""
        for name, tensor in tensors:
            if self.address.tensor_parallel == 1:
                part = place(name, tensor, self.family.architecture)
                yield (
                    part.name,
                    part.start // tensor.itemsize,
                    as_held(name, tensor, self.family.architecture),
                )
            else:
                for rank, rows in enumerate(tensor.chunk(self.address.tensor_parallel)):
                    yield f"{name}/{rank}", 0, rows

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        held = dict(self.named_parameters())
        for where, start, piece in self._pieces(tensors):
            if self.dies_after == 0:
                raise MegarlError("killed")
            self.dies_after -= 1
            held[where.replace(".", "/")].data[start : start + piece.numel()].view(
                piece.shape
            ).copy_(piece)

    async def checksums(self) -> HeldChecksums:
        each = {
            name.replace("/", "."): written(int(checksum(p))) for name, p in self.named_parameters()
        }
        ranks = (each,) if self.address.tensor_parallel == 1 else ()
        return HeldChecksums(str(sorted(each.items())), ranks)

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...


class StandInFleet:
    """Calls, one after the other."""

    def __init__(self, servers: dict[int, StandIn], version: int) -> None:
        self.servers = servers
        self.version = version

    def call_each(
        self, ids: Iterable[int], call: Callable[[Any], Coroutine[Any, Any, Any]]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        results = {}
        for i in ids:
            try:
                call(self.servers[i]).send(None)
            except StopIteration as done:
                results[i] = done.value
        return results, {}


class InProcess:
    """The way to them: every stage's tensors by way of all ranks, in place of the
    transports.
    """

    staged = False

    def __init__(self, chunks: Sequence[Module], family: Family, last: LastSent) -> None:
        self._chunks = chunks
        self._family = family
        self._last = last

    def send(self, fleet: Any, ids: Sequence[int], version: int) -> Sent:
        sums = SentChecksums(self._family.architecture)
        tensors = sums.watch(hf.export(self._chunks, self._family, stacked=False))
        source = parallel_state.get_tensor_model_parallel_rank() == 0
        mine = [
            (name, tensor.clone())
            for name, tensor in (self._last.changed(tensors) if source else tensors)
        ]
        stages = [stage for stage in gathered((mine, sums.expected()) if source else None) if stage]
        sent = [pair for pairs, _ in stages for pair in pairs]
        errors = {}
        for i in ids if dist.get_rank() == 0 else ():
            try:
                load(fleet.servers[i], fleet.servers[i].load_weights, sent)
            except MegarlError as error:
                errors[i] = str(error)
        expected = {name: value for _, checksums in stages for name, value in checksums.items()}
        return Sent(errors, expected, sum(tensor.nbytes for _, tensor in sent))


class Learner:
    """A rank of a learner that publishes every step, and may be killed: it then goes on
    from its last checkpoint.
    """

    def __init__(self, recipe: Recipe, model: Path) -> None:
        self.family = family_of(model)
        self._recipe = recipe
        self._chunks = build.build(recipe.model, model)
        hf.load(self._chunks, self.family, model)
        self._publisher = self._new_publisher()
        self._save(0)

    def train(self, version: int) -> None:
        nudge(self._chunks, version)
        if version % CHECKPOINT_EVERY == 0:
            self._save(version)

    def restart(self, version: int) -> None:
        """Die, load the last checkpoint, and repeat the steps up to `version`."""
        named = hf.named_tensors(self._chunks)
        for (_, parameter), values in zip(named, self._saved, strict=True):
            parameter.data.copy_(values)
        for step in range(self._checkpoint + 1, version + 1):
            nudge(self._chunks, step)
        self._publisher = self._new_publisher()

    def publish(self, servers: dict[int, StandIn], version: int) -> Published | None:
        fleet: Any = StandInFleet(servers, version)
        return self._publisher._publish(fleet, Publish(version, ()), "test")

    def whole_model(self) -> list[tuple[str, Tensor]]:
        return whole_model(self._chunks, self.family)

    def _save(self, version: int) -> None:
        self._checkpoint = version
        self._saved = [p.detach().clone() for _, p in hf.named_tensors(self._chunks)]

    def _new_publisher(self) -> Publisher:
        publisher = Publisher(self._recipe, NO_ENDPOINTS, self._chunks, self.family)
        publisher._transport = InProcess(self._chunks, self.family, publisher._last)
        return publisher


class Servers:
    """Servers by their ids. Each starts with the weights of the model's directory."""

    def __init__(self, ranks: int, family: Family, first: list[tuple[str, Tensor]]) -> None:
        self._arguments = (ranks, family, first)
        self.by_id: dict[int, StandIn] = {}
        for i in range(4):
            self.start(i)

    def start(self, i: int) -> None:
        """Start a server, in place of the one of this id."""
        self.by_id[i] = StandIn(i, *self._arguments)


@dataclass
class Counts:
    """What happened: publications of changes and of all weights, kills, and servers
    that reported an error.
    """

    deltas: int = 0
    full: int = 0
    kills: int = 0
    failed: int = 0


def kill_one(learner: Learner, servers: Servers, version: int, draw: random.Random) -> None:
    """Kill a server or the learner, or replace a server by one of a new id."""
    victim = draw.choice(list(servers.by_id))
    match draw.choice(("server", "in the middle", "learner", "joins")):
        case "server":
            servers.start(victim)
        case "in the middle":
            servers.by_id[victim].dies_after = draw.randrange(1, 40)
        case "learner":
            learner.restart(version)
        case "joins":
            del servers.by_id[victim]
            servers.start(max(servers.by_id) + 1)


def count(
    published: Published, servers: Servers, weights: list[tuple[str, Tensor]], counts: Counts
) -> None:
    """Count a publication. Servers that failed are restarted, as their supervisor does;
    all others must hold `weights`.
    """
    everything = sum(tensor.nbytes for _, tensor in weights)
    counts.deltas += published.bytes_sent < everything
    counts.full += published.bytes_sent == everything
    for result in published.results:
        if result.error:
            counts.failed += 1
            servers.start(result.id)
        else:
            server = servers.by_id[result.id]
            assert holds(server, weights), f"server {result.id} at version {published.version}"


def main(model: Path, ranks: int, publications: int, kills: int) -> None:
    recipe = recipes.from_tree(
        {
            "model": {
                "path": str(model),
                "dtype": "bf16",
                "tensor_parallel": 2,
                "pipeline_parallel": 2,
                "expert_parallel": 2,
            },
            "resources": {"learner_ranks": int(os.environ["WORLD_SIZE"])},
            "weights": {"full_every": 40},
        }
    )
    parallel.start(recipe.model, seed=0, timeout_s=60)
    learner = Learner(recipe, model)
    servers = Servers(ranks, learner.family, learner.whole_model())
    draw = random.Random(0)
    killed_at = set(draw.sample(range(2, publications), kills))
    counts = Counts()
    for version in range(1, publications + 1):
        learner.train(version)
        if version in killed_at:
            counts.kills += 1
            kill_one(learner, servers, version, draw)
        held_back = draw.choice(list(servers.by_id)) if draw.random() < 0.05 else -1
        asked = {i: server for i, server in servers.by_id.items() if i != held_back}
        published = learner.publish(asked, version)
        weights = learner.whole_model()
        if published is not None:
            count(published, servers, weights, counts)
    if dist.get_rank() == 0:
        print(json.dumps(asdict(counts)), flush=True)
    parallel.stop()


def whole_model(chunks: Sequence[Module], family: Family) -> list[tuple[str, Tensor]]:
    """All stages' tensors, without any of what publication uses."""
    mine = [(name, tensor.clone()) for name, tensor in hf.export(chunks, family, stacked=False)]
    source = parallel_state.get_tensor_model_parallel_rank() == 0
    return [pair for stage in gathered(mine if source else []) for pair in stage]


def holds(server: StandIn, tensors: list[tuple[str, Tensor]]) -> bool:
    """Whether the server's bits are these tensors', and nothing else."""
    held = {name.replace("/", "."): p.detach() for name, p in server.named_parameters()}
    seen = dict.fromkeys(held, 0)
    for where, start, piece in server._pieces(tensors):
        key = where.replace("/", ".")
        seen[key] += piece.numel()
        if not torch.equal(
            held[key][start : start + piece.numel()].view(torch.int16),
            piece.reshape(-1).view(torch.int16),
        ):
            return False
    return all(seen[name] == len(values) for name, values in held.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
