"""megarl's own modules in megatron's model: norm, rotary embedding and attention, with
and without Transformer Engine; a critic's head.

    CausalAttention      q, k, v [tokens, heads, head_dim] ─ rotate by position ─► attention.py ─► [tokens, heads * head_dim]
    LatentAttention      hidden ─► compressed q, k and v, and k's rotated part ─► q, k, v of each head ─► CausalAttention
    ChunkedTEAttention   megatron rotates ─► L2 norm or temperature ─► TEDotProductAttention, with chunks as sequences

megatron-core's own modules do not suffice: its norm refuses sequence parallelism, its
attention refuses packed sequences, its rotary embedding loops over them in Python.

A rotary embedding rotates pairs of a head's elements:

halves         (x0 … x7)  ->  pairs (x0, x4) (x1, x5) (x2, x6) (x3, x7)       most models
interleaved    (x0 … x7)  ->  pairs (x0, x1) (x2, x3) (x4, x5) (x6, x7)       Llama 4, DeepSeek-V3; rotated in float32
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Module, Parameter

from megarl.core.base.architecture import Architecture, Yarn
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
    """Return inverse frequencies [rotated / 2] float32, bit for bit transformers'
    `default`, `llama3` and `yarn` (modeling_rope_utils.py).
    """
    steps = torch.arange(0, model.rotated, 2, dtype=torch.int64).float()
    wavelengths = model.rope_theta ** (steps / model.rotated)
    frequencies = 1.0 / wavelengths
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, Yarn):
        first, last = (
            model.rotated
            * math.log(scaling.original / (turns * 2 * math.pi))
            / (2 * math.log(model.rope_theta))
            for turns in (scaling.fast, scaling.slow)
        )
        if scaling.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, model.rotated - 1)
        ramp = (torch.arange(len(steps), dtype=torch.float32) - first) / (last - first or 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + frequencies * kept
    factor = scaling.factor
    low = scaling.low
    high = scaling.high
    original = scaling.original
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    if low == high:  # Llama 4: there is no range in between
        return stretched
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(
        (wavelengths >= original / high) & (wavelengths <= original / low), between, stretched
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of one model."""

    inverse_frequencies: Tensor  # [rotated / 2] float32
    interleaved: bool
    magnitude: float = 1.0  # a factor on the rotated elements
    last: bool = False  # a head's last elements are rotated, not its first

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, 1, rotated / 2] of each pair's angle, in
        float32 if interleaved, else in `dtype`.
        """
        angles = (positions.float()[:, None] * self.inverse_frequencies.to(positions.device))[
            :, None
        ]
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
    """Rotates pairs by their angles. The gradient is rotated back by the same angles,
    at a third of autograd's cost.
    """

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


class RMSNorm(Module):
    """Computes x / rms(x) * weight over the last dimension, with the mean in float32
    (like transformers' LlamaRMSNorm).
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each TP rank has a part of the sequence, and finalize_model_grads sums the
        # gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)


class SwiGLU(torch.autograd.Function):
    """silu of the first half of x [..., 2 n] times the second half (arXiv 2002.05202).
    Writes the gradients of both halves into one tensor; autograd would make each and
    then copy both.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        x, activated = ctx.saved_tensors
        of_x = torch.empty_like(x)
        (gate, up) = x.chunk(2, -1)
        (of_gate, of_up) = of_x.chunk(2, -1)
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return of_x


class CausalAttention(Module):
    """Takes the place of megatron's `core_attention`: rotation, then causal attention
    with grouped queries, packed or not.
    """

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
        super().__init__()
        self.scale = config.softmax_scale
        self.rope = rope
        self.layer = layers[layer_number - 1]
        self.cp = pg_collection.cp
        self.tp = pg_collection.tp
        self.softmax_offset = None  # megatron's name for sinks
        if self.layer.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            self.softmax_offset = Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=device)
            )
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the sinks; each tensor-parallel rank has those of its heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        split = {"softmax_offset": 0}
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
        """Attend, from [tokens, heads, head_dim] to [tokens, heads * head_dim] if
        packed, else [s, b, heads, head_dim] to [s, b, heads * head_dim].
        """
        if packed_seq_params is None:  # rows end to end are packed sequences, too
            length, rows = q.shape[:2]
            boundaries = torch.arange(rows + 1) * length
            pack = PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=length)
            attended = self.forward(
                *(t.transpose(0, 1).flatten(0, 1) for t in (q, k, v)), packed_seq_params=pack
            )
            return attended.unflatten(0, (rows, length)).transpose(0, 1)
        positions, cos, sin, kernels = self._layout(packed_seq_params, q)
        if self.layer.rotary:
            q = self.rope.rotate(q, cos, sin)
            k = self.rope.rotate(k, cos, sin)
        if self.layer.l2_epsilon is not None:
            q = rms_norm(q, self.layer.l2_epsilon)
            k = rms_norm(k, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            q = (q * temperatures(positions[:, None, None], *self.layer.temperature)).to(q.dtype)
        if self.cp.size() > 1:
            k, v = (
                tensor_parallel.gather_from_sequence_parallel_region(t.contiguous(), group=self.cp)
                for t in (k, v)
            )
        if (width := v.shape[-1]) < q.shape[-1]:  # latent attention; kernels need equal widths
            v = F.pad(v, (0, q.shape[-1] - width))
        return kernels(q, k, v, self.scale, self.softmax_offset)[..., :width].flatten(1)

    def _layout(
        self, packed: PackedSeqParams, like: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Kernels]:
        """Return positions [tokens] of this rank's tokens in their sequences, cos, sin,
        and kernels. The first layer that needs them makes them, and keeps them with
        `packed`, which all layers get.
        """
        known = vars(packed).setdefault("megarl_layouts", {})
        chunk, window = (
            n if n and packed.max_seqlen_q > n else None
            for n in (self.layer.chunk, self.layer.window)
        )
        if (chunk, window) not in known:
            boundaries = packed.cu_seqlens_q.tolist()
            size = self.cp.size()
            rank = self.cp.rank()
            here = positions_of(boundaries)[segments(boundaries, None, size, rank).queries].to(
                like.device
            )
            kernels = attention_of(boundaries, chunk, size, rank, like, window)
            known[chunk, window] = here, *self.rope(here, like.dtype), kernels
        return known[chunk, window]


class LatentAttention(MLASelfAttention):
    """megarl's code between the projections of megatron's multi-head latent attention,
    which rotates in Python, sequence by sequence, and loses gradients with tensor
    parallelism: those of k's rotated part, which all heads share, must be summed.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the up projections and norms. These norms have transformers' default
        epsilon, whatever rms_norm_eps is.
        """

        def norm(hidden_size: int, config: TransformerConfig, eps: float) -> RMSNorm:
            return RMSNorm(config, hidden_size, LATENT_EPSILON)

        linear = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in linear} | {
            "q_layernorm": norm,
            "kv_layernorm": norm,
        }

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        _key_value_states: None = None,
        _position_ids: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Map hidden [s/tp, b, h] to this rank's heads of unrotated q, k and v [s, b,
        heads, …], or [s, heads, …] if packed.
        """
        low: MLATransformerConfig = self.config
        if low.q_lora_rank is None:
            q, _ = self.linear_q_proj(hidden_states)
        else:
            narrow = tensor_parallel.gather_from_tensor_model_parallel_region(
                self.linear_q_down_proj(hidden_states)[0]
            )
            q, _ = self.linear_q_up_proj(self.q_layernorm(self._divided(narrow)))
        narrow = tensor_parallel.gather_from_tensor_model_parallel_region(
            self.linear_kv_down_proj(hidden_states)[0]
        )
        shared, position = narrow.split([low.kv_lora_rank, low.qk_pos_emb_head_dim], -1)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(self._divided(shared)))
        q, kv = (t.unflatten(-1, (self.num_attention_heads_per_partition, -1)) for t in (q, kv))
        k, v = kv.split([low.qk_head_dim, low.v_head_dim], -1)
        position = tensor_parallel.copy_to_tensor_model_parallel_region(position).unsqueeze(-2)
        k = torch.cat([k, position.expand(*k.shape[:-1], -1)], -1)
        if packed_seq_params is not None:
            q, k, v = (t.squeeze(1) for t in (q, k, v))
        return q, k, v, None, None

    def _divided(self, x: Tensor) -> Tensor:
        """Return this rank's share of the tokens, which the next norm and projection
        need under sequence parallelism.
        """
        return (
            tensor_parallel.scatter_to_sequence_parallel_region(x)
            if self.config.sequence_parallel
            else x
        )


