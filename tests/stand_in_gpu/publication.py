"""Publications to one server, both sides on the stand-in for a GPU: what the server
holds otherwise than it was sent is named.

`python -m tests.stand_in_gpu.publication DIR FILE`: DIR has a Hugging Face directory
for each name in MODELS; FILE gets, as JSON, for each model the parameters that the
server answered for, and the errors of three publications (see `errors`).
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import stand_in_gpu

if __name__ == "__main__":
    stand_in_gpu.install()

from megarl.core import recipe as recipes
from megarl.core.base import device
from megarl.core.base.architecture import Architecture
from megarl.core.base.device import DeviceIdentity
from megarl.core.base.messages import Publish, ServerAddress
from megarl.core.base.rundir import Endpoints, LinkKeys
from megarl.core.client.client import HeldChecksums, ServerClient
from megarl.core.client.fleet import Fleet
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from megarl.core.sync import cuda_ipc, publisher
from megarl.core.sync.checksum import checksum, multiplies_exactly, written
from megarl.core.sync.served import as_held, place
from megarl.core.sync.transport import Bucket
from tests.tiny import tiny_llama, tiny_llama4, tiny_qwen3_moe

MODELS = {"llama": tiny_llama, "qwen3_moe": tiny_qwen3_moe, "llama4": tiny_llama4}
SETTINGS = {"llama4": {"moe": {"freeze_router": True}}}
ADDRESS = ServerAddress(id=0, url="http://127.0.0.1:1")
VICTIM = {
    "llama": "model.layers.1.self_attn.k_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "llama4": "model.layers.1.feed_forward.experts.2.down_proj.weight",
}


class Server(ServerClient):
    """It holds what it takes as SGLang does, in whole parameters; the tensor `victim`
    not quite, or not at all.
    """

    def __init__(self, model: Architecture, victim: str = "", lost: bool = False) -> None:
        super().__init__(ADDRESS, "", "", 20)
        self._model = model
        self._victim = victim
        self._lost = lost
        self._parts: dict[str, dict[int, Tensor]] = defaultdict(dict)

    async def nothing(self, *_: object) -> None: ...

    pause = resume = resume_memory = abort_all = begin_update = end_update = nothing  # type: ignore[assignment]

    async def device_identity(self) -> DeviceIdentity:
        return device.of_rank()

    async def take(self, handles: list[Any], complete: int | None) -> None:
        bucket: Bucket = handles[0]
        sizes = [
            torch.Size(shape).numel() * getattr(torch, kind).itemsize
            for kind, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
        ]
        pieces = bucket.flat.split(sizes)
        for name, kind, shape, flat in zip(
            bucket.names, bucket.dtypes, bucket.shapes, pieces, strict=True
        ):
            tensor = as_held(name, flat.clone().view(getattr(torch, kind)).view(shape), self._model)
            served, start = place(name, tensor, self._model)
            if name == self._victim:
                tensor.view(-1).view(torch.int16)[5:6].bitwise_xor_(1)  # the last bit of one number
                if self._lost:
                    tensor.zero_()
            self._parts[served][start] = tensor

    async def checksums(self) -> HeldChecksums:
        with stand_in_gpu.on_stand_in_gpu():  # a mode is its thread's
            whole = {
                name: torch.cat([parts[at].flatten() for at in sorted(parts)])
                for name, parts in self._parts.items()
            }
            assert {tensor.device.type for tensor in whole.values()} == {"cuda"}
            assert multiplies_exactly(stand_in_gpu.GPU)
            sums = {name: written(int(checksum(tensor))) for name, tensor in whole.items()}
            on_cpu = {name: written(int(checksum(tensor.cpu()))) for name, tensor in whole.items()}
        assert sums == on_cpu
        return HeldChecksums("whole", (sums,))


def errors(directory: Path, name: str) -> tuple[int, list[str]]:
    """Return how many parameters the server has, and the errors of a publication that
    arrives, of one in which a bit is changed on the way, and of one in which a tensor
    stays zero.
    """
    recipe = recipes.from_tree(
        {
            "run": {"name": "run", "dir": str(directory)},
            "model": {"path": str(directory / name)} | SETTINGS.get(name, {}),
            "resources": {"colocate": True},
            "pipeline": {"k": 0},
            "weights": {"transport": "cuda_ipc"},
            "serving": {"memory_fraction": 0.5},
        }
    )
    parallel.start(recipe.model, seed=1, timeout_s=60)
    policy = Trainer(recipe, directory / name).policy
    endpoints = Endpoints(
        session="test",
        controller="tcp://127.0.0.1:1",
        servers=(ADDRESS.url,),
        api_key="",
        admin_key="",
        link=LinkKeys.new(),
        rendezvous_port=1,
    )
    by = publisher.Publisher(recipe, endpoints, policy.chunks, policy.family)
    model = policy.family.architecture
    found = []
    servers = [Server(model), Server(model, VICTIM[name]), Server(model, VICTIM[name], lost=True)]
    for version, server in enumerate(servers, 1):
        publisher.open_fleet = lambda *_, server=server, version=version: Fleet([server], version)
        published = by.publish(Publish(version=version, servers=(ADDRESS,)), "test")
        assert published is not None
        found.append(published.results[0].error)
    return len(servers[0]._parts), found


def main(directory: Path, file: Path) -> None:
    # There is no memory to share.
    cuda_ipc.handle = lambda bucket: bucket  # type: ignore[assignment, return-value]
    with stand_in_gpu.on_stand_in_gpu():
        found = {name: errors(directory, name) for name in MODELS}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
