"""Samples tokens on a CPU with one random number a row: first a block of columns, then a column of it.

torch.multinomial draws a random number for each token of the vocabulary. For 96 rows of 49,152 tokens
that takes 140 ms of a core, two thirds of a decode step of a model of 135 million parameters.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Columns in a block."""


def sample_rows(probabilities: Tensor) -> Tensor:
    """Draw one column from each row, with a probability proportional to its value.

    probabilities: [rows, columns] FP32, not negative; the sum of a row is above 0, and need not be 1.
    Returns [rows] of int32. Running sums are FP64, so that rare tokens are as frequent as they should be.
    """
    rows = len(probabilities)
    blocks = pad(probabilities, (0, -probabilities.shape[1] % BLOCK)).view(rows, -1, BLOCK)
    chosen, rest = _draw(blocks.sum(dim=-1), torch.rand(rows, 1, dtype=torch.float64))
    within = blocks[torch.arange(rows), chosen]
    column, _ = _draw(within, rest)
    return (chosen * BLOCK + column).to(torch.int32)


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Choose an index for each row, and return what is left of its random number.

    weights: [rows, n]; uniform: [rows, 1] FP64 in [0, 1). Returns the indices [rows], and a number in
    [0, 1) for each row [rows, 1] that is independent of the index.
    """
    upper = weights.to(torch.float64).cumsum(dim=-1)
    total = upper[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniform * total, below_total)
    index = torch.searchsorted(upper, point, right=True)
    weight = weights.gather(-1, index).to(torch.float64)
    rest = (point - (upper.gather(-1, index) - weight)) / weight
    return index.view(-1), rest.clamp(0.0, 1.0 - torch.finfo(torch.float64).eps)


def replace_multinomial() -> None:
    """Have SGLang's sampler of plain torch use sample_rows, but where requests have seeds of their own. Idempotent."""
    from sglang.srt.layers import sampler

    theirs = sampler.sampling_from_probs_torch
    if theirs.__module__ == __name__:
        return

    def sampled(probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if sampling_seed is None:
            return sample_rows(probs)
        return theirs(probs, sampling_seed=sampling_seed, positions=positions)

    sampler.sampling_from_probs_torch = sampled
