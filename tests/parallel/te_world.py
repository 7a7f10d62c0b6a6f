"""One rank of test_te_layers: every layout of its world size with Transformer Engine's
layers, which hold weights on a CPU too.

`python -m tests.parallel.te_world DIR` with DIR/models holding a Hugging Face directory
of each model.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from transformer_engine.pytorch import (
    GroupedLinear,
    LayerNormLinear,
    Linear,
)  # before megarl, which hides it on a CPU
from transformer_engine.pytorch.attention import dot_product_attention

# isort: split
from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.microbatch import RowLayout, assemble
from megarl.core.learner.trainer import Trainer
from megarl.core.models import Family, build, checkpoint, family_of, hf, parallel
from megarl.core.models.products import add_gradients_in_fp32
from megarl.core.recipe import Model

# isort: split
from megatron.core import optimizer, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import token_dispatcher
from safetensors.torch import load_file

SP2 = {"tensor_parallel": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"fp8": "blockwise"}, {"fp8": "tensorwise"}],
    2: [
        SP2,
        SP2 | {"expert_parallel": 2},
        SP2 | {"fp8": "blockwise"},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
        {"context_parallel": 2},
    ],
    4: [SP2 | {"pipeline_parallel": 2}, SP2 | {"pipeline_parallel": 2, "expert_parallel": 2}],
}


@contextmanager
def a_gpu_answers() -> Iterator[None]:
    """What constructors of Transformer Engine's layers, and of megatron's around them,
    ask a GPU for.
    """
    hopper = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        name="stand-in",
        pci_domain_id=0xFFFF,
        pci_bus_id=0,
        pci_device_id=0,
    )

    class OnCpu:
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        def arange(self, *args: int, device: object = None, **kwargs: Any) -> torch.Tensor:
            return torch.arange(*args, **kwargs)

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_properties", lambda *_: hopper),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(token_dispatcher, "torch", OnCpu()),
    ):
        yield


plain_build = build.build


def built(model: Model, path: Path, engine: bool, recompute: str = "none") -> list[Any]:
    if not engine:
        return plain_build(model.model_copy(update={"fp8": "none"}), path, False, recompute)
    with a_gpu_answers():
        return plain_build(model, path, None, recompute)


def main(directory: Path) -> None:
    for path in sorted((directory / "models").iterdir()):
        family = family_of(path)
        other = None
        none_in_fp32(path)
        for layout in LAYOUTS[int(os.environ["WORLD_SIZE"])]:
            if "expert_parallel" in layout and not family.architecture.experts:
                continue
            if (
                path.name in ("llama4", "glm4_moe", "gpt_oss")
                and {"fp8", "tensor_parallel"} <= layout.keys()
            ):
                continue  # half of an inner size does not divide by 16
            if family.architecture.latent is not None and "fp8" in layout:
                continue  # refused by name
            model = Model(path=str(path), dtype="bf16", **layout)
            what = f"{path.name} {layout}"
            output = (
                directory
                / "checkpoints"
                / f"{path.name}-{'-'.join(f'{k}{v}' for k, v in layout.items())}"
            )
            other = check(path, family, model, what, output, other)
            if dist.get_rank() == 0:
                print(what, flush=True)
    parallel.stop()


def check(
    path: Path, family: Family, model: Model, what: str, output: Path, other: Path | None
) -> Path:
    """`other`: a checkpoint of Transformer Engine's layers at another layout. Returns
    the one at this layout.
    """
    parallel.start(model, seed=1, timeout_s=60)
    chunks = {engine: built(model, path, engine) for engine in (False, True)}
    stored = load_file(path / "model.safetensors")
    meta = checkpoint.CheckpointMeta(
        step=1, version=1, hf_source=str(path), model=model.model_dump()
    )
    for engine, mine in chunks.items():
        hf.load(mine, family, path)
        exported_as_stored(mine, family, stored, f"{what}, {engine=}")
        checkpoint.save(output / f"{engine}", checkpoint.model_state(mine), meta)
    for engine, mine in chunks.items():
        for source in [output / f"{not engine}", *([other] if other else [])]:
            with torch.no_grad():
                for parameter in (p for chunk in mine for p in chunk.parameters()):
                    parameter.fill_(float("nan"))
            checkpoint.load_model(source, mine)
            exported_as_stored(mine, family, stored, f"{what}, {engine=} loaded from {source}")
    fp8 = (None, "delayed") if model.fp8 == "none" else (build.FP8_FORMATS[model.fp8], model.fp8)
    assert {(chunk.config.fp8, chunk.config.fp8_recipe) for chunk in chunks[True]} == {fp8}, what
    fused_gradients(chunks[True], what)
    if not build.own_attention(family.architecture, model.context_parallel):
        attention_takes_our_rows(chunks[True], family, model, what)
    a_run_continues(path, model, what, output)
    return output / "True"


def none_in_fp32(path: Path) -> None:
    """In fp32 all modules are megatron's and megarl's."""
    parallel.start(Model(), seed=1, timeout_s=60)
    chunks = built(Model(path=str(path), dtype="fp32"), path, engine=True)
    kinds = {
        kind for chunk in chunks for module in chunk.modules() for kind in type(module).__mro__
    }
    assert not [kind for kind in kinds if kind.__module__.startswith("transformer_engine")], (
        path.name
    )


def exported_as_stored(
    chunks: list[Any], family: Family, stored: dict[str, torch.Tensor], what: str
) -> None:
    exported = dict(hf.export(chunks, family))
    differ = [name for name, tensor in exported.items() if not torch.equal(stored[name], tensor)]
    assert not differ, f"{what}: {differ}"
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(exported))
    assert {name for mine in names for name in mine} == stored.keys(), what


def fused_gradients(chunks: list[Any], what: str) -> None:
    """Every linear map is told to add weight gradients in FP32: Transformer Engine's,
    and megarl's choice of megatron's own for latent attention. Together they have all
    matrices of layers.
    """

    def told(kind: Any, flag: str) -> dict[Any, bool]:
        return {
            m: getattr(m, flag) for chunk in chunks for m in chunk.modules() if isinstance(m, kind)
        }

    def all_told() -> dict[Any, bool]:
        engines = told(GroupedLinear | LayerNormLinear | Linear, "fuse_wgrad_accumulation")
        assert engines, what
        return engines | told(
            ColumnParallelLinear | RowParallelLinear, "gradient_accumulation_fusion"
        )

    assert not any(all_told().values()), what
    for chunk in chunks:
        add_gradients_in_fp32(chunk)
    assert all(all_told().values()), what
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    matrices = {
        id(p)
        for layer in layers
        for n, p in layer.named_parameters()
        if p.dim() > 1 and "router" not in n
    }
    assert matrices <= {id(p) for m in all_told() for p in m.parameters() if p.dim() > 1}, what


def a_run_continues(path: Path, model: Model, what: str, output: Path) -> None:
    """The state of a run, AdamW's too, goes from megarl's layers to Transformer
    Engine's and back, and is the same.
    """
    recipe = recipes.from_tree(
        {
            "model": model.model_dump(),
            "resources": {"learner_ranks": dist.get_world_size()},
            "learner": {"microbatch_tokens": 64},
        }
    )

    def trainer(engine: bool) -> Trainer:
        torchs = patch.multiple(
            optimizer, Adam=torch.optim.AdamW, USING_PYTORCH_OPTIMIZER=True
        )  # theirs needs a GPU
        with torchs, patch.object(build, "build", partial(built, engine=engine)):
            return Trainer(recipe, path)

    def adamw(trainer: Trainer) -> list[torch.Tensor]:
        """Numbers of each parameter that this rank updates: in FP32, their moments,
        their count of steps.
        """
        found = []
        for part in trainer.policy.optimizer.chained_optimizers:
            part.state_dict()  # makes what there is only after the first step
            parameters = (
                []
                if part.is_stub_optimizer
                else [p for g in part.optimizer.param_groups for p in g["params"]]
            )
            found += [
                tensor for p in parameters for tensor in (p.data, *part.optimizer.state[p].values())
            ]
        return found

    run = trainer(engine=False)
    run.step = 3
    for number, tensor in enumerate(adamw(run)):
        tensor.copy_(number + torch.rand(tensor.shape) if tensor.dim() else torch.tensor(3.0))
    states: list[Any] = []
    for engine in (False, True, False):  # the first makes copies alike that ranks have of a tensor
        folder = output / f"run-{len(states)}"
        checkpoints = Checkpoints(folder, 1, run, path)
        checkpoints.save()
        checkpoints.finish()
        run = trainer(engine)
        assert Checkpoints(folder, 1, run, path).load_latest(), what
        states.append(adamw(run))
    before, _, after = states
    assert len(before) >= 4 * 9, what
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        f"{what}: AdamW's state differs"
    )


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


class KernelAsked(Exception):
    """Transformer Engine's attention has checked its arguments, and is about to choose
    a kernel for these parameters.
    """


def attention_takes_our_rows(chunks: list[Any], family: Family, model: Model, what: str) -> None:
    """The row that the learner assembles, as Transformer Engine's attention understands
    it.
    """
    ranks = model.context_parallel
    chunk = family.architecture.attention_chunk
    lengths = (
        [40, 7, 13, 4] if chunk is None or ranks == 1 else [3, 4, 2]
    )  # longer ones are refused there
    zeros = [np.zeros(n, np.float32) for n in lengths]
    sequences = [
        TrainSequence(i, 0, z.astype(np.int32), z, z + 1, 0.0) for i, z in enumerate(zeros)
    ]
    row = RowLayout(model, context_rank=parallel_state.get_context_parallel_rank())
    micro = assemble(sequences, row.row_multiple, row, torch.device("cpu"))
    packed = micro.packed
    tokens = micro.tokens.numel()
    assert packed.cu_seqlens_q.tolist()[-1] == ranks * tokens, what
    assert all(
        boundary % (2 * ranks) == 0 for boundary in packed.cu_seqlens_q.tolist() if ranks > 1
    ), what
    for rotary in (chunk_of.rotary_pos_emb for chunk_of in chunks):
        assert (
            rotary.get_rotary_seq_len(None, None, None, None, replace(packed, max_seqlen_q=33))
            == 64
        ), what
    choice = patch.object(
        dot_product_attention.utils, "get_attention_backend", side_effect=KernelAsked
    )
    for layer in (layer for chunk_of in chunks for layer in chunk_of.decoder.layers):
        number = layer.layer_number - 1
        module = layer.self_attention
        tp = model.tensor_parallel
        config = module.config
        heads = (config.num_attention_heads // tp, *[config.num_query_groups // tp] * 2)
        q, k, v = (
            torch.zeros(tokens, n, config.kv_channels, dtype=torch.bfloat16).as_subclass(OnGpu)
            for n in heads
        )
        with a_gpu_answers(), choice as asked, suppress(KernelAsked):
            module.core_attention(
                q,
                k,
                v,
                None,
                attn_mask_type=module.attn_mask_type,
                packed_seq_params=packed,
                attention_bias=None,
            )
        (found,), _ = asked.call_args
        divided = (
            chunk is not None and ranks == 1 and number not in family.architecture.unrotated_layers
        )
        assert (found.qkv_layout, found.attn_mask_type) == ("thd_thd_thd", "padding_causal"), what
        # Whole sequences, also of several context-parallel ranks: Transformer Engine
        # divides their boundaries itself.
        rows = (6, 16) if divided else (len(packed.cu_seqlens_q) - 1, packed.max_seqlen_q)
        assert (found.batch_size, found.max_seqlen_q, found.max_seqlen_kv) == (*rows, rows[1]), what
        assert (found.num_heads, found.num_gqa_groups, found.head_dim_qk) == (
            *heads[:2],
            config.kv_channels,
        ), what
        assert (found.window_size, found.pad_between_seqs) == ((-1, 0), False), what
        assert (found.context_parallel, found.cp_size, found.cp_comm_type) == (
            ranks > 1,
            ranks,
            "p2p",
        ), what


if __name__ == "__main__":
    main(Path(sys.argv[1]))
