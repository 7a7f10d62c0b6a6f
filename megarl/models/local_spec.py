"""Norm, rotary embedding and attention of a transformer layer where Transformer Engine is not installed.

    q, k, v [tokens, heads, head_dim]  ─ rotate by position ─►  unpack ─►  [sequences, heads, longest, head_dim]
                                                                              │ causal SDPA
    [tokens, heads * head_dim]         ◄──────────────────────── pack ◄───────┘

Sequences of similar length are padded to a common one, so that attention needs no S x S mask and costs about the sum of
the squared lengths. What depends on the lengths alone (`Layout`) is made once a micro-batch and shared by all layers
that see the same (with attention in chunks, layer_attention.py, sequences are divided further). Unpacked input
[positions, batch, heads, head_dim] takes the same path without the indices. Under context parallelism a rank's queries meet
the gathered keys and values under a mask.

megatron-core has neither: its torch norm refuses sequence parallelism, its own attention refuses packed sequences, and its
rotary embedding walks over the sequences of a pack in Python, for q and k of every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models.layer_attention import LayerAttention, l2_norm, positions_of, temperatures, within_chunks
from megarl.models.rope import Rope


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, the mean taken in float32 (as transformers' LlamaRMSNorm)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each TP rank sees a part of the sequence: finalize_model_grads sums the gradients of parameters marked so.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


@dataclass(frozen=True)
class Layout:
    """Where this rank's tokens of one packed micro-batch stand.

    positions [tokens]: in their sequences; cos, sin [tokens, 1, head_dim] of them. buckets: (sequences, longest) of each padded
    batch; a slot is a place in one, all buckets end to end. unpack [slots]: the token of each slot (0 for padding); pack
    [tokens]: the slot of each token; padding: slots that are nobody's. All three None if slots and tokens coincide. mask
    [tokens, tokens * CP] bool instead, if CP > 1.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    buckets: tuple[tuple[int, int], ...] = ()
    unpack: Tensor | None = None
    pack: Tensor | None = None
    padding: Tensor | None = None
    mask: Tensor | None = None


def layout_of(boundaries: Sequence[int], chunk: int | None, rope: Rope, like: Tensor, cp: Any) -> Layout:
    """The layout of sequences [boundaries[i], boundaries[i+1]) on this rank of context-parallel group `cp`; with `chunk`,
    attention stays within multiples of it."""
    position = positions_of(boundaries)
    if cp.size() == 1:
        parts = within_chunks(boundaries, chunk) if chunk else boundaries
        lengths = torch.tensor(parts).diff()
        buckets, unpack, pack = _padded(lengths.tolist(), torch.repeat_interleave(lengths), positions_of(parts))
        position = position.to(like.device)
        turned = (position, *rope(position, like.dtype))
        if len(unpack) == len(pack) and torch.equal(pack, torch.arange(len(pack))):
            return Layout(*turned, buckets)
        real = torch.zeros(len(unpack), dtype=torch.bool).index_fill_(0, pack, True)
        unpack, pack, padding = (t.to(like.device) for t in (unpack, pack, (~real).nonzero().flatten()))
        return Layout(*turned, buckets, unpack, pack, padding)
    # Of the 2 CP pieces of a sequence rank r has the r-th from the front and the r-th from the back; keys come gathered.
    lengths = torch.tensor(boundaries).diff()
    sequence = torch.repeat_interleave(lengths)
    piece = position // (lengths // (2 * cp.size()))[sequence]
    owner = torch.minimum(piece, 2 * cp.size() - 1 - piece)
    mine, gathered = (owner == cp.rank()).nonzero().flatten(), torch.argsort(owner, stable=True)
    of_query, of_key = position[mine][:, None], position[gathered]
    mask = (sequence[mine][:, None] == sequence[gathered]) & (of_key <= of_query)
    if chunk:
        mask &= of_key // chunk == of_query // chunk
    here = position[mine].to(like.device)
    return Layout(here, *rope(here, like.dtype), mask=mask.to(like.device))


