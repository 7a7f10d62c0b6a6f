"""A checksum that the learner cannot compute is an error of that publication, whatever
the transport, and so is a bucket that it cannot make: every tensor is still gathered,
as other ranks take part in it; no server's new weights count; and the next publication
is as any other.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.core.base.architecture import read
from megarl.core.client.client import HeldChecksums
from megarl.core.models import hf
from megarl.core.recipe import from_tree
from megarl.core.sync import cuda_ipc, transport
from megarl.core.sync import process_group as process_group_module
from megarl.core.sync import publisher as publisher_module
from megarl.core.sync.cuda_ipc import CudaIpcTransport
from megarl.core.sync.disk import DiskTransport
from megarl.core.sync.process_group import ProcessGroupTransport
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import Sent

pytestmark = pytest.mark.usefixtures("one_rank")
FAMILY: Any = SimpleNamespace(architecture=read("qwen3-0.6b"))
NAMES = (
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.input_layernorm.weight",
)
WHY = f"{NAMES[1]}: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"


class FakeServer:
    """It answers whatever it is asked, at once. asked: the names of the calls."""

    def __init__(self) -> None:
        self.address = SimpleNamespace(id=0, tensor_parallel=1)
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.asked.append(name)
        checksums = HeldChecksums("whole", ({},))
        return lambda *_: checksums if name == "staged_checksums" else None


class FakeFleet:
    """One such server."""

    def __init__(self) -> None:
        self.version = 5
        self.servers = {0: FakeServer()}

    def call_each(
        self, ids: Iterable[int], call: Callable[[Any], Any]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Make the calls, except of a coroutine of several."""
        if call.__name__ == "_received_checksums":
            return {i: self.servers[i].staged_checksums() for i in ids}, {}
        if call.__name__ != "<lambda>":
            return {}, {}
        return {i: call(self.servers[i]) for i in ids}, {}

    def start(self, ids: Iterable[int], call: object) -> Any:
        end: Future[None] = Future()
        end.set_result(None)
        return SimpleNamespace(end=end, results=dict.fromkeys(ids), errors={})


class FakeGroup:
    """A process group whose broadcasts have ended at once. sent: the heads of the
    buckets.
    """

    name = "fake"

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = ""

    def send(self, turn: object, head: bytes = b"", flat: Tensor | None = None) -> list[Any]:
        self.sent.append(head)
        return []

    def forget(self) -> None: ...

    def close(self, broken: str = "") -> None:
        self.closed = broken


def bare_transport() -> ProcessGroupTransport:
    """A transport of one source, over a FakeGroup."""
    made = ProcessGroupTransport.__new__(ProcessGroupTransport)
    made._weights = ServedWeights((), FAMILY, fp8=False)
    made._last = LastSent(1)
    made._copy = 0
    made._copies = 1
    made._source = True
    made._limit_s = 5.0
    made._bucket_bytes = 1 << 20
    made._group = FakeGroup()  # type: ignore[assignment]
    made._join = lambda *_: None
    made._groups = 1
    made._group_number = 0
    made._exports = True
    made._attempts = 0
    return made


def process_group(_: Path) -> Any:
    def send(fleet: Any, ids: list[int], version: int) -> Sent:
        made = bare_transport()
        attempt = made._send_all(fleet, tuple(ids))
        group: Any = made._group
        assert group.sent[-1] == b""  # the end, so that servers do not wait
        return Sent(attempt.failed, attempt.checksums, attempt.bytes, attempt.unchecked)

    return SimpleNamespace(send=send, staged=True)


def by_cuda_ipc(_: Path) -> Any:
    return CudaIpcTransport(ServedWeights((), FAMILY, fp8=False), LastSent(1), 1 << 20)


