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
def test_equals_the_loop_over_requests(lengths: list[int], groups: int, per_group: int, seed: int) -> None:
    sglang_cpu.install()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from megarl.shims.sglang_cpu_attention import batches, decode

    torch.manual_seed(seed)
    slots, width, requests = 2000, 8, len(lengths)
    keys, values = torch.randn(2, slots, groups, width)
    query = torch.randn(requests, groups * per_group, width)
    slots_of = torch.stack([torch.randperm(slots)[:96] for _ in lengths]).int()
    seq_lens = torch.tensor(lengths)

    parts = batches(seq_lens, slots_of)
    ours = decode(query, keys, values, parts, scale=0.3)
    theirs = TorchNativeAttnBackend._run_sdpa_forward_decode(
        None, query, torch.empty_like(query), keys, values, slots_of, torch.arange(requests), seq_lens,
        scaling=0.3, enable_gqa=per_group > 1,
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert sorted(torch.cat([p.requests for p in parts]).tolist()) == list(range(requests))
