"""Attention within chunks is causal attention over divided sequences; what Transformer
Engine is told of them.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from megarl.core.base.architecture import Yarn, read
from megarl.core.models import parallel  # noqa: F401  makes megatron importable on a CPU
from megarl.core.models.attention import (
    LayerAttention,
    positions_of,
    rms_norm,
    segments,
    temperatures,
)
from megarl.core.models.build import own_attention
from megarl.core.models.layers import ChunkedTEAttention, Rope

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 17))
def test_divided_sequences_see_what_the_chunk_lets_them_see(lengths: list[int], chunk: int) -> None:
    """Same part of a pack <=> same sequence and same chunk of positions: transformers'
    chunked mask, without its mask.
    """
    boundaries = torch.tensor([0, *lengths]).cumsum(0).tolist()
    parts = torch.tensor([*segments(boundaries, chunk).start.tolist(), boundaries[-1]]).diff()
    assert parts.sum() == sum(lengths)
    part = torch.repeat_interleave(parts)
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    of_chunk = positions_of(boundaries) // chunk
    same = (sequence[:, None] == sequence) & (of_chunk[:, None] == of_chunk)
    assert torch.equal(part[:, None] == part, same)
    if max(lengths) <= chunk:
        assert torch.equal(part, sequence.unique(return_inverse=True)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_its_gradient_are_transformers(interleaved: bool, dtype: torch.dtype) -> None:
    """Halves bit for bit forward. Complex products may be fused, and autograd rounds
    more than once backward.
    """
    draw = torch.Generator().manual_seed(0)
    x, upstream = (
        torch.randn(9, 4, 8, generator=draw, dtype=torch.float32).to(dtype) for _ in range(2)
    )
    rope = Rope(1.0 / 10000 ** (torch.arange(4) / 4), interleaved)
    cos, sin = rope(torch.arange(9), dtype)
    plain = x.clone().requires_grad_()
    ours = x.clone().requires_grad_()
    if interleaved:
        expected = apply_rotary_emb(
            plain[None], plain[None], torch.complex(cos[:, 0], sin[:, 0])[None]
        )[0][0]
    else:
        whole = (torch.cat([part, part], -1)[None, :, 0] for part in (cos, sin))
        expected = apply_rotary_pos_emb(plain[None], plain[None], *whole, unsqueeze_dim=2)[0][0]
    found = rope.rotate(ours, cos, sin)
    assert torch.equal(found, expected) or interleaved
    torch.testing.assert_close(found, expected)
    expected.backward(upstream)
    found.backward(upstream)
    assert plain.grad is not None
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_its_gradients_are_transformers(dtype: torch.dtype, weighted: bool) -> None:
    """Bit for bit forward. Gradients are those of transformers in float32: its own
    weights' are sums of rounded products.
    """
    draw = torch.Generator().manual_seed(0)
    x, upstream = (
        torch.randn(9, 64, generator=draw, dtype=torch.float32).to(dtype) for _ in range(2)
    )
    theirs = LlamaRMSNorm(64, 1e-5)
    if weighted:
        theirs.weight.data = torch.randn(64, generator=draw)
    theirs.to(dtype)
    ours = x.clone().requires_grad_()
    weight = theirs.weight.detach().clone().requires_grad_()
    found = rms_norm(ours, 1e-5, weight if weighted else None)
    assert torch.equal(found, theirs(x))
    plain = x.float().requires_grad_()
    expected = torch.autograd.grad(theirs.float()(plain), (plain, theirs.weight), upstream.float())
    gradients = torch.autograd.grad(found, (ours, weight) if weighted else (ours,), upstream)
    for gradient, right in zip(gradients, expected, strict=False):
        torch.testing.assert_close(gradient, right.to(dtype))


def test_temperature_is_one_until_the_floor() -> None:
    assert torch.equal(temperatures(torch.arange(7), 8, 0.1), torch.ones(7))
    assert temperatures(torch.tensor([7, 8190, 8191]), 8192, 0.1).tolist() == pytest.approx(
        [1, 1, 1.0693147]
    )


class Kernels(torch.nn.Module):
    """Transformer Engine's attention in its stead: for each of the sequences it is
    told, causal attention.
    """

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.calls: list[PackedSeqParams | None] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed_seq_params: Any
    ) -> torch.Tensor:
        self.calls.append(packed_seq_params)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        rows = []
        for a, b in itertools.pairwise(bounds):
            query, key, value = (t[a:b].transpose(0, 1) for t in (q, k, v))
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
            rows.append(mixed.transpose(0, 1))
        return torch.cat(rows).flatten(1)


def attention(layer: LayerAttention) -> ChunkedTEAttention:
    config: Any = None
    return ChunkedTEAttention(config, 1, layers=[layer], kernels=Kernels)


def packed(*lengths: int) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams("thd", cu, cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def test_transformer_engine_is_told_shorter_sequences() -> None:
    q, k, v = torch.randn(3, 30, 2, 8)
    inside = attention(LayerAttention(chunk=8))
    out = inside(q, k, v, packed_seq_params=packed(20, 10))
    (told,) = inside.kernels.calls
    assert told.cu_seqlens_q.tolist() == told.cu_seqlens_kv.tolist() == [0, 8, 16, 20, 28, 30]
    assert told.cu_seqlens_q.dtype == torch.int32
    assert (told.max_seqlen_q, told.max_seqlen_kv, told.qkv_format) == (8, 8, "thd")
    sequence = torch.repeat_interleave(torch.tensor([20, 10]))
    chunk = positions_of([0, 20, 30]) // 8
    mask = ((sequence[:, None] == sequence) & (chunk[:, None] == chunk)).tril()
    query, key, value = (t.transpose(0, 1) for t in (q, k, v))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(0, 1)
    assert torch.allclose(out, expected.flatten(1), atol=1e-6)


def test_transformer_engine_is_left_alone_where_no_sequence_is_longer() -> None:
    parameters = packed(20, 10)
    for layer in (LayerAttention(chunk=20), LayerAttention(rotary=False, temperature=(21, 0.1))):
        of_layer = attention(layer)
        of_layer(*torch.randn(3, 30, 2, 8), packed_seq_params=parameters)
        assert of_layer.kernels.calls == [parameters]


def test_queries_are_scaled_and_normalised_before_transformer_engine() -> None:
    q, k, v = torch.randn(3, 30, 2, 8)
    scaled = attention(LayerAttention(rotary=False, temperature=(4, 0.5)))(
        q, k, v, packed_seq_params=packed(20, 10)
    )
    factor = temperatures(positions_of([0, 20, 30]), 4, 0.5)[:, None, None]
    assert torch.equal(scaled, Kernels()(q * factor, k, v, packed(20, 10)))
    normed = attention(LayerAttention(l2_epsilon=1e-5))(q, k, v, packed_seq_params=packed(20, 10))
    q, k = (torch.nn.functional.rms_norm(t, (8,), eps=1e-5) for t in (q, k))
    assert torch.allclose(normed, Kernels()(q, k, v, packed(20, 10)), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "alone", "divided"),
    [("llama-4-scout", False, True), ("llama-3.1-8b", False, False), ("gpt-oss-20b", True, True)],
)
def test_chunks_across_context_parallel_ranks_do_without_transformer_engine(
    name: str, alone: bool, divided: bool
) -> None:
    """`megarl plan` proposes such layouts for Scout at 16k tokens, twice the chunk."""
    assert (own_attention(read(name), 1), own_attention(read(name), 2)) == (alone, divided)


def test_a_magnitude_of_yarn_does_without_transformer_engine() -> None:
    """Our own attention multiplies rotated q and k with it, Megatron nothing."""
    model = read("qwen3-8b")
    yarn = Yarn(factor=4.0, fast=32, slow=1, original=32768, truncate=True, magnitude=1.0)
    assert not own_attention(dataclasses.replace(model, rope_scaling=yarn), 1)
    grown = dataclasses.replace(yarn, magnitude=1.14)
    assert own_attention(dataclasses.replace(model, rope_scaling=grown), 1)


@pytest.mark.parametrize(
    ("capability", "widest"),
    [((8, 0), 0), ((8, 9), 0), ((9, 0), 256), ((10, 0), 128), ((12, 0), 128)],
)
def test_gpus_without_a_kernel_for_packed_rows_do_without_transformer_engine(
    capability: tuple[int, int], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On these, Transformer Engine would choose its unfused attention: n x n scores of
    each sequence.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    model = read("llama-3.1-8b")
    for head_dim in (64, 128, 256):
        assert own_attention(dataclasses.replace(model, head_dim=head_dim), 1) == (
            head_dim > widest
        )