def disk(folder: Path) -> Any:
    return DiskTransport(
        ServedWeights((), FAMILY, fp8=False), LastSent(1), folder / "source", folder / "weights"
    )


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were gathered."""
    gathered: list[str] = []

    def export(*_: object, **__: object) -> Iterator[tuple[str, Tensor]]:
        for n, name in enumerate(NAMES):
            gathered.append(name)
            yield name, torch.full((8,), float(n))

    monkeypatch.setattr(hf, "export", export)
    monkeypatch.setattr(hf, "save", lambda *_: None)
    monkeypatch.setattr(cuda_ipc, "handle", lambda bucket: "a handle")
    return gathered


@pytest.mark.parametrize("kind", [process_group, by_cuda_ipc, disk])
def test_it_costs_the_publication(
    kind: Callable[[Path], Any],
    exported: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = transport.checksum
    fails = [True]

    def broken(tensor: Tensor, start: int = 0) -> Tensor:
        if fails and tensor[0] == 1:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nand what it was called with"
            )
        return sums(tensor, start)

    monkeypatch.setattr(transport, "checksum", broken)
    sends = kind(tmp_path)
    found = sends.send(FakeFleet(), [0], 5)
    assert exported == list(NAMES)
    assert (found.errors, found.checksums, found.unchecked) == ({}, {}, WHY)
    fails.clear()
    found = sends.send(FakeFleet(), [0], 6)
    assert (sorted(found.checksums), found.unchecked) == (sorted(NAMES), "")


def full(*_: object) -> Iterator[Any]:
    """Replace transport.buckets, or what is called before it: there is no memory."""
    raise torch.OutOfMemoryError("CUDA out of memory.\nAnd what to do about it")


@pytest.mark.parametrize("step", ["buckets", "changed", "as_served"])
def test_what_cannot_be_made_costs_the_publication(
    step: str, exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = bare_transport()
    owner: Any = {"changed": sends._last, "as_served": sends._weights}.get(
        step, process_group_module
    )

    def failing(tensors: Iterator[Any], *_: object) -> Iterator[Any]:
        yield from full(next(tensors))

    monkeypatch.setattr(owner, step, failing)
    attempt = sends._send_all(FakeFleet(), (0,))  # type: ignore[arg-type]
    assert exported == list(NAMES), "other ranks take part in gathering all of them"
    assert (attempt.unmade, attempt.broken) == ("CUDA out of memory.",) * 2
    assert sends._group is not None
    assert sends._group.closed == "CUDA out of memory."  # type: ignore[attr-defined]


def test_what_cannot_be_gathered_ends_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "export", lambda *_, **__: iter(full, None))
    with pytest.raises(torch.OutOfMemoryError):
        bare_transport()._send_all(FakeFleet(), (0,))  # type: ignore[arg-type]


@pytest.mark.parametrize("unchecked", ["", WHY])
def test_no_server_swaps_to_what_is_not_checked(unchecked: str) -> None:
    publisher = Publisher.__new__(Publisher)
    fleet: Any = FakeFleet()
    errors: dict[int, str] = {}
    publisher._transport = SimpleNamespace(staged=True)
    checksums = publisher._compare(fleet, Sent({}, {}, 0, unchecked), errors)
    if not unchecked:
        assert (checksums, errors) == ({0: "whole"}, {})
        return
    said = (
        "publishing version 5 to server 0: checksum: the learner could not compute what to expect: "
    )
    assert (checksums, errors) == ({}, {0: said + WHY})
    assert fleet.servers[0].asked == []


@pytest.mark.parametrize("before", ["", "\n"])
def test_an_error_that_comes_with_the_numbers(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells of a kernel's fault when its result is asked for. A message whose
    first line is empty is one, too: without it, no checksum would be compared and
    nobody would know.
    """
    sums = transport.SentChecksums(FAMILY.architecture)
    assert len(list(sums.watch([(NAMES[0], torch.ones(8))]))) == 1

    def fault(*_: object) -> Tensor:
        raise RuntimeError(f"{before}CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "stack", fault)
    assert sums.expected() == {}
    assert sums.failed == "CUDA error: an illegal memory access was encountered"


def test_a_learner_tries_the_product_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first publication, for which servers may be paused."""
    tried: list[torch.device] = []
    monkeypatch.setattr(publisher_module, "multiplies_exactly", tried.append)
    recipe = from_tree({"weights": {"transport": "disk"}})
    Publisher(recipe, None, [torch.nn.Linear(1, 1)], FAMILY)  # type: ignore[arg-type]
    assert tried == [torch.device("cpu")]
