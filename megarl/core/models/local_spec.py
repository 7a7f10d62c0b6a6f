"""Norm, rotary embedding and attention of a transformer layer without Transformer Engine.

    q, k, v [tokens, heads, head_dim]  ─ rotate by position ─►  attention.py  ─►  [tokens, heads * head_dim]

Unpacked input [positions, batch, heads, head_dim] goes directly to torch's causal SDPA, in chunks if the layer has any. Under
context parallelism a rank's queries meet the gathered keys and values.

megatron-core has none of it: its torch norm refuses sequence parallelism, its own attention refuses packed sequences, and its
rotary embedding loops over the sequences of a pack in Python, for q and k of every layer.
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

from megarl.core.models.attention import (
    Buckets,
    Flash,
    LayerAttention,
    attention_of,
    causal,
    l2_norm,
    positions_of,
    segments,
    temperatures,
)
from megarl.core.models.rope import Rope


class RMSNorm(torch.nn.Module):
    """Computes x / rms(x) * weight over the last dimension, the mean in float32 (as transformers' LlamaRMSNorm)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each TP rank sees a part of the sequence: finalize_model_grads sums gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


@dataclass(frozen=True)
class Layout:
    """Where this rank's tokens of one packed micro-batch are.

    positions [tokens]: in their sequences; cos, sin [tokens, 1, head_dim]: of these positions; attention: what lets tokens
    meet.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    attention: Flash | Buckets


def layout_of(boundaries: Sequence[int], chunk: int | None, rope: Rope, like: Tensor, cp: Any) -> Layout:
    """Return the layout of sequences [boundaries[i], boundaries[i+1]) on this rank of context-parallel group `cp`.

    With `chunk`, attention stays within multiples of it.
    """
    size, rank = cp.size(), cp.rank()
    here = positions_of(boundaries)[segments(boundaries, None, size, rank).queries].to(like.device)
    return Layout(here, *rope(here, like.dtype), attention_of(boundaries, chunk, size, rank, like))


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
        """layers: those of the whole model."""
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
        """Packed: map [tokens, heads, head_dim] to [tokens, heads * head_dim]. Else [s, b, heads, head_dim] to [s, b, …]."""
        if packed_seq_params is None:
            positions = torch.arange(len(query), device=query.device)
            rotation = self.rope.of_range(len(query), query.dtype, query.device)
            query, key = self._prepared(query, key, positions[:, None, None, None], *rotation)
            batch_first = [t.transpose(0, 1) for t in (query, key, value)]
            return self._attend_in_chunks(*batch_first).transpose(0, 1).flatten(2)
        layout = self._layout(packed_seq_params, query)
        query, key = self._prepared(query, key, layout.positions[:, None, None], layout.cos, layout.sin)
        if self.cp.size() > 1:
            key, value = (gather_from_sequence_parallel_region(t.contiguous(), group=self.cp) for t in (key, value))
        return layout.attention(query, key, value, self.scale).flatten(1)

    def _prepared(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys ready to meet. positions, cos, sin broadcast against them."""
        if self.layer.rotary:
            q, k = self.rope.rotate(q, cos, sin), self.rope.rotate(k, cos, sin)
        if self.layer.l2_epsilon is not None:
            q, k = l2_norm(q, self.layer.l2_epsilon), l2_norm(k, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            q = (q * temperatures(positions, *self.layer.temperature)).to(q.dtype)
        return q, k

    def _layout(self, packed: PackedSeqParams, like: Tensor) -> Layout:
        """Return this micro-batch's layout, made by the first layer that needs it, kept with the parameters all layers get."""
        known = vars(packed).setdefault("megarl_layouts", {})
        chunk = self.layer.chunk if self.layer.chunk and packed.max_seqlen_q > self.layer.chunk else None
        if chunk not in known:
            boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            known[chunk] = layout_of(boundaries.tolist(), chunk, self.rope, like, self.cp)
        layout: Layout = known[chunk]
        return layout

    def _attend_in_chunks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: [batch, positions, heads, head_dim] in and out; chunks become sequences, the last one padded at its end."""
        (batch, length), chunk = q.shape[:2], self.layer.chunk
        if chunk is None or length <= chunk:
            return causal(q, k, v, self.scale)
        chunks = -(-length // chunk)
        q, k, v = (
            F.pad(t, (0, 0, 0, 0, 0, chunks * chunk - length)).unflatten(1, (chunks, chunk)).flatten(0, 1)
            for t in (q, k, v)
        )
        return causal(q, k, v, self.scale).unflatten(0, (batch, chunks)).flatten(1, 2)[:, :length]
