"""Gated delta networks in megatron's layers, in place of attention (Qwen3.5,
Qwen3-Next).

    hidden [tokens/tp] ─► in_proj ─► of each key head: q, k; v, gate, b, a of its
                                     value heads
                                ─► convolution of q, k, v, silu ─► delta rule
                                ─► norm x silu(gate) ─► out_proj ─► hidden [tokens/tp]

Rows of in_proj and channels of the convolution are in the order of key heads, so each
rank has heads of its own, and checkpoints are plain divisions. Context-parallel ranks
exchange tokens for heads: each computes whole sequences of its share of the heads.

megatron's own network needs the package fla even to be constructed, and GPU kernels for
packed rows; its torch code refuses these.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn import Parameter

from megarl.core.base.delta_layers import DeltaLayers
from megarl.core.models.attention import segments
from megarl.core.models.delta_kernels import rule_for
from megarl.core.models.delta_rule import Chunks, chunks_of, convolve

L2_EPSILON = 1e-6
"""Beneath the root in the norms of q and k."""


class DeltaNetwork(MegatronModule):
    """A layer's gated delta network. A_log and the norm's weight are FP32 in a model of
    any type: the released ones are, and a rounded A_log changes every decay.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        delta: DeltaLayers,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.delta = delta
        self.tp = pg_collection.tp
        self.cp = pg_collection.cp
        self.layer_number = layer_number
        grouped = delta.grouped
        # Of one key head: q, k, v; gate, b, a.
        self.widths = [delta.key_dim, delta.key_dim, grouped * delta.value_dim]
        self.widths += [grouped * delta.value_dim, grouped, grouped]
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": self.tp,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            delta.key_heads * sum(self.widths),
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.out_proj = RowParallelLinear(
            delta.value, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )
        ranks = self.tp.size()
        value_heads = delta.value_heads // ranks
        channels = delta.convolved // ranks
        self.convolution = _of_heads((channels, 1, delta.taps), config.params_dtype)
        self.A_log = _of_heads((value_heads,), torch.float32)
        self.dt_bias = _of_heads((value_heads,), config.params_dtype)
        device = torch.cuda.current_device()
        norm = torch.ones(delta.value_dim, dtype=torch.float32, device=device)
        self.norm_weight = Parameter(norm)
        # All ranks have it and each applies it to its own heads. finalize_model_grads
        # sums the gradients of parameters with this mark.
        self.norm_weight.sequence_parallel = config.sequence_parallel
        modules = config.recompute_modules or []
        self.recomputes = config.recompute_granularity == "selective" and "mlp" in modules

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the parameters; each tensor-parallel rank has those of its heads."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        parameters: dict[str, Any] = {}
        self._save_to_state_dict(parameters, "", keep_vars=True)
        of_heads = dict.fromkeys(("convolution", "A_log", "dt_bias"), 0)
        state = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            of_heads,
            sharded_offsets,
            tp_group=self.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp
            )
        return state

    def backward_dw(self) -> None:
        """Do nothing: no weight gradient is put off."""

    def forward(
        self,
        hidden: Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> tuple[Tensor, None]:
        """Map hidden [s/tp, b, h] to the same shape, and no bias. Of a packed row b is
        1; otherwise each of the b rows is a sequence.
        """
        x, _ = self.in_proj(hidden)
        length, rows = x.shape[:2]
        packed = packed_seq_params
        if packed is None:
            boundaries = torch.arange(rows + 1) * length
            packed = PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=length)
        x = x.transpose(0, 1).flatten(0, 1)
        row = self._row(packed, x.device)
        if self.recomputes and x.requires_grad:
            y = tensor_parallel.checkpoint(lambda x: self._mixed(x, row), False, x)
        else:
            y = self._mixed(x, row)
        y = y.unflatten(0, (rows, length)).transpose(0, 1)
        output, _ = self.out_proj(y.contiguous())
        return output, None

    def _row(self, packed: PackedSeqParams, device: torch.device) -> "_TokenPlaces":
        """Return where a packed row's tokens are. The first layer that needs it makes
        it, and keeps it with `packed`, which all layers get.
        """
        if "megarl_delta_row" not in vars(packed):
            boundaries = packed.cu_seqlens_q.tolist()
            ranks = self.cp.size()
            in_rank_order = [segments(boundaries, None, ranks, r).queries for r in range(ranks)]
            tokens = torch.cat(in_rank_order).to(device)
            packed.megarl_delta_row = _TokenPlaces(
                tokens, tokens.argsort(), chunks_of(boundaries, device)
            )
        return packed.megarl_delta_row

    def _mixed(self, x: Tensor, row: "_TokenPlaces") -> Tensor:
        """Map the projections of this rank's tokens [tokens, heads of this rank times
        what one has] to what out_proj gets. Under context parallelism, tokens are
        exchanged for heads on the way in, and heads for tokens on the way out.
        """
        ranks = self.cp.size()
        if ranks == 1:
            return self._of_whole_sequences(x, row.chunks)
        by_rank = x.unflatten(-1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        of_all_tokens = tensor_parallel.all_to_all(self.cp, by_rank)[row.place]
        y = self._of_whole_sequences(of_all_tokens, row.chunks)
        by_rank = tensor_parallel.all_to_all(self.cp, y[row.tokens])
        return by_rank.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)

    def _of_whole_sequences(self, x: Tensor, chunks: Chunks) -> Tensor:
        """Map projections [tokens, heads times what one has] of all tokens to outputs
        [tokens, heads times value width], normalised and gated.
        """
        delta = self.delta
        convolution, log_rates, dt_bias = (
            parameter.chunk(self.cp.size())[self.cp.rank()]
            for parameter in (self.convolution, self.A_log, self.dt_bias)
        )
        dtype = x.dtype
        of_head = x.unflatten(-1, (-1, sum(self.widths)))
        to_convolve, gate, b, a = of_head.split([sum(self.widths[:3]), *self.widths[3:]], -1)
        convolved = convolve(to_convolve.flatten(1), convolution[:, 0], chunks.positions)
        convolved = F.silu(convolved).to(dtype).view_as(to_convolve)
        q, k, v = convolved.float().split(self.widths[:3], -1)
        q, k = (_normalised(t).repeat_interleave(delta.grouped, 1) for t in (q, k))
        v = v.reshape(len(x), -1, delta.value_dim)
        g = -log_rates.exp() * F.softplus(a.flatten(1).float() + dt_bias.float())
        beta = b.flatten(1).float().sigmoid()
        rule = rule_for(x, delta.key_dim, delta.value_dim)
        outputs = rule(q * delta.key_dim**-0.5, k, v, g, beta, chunks).to(dtype).float()
        inverse = outputs.pow(2).mean(-1, keepdim=True).add(self.config.layernorm_epsilon).rsqrt()
        gate = F.silu(gate.reshape(outputs.shape).float())
        return (outputs * inverse * self.norm_weight * gate).to(dtype).flatten(1)


class _TokenPlaces(NamedTuple):
    """Where the tokens of a packed row are."""

    tokens: Tensor  # [tokens] int64: positions in the row of all ranks' tokens, rank by rank
    place: Tensor  # [tokens] int64: of each position in the row, its index in `tokens`
    chunks: Chunks


def _of_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Parameter:
    """Return a parameter whose first dimension tensor parallelism divides."""
    parameter = Parameter(torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()))
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def _normalised(x: Tensor) -> Tensor:
    """Return x / |x| over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPSILON)
