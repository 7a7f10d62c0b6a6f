"""Handles, as SGLang reads them; and servers that NCCL could not reach, or whose memory
nobody could read.
"""

import asyncio
import base64
import io
import pickle
from typing import Any

import pytest
import torch

from megarl.core.base import device
from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.client.client import ServerClient
from megarl.core.sync import cuda_ipc
from megarl.core.sync.process_group import refuse_shared_gpu
from megarl.core.sync.transport import buckets

SGLANG_ALLOWS = {
    "torch": {"Tensor", "Size", "uint8", "float32", "bfloat16"},
    "types": {"SimpleNamespace"},
    "torch.storage": {"UntypedStorage"},
    "torch.multiprocessing.reductions": {
        "rebuild_tensor",
        "rebuild_typed_storage",
        "rebuild_storage_filename",
    },
}
"""The part of sglang.srt.utils.common.SafeUnpickler.ALLOWED_GLOBALS that a handle may
need.
"""


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert name in SGLANG_ALLOWS[module], f"{module}.{name}"
        return super().find_class(module, name)


class Elsewhere(ServerClient):
    """A server that says it is there, and is asked nothing more."""

    def __init__(self, place: DeviceIdentity) -> None:
        super().__init__(ServerAddress(id=3, url="http://127.0.0.1:1"), "", "", 1)
        self._place = place
        self.began = False

    async def device_identity(self) -> DeviceIdentity:
        return self._place

    async def begin_update(self) -> None:
        self.began = True


def test_a_handle_is_the_bucket_itself() -> None:
    """Not a copy: it is read where it lies, after it was handed over, too."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = {
        "a": torch.randn(3, dtype=torch.bfloat16),
        "b": torch.randn(2, 3),
        "c": torch.randn(4, 4).T,
    }
    (bucket,) = buckets(tensors.items(), 1 << 20)
    handles = [cuda_ipc.handle(bucket) for _ in range(2)]  # one for each rank of a server
    assert max(map(len, handles)) < 2000
    for text in handles:
        found = Unpickler(io.BytesIO(base64.b64decode(text))).load()
        flat = found["flattened_tensor"]
        read = {
            m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)
            for m in found["metadata"]
        }
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    bucket.flat[0] += 1
    assert torch.equal(flat, bucket.flat)


HERE = DeviceIdentity("this", ("GPU-0",))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (DeviceIdentity("another", ("GPU-0",)), "not on the learner's machine"),
        (DeviceIdentity("this", ("GPU-1",)), r"not on the learner's GPU \(GPU-0\)"),
    ],
)
def test_a_server_elsewhere_is_handed_nothing(
    place: DeviceIdentity, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "of_rank", lambda: HERE)
    server = Elsewhere(place)
    with pytest.raises(MegarlError, match=rf"server 3 .*{said}; set resources.colocate=true, or"):
        asyncio.run(cuda_ipc._check_and_begin(server))
    assert not server.began


def test_one_with_the_learners_gpu_among_its_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for mine, theirs in ((("GPU-0",), ("GPU-1", "GPU-0")), ((), ())):
        monkeypatch.setattr(device, "of_rank", lambda mine=mine: DeviceIdentity("this", mine))
        server = Elsewhere(DeviceIdentity("this", theirs))
        asyncio.run(cuda_ipc._check_and_begin(server))
        assert server.began


def test_nccl_on_one_gpu_is_refused_and_the_right_transport_named() -> None:
    asyncio.run(refuse_shared_gpu(Elsewhere(DeviceIdentity("this", ("GPU-1", "GPU-2"))), HERE))
    with pytest.raises(
        MegarlError, match=r"both on GPU GPU-0, and NCCL .* weights.transport=cuda_ipc"
    ):
        asyncio.run(refuse_shared_gpu(Elsewhere(DeviceIdentity("this", ("GPU-1", "GPU-0"))), HERE))


def test_this_process_is_on_this_machine() -> None:
    assert device.of_process() == device.of_rank() or torch.cuda.device_count() > 1
