"""The work on a chunk of logits, in torch: the reference for kernels.py, and the code
for CPUs.

For a row (a token) over the columns seen so far, with x the logits and T the
temperature:

    sums[0] top    max x                    sums[2] spread  sum of exp((x - top) / T) (x - top) / T
    sums[1] total  sum exp((x - top) / T)   sums[3] label   x of the label
"""

import torch
from torch import Tensor


def reduce(logits: Tensor, labels: Tensor, sums: Tensor, temperature: float) -> None:
    """Add the columns of a chunk, logits [rows, columns], to `sums` [4, rows] float32,
    in place. labels [rows] int64: counted from the chunk's first column; labels in
    other chunks are out of range.
    """
    top, total, spread, label = sums
    x = logits.float()
    columns = x.shape[-1]
    here = (labels >= 0) & (labels < columns)
    label.copy_(torch.where(here, x.gather(-1, labels.clamp(0, columns - 1)[:, None])[:, 0], label))
    higher = torch.maximum(top, x.amax(-1))
    shift = (top - higher) / temperature
    z = (x - higher[:, None]).div_(temperature)
    exponentials = z.exp()
    spread.copy_(shift.exp() * (spread + shift * total) + z.mul_(exponentials).sum(-1))
    total.copy_(shift.exp() * total + exponentials.sum(-1))
    top.copy_(higher)


def gradient(
    logits: Tensor,
    labels: Tensor,
    sums: Tensor,
    upstream: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the loss's gradient [rows, columns] for a chunk of logits (overwritten),
    rounded to `dtype`.

    sums [3, rows] float32: top and log of the total over all columns, and entropy.
    upstream [2, rows] float32: the loss's gradient with respect to log-prob and
    entropy. With z = x / T, p = softmax(z), H = -sum p log p:
        d log p_y / d z_j = [j = y] - p_j        d H / d z_j = -p_j (log p_j + H)
    """
    top, log_total, entropy = sums[:, :, None]
    of_logprob, of_entropy = upstream[:, :, None] / temperature
    columns = logits.shape[-1]
    here = ((labels >= 0) & (labels < columns))[:, None]
    log_p = logits.float().sub_(top).div_(temperature).sub_(log_total)
    p = log_p.exp()
    out = log_p.add_(entropy).mul_(of_entropy).add_(of_logprob).mul_(p).neg_()
    out.scatter_add_(-1, labels.clamp(0, columns - 1)[:, None], of_logprob * here)
    return out.to(dtype)
