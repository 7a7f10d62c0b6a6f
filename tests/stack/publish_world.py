"""One rank of a learner that publishes: model after model, layout after layout.

`python -m tests.stack.publish_world RECIPE URL FIRST_VERSION PLAN`; rank 0 prints one
line of JSON a publication. PLAN (JSON) lists {"model": directory, "overrides": of the
recipe, "backend": of its process group}. With NUDGED in place of a model's name, the
previous publisher publishes its model again with a few bits changed; with BROKEN, too,
and the last rank fails to send the first time; with UNMADE, it publishes the same model
again, and the last rank has no memory for any bucket; with SAME, a new publisher
publishes the same model.
"""

import functools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megarl.core import recipe as recipes
from megarl.core.base.messages import Publish, Published, ServerAddress
from megarl.core.base.rundir import RunDir
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.sync import process_group, transport
from megarl.core.sync.broadcast import BroadcastGroup
from megarl.core.sync.delta import INTEGERS
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.transport import Bucket
from tests import pessimistic_nccl  # noqa: F401  a backend that an entry may name
from tests.parallel.worlds import run_world
from tests.stack.conftest import Stack

NUDGED = "nudged"
BROKEN = "broken"
UNMADE = "unmade"
SAME = "same"
NO_MEMORY = "CUDA out of memory, for a test"


def publish_from(
    stack: Stack, ranks: int, first_version: int, publications: Sequence[tuple[str, list[str], str]]
) -> list[tuple[str, str, int]]:
    """Run a world that publishes these (name of a model, overrides, backend): error,
    checksum, bytes of each.
    """
    recipe = stack.recipe
    plan = [
        {"model": str(stack.directory / name), "overrides": overrides, "backend": backend}
        for name, overrides, backend in publications
    ]
    path = stack.directory / "plan.json"
    path.write_text(json.dumps(plan))
    arguments = (
        str(RunDir(recipe.run.path).recipe),
        stack.server.address.url,
        str(first_version),
        str(path),
    )
    output = run_world(ranks, "tests.stack.publish_world", *arguments)
    found = [tuple(json.loads(line)) for line in output.splitlines() if line.startswith("[")]
    assert len(found) == len(publications), output
    return found


def main(path: str, url: str, first_version: int, plan: list[dict[str, Any]]) -> None:
    chunks: Sequence[Module] = ()
    for version, entry in enumerate(plan, first_version):
        recipe = recipes.load(
            path, [*entry["overrides"], f"resources.learner_ranks={os.environ['WORLD_SIZE']}"]
        )
        parallel.start(recipe.model, seed=0, timeout_s=60)
        directory = Path(entry["model"])
        process_group.backend = functools.partial(str, entry["backend"])
        process_group.buckets = transport.buckets
        last_rank = dist.get_rank() == dist.get_world_size() - 1
        if directory.name == UNMADE and last_rank:
            process_group.buckets = no_memory  # type: ignore[assignment]
        elif directory.name in (NUDGED, BROKEN):
            nudge(chunks, version)
            if directory.name == BROKEN and last_rank:
                fail_to_send()
        elif directory.name not in (SAME, UNMADE):
            family = family_of(directory)
            chunks = build.build(recipe.model, directory)
            hf.load(chunks, family, directory)
        if directory.name not in (NUDGED, BROKEN, UNMADE):
            publisher = Publisher(recipe, RunDir(recipe.run.path).endpoints(), chunks, family)
        address = ServerAddress(
            id=0, url=url, tensor_parallel=recipe.resources.server_tensor_parallel
        )
        command = Publish(version=version, servers=(address,))
        say(publisher.publish(command, "test"))
    parallel.stop()


@torch.no_grad()
def nudge(chunks: Sequence[Module], seed: int, share: float = 0.01) -> None:
    """Change so many values by one, the same ones on all ranks that hold them."""
    for name, parameter in hf.named_tensors(chunks):
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        chosen = torch.rand(parameter.shape, generator=draw) < share
        parameter.data.view(INTEGERS[parameter.itemsize]).add_(chosen)


def fail_to_send() -> None:
    real = BroadcastGroup.send

    def fail(self: BroadcastGroup, *what: Any) -> Any:
        BroadcastGroup.send = real
        raise RuntimeError("fails once, for a test")

    BroadcastGroup.send = fail  # type: ignore[assignment]


def no_memory(tensors: Iterator[tuple[str, Tensor]], *limits: float) -> Iterator[Bucket]:
    """Replace transport.buckets: fail with the second tensor."""
    next(tensors)
    next(tensors)
    raise torch.OutOfMemoryError(NO_MEMORY)
    yield


def say(published: Published | None) -> None:
    if dist.get_rank() == 0:
        assert published is not None
        (result,) = published.results
        values = (result.error, result.checksum, published.bytes_sent)
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
