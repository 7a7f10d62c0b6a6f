"""What a loss sees and gives: the trained tokens of one micro-batch.

Tokens  ──►  per-token loss [n] with gradient, per-token metrics [n] without
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The n trained tokens that this rank holds, sequence after sequence.

    logp      [n] float32 with gradient: log pi(y) of the policy in training, at the sampling temperature
    behaviour [n] log mu(y), as recorded when the token was sampled: every loss's "old policy"
    reference [n] log-prob of the frozen reference, at the sampling temperature; 0 without one
    advantage [n]
    entropy   [n] with gradient: of the policy's distribution, nats
    counted   [n] 0 for the filler that stands in where there is no trained token, else 1
    here      [sequences] int64: how many of the n are each sequence's (filler is the first one's)
    lengths   [sequences] float32: trained tokens of each, |y|, those on other context-parallel ranks too
    group     of those ranks; None if there is one
    """

    logp: Tensor
    behaviour: Tensor
    reference: Tensor
    advantage: Tensor
    entropy: Tensor
    counted: Tensor
    here: Tensor
    lengths: Tensor
    group: dist.ProcessGroup | None = None

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Of each token the mean of `values` [n] (no gradient) over its sequence's trained tokens. COLLECTIVE over `group`."""
        sums = torch.segment_reduce(values * self.counted, "sum", lengths=self.here, initial=0)
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return (sums / self.lengths).repeat_interleave(self.here, output_size=len(values))


TokenLoss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""Names of metrics that end in `_max` are reduced by maximum, all others by the mean over trained tokens."""
