"""Measures the head: log-probs and entropy with their gradients, against all logits at
once (benchmarks/head.py).
"""

from collections.abc import Iterator

from benchmarks import head
from benchmarks.gpu.networks import DEVICE, memory
from benchmarks.gpu.rows import Row, Said

SMALL_GPU = {"tokens": 4096}
"""Sizes for less than 100 GB of memory, since plain FP32 holds all logits several
times.
"""
TINY = {"tokens": 512, "vocabulary": 9000, "hidden": 32, "repeats": 1}


def rows(tiny: bool) -> Iterator[Said]:
    size = TINY if tiny else head.SIZES["cuda"] | (SMALL_GPU if memory() < 100e9 else {})
    found = {row["head"]: row for row in head.measured(DEVICE, **size, dtype="bf16")}
    sizes = (
        f"{size['tokens']} tokens, vocabulary {size['vocabulary']}, hidden {size['hidden']}, bf16"
    )
    for plain in ("plain fp32", "plain bf16"):
        for key, what, unit, scale in (
            ("peak_bytes", "peak memory", "GB", 1e9),
            ("seconds", "time", "ms", 1e-3),
        ):
            ours, theirs = (found[name][key] / scale for name in ("megarl", plain))
            yield Row(f"{what}, forward and backward", ours, unit, sizes, plain, theirs)
