"""One rank of test_models_layouts: every layout of its world size against transformers'
logits and gradients.

`python -m tests.parallel.models_world DIR NAME …` with DIR holding, for each model, the
Hugging Face directory and NAME.pt.
"""

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.base.architecture import Architecture
from megarl.core.models import Family, build, checkpoint, family_of, hf, parallel
from megarl.core.recipe import Model
from tests.tiny import stored_apart

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import load_file
from torch.nn import Module

SP2 = {"tensor_parallel": 2}
DENSE: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tensor_parallel": 2},
        SP2,
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
        {"context_parallel": 2},
    ],
    4: [
        SP2 | {"pipeline_parallel": 2},
        {"tensor_parallel": 2, "context_parallel": 2},
        {"tensor_parallel": 4},
    ],
}
WITH_EXPERTS: dict[int, list[dict[str, Any]]] = {
    2: [
        SP2,  # each rank has all experts whole
        SP2 | {"expert_tensor_parallel": 2},
        SP2 | {"expert_parallel": 2},
        {"expert_parallel": 2},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
        {"context_parallel": 2},
        SP2 | {"expert_parallel": 2, "recompute": "full"},
        {"pipeline_parallel": 2, "recompute": "selective"},
        SP2 | {"expert_parallel": 2, "recompute": "light"},
        {"expert_parallel": 2, "shared_overlap": True},
        SP2 | {"expert_parallel": 2, "shared_overlap": True, "recompute": "selective"},
    ],
    4: [
        SP2 | {"expert_parallel": 2, "expert_tensor_parallel": 2},
        {"expert_tensor_parallel": 2},  # experts divided, the rest not
        SP2 | {"expert_parallel": 2},  # two data-parallel copies, also of each expert
        {"pipeline_parallel": 2, "expert_parallel": 2},
        {"context_parallel": 2, "expert_parallel": 4},
    ],
}


def main(directory: Path, names: list[str]) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for path in (directory / name for name in names):
        written = None
        for i, layout in enumerate(layouts_of(family_of(path).architecture, world)):
            recompute = layout.get("recompute", "none")
            moe = {"shared_overlap": layout.get("shared_overlap", False)}
            parallel_sizes = {
                k: v for k, v in layout.items() if k not in ("recompute", "shared_overlap")
            }
            model = Model.model_validate(
                {"path": str(path), "dtype": "fp32", "moe": moe} | parallel_sizes
            )
            output = directory.parent / f"{path.name}-{world}-{i}"
            written = check(path, model, recompute, f"{path.name} {layout}", output, written)
    parallel.stop()


def layouts_of(architecture: Architecture, world: int) -> list[dict[str, Any]]:
    """The layouts of so many ranks that are not refused for this model."""
    layouts = WITH_EXPERTS if architecture.experts else DENSE
    return [layout for layout in layouts[world] if not is_refused(architecture, layout)]


def is_refused(architecture: Architecture, layout: dict[str, Any]) -> bool:
    if "expert_tensor_parallel" in layout and architecture.biases:
        return True  # megatron does not divide experts' biases
    if "virtual_pipeline_parallel" in layout and architecture.layers % 4:
        return True  # all chunks have as many layers
    return "shared_overlap" in layout and not architecture.shared_feed_forward


