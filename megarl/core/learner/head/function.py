"""Log-prob and entropy of labels over a vocabulary that tensor-parallel ranks share, and their gradients, a chunk at a time.

    forward    chunk = hidden[rows] x weight[columns]^T ──► reduce: sums [4, n] ──► all-reduce ──► log-prob, entropy [n]
    backward   the same chunk ──► gradient d [rows, columns] ──┬─► hidden's [rows] += d x weight[columns]
                                                               └─► weight.main_grad[columns] += d^T x hidden[rows]

Nothing of size [n, V/tp] ever is: the backward pass computes each chunk anew, a fourth matrix product where keeping logits has
three. Four numbers a row go over the wire: the maximum; then the sum of exponentials, the sum the entropy needs, and the
label's logit.

What "FP32 head" means here: logits are FP32 sums of exact products (`product`), whatever the type of hidden states and
weight, which stay in the model's. Against float64 a log-prob of bf16 states then errs as FP32 arithmetic does, where logits
rounded to bf16 err by 0.03 to 0.06. Backward, d is rounded to the weight's type, which tensor cores take, and summed in FP32;
both gradients are of that type anyhow as soon as they leave (hidden's) or were until now (the weight's). With fp16 the loss,
and so d, has been multiplied by the loss scale before: small gradients survive the rounding, and one beyond 65,504 becomes
infinite, which the norm of the gradients shows (megarl/core/learner/optimizer.py).

A product of two bf16 numbers is exact in FP32. So a tensor core that takes bf16 and sums in FP32 gives the FP32 product of the
same numbers, up to the order of the sum, at the speed of bf16. SGLang's FP32 head on a GPU is the same product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.learner.head import passes

CHUNK = (4096, 8192)
"""Rows (tokens) and columns (of the vocabulary) of a chunk: 128 MiB of FP32, in products large enough for a GPU."""
LOWEST = -1e30
"""Before any column was seen: its exponential is 0, and 0 times it is still 0."""


@dataclass(frozen=True)
class _Asked:
    """valid: this rank's columns that are not padding. passes: passes.py or kernels.py. The rest: see logprobs_and_entropy."""

    valid: int
    temperature: float
    precision: torch.dtype
    group: Any
    chunk: tuple[int, int]
    passes: ModuleType

    def chunks(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each."""
        for row in range(0, rows, self.chunk[0]):
            for column in range(0, self.valid, self.chunk[1]):
                yield (
                    slice(row, min(row + self.chunk[0], rows)),
                    slice(column, min(column + self.chunk[1], self.valid)),
                )


class _LogProbsAndEntropy(torch.autograd.Function):
    """hidden [n, h], weight [V/tp, h], labels [n], from this rank's first column on -> log-prob [n], entropy [n]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, asked: _Asked) -> tuple[Tensor, Tensor]:
        sums = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
        sums[0] = LOWEST
        for rows, columns in asked.chunks(len(hidden)):
            logits = product(hidden[rows], weight[columns].T, asked.precision)
            asked.passes.reduce(logits, labels[rows] - columns.start, sums[:, rows], asked.temperature)
            del logits  # or the next chunk would be made beside it
        top, log_total, entropy, label = _over_ranks(sums, (labels >= 0) & (labels < asked.valid), asked)
        ctx.save_for_backward(hidden, weight, labels, torch.stack([top, log_total, entropy]))
        ctx.asked = asked
        return label - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, found = ctx.saved_tensors
        asked, of_rows = ctx.asked, torch.stack(upstream)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        for rows, columns in asked.chunks(len(hidden)):
            logits = product(hidden[rows], weight[columns].T, asked.precision)
            place = labels[rows] - columns.start
            d = asked.passes.gradient(logits, place, found[:, rows], of_rows[:, rows], asked.temperature, weight.dtype)
            add_product(of_hidden[rows], d, weight[columns])
            add_product(weight.main_grad[columns], d.T, hidden[rows])
            del logits, d
        # As megatron's fused layers do: DDP's hook must run, and where the weight is also the embedding it adds that part.
        weight.grad_added_to_main_grad = True
        return of_hidden.to(hidden.dtype), torch.zeros_like(weight), None, None


def _over_ranks(sums: Tensor, here: Tensor, asked: _Asked) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all ranks' columns: the highest logit, and with it for origin, divided by the temperature: log of the sum of
    exponentials, entropy, label. Each [n]. here [n]: whether the label is among this rank's columns."""
    mine, total, spread, label = sums
    top = mine
    if asked.group is not None:
        top = mine.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=asked.group)
    shift = (mine - top) / asked.temperature
    scale = shift.exp()
    parts = torch.stack(
        [
            scale * total,
            scale * (spread + shift * total),
            torch.where(here, (label - top) / asked.temperature, 0.0),
        ]
    )
    if asked.group is not None:
        dist.all_reduce(parts, group=asked.group)
    log_total = parts[0].log()
    return top, log_total, log_total - parts[1] / parts[0], parts[2]


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    precision: torch.dtype = torch.float32,
    group: Any = None,
    chunk: tuple[int, int] = CHUNK,
    passes: ModuleType | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, in nats, at `temperature`: two float32 [n], alike on all ranks.

    hidden [n, h] and weight [V/tp, h] of one type: this rank's rows of the head, which tensor-parallel `group` (None: one rank)
    splits evenly; rows from `vocab_size` on are padding and never looked at. labels [n] int64. precision: of the logits,
    float32 or the weight's type. passes: passes.py or kernels.py; None: that of the device.

    Backward, each rank gets its columns' part of the gradient of `hidden`. The weight's is added to `weight.main_grad`
    (float32, as megatron's DDP has it), and the gradient that autograd sees is zero.
    """
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    first = rank * len(weight)
    asked = _Asked(
        valid=min(max(vocab_size - first, 0), len(weight)),
        temperature=temperature,
        precision=precision,
        group=group if size > 1 else None,
        chunk=chunk,
        passes=passes or _passes_on(hidden.device),
    )
    logprobs, entropy = _LogProbsAndEntropy.apply(hidden, weight, labels - first, asked)
    return logprobs, entropy


def _passes_on(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return passes
    from megarl.core.learner.head import kernels  # Triton looks for a GPU's driver, and takes a second

    return kernels


def product(a: Tensor, b: Tensor, precision: torch.dtype) -> Tensor:
    """a [m, k] times b [k, n], of one type, to `precision`: float32, or the type of both, to which the sums are rounded."""
    if a.dtype == precision:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=precision)
    return a.to(precision) @ b.to(precision)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into [m, n] float32 += a [m, k] times b [k, n], of one type."""
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))
