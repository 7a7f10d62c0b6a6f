"""Measures writing a checkpoint of weights and optimiser, against torch.save of as many
bytes to the same disk, with fsync.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu import networks
from benchmarks.gpu.rows import Absent, Row, Said
from megarl.core.base import architecture
from megarl.core.learner.checkpoint import Checkpoints

BYTES_A_PARAMETER = 14
"""bf16 weight, FP32 main weight, two moments."""
VOCABULARY = 32_768
PIECE = 64 << 20


def rows(tiny: bool) -> Iterator[Said]:
    changes = networks.TINY if tiny else {"vocab_size": VOCABULARY}
    config = networks.llama_8b(num_hidden_layers=1, **changes)
    parameters = architecture.of(config, "8B").parameters
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        needed = 2.5 * BYTES_A_PARAMETER * parameters
        if free < needed:
            raise Absent(
                f"{folder.parent} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed:"
                " set TMPDIR"
            )
        recipe = networks.recipe_of(config, folder / "model", {})
        trainer = networks.trainer_of(recipe)
        trainer.train_step(networks.sequences([64], config["vocab_size"]))
        checkpoints = Checkpoints(folder / "checkpoints", 1, trainer, folder / "model")
        networks.synchronize()
        begin = time.perf_counter()
        checkpoints.save()
        stopped = time.perf_counter() - begin
        checkpoints.finish()
        whole = time.perf_counter() - begin
        size = sum(
            path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file()
        )
        shutil.rmtree(folder / "checkpoints")
        plain = saved(folder / "plain", size)
    sizes = f"{parameters / 1e9:.3g} billion parameters, {size / 1e9:.3g} GB"
    yield Row("written", size / whole / 1e6, "MB/s", sizes, "torch.save", size / plain / 1e6)
    yield Row("training stops for", stopped, "s", sizes, "until all is on disk", whole)


def saved(path: Path, size: int) -> float:
    """Return the seconds of torch.save for `size` bytes from the CPU."""
    pieces = [torch.zeros(min(PIECE, size - at), dtype=torch.uint8) for at in range(0, size, PIECE)]
    begin = time.perf_counter()
    with path.open("wb") as file:
        torch.save(pieces, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin
