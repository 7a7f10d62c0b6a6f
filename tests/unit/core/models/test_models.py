"""What families share: rotary frequencies, precision, directories,
settings of experts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.core.base import architecture
from megarl.core.base.hf_files import read_config
from megarl.core.models import build, checkpoint, family_of, hf, parallel
from megarl.core.models.hf import write_config
from megarl.core.models.layers import CausalAttention, inverse_frequencies
from megarl.core.recipe import Model, Moe
from tests.tiny import (
    LLAMA3_ROPE,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_qwen3_moe,
)

# isort: split
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file


def loaded(path: Path, **model: Any) -> Any:
    (chunk,) = build.build(Model(path=str(path), **model), path)
    hf.load([chunk], family_of(path), path)
    return chunk


def test_bf16_weights_bit_for_bit(one_rank: None, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", dtype=torch.bfloat16)
    chunk = loaded(tmp_path / "hf", dtype="bf16")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    exported = dict(hf.export([chunk], family_of(tmp_path / "hf")))
    assert all(t.dtype == torch.bfloat16 for t in chunk.parameters())
    assert all(torch.equal(stored[name], exported[name]) for name in stored)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 256),
        (LLAMA3_ROPE, 256),
        (LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192}, 131072),
    ],
)
def test_rotary_frequencies_are_transformers_bit_for_bit(
    rope: dict[str, Any], context: int
) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        rope_parameters=dict(rope),
        max_position_embeddings=context,
    )
    if rope["rope_type"] == "default":
        expected = 1.0 / (10000.0 ** (torch.arange(0, 128, 2).float() / 128))
    else:
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    ours = architecture.of(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "made up")
    assert torch.equal(inverse_frequencies(ours), expected)


def test_angles_are_kept_for_few_lengths(one_rank: None) -> None:
    """Those of a row are the first of the next power of two."""
    plain = RotaryEmbedding(16, 1.0)
    rotary = RotaryEmbedding(16, 1.0)
    build.make_angles_for_few_lengths(rotary)
    before = RotaryEmbedding.forward.cache_info().currsize
    lengths = (33, 50, 64, 40)
    for n in lengths:
        packed = PackedSeqParams("thd", max_seqlen_q=n, max_seqlen_kv=n)
        asked = rotary.get_rotary_seq_len(None, None, None, None, packed)
        assert torch.equal(rotary(asked, packed_seq=True)[:n], plain.get_emb(n))
    assert RotaryEmbedding.forward.cache_info().currsize == before + 1


def test_rope_as_written_before_transformers_5(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    new = architecture.in_directory(tmp_path)
    config = read_config(tmp_path)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    write_config(tmp_path, config)
    assert architecture.in_directory(tmp_path) == new


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_llama4, tiny_gpt_oss])
@pytest.mark.parametrize("theta", [None, 20000.0])
def test_the_rotary_base_where_only_its_scaling_is_given(
    tmp_path: Path, tiny: Callable[[Path], object], theta: float | None
) -> None:
    """As in transformers it is the model's default, or stands beside."""
    tiny(tmp_path)
    config = read_config(tmp_path)
    del config["rope_parameters"]["rope_theta"]
    write_config(tmp_path, config | ({"rope_theta": theta} if theta else {}))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
    assert architecture.in_directory(tmp_path).rope_theta == expected


def test_saved_directory_is_transformers(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several files with an index; transformers loads the same weights; the
    tokenizer's files came along.
    """
    monkeypatch.setattr(hf, "SHARD_BYTES", 50_000)
    reference = tiny_llama(tmp_path / "hf", tie_word_embeddings=True)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    chunk = loaded(tmp_path / "hf", dtype="fp32")
    hf.save([chunk], family_of(tmp_path / "hf"), tmp_path / "hf", tmp_path / "copy")
    names = {p.name for p in (tmp_path / "copy").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", hf.INDEX} < names
    assert "model-00002-of-00017.safetensors" in names
    assert "model.safetensors" not in names
    assert (
        len({path.stat().st_mode for path in (tmp_path / "copy").iterdir()}) == 1
    )  # whoever may read one may read all
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert all(
        torch.equal(a, b) for a, b in zip(copy.parameters(), reference.parameters(), strict=True)
    )

    hf.load([chunk], family_of(tmp_path / "copy"), tmp_path / "copy")
    exported = dict(hf.export([chunk], family_of(tmp_path / "copy")))
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(stored[name], exported[name]) for name in exported)


def test_vision_tower_is_carried_along(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A multimodal directory saved again has its own vision tensors bit for bit, and
    transformers loads all of it.
    """
    monkeypatch.setattr(hf, "SHARD_BYTES", 50_000)
    reference = tiny_llama4_multimodal(tmp_path / "hf")
    (chunk,) = build.build(Model(dtype="fp32"), tmp_path / "hf")
    hf.load([chunk], family_of(tmp_path / "hf"), tmp_path / "hf")
    hf.save([chunk], family_of(tmp_path / "hf"), tmp_path / "hf", tmp_path / "copy")
    copy = type(reference).from_pretrained(tmp_path / "copy")
    assert any("vision" in name for name, _ in copy.named_parameters())
    assert all(
        torch.equal(a, b) for a, b in zip(copy.parameters(), reference.parameters(), strict=True)
    )


def test_frozen_router_has_no_gradient(one_rank: None, tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, num_hidden_layers=2)
    chunk = loaded(tmp_path, dtype="fp32", moe=Moe(freeze_router=True))
    chunk(torch.arange(48)[None], None, None).logsumexp(-1).sum().backward()
    without = {name for name, parameter in chunk.named_parameters() if parameter.grad is None}
    assert without == {f"decoder.layers.{i}.mlp.router.weight" for i in range(2)}


def test_scales_of_experts_are_no_part_of_a_checkpoint(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's layers of four experts have four objects; megatron saves no
    three of them.
    """
    tiny_qwen3_moe(tmp_path / "hf")
    (chunk,) = build.build(Model(dtype="fp32"), tmp_path / "hf")
    hf.load([chunk], family_of(tmp_path / "hf"), tmp_path / "hf")
    plain = chunk.sharded_state_dict

    def with_scales(**how: Any) -> dict[str, Any]:
        layer = "decoder.layers.0.mlp.experts.linear_fc1._extra_state"
        scales = {f"{layer}{i or ''}": ShardedObject(layer, b"", (4,), (i,)) for i in range(4)}
        return (
            plain(**how)
            | scales
            | {"decoder._extra_state": ShardedObject("decoder._extra_state", b"", (1,), (0,))}
        )

    monkeypatch.setattr(chunk, "sharded_state_dict", with_scales)
    state = checkpoint.model_state([chunk])
    assert not [name for name in state["model"] if "_extra_state" in name]
    meta = checkpoint.CheckpointMeta(
        step=1, version=1, hf_source=str(tmp_path / "hf"), model=Model().model_dump()
    )
    checkpoint.save(tmp_path / "step-1", state, meta)
    checkpoint.load_model(tmp_path / "step-1", [chunk])


def test_fp32_products_are_fp32() -> None:
    """Also where the environment has asked for TF32."""
    torch.set_float32_matmul_precision("high")
    try:
        parallel.start(Model(), seed=0, timeout_s=60)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")
        parallel.stop()


def test_transformer_engine_is_not_taken_in_fp32(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its products would be of TF32, and its attention would make
    matrices of scores.
    """
    tiny_qwen3_moe(tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(build, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made_by = [
        build.layers_made_by(Model(dtype=dtype)).split()[0] for dtype in ("bf16", "fp16", "fp32")
    ]
    assert made_by == ["Transformer", "Transformer", "megarl"]
    chunk = loaded(tmp_path, dtype="fp32")
    assert isinstance(chunk.decoder.layers[0].self_attention.core_attention, CausalAttention)
    fused = ("moe_grouped_gemm", "moe_permute_fusion", "bias_activation_fusion")
    assert not any(getattr(chunk.config, name) for name in fused)


def test_router_computes_in_float32(one_rank: None, tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, torch.bfloat16, num_hidden_layers=1)
    chunk = loaded(tmp_path, dtype="bf16")
    router = chunk.decoder.layers[0].mlp.router
    assert router.weight.dtype == torch.bfloat16
    hidden = torch.randn(5, 1, 64, dtype=torch.bfloat16)
    assert torch.equal(router.gating(hidden), hidden.float() @ router.weight.float().T)


def engines_product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    layout: str,
    bias: Tensor | None = None,
    grad: bool = False,
) -> list[Tensor]:
    """Transformer Engine's, with what it would misread refused."""
    assert bias is None or bias.dtype == out_dtype, "a bias is read in the type of the output"
    assert {a.dtype, b.dtype} != {torch.float32} or grad, "a product of TF32"
    a = a.to(out_dtype)
    b = b.to(out_dtype)
    return [(b.T if layout[1] == "T" else b) @ (a.T if layout[0] == "T" else a)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tiny", [tiny_qwen3_moe, tiny_gpt_oss])
def test_router_beside_transformer_engine(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Any, dtype: Any
) -> None:
    """Its logits and gradients, with and without a bias, are those of float32."""
    tiny(tmp_path, build.DTYPES[dtype], num_hidden_layers=1)
    router = loaded(tmp_path, dtype=dtype).decoder.layers[0].mlp.router
    monkeypatch.setattr(moe_utils, "te_general_gemm", engines_product)
    hidden = torch.randn(5, 1, 64, dtype=build.DTYPES[dtype], requires_grad=True)
    given = [hidden, *router.parameters()]
    assert len(given) == (3 if tiny is tiny_gpt_oss else 2)
    logits = router.gating(hidden)
    expected = linear(*(t.float() for t in given))
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)
    assert logits.dtype == torch.float32
    weights = torch.randn(logits.shape)
    for found, wanted in zip(
        *(torch.autograd.grad((o * weights).sum(), given) for o in (logits, expected)), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=0.01, atol=1e-5)


def test_transformers_in_the_same_process_is_left_alone(tmp_path: Path) -> None:
    """What makes megatron run on a CPU must not reach others: loading once left rotary
    frequencies uninitialised.
    """
    tiny_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