LATENT_EPSILON = 1e-6


class ChunkedTEAttention(Module):
    """Takes the place of megatron's `core_attention`: Transformer Engine's kernels,
    with Llama 4's additions; CP is 1.
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
            q = rms_norm(q, self.layer.l2_epsilon)
            k = rms_norm(k, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            q = self._scaled(q, packed_seq_params, *self.layer.temperature)
        if self.layer.chunk is not None:
            packed_seq_params = self._divided(packed_seq_params, self.layer.chunk)
        return self.kernels(q, k, v, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _scaled(self, q: Tensor, packed: PackedSeqParams, floor: int, scale: float) -> Tensor:
        """Multiply q [tokens, heads, head_dim] by the temperature, which is 1 up to the
        floor, so for most tokens.
        """
        if packed.max_seqlen_q < floor:
            return q
        positions = positions_of(packed.cu_seqlens_q.tolist()).to(q.device)
        return (q * temperatures(positions[:, None, None], floor, scale)).to(q.dtype)

    def _divided(self, packed: PackedSeqParams, chunk: int) -> PackedSeqParams:
        """Return the parameters of the same row with its sequences divided at multiples
        of the chunk.
        """
        if packed.max_seqlen_q <= chunk:
            return packed
        known = vars(packed)
        if "megarl_divided" not in known:  # done once, by the first layer
            like = packed.cu_seqlens_q
            boundaries = packed.cu_seqlens_q.tolist()
            parts = like.new_tensor([*segments(boundaries, chunk).start.tolist(), boundaries[-1]])
            known["megarl_divided"] = dataclasses.replace(
                packed,
                cu_seqlens_q=parts,
                cu_seqlens_kv=parts,
                max_seqlen_q=chunk,
                max_seqlen_kv=chunk,
            )
        return known["megarl_divided"]


class ValueHead(Module):
    """A critic's head, in place of GPTModel's output layer: one float32 number per
    hidden state. The weight starts at zero, so the first advantages are the rewards.
    Every tensor-parallel rank has all of it, so its gradients need no reduction.
    """

    def __init__(
        self, config: TransformerConfig, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device)
        )
        # Code that gathers hidden states reads these from an output layer.
        self.tp_group = group
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [...] float32 for hidden [..., h] of any precision."""
        return F.linear(hidden.float(), self.weight)[..., 0]

    @staticmethod
    def adopt(chunks: Sequence[GPTModel]) -> None:
        """Give chunks with loaded weights this head. They no longer use the embedding
        as the head.
        """
        for chunk in chunks:
            chunk.share_embeddings_and_output_weights = False
            if chunk.post_process:
                device = next(chunk.parameters()).device
                chunk.output_layer = ValueHead(chunk.config, chunk.output_layer.tp_group, device)
