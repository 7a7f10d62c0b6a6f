"""megarl's own modules in megatron's model: norm, rotary embedding and attention, with
and without Transformer Engine; a critic's head.

    CausalAttention      q, k, v [tokens, heads, head_dim] ─ rotate by position
                         ─► attention.py ─► [tokens, heads * head_dim]
    LatentAttention      hidden ─► compressed q, k and v, and k's rotated part
                         ─► q, k, v of each head ─► CausalAttention
    WholeNormAttention   hidden ─► q, k, v ─► norms of all heads together
                         ─► CausalAttention, or megatron's
    ChunkedTEAttention   megatron rotates ─► L2 norm or temperature
                         ─► TEDotProductAttention, with chunks as sequences

megatron-core's own modules do not suffice: its norm refuses sequence parallelism, its
attention refuses packed sequences, its rotary embedding loops over them in Python.

A rotary embedding rotates pairs of a head's elements:

halves         (x0 … x7)  ->  pairs (x0, x4) (x1, x5) (x2, x6) (x3, x7)
               most models
interleaved    (x0 … x7)  ->  pairs (x0, x1) (x2, x3) (x4, x5) (x6, x7)
               Llama 4, DeepSeek-V3; rotated in float32
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
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
        unscaled = _yarn_ramp(model, scaling, len(steps))
        return 1.0 / (scaling.factor * wavelengths) * (1 - unscaled) + frequencies * unscaled
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original / scaling.high
    shortest_stretched = scaling.original / scaling.low
    stretched = torch.where(
        wavelengths > shortest_stretched, frequencies / scaling.factor, frequencies
    )
    if scaling.low == scaling.high:  # Llama 4: there is no range in between
        return stretched
    turns = scaling.original / wavelengths
    smooth = (turns - scaling.low) / (scaling.high - scaling.low)
    interpolated = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(is_between, interpolated, stretched)


def _yarn_ramp(model: Architecture, scaling: Yarn, pairs: int) -> Tensor:
    """Return how much of each unscaled frequency YaRN keeps [pairs], from 1 to 0."""

    def pair_that_turns(turns: float) -> float:
        """Return the pair that turns so often within the original context."""
        wavelength = scaling.original / (turns * 2 * math.pi)
        return model.rotated * math.log(wavelength) / (2 * math.log(model.rope_theta))

    first = pair_that_turns(scaling.fast)
    last = pair_that_turns(scaling.slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, model.rotated - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - first) / (last - first or 0.001)
    return 1 - ramp.clamp(0, 1)


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
        frequencies = self.inverse_frequencies.to(positions.device)
        angles = (positions.float()[:, None] * frequencies)[:, None]
        if self.interleaved:
            dtype = torch.float32
        cos = angles.cos() * self.magnitude
        sin = angles.sin() * self.magnitude
        return cos.to(dtype), sin.to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of x [..., head_dim] by its angle, keeping x's dtype."""
        rotated = 2 * cos.shape[-1]
        unrotated = x.shape[-1] - rotated
        if not unrotated:
            return _Rotation.apply(x, cos, sin, self.interleaved)
        if self.last:
            unchanged, x = x.split([unrotated, rotated], -1)
            return torch.cat([unchanged, _Rotation.apply(x, cos, sin, self.interleaved)], -1)
        x, unchanged = x.split([rotated, unrotated], -1)
        return torch.cat([_Rotation.apply(x, cos, sin, self.interleaved), unchanged], -1)


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
    """Return x [..., 2 n] with each pair turned by its angle. cos, sin [..., n]"""
    if interleaved:
        output = x * cos.repeat_interleave(2, -1)
    else:
        output = x * torch.cat([cos, cos], -1)
    first, second = _pairs(x, interleaved)
    output_first, output_second = _pairs(output, interleaved)
    output_first -= second * sin
    output_second += first * sin
    return output.to(x.dtype)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second element of each pair of x."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    return x.chunk(2, -1)


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
        """Normalise x [..., hidden_size]."""
        return rms_norm(x, self.eps, self.weight)


