"""The models that a server makes load deltas, and so do the copies of them that weights
are staged in.
"""

import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.core.base.architecture import read
from megarl.core.engine import workers
from megarl.core.sync.block_fp8 import VALUES, quantise, quantised
from megarl.core.sync.checksum import checksum, written
from megarl.core.sync.delta import SUFFIX, encode, load
from megarl.core.sync.staging import copy_of
from megarl.core.sync.transport import SentChecksums


class Served(Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Module()
        self.inner.weight = Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        held = dict(self.named_parameters())
        for name, tensor in tensors:
            held[name].data.copy_(tensor)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Served]:
    """Make a model as SGLang does, of which there is only what
    `own_loading` replaces.
    """
    loader = SimpleNamespace(_initialize_model=Served)
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.model_loader"].loader = loader  # type: ignore[attr-defined]
    monkeypatch.setattr(Served, "load_weights", Served.load_weights)
    workers.own_loading()
    return loader._initialize_model


def test_a_copy_takes_deltas_and_the_model_keeps_its_weights(make: Callable[[], Served]) -> None:
    old, new = (
        torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed in (0, 1)
    )
    model = make()
    model.load_weights([("inner.weight", old)])
    assert torch.equal(model.inner.weight, old)
    copy = copy_of(model)
    copy.load_weights([("inner.weight" + SUFFIX, encode(old, new))])
    assert torch.equal(copy.inner.weight, new)
    assert torch.equal(model.inner.weight, old)
    model.load_weights([("inner.weight" + SUFFIX, encode(old, new))])
    assert torch.equal(model.inner.weight, new)


class InFp8(Served):
    """A layer with a weight in FP8, and one that stays in bf16."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.zeros(130, 256).to(VALUES)
        self.layers = torch.nn.ModuleList([Module()])
        self.layers[0].add_module("mlp", Module())
        down = Module()
        self.layers[0].mlp.add_module("down_proj", down)
        down.weight = Parameter(values, requires_grad=False)
        down.weight_scale_inv = Parameter(torch.zeros(2, 2), requires_grad=False)


DOWN = "layers.0.mlp.down_proj.weight"


@pytest.fixture
def fp8_loader(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's loader, of which there is only what is replaced. finish: what it does at
    the end.
    """

    class Loader:
        finish: Callable[[Module], None] = staticmethod(lambda model: None)

        @staticmethod
        def postprocess_weights(model: Module, target_device: object) -> None:
            Loader.finish(model)

    loader = SimpleNamespace(_initialize_model=InFp8, DefaultModelLoader=Loader)
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.model_loader"].loader = loader  # type: ignore[attr-defined]
    monkeypatch.setattr(InFp8, "load_weights", Served.load_weights)
    workers.own_loading()
    workers.own_quantising()
    return loader


