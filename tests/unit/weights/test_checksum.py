"""Checksums as sent against SHA-256 of the joined and padded parameters."""

import hashlib

import torch

from megarl.weights.checksum import SentChecksums, differing, served_name


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_names() -> None:
    layer = "model.layers.3"
    assert served_name(f"{layer}.self_attn.k_proj.weight") == f"{layer}.self_attn.qkv_proj.weight"
    assert served_name(f"{layer}.self_attn.q_proj.bias") == f"{layer}.self_attn.qkv_proj.bias"
    assert served_name(f"{layer}.mlp.up_proj.weight") == f"{layer}.mlp.gate_up_proj.weight"
    assert served_name(f"{layer}.mlp.experts.5.up_proj.weight") == f"{layer}.mlp.experts.w13_weight"
    assert served_name(f"{layer}.mlp.experts.5.down_proj.weight") == f"{layer}.mlp.experts.w2_weight"
    assert served_name(f"{layer}.mlp.down_proj.weight") == f"{layer}.mlp.down_proj.weight"


def test_joined_and_padded_parameters() -> None:
    q, k, v = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    embedding = torch.randn(70, 4)
    sums = SentChecksums()
    sent = [
        ("m.q_proj.weight", q),
        ("m.k_proj.weight", k),
        ("m.v_proj.weight", v),
        ("m.embed_tokens.weight", embedding),
    ]
    assert [name for name, _ in sums.watch(sent)] == [name for name, _ in sent]
    expected = sums.expected()
    assert expected["m.qkv_proj.weight"] == sha(torch.cat([q, k, v]))
    assert expected["m.embed_tokens.weight"] == sha(torch.cat([embedding, torch.zeros(58, 4)]))


def test_what_only_one_side_has_says_nothing() -> None:
    assert differing({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == []
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "9"}) == ["b"]
