"""Measures layers in FP8 (Transformer Engine) against bf16 at an 8B model's shapes: a
step's speed and memory, and log-probs.

All start from the same weights. Log-probs are compared before the first step.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu import networks
from benchmarks.gpu.parts import learner
from benchmarks.gpu.rows import Absent, Row, Said
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Score, ScoredRollout

MOST_LAYERS = 4
"""Few enough for three models, one after another, within the time limit."""
FORMATS = ("blockwise", "tensorwise")


def rows(tiny: bool) -> Iterator[Said]:
    layers = 2 if tiny else min(MOST_LAYERS, learner.layers())
    config = networks.llama_8b(**(networks.TINY if tiny else {}), num_hidden_layers=layers)
    tokens = 128 if tiny else 8192
    plain: Measured | None = None
    refused = []
    for kind in FORMATS:
        try:
            found = measured(config, kind, tokens)
        except MegarlError as error:
            refused.append(str(error).splitlines()[0])
            continue
        plain = plain or measured(config, "none", tokens)
        sizes = f"{layers} layers of 32, {learner.MICROBATCHES} x {tokens} packed tokens"
        yield Row(f"{kind}: step", found.rate, "tokens/s", sizes, "bf16", plain.rate)
        yield Row(
            f"{kind}: forward and backward alone",
            found.passes,
            "tokens/s",
            sizes,
            "bf16",
            plain.passes,
        )
        yield Row(
            f"{kind}: peak memory of a step",
            found.peak / 1e9,
            "GB",
            sizes,
            "bf16",
            plain.peak / 1e9,
        )
        apart = np.abs(found.logprobs - plain.logprobs)
        yield Row(
            f"{kind} to bf16: mean difference of a log-prob", float(apart.mean()), "nats", sizes
        )
        yield Row(f"{kind} to bf16: largest", float(apart.max()), "nats", sizes)
        yield Row(f"{kind}: gradient's norm", found.norm, "", sizes, "bf16", plain.norm)
    if plain is None:
        raise Absent("; ".join(refused))
    yield from refused


class Measured(NamedTuple):
    """Measurements. rate, passes: tokens/s of a step, and of forward and backward;
    peak: bytes; norm: of the first gradient.
    """

    logprobs: np.ndarray
    rate: float
    passes: float
    peak: int
    norm: float


def measured(config: dict[str, Any], kind: str, tokens: int) -> Measured:
    networks.forget()
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": {"fp8": kind},
            "learner": {"optimizer": {"warmup_steps": 0}, "microbatch_tokens": tokens},
        }
        trainer = networks.trainer_of(networks.recipe_of(config, Path(folder), tree))
        lengths = networks.lengths_of(tokens) * learner.MICROBATCHES
        batch = networks.sequences(lengths, config["vocab_size"])
        rollouts = tuple(ScoredRollout(tokens=s.tokens, first=1) for s in batch)
        scored = trainer.score(Score(version=0, rollouts=rollouts, against=0), "benchmark")
        norm = trainer.train_step(batch)["grad_norm"]
        seconds = networks.timed(lambda: trainer.train_step(batch), learner.REPEATS)
        passes = networks.timed(lambda: trainer.policy.forward_backward(batch), learner.REPEATS)
        peak = networks.peak_bytes(lambda: trainer.train_step(batch))
        count = sum(lengths)
        return Measured(
            np.concatenate(scored.logprobs), count / seconds, count / passes, peak, norm
        )
