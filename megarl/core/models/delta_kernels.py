"""The gated delta rule by the GPU kernels of the package fla-core, where it is
installed; otherwise by torch (delta_rule.py).

A kernel is never trusted because it can be imported. Versions of Triton have compiled
fla's to wrong gradients of k, beta and g on Hopper, with right outputs and without a
message (github.com/fla-org/flash-linear-attention/issues/640 and 984). So before a
process first uses them, it compares their gradients with torch's on one random row.
"""

import importlib.metadata
import itertools
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.models.delta_rule import Chunks, chunks_of, delta_rule

type Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Chunks], Tensor]
"""`delta_rule`, or another function with its arguments and result."""

LIMIT = 2e-2
"""The largest error of a gradient, as a share of its norm. Where kernels were right,
bf16's rounding came to less; wrong ones were reported to be off by tens of per cent.
"""
LENGTHS = (200, 65, 3)
"""Of the random row: several chunks, a chunk and a token, less than the convolution."""
HEADS = 2
PACKAGES = ("fla-core", "triton", "tilelang", "torch")
"""Those whose versions decide what the kernels compute."""


def rule_for(x: Tensor, key_dim: int, value_dim: int) -> Rule:
    """Return the rule for activations like x and heads of these widths. MegarlError if
    fla's kernels compute wrong gradients here.
    """
    if not takes_kernels(x):
        return delta_rule
    return _checked(x.dtype, x.device, key_dim, value_dim)


def takes_kernels(x: Tensor) -> bool:
    """Return whether fla's kernels are installed and take activations like x. In FP32
    they would multiply with ten bits of mantissa.
    """
    return x.is_cuda and x.dtype.itemsize == 2 and find_spec("fla") is not None


@cache
def _checked(dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Rule:
    """Return fla's rule after its gradients were found to be right."""
    rule = _rule_of_fla(dtype)
    tensors = _random_row(device, key_dim, value_dim)
    # As the kernels get them, so that only their own errors count.
    tensors = [tensor.to(dtype).float() for tensor in tensors[:3]] + tensors[3:]
    right = _gradients(delta_rule, tensors)
    of_kernels = _gradients(rule, tensors)
    worst = ""
    error = 0.0
    for name, gradient in right.items():
        off = float((of_kernels[name] - gradient).norm() / gradient.norm())
        if not off <= error:  # also if it is no number
            worst = name
            error = off
    if not error <= LIMIT:
        versions = ", ".join(_versions())
        raise MegarlError(
            f"the kernels of fla-core compute wrong gradients on this GPU: that of {worst} is off"
            f" by {error:.1%} ({versions}); uninstall fla-core to train with torch's, or install"
            " versions that are right"
        )
    return rule


def _rule_of_fla(dtype: torch.dtype) -> Rule:
    """Return fla's rule with the arguments and the result of ours. dtype: of q, k and v
    in its kernels.
    """
    # A further package that fla would use wherever it is installed: its gradients are
    # inexact where states decay fast (github.com/QwenLM/FlashQLA/issues/28).
    os.environ["FLA_FLASH_QLA"] = "0"
    kernels: Any = importlib.import_module("fla.ops.gated_delta_rule")

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
        q, k, v = (tensor.to(dtype)[None] for tensor in (q, k, v))
        output, _ = kernels.chunk_gated_delta_rule(
            q, k, v, g[None], beta[None], scale=1.0, cu_seqlens=chunks.boundaries
        )
        return output[0].float()

    return rule


def _random_row(device: torch.device, key_dim: int, value_dim: int) -> list[Tensor]:
    """Return q, k, v, g and beta of three sequences; some states decay fast."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, HEADS, *shape, generator=generator)

    q = F.normalize(normal(key_dim), dim=-1) * key_dim**-0.5
    k = F.normalize(normal(key_dim), dim=-1)
    g = -torch.exp(2 * normal())
    row = [q, k, normal(value_dim), g, normal().sigmoid()]
    return [tensor.to(device) for tensor in row]


def _gradients(rule: Rule, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a random sum of the outputs, by name of the input."""
    device = tensors[0].device
    chunks = chunks_of([0, *itertools.accumulate(LENGTHS)], device)
    with torch.enable_grad():
        q, k, v, g, beta = (tensor.detach().clone().requires_grad_() for tensor in tensors)
        output = rule(q, k, v, g, beta, chunks)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        total = (output * weights.to(device)).sum()
        gradients = torch.autograd.grad(total, (q, k, v, g, beta))
    return dict(zip(("q", "k", "v", "g", "beta"), gradients, strict=True))


def _versions() -> list[str]:
    """Return the installed ones of PACKAGES with their versions."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
