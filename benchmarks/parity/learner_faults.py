"""Faults of a learner's network, for a scoring: the counterparts of those that
`injected` puts into a server.

Which side has a fault only changes the sign of the differences. In the learner, one
server's scores serve for all faults.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.parity.injected.sitecustomize import to_fp8
from megarl.core.learner.network import Network
from megarl.core.models.layers import CausalAttention, RMSNorm


@contextmanager
def half_head(network: Network, dose: float) -> Iterator[None]:
    """The head computes in bf16."""
    before = network.head_precision
    network.head_precision = torch.bfloat16
    try:
        yield
    finally:
        network.head_precision = before


@contextmanager
def fp8_norms(network: Network, dose: float) -> Iterator[None]:
    """The norms of the first `dose` layers, two each, have FP8 outputs."""
    norms = [module for module in network.chunks[0].modules() if isinstance(module, RMSNorm)]
    hooks = [norm.register_forward_hook(rounded) for norm in norms[: 2 * int(dose)]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rounded(module: torch.nn.Module, given: object, output: Tensor) -> Tensor:
    return to_fp8(output)


@contextmanager
def other_frequencies(
    network: Network, dose: float, change: Callable[[Tensor, float], Tensor]
) -> Iterator[None]:
    """The rotary embedding has changed frequencies."""
    layers = [
        module for module in network.chunks[0].modules() if isinstance(module, CausalAttention)
    ]
    before = [layer.rope for layer in layers]
    for layer, rope in zip(layers, before, strict=True):
        layer.rope = replace(rope, inverse_frequencies=change(rope.inverse_frequencies, dose))
    try:
        yield
    finally:
        for layer, rope in zip(layers, before, strict=True):
            layer.rope = rope


def of_theta(frequencies: Tensor, dose: float) -> Tensor:
    """Return the frequencies theta^(-2i/d) for `dose` times theta."""
    pairs = torch.arange(len(frequencies), device=frequencies.device)
    return frequencies * dose ** (-pairs / len(frequencies))


def of_positions(frequencies: Tensor, dose: float) -> Tensor:
    """Return the frequencies for which all positions are `dose` times as far."""
    return frequencies * dose


@contextmanager
def scaled_logits(network: Network, dose: float) -> Iterator[None]:
    """Logits are multiplied by `dose`."""
    head = network.lm_head
    network.lm_head = lambda temperature: head(temperature / dose)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del network.lm_head


LEARNER_FAULTS = {
    "head": half_head,
    "dtype": fp8_norms,
    "rope-theta": partial(other_frequencies, change=of_theta),
    "rope-positions": partial(other_frequencies, change=of_positions),
    "temperature-logits": scaled_logits,
}
