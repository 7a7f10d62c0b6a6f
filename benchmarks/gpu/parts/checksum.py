"""Measures the checksum of weights: whether a GPU's is a CPU's, whether its product of
bytes is exact, and GB/s.

The references are sums of 64-bit integers, the way of a device whose product is not
exact, and for weights that the host holds, as a server's copy, the copying to the GPU
alone. A publication without this cannot be trusted, so it is measured first.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.networks import DEVICE, timed
from benchmarks.gpu.rows import Row, Said
from megarl.core.sync import checksum as sums
from megarl.core.sync.checksum import COLUMNS, PIECE, by_integers, checksum, checksum_on

REPEATS = 5
SIZES = (1, COLUMNS - 1, COLUMNS, 16 * COLUMNS, 17 * COLUMNS, 100 * COLUMNS + 7)
"""Bytes of the pieces that are compared: fewer rows than a GPU multiplies, rows and a
rest.
"""
OFFSETS = (0, 1, 4, 16)
"""Bytes behind an aligned address where they begin."""


def rows(tiny: bool) -> Iterator[Said]:
    device = torch.empty(0, device=DEVICE).device
    begin = time.perf_counter()
    exact = sums.multiplies_exactly(device)
    yield Row("the product is tried", time.perf_counter() - begin, "s", str(device))
    if not exact:
        yield (
            f"{device}: a product of bytes is not exact (the log says why): sums of 64-bit integers"
            " take its place"
        )
    sizes = SIZES if tiny else (*SIZES, PIECE + COLUMNS + 1)
    differ = 0
    compared = 0
    for size in sizes:
        for offset in OFFSETS:
            whole = random_bytes(offset + size)
            there = whole.to(device)[offset:]
            differ += int(checksum(there, offset)) != int(checksum(whole[offset:], offset))
            compared += 1
    up_to = f"up to {max(sizes):,} bytes, at {len(OFFSETS)} addresses"
    yield Row("equal to a CPU's", compared - differ, "pieces", up_to, "of", compared)
    held = random_bytes(1 << 20 if tiny else 1 << 30)
    if device.type == "cuda":
        held = held.pin_memory()
    data = held.to(device)
    gigabytes = len(data) / 1e9
    what = f"{gigabytes:.3g} GB"
    by_integers_s = timed(lambda: by_integers(data.view(torch.int8).view(-1, COLUMNS)), REPEATS)
    seconds = timed(lambda: checksum(data), REPEATS)
    yield Row(
        "on the device",
        gigabytes / seconds,
        "GB/s",
        what,
        "64-bit integers",
        gigabytes / by_integers_s,
    )
    copying_s = timed(lambda: torch.empty_like(data).copy_(held, non_blocking=True), REPEATS)
    seconds = timed(lambda: checksum_on(device, held), REPEATS)
    yield Row(
        "of what the host holds",
        gigabytes / seconds,
        "GB/s",
        what,
        "copying alone",
        gigabytes / copying_s,
    )
    if differ:
        raise RuntimeError(f"{differ} of {compared} checksums are not a CPU's")
    if not exact:
        raise RuntimeError("the product of bytes is not exact on this device")


def random_bytes(size: int) -> Tensor:
    return torch.randint(
        0, 256, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.uint8
    )
