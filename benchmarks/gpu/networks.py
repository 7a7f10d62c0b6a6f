"""Random models of real shapes in megarl's own trainer, and functions that time them.

    config ──► recipe ──► Trainer (the same as in `megarl learn`)
                              ──► timed(step), peak_bytes(step), flop(…)

Weights are made on the device instead of being read from a directory; everything else
is as in training.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.packing import LAYER_PASSES
from megarl.core.base import architecture
from megarl.core.base.architecture import CONFIGS, Architecture
from megarl.core.learner.trainer import Trainer
from megarl.core.models import Family, hf, parallel
from megarl.core.recipe import Recipe
from megarl.predict.planning import speed
from megarl.predict.planning.hardware import GPUS, Gpu

LIMIT_S = 60.0
"""Time limit for forming the group of one rank, and for its collectives."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
PROMPT_SHARE = 16
"""One 16th of a sequence is its prompt, which is not trained."""


def llama_8b(**changes: Any) -> dict[str, Any]:
    """Return config.json of Llama 3.1 8B, with changes."""
    return json.loads((CONFIGS / "llama-3.1-8b.json").read_text()) | changes


def llama_17bx16(**changes: Any) -> dict[str, Any]:
    """Return config.json of Llama 4 Scout's language model, with changes."""
    text = json.loads((CONFIGS / "llama-4-scout.json").read_text())["text_config"]
    return text | {"architectures": ["Llama4ForCausalLM"]} | changes


def recipe_of(config: dict[str, Any], folder: Path, tree: dict[str, Any]) -> Recipe:
    """Return a recipe whose model.path is `folder`, which gets the config.json and
    nothing else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return recipes.from_tree(tree | {"model": tree.get("model", {}) | {"path": str(folder)}})


def trainer_of(recipe: Recipe) -> Trainer:
    """Return a trainer with random weights, the same for each precision: all are bf16
    numbers.
    """
    parallel.start(recipe.model, seed=0, timeout_s=LIMIT_S)
    with random_weights():
        return Trainer(recipe, Path(recipe.model.path))


@contextmanager
def random_weights() -> Iterator[None]:
    """Give random weights to everything that loads weights during the block."""
    with patch.object(hf, "load", fill):
        yield


@torch.no_grad()
def fill(
    chunks: Sequence[torch.nn.Module], family: Family | None = None, hf_dir: Path | None = None
) -> None:
    """Fill matrices with rows of length about 1, so that logits have a deviation of
    about 1, and norms with ones. It has the signature of hf.load.
    """
    random = torch.Generator(DEVICE).manual_seed(0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                values = torch.randn(parameter.shape, device=parameter.device, generator=random)
                parameter.copy_(values.mul_(parameter.shape[-1] ** -0.5).bfloat16())


def lengths_of(tokens: int) -> list[int]:
    """Return lengths of sequences that fill a micro-batch:
    a half of it, a quarter, …
    """
    parts = [tokens >> i for i in range(1, 6)]
    return [*parts, tokens - sum(parts)]


def sequences(lengths: Sequence[int], vocabulary: int) -> list[TrainSequence]:
    """Return sequences of random tokens, with the behaviour log-probs of a uniform
    policy.
    """
    draw = np.random.default_rng(0)
    trained = sum(n - _prompt(n) for n in lengths)
    found = []
    for i, n in enumerate(lengths):
        mask = np.arange(n) >= _prompt(n)
        sequence = TrainSequence(
            ticket=i,
            sample=0,
            tokens=draw.integers(0, vocabulary, n).astype(np.int32),
            behaviour_logprobs=np.where(mask, np.float32(-np.log(vocabulary)), np.float32(0)),
            loss_weight=np.where(mask, np.float32(1 / trained), np.float32(0)),
            advantage=(-1.0, 1.0)[i % 2],
        )
        found.append(sequence)
    return found


def _prompt(length: int) -> int:
    return max(1, length // PROMPT_SHARE)


def flop(shape: Architecture, lengths: Sequence[int]) -> float:
    """Return FLOP of a step's forward and backward passes; the head's logits, which
    megarl computes twice, count once.
    """
    tokens = sum(lengths)
    trained = sum(n - _prompt(n) for n in lengths)
    attention = sum(n * speed.attention_flop(shape, n / 2) for n in lengths)
    layers = tokens * speed.layer_flop(shape) + attention
    return LAYER_PASSES * (layers + trained * speed.head_flop(shape))


def shape_of(recipe: Recipe) -> Architecture:
    return architecture.read(recipe.model.path)


def matmul_flops(tiny: bool) -> float:
    """Measure the FLOP/s of a square bf16 matrix product on this machine."""
    n, repeats = (128, 3) if tiny else (8192, 20)
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, repeats)


def datasheet() -> Gpu | None:
    """Return this GPU's record in megarl/predict/planning/hardware.yaml; None for
    boards with lower rates than SXM's.
    """
    return known(torch.cuda.get_device_properties(0).name) if DEVICE == "cuda" else None


def known(name: str) -> Gpu | None:
    """Return the record for CUDA's name of a GPU, or None."""
    words = name.lower().replace("-", " ").split()
    if {"pcie", "nvl"} & set(words):
        return None
    return next(
        (
            gpu
            for key, gpu in GPUS.items()
            if set(key.removeprefix("rtx-").split("-")) <= set(words)
        ),
        None,
    )


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `repeats` runs, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most bytes allocated during `work`, including weights. On a CPU: the
    most this process has ever had.
    """
    if DEVICE == "cuda":
        synchronize()
        torch.cuda.reset_peak_memory_stats()
    work()
    if DEVICE == "cuda":
        synchronize()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
    )


def forget() -> None:
    """Free the memory of objects that are no longer referenced."""
    for _ in range(2):  # torch breaks some cycles of a trainer in fp32 only in the first
        gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def memory() -> int:
    """Return the bytes of the device's memory."""
    return torch.cuda.get_device_properties(0).total_memory if DEVICE == "cuda" else 8 << 30


def layers_by(trainer: Trainer) -> str:
    """Return the name of the library whose modules form the layers."""
    modules = {type(m).__module__ for chunk in trainer.policy.chunks for m in chunk.modules()}
    return (
        "Transformer Engine's layers"
        if any("transformer_engine" in name for name in modules)
        else "megarl's layers"
    )