class WholeNorm(Module):
    """RMS norm over all heads together, of which each tensor-parallel rank has its
    share, and that part of the weight.
    """

    def __init__(self, config: TransformerConfig, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.group = group
        width = heads * config.kv_channels // group.size()
        device = torch.cuda.current_device()
        self.weight = Parameter(torch.ones(width, dtype=config.params_dtype, device=device))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's heads x [..., heads, head_dim]."""
        return rms_norm(x.flatten(-2), self.eps, self.weight, group=self.group).view(x.shape)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the weight; each tensor-parallel rank has that of its heads."""
        return _of_own_heads(self, "weight", self.group, prefix, sharded_offsets, metadata)


def _of_own_heads(
    module: Module,
    name: str,
    group: dist.ProcessGroup,
    prefix: str,
    offsets: tuple[Any, ...],
    metadata: dict[str, Any] | None,
) -> ShardedStateDict:
    """Return a module's tensors for megatron's checkpoints. The ranks of `group` divide
    the tensor `name` along its first dimension.
    """
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {name: 0},
        offsets,
        tp_group=group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )


class WholeNormAttention(SelfAttention):
    """megatron's attention with the norms of MiniMax-M2."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        group = self.pg_collection.tp
        self.q_norm = WholeNorm(config, config.num_attention_heads, group)
        self.k_norm = WholeNorm(config, config.num_query_groups, group)

    def get_query_key_value_tensors(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map hidden [s/tp, b, h] to this rank's heads of unrotated q, k and v [s, b,
        heads, head_dim].
        """
        q, k, v = super().get_query_key_value_tensors(*args, **kwargs)
        return self.q_norm(q), self.k_norm(k), v


class CenteredNorm(RMSNorm):
    """Computes x / rms(x) * (1 + weight) in float32. The weight stays as it is stored:
    1 + weight would lose digits in bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden_size]."""
        return rms_norm(x, self.eps, self.weight, centered=True)


class SwiGLU(torch.autograd.Function):
    """silu of the first half of x [..., 2 n] times the second half (arXiv 2002.05202).
    Writes the gradients of both halves into one tensor; autograd would make each and
    then copy both.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Map x [..., 2 n] to [..., n]."""
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        """Map the gradient of the output [..., n] to that of x [..., 2 n]."""
        x, activated = ctx.saved_tensors
        of_x = torch.empty_like(x)
        gate, up = x.chunk(2, -1)
        of_gate, of_up = of_x.chunk(2, -1)
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
        return _of_own_heads(self, "softmax_offset", self.tp, prefix, sharded_offsets, metadata)

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
        if packed_seq_params is None:
            return self._forward_rows(q, k, v)
        layout = self._layout(packed_seq_params, q)
        if self.layer.rotary:
            q = self.rope.rotate(q, layout.cos, layout.sin)
            k = self.rope.rotate(k, layout.cos, layout.sin)
        q, k = _normalised(self.layer, q, k)
        if self.layer.temperature is not None:
            q = _scaled(q, layout.positions, self.layer.temperature)
        if self.cp.size() > 1:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            k = gather(k.contiguous(), group=self.cp)
            v = gather(v.contiguous(), group=self.cp)
        width = v.shape[-1]
        if width < q.shape[-1]:  # latent attention; kernels need equal widths
            v = F.pad(v, (0, q.shape[-1] - width))
        attended = layout.kernels(q, k, v, self.scale, self.softmax_offset)
        return attended[..., :width].flatten(1)

    def _forward_rows(self, *inputs: Tensor) -> Tensor:
        """Attend within each row of q, k and v [s, b, heads, head_dim]: rows end to end
        are packed sequences, too.
        """
        length, rows = inputs[0].shape[:2]
        boundaries = torch.arange(rows + 1) * length
        packed = PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=length)
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in inputs)
        attended = self.forward(q, k, v, packed_seq_params=packed)
        return attended.unflatten(0, (rows, length)).transpose(0, 1)

    def _layout(self, packed: PackedSeqParams, like: Tensor) -> "_Layout":
        """Return the layout of a packed row. The first layer that needs one makes it,
        and keeps it with `packed`, which all layers get.
        """
        layouts = vars(packed).setdefault("megarl_layouts", {})
        chunk = _if_exceeded(self.layer.chunk, packed.max_seqlen_q)
        window = _if_exceeded(self.layer.window, packed.max_seqlen_q)
        if (chunk, window) not in layouts:
            boundaries = packed.cu_seqlens_q.tolist()
            size = self.cp.size()
            rank = self.cp.rank()
            queries = segments(boundaries, None, size, rank).queries
            positions = positions_of(boundaries)[queries].to(like.device)
            cos, sin = self.rope(positions, like.dtype)
            kernels = attention_of(boundaries, chunk, size, rank, like, window)
            layouts[chunk, window] = _Layout(positions, cos, sin, kernels)
        return layouts[chunk, window]


class _Layout(NamedTuple):
    """What layers with the same segments share of a packed row."""

    positions: Tensor  # [tokens] of this rank, each in its sequence
    cos: Tensor  # [tokens, 1, rotated / 2]
    sin: Tensor
    kernels: Kernels


def _if_exceeded(limit: int | None, length: int) -> int | None:
    """Return a layer's chunk or window if some sequence is longer, else None."""
    if limit and length > limit:
        return limit
    return None


