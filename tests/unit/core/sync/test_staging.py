"""The copy in which a server stages weights, by a model of our own: what it shares,
what is refused, when the model changes.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from megarl.core.sync import delta
from megarl.core.sync import staging as staging_module
from megarl.core.sync.staging import BucketHead, Staging, Unloadable, copy_of


class Model(torch.nn.Module):
    """Two layers of one weight, with a loader of the layer's own, as SGLang's have; and
    a table that no checkpoint has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Linear(3, 2, dtype=torch.bfloat16),
            torch.nn.Linear(3, 2, bias=False),
        )
        self.second.weight = self.first.weight
        self.first.weight.loader = self.fill
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def fill(self, parameter: Tensor, value: Tensor) -> None:
        parameter.data.copy_(value)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            dict(self.named_parameters())[name].loader(dict(self.named_parameters())[name], tensor)


class Group:
    """Receives these heads and bytes, then the end; `between` is done before each."""

    def __init__(self, *buckets: tuple[bytes, Tensor], between: Any = lambda: None) -> None:
        self._buckets = list(buckets)
        self._between = between
        self.closed = ""

    def receive(self, _turns: object) -> tuple[bytes, Tensor] | None:
        self._between()
        return self._buckets.pop(0) if self._buckets else None

    def close(self, broken: str) -> None:
        self.closed = broken


def stand_in(*buckets: tuple[bytes, Tensor], between: Any = lambda: None) -> Any:
    """Return a `Group` in place of a BroadcastGroup."""
    return Group(*buckets, between=between)


def bucket(name: str, value: Tensor) -> tuple[bytes, Tensor]:
    head = BucketHead([name], [str(value.dtype).removeprefix("torch.")], [list(value.shape)])
    return msgspec.json.encode(head), value.flatten().view(torch.uint8)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    """Its checksums are sums: SGLang's checker wants its ranks."""
    from sglang.srt.utils import weight_checker

    class Checker:
        def __init__(self, get_model: Any) -> None:
            self._model = get_model()

        def handle(self, *_: str, role: str) -> dict[str, float]:
            return {name: float(value.sum()) for name, value in self._model.named_parameters()}

    monkeypatch.setattr(weight_checker, "WeightChecker", Checker)
    return Staging()


NEW = torch.full((2, 3), 7.0, dtype=torch.bfloat16)


def test_a_copy_shares_what_is_no_weight() -> None:
    model = Model()
    copy = copy_of(model)
    assert copy.second.weight is copy.first.weight is not model.first.weight
    assert torch.equal(copy.first.weight, model.first.weight)
    assert copy.mean is not model.mean
    assert copy.table is model.table
    copy.load_weights([("first.weight", NEW)])
    assert torch.equal(copy.second.weight, NEW)
    assert not torch.equal(model.first.weight, NEW)


class Latent(Model):
    """A layer like DeepSeek-V3's attention: loading fills, in place, a tensor that is
    neither parameter nor buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first.w_kc = None
        self.load_weights([("first.weight", self.first.weight.data)])

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(tensors)
        turned = self.first.weight.data.T.contiguous()
        self.first.w_kc = turned if self.first.w_kc is None else self.first.w_kc.copy_(turned)


def test_what_loading_derives_is_staged_and_swapped_too(staging: Staging) -> None:
    """SGLang computes attention with it. Were it shared, a request would get new values
    before the swap; were it not copied, old ones after it.
    """
    model = Latent()
    held = model.first.w_kc
    old = model.first.w_kc.clone()
    staging.open_version(model, "6", "7")
    staging.receive(stand_in(bucket("first.weight", NEW)))
    assert torch.equal(model.first.w_kc, old)
    staging.checksums()
    staging.swap(model, "7")
    assert model.first.w_kc is held, "a captured graph reads it where it was"
    assert torch.equal(model.first.w_kc, NEW.T)


class Centred(torch.nn.Module):
    """SGLang's norm of Gemma and Qwen3.5, which on a GPU computes with 1 + weight, a
    buffer that its loader fills.
    """

    def __init__(self) -> None:
        from sglang.srt.layers.layernorm import GemmaRMSNorm

        super().__init__()
        self.norm = GemmaRMSNorm(4)
        self.load_weights([("norm.weight", torch.arange(4.0))])

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            self.norm.weight.weight_loader(self.norm.weight, tensor)


@pytest.mark.parametrize("as_delta", [False, True])
def test_norms_around_one_change_at_the_swap(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, as_delta: bool
) -> None:
    """The buffer that a GPU computes with is not even written before it, and right
    after it, where a captured graph reads it.
    """
    model = Centred()
    held = model.norm.gemma_weight
    writes = held._version
    old = model.norm.weight.data.clone()
    new = old.flip(0) / 3
    name = "norm.weight"
    sent = new
    if as_delta:
        monkeypatch.setattr(Centred, "load_weights", added(Centred.load_weights))
        name += delta.SUFFIX
        sent = delta.encode(old, new)
    staging.open_version(model, "6", "7")
    staging.receive(stand_in(bucket(name, sent)))
    assert held._version == writes
    staging.checksums()
    staging.swap(model, "7")
    assert torch.equal(model.norm.weight, new)
    assert model.norm.gemma_weight is held
    assert torch.equal(held, 1 + new)


def added(load: Callable[..., None]) -> Callable[..., None]:
    """A loader that also takes deltas, as a server's models get one."""
    return lambda model, tensors: delta.load(model, partial(load, model), tensors)


