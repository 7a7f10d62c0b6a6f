"""Corrections to Llama 4 in SGLang 0.5.23.

Everywhere: `Llama4ForCausalLM`, the text-only class, loads no expert weights and does
not reorder q and k for its rotary embedding (only the multimodal class does both).

Without a GPU also:
    attention   q and k are cast to bfloat16, the rotary embedding's result is dropped
                (it works in place only on a GPU), and RoPE layers attend beyond their
                chunk
    experts     the router's weight on an expert's input is not implemented, and
                choosing experts needs a compiler
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.models import llama4
from torch import Tensor

from megarl.core.sync.served import rotary_order

SHARDS = {
    "gate_proj": ("w13_weight", "w1"),
    "up_proj": ("w13_weight", "w3"),
    "down_proj": ("w2_weight", "w2"),
}


class Llama4ForCausalLM(llama4.Llama4ForCausalLM):
    """The text model, loaded from any of its Hugging Face tensors."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load Hugging Face tensors, any number a call."""
        super().load_weights(self._dense(weights))

    def _dense(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that SGLang's own loader can take; load the experts, which
        it cannot, here.
        """
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            prefix, experts, part = name.partition(".experts.")
            if experts and part[0].isdigit():  # a published expert [rows, columns]
                number, kind, _ = part.split(".")
                stack, shard = SHARDS[kind]
                parameter = parameters[f"{prefix}.experts.{stack}"]
                parameter.weight_loader(
                    parameter, weight, stack, shard_id=shard, expert_id=int(number)
                )
            elif experts:
                stack = "w2_weight"
                shards = ["w2"]
                if part == "gate_up_proj":
                    stack = "w13_weight"
                    shards = ["w1", "w3"]
                parameter = parameters[f"{prefix}.experts.{stack}"]
                for shard, of_experts in zip(shards, weight.chunk(len(shards), -1), strict=True):
                    for expert, matrix in enumerate(of_experts.transpose(1, 2)):
                        parameter.weight_loader(
                            parameter, matrix, stack, shard_id=shard, expert_id=expert
                        )
            elif name.endswith((".q_proj.weight", ".k_proj.weight")):
                yield name, rotary_order(weight, self.config.head_dim)
            else:
                yield name, weight


EntryClass = [Llama4ForCausalLM]


def attend(self: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Replace llama4.Llama4Attention.forward. hidden_states [tokens, hidden]"""
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
    if self.rotary_emb is not None:
        q, k = self.rotary_emb(positions, q.contiguous(), k.contiguous())
    if self.qk_norm is not None:
        q = self.qk_norm(q.reshape(-1, self.head_dim)).view_as(q)
        k = self.qk_norm(k.reshape(-1, self.head_dim)).view_as(k)
    if self.attn_temperature_tuning and not self.use_rope:
        q = (q * self._get_attn_scale(positions)).to(q.dtype)
    output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
    return output


def choose_experts(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Replace llama4.Llama4MoE.custom_routing_function: the sigmoid of the `topk`
    largest logits, and their indices.
    """
    logits, chosen = torch.topk(gating_output, topk, dim=-1)
    return torch.sigmoid(logits.float()).to(hidden_states.dtype), chosen.to(torch.int32)


_native_experts = fused_moe_native.moe_forward_native


def native_experts(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """Replace fused_moe_native.moe_forward_native: apply the router's weight to the
    input if the config says so.
    """
    if config.apply_router_weight_on_input:
        weights, chosen, logits = topk_output
        if weights.shape[1] != 1:
            raise NotImplementedError(
                "the router's weight on the input of more than one expert a token"
            )
        x = x * weights.to(x.dtype)
        topk_output = StandardTopKOutput(torch.ones_like(weights), chosen, logits)
        config = dataclasses.replace(config, apply_router_weight_on_input=False)
    return _native_experts(layer, x, topk_output, config)


def chunk_mask(
    *,
    q_len: int,
    kv_len: int,
    sliding_window_size: int,
    device: torch.device,
    query_offset: int = 0,
) -> Tensor:
    """Replace TorchNativeAttnBackend._make_sliding_window_mask, for fixed chunks:
    [q_len, kv_len] bool.
    """
    query = torch.arange(query_offset, query_offset + q_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None]
    return (key <= query) & (key // sliding_window_size == query // sliding_window_size)


_build_attention = llama4.Llama4Attention.__init__


def build_attention(self: Any, config: Any, layer_id: int, *args: object, **kwargs: object) -> None:
    """Replace llama4.Llama4Attention.__init__: RoPE layers get the size of their
    chunks.
    """
    _build_attention(self, config, layer_id, *args, **kwargs)
    if self.use_rope and config.attention_chunk_size:
        self.attn.sliding_window_size = config.attention_chunk_size


if not torch.cuda.is_available():
    llama4.Llama4Attention.__init__ = build_attention
    llama4.Llama4Attention.forward = attend
    llama4.Llama4MoE.custom_routing_function = staticmethod(choose_experts)
    fused_moe_native.moe_forward_native = native_experts
    TorchNativeAttnBackend._make_sliding_window_mask = staticmethod(chunk_mask)
