"""Each family on one rank is transformers': logits, gradients, bits of the weights,
packed and not, at odd shapes.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from megarl.core.base.architecture import READERS
from megarl.core.models import build, family_of, hf
from megarl.core.models.families import SourceView
from megarl.core.recipe import Model
from tests import support_matrix
from tests.tiny import (
    CARD_YARN,
    MOONLIGHT,
    YARN,
    gradients,
    stored_apart,
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_glm4_moe_lite,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_minimax_m2,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_5_moe_multimodal,
    tiny_qwen3_5_multimodal,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ODD = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 10,
}
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama, llama3 rope, grouped queries, wide heads": (tiny_llama, {}),
    "llama, tied, odd vocabulary": (tiny_llama, {"tie_word_embeddings": True, "vocab_size": 131}),
    "llama, default rope, one key-value head": (
        tiny_llama,
        ODD | {"intermediate_size": 77, "rope_parameters": DEFAULT_ROPE},
    ),
    "llama, YaRN, wide heads": (tiny_llama, {"rope_parameters": CARD_YARN}),
    "llama, no grouping": (tiny_llama, {"num_key_value_heads": 8, "head_dim": 8}),
    "qwen2, YaRN": (tiny_qwen2, {"rope_parameters": CARD_YARN}),
    "qwen2, tied, odd, default rope, one key-value head": (
        tiny_qwen2,
        ODD | {"tie_word_embeddings": True, "vocab_size": 131, "rope_parameters": DEFAULT_ROPE},
    ),
    "qwen3, YaRN, queries grouped 8:1": (
        tiny_qwen3,
        {"num_key_value_heads": 1, "rope_parameters": CARD_YARN},
    ),
    "qwen3, tied, odd": (tiny_qwen3, ODD | {"tie_word_embeddings": True, "vocab_size": 131}),
    "qwen3-moe, 2 of 4": (tiny_qwen3_moe, {}),
    "qwen3-moe, 3 of 5 not normalised, a dense layer, odd": (
        tiny_qwen3_moe,
        ODD
        | {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe, YaRN, every second layer": (
        tiny_qwen3_moe,
        {"decoder_sparse_step": 2, "rope_parameters": CARD_YARN},
    ),
    "glm-4.5": (tiny_glm4_moe, {}),
    "glm-4.5-air, odd: no norms of heads, 2 of 5 experts, 2 dense layers, a quarter rotated": (
        tiny_glm4_moe,
        ODD
        | {
            "vocab_size": 131,
            "head_dim": 16,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
        }
        | {"use_qk_norm": False, "routed_scaling_factor": 1.0, "n_shared_experts": 3}
        | {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.25}},
    ),
    "glm-4.7-flash": (tiny_glm4_moe_lite, {}),
    "glm-4.7-flash, odd: 2 of 5 experts, 2 dense layers, a narrow v": (
        tiny_glm4_moe_lite,
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "vocab_size": 131,
            "v_head_dim": 14,
        }
        | {
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek-v3": (tiny_deepseek_v3, {}),
    "deepseek-v3, scores unscaled, not interleaved, experts everywhere": (
        tiny_deepseek_v3,
        {
            "rope_parameters": CARD_YARN,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
        },
    ),
    "moonlight, odd": (
        tiny_deepseek_v3,
        MOONLIGHT
        | {
            "hidden_size": 48,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "vocab_size": 131,
            "v_head_dim": 14,
        }
        | {
            "qk_nope_head_dim": 10,
            "kv_lora_rank": 18,
            "rope_parameters": DEFAULT_ROPE,
            "n_routed_experts": 5,
        },
    ),
    "minimax-m2": (tiny_minimax_m2, {}),
    "minimax-m2, odd: 2 of 5 experts, one key-value head, whole heads rotated": (
        tiny_minimax_m2,
        ODD
        | {"vocab_size": 131, "num_local_experts": 5, "num_experts_per_tok": 2}
        | {"rope_parameters": DEFAULT_ROPE, "rms_norm_eps": 1e-2},
    ),
    "gpt-oss": (tiny_gpt_oss, {}),
    "gpt-oss, odd, YaRN from whole pairs on, windows in the first and third layer": (
        tiny_gpt_oss,
        ODD
        | {
            "vocab_size": 131,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "intermediate_size": 21,
        }
        | {"rope_parameters": YARN | {"truncate": True}, "layer_types": None},
    ),
    "gpt-oss, tied, plain rotation, no windows": (
        tiny_gpt_oss,
        {
            "tie_word_embeddings": True,
            "rope_parameters": DEFAULT_ROPE,
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "qwen3.5": (tiny_qwen3_5, {}),
    "qwen3.5, odd: one key head, attention in every second layer, 3 taps, half rotated": (
        tiny_qwen3_5,
        ODD
        | {
            "vocab_size": 131,
            "head_dim": 12,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "full_attention_interval": 2,
            "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5 with a vision tower, tied": (tiny_qwen3_5_multimodal, {}),
    "qwen3.5-moe": (tiny_qwen3_5_moe, {}),
    "qwen3.5-moe as released": (tiny_qwen3_5_moe_multimodal, {"vocab_size": 131}),
    "qwen3-next": (tiny_qwen3_next, {}),
    "llama 4": (tiny_llama4, {}),
    "llama 4, tied, odd, no norm, no temperature, every second layer": (
        tiny_llama4,
        ODD
        | {
            "tie_word_embeddings": True,
            "vocab_size": 131,
            "moe_layers": None,
            "interleave_moe_layer_step": 2,
        }
        | {"use_qk_norm": False, "attn_temperature_tuning": False, "rope_parameters": DEFAULT_ROPE}
        | {"no_rope_layers": [1, 0, 1], "attention_chunk_size": 7},
    ),
    "llama 4 with a vision tower": (tiny_llama4_multimodal, {"num_hidden_layers": 4}),
}
LENGTHS = [5, 48, 17, 1, 30, 23]


def packed(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_export_are_those_of_transformers(
    one_rank: None, tmp_path: Path, case: str
) -> None:
    tiny, overrides = CASES[case]
    reference = tiny(tmp_path / "hf", **overrides)
    family = family_of(tmp_path / "hf")
    (chunk,) = build.build(Model(path=str(tmp_path / "hf"), dtype="fp32"), tmp_path / "hf")
    hf.load([chunk], family, tmp_path / "hf")
    stored = stored_apart(tmp_path / "hf")
    exported = dict(hf.export([chunk], family))
    tied = {"lm_head.weight"} if family.architecture.tied else set()
    trained = {name for name in stored if not family.passthrough(name)}
    assert exported.keys() == trained - tied
    assert all(torch.equal(stored[name], exported[name]) for name in exported)

    # A delta network amplifies roundings: transformers' own float32 logits are 1.1e-5
    # off its float64, its gradients 4.4e-6 of the largest.
    amplifies = bool(family.architecture.delta)
    logit_limit = 1e-5 if amplifies else 5e-6
    generator = torch.Generator().manual_seed(1)
    vocabulary = family.architecture.vocabulary
    rectangle = torch.randint(0, vocabulary, (2, 48), generator=generator)
    with torch.no_grad():
        difference = (chunk(rectangle, None, None) - reference(rectangle).logits).abs().max()
        assert difference <= logit_limit

    sequences = [torch.randint(0, vocabulary, (n,), generator=generator) for n in LENGTHS]
    expected = torch.cat([reference(s[None]).logits[0] for s in sequences])
    logits = chunk(torch.cat(sequences)[None], None, None, packed_seq_params=packed(LENGTHS))[0]
    assert (logits - expected).abs().max() <= logit_limit

    # The reference in float64, so that only our rounding is measured.
    reference.double()
    labels = torch.randint(0, vocabulary, (sum(LENGTHS),), generator=generator)
    expected = torch.cat([reference(s[None]).logits[0] for s in sequences])
    cross_entropy(expected, labels).backward()
    cross_entropy(logits, labels).backward()
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(parameter.grad)
    of_transformers = gradients(reference, tmp_path / "gradients")
    largest = max(gradient.abs().max() for gradient in of_transformers.values())
    found = {
        name: gradient
        for name, gradient in hf.export([chunk], family)
        if not name.endswith("correction_bias")
    }
    worst = max((gradient - of_transformers[name]).abs().max() for name, gradient in found.items())
    print(f"{case}: {worst / largest:.1e}")
    # float32 against float64, through four layers: rounding alone comes to 1.3e-6 of
    # the largest gradient.
    assert worst <= (1e-5 * largest if amplifies else min(1e-6, 2e-6 * largest))


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (
            SourceView("layers.1.experts.gate_up_proj", 3, (0, 2)),
            "layers.1.experts.3.gate_proj.weight",
        ),
        (
            SourceView("layers.1.experts.gate_up_proj", 12, (1, 2)),
            "layers.1.experts.12.up_proj.weight",
        ),
        (SourceView("layers.1.experts.down_proj", 0), "layers.1.experts.0.down_proj.weight"),
        (SourceView("layers.1.experts.gate_up_proj", 7), "layers.1.experts.7.gate_up_proj.weight"),
        (SourceView("layers.1.experts.down_proj_bias", 7), "layers.1.experts.7.down_proj.bias"),
    ],
)
def test_an_expert_of_a_stack_has_a_name_of_its_own(view: SourceView, name: str) -> None:
    """The names by which SGLang's loader takes experts one by one."""
    assert view.separate_name == name


PLACES: dict[str, tuple[str, set[str]]] = {
    "tests.unit.core.models.test_families": ("CASES", set()),
    "tests.unit.predict.planning.test_shapes": ("MODELS", set()),
    "tests.unit.checkpoints_tools.test_round_trips": (
        "FAMILIES",
        {"Llama4ForConditionalGeneration"},
    ),
    "tests.parallel.test_models_layouts": ("MODELS", {"Llama4ForConditionalGeneration"}),
    "tests.stack.test_server_families": ("CASES", {"LlamaForCausalLM"}),
}
"""Where each family has an entry, and which have tests of their own instead."""


@pytest.mark.parametrize("place", PLACES)
def test_no_family_is_left_out(place: str) -> None:
    """An architecture that the learner reads is compared with transformers everywhere:
    here, on the servers, at each layout.
    """
    name, elsewhere = PLACES[place]
    found = {
        support_matrix.made_by(entry)
        for entry in getattr(importlib.import_module(place), name).values()
    }
    missing = READERS.keys() - found - elsewhere
    assert not missing, f"{place}.{name} has no entry for {', '.join(sorted(missing))}"


def test_the_table_of_what_is_tested_is_that_of_the_tests() -> None:
    page = Path(__file__).parents[4] / "docs/reference/models.md"
    assert support_matrix.table() in page.read_text(), (
        "put what `python -m tests.support_matrix` prints into docs/reference/models.md"
    )


def test_experts_in_turn_are_sent_one_by_one_as_servers_hold_them(
    one_rank: None, tmp_path: Path
) -> None:
    """Put together they are transformers' stacks, transposed; biases in FP32, whatever
    the model is.
    """
    reference = tiny_gpt_oss(tmp_path, torch.bfloat16, num_hidden_layers=1)
    (chunk,) = build.build(Model(path=str(tmp_path)), tmp_path)
    family = family_of(tmp_path)
    hf.load([chunk], family, tmp_path)
    sent = dict(hf.export([chunk], family, stacked=False))
    held = reference.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        for kind, ending, dtype in (
            ("weight", "", torch.bfloat16),
            ("bias", "_bias", torch.float32),
        ):
            alone = [sent.pop(f"model.layers.0.mlp.experts.{e}.{name}.{kind}") for e in range(8)]
            expected = getattr(held, name + ending).detach()
            assert {tensor.dtype for tensor in alone} == {dtype}
            assert torch.equal(torch.stack(alone), (expected if ending else expected.mT).to(dtype))
    assert not [name for name in sent if ".experts." in name]
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
