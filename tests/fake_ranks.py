"""What ranks of a learner hold, without the memory for it: torch's fake tensors, and a
process group of only this process.

`main` builds, in a process of its own, what the learner builds on each of some ranks,
and prints a line of JSON for each.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from megarl.core.models import build, family_of, hf, parallel

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.core import recipe as recipes
from megarl.core.base.architecture import CONFIGS
from megarl.core.learner.optimizer import with_optimizer
from megarl.core.models import checkpoint
from megarl.core.recipe import Recipe
from megarl.core.sync.process_group import ProcessGroupTransport
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import buckets
from megarl.shims.megatron_cpu import after_megatron_import


def held(recipe: Recipe, rank: int) -> dict[str, Any]:
    """Count, sizes in bytes: what this rank of the recipe's learner holds, and the
    buckets that it makes for servers.
    """
    model, directory = recipe.model, Path(recipe.model.path)
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=recipe.resources.learner_ranks
    )
    parallel_state.initialize_model_parallel(
        model.tensor_parallel,
        model.pipeline_parallel,
        parallel.virtual_stages(model),
        context_parallel_size=model.context_parallel,
        expert_model_parallel_size=model.expert_parallel,
        expert_tensor_parallel_size=model.expert_tensor_parallel,
        create_gloo_process_groups=False,
    )
    parallel_state.get_data_parallel_group_gloo = parallel_state.get_data_parallel_group
    parallel_state.get_expert_data_parallel_group_gloo = (
        parallel_state.get_expert_data_parallel_group
    )
    parallel.model_parallel_cuda_manual_seed(1)
    family = family_of(directory)
    limit = recipe.weights.bucket_mb << 20
    weights = ServedWeights((), family, fp8=False)
    links = recipe.resources.server_tensor_parallel
    sends = ProcessGroupTransport(weights, LastSent(1), limit, 60, links)
    with FakeTensorMode(allow_non_fake_inputs=True):
        chunks = build.build(model, directory)
        saved = [
            shard for part in checkpoint.model_state(chunks).values() for shard in part.values()
        ]
        sizes = [
            bucket.flat.nbytes
            for bucket in buckets(hf.export(chunks, family, stacked=False), limit)
        ]
        part = hf.export(chunks, family, stacked=False, part=sends._copy, parts=sends._copies)
        ddp, optimizer, _ = with_optimizer(chunks, recipe.learner.optimizer, recipe)
        buffers = [
            buffer
            for network in ddp
            for buffer in (*network.buffers, *network.expert_parallel_buffers)
        ]
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        main = [p for part in parts for group in part.shard_fp32_from_float16_groups for p in group]
        own = [
            p for part in parts for group in part.shard_fp32_groups for p in group
        ]  # FP32 already, with moments alone
        found = {
            "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            "weights": sum(buffer.param_data.nbytes for buffer in buffers),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "adamw": 3 * sum(p.nbytes for p in main) + 2 * sum(p.nbytes for p in own),
            "saved": sum(
                shard.data.nbytes
                for shard in saved
                if hasattr(shard, "data") and shard.data is not None
            ),
            "buckets": len(sizes),
            "largest_bucket": max(sizes),
            "published": sum(sizes),
            "group": [sends._group_number, sends._groups],
            "sent": sum(tensor.nbytes for _, tensor in part) if sends._source else 0,
        }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def everyone_says(values: list[Any], mine: Any, group: object = None) -> None:
    values[:] = [mine] * len(values)


def main(name: str, config: str, ranks: list[int], overrides: list[str]) -> None:
    """config: a name in megarl/core/base/configs. overrides: of the recipe `name`."""
    after_megatron_import()
    dist.all_gather_object = everyone_says
    dist.broadcast_object_list = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text((CONFIGS / f"{config}.json").read_text())
        recipe = recipes.load(name, [f"model.path={folder}", *overrides])
        for rank in ranks:
            print(json.dumps({"rank": rank} | held(recipe, rank)), flush=True)