def check(
    path: Path, model: Model, recompute: str, what: str, output: Path, other: Path | None
) -> Path:
    """`other`: a distributed checkpoint written at another layout. Returns the one
    written at this layout under `output`.
    """
    forget_models()
    parallel.start(model, seed=1, timeout_s=60)
    family = family_of(path)
    chunks = build.build(model, path, recompute=recompute)
    hf.load(chunks, family, path)
    stored = stored_apart(path)
    exported = {name: tensor.clone() for name, tensor in hf.export(chunks, family)}
    same = all(torch.equal(stored[name], tensor) for name, tensor in exported.items())
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(exported))
    stages = {frozenset(n) for n in names}
    assert same, f"{what}: export differs from the directory"
    trained = [name for name in stored if not family.passthrough(name)]
    assert sum(map(len, stages)) == len(trained), (
        f"{what}: a tensor is exported by no stage or by two"
    )
    check_parts(chunks, family, what)

    reference = torch.load(path.with_suffix(".pt"))
    ddp = with_gradients(chunks)
    # Weights of chosen experts that add up to 2.5 widen roundings: transformers' own
    # gradients are 1.8e-6 off float64 there.
    wide = family.architecture.router == "balanced"
    logit_limit = 8e-6 if wide else 5e-6
    gradient_limit = 4e-6 if wide else 2e-6
    if family.architecture.delta:  # see tests/unit/core/models/test_families.py
        logit_limit = 2e-5
        gradient_limit = 1e-5
    for case in ("unpacked", "packed"):
        if case == "unpacked" and model.context_parallel > 1:
            continue
        logits = forward_backward(ddp, family, reference[case])
        if logits:
            difference = max(
                (a - b).abs().max().item()
                for a, b in zip(logits, reference[case]["logits"], strict=True)
            )
            assert difference <= logit_limit, f"{what}: {case} logits differ by {difference:.1e}"
            print(f"{what}: {case} logits {difference:.1e}", flush=True)
        worst = gradient_difference(chunks, family, reference[case]["gradients"])
        # Two roundings of float32, each about 1e-6 of the largest gradient.
        assert worst <= gradient_limit, f"{what}: {case} gradients differ by {worst:.1e}"
        print(f"{what}: {case} gradients {worst:.1e}", flush=True)

    hf.SHARD_BYTES = 1 << 15
    hf.save(chunks, family, path, output / "hf")
    saved = {
        name: t
        for file in (output / "hf").glob("*.safetensors")
        for name, t in load_file(file).items()
    }
    assert saved.keys() == stored.keys(), what
    assert all(torch.equal(saved[n], stored[n]) for n in stored), f"{what}: saved differs"
    meta = checkpoint.CheckpointMeta(
        step=1, version=1, hf_source=str(path), model=model.model_dump()
    )
    checkpoint.save(output / "step", checkpoint.model_state(chunks), meta)
    if other is not None:
        with torch.no_grad():
            for _, tensor in hf.named_tensors(chunks):
                tensor.fill_(float("nan"))
        checkpoint.load_model(other, chunks)
        assert all(tensor.isfinite().all() for _, tensor in hf.named_tensors(chunks)), (
            f"{what}: padding is not zero"
        )
        again = dict(hf.export(chunks, family))
        assert all(torch.equal(exported[n], again[n]) for n in exported), (
            f"{what}: {other} loads differently"
        )
    return output / "step"


def check_parts(chunks: Sequence[Module], family: Family, what: str) -> None:
    """Copies of the model export different parts at once, as they do when each sends
    its own; together they are everything.
    """
    whole = {name: tensor.clone() for name, tensor in hf.export(chunks, family, stacked=False)}
    copy = parallel_state.get_data_parallel_rank(True)
    parts = dict[str, Any]()
    sizes = []
    for turn in range(3):  # with the third number nothing is exported
        part = {
            name: tensor.clone()
            for name, tensor in hf.export(
                chunks, family, stacked=False, part=(copy + turn) % 3, parts=2
            )
        }
        assert not parts.keys() & part.keys(), (
            f"{what}: two parts have {sorted(parts.keys() & part.keys())[0]}"
        )
        parts |= part
        sizes.append(sum(tensor.nbytes for tensor in part.values()))
    assert parts.keys() == whole.keys(), (
        f"{what}: {sorted(parts.keys() ^ whole.keys())[0]} is in one of parts and whole"
    )
    assert all(torch.equal(parts[name], whole[name]) for name in whole), (
        f"{what}: parts differ from the whole"
    )
    least, *both = sorted(sizes)
    layers = Counter[str]()
    for name, tensor in whole.items():
        layers[re.sub(r"(\.layers\.\d+\.).*", r"\1", name)] += tensor.nbytes
    largest = max(layers.values())
    assert least == 0, f"{what}: a part that is none has {least} bytes"
    assert both[1] - both[0] <= largest, (
        f"{what}: parts of {both} bytes, and nothing has more than {largest}"
    )


