"""The work on a chunk of logits, in torch: the reference for kernels.py, and the code
for CPUs.

For a row (a token) over the columns seen so far, with x the logits and T the
temperature:

    statistics[0] top      max x
    statistics[1] total    sum of exp((x - top) / T)
    statistics[2] spread   sum of exp((x - top) / T) (x - top) / T
    statistics[3] label    x of the label
"""

import torch
from torch import Tensor


def reduce(logits: Tensor, labels: Tensor, statistics: Tensor, temperature: float) -> None:
    """Add the columns of a chunk, logits [rows, columns], to `statistics` [4, rows]
    float32, in place. labels [rows] int64: counted from the chunk's first column;
    labels in other chunks are out of range.
    """
    top, total, spread, label = statistics
    x = logits.float()
    columns = x.shape[-1]
    in_chunk = (labels >= 0) & (labels < columns)
    column = labels.clamp(0, columns - 1)
    label_logits = x.gather(-1, column[:, None])[:, 0]
    label.copy_(torch.where(in_chunk, label_logits, label))
    new_top = torch.maximum(top, x.amax(-1))
    shift = (top - new_top) / temperature
    scale = shift.exp()
    z = (x - new_top[:, None]).div_(temperature)
    exponentials = z.exp()
    chunk_spread = z.mul_(exponentials).sum(-1)
    spread.copy_(scale * (spread + shift * total) + chunk_spread)
    total.copy_(scale * total + exponentials.sum(-1))
    top.copy_(new_top)


def gradient(
    logits: Tensor,
    labels: Tensor,
    totals: Tensor,
    upstream: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the loss's gradient [rows, columns] for a chunk of logits (overwritten),
    rounded to `dtype`.

    totals [3, rows] float32: top and log of the total over all columns, and entropy.
    upstream [2, rows] float32: the loss's gradient with respect to log-prob and
    entropy. With z = x / T, p = softmax(z), H = -sum p log p:
        d log p_y / d z_j = [j = y] - p_j        d H / d z_j = -p_j (log p_j + H)
    """
    top, log_total, entropy = totals[:, :, None]
    of_logprob, of_entropy = upstream[:, :, None] / temperature
    columns = logits.shape[-1]
    in_chunk = ((labels >= 0) & (labels < columns))[:, None]
    column = labels.clamp(0, columns - 1)[:, None]
    log_p = logits.float().sub_(top).div_(temperature).sub_(log_total)
    p = log_p.exp()
    # In place: d_logits = -p (of_entropy (log_p + entropy) + of_logprob)
    d_logits = log_p.add_(entropy).mul_(of_entropy).add_(of_logprob).mul_(p).neg_()
    d_logits.scatter_add_(-1, column, of_logprob * in_chunk)
    return d_logits.to(dtype)