def _normalised(layer: LayerAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if layer.l2_epsilon is None:
        return q, k
    return rms_norm(q, layer.l2_epsilon), rms_norm(k, layer.l2_epsilon)


def _scaled(q: Tensor, positions: Tensor, temperature: tuple[int, float]) -> Tensor:
    """Multiply q [tokens, heads, head_dim] by the temperature at its positions."""
    floor, scale = temperature
    return (q * temperatures(positions[:, None, None], floor, scale)).to(q.dtype)


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

        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
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
        config: MLATransformerConfig = self.config
        heads = self.num_attention_heads_per_partition
        gather = tensor_parallel.gather_from_tensor_model_parallel_region
        if config.q_lora_rank is None:
            q, _ = self.linear_q_proj(hidden_states)
        else:
            compressed = gather(self.linear_q_down_proj(hidden_states)[0])
            q, _ = self.linear_q_up_proj(self.q_layernorm(self._divided(compressed)))
        compressed = gather(self.linear_kv_down_proj(hidden_states)[0])
        shared, position = compressed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(self._divided(shared)))
        q = q.unflatten(-1, (heads, -1))
        kv = kv.unflatten(-1, (heads, -1))
        k, v = kv.split([config.qk_head_dim, config.v_head_dim], -1)
        position = tensor_parallel.copy_to_tensor_model_parallel_region(position).unsqueeze(-2)
        position = position.expand(*k.shape[:-1], -1)
        k = torch.cat([k, position], -1)
        if packed_seq_params is not None:
            q, k, v = (t.squeeze(1) for t in (q, k, v))
        return q, k, v, None, None

    def _divided(self, x: Tensor) -> Tensor:
        """Return this rank's share of the tokens, which the next norm and projection
        need under sequence parallelism.
        """
        if not self.config.sequence_parallel:
            return x
        return tensor_parallel.scatter_to_sequence_parallel_region(x)


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
        """Attend over a packed row, from [tokens, heads, head_dim]."""
        q, k = _normalised(self.layer, q, k)
        if self.layer.temperature is not None:
            q = self._scaled(q, packed_seq_params, self.layer.temperature)
        if self.layer.chunk is not None:
            packed_seq_params = self._divided(packed_seq_params, self.layer.chunk)
        return self.kernels(q, k, v, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _scaled(self, q: Tensor, packed: PackedSeqParams, temperature: tuple[int, float]) -> Tensor:
        """Multiply q [tokens, heads, head_dim] by the temperature, which is 1 up to the
        floor, so for most tokens.
        """
        floor, _ = temperature
        if packed.max_seqlen_q < floor:
            return q
        positions = positions_of(packed.cu_seqlens_q.tolist()).to(q.device)
        return _scaled(q, positions, temperature)

    def _divided(self, packed: PackedSeqParams, chunk: int) -> PackedSeqParams:
        """Return the parameters of the same row with its sequences divided at multiples
        of the chunk.
        """
        if packed.max_seqlen_q <= chunk:
            return packed
        if not hasattr(packed, "megarl_divided"):  # done once, by the first layer
            boundaries = packed.cu_seqlens_q.tolist()
            starts = segments(boundaries, chunk).start.tolist()
            divided = packed.cu_seqlens_q.new_tensor([*starts, boundaries[-1]])
            packed.megarl_divided = dataclasses.replace(
                packed,
                cu_seqlens_q=divided,
                cu_seqlens_kv=divided,
                max_seqlen_q=chunk,
                max_seqlen_kv=chunk,
            )
        return packed.megarl_divided


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