def forget_models() -> None:
    """Free the earlier layouts' models. Hooks of their gradients hold them, where the
    garbage collector does not see it; they hold their groups, and each group over gloo
    has three threads, which wake up a hundred times a second.
    """
    for thing in gc.get_objects():
        if isinstance(thing, DistributedDataParallel):
            vars(thing).clear()
    gc.collect()


def with_gradients(chunks: Any) -> list[DistributedDataParallel]:
    """The chunks with buffers for their gradients (main_grad), summed over ranks after
    a backward pass.
    """
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [
        DistributedDataParallel(config, settings, c, disable_bucketing=i > 0)
        for i, c in enumerate(chunks)
    ]


def forward_backward(ddp: list[Any], family: Family, case: dict[str, Any]) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of each micro-batch, on the last stage; gradients of
    sum(logits * weights).
    """
    logits = []
    for chunk in ddp:
        chunk.zero_grad_buffer()

    def step(micros: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        tokens, packed, weights = next(micros)
        position = mine_of(packed)
        tokens, weights = (
            (tokens, weights) if position is None else (tokens[:, position], weights[:, position])
        )
        output = chunk(tokens, None, None, packed_seq_params=packed)

        def loss(local: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            whole = gather_from_tensor_model_parallel_region(local)[
                ..., : family.architecture.vocabulary
            ]
            logits.append(whole_sequence(whole.detach(), position).flatten(0, 1))
            return (whole * weights).sum() * len(case["micros"]), {}

        return output, loss

    micros = [
        (
            tokens,
            (
                PackedSeqParams("thd", cu, cu, max_seqlen_q=48, max_seqlen_kv=48)
                if cu is not None
                else None
            ),
            weights,
        )
        for tokens, cu, weights in case["micros"]
    ]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(micros) for _ in ddp] if len(ddp) > 1 else iter(micros),
        model=ddp if len(ddp) > 1 else ddp[0],
        num_microbatches=len(micros),
        seq_length=96,
        micro_batch_size=1,
        forward_only=False,
    )
    return logits


def mine_of(packed: PackedSeqParams | None) -> torch.Tensor | None:
    """Which tokens of the packed row this context-parallel rank has."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if size == 1:
        return None
    assert packed is not None
    assert packed.cu_seqlens_q is not None
    rows = []
    for a, b in zip(packed.cu_seqlens_q.tolist(), packed.cu_seqlens_q.tolist()[1:], strict=False):
        rows.append(torch.arange(a, b).view(2 * size, -1)[[rank, 2 * size - 1 - rank]].flatten())
    return torch.cat(rows)


def whole_sequence(logits: torch.Tensor, position: torch.Tensor | None) -> torch.Tensor:
    if position is None:
        return logits
    group = parallel_state.get_context_parallel_group()
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, (position, logits), group=group)
    whole = torch.empty(1, sum(len(p) for p, _ in parts), logits.shape[-1])
    for where, values in parts:
        whole[:, where] = values
    return whole


def gradient_difference(chunks: Any, family: Family, gradients: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference, the reference's largest gradient being 1."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    values = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = {
            name: t for name, t in hf.export(chunks, family) if not name.endswith("correction_bias")
        }
        difference = max((t - gradients[name]).abs().max().item() for name, t in found.items())
        # Those of a delta network's vectors are small beside the largest of all.
        for name, t in found.items():
            if ".linear_attn." in name and t.dim() == 1:
                largest = gradients[name].abs().max()
                assert (t - gradients[name]).abs().max() <= 1e-4 * largest, name
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return difference / max(g.abs().max().item() for g in gradients.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
