"""Gated delta networks: over packed rows as transformers computes each sequence alone,
in FP32 where the released weights are, wherever their parameters are made.
"""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.models import build, delta_kernels, family_of, hf
from megarl.core.models.delta import DeltaNetwork
from megarl.core.models.delta_rule import chunks_of, convolve, delta_rule
from megarl.core.models.layers import CenteredNorm
from megarl.core.recipe import Model
from tests.tiny import stored_apart, tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_5_moe_multimodal

# isort: split
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

# Shorter than the convolution, a chunk and a token more, one in the middle of a chunk.
LENGTHS = (2, 65, 1, 151, 64, 3)
BOUNDARIES = [0, *itertools.accumulate(LENGTHS)]
CPU = torch.device("cpu")


def inputs(heads: int = 3, key: int = 16, value: int = 24) -> list[Tensor]:
    """q, k, v, g and beta of a packed row, with decays from none to strong."""
    generator = torch.Generator().manual_seed(0)
    tokens = BOUNDARIES[-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, heads, *shape, generator=generator)

    q, k = (F.normalize(normal(key), dim=-1) for _ in range(2))
    g = -normal().exp() * torch.rand(tokens, heads, generator=generator) * 3
    return [q * key**-0.5, k, normal(value), g, normal().sigmoid()]


def gradients_of(outputs: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((outputs * weights).sum(), tensors))


def test_no_state_crosses_from_one_sequence_to_the_next() -> None:
    """Outputs and all five gradients are those of transformers' rule for each sequence
    alone.
    """
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    ours = delta_rule(*tensors, chunks_of(BOUNDARIES, CPU))  # type: ignore[call-arg]
    alone = []
    for first, last in itertools.pairwise(BOUNDARIES):
        q, k, v, g, beta = (tensor[None, first:last] for tensor in tensors)
        # It divides q by the root of its width once more.
        output, _ = torch_chunk_gated_delta_rule(q * q.shape[-1] ** 0.5, k, v, g, beta)
        alone.append(output[0])
    expected = torch.cat(alone)
    assert (ours - expected).abs().max() <= 2e-6
    for found, wanted in zip(
        gradients_of(ours, tensors), gradients_of(expected, tensors), strict=True
    ):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_the_convolution_sees_no_other_sequence(taps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BOUNDARIES[-1], 10, generator=generator)
    weight = torch.randn(10, taps, generator=generator)
    ours = convolve(x, weight, chunks_of(BOUNDARIES, CPU).positions)
    for first, last in itertools.pairwise(BOUNDARIES):
        sequence = F.pad(x[first:last].t(), (taps - 1, 0))
        alone = F.conv1d(sequence, weight[:, None], groups=10).t()
        assert (ours[first:last] - alone).abs().max() <= 2e-6


def packed(lengths: tuple[int, ...]) -> PackedSeqParams:
    ends = torch.tensor([0, *itertools.accumulate(lengths)]).int()
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_model_is_transformers_at_every_length(
    one_rank: None, tmp_path: Path, recompute: str
) -> None:
    """What the backward pass computes again has the same gradients."""
    reference = tiny_qwen3_5(tmp_path)
    (chunk,) = build.build(Model(path=str(tmp_path), dtype="fp32"), tmp_path, recompute=recompute)
    hf.load([chunk], family_of(tmp_path), tmp_path)
    networks = [module for module in chunk.modules() if isinstance(module, DeltaNetwork)]
    assert [network.recomputes for network in networks] == [recompute == "selective"] * 3
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 128, (n,), generator=generator) for n in LENGTHS]
    chunk.train()
    row = torch.cat(sequences)[None]
    logits = chunk(row, None, None, packed_seq_params=packed(LENGTHS))[0]
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    assert (logits - expected).abs().max() <= 1e-5
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    ours = chunk.decoder.layers[1].self_attention
    theirs = reference.model.layers[1].linear_attn
    for found, wanted in [
        (ours.A_log, theirs.A_log),
        (ours.dt_bias, theirs.dt_bias),
        (ours.norm_weight, theirs.norm.weight),
        (ours.out_proj.weight, theirs.out_proj.weight),
    ]:
        assert (found.grad - wanted.grad).abs().max() <= 2e-5 * wanted.grad.abs().max()


