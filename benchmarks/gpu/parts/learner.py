"""Measures a training step of some layers with an 8B model's shapes: forward, backward,
gradient norm and AdamW.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import networks
from benchmarks.gpu.rows import Absent, Row, Said
from megarl.core.base import architecture
from megarl.core.learner.trainer import Trainer
from megarl.predict.planning import memory

MICROBATCHES = 4
REPEATS = 3
STATE_SHARE = 0.5
"""Share of the GPU's memory for weights, gradients and the optimiser; it determines the
number of layers.
"""


def rows(tiny: bool) -> Iterator[Said]:
    peak = networks.matmul_flops(tiny)
    yield Row("bf16 matrix product", peak / 1e12, "TFLOP/s", "128 cubed" if tiny else "8192 cubed")
    changes = networks.TINY | {"num_hidden_layers": 2} if tiny else {"num_hidden_layers": layers()}
    with tempfile.TemporaryDirectory() as folder:
        recipe = networks.recipe_of(
            networks.llama_8b(**changes),
            Path(folder),
            {"learner": {"optimizer": {"warmup_steps": 0}}},
        )
        trainer = networks.trainer_of(recipe)
        for tokens in (128, 256) if tiny else (8192, 16384):
            yield from step(trainer, tokens, peak)


def step(trainer: Trainer, tokens: int, peak: float) -> Iterator[Row]:
    """Yield rows on steps with micro-batches of `tokens` tokens. peak: FLOP/s of a
    matrix product.
    """
    trainer.policy.microbatch_tokens = tokens
    shape = networks.shape_of(trainer.recipe)
    lengths = networks.lengths_of(tokens) * MICROBATCHES
    batch = networks.sequences(lengths, shape.vocabulary)
    metrics = trainer.train_step(batch)
    if metrics["skipped"] or metrics["microbatches"] != MICROBATCHES:
        raise RuntimeError(f"not the step that was meant: {metrics}")
    seconds = networks.timed(lambda: trainer.train_step(batch), REPEATS)
    used = networks.peak_bytes(lambda: trainer.train_step(batch))
    passes = networks.timed(lambda: trainer.policy.forward_backward(batch), REPEATS)
    flop = networks.flop(shape, lengths)
    sizes = (
        f"{shape.layers} layers of {networks.llama_8b()['num_hidden_layers']}, hidden"
        f" {shape.hidden}, vocabulary {shape.vocabulary}, {MICROBATCHES} x {tokens} packed tokens,"
        f" {networks.layers_by(trainer)}"
    )
    at_peak = "all of the model's FLOP at the matrix product's rate"
    product = "bf16 matrix product"
    yield Row(
        "step", sum(lengths) / seconds, "tokens/s", sizes, at_peak, sum(lengths) * peak / flop
    )
    yield Row("step", flop / seconds / 1e12, "TFLOP/s", sizes, product, peak / 1e12)
    yield Row(
        "forward and backward alone", flop / passes / 1e12, "TFLOP/s", sizes, product, peak / 1e12
    )
    if sheet := networks.datasheet():
        of = f"MFU: of the datasheet's dense bf16 of {sheet.name}"
        yield Row("step", flop / seconds / 1e12, "TFLOP/s", sizes, of, sheet.bf16 / 1e12)
        yield Row(
            "forward and backward alone",
            flop / passes / 1e12,
            "TFLOP/s",
            sizes,
            of,
            sheet.bf16 / 1e12,
        )
    planned = memory.learner(trainer.recipe, shape, tokens, MICROBATCHES)
    yield Row(
        "peak memory of a step",
        used / 1e9,
        "GB",
        sizes,
        "megarl plan's",
        (planned.total - planned.publication) / 1e9,
    )


def layers() -> int:
    """Return the number of layers that leaves room for activations."""
    for count in (8, 4, 2, 1):
        shape = architecture.of(networks.llama_8b(num_hidden_layers=count), "8B")
        state = memory.state_bytes(shape.parameters, width=memory.HALF, shards=1)
        if state <= STATE_SHARE * networks.memory():
            return count
    raise Absent(
        f"one layer, embedding and head take {state / 1e9:.0f} GB with their gradients and AdamW,"
        f" more than half of the GPU's {networks.memory() / 1e9:.0f} GB"
    )
