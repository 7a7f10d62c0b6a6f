"""Attention by Transformer Engine's kernels, with Llama 4's additions (attention.py).

    megatron rotates q and k ─► L2 norm or temperature ─► TEDotProductAttention, given shorter sequences where chunked

If no sequence is longer than the chunk (8192 tokens in the released models), its kernels get the original boundaries.
Transformer Engine itself divides each sequence among context-parallel ranks, which further boundaries would upset: there
longer sequences are refused.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.models.attention import LayerAttention, l2_norm, positions_of, temperatures, within_chunks


class ChunkedTEAttention(torch.nn.Module):
    """megatron's `core_attention`; `kernels` is Transformer Engine's."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: object,
        layers: Sequence[LayerAttention],
        kernels: Callable[..., torch.nn.Module] = TEDotProductAttention,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.layer = layers[layer_number - 1]
        self.context_parallel = config.context_parallel_size
        self.kernels = kernels(config, layer_number, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: object,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> Tensor:
        if self.layer.l2_epsilon is not None:
            query, key = l2_norm(query, self.layer.l2_epsilon), l2_norm(key, self.layer.l2_epsilon)
        if self.layer.temperature is not None:
            query = self._scaled(query, packed_seq_params)
        if self.layer.chunk is not None:
            packed_seq_params = self._divided(len(query), packed_seq_params)
        return self.kernels(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _scaled(self, query: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Scale queries by the temperature, which is 1 up to the floor, so in most batches throughout."""
        assert self.layer.temperature is not None
        longest = len(query) if packed is None else packed.max_seqlen_q
        if longest < self.layer.temperature[0]:
            return query
        self._refuse_context_parallel(longest, "the temperature's first", self.layer.temperature[0])
        positions = torch.arange(len(query)) if packed is None else positions_of(packed.cu_seqlens_q.tolist())
        scale = temperatures(positions.to(query.device), *self.layer.temperature)
        return (query * scale.view(-1, *[1] * (query.dim() - 1))).to(query.dtype)

    def _divided(self, tokens: int, packed: PackedSeqParams | None) -> PackedSeqParams | None:
        """Return the parameters of the same row with its sequences divided at multiples of the chunk."""
        chunk = self.layer.chunk
        assert chunk is not None
        if packed is None and tokens > chunk:
            raise MegarlError(
                f"learner.packing: a sequence of {tokens} tokens is longer than this model's attention chunk ({chunk}), "
                "which Transformer Engine computes for packed sequences only; set learner.packing=true"
            )
        if packed is None or packed.max_seqlen_q <= chunk:
            return packed
        self._refuse_context_parallel(packed.max_seqlen_q, "an attention chunk of", chunk)
        known = vars(packed)
        if "megarl_divided" not in known:  # done once by the first layer, for all
            like = packed.cu_seqlens_q
            parts = torch.tensor(within_chunks(like.tolist(), chunk), dtype=like.dtype, device=like.device)
            known["megarl_divided"] = dataclasses.replace(
                packed, cu_seqlens_q=parts, cu_seqlens_kv=parts, max_seqlen_q=chunk, max_seqlen_kv=chunk
            )
        divided: PackedSeqParams = known["megarl_divided"]
        return divided

    def _refuse_context_parallel(self, longest: int, what: str, limit: int) -> None:
        if self.context_parallel > 1:
            raise MegarlError(
                f"model.context_parallel: a sequence of {longest} tokens is longer than {what} {limit}, which is not "
                "implemented across context-parallel ranks; set model.context_parallel=1"
            )
