"""The policy's head without its logits: log-prob and entropy of each trained token, and their gradients, a chunk at a time.

    hidden [n, h] of trained positions alone (learner/network.py): prompt tokens and padding meet no arithmetic
    forward    chunk = hidden[rows] x weight[columns]^T ──► reduce: sums [4, n] ──► all-reduce ──► log-prob, entropy [n]
    backward   the same chunk ──► gradient d [rows, columns] ──┬─► hidden's [rows] += d x weight[columns]
                                                               └─► weight.main_grad[columns] += d^T x hidden[rows]

passes.py (torch) is what is done with a chunk, the reference and what a CPU runs; kernels.py (Triton) is the same on a GPU.
Nothing of size [n, V/tp] ever exists: the backward pass computes each chunk anew, a fourth matrix product where keeping logits
has three. Ranks exchange four numbers a row: the maximum; then the sum of exponentials, the sum the entropy needs, and the
label's logit.

Logits are FP32 sums of exact products (`product`), whatever the type of hidden states and weight. Against float64 a log-prob
of bf16 states then errs as FP32 arithmetic does, where logits rounded to bf16 err by 0.03 to 0.06. A product of two bf16
numbers is exact in FP32, so tensor cores that sum in FP32 give the FP32 product at the speed of bf16, as SGLang's FP32 head
does. Backward, d is rounded to the weight's type, which tensor cores take, and summed in FP32. With fp16 the loss, and so d,
has been multiplied by the loss scale: small gradients survive the rounding, and one beyond 65,504 becomes infinite, which the
norm of the gradients shows (megarl/core/learner/optimizer.py).
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megarl.core.models.products import add_product, product

CHUNK = (4096, 8192)
"""Rows (tokens) and columns (of the vocabulary) of a chunk: 128 MiB of FP32, in products large enough for a GPU."""
LOWEST = -1e30
"""Maximum before any column was seen: its exponential is 0, and 0 times it is still 0."""


@dataclass(frozen=True)
class _Settings:
    """valid: this rank's columns that are not padding. passes: passes.py or kernels.py. The rest: see logprobs_and_entropy."""

    valid: int
    temperature: float
    precision: torch.dtype
    group: dist.ProcessGroup | None
    chunk: tuple[int, int]
    passes: ModuleType

    def chunks(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each chunk."""
        height, width = self.chunk
        for row in range(0, rows, height):
            for column in range(0, self.valid, width):
                yield slice(row, min(row + height, rows)), slice(column, min(column + width, self.valid))


class _LogProbsAndEntropy(torch.autograd.Function):
    """hidden [n, h], weight [V/tp, h], labels [n], from this rank's first column on -> log-prob [n], entropy [n]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        sums = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
        sums[0] = LOWEST
        for rows, columns in settings.chunks(len(hidden)):
            logits = product(hidden[rows], weight[columns].T, settings.precision)
            settings.passes.reduce(logits, labels[rows] - columns.start, sums[:, rows], settings.temperature)
            del logits  # or the next chunk would be made beside it
        top, log_total, entropy, label = _over_ranks(sums, (labels >= 0) & (labels < settings.valid), settings)
        ctx.save_for_backward(hidden, weight, labels, torch.stack([top, log_total, entropy]))
        ctx.settings = settings
        return label - log_total, entropy

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, sums = ctx.saved_tensors
        settings, of_loss = ctx.settings, torch.stack(upstream)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        for rows, columns in settings.chunks(len(hidden)):
            logits = product(hidden[rows], weight[columns].T, settings.precision)
            place = labels[rows] - columns.start
            d = settings.passes.gradient(
                logits, place, sums[:, rows], of_loss[:, rows], settings.temperature, weight.dtype
            )
            add_product(of_hidden[rows], d, weight[columns])
            add_product(weight.main_grad[columns], d.T, hidden[rows])
            del logits, d
        # As in megatron's fused layers DDP's hook must run, and it drops what it gets for the weight. Where that is also the
        # embedding of this stage, the embedding's gradient makes it run, and is added.
        weight.grad_added_to_main_grad = True
        dropped = None if getattr(weight, "zero_out_wgrad", False) else weight.detach()
        return of_hidden.to(hidden.dtype), dropped, None, None


def _over_ranks(sums: Tensor, here: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the highest logit of all ranks' columns, log of the sum of exponentials, entropy and the label's logit, all [n].
    The last three are relative to the first, divided by the temperature. here [n]: whether the label is among our columns."""
    mine, total, spread, label = sums
    top = mine.clone()
    if settings.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=settings.group)
    shift = (mine - top) / settings.temperature
    scale = shift.exp()
    label = torch.where(here, (label - top) / settings.temperature, 0.0)
    parts = torch.stack([scale * total, scale * (spread + shift * total), label])
    if settings.group is not None:
        dist.all_reduce(parts, group=settings.group)
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
    group: dist.ProcessGroup | None = None,
    chunk: tuple[int, int] = CHUNK,
    passes: ModuleType | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each label and the entropy of each distribution, in nats: two float32 [n], alike on all ranks.

    hidden [n, h] and weight [V/tp, h] of one type: this rank's rows of the head, which tensor-parallel `group` (None: one rank)
    splits evenly; rows from `vocab_size` on are padding and never looked at. labels [n] int64. precision: of the logits,
    float32 or the weight's type. passes: passes.py or kernels.py; None: that of the device.

    Backward, each rank gets its columns' part of the gradient of `hidden`. The weight's is added to `weight.main_grad`
    (float32, as megatron's DDP has it), and autograd sees none of it that counts.
    """
    if passes is None:
        # Late: Triton looks for a GPU's driver, and takes a second.
        passes = importlib.import_module(f"{__name__}.{'passes' if hidden.device.type == 'cpu' else 'kernels'}")
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    first = rank * len(weight)
    settings = _Settings(
        valid=min(max(vocab_size - first, 0), len(weight)),
        temperature=temperature,
        precision=precision,
        group=group if size > 1 else None,
        chunk=chunk,
        passes=passes,
    )
    return _LogProbsAndEntropy.apply(hidden, weight, labels - first, settings)
