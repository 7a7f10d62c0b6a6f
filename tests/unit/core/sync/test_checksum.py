"""Checksums as sent against the checksum of the server's parameters,
put together here.
"""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.core.base.architecture import Architecture, read
from megarl.core.models import hf
from megarl.core.sync import transport
from megarl.core.sync.block_fp8 import quantised
from megarl.core.sync.checksum import COLUMNS, checksum, written
from megarl.core.sync.process_group import ProcessGroupTransport, _Attempt
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served import place
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import SentChecksums, differing, differing_experts

PLAIN = replace(read("qwen3-0.6b"), heads=2, groups=1, head_dim=4)


def whole(tensor: Tensor) -> str:
    return written(int(checksum(tensor)))


def expected(sent: list[tuple[str, Tensor]], model: Architecture = PLAIN) -> dict[str, str]:
    sums = SentChecksums(model)
    assert [name for name, _ in sums.watch(sent)] == [name for name, _ in sent]
    return sums.expected()


def test_places() -> None:
    """q has 8 rows, k and v have 4, of 3 times 2 bytes."""
    layer = "model.layers.3"
    tensor = torch.zeros(4, 3, dtype=torch.bfloat16)

    def at(name: str) -> tuple[str, int]:
        return place(name, tensor, PLAIN)

    assert at(f"{layer}.self_attn.k_proj.weight") == (f"{layer}.self_attn.qkv_proj.weight", 8 * 6)
    assert at(f"{layer}.self_attn.v_proj.weight") == (f"{layer}.self_attn.qkv_proj.weight", 12 * 6)
    assert at(f"{layer}.self_attn.q_proj.bias") == (f"{layer}.self_attn.qkv_proj.bias", 0)
    assert at(f"{layer}.mlp.up_proj.weight") == (f"{layer}.mlp.gate_up_proj.weight", 24)
    assert at(f"{layer}.mlp.experts.5.up_proj.weight") == (
        f"{layer}.mlp.experts.w13_weight",
        11 * 24,
    )
    assert at(f"{layer}.mlp.experts.5.down_proj.weight") == (
        f"{layer}.mlp.experts.w2_weight",
        5 * 24,
    )
    assert at(f"{layer}.mlp.down_proj.weight") == (f"{layer}.mlp.down_proj.weight", 0)
    for part, start in (("gate_up_proj", 5 * 24), ("down_proj", 5 * 24)):  # gpt-oss
        served = f"{layer}.mlp.experts.{'w2' if part == 'down_proj' else 'w13'}_weight"
        assert at(f"{layer}.mlp.experts.5.{part}.weight") == (served, start)
        assert at(f"{layer}.mlp.experts.5.{part}.bias") == (f"{served}_bias", start)
    llama4 = "language_model.model.layers.3.feed_forward"
    assert at(f"{llama4}.shared_expert.gate_proj.weight") == (
        f"{llama4}.shared_expert.gate_up_proj.weight",
        0,
    )


def test_places_beside_delta_networks() -> None:
    """Qwen3.5-35B-A3B: 16 key heads and 32 value heads of 128; 16 heads of 256, each
    with a gate, and 2 of k and v.
    """
    model = read("qwen3.5-35b-a3b")
    tensor = torch.zeros(4, 3, dtype=torch.bfloat16)
    ours = "model.layers.3"
    expected = {
        "linear_attn.in_proj_z": (f"{ours}.linear_attn.in_proj_qkvz.weight", 8192 * 6),
        "linear_attn.in_proj_b": (f"{ours}.linear_attn.in_proj_ba.weight", 0),
        "linear_attn.in_proj_a": (f"{ours}.linear_attn.in_proj_ba.weight", 32 * 6),
        "self_attn.q_proj": (f"{ours}.qkv_proj.weight", 0),
        "self_attn.k_proj": (f"{ours}.qkv_proj.weight", 8192 * 6),
        "self_attn.v_proj": (f"{ours}.qkv_proj.weight", 8704 * 6),
        "self_attn.o_proj": (f"{ours}.o_proj.weight", 0),
        "linear_attn.conv1d": (f"{ours}.linear_attn.conv1d.weight", 0),
        "mlp.shared_expert_gate": (f"{ours}.mlp.shared_expert_gate.weight", 0),
    }
    for name, part in expected.items():
        assert place(f"model.language_model.layers.3.{name}.weight", tensor, model) == part