def _padded(
    lengths: list[int], sequence: Tensor, position: Tensor
) -> tuple[tuple[tuple[int, int], ...], Tensor, Tensor]:
    """Buckets, unpack and pack: longest sequences first, a new bucket when one is less than half its bucket's longest."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    first_slot = torch.zeros(len(lengths), dtype=torch.int64)
    slots = 0
    for i in order:
        if not buckets or 2 * lengths[i] < buckets[-1][1]:
            buckets.append([0, lengths[i]])
        buckets[-1][0] += 1
        first_slot[i] = slots
        slots += buckets[-1][1]
    pack = first_slot[sequence] + position
    unpack = torch.zeros(slots, dtype=torch.int64).index_copy_(0, pack, torch.arange(len(pack)))
    return tuple((n, longest) for n, longest in buckets), unpack, pack


class _Unpack(torch.autograd.Function):
    """[tokens, …] -> [slots, …]. Padding slots get no gradient (causal attention never looks at them), so back is `pack`:
    a gather, many times faster than the scatter-add autograd would do."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.unpack)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.layout.pack), None


class _Pack(torch.autograd.Function):
    """[slots, …] -> [tokens, …]."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return slots.index_select(0, layout.pack)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.layout.unpack).index_fill_(0, ctx.layout.padding, 0), None


class CausalAttention(torch.nn.Module):
    """megatron's `core_attention`: rotation, then causal attention with grouped queries, packed or not."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        rope: Rope,
        layers: Sequence[LayerAttention],
        pg_collection: Any,
        **_: Any,
    ) -> None:
        """layers: of the whole model."""
        super().__init__()
        self.scale = config.softmax_scale
        self.rope = rope
        self.layer = layers[layer_number - 1]
        self.cp = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Packed: [tokens, heads, head_dim] -> [tokens, heads * head_dim]. Else [s, b, heads, head_dim] -> [s, b, …]."""
        if packed_seq_params is None:
            positions = torch.arange(len(query), device=query.device)
            rotation = self.rope.of_range(len(query), query.dtype, query.device)
            query, key = self._prepared(query, key, positions[:, None, None, None], *rotation)
            batch_first = [t.transpose(0, 1) for t in (query, key, value)]
            return self._attend_in_chunks(*batch_first).transpose(0, 1).flatten(2)
        layout = self._layout(packed_seq_params, query)
        query, key = self._prepared(query, key, layout.positions[:, None, None], layout.cos, layout.sin)
        if layout.mask is not None:
            key, value = (gather_from_sequence_parallel_region(t.contiguous(), group=self.cp) for t in (key, value))
            return self._attend(query[None], key[None], value[None], mask=layout.mask)[0].flatten(1)
        parts = [query, key, value]
        if layout.unpack is not None:
            parts = [_Unpack.apply(t, layout) for t in parts]
        in_buckets = [t.split([n * longest for n, longest in layout.buckets]) for t in parts]
        outputs = [
            self._attend(*(t.unflatten(0, shape) for t in bucket), causal=True).flatten(0, 1)
            for shape, *bucket in zip(layout.buckets, *in_buckets, strict=True)
        ]
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if layout.pack is not None:
            output = _Pack.apply(output, layout)
        return output.flatten(1)

    def _prepared(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as they meet. positions, cos, sin broadcast against them."""
        if self.layer.rotary:
            q, k = self.rope.rotate(q, cos, sin), self.rope.rotate(k, cos, sin)
        if self.layer.l2_epsilon is not None:
            q, k = l2_norm(q, self.layer.l2_epsilon), l2_norm(k, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            q = (q * temperatures(positions, *self.layer.temperature)).to(q.dtype)
        return q, k

    def _layout(self, packed: PackedSeqParams, like: Tensor) -> Layout:
        """Of this micro-batch: made by the first layer that needs it, kept with the parameters all layers get."""
        known = vars(packed).setdefault("megarl_layouts", {})
        chunk = self.layer.chunk if self.layer.chunk and packed.max_seqlen_q > self.layer.chunk else None
        if chunk not in known:
            boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            known[chunk] = layout_of(boundaries.tolist(), chunk, self.rope, like, self.cp)
        layout: Layout = known[chunk]
        return layout

    def _attend_in_chunks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[batch, positions, heads, head_dim] in and out; chunks become sequences, the last one padded behind."""
        (batch, length), chunk = q.shape[:2], self.layer.chunk
        if chunk is None or length <= chunk:
            return self._attend(q, k, v, causal=True)
        chunks = -(-length // chunk)
        q, k, v = (
            F.pad(t, (0, 0, 0, 0, 0, chunks * chunk - length)).unflatten(1, (chunks, chunk)).flatten(0, 1)
            for t in (q, k, v)
        )
        return self._attend(q, k, v, causal=True).unflatten(0, (batch, chunks)).flatten(1, 2)[:, :length]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """[batch, positions, heads, head_dim] in and out."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)
