"""Measures a layer with 16 experts of Llama 4 Scout's shapes, forward and backward,
against a dense layer of as many FLOP.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import networks
from benchmarks.gpu.rows import Row, Said
from megarl.core.base.architecture import Architecture
from megarl.core.learner.trainer import Trainer

MICROBATCHES = 2
REPEATS = 4
VOCABULARY = 8192
"""Small, so that the layer dominates."""


def rows(tiny: bool) -> Iterator[Said]:
    peak = networks.matmul_flops(tiny)
    changes = networks.TINY if tiny else {"vocab_size": VOCABULARY}
    experts = networks.llama_17bx16(num_hidden_layers=1, **changes)
    dense = networks.llama_8b(**{key: experts[key] for key in networks.TINY}, num_hidden_layers=1)
    dense |= {
        "intermediate_size": 2 * experts["intermediate_size"]
    }  # a token uses the shared expert and a routed one
    sizes = (128, 256) if tiny else (8192, 16384)
    plain = {one.tokens: one for one in measured(dense, sizes)}
    networks.forget()
    for one in measured(experts, sizes):
        shape = one.shape
        count = MICROBATCHES * one.tokens
        flop = networks.flop(shape, networks.lengths_of(one.tokens) * MICROBATCHES)
        of = (
            f"1 layer of 48, {shape.experts} experts, hidden {shape.hidden}, an expert's"
            f" {shape.expert_feed_forward}, vocabulary {shape.vocabulary}, {MICROBATCHES} x"
            f" {one.tokens} packed tokens, {one.layers}"
        )
        what = "forward and backward"
        like = "a dense layer of as many FLOP"
        yield Row(
            what, count / one.seconds, "tokens/s", of, like, count / plain[one.tokens].seconds
        )
        yield Row(
            what, flop / one.seconds / 1e12, "TFLOP/s", of, "bf16 matrix product", peak / 1e12
        )
        yield Row("peak memory", one.peak / 1e9, "GB", of, like, plain[one.tokens].peak / 1e9)


class Measured(NamedTuple):
    """Measurements. tokens: those of a micro-batch; peak: bytes; layers: the library of
    the layers.
    """

    tokens: int
    seconds: float
    peak: int
    shape: Architecture
    layers: str


def measured(config: dict[str, Any], sizes: tuple[int, ...]) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = networks.trainer_of(networks.recipe_of(config, Path(folder), {}))
        for tokens in sizes:
            yield passes(trainer, tokens)


def passes(trainer: Trainer, tokens: int) -> Measured:
    """Measure forward and backward passes of micro-batches with `tokens` tokens."""
    trainer.policy.microbatch_tokens = tokens
    shape = networks.shape_of(trainer.recipe)
    batch = networks.sequences(networks.lengths_of(tokens) * MICROBATCHES, shape.vocabulary)
    seconds = networks.timed(lambda: trainer.policy.forward_backward(batch), REPEATS)
    used = networks.peak_bytes(lambda: trainer.policy.forward_backward(batch))
    return Measured(tokens, seconds, used, shape, networks.layers_by(trainer))
