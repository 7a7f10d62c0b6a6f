"""Attention of packed rows: equal to a dense mask's in float64, whatever the lengths,
without the size of one.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as varlen_module
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.core.models import attention, build, family_of, hf
from megarl.core.models.attention import (
    Flash,
    PaddedSegments,
    attention_of,
    flash,
    flash_takes,
    segments,
)
from megarl.core.recipe import Model
from tests.dense_attention import exact, largest_difference, on_ranks, row, values_and_gradients
from tests.tiny import tiny_llama, tiny_llama4

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams


def varlen(q: Tensor, k: Tensor, v: Tensor, **where: Any) -> Tensor:
    """torch's varlen_attn in its stead: of each pair of sequences it is told, causal
    attention aligned to their ends.
    """
    assert where.pop("window_size") == (-1, 0)
    assert where.pop("scale") is None
    assert all(where[name].dtype == torch.int32 for name in ("cu_seq_q", "cu_seq_k"))
    q_ends, k_ends = (where.pop(name).tolist() for name in ("cu_seq_q", "cu_seq_k"))
    assert (q_ends[-1], k_ends[-1]) == (
        len(q),
        len(k),
    ), "the kernel would read beyond, or leave some out"
    longest = {"max_q": max(b - a for a, b in itertools.pairwise(q_ends))}
    longest["max_k"] = max(b - a for a, b in itertools.pairwise(k_ends))
    assert where == longest
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    rows = []
    for (qa, qb), (ka, kb) in zip(
        itertools.pairwise(q_ends), itertools.pairwise(k_ends), strict=True
    ):
        scores = torch.einsum("qhd,khd->hqk", q[qa:qb], k[ka:kb]) / q.shape[-1] ** 0.5
        seen = torch.ones(qb - qa, kb - ka, dtype=torch.bool).tril(kb - ka - (qb - qa))
        rows.append(
            torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[ka:kb]
            )
        )
    return torch.cat(rows)


@pytest.mark.parametrize("kernel", [PaddedSegments, Flash])
@settings(max_examples=40, deadline=None)
@given(
    units=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    chunk=st.none() | st.integers(1, 20),
    cp_size=st.sampled_from([1, 2, 3]),
    grouped=st.booleans(),
)
def test_equals_a_dense_mask(
    kernel: type[Flash | PaddedSegments],
    units: list[int],
    chunk: int | None,
    cp_size: int,
    grouped: bool,
) -> None:
    """Values and the gradients of q, k and v, all context-parallel ranks taken
    together.
    """
    lengths = [n * (2 * cp_size if cp_size > 1 else 1) for n in units]
    boundaries = [0, *itertools.accumulate(lengths)]
    tensors = row(boundaries, heads=4, groups=2 if grouped else 4, head_dim=8, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "flash_takes", lambda _: kernel is Flash)
        patch.setattr(attention, "flash", varlen)
        ranks = [
            attention_of(boundaries, chunk, cp_size, rank, tensors[0]) for rank in range(cp_size)
        ]
        assert {type(r) for r in ranks} == {kernel}
        found = values_and_gradients(on_ranks(ranks, boundaries), tensors)
    assert largest_difference(found, exact(tensors, boundaries, chunk)) < 1e-12


class DenseVarlen:
    """torch's flash kernel for GPUs in its stead: what it says it computes, and, from
    the output and log-sum-exps that it is given, the gradients by the formula of its
    backward pass (arXiv 2205.14135, algorithm 4).
    """

    def __init__(self, told: list[Any]) -> None:
        """told: its arguments, as the real one checks them in
        test_torch_takes_what_its_kernel_is_told.
        """
        q_ends, k_ends, _, _, _, causal, *_ = told[0]
        self.left = told[1]["window_size_left"]
        assert (told[1]["window_size_right"], causal) == (0, self.left < 0)
        self.ends = [list(itertools.pairwise(ends.tolist())) for ends in (q_ends, k_ends)]

    def pieces(self, q: Tensor, k: Tensor) -> Any:
        for (qa, qb), (ka, kb) in zip(*self.ends, strict=True):
            seen = torch.ones(qb - qa, kb - ka, dtype=torch.bool).tril(kb - ka - (qb - qa))
            if self.left >= 0:
                seen = seen.triu(kb - ka - (qb - qa) - self.left)
            scores = torch.einsum("qhd,khd->hqk", q[qa:qb], k[ka:kb]) / q.shape[-1] ** 0.5
            yield slice(qa, qb), slice(ka, kb), scores.masked_fill(~seen, -torch.inf)

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *places: Any, **window: Any) -> tuple[Tensor, ...]:
        out = torch.empty_like(q)
        sums = q.new_empty(q.shape[1], len(q))
        shared = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
        for mine, theirs, scores in DenseVarlen([places, window]).pieces(q, k):
            out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[theirs])
            sums[:, mine] = scores.logsumexp(-1)
        return out, sums, torch.empty(0), torch.empty(1), torch.empty(2)

    @staticmethod
    def backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sums: Tensor,
        *places: Any,
        **window: Any,
    ) -> tuple[Tensor, ...]:
        assert [len(tensor) for tensor in places[-2:]] == [
            0,
            1,
        ], "the state and what is unused, as they came"
        groups = k.shape[1]
        shared = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
        of_q, of_k, of_v = (torch.zeros_like(t) for t in (q, k, v))
        for mine, theirs, scores in DenseVarlen([places, window]).pieces(q, k):
            g = gradient[mine]
            probabilities = torch.exp(scores - sums[:, mine, None])
            of_v[theirs] += torch.einsum("hqk,qhd->khd", probabilities, g)
            own = (g * out[mine]).sum(-1).t()[..., None]
            of_scores = probabilities * (torch.einsum("qhd,khd->hqk", g, v[theirs]) - own) * scale
            of_q[mine] += torch.einsum("hqk,khd->qhd", of_scores, k[theirs])
            of_k[theirs] += torch.einsum("hqk,qhd->khd", of_scores, q[mine])
        return of_q, *(t.unflatten(1, (groups, shared)).sum(2) for t in (of_k, of_v))


@pytest.mark.parametrize("kernel", [PaddedSegments, Flash])
@settings(max_examples=30, deadline=None)
@given(
    units=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    window=st.none() | st.integers(1, 20),
    cp_size=st.sampled_from([1, 2, 3]),
    grouped=st.booleans(),
)
def test_sinks_and_windows_equal_a_dense_mask(
    kernel: type[Flash | PaddedSegments],
    units: list[int],
    window: int | None,
    cp_size: int,
    grouped: bool,
) -> None:
    """Values and the gradients of q, k, v and sinks, all context-parallel ranks taken
    together.
    """
    boundaries = [0, *itertools.accumulate(n * (2 * cp_size if cp_size > 1 else 1) for n in units)]
    tensors = row(boundaries, heads=4, groups=2 if grouped else 4, head_dim=8, dtype=torch.float64)
    tensors.append(torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "flash_takes", lambda _: kernel is Flash)
        for name in ("forward", "backward"):
            patch.setattr(torch.ops.aten, f"_flash_attention_{name}", getattr(DenseVarlen, name))
        ranks = [
            attention_of(boundaries, None, cp_size, rank, tensors[0], window)
            for rank in range(cp_size)
        ]
        assert {type(r) for r in ranks} == {kernel}
        found = values_and_gradients(on_ranks(ranks, boundaries), tensors)
    # The sums of sinks are FP32.
    assert largest_difference(found, exact(tensors, boundaries, None, window)) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "value", "gradient"),
    [(torch.float32, 2e-6, 5e-6), (torch.float16, 2**-9, 2**-8), (torch.bfloat16, 2**-6, 2**-5)],
)
def test_sinks_in_the_precisions_of_training(
    dtype: torch.dtype, value: float, gradient: float
) -> None:
    """Four steps between bf16 numbers (fp16's are finer) for the largest value, eight
    for the largest gradient.
    """
    boundaries = [0, 70, 71, 200]
    tensors = [*row(boundaries, 4, 2, 16, dtype), torch.tensor([-2.0, 0.0, 1.0, 3.0]).to(dtype)]
    found = values_and_gradients(
        on_ranks([attention_of(boundaries, None, 1, 0, tensors[0], 32)], boundaries), tensors
    )
    expected = exact(tensors, boundaries, None, 32)
    assert largest_difference(found[:1], expected[:1]) <= value
    assert largest_difference(found[1:], expected[1:]) <= gradient
    # An alarm that can ring: without sinks, and with a window that is one too long.
    no_sinks = values_and_gradients(
        on_ranks([attention_of(boundaries, None, 1, 0, tensors[0])], boundaries), tensors[:4]
    )
    assert largest_difference(no_sinks[:1], exact(tensors[:4], boundaries)[:1]) <= value
    assert largest_difference(no_sinks[:1], expected[:1]) > 10 * value
    assert largest_difference(exact(tensors, boundaries, None, 33)[:1], expected[:1]) > 2 * value


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.none() | st.integers(1, 20),
    st.sampled_from([1, 2, 4]),
)
def test_ranks_share_the_queries_of_a_row(
    units: list[int], chunk: int | None, cp_size: int
) -> None:
    """Each query is one rank's, ranks have as many, and a chunk changes neither order
    nor number.
    """
    boundaries = [0, *itertools.accumulate(n * 2 * cp_size for n in units)]
    ranks = [segments(boundaries, chunk, cp_size, rank) for rank in range(cp_size)]
    queries = [of.queries for of in ranks]
    assert torch.cat(queries).sort()[0].tolist() == list(range(boundaries[-1]))
    assert len({len(q) for q in queries}) == 1
    for rank, of in enumerate(ranks):
        assert torch.equal(of.queries, segments(boundaries, None, cp_size, rank).queries)
        assert (of.at < of.to).all()
        assert (of.start <= of.at).all()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(
    "lengths", [[1024], [4, 500, 512, 8], [4] * 256], ids=["one", "mixed", "short"]
)
@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_nothing_is_the_square_of_the_row(
    lengths: Sequence[int], chunk: int | None, cp_size: int
) -> None:
    """Forward and backward, indices included: at most three times the queries' own
    size, when all are padded to the longest.
    """
    boundaries = [0, *itertools.accumulate(lengths)]
    tensors = row(boundaries, heads=4, groups=2, head_dim=8, dtype=torch.float32)
    with LargestTensor() as made:
        ranks = [
            attention_of(boundaries, chunk, cp_size, rank, tensors[0]) for rank in range(cp_size)
        ]
        values_and_gradients(on_ranks(ranks, boundaries), tensors)
    assert made.elements <= 3 * tensors[0].numel() < boundaries[-1] ** 2 / 8


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("lengths", [[1024], [4, 500, 512, 8]], ids=["one", "mixed"])
def test_sinks_and_windows_make_nothing_of_the_square(
    lengths: Sequence[int], window: int | None
) -> None:
    """Windows take the keys of two; a mask of two windows' width is the largest that is
    not of the row's size.
    """
    boundaries = [0, *itertools.accumulate(lengths)]
    tensors = [*row(boundaries, heads=4, groups=2, head_dim=8, dtype=torch.float32), torch.zeros(4)]
    with LargestTensor() as made:
        values_and_gradients(
            on_ranks([attention_of(boundaries, None, 1, 0, tensors[0], window)], boundaries),
            tensors,
        )
    assert made.elements <= 3 * tensors[0].numel() < boundaries[-1] ** 2 / 8


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_llama4])
def test_a_model_makes_nothing_of_the_square(one_rank: None, tmp_path: Path, tiny: Any) -> None:
    """Loss and gradient of a packed row of 1024 tokens, whose widest activations have
    256 columns.
    """
    tiny(tmp_path, num_hidden_layers=4)
    (chunk,) = build.build(Model(dtype="fp32"), tmp_path)
    hf.load([chunk], family_of(tmp_path), tmp_path)
    cu = torch.tensor([0, 600, 601, 1024], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu, cu, max_seqlen_q=600, max_seqlen_kv=600)
    with LargestTensor() as made:
        chunk(torch.arange(1024)[None] % 128, None, None, packed_seq_params=packed).logsumexp(
            -1
        ).sum().backward()
    assert made.elements < 1024 * 600


def test_torch_takes_what_its_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """varlen_attn itself, on tensors without contents: names, shapes, and a backward
    pass.
    """
    monkeypatch.setattr(attention, "flash_takes", lambda _: True)
    told = attention_of([0, 8, 24], None, 2, 1, torch.zeros(0))
    assert isinstance(told, Flash)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(12, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k = torch.empty(24, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        out = told(q, k, k, None)
        out.sum().backward()
    assert out.shape == q.shape
    assert q.grad is not None
    assert k.grad is not None


@pytest.mark.parametrize("window", [None, 5])
def test_torch_takes_what_its_kernels_with_sinks_are_told(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Its GPU kernels, on tensors without contents: arguments, shapes, and a backward
    pass.
    """
    monkeypatch.setattr(attention, "flash_takes", lambda q: q.dtype == torch.bfloat16)
    monkeypatch.setattr(attention, "_cpu", attention._efficient)
    for dtype, kind in ((torch.bfloat16, Flash), (torch.float32, PaddedSegments)):
        told = attention_of([0, 8, 24], None, 1, 0, torch.zeros(1, dtype=dtype), window)
        assert isinstance(told, kind)
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, k, sinks = (
                torch.empty(shape, dtype=dtype, requires_grad=True)
                for shape in ((24, 4, 16), (24, 2, 16), (4,))
            )
            out = told(q, k, k, None, sinks)
            out.sum().backward()
        assert out.shape == q.shape
        assert [t.grad.shape for t in (q, k, sinks) if t.grad is not None] == [
            q.shape,
            k.shape,
            sinks.shape,
        ]


@pytest.mark.parametrize("groups", [2, 4])
def test_torch_is_told_of_grouped_queries_where_it_asks(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """As varlen_attn was before torch 2.12, which takes them unsaid, and as it is."""
    q = torch.zeros(3, 4, 8)
    k = torch.zeros(3, groups, 8)
    told: list[Any] = []

    def older(q: Tensor, k: Tensor, v: Tensor, *, window_size: Any) -> Tensor:
        return q

    def newer(
        q: Tensor, k: Tensor, v: Tensor, *, window_size: Any, enable_gqa: bool = False
    ) -> Tensor:
        told.append(enable_gqa)
        return q

    for function in (older, newer):
        monkeypatch.setattr(varlen_module, "varlen_attn", function)
        attention._varlen_attn.cache_clear()
        assert flash(q, k, k, window_size=(-1, 0)) is q
    attention._varlen_attn.cache_clear()
    assert told == [groups != 4]


def test_flash_is_for_half_precision_on_a_gpu() -> None:
    with FakeTensorMode():
        takes = {
            (device, dtype, size): flash_takes(torch.empty(4, 2, size, device=device, dtype=dtype))
            for device in ("cpu", "cuda")
            for dtype in (torch.bfloat16, torch.float32)
            for size in (128, 20, 512)
        }
    assert [case for case, taken in takes.items() if taken] == [("cuda", torch.bfloat16, 128)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_sequences_on_a_cpu_are_as_exact_as_long_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP32 between inputs and outputs of half precision, as torch's own kernel does
    it inside.
    """
    tensors = row([0, 5, 42], heads=4, groups=2, head_dim=16, dtype=dtype)
    wanted = exact([tensor.double() for tensor in tensors], [0, 5, 42], None)
    errors = []
    for short in (0, 512):
        monkeypatch.setattr(attention, "SHORT_ON_CPU", short)
        ranks = [attention_of([0, 5, 42], None, 1, 0, tensors[0])]
        found = values_and_gradients(on_ranks(ranks, [0, 5, 42]), tensors)
        errors.append(largest_difference([tensor.double() for tensor in found], wanted))
    as_torch, in_fp32 = errors
    assert 0 < in_fp32 <= as_torch < 0.1
