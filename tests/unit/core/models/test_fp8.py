"""FP8 as the recipe asks for it: what megatron-core is told, what is refused, and how
rows are padded.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.learner.microbatch import RowLayout, assemble, plan
from megarl.core.models import build
from megarl.core.recipe import Model
from megarl.core.recipe.rules import impossible_for
from tests.tiny import tiny_llama, tiny_qwen3_moe

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
}


@pytest.mark.parametrize(("recipe", "format_"), [("blockwise", "e4m3"), ("tensorwise", "hybrid")])
def test_megatron_is_told(one_rank: None, tmp_path: Path, recipe: Any, format_: str) -> None:
    """Format and recipe; weights stay in bf16, attention too."""
    tiny_llama(tmp_path)
    config = build.transformer_config(
        Model(path=str(tmp_path), fp8=recipe), in_directory(tmp_path), fused=False
    )
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (format_, recipe, False)
    assert not any(
        (config.fp8_dot_product_attention, config.fp8_multi_head_attention, config.fp8_output_proj)
    )
    assert (
        build.transformer_config(Model(path=str(tmp_path)), in_directory(tmp_path), fused=False).fp8
        is None
    )


def test_refused_without_transformer_engine(one_rank: None, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    with pytest.raises(
        MegarlError,
        match=r"^model\.fp8: blockwise needs Transformer Engine, but .*; set model\.fp8=none",
    ):
        build.build(Model(path=str(tmp_path), fp8="blockwise"), tmp_path, transformer_engine=False)


def test_refused_on_a_gpu_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = ModuleType("transformer_engine.pytorch")
    engine.is_fp8_block_scaling_available = lambda return_reason: (
        False,
        "it is older than Hopper.",
    )
    engine.is_fp8_available = lambda return_reason: (True, "")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    build.check(Model(), transformer_engine=False)
    build.check(Model(fp8="tensorwise"), transformer_engine=True)
    with pytest.raises(
        MegarlError,
        match=r"model\.fp8: blockwise cannot be computed on this GPU: it is older than Hopper",
    ):
        build.check(Model(fp8="blockwise"), transformer_engine=True)


@pytest.mark.parametrize(
    ("layout", "sizes", "key"),
    [
        ({}, {"hidden_size": 72}, "hidden_size of M is 72"),
        ({"tensor_parallel": 4}, {}, "ffn_hidden_size of M is 24"),
        (
            {"tensor_parallel": 4},
            {"kv_channels": 10, "ffn_hidden_size": 128},
            "kv_channels x num_attention_heads of M is 20",
        ),
        (
            {"expert_tensor_parallel": 2},
            {"num_moe_experts": 4, "moe_ffn_hidden_size": 48},
            "moe_ffn_hidden_size of M is 24",
        ),
    ],
)
def test_widths_that_do_not_divide(layout: dict[str, Any], sizes: dict[str, Any], key: str) -> None:
    model = {"path": "M", "fp8": "tensorwise"} | layout
    problems = list(impossible_for(Model(**model), WIDE | sizes))
    assert problems[0].startswith(f"model.fp8: {key} on each rank")
    assert not list(impossible_for(Model(**model | {"fp8": "none"}), WIDE | sizes))


def test_experts_of_a_family_are_looked_at(one_rank: None, tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, moe_intermediate_size=40)
    with pytest.raises(
        MegarlError, match=r"model\.fp8: moe_ffn_hidden_size of .* is 40 on each rank"
    ):
        build.transformer_config(
            Model(path=str(tmp_path), fp8="blockwise"), in_directory(tmp_path), fused=False
        )


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_rows_are_padded_for_every_rank(context: int, shards: int) -> None:
    """What a rank has of a row divides by 16 before and after tensor-parallel ranks put
    theirs together, and is whole blocks if they do.
    """
    divided: dict[str, Any] = {"context_parallel": context, "tensor_parallel": shards}
    layout = RowLayout(Model(**divided, fp8="blockwise"))
    assert layout.row_multiple % (context * shards * (128 if shards > 1 else 16)) == 0
    assert RowLayout(Model(**divided, fp8="tensorwise")).row_multiple <= 48 * context * shards
    assert layout.row_multiple % layout.sequence_multiple == 0
    assert RowLayout(Model(**divided)).row_multiple <= layout.row_multiple / 8


def test_the_learner_pads_its_rows(one_rank: None) -> None:
    """What fills them up is padding."""
    sequences = [
        TrainSequence(
            i, 0, np.arange(n, dtype=np.int32), np.zeros(n, np.float32), np.ones(n, np.float32), 1.0
        )
        for i, n in enumerate([7, 2, 12])
    ]
    layout = RowLayout(Model(fp8="blockwise"))
    steps = plan([len(s) for s in sequences], 64, layout)
    micro = assemble(sequences, steps.length, layout, torch.device("cpu"))
    assert micro.tokens.shape[-1] % 16 == 0
    assert micro.tokens.numel() - int(micro.padding.sum()) == 21
    assert micro.packed.cu_seqlens_q.tolist() == [0, 7, 9, 21, 32]
