"""Measures how far bf16 is from FP32, with the same weights (bf16 numbers) and
sequences, with an FP32 and with a bf16 head.

Sequences have one length and are batched, not packed, since attention kernels for
packed rows do not support FP32.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import networks
from benchmarks.gpu.rows import Row, Said
from megarl.core.base.messages import Score, ScoredRollout

MEDIUM = {
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "vocab_size": 32_768,
}
WAYS = {
    "fp32": {"dtype": "fp32"},
    "bf16, FP32 head": {"dtype": "bf16", "fp32_head": "both"},
    "bf16 head": {"dtype": "bf16", "fp32_head": "none"},
}


def rows(tiny: bool) -> Iterator[Said]:
    config = networks.llama_8b(**networks.TINY | {"num_hidden_layers": 2} if tiny else MEDIUM)
    count, length = (4, 64) if tiny else (16, 1024)
    sizes = (
        f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, vocabulary"
        f" {config['vocab_size']}, {count} sequences of {length} tokens"
    )
    found = {name: of(config, model, [length] * count) for name, model in WAYS.items()}
    exact, wide, narrow = found.values()

    def apart(how: Any) -> tuple[float, float]:
        return float(how(wide)), float(how(narrow))

    def difference(one: dict[str, Any]) -> np.ndarray:
        return np.abs(np.concatenate(one["logprobs"]) - np.concatenate(exact["logprobs"]))

    for what, unit, how in (
        ("largest difference of a log-prob", "nats", lambda one: difference(one).max()),
        ("mean difference of a log-prob", "nats", lambda one: difference(one).mean()),
        ("difference of the loss", "", lambda one: abs(one["loss"] - exact["loss"])),
        (
            "difference of the gradient's norm",
            "of it",
            lambda one: abs(one["norm"] / exact["norm"] - 1),
        ),
    ):
        with_fp32_head, with_bf16_head = apart(how)
        yield Row(
            f"bf16 to FP32: {what}", with_fp32_head, unit, sizes, "with a bf16 head", with_bf16_head
        )


def of(config: dict[str, Any], model: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Return log-probs, loss and gradient norm for one configuration."""
    networks.forget()
    with tempfile.TemporaryDirectory() as folder:
        learner = {"microbatch_tokens": 4 * lengths[0]}
        trainer = networks.trainer_of(
            networks.recipe_of(config, Path(folder), {"model": model, "learner": learner})
        )
        batch = networks.sequences(lengths, config["vocab_size"])
        loss = trainer.policy.forward_backward(batch)["loss"]
        norm = trainer.policy.gradient_norm()
        rollouts = tuple(ScoredRollout(tokens=s.tokens, first=1) for s in batch)
        scored = trainer.score(Score(version=0, rollouts=rollouts, against=0), "benchmark")
        return {"logprobs": scored.logprobs, "loss": loss, "norm": norm}