def test_joined_and_padded_parameters() -> None:
    q = torch.randn(8, 3)
    k = torch.randn(4, 3)
    v = torch.randn(4, 3)
    biases = [torch.randn(rows, dtype=torch.bfloat16) for rows in (8, 4, 4)]
    embedding = torch.randn(70, 4)
    sums = expected(
        [
            ("m.v_proj.weight", v),
            ("m.q_proj.weight", q),
            ("m.k_proj.weight", k),
            *((f"m.{name}_proj.bias", bias) for name, bias in zip("qkv", biases, strict=True)),
            ("m.embed_tokens.weight", embedding),
        ]
    )
    assert sums == {
        "m.qkv_proj.weight": whole(torch.cat([q, k, v])),
        "m.qkv_proj.bias": whole(torch.cat(biases)),
        "m.embed_tokens.weight": whole(torch.cat([embedding, torch.zeros(58, 4)])),
    }


def test_experts_may_come_in_any_order() -> None:
    gate = torch.randn(3, 32, 4)
    up = torch.randn(3, 32, 4)
    down = torch.randn(3, 4, 32)
    sent = [
        (f"m.experts.{e}.{part}_proj.weight", tensor[e])
        for e in (0, 2, 1)
        for part, tensor in (("up", up), ("gate", gate), ("down", down))
    ]
    right = {
        "m.experts.w13_weight": whole(torch.cat([gate, up], 1)),
        "m.experts.w2_weight": whole(down),
    }
    assert expected(sent) == right
    assert differing(expected(sent[:-1]), right) == ["m.experts.w2_weight"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_share_of_the_experts(ranks: int) -> None:
    """Nothing is said of what else is sent: a rank holds a part of it, or the whole."""
    model = replace(PLAIN, experts=4)
    rows = 32 * ranks
    gate_up = torch.randn(4, 2 * rows, 4)
    down = torch.randn(4, 4, rows)
    sent = [("m.q_proj.weight", torch.randn(8, 4)), ("m.norm.weight", torch.randn(8))]
    for expert in (3, 0, 2, 1):
        gate, up = gate_up[expert].chunk(2)
        start = f"m.experts.{expert}"
        sent += [(f"{start}.gate_proj.weight", gate), (f"{start}.up_proj.weight", up)]
        sent.append((f"{start}.down_proj.weight", down[expert]))
    sums = SentChecksums(model, ranks)
    list(sums.watch(sent))
    assert sums.expected() == {}
    held = [
        {"m.experts.w13_weight": whole(gate_ups), "m.experts.w2_weight": whole(downs), "m.norm": ""}
        for gate_ups, downs in zip(gate_up.chunk(ranks), down.chunk(ranks), strict=True)
    ]
    expected = sums.expected_experts()
    assert len(expected) == 2 * ranks
    assert differing_experts(expected, held) == []
    held[1]["m.experts.w2_weight"] = held[0]["m.experts.w2_weight"]
    del held[0]["m.experts.w13_weight"]
    wrong = ["m.experts.w13_weight of its rank 0", "m.experts.w2_weight of its rank 1"]
    assert differing_experts(expected, held) == wrong
    assert len(differing_experts(expected, held[:1])) == 2 * ranks - 1


def experts(names: list[str], rows: int) -> list[tuple[str, Tensor]]:
    """Experts of two layers, each of whose tensors has this many rows of the
    checksum's.
    """
    shape = (32, rows * COLUMNS // 64)
    return [
        (f"m.{layer}.experts.{e}.{name}_proj.weight", torch.randn(shape, dtype=torch.bfloat16))
        for layer in (0, 1)
        for e in (2, 0, 3, 1)
        for name in names
    ]


@pytest.mark.parametrize("limit", [10**9, 9 * COLUMNS, 3 * COLUMNS, COLUMNS])
def test_experts_are_summed_together_as_alone(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Whatever fits in one sum. A changed value, and two that change places, are
    noticed.
    """
    sent = experts(["gate", "up", "down"], rows=3)
    alone: dict[str, int] = {}
    for name, tensor in sent:
        served, start = place(name, tensor, PLAIN)
        alone[served] = (alone.get(served, 0) + int(checksum(tensor, start))) % 2**64
    monkeypatch.setattr(transport, "TOGETHER", limit)
    assert expected(sent) == {served: written(value) for served, value in alone.items()}
    names = [name for name, _ in sent]
    first = dict(sent)["m.0.experts.0.gate_proj.weight"]
    second = dict(sent)["m.0.experts.3.gate_proj.weight"]
    exchanged = dict(sent)
    exchanged["m.0.experts.0.gate_proj.weight"] = second
    exchanged["m.0.experts.3.gate_proj.weight"] = first
    swapped = [(name, exchanged[name]) for name in names]
    assert differing(expected(swapped), expected(sent)) == ["m.0.experts.w13_weight"]
    first.view(torch.int16)[0, 0] ^= 1
    assert expected(sent)["m.0.experts.w13_weight"] != written(alone["m.0.experts.w13_weight"])


def test_a_layer_of_experts_takes_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not eight for each of its tensors."""

    def counted(sent: list[tuple[str, Tensor]]) -> int:
        count = Counter()
        with count:
            expected(sent)
        return count.operations

    both = experts(["gate", "up", "down"], rows=1)
    together = counted(both)
    monkeypatch.setattr(transport, "TOGETHER", 0)
    alone = counted(both)
    assert alone > 7 * len(both)
    assert together < alone / 4


class Counter(TorchDispatchMode):
    """Counts what is computed, without views, which take no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not call.is_view
        return call(*args, **kwargs or {})


@pytest.mark.parametrize(("widths", "compared"), [((2, 2), False), ((2, 1), True), ((1,), True)])
def test_nothing_is_summed_for_servers_of_several_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], compared: bool
) -> None:
    """No answer of theirs is compared with it, and they are paused meanwhile."""
    addresses = [SimpleNamespace(tensor_parallel=width) for width in widths]
    servers = {i: SimpleNamespace(address=address) for i, address in enumerate(addresses)}
    finished = SimpleNamespace(end=Future(), results={}, errors={})
    fleet: Any = SimpleNamespace(servers=servers, version=1, start=lambda *_: finished)
    finished.end.set_result(None)
    transport: Any = ProcessGroupTransport.__new__(ProcessGroupTransport)
    family: Any = SimpleNamespace(architecture=PLAIN)
    transport._weights = ServedWeights([], family, fp8=False)
    transport._copy = 0
    transport._copies = 1
    transport._last = LastSent(1)
    transport._source = True
    transport._bucket_bytes = 1 << 20
    transport._limit_s = 1.0
    transport._group = SimpleNamespace(name="g", send=lambda *_: [], forget=lambda: None)
    sent = [("m.norm.weight", torch.ones(4))]
    monkeypatch.setattr(hf, "export", lambda *_, **__: iter(sent))
    attempt = _Attempt()
    transport._send_part(attempt, fleet, tuple(servers))
    assert attempt.bytes == 16
    assert set(attempt.checksums) == ({"m.norm.weight"} if compared else set())


def test_llama_4_is_reordered() -> None:
    q = torch.randn(8, 4)
    k = torch.randn(4, 4)
    v = torch.randn(4, 4)
    sums = expected(
        [
            ("m.q_proj.weight", q),
            ("m.k_proj.weight", k),
            ("m.v_proj.weight", v),
        ],
        replace(PLAIN, rope_interleaved=True),
    )
    assert sums["m.qkv_proj.weight"] == whole(
        torch.cat([q[[0, 2, 1, 3, 4, 6, 5, 7]], k[[0, 2, 1, 3]], v])
    )


def test_nothing_is_expected_of_what_the_server_pads_in_its_own_way() -> None:
    sent = [("m.gate_proj.weight", torch.randn(33, 4)), ("m.up_proj.weight", torch.randn(33, 4))]
    assert expected(
        [*sent, ("m.down_proj.weight", torch.randn(4, 33)), ("m.norm.weight", torch.ones(4))]
    ) == {"m.norm.weight": whole(torch.ones(4))}


def test_what_only_one_side_has_says_nothing() -> None:
    assert differing({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == []
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "9"}) == ["b"]


def test_scales_are_joined_like_the_weights_that_they_belong_to() -> None:
    """q has 256 rows, k and v have 128 each, so 2, 1 and 1 blocks; an expert has 128
    rows of gate and of up.
    """
    model = replace(PLAIN, heads=2, groups=1, head_dim=128)
    rows = {"q": 256, "k": 128, "v": 128}
    weights = {
        f"m.layers.0.self_attn.{x}_proj.weight": torch.randn(n, 256).bfloat16()
        for x, n in rows.items()
    }
    for expert in range(3):
        weights |= {
            f"m.layers.0.mlp.experts.{expert}.{x}_proj.weight": torch.randn(128, 256).bfloat16()
            for x in ("gate", "up")
        }
    served = dict(quantised(weights.items()))
    values, scales = (
        [tensor for name, tensor in served.items() if name.endswith(ending)]
        for ending in ("weight", "scale_inv")
    )
    assert expected(list(reversed(served.items())), model) == {
        "m.layers.0.self_attn.qkv_proj.weight": whole(torch.cat(values[:3])),
        "m.layers.0.self_attn.qkv_proj.weight_scale_inv": whole(torch.cat(scales[:3])),
        "m.layers.0.mlp.experts.w13_weight": whole(torch.cat(values[3:])),
        "m.layers.0.mlp.experts.w13_weight_scale_inv": whole(torch.cat(scales[3:])),
    }
