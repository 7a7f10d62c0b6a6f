"""A layer with 16 experts at the shapes of Llama 4 Scout, forward and backward, against a dense layer of as many FLOP."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import networks
from benchmarks.gpu.rows import Row, Said
from megarl.planning.shapes import Shape

MICROBATCHES = 2
REPEATS = 4
VOCABULARY = 8192
"""Small, so that the layer is what is measured."""


def rows(tiny: bool) -> Iterator[Said]:
    peak = networks.matmul_flops(tiny)
    changes = networks.TINY if tiny else {"vocab_size": VOCABULARY}
    experts = networks.llama_17bx16(num_hidden_layers=1, **changes)
    dense = networks.llama_8b(**{key: experts[key] for key in networks.TINY}, num_hidden_layers=1)
    dense |= {"intermediate_size": 2 * experts["intermediate_size"]}  # a token meets the shared expert and a routed one
    sizes = (128, 256) if tiny else (8192, 16384)
    plain = {tokens: seconds for tokens, seconds, _, _ in measured(dense, sizes)}
    for tokens, seconds, used, shape in measured(experts, sizes):
        flop = networks.flop(shape, networks.lengths_of(tokens) * MICROBATCHES)
        of = (
            f"1 layer of 48, {shape.experts} experts, hidden {shape.hidden}, an expert's {shape.expert_feed_forward}, "
            f"vocabulary {shape.vocabulary}, {MICROBATCHES} x {tokens} packed tokens"
        )
        count = MICROBATCHES * tokens
        yield Row("forward and backward", count / seconds, "tokens/s", of, "a dense layer of as many FLOP", count / plain[tokens])
        yield Row("forward and backward", flop / seconds / 1e12, "TFLOP/s", of, "bf16 matrix product", peak / 1e12)
        yield Row("peak memory", used / 1e9, "GB", of)


def measured(config: dict[str, Any], sizes: tuple[int, ...]) -> list[tuple[int, float, int, Shape]]:
    """(tokens of a micro-batch, seconds, peak bytes, shape) each."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = networks.recipe_of(config, Path(folder), {})
        shape = networks.shape_of(recipe)
        trainer = networks.trainer_of(recipe)
        for tokens in sizes:
            trainer.policy.microbatch_tokens = tokens
            batch = networks.sequences(networks.lengths_of(tokens) * MICROBATCHES, shape.vocabulary)
            used = networks.peak_bytes(lambda: trainer.forward_backward(batch))  # noqa: B023  called at once
            seconds = networks.timed(lambda: trainer.forward_backward(batch), REPEATS)  # noqa: B023
            found.append((tokens, seconds, used, shape))
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found
