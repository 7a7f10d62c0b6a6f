"""Checksums as sent against SHA-256 of the server's parameters, put together here."""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from megarl.core.base.architecture import Architecture, read
from megarl.core.server.served import place
from megarl.core.weights.transport import SentChecksums, differing

PLAIN = read("qwen3-0.6b")


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def expected(sent: list[tuple[str, Tensor]], model: Architecture = PLAIN) -> dict[str, str]:
    sums = SentChecksums(model)
    assert [name for name, _ in sums.watch(sent)] == [name for name, _ in sent]
    return sums.expected()


def test_names() -> None:
    layer = "model.layers.3"
    assert place(f"{layer}.self_attn.k_proj.weight") == (f"{layer}.self_attn.qkv_proj.weight", 1)
    assert place(f"{layer}.self_attn.q_proj.bias") == (f"{layer}.self_attn.qkv_proj.bias", 0)
    assert place(f"{layer}.mlp.up_proj.weight") == (f"{layer}.mlp.gate_up_proj.weight", 1)
    assert place(f"{layer}.mlp.experts.5.up_proj.weight") == (f"{layer}.mlp.experts.w13_weight", 11)
    assert place(f"{layer}.mlp.experts.5.down_proj.weight") == (f"{layer}.mlp.experts.w2_weight", 5)
    assert place(f"{layer}.mlp.down_proj.weight") == (f"{layer}.mlp.down_proj.weight", 0)
    llama4 = "language_model.model.layers.3.feed_forward"
    assert place(f"{llama4}.shared_expert.gate_proj.weight") == (f"{llama4}.shared_expert.gate_up_proj.weight", 0)


def test_joined_and_padded_parameters() -> None:
    q, k, v = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    embedding = torch.randn(70, 4)
    sums = expected(
        [
            ("m.q_proj.weight", q),
            ("m.k_proj.weight", k),
            ("m.v_proj.weight", v),
            ("m.embed_tokens.weight", embedding),
        ]
    )
    assert sums["m.qkv_proj.weight"] == sha(torch.cat([q, k, v]))
    assert sums["m.embed_tokens.weight"] == sha(torch.cat([embedding, torch.zeros(58, 4)]))


def test_experts_may_come_in_any_order() -> None:
    gate, up, down = torch.randn(3, 32, 4), torch.randn(3, 32, 4), torch.randn(3, 4, 32)
    sent = [
        (f"m.experts.{e}.{part}_proj.weight", tensor[e])
        for e in (0, 2, 1)
        for part, tensor in (("up", up), ("gate", gate), ("down", down))
    ]
    sums = expected(sent)
    assert sums == {"m.experts.w13_weight": sha(torch.cat([gate, up], 1)), "m.experts.w2_weight": sha(down)}


def test_llama_4_is_reordered() -> None:
    q, k, v = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    sums = expected(
        [
            ("m.q_proj.weight", q),
            ("m.k_proj.weight", k),
            ("m.v_proj.weight", v),
        ],
        replace(PLAIN, rope_interleaved=True, head_dim=4),
    )
    assert sums["m.qkv_proj.weight"] == sha(torch.cat([q[[0, 2, 1, 3, 4, 6, 5, 7]], k[[0, 2, 1, 3]], v]))


def test_nothing_is_expected_of_what_the_server_pads_in_its_own_way() -> None:
    sent = [("m.gate_proj.weight", torch.randn(33, 4)), ("m.up_proj.weight", torch.randn(33, 4))]
    assert expected([*sent, ("m.down_proj.weight", torch.randn(4, 33)), ("m.norm.weight", torch.ones(4))]) == {
        "m.norm.weight": sha(torch.ones(4))
    }


def test_what_only_one_side_has_says_nothing() -> None:
    assert differing({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == []
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "9"}) == ["b"]
