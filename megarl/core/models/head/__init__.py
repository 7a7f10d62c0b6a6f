"""The policy's head without its logits: log-prob and entropy of each trained token, and
their gradients, a chunk at a time.

    hidden [n, h] of trained positions only (learner/network.py): prompt tokens and
    padding cost nothing
    forward    chunk = hidden[rows] x weight[columns]^T
               ──► reduce: sums [4, n] ──► all-reduce ──► log-prob, entropy [n]
    backward   the same chunk ──► gradient d [rows, columns]
               ──► hidden's [rows] += d x weight[columns]
               ──► weight.main_grad[columns] += d^T x hidden[rows]

passes.py (torch) has the work on a chunk, as the reference and for CPUs; kernels.py
(Triton) does the same on a GPU. No tensor of size [n, V/tp] ever exists: the backward
pass recomputes each chunk but the last, so there are four matrix products where keeping
logits would need three. Ranks exchange four numbers per row.

Logits are FP32 sums of exact products (`product`), whatever the type of hidden states
and weight: tensor cores that accumulate in FP32 compute them at the speed of bf16, as
SGLang's FP32 head does. Logits rounded to bf16 would have errors of 0.03 to 0.06. In
the backward pass, d is rounded to the weight's type, for tensor cores, and accumulated
in FP32. With fp16 it contains the loss scale: small gradients survive, and one beyond
65,504 becomes infinite, which shows in the norm of the gradients.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megarl.core.models.products import add_product, product

CHUNK = (4096, 8192)
"""Rows (tokens) and columns (of the vocabulary) of a chunk: 128 MiB of FP32, in
products large enough for a GPU.
"""
LOWEST = -1e30
"""Initial maximum, before any column: its exponential is 0, and 0 times it is 0 (not
NaN, as for -inf).
"""


@dataclass(frozen=True)
class _Settings:
    """valid: number of this rank's columns without padding. The others: as in
    logprobs_and_entropy.
    """

    valid: int
    temperature: float
    precision: torch.dtype
    group: dist.ProcessGroup | None

    def chunks(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each chunk."""
        height, width = CHUNK
        for row in range(0, rows, height):
            row_slice = slice(row, min(row + height, rows))
            for column in range(0, self.valid, width):
                yield row_slice, slice(column, min(column + width, self.valid))


def passes_on(device: torch.device) -> ModuleType:
    """Return the module for chunks on this device, imported late: Triton looks for a
    GPU's driver, and takes a second.
    """
    name = "passes" if device.type == "cpu" else "kernels"
    return importlib.import_module(f"{__name__}.{name}")


class _LogProbsAndEntropy(torch.autograd.Function):
    """Maps hidden [n, h], weight [V/tp, h], labels [n] (counted from this rank's first
    column) to log-prob [n], entropy [n].
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy, float32 [n] each. The last chunk's logits are
        kept for the backward pass.
        """
        statistics = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
        statistics[0] = LOWEST
        passes = passes_on(hidden.device)
        logits = None
        for rows, columns in settings.chunks(len(hidden)):
            logits = None  # frees the previous chunk first
            logits = product(hidden[rows], weight[columns].T, settings.precision)
            positions = labels[rows] - columns.start
            passes.reduce(logits, positions, statistics[:, rows], settings.temperature)
        has_label = (labels >= 0) & (labels < settings.valid)
        totals = _over_ranks(statistics, has_label, settings)
        saved_totals = torch.stack([totals.top, totals.log_total, totals.entropy])
        ctx.save_for_backward(hidden, weight, labels, saved_totals)
        ctx.settings = settings
        ctx.logits = logits
        return totals.label - totals.log_total, totals.entropy

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `hidden` [n, h], and add the weight's to
        weight.main_grad. upstream: gradients of log-prob and entropy, [n] each.
        """
        hidden, weight, labels, totals = ctx.saved_tensors
        settings = ctx.settings
        logits = ctx.logits
        ctx.logits = None
        of_loss = torch.stack(upstream)
        passes = passes_on(hidden.device)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        for rows, columns in reversed(list(settings.chunks(len(hidden)))):
            if logits is None:
                logits = product(hidden[rows], weight[columns].T, settings.precision)
            d = passes.gradient(
                logits,
                labels[rows] - columns.start,
                totals[:, rows],
                of_loss[:, rows],
                settings.temperature,
                weight.dtype,
            )
            add_product(of_hidden[rows], d, weight[columns])
            add_product(weight.main_grad[columns], d.T, hidden[rows])
            logits = d = None  # frees these before the next chunk
        # As in megatron's fused layers, DDP's hook must run; it drops the gradient
        # returned for the weight. If the weight is also this stage's embedding, the
        # embedding's gradient makes the hook run, and is added.
        weight.grad_added_to_main_grad = True
        dropped = None if getattr(weight, "zero_out_wgrad", False) else weight.detach()
        return of_hidden.to(hidden.dtype), dropped, None, None


class _HeadTotals(NamedTuple):
    """What all columns of a row give, each [n]. log_total and label are relative to the
    highest logit and divided by the temperature.
    """

    top: Tensor  # the highest logit
    log_total: Tensor  # the log of the sum of exponentials
    entropy: Tensor
    label: Tensor  # the label's logit


def _over_ranks(statistics: Tensor, has_label: Tensor, settings: _Settings) -> _HeadTotals:
    """Combine the statistics [4, n] of all ranks' columns. has_label [n]: whether the
    label is among this rank's columns.
    """
    own_top, total, spread, label = statistics
    top = own_top.clone()
    if settings.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=settings.group)
    shift = (own_top - top) / settings.temperature
    scale = shift.exp()
    label = torch.where(has_label, (label - top) / settings.temperature, 0.0)
    shifted_spread = spread + shift * total
    parts = torch.stack([scale * total, scale * shifted_spread, label])
    if settings.group is not None:
        dist.all_reduce(parts, group=settings.group)
    total, spread, label = parts
    log_total = total.log()
    return _HeadTotals(top, log_total, log_total - spread / total, label)


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    precision: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each label and the entropy of each distribution, in nats:
    two float32 [n], equal on all ranks.

    hidden [n, h]; weight [V/tp, h] of the same type: this rank's rows of the head,
    which tensor-parallel `group` (None: one rank) divides evenly; rows from
    `vocab_size` on are padding. labels [n] int64. precision: of the logits, float32 or
    the weight's type. In the backward pass each rank gets its columns' part of the
    gradient of `hidden`. The weight's is added to `weight.main_grad` (float32, as in
    megatron's DDP); what autograd gets for it is meaningless.
    """
    if group is not None and group.size() == 1:
        group = None
    first = 0 if group is None else group.rank() * len(weight)
    settings = _Settings(
        valid=min(max(vocab_size - first, 0), len(weight)),
        temperature=temperature,
        precision=precision,
        group=group,
    )
    return _LogProbsAndEntropy.apply(hidden, weight, labels - first, settings)
