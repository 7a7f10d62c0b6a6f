"""Checksums, deltas and buckets on a GPU: bit for bit a CPU's, for any number of bytes
at any address.

A GPU reads numbers only at addresses that are multiples of their size, where a CPU
reads them anywhere, and multiplies 8-bit numbers only in some shapes and layouts
(benchmarks/gpu/README.md has the conditions).
"""

import pytest
import torch
from torch import Tensor

from megarl.core.sync import checksum as sums
from megarl.core.sync.checksum import (
    COLUMNS,
    FEWEST_ROWS,
    PIECE,
    by_integers,
    checksum,
    checksum_on,
)
from megarl.core.sync.delta import DTYPES, INTEGERS, add, decode, encode
from megarl.core.sync.transport import buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
DEVICE = torch.device("cuda", 0)

SIZES = {
    "nothing": 0,
    "one byte": 1,
    "less than a row": COLUMNS - 1,
    "one row": COLUMNS,
    "a row less than a GPU multiplies": (FEWEST_ROWS - 1) * COLUMNS,
    "as many as it multiplies": FEWEST_ROWS * COLUMNS,
    "rows and a rest": 100 * COLUMNS + 7,
    "a piece": PIECE,
    "a piece and more": PIECE + 3 * COLUMNS + 1,
}
OFFSETS = [0, 1, 4, 16]
"""Bytes behind an address that is a multiple of 512."""


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


def behind(data: Tensor, offset: int) -> Tensor:
    """Return a copy on the GPU whose address is `offset` bytes behind a multiple of
    512.
    """
    return torch.cat([torch.zeros(offset, dtype=torch.uint8), data]).to(DEVICE)[offset:]


def test_a_gpu_multiplies_exactly() -> None:
    """Else it would sum in 64-bit integers, and the other tests here would pass without
    a product.
    """
    assert sums.multiplies_exactly(DEVICE)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_checksum_is_the_cpus(size: int, offset: int) -> None:
    data = random_bytes(size)
    for start in (0, 5, COLUMNS):
        assert int(checksum(behind(data, offset), start)) == int(checksum(data, start))


def test_sums_of_integers_are_the_cpus() -> None:
    """Products and sums of 64-bit numbers that wrap, the way of a device whose product
    fails.
    """
    rows = random_bytes(3000 * COLUMNS).view(torch.int8).view(-1, COLUMNS)
    assert torch.equal(by_integers(rows.to(DEVICE)).cpu(), by_integers(rows))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
)
def test_a_checksum_of_any_type(dtype: torch.dtype) -> None:
    data = random_bytes(50 * COLUMNS).view(dtype)
    assert int(checksum(data.to(DEVICE))) == int(checksum(data))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_checksum_of_what_the_host_holds(pinned: bool) -> None:
    """Copies from pinned memory go on while the next ones are asked for."""
    data = random_bytes(2 * PIECE + 12_345)
    held = data.pin_memory() if pinned else data
    assert int(checksum_on(DEVICE, held)) == int(checksum(data))


def changed(dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Return two tensors [size] of any bits, of which about one in fifty differs, by
    little or by much.
    """
    draw = torch.Generator().manual_seed(size)
    old = random_bytes(size * dtype.itemsize, 1).view(INTEGERS[dtype.itemsize])
    by = torch.randint(-300, 300, (size,), generator=draw) * (
        torch.rand(size, generator=draw) < 0.02
    )
    return old.view(dtype), (old + by.to(old.dtype)).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("old_on_the_host", [False, True])
def test_a_delta_is_the_cpus(dtype: torch.dtype, offset: int, old_on_the_host: bool) -> None:
    """Tensors begin `offset` numbers behind an aligned address; a learner keeps old
    ones in pinned memory.
    """
    old, new = changed(dtype, 100_003)
    new_there = new.to(DEVICE)[offset:]
    old_there = old.pin_memory()[offset:] if old_on_the_host else old.to(DEVICE)[offset:]
    code = encode(old_there, new_there)
    assert torch.equal(code, encode(old[offset:], new[offset:]))
    held = old.to(DEVICE)[offset:]
    add(held, decode(code.to(DEVICE)))
    kind = INTEGERS[dtype.itemsize]
    assert torch.equal(held.cpu().view(kind), new[offset:].view(kind))


def test_each_tensor_of_a_bucket_can_be_read() -> None:
    """Several types, odd numbers of elements: as SGLang views them in the bucket."""
    tensors = {
        "three": torch.randn(3, dtype=torch.bfloat16),
        "wide": torch.randn(5, 7),
        "bytes": random_bytes(9),
        "turned": torch.randn(4, 6, dtype=torch.float16).T,
    }
    (bucket,) = buckets(((name, tensor.to(DEVICE)) for name, tensor in tensors.items()), 1 << 20)
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        end = start + torch.Size(shape).numel() * kind.itemsize
        assert torch.equal((bucket.flat[start:end].view(kind).view(shape) + 0).cpu(), tensors[name])
        start = end