def a_weight(seed: int) -> Tensor:
    return torch.randn(130, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_holds(model: Module, weight: Tensor) -> None:
    values, scales = quantise(weight)
    held = dict(model.named_parameters())
    assert torch.equal(held[DOWN].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(held[f"{DOWN}_scale_inv"], scales)


def test_a_server_in_fp8_quantises_what_comes_in_bf16_and_takes_the_rest_as_it_is(
    fp8_loader: SimpleNamespace,
) -> None:
    """A directory's tensors; a publication's values and scales; and deltas of these, in
    a copy.
    """
    model = fp8_loader._initialize_model()
    inner = torch.randn(6, 4).bfloat16()
    model.load_weights([("inner.weight", inner), (f"{DOWN}", a_weight(0))])
    assert torch.equal(model.inner.weight, inner)
    assert_holds(model, a_weight(0))
    model.load_weights(quantised([(DOWN, a_weight(1))]))
    assert_holds(model, a_weight(1))
    copy = copy_of(model)
    before, after = (dict(quantised([(DOWN, a_weight(seed))])) for seed in (1, 2))
    copy.load_weights([(name + SUFFIX, encode(before[name], after[name])) for name in before])
    assert_holds(copy, a_weight(2))
    assert_holds(model, a_weight(1))


def test_parameters_that_sglang_has_rewritten_are_noticed_before_they_are_served(
    fp8_loader: SimpleNamespace,
) -> None:
    """DeepGEMM's packed scales, as on Blackwell; weights that are not in FP8 at all."""
    loader = fp8_loader.DefaultModelLoader
    model = fp8_loader._initialize_model()
    loader.postprocess_weights(model, "cpu")
    with pytest.raises(RuntimeError, match="SGLang has made no weight in FP8"):
        loader.postprocess_weights(Served(), "cpu")

    def pack(model: Module) -> None:
        model.layers[0].mlp.down_proj.weight_scale_inv.data = torch.zeros(130, 1, dtype=torch.int32)

    loader.finish = staticmethod(pack)
    with pytest.raises(
        RuntimeError,
        match=r"scales of .*down_proj.weight should be \[2, 2\] FP32, and are \[130, 1\]",
    ):
        loader.postprocess_weights(fp8_loader._initialize_model(), "cpu")


@pytest.fixture
def gpt_oss(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Our class of gpt-oss, over as much of SGLang's module as it replaces."""

    class Stock(Module):
        def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
            self.left = dict(tensors)

    class Attention(Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.sinks = Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)

    ours = "megarl.core.engine.sglang_models.gpt_oss"
    for name in ("sglang", "sglang.srt", "sglang.srt.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    models = sys.modules["sglang.srt.models"]
    models.gpt_oss = SimpleNamespace(  # type: ignore[attr-defined]
        GptOssForCausalLM=Stock,
        GptOssAttention=Attention,
        enable_fused_set_kv_buffer=lambda batch: False,
    )
    monkeypatch.delitem(sys.modules, ours, raising=False)
    module = importlib.import_module(ours)
    monkeypatch.delitem(sys.modules, ours)
    return module


def test_each_rank_takes_its_part_of_single_experts(gpt_oss: ModuleType) -> None:
    """All ranks' parts together are the whole: rows of gate and up, columns of down;
    the bias of down, which their sum gets, is rank 0's. As differences, too. What else
    comes is left to SGLang's loader.
    """
    draw = torch.Generator().manual_seed(0)
    prefix = "model.layers.0.mlp.experts"
    shapes = {
        "gate_up_proj.weight": (8, 6),
        "gate_up_proj.bias": (8,),
        "down_proj.weight": (6, 4),
        "down_proj.bias": (6,),
    }
    old, new = (
        {
            f"{prefix}.{e}.{name}": torch.randn(shape, generator=draw)
            for e in range(3)
            for name, shape in shapes.items()
        }
        for _ in range(2)
    )
    ranks = []
    for rank in range(2):
        model = gpt_oss.GptOssForCausalLM()
        module: Module = model
        for name in prefix.split("."):
            module.add_module(name, Module())
            module = module.get_submodule(name)
        module.moe_tp_rank = rank
        held = {
            "w13_weight": (3, 4, 6),
            "w13_weight_bias": (3, 4),
            "w2_weight": (3, 6, 2),
            "w2_weight_bias": (3, 6),
        }
        for name, shape in held.items():
            module.register_parameter(
                name, Parameter(torch.full(shape, torch.nan), requires_grad=False)
            )
        model.load_weights([*old.items(), ("model.norm.weight", torch.ones(2))])
        assert model.left.keys() == {"model.norm.weight"}
        ranks.append(model)
    for tensors in (old, new):
        if tensors is new:
            for model in ranks:
                changes = [(name + SUFFIX, encode(old[name], new[name])) for name in old]
                load(model, model.load_weights, changes)
        whole = {
            name: torch.stack([tensors[f"{prefix}.{e}.{name}"] for e in range(3)])
            for name in shapes
        }
        first, second = (
            {n.rpartition(".")[2]: p for n, p in model.named_parameters()} for model in ranks
        )
        assert torch.equal(
            torch.cat([first["w13_weight"], second["w13_weight"]], 1), whole["gate_up_proj.weight"]
        )
        assert torch.equal(
            torch.cat([first["w13_weight_bias"], second["w13_weight_bias"]], 1),
            whole["gate_up_proj.bias"],
        )
        assert torch.equal(
            torch.cat([first["w2_weight"], second["w2_weight"]], 2), whole["down_proj.weight"]
        )
        assert torch.equal(first["w2_weight_bias"], whole["down_proj.bias"])
        assert not second["w2_weight_bias"].any()


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),  # Blackwell's
    ],
)
def test_sinks_are_held_as_published_and_a_kernel_gets_the_fp32_it_wants(
    gpt_oss: ModuleType, model: torch.dtype, kernel: torch.dtype
) -> None:
    torch.set_default_dtype(model)
    try:
        attention = gpt_oss.gpt_oss.GptOssAttention(kernel)
    finally:
        torch.set_default_dtype(torch.float32)
    sums = SentChecksums(read("llama-3.1-8b"))
    sent = torch.tensor([0.5, -1.25]).to(model)
    deque(sums.watch([("sinks", sent)]), maxlen=0)
    attention.sinks.data.copy_(sent)
    assert sums.expected() == {"sinks": written(int(checksum(attention.sinks)))}
    attention.attn = lambda *_, sinks, save_kv_cache: sinks
    attention.o_proj = lambda attended: (attended, None)
    given = attention.forward_core((None, None, (1, 2, 3, None)))
    assert given.dtype == (torch.float32 if kernel == torch.float32 else model)
    assert torch.equal(given, sent.to(given.dtype))
    assert attention.forward_core(("hidden", None, None)) == "hidden"
