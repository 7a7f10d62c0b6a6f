"""megarl's own modules in megatron's model: norm, rotary embedding and attention, with and without Transformer Engine; a
critic's head.

    CausalAttention      q, k, v [tokens, heads, head_dim] ─ rotate by position ─► attention.py ─► [tokens, heads * head_dim]
    LatentAttention      hidden ─► narrow q; narrow k and v, and k's rotated part ─► q, k, v of each head ─► CausalAttention
    ChunkedTEAttention   megatron rotates ─► L2 norm or temperature ─► TEDotProductAttention, given shorter sequences in chunks

Under context parallelism a rank's queries meet the gathered keys and values. megatron-core's own modules do not suffice: its
norm refuses sequence parallelism, its attention refuses packed sequences, its rotary embedding loops over them in Python.

Rotary embedding turns pairs of a head's elements:

halves         (x0 … x7)  ->  pairs (x0, x4) (x1, x5) (x2, x6) (x3, x7)       most models
interleaved    (x0 … x7)  ->  pairs (x0, x1) (x2, x3) (x4, x5) (x6, x7)       Llama 4, DeepSeek-V3; rotated in float32
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Module, Parameter

from megarl.core.base.architecture import Architecture, Yarn
from megarl.core.base.errors import MegarlError
from megarl.core.models.attention import (
    Kernels,
    LayerAttention,
    attention_of,
    positions_of,
    rms_norm,
    segments,
    temperatures,
)


def inverse_frequencies(model: Architecture) -> Tensor:
    """Return [rotated / 2] float32, bit for bit transformers' `default`, `llama3` and `yarn` (modeling_rope_utils.py)."""
    steps = torch.arange(0, model.rotated, 2, dtype=torch.int64).float()
    wavelengths = model.rope_theta ** (steps / model.rotated)
    frequencies = 1.0 / wavelengths
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, Yarn):
        first, last = (
            model.rotated * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))
            for turns in (scaling.fast, scaling.slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, model.rotated - 1)
        ramp = (torch.arange(len(steps), dtype=torch.float32) - first) / (last - first or 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + frequencies * kept
    factor, low, high, original = scaling.factor, scaling.low, scaling.high, scaling.original
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    if low == high:  # Llama 4: no wavelength is between
        return stretched
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where((wavelengths >= original / high) & (wavelengths <= original / low), between, stretched)


class Rope:
    """Rotary embedding of one model. inverse_frequencies [rotated / 2] float32: of a head's first elements, or of its `last`.
    magnitude: what these are multiplied with."""

    def __init__(
        self, inverse_frequencies: Tensor, interleaved: bool, magnitude: float = 1.0, last: bool = False
    ) -> None:
        self.inverse_frequencies, self.interleaved = inverse_frequencies, interleaved
        self.magnitude, self.last = magnitude, last
        self.pack_of_rows = functools.lru_cache(maxsize=4)(_pack_of_rows)  # each keeps this model's layout of it

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [positions, 1, rotated / 2] of each pair's angle, computed in float32; kept so if interleaved, else
        converted to `dtype`."""
        angles = (positions.float()[:, None] * self.inverse_frequencies.to(positions.device))[:, None]
        kept = torch.float32 if self.interleaved else dtype
        return (angles.cos() * self.magnitude).to(kept), (angles.sin() * self.magnitude).to(kept)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of x [..., head_dim] by its angle, keeping x's dtype."""
        rotated = 2 * cos.shape[-1]
        if not (rest := x.shape[-1] - rotated):
            return _Rotation.apply(x, cos, sin, self.interleaved)
        parts = list(x.split([rest, rotated] if self.last else [rotated, rest], -1))
        parts[self.last] = _Rotation.apply(parts[self.last], cos, sin, self.interleaved)
        return torch.cat(parts, -1)


class _Rotation(torch.autograd.Function):
    """Turns pairs by their angles. Its gradient is turned back by the same angles: a third of what autograd would do."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin, ctx.interleaved), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    out = x * (cos.repeat_interleave(2, -1) if interleaved else torch.cat([cos, cos], -1))
    (first, second), (to_first, to_second) = (
        (t[..., ::2], t[..., 1::2]) if interleaved else t.chunk(2, -1) for t in (x, out)
    )
    to_first -= second * sin
    to_second += first * sin
    return out.to(x.dtype)


def _pack_of_rows(rows: int, length: int) -> PackedSeqParams:
    boundaries = torch.arange(rows + 1) * length
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=length)


class RMSNorm(Module):
    """Computes x / rms(x) * weight over the last dimension, the mean in float32 (as transformers' LlamaRMSNorm)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each TP rank sees a part of the sequence: finalize_model_grads sums gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)


class CausalAttention(Module):
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
        """layers: of the whole model."""
        super().__init__()
        self.scale = config.softmax_scale
        self.rope = rope
        self.layer = layers[layer_number - 1]
        self.cp, self.tp = pg_collection.cp, pg_collection.tp
        self.softmax_offset = None  # megatron's name of sinks
        if self.layer.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            self.softmax_offset = Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks, of which each tensor-parallel rank has those of its heads."""
        state, split = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, split, sharded_offsets, tp_group=self.tp, dp_cp_group=group
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> Tensor:
        """Packed: map [tokens, heads, head_dim] to [tokens, heads * head_dim]. Else [s, b, heads, head_dim] to [s, b, …]."""
        if packed_seq_params is None:  # rows end to end are a pack, too
            length, rows = q.shape[:2]
            q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
            attended = self.forward(q, k, v, packed_seq_params=self.rope.pack_of_rows(rows, length))
            return attended.unflatten(0, (rows, length)).transpose(0, 1)
        positions, cos, sin, kernels = self._layout(packed_seq_params, q)
        if self.layer.rotary:
            q, k = self.rope.rotate(q, cos, sin), self.rope.rotate(k, cos, sin)
        if self.layer.l2_epsilon is not None:
            q, k = rms_norm(q, self.layer.l2_epsilon), rms_norm(k, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            q = (q * temperatures(positions[:, None, None], *self.layer.temperature)).to(q.dtype)
        if self.cp.size() > 1:
            k, v = (gather_from_sequence_parallel_region(t.contiguous(), group=self.cp) for t in (k, v))
        if (width := v.shape[-1]) < q.shape[-1]:  # latent attention; kernels want one width
            v = F.pad(v, (0, q.shape[-1] - width))
        return kernels(q, k, v, self.scale, self.softmax_offset)[..., :width].flatten(1)

    def _layout(self, packed: PackedSeqParams, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Kernels]:
        """Return where this rank's tokens are: positions [tokens] in their sequences, cos, sin, kernels.
        The first layer that needs it makes it for all, and keeps it with the parameters that all get."""
        known = vars(packed).setdefault("megarl_layouts", {})
        chunk, window = (n if n and packed.max_seqlen_q > n else None for n in (self.layer.chunk, self.layer.window))
        if (chunk, window) not in known:
            boundaries, size, rank = packed.cu_seqlens_q.tolist(), self.cp.size(), self.cp.rank()
            here = positions_of(boundaries)[segments(boundaries, None, size, rank).queries].to(like.device)
            kernels = attention_of(boundaries, chunk, size, rank, like, window)
            known[chunk, window] = here, *self.rope(here, like.dtype), kernels
        return known[chunk, window]


class LatentAttention(MLASelfAttention):
    """megatron's multi-head latent attention, with ours for what is between its projections.

    megatron's rotates in Python, sequence by sequence, and loses gradients with tensor parallelism: the rotated part of k is
    for all heads, so what the heads of each rank say of it has to be summed.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the layers between down and up. Their norms have transformers' default epsilon, whatever rms_norm_eps says."""

        def norm(hidden_size: int, config: TransformerConfig, eps: float) -> RMSNorm:
            return RMSNorm(config, hidden_size, LATENT_EPSILON)

        linear = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in linear} | {"q_layernorm": norm, "kv_layernorm": norm}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        _key_value_states: None = None,
        _position_ids: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Map hidden [s/tp, b, h] to this rank's heads of q, k and v, not rotated: [s, b, heads, …]; packed: [s, heads, …]."""
        low: MLATransformerConfig = self.config
        if low.q_lora_rank is None:
            q, _ = self.linear_q_proj(hidden_states)
        else:
            narrow = gather_from_tensor_model_parallel_region(self.linear_q_down_proj(hidden_states)[0])
            q, _ = self.linear_q_up_proj(self.q_layernorm(self._divided(narrow)))
        narrow = gather_from_tensor_model_parallel_region(self.linear_kv_down_proj(hidden_states)[0])
        shared, position = narrow.split([low.kv_lora_rank, low.qk_pos_emb_head_dim], -1)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(self._divided(shared)))
        q, kv = (t.unflatten(-1, (self.num_attention_heads_per_partition, -1)) for t in (q, kv))
        k, v = kv.split([low.qk_head_dim, low.v_head_dim], -1)
        position = copy_to_tensor_model_parallel_region(position).unsqueeze(-2)
        k = torch.cat([k, position.expand(*k.shape[:-1], -1)], -1)
        if packed_seq_params is not None:
            q, k, v = (t.squeeze(1) for t in (q, k, v))
        return q, k, v, None, None

    def _divided(self, x: Tensor) -> Tensor:
        """Return this rank's share of the tokens, as the next norm and projection need them under sequence parallelism."""
        return scatter_to_sequence_parallel_region(x) if self.config.sequence_parallel else x


