"""Batched decoding on a CPU against SGLang's own loop over requests."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.shims import sglang_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only used without a GPU")


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=24),
    groups=st.sampled_from([1, 2]),
    per_group=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_equals_the_loop_over_requests(
    lengths: list[int], groups: int, per_group: int, seed: int
) -> None:
    sglang_cpu.install()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from megarl.shims.sglang_cpu_attention import batches, decode

    torch.manual_seed(seed)
    slots = 2000
    width = 8
    requests = len(lengths)
    keys, values = torch.randn(2, slots, groups, width)
    query = torch.randn(requests, groups * per_group, width)
    slots_of = torch.stack([torch.randperm(slots)[:96] for _ in lengths]).int()
    seq_lens = torch.tensor(lengths)

    parts = batches(seq_lens, slots_of)
    ours = decode(query, keys, values, parts, scale=0.3)
    theirs = TorchNativeAttnBackend._run_sdpa_forward_decode(
        None,
        query,
        torch.empty_like(query),
        keys,
        values,
        slots_of,
        torch.arange(requests),
        seq_lens,
        scaling=0.3,
        enable_gqa=per_group > 1,
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert sorted(torch.cat([p.requests for p in parts]).tolist()) == list(range(requests))


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    window=st.none() | st.integers(0, 80),
    seed=st.integers(0, 99),
)
def test_sinks_and_windows_are_a_column_and_a_mask(
    lengths: list[int], window: int | None, seed: int
) -> None:
    """Decoding, and prompts whose beginning is in the cache already, against scores
    with a column more.
    """
    sglang_cpu.install()
    from megarl.shims.sglang_cpu_attention import BatchedDecode, batches

    torch.manual_seed(seed)
    slots = 2000
    width = 8
    groups = 2
    shared = 3
    requests = len(lengths)
    keys, values = torch.randn(2, slots, groups, width)
    sinks = 2 * torch.randn(groups * shared)
    seq_lens = torch.tensor(lengths)
    slots_of = torch.stack([torch.randperm(slots)[:96] for _ in lengths]).int()
    backend = BatchedDecode.__new__(BatchedDecode)
    backend._sinks, backend._batches, backend._longest = (
        sinks,
        batches(seq_lens, slots_of),
        max(lengths),
    )

    def expected(request: int, q: torch.Tensor) -> torch.Tensor:
        """q [its last tokens, heads, head_dim]"""
        n = lengths[request]
        k, v = (
            t[slots_of[request, :n].long()].repeat_interleave(shared, 1).double()
            for t in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.3
        back = torch.arange(n - len(q), n)[:, None] - torch.arange(n)
        seen = (back >= 0) & (back <= (n if window is None else window))
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores.masked_fill(~seen, -torch.inf), column], -1).softmax(-1)[
            ..., :n
        ]
        return torch.einsum("hqk,khd->qhd", weights, v).float()

    rest = (slots_of, torch.arange(requests), seq_lens)
    options = {"scaling": 0.3, "enable_gqa": True, "sliding_window_size": window}
    query = torch.randn(requests, groups * shared, width)
    found = backend._run_sdpa_forward_decode(
        query, torch.empty_like(query), keys, values, *rest, None, **options
    )
    wanted = torch.cat([expected(i, query[i : i + 1]) for i in range(requests)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)

    new = torch.tensor([n - n // 3 for n in lengths])
    query = torch.randn(int(new.sum()), groups * shared, width)
    found = backend._run_sdpa_forward_extend(
        query,
        torch.empty_like(query),
        keys,
        values,
        *rest,
        seq_lens - new,
        new,
        None,
        causal=True,
        **options,
    )
    wanted = torch.cat([expected(i, q) for i, q in enumerate(query.split(new.tolist()))])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
