"""Attention and whole models on a GPU, with Transformer Engine and without: against
float64, and transformers on the CPU.

A step between two bf16 numbers is 2^-8 of them or less. Probabilities and their
gradients are rounded to bf16 between the products, and so is what comes out.
Differences allowed are 4 such steps of the largest value, 8 of the largest gradient.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.core.models import build, family_of, hf
from megarl.core.models.attention import Flash, PaddedSegments, attention_of, causal
from megarl.core.recipe import Model
from tests.dense_attention import exact, largest_difference, on_ranks, row, values_and_gradients
from tests.tiny import tiny_llama, tiny_qwen3

# isort: split
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
with_engine = pytest.mark.skipif(not HAVE_TE, reason="Transformer Engine is not installed")
ENGINES = [False, pytest.param(True, marks=with_engine)]

VALUES = {torch.bfloat16: 4 * 2**-8, torch.float32: 2e-5}
"""Largest difference, the largest number being 1. The kernel for float32 makes each
product of three TF32 ones.
"""
GRADIENTS = {torch.bfloat16: 8 * 2**-8, torch.float32: 5e-5}
LENGTHS = {"mixed": [300, 17, 1, 450, 256], "one": [1024], "short": [2] * 100 + [700]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim"), [(8, 2, 64), (4, 1, 128), (8, 8, 32), (4, 2, 20)]
)
@pytest.mark.parametrize("chunk", [None, 128])
def test_packed(
    dtype: torch.dtype, lengths: str, heads: int, groups: int, head_dim: int, chunk: int | None
) -> None:
    boundaries = [0, *itertools.accumulate(LENGTHS[lengths])]
    tensors = [t.cuda() for t in row(boundaries, heads, groups, head_dim, dtype)]
    attend = attention_of(boundaries, chunk, 1, 0, tensors[0])
    assert type(attend) is (Flash if dtype is torch.bfloat16 and head_dim != 20 else PaddedSegments)
    found = values_and_gradients(on_ranks([attend], boundaries), tensors)
    expected = exact(tensors, boundaries, chunk)
    assert largest_difference(found[:1], expected[:1]) <= VALUES[dtype]
    assert largest_difference(found[1:], expected[1:]) <= GRADIENTS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_sinks_and_windows(dtype: torch.dtype, window: int | None, cp_size: int) -> None:
    """As gpt-oss has them. The sum over all queries that is a sink's gradient is the
    largest number there.
    """
    boundaries = [0, *itertools.accumulate([300, 16, 4, 452, 256])]
    tensors = [t.cuda() for t in row(boundaries, 8, 2, 64, dtype)]
    tensors.append(torch.linspace(-2, 3, 8).to(dtype).cuda())
    ranks = [
        attention_of(boundaries, None, cp_size, rank, tensors[0], window) for rank in range(cp_size)
    ]
    assert {type(rank) for rank in ranks} == {Flash if dtype is torch.bfloat16 else PaddedSegments}
    found = values_and_gradients(on_ranks(ranks, boundaries), tensors)
    expected = exact(tensors, boundaries, None, window)
    assert largest_difference(found[:1], expected[:1]) <= VALUES[dtype]
    assert largest_difference(found[1:], expected[1:]) <= GRADIENTS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel(dtype: torch.dtype, cp_size: int) -> None:
    """Where there are more keys than queries, the kernel's causal window ends with
    both.
    """
    boundaries = [0, *itertools.accumulate([8 * n for n in (40, 1, 75, 12)])]
    tensors = [t.cuda() for t in row(boundaries, 8, 2, 64, dtype)]
    ranks = [attention_of(boundaries, 100, cp_size, rank, tensors[0]) for rank in range(cp_size)]
    found = values_and_gradients(on_ranks(ranks, boundaries), tensors)
    expected = exact(tensors, boundaries, 100)
    assert largest_difference(found[:1], expected[:1]) <= VALUES[dtype]
    assert largest_difference(found[1:], expected[1:]) <= GRADIENTS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked(dtype: torch.dtype) -> None:
    """Rows of one length, [batch, positions, heads, head_dim]: the same sequences end
    to end.
    """
    tensors = [t.cuda() for t in row([0, 600], 8, 2, 64, dtype)]

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (3, 200)) for t in parts)
        return causal(q, k, v, scale=None).flatten(0, 1)

    found = values_and_gradients(attend, tensors)
    expected = exact(tensors, [0, 200, 400, 600])
    assert largest_difference(found[:1], expected[:1]) <= VALUES[dtype]
    assert largest_difference(found[1:], expected[1:]) <= GRADIENTS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 5, 7]], ids=["one sequence", "several"])
def test_memory_grows_with_the_tokens(dtype: torch.dtype, lengths: list[int]) -> None:
    """The peak of forward and backward beyond the inputs, at 8,192 and 16,384 tokens:
    their square would be four times, and scores of all heads in FP32 at least 64 times
    the queries.
    """
    peaks = []
    for tokens in (8192, 16384):
        boundaries = [0, *itertools.accumulate(tokens * n // sum(lengths) for n in lengths)]
        tensors = [t.cuda().requires_grad_() for t in row(boundaries, 8, 2, 128, dtype)]
        attend = attention_of(boundaries, None, 1, 0, tensors[0])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        q, k, v = tensors[:3]
        attend(q, k, v, None).backward(tensors[3].detach())
        peaks.append(torch.cuda.max_memory_allocated() - before)
        own = tensors[0].numel() * tensors[0].element_size()
    assert peaks[1] <= 2.2 * peaks[0], peaks
    assert peaks[1] <= 24 * own, (peaks, own)


def packed_row(
    vocabulary: int, device: str = "cuda"
) -> tuple[torch.Tensor, PackedSeqParams, list[torch.Tensor]]:
    """Five sequences, in multiples of 16 together."""
    lengths = [40, 8, 70, 1, 9]
    sequences = [
        torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(i))
        for i, n in enumerate(lengths)
    ]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=70, max_seqlen_kv=70
    )
    return torch.cat(sequences)[None].to(device), packed, sequences


def loaded(path: Path, engine: bool, **model: Any) -> Any:
    (chunk,) = build.build(Model(path=str(path), **model), path, transformer_engine=engine)
    hf.load([chunk], family_of(path), path)
    return chunk


@pytest.mark.parametrize("engine", ENGINES, ids=["torch", "transformer engine"])
@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen3])
def test_model_in_bf16_is_transformers_in_fp32(
    one_rank: None, tmp_path: Path, tiny: Any, engine: bool
) -> None:
    """Logits of a packed row from the same bf16 weights: four layers, each of four
    products and two sums rounded to bf16.
    """
    tiny(tmp_path, torch.bfloat16)
    tokens, packed, sequences = packed_row(128)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = torch.cat([reference(s[None]).logits[0] for s in sequences])
        found = loaded(tmp_path, engine, dtype="bf16")(
            tokens, None, None, packed_seq_params=packed
        )[0]
    assert largest_difference([found.double().cpu()], [expected.double()]) <= 4 * 6 * 2**-9


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen3])
def test_model_in_fp32_without_the_engine(one_rank: None, tmp_path: Path, tiny: Any) -> None:
    tiny(tmp_path)
    tokens, packed, sequences = packed_row(128)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = torch.cat([reference(s[None]).logits[0] for s in sequences])
        found = loaded(tmp_path, False, dtype="fp32")(tokens, None, None, packed_seq_params=packed)[
            0
        ]
    assert largest_difference([found.double().cpu()], [expected.double()]) <= 1e-4


@with_engine
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_fp8(one_rank: None, tmp_path: Path, recipe: str) -> None:
    """Logits near bf16's (a step between two E4M3 numbers is an eighth of them, and
    errors of a product's terms cancel), every gradient there, and the weights as they
    were loaded: bf16, bit for bit.
    """
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    can, reason = (is_fp8_block_scaling_available if recipe == "blockwise" else is_fp8_available)(
        return_reason=True
    )
    if not can:
        pytest.skip(reason)
    tiny_llama(tmp_path, torch.bfloat16)
    tokens, packed, _ = packed_row(128)
    with torch.no_grad():
        wide = loaded(tmp_path, True, dtype="bf16")(
            tokens, None, None, packed_seq_params=packed
        ).double()
    chunk = loaded(tmp_path, True, dtype="bf16", fp8=recipe)
    found = chunk(tokens, None, None, packed_seq_params=packed)
    off = (found.detach().double() - wide).pow(2).mean().sqrt() / wide.pow(2).mean().sqrt()
    assert 0 < off <= 0.25
    found.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in chunk.parameters())
    assert {p.dtype for p in chunk.parameters()} == {torch.bfloat16}
    stored = load_file(tmp_path / "model.safetensors")
    assert all(
        torch.equal(stored[name], tensor.cpu())
        for name, tensor in hf.export([chunk], family_of(tmp_path))
    )


def test_scores_are_never_made() -> None:
    """Where none of torch's fused kernels can compute, it is an error and not a square:
    they have no float64.
    """
    q, k, v, _ = (t.cuda()[None] for t in row([0, 32], 4, 2, 16, torch.float64))
    with pytest.raises(RuntimeError, match="kernel"):
        causal(q, k, v, scale=None)