def test_recomputation_keeps_less_and_changes_no_bit(one_rank: None, tmp_path: Path) -> None:
    tiny_qwen3_5(tmp_path)
    row = torch.randint(0, 128, (1, BOUNDARIES[-1]), generator=torch.Generator().manual_seed(1))
    gradients = []
    kept = []
    for recompute in ("none", "selective"):
        model = Model(path=str(tmp_path), dtype="fp32")
        (chunk,) = build.build(model, tmp_path, recompute=recompute)
        hf.load([chunk], family_of(tmp_path), tmp_path)
        network = chunk.train().decoder.layers[0].self_attention
        hidden = torch.randn(BOUNDARIES[-1], 1, 64, generator=torch.Generator().manual_seed(2))
        sizes: list[int] = []

        def noted(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
            network(hidden.requires_grad_(), packed_seq_params=packed(LENGTHS))
        kept.append(sum(sizes))
        logits = chunk(row, None, None, packed_seq_params=packed(LENGTHS))
        logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in chunk.parameters()])
    assert kept[1] < kept[0] / 10
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_bf16_model_keeps_its_exact_tensors(one_rank: None, tmp_path: Path) -> None:
    """Of the released layout every bit comes back, FP32 and bf16, experts out of their
    stacks. Servers are sent A_log and the norm in FP32.
    """
    tiny_qwen3_5_moe_multimodal(tmp_path, torch.bfloat16)
    family = family_of(tmp_path)
    (chunk,) = build.build(Model(path=str(tmp_path)), tmp_path)
    hf.load([chunk], family, tmp_path)
    stored = stored_apart(tmp_path)
    exported = dict(hf.export([chunk], family))
    elsewhere = {name for name in stored if name.startswith(("model.visual.", "mtp."))}
    assert elsewhere
    assert exported.keys() == stored.keys() - elsewhere
    for name, tensor in exported.items():
        assert tensor.dtype == stored[name].dtype, name
        assert torch.equal(tensor, stored[name]), name
    sent = dict(hf.export([chunk], family, stacked=False))
    exact = {name for name, tensor in sent.items() if tensor.dtype == torch.float32}
    assert exact == {
        f"model.language_model.layers.{layer}.linear_attn.{name}"
        for layer in range(3)
        for name in ("A_log", "norm.weight")
    }


def test_norms_add_one_in_float32_and_round_once(one_rank: None, tmp_path: Path) -> None:
    """Their bf16 outputs are the exact ones rounded, but for the few in the middle
    between two numbers. A sum 1 + weight in bf16, or an output that is rounded before
    it is multiplied, changes a quarter of them.
    """
    tiny_qwen3_5(tmp_path, torch.bfloat16)
    (chunk,) = build.build(Model(path=str(tmp_path)), tmp_path)
    hf.load([chunk], family_of(tmp_path), tmp_path)
    norm = chunk.decoder.layers[0].input_layernorm
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    mean_square = x.double().pow(2).mean(-1, keepdim=True)
    exact = x.double() * (mean_square + norm.eps).rsqrt() * (1 + norm.weight.double())
    assert (norm(x) != exact.bfloat16()).float().mean() <= 1e-3


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_decays_are_computed_in_float32(one_rank: None, tmp_path: Path, dtype: str) -> None:
    """exp(A_log) of 12 is beyond fp16's range, and bf16 would round 12.03 to 12."""
    tiny_qwen3_5(tmp_path, torch.float32)
    model = Model.model_validate({"path": str(tmp_path), "dtype": dtype})
    (chunk,) = build.build(model, tmp_path)
    hf.load([chunk], family_of(tmp_path), tmp_path)
    network = chunk.decoder.layers[0].self_attention
    assert network.A_log.dtype == network.norm_weight.dtype == torch.float32
    row = torch.arange(128)[None]
    outputs = []
    for rate in (12.0, 12.03):
        with torch.no_grad():
            network.A_log.fill_(rate)
            network.dt_bias.fill_(-14.0)
            outputs.append(chunk(row, None, None))
    assert all(output.isfinite().all() for output in outputs)
    assert not torch.equal(*outputs)


