"""The models that a server makes load deltas, and so do the copies of them that weights are staged in."""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.core.base.delta import SUFFIX, encode
from megarl.core.server import workers
from megarl.core.server.staging import copy_of


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
    """Make a model as SGLang does, of which there is only what `own_loading` replaces."""
    loader = SimpleNamespace(_initialize_model=Served)
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.model_loader"].loader = loader  # type: ignore[attr-defined]
    monkeypatch.setattr(Served, "load_weights", Served.load_weights)
    workers.own_loading()
    return loader._initialize_model


def test_a_copy_takes_deltas_and_the_model_keeps_its_weights(make: Callable[[], Served]) -> None:
    old, new = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    model = make()
    model.load_weights([("inner.weight", old)])
    assert torch.equal(model.inner.weight, old)
    copy = copy_of(model)
    copy.load_weights([("inner.weight" + SUFFIX, encode(old, new))])
    assert torch.equal(copy.inner.weight, new)
    assert torch.equal(model.inner.weight, old)
    model.load_weights([("inner.weight" + SUFFIX, encode(old, new))])
    assert torch.equal(model.inner.weight, new)