def test_the_model_changes_at_the_swap_and_only_with_checksums(staging: Staging) -> None:
    model = Model()
    bias = model.first.bias.clone()
    staging.open_version(model, "6", "7")
    staging.receive(stand_in(bucket("first.weight", NEW)))
    for version in ("7", "8"):
        with pytest.raises(
            RuntimeError, match=f"version {version} is not staged with its checksums"
        ):
            staging.swap(model, version)
    assert staging.checksums()["first.weight"] == 42
    assert not torch.equal(model.first.weight, NEW)
    staging.swap(model, "7")
    assert torch.equal(model.second.weight, NEW)
    assert torch.equal(model.first.bias, bias), "what was not sent stays"


def test_differences_want_their_base_and_begin_from_it(staging: Staging) -> None:
    """Also after a publication that was not swapped has left its values in the copy."""
    model = Model()
    old = model.first.weight.clone()
    staging.open_version(model, "6", "7")
    staging.receive(stand_in(bucket("first.weight", NEW)))
    with pytest.raises(
        RuntimeError, match="version 8 comes as differences from 7, and this server has 6"
    ):
        staging.open_version(model, "6", "8", base="7")
    staging.open_version(model, "6", "8", base="6")
    staging.checksums()
    staging.swap(model, "8")
    assert torch.equal(model.first.weight, old)


def test_weights_that_a_swap_would_leave_old_are_refused(staging: Staging) -> None:
    """By SGLang's own guard, which is asked once: it looks through all modules."""
    refused = Model()
    refused.first._derived_weight_cache_error = "its cache would keep the old weights"
    with pytest.raises(RuntimeError, match="its cache would keep the old weights"):
        staging.open_version(refused, "6", "7")
    model = Model()
    staging.open_version(model, "6", "7")
    model.first._derived_weight_cache_error = "not asked again"
    staging.open_version(model, "6", "8")


def test_a_bucket_of_an_earlier_publication_is_not_loaded(staging: Staging) -> None:
    model = Model()
    staging.open_version(model, "6", "7")
    late = stand_in(
        bucket("first.weight", NEW), between=lambda: staging.open_version(model, "6", "7")
    )
    with pytest.raises(RuntimeError, match="another publication has begun"):
        staging.receive(late)
    assert "another publication" in late.closed
    assert staging.checksums()["first.weight"] != 42


def test_what_the_model_does_not_take_is_the_servers_fault(staging: Staging) -> None:
    staging.open_version(Model(), "6", "7")
    group = stand_in(bucket("third.weight", NEW))
    with pytest.raises(Unloadable, match="third"):
        staging.receive(group)
    assert "third.weight" in group.closed


def test_a_step_runs_once_until_it_is_taken(staging: Staging) -> None:
    calls: list[int] = []
    job = staging.job("step", lambda: calls.append(1))
    wait([job], 10)
    assert staging.job("step", lambda: calls.append(2)) is job
    staging.ended("step")
    wait([staging.job("step", lambda: calls.append(3))], 10)
    assert calls == [1, 3]


def test_a_gpu_gets_no_new_stream_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def stream(priority: int) -> object:
        made.append(priority)
        return len(made)

    used: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext(used.append(one)))
    monkeypatch.setattr(staging_module, "IDLE_STREAMS", [])
    for _ in range(100):
        staging_module._run_on_own_stream(lambda: None)
    staging_module._run_on_own_stream(
        lambda: staging_module._run_on_own_stream(lambda: None)
    )  # two at once
    assert made == [-1, -1]
    assert used == [1] * 101 + [2]