def test_what_megatron_makes_on_the_cpu_is_moved_to_the_layers(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers and the gates of shared experts."""
    tiny_qwen3_5_moe(tmp_path)
    to = torch.Tensor.to
    moved = set()

    def noted(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if arguments == (CPU,):
            moved.add(tensor.data_ptr())
        return to(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    (chunk,) = build.build(Model(path=str(tmp_path)), tmp_path)
    for layer in chunk.decoder.layers:
        assert layer.mlp.router.weight.data_ptr() in moved
        assert layer.mlp.shared_experts.gate_weight.data_ptr() in moved


@pytest.mark.parametrize("tiny", [tiny_qwen3_5, tiny_qwen3_5_moe])
def test_with_transformer_engine_no_norm_is_computed_twice(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any
) -> None:
    """Its projections compute the norm before them: attention's, and that of an MLP
    after either. A delta network's does not, so the norm there is ours.
    """
    for module in (gpt_layer_specs, moe_module_specs):
        monkeypatch.setattr(module, "TESpecProvider", TESpecProvider)
    tiny(tmp_path)
    architecture = in_directory(tmp_path)
    config = build.transformer_config(Model(path=str(tmp_path)), architecture, False)
    assert config.layernorm_zero_centered_gamma  # its norms, too, multiply by 1 + weight
    spec = build.block_spec(config, architecture, True, None)
    layers = [layer_spec.submodules for layer_spec in spec.layer_specs]
    with_delta = [layer.self_attention.module is DeltaNetwork for layer in layers]
    assert with_delta == [True] * 3 + [False]
    assert [layer.input_layernorm for layer in layers] == [CenteredNorm] * 3 + [IdentityOp]
    fused = [layer.pre_mlp_layernorm is IdentityOp for layer in layers]
    assert fused == [not architecture.experts] * 4


def test_a_frozen_router_does_not_freeze_the_shared_experts_gate(
    one_rank: None, tmp_path: Path
) -> None:
    tiny_qwen3_5_moe(tmp_path)
    model = Model.model_validate({"path": str(tmp_path), "moe": {"freeze_router": True}})
    (chunk,) = build.build(model, tmp_path)
    frozen = {name for name, p in chunk.named_parameters() if not p.requires_grad}
    assert frozen == {f"decoder.layers.{layer}.mlp.router.weight" for layer in range(4)}


def test_servers_get_experts_one_by_one(one_rank: None, tmp_path: Path) -> None:
    """Whether the directory stacks them or not."""
    names: list[Any] = []
    for tiny in (tiny_qwen3_5_moe, tiny_qwen3_5_moe_multimodal):
        path = tmp_path / tiny.__name__
        tiny(path)
        (chunk,) = build.build(Model(path=str(path)), path)
        sent = {name for name, _ in hf.export([chunk], family_of(path), stacked=False)}
        names.append({name.replace("model.language_model.", "model.") for name in sent})
    assert names[0] == names[1]
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names[0]


class OffByK(torch.autograd.Function):
    """The identity, whose gradient is a third too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 4 / 3


def stand_in(monkeypatch: pytest.MonkeyPatch, is_wrong: bool) -> list[list[int]]:
    """fla in its absence: the rule in the given precision. Returns the boundaries of
    each call.
    """
    calls = []

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        boundaries = cu_seqlens.tolist()
        assert boundaries[-1] == q.shape[1], "rows beyond have no gradients"
        assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
        assert {g.dtype, beta.dtype} == {torch.float32}
        calls.append(boundaries)
        if is_wrong:
            k = OffByK.apply(k)
        row = (tensor[0].float() for tensor in (q * scale, k, v, g, beta))
        output = delta_rule(*row, chunks_of(boundaries, CPU))  # type: ignore[call-arg]
        return output.bfloat16()[None], None

    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(delta_kernels, "takes_kernels", lambda x: x.dtype == torch.bfloat16)
    delta_kernels._checked.cache_clear()
    return calls


def test_kernels_with_wrong_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs alone would not show it."""
    stand_in(monkeypatch, is_wrong=True)
    x = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(
        MegarlError,
        match=r"wrong gradients on this GPU: that of k is off by 33.*torch 2.*uninstall",
    ):
        delta_kernels.rule_for(x, 128, 128)


def test_kernels_with_right_gradients_are_taken(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one comparison, and by every layer."""
    tiny_qwen3_5(tmp_path, torch.bfloat16)
    (chunk,) = build.build(Model(path=str(tmp_path)), tmp_path)
    hf.load([chunk], family_of(tmp_path), tmp_path)
    row = torch.arange(128)[None]
    by_torch = chunk(row, None, None, packed_seq_params=packed((100, 28)))
    calls = stand_in(monkeypatch, is_wrong=False)
    by_kernels = chunk(row, None, None, packed_seq_params=packed((100, 28)))
    assert calls == [[0, *itertools.accumulate(delta_kernels.LENGTHS)]] + [[0, 100, 128]] * 3
    assert (by_kernels - by_torch).abs().max() <= 0.1 * by_torch.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_the_installed_kernels_have_right_gradients() -> None:
    pytest.importorskip("fla")
    x = torch.zeros(1, dtype=torch.bfloat16, device="cuda")
    assert delta_kernels.rule_for(x, 128, 128) is not delta_rule
