"""SGLang's attention on a CPU, with requests decoded together instead of one after the
other.

    requests by length         ─► batches, each padded to its longest
    200 190 188 | 150 131 | 60 ─► one masked SDPA for each

The stock backend (`torch_native`) loops over the requests in Python in every layer,
which took 63 % of a server's time with 180 requests of a small model. Here, everything
that depends only on the lengths is made once per step and shared by all layers. Only
plain decoding is replaced, and attention with sinks (gpt-oss) and their windows, which
the stock backend lacks; the rest is SGLang's. Nothing here runs on a machine with a
GPU.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

FILL = 0.8
"""A request shorter than this share of its batch's longest begins a new batch: a
compromise between padding and calls.
"""


class DecodeBatch(NamedTuple):
    """Requests of similar length. requests [n]: their indices. slots [n * longest]: the
    place of each of their tokens in the cache (any place, for padding). mask [n, 1, 1,
    longest]: which slots are not padding.
    """

    requests: Tensor
    slots: Tensor
    mask: Tensor


def batches(lengths: Tensor, slots_of: Tensor) -> list[DecodeBatch]:
    """Divide requests into batches. lengths [requests]: tokens in the cache, at least
    1. slots_of: [requests, ≥ longest].
    """
    ordered, order = lengths.sort(descending=True)
    starts = []  # of the batches after the first, in the order of lengths
    longest = int(ordered[0])  # of the batch in progress
    for i, length in enumerate(ordered.tolist()):
        if length < FILL * longest:
            starts.append(i)
            longest = length
    result = []
    for requests in order.tensor_split(starts):
        own_lengths = lengths[requests]
        longest = int(own_lengths[0])
        slots = slots_of[requests, :longest].long().flatten()
        is_token = torch.arange(longest) < own_lengths[:, None]
        result.append(DecodeBatch(requests, slots, is_token[:, None, None]))
    return result


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: list[DecodeBatch],
    scale: float | None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from a new token of each request. query [requests, heads, head_dim]; keys,
    values [slots, kv_heads, head_dim]; sinks [heads]; window: number of earlier tokens
    that it attends to; None: all.
    """
    output = torch.empty_like(query)
    groups, width = keys.shape[1:]
    for part in parts:
        n = len(part.requests)
        longest = part.mask.shape[-1]
        shape = (n, longest, groups, width)
        k = keys.index_select(0, part.slots).view(shape).transpose(1, 2)
        v = values.index_select(0, part.slots).view(shape).transpose(1, 2)
        # The queries of a key-value group are rows of one product, so keys and values
        # need not be repeated.
        q = query[part.requests].view(n, groups, -1, width)
        mask = part.mask
        if window is not None:
            newest = mask.sum(-1, keepdim=True) - 1
            mask = mask & (torch.arange(longest) >= newest - window)
        if sinks is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            attended = attend_with_sinks(q, k, v, mask, scale, sinks.view(groups, -1))
        output[part.requests] = attended.view(n, -1, width)
    return output


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, sinks: Tensor
) -> Tensor:
    """Attend with an additional score that has no value, sinks [heads, 1 or queries].
    q, k, v [batch, heads, .., head_dim]; mask: which keys a query attends to. Only the
    scores' log-sum-exp is needed for this (core/models/attention.py).
    """
    added = torch.zeros(mask.shape, dtype=q.dtype)
    added.masked_fill_(~mask, -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, scores = kernel(q, k, v, attn_mask=added, scale=scale)
    share_without_sink = torch.sigmoid(scores - sinks)
    return (output * share_without_sink[..., None]).to(q.dtype)


class BatchedDecode(TorchNativeAttnBackend):
    """SGLang's backend `torch_native`, with plain decoding replaced and sinks added."""

    _sinks: Tensor | None = None

    def forward_extend(self, *args: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """Attend from several tokens of a request. sinks [heads]"""
        self._sinks = sinks
        return super().forward_extend(*args, **options)

    def forward_decode(self, *args: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """Attend from one new token of each request. sinks [heads]"""
        self._sinks = sinks
        return super().forward_decode(*args, **options)

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of a request that fills a batch, where copies of the
        attention compute equally many tokens (core/engine/copies.py).
        """
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Make what all layers share in this step."""
        super().init_forward_metadata(forward_batch)
        self._batches = None
        if forward_batch.forward_mode.is_decode() and forward_batch.encoder_lens is None:
            rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
            self._batches = batches(forward_batch.seq_lens, rows)
            self._longest = int(forward_batch.seq_lens.max())

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *arguments: object,
        **options: Any,
    ) -> Tensor:
        """Write the attention of a new token of each request to `output`, and return
        it: in batches of requests, or by SGLang's loop if types, widths, an encoder or
        a window that binds do not allow it. query, output [requests, heads, head_dim];
        caches [slots, kv_heads, head_dim].
        """
        window = options["sliding_window_size"]
        if self._sinks is not None:
            assert self._batches is not None  # only a model with an encoder has none
            options = {"scale": options["scaling"], "sinks": self._sinks, "window": window}
            return output.copy_(decode(query, k_cache, v_cache, self._batches, **options))
        is_plain = query.dtype == k_cache.dtype and query.shape[-1] == v_cache.shape[-1]
        window_binds = window is not None and self._batches is not None and self._longest > window
        if self._batches is None or not is_plain or window_binds:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, *arguments, **options
            )
        return output.copy_(decode(query, k_cache, v_cache, self._batches, options["scaling"]))

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        requests: Tensor,
        lengths: Tensor,
        prefix_lengths: Tensor,
        new_lengths: Tensor,
        *arguments: object,
        **options: Any,
    ) -> Tensor:
        """Attend from query [tokens, heads, head_dim]: the new tokens of each request.
        lengths: those of the prefix plus the new ones.
        """
        if self._sinks is None:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                requests,
                lengths,
                prefix_lengths,
                new_lengths,
                *arguments,
                **options,
            )
        window = options["sliding_window_size"]
        queries_per_group = query.shape[1] // k_cache.shape[1]
        sizes = new_lengths.tolist()
        parts = zip(
            requests, lengths.tolist(), query.split(sizes), output.split(sizes), strict=True
        )
        for request, length, q, own_output in parts:
            slots = req_to_token[request, :length].long()
            k = k_cache[slots].repeat_interleave(queries_per_group, 1).transpose(0, 1)[None]
            v = v_cache[slots].repeat_interleave(queries_per_group, 1).transpose(0, 1)[None]
            first = length - len(q)
            mask = torch.ones(len(q), length, dtype=torch.bool).tril(first)
            if window is not None:
                mask = mask.triu(first - window)
            q = q.transpose(0, 1)[None]
            attended = attend_with_sinks(
                q, k, v, mask[None, None], options["scaling"], self._sinks[:, None]
            )
            own_output.copy_(attended[0].transpose(0, 1))
        return output