LATENT_EPSILON = 1e-6


class ChunkedTEAttention(Module):
    """megatron's `core_attention` by Transformer Engine's kernels, with Llama 4's additions.

    If no sequence is longer than the chunk (8192 tokens in the released models), they get the original boundaries. Further ones
    would upset how they divide sequences among context-parallel ranks: there longer sequences are refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: object,
        layers: Sequence[LayerAttention],
        kernels: Callable[..., Module] = TEDotProductAttention,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.layer = layers[layer_number - 1]
        self.context_parallel = config.context_parallel_size
        self.kernels = kernels(config, layer_number, *args, **kwargs)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: object,
        packed_seq_params: PackedSeqParams,
        **kwargs: object,
    ) -> Tensor:
        if self.layer.l2_epsilon is not None:
            q, k = rms_norm(q, self.layer.l2_epsilon), rms_norm(k, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            q = self._scaled(q, packed_seq_params, *self.layer.temperature)
        if self.layer.chunk is not None:
            packed_seq_params = self._divided(packed_seq_params, self.layer.chunk)
        return self.kernels(q, k, v, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _scaled(self, q: Tensor, packed: PackedSeqParams, floor: int, scale: float) -> Tensor:
        """Multiply queries by the temperature, which is 1 up to the floor, so for all tokens of most batches."""
        if packed.max_seqlen_q < floor:
            return q
        self._refuse_context_parallel(packed.max_seqlen_q, "the temperature's first", floor)
        positions = positions_of(packed.cu_seqlens_q.tolist())
        factors = temperatures(positions.to(q.device), floor, scale)
        return (q * factors.view(-1, *[1] * (q.dim() - 1))).to(q.dtype)

    def _divided(self, packed: PackedSeqParams, chunk: int) -> PackedSeqParams:
        """Return the parameters of the same row with its sequences divided at multiples of the chunk."""
        if packed.max_seqlen_q <= chunk:
            return packed
        self._refuse_context_parallel(packed.max_seqlen_q, "an attention chunk of", chunk)
        known = vars(packed)
        if "megarl_divided" not in known:  # done once by the first layer, for all
            like, boundaries = packed.cu_seqlens_q, packed.cu_seqlens_q.tolist()
            parts = like.new_tensor([*segments(boundaries, chunk).start.tolist(), boundaries[-1]])
            known["megarl_divided"] = dataclasses.replace(
                packed, cu_seqlens_q=parts, cu_seqlens_kv=parts, max_seqlen_q=chunk, max_seqlen_kv=chunk
            )
        return known["megarl_divided"]

    def _refuse_context_parallel(self, tokens: int, what: str, limit: int) -> None:
        if self.context_parallel > 1:
            raise MegarlError(
                f"model.context_parallel: a sequence of {tokens} tokens is longer than {what} {limit}, which is not "
                "implemented across context-parallel ranks; set model.context_parallel=1"
            )


class ValueHead(Module):
    """A critic's head, in place of GPTModel's output layer: one float32 number per hidden state instead of logits. The weight
    starts at zero, so that the first advantages are the rewards themselves. Every tensor-parallel rank holds it whole and
    computes the same values, so no gradients need a reduction."""

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        # Code that gathers hidden states reads these from an output layer.
        self.tp_group, self.sequence_parallel = group, config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [...] float32 for hidden [..., h] of any precision."""
        return F.linear(hidden.float(), self.weight)[..., 0]

    @staticmethod
    def adopt(chunks: Sequence[GPTModel]) -> None:
        """Give this head to chunks with loaded weights. They no longer share a head with the embedding."""
        for chunk in chunks:
            chunk.share_embeddings_and_output_weights = False
            if chunk.post_process:
                device = next(chunk.parameters()).device
                chunk.output_layer = ValueHead(chunk.config, chunk.output_layer.tp_group, device)
