"""Norm, rotary embedding and attention of a transformer layer without Transformer Engine.

    q, k, v [tokens, heads, head_dim]  ─ rotate by position ─►  attention.py  ─►  [tokens, heads * head_dim]

Unpacked input [positions, batch, heads, head_dim] goes directly to torch's causal SDPA, in chunks if the layer has any. Under
context parallelism a rank's queries meet the gathered keys and values.

megatron-core has none of it: its torch norm refuses sequence parallelism, its own attention refuses packed sequences, and its
rotary embedding loops over the sequences of a pack in Python, for q and k of every layer.

Rotary embedding turns pairs of a head's elements:

halves         (x0 … x7)  ->  pairs (x0, x4) (x1, x5) (x2, x6) (x3, x7)       most models
interleaved    (x0 … x7)  ->  pairs (x0, x1) (x2, x3) (x4, x5) (x6, x7)       Llama 4, which rotates in float32
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.core.base.architecture import Architecture
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


def inverse_frequencies(model: Architecture) -> Tensor:
    """Return [head_dim / 2] float32, bit for bit transformers' `default` and `llama3` (modeling_rope_utils.py).

    Llama 4 has low and high 1: no wavelength is between.
    """
    steps = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (model.rope_theta ** (steps / model.head_dim))
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    factor, low, high, original = scaling.factor, scaling.low, scaling.high, scaling.original
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    if low == high:
        return stretched
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where((wavelengths >= original / high) & (wavelengths <= original / low), between, stretched)


class Rope:
    """Rotary embedding of one model. inverse_frequencies [head_dim / 2] float32."""

    def __init__(self, inverse_frequencies: Tensor, interleaved: bool) -> None:
        self.inverse_frequencies, self.interleaved = inverse_frequencies, interleaved
        self.range = functools.lru_cache(maxsize=4)(self._range)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [positions, 1, head_dim], computed in float32; kept so if interleaved, else converted to `dtype`."""
        angles = positions.float()[:, None] * self.inverse_frequencies.to(positions.device)
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)[:, None]
            return angles.cos(), angles.sin()
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of x [..., head_dim] by its angle, keeping x's dtype."""
        if self.interleaved:
            wide = x.to(cos.dtype)
            partner = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
            return (wide * cos + partner * sin).to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def _range(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos, sin [length, 1, 1, head_dim] for the positions 0 … length-1."""
        cos, sin = self(torch.arange(length, device=device), dtype)
        return cos[:, None], sin[:, None]


class RMSNorm(torch.nn.Module):
    """Computes x / rms(x) * weight over the last dimension, the mean in float32 (as transformers' LlamaRMSNorm)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
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
class RowLayout:
    """Where this rank's tokens of one packed micro-batch are.

    positions [tokens]: in their sequences; cos, sin [tokens, 1, head_dim]: for these positions; attention: kernels for the row.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    attention: Flash | Buckets


def layout_of(
    boundaries: Sequence[int], chunk: int | None, rope: Rope, like: Tensor, cp: dist.ProcessGroup
) -> RowLayout:
    """Return the layout of sequences [boundaries[i], boundaries[i+1]) on this rank of context-parallel group `cp`.

    With `chunk`, attention stays within multiples of it.
    """
    size, rank = cp.size(), cp.rank()
    here = positions_of(boundaries)[segments(boundaries, None, size, rank).queries].to(like.device)
    return RowLayout(here, *rope(here, like.dtype), attention_of(boundaries, chunk, size, rank, like))


class CausalAttention(torch.nn.Module):
    """megatron's `core_attention`: rotation, then causal attention with grouped queries, packed or not."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        rope: Rope,
        layers: Sequence[LayerAttention],
        pg_collection: ProcessGroupCollection,
        **_: object,
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
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> Tensor:
        """Packed: map [tokens, heads, head_dim] to [tokens, heads * head_dim]. Else [s, b, heads, head_dim] to [s, b, …]."""
        if packed_seq_params is None:
            positions = torch.arange(len(query), device=query.device)
            rotation = self.rope.range(len(query), query.dtype, query.device)
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

    def _layout(self, packed: PackedSeqParams, like: Tensor) -> RowLayout:
        """Return this micro-batch's layout, made by the first layer that needs it, kept with the parameters all layers get."""
        known = vars(packed).setdefault("megarl_layouts", {})
        chunk = self.layer.chunk if self.layer.chunk and packed.max_seqlen_q > self.layer.chunk else None
        if chunk not in known:
            boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            known[chunk] = layout_of(boundaries.tolist(), chunk, self.rope, like, self.cp)
        layout: RowLayout = known[chunk]
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
