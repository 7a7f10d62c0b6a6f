"""A network that learns: gradients of its loss over many sequences, and the AdamW step
that follows from them.

    sequences ──► forward_backward: sum of weight * token loss
                    └─► gradient_norm ──finite?──┬─yes─► update
                                                 └─no──► offenders: rollouts to blame

The weights of tokens already are the aggregation, so gradients are summed over
micro-batches and ranks and never averaged. All methods are collective: every rank calls
them with the same sequences.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base import device
from megarl.core.base.ranks import gathered
from megarl.core.learner import late_gathering
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.moe import ExpertLoad
from megarl.core.learner.network import Head, Network
from megarl.core.learner.optimizer import LEAST, WEIGHT_DECAY, with_optimizer
from megarl.core.models import Family
from megarl.core.recipe import Optimizer, Recipe


@contextmanager
def more_threads() -> Iterator[None]:
    """Let torch use half of this rank's share of the machine's cores; servers may need
    the others.
    """
    usual = torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(usual, device.CORES // ranks // 2))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@dataclass(frozen=True)
class MetricNames:
    """The names of a network's metrics in a step's row."""

    loss: str
    norm: str
    lr: str
    loss_scale: str


class NonFiniteTokens(NamedTuple):
    """Which tokens of a micro-batch have a loss that is not finite. On the device; read
    only if the step is broken.
    """

    members: Sequence[int]  # indices of its sequences
    local_lengths: Tensor  # [sequences], as in MicroBatch
    mask: Tensor  # [n] bool


class TokenTotals:
    """Sums and maxima over a step's trained tokens, on this rank until `reduce`."""

    def __init__(self, metric_names: Sequence[str], device: torch.device) -> None:
        self._metric_names = metric_names
        # [2 + metrics]: the loss, the number of tokens, metrics
        self._sums = torch.zeros(2 + len(metric_names), device=device)
        # [1 + metrics]: the number of tokens, metrics
        self._maxima = torch.full_like(self._sums[1:], -math.inf)

    @torch.no_grad()
    def add(self, loss: Tensor, counted: Tensor, metrics: dict[str, Tensor]) -> None:
        """Add a micro-batch: its loss [], and of its tokens [n] which are counted (0 or
        1), and their metrics.
        """
        rows = torch.stack([counted, *(metrics[name] for name in self._metric_names)])
        mask = counted > 0
        self._sums[0] += loss
        self._sums[1:] += torch.where(mask, rows, 0.0).sum(-1)
        largest = torch.where(mask, rows, -math.inf).amax(-1)
        self._maxima = torch.maximum(self._maxima, largest)

    def reduce(self) -> dict[str, float]:
        """Return the loss, the number of tokens, and of each metric the mean, or the
        maximum if its name ends in `_max`. COLLECTIVE over all ranks: the last stage's
        first tensor-parallel rank counts for all.
        """
        is_last_stage = parallel_state.is_pipeline_last_stage()
        if not is_last_stage or parallel_state.get_tensor_model_parallel_rank() != 0:
            self._sums.zero_()
            self._maxima.fill_(-math.inf)
        dist.all_reduce(self._sums)
        dist.all_reduce(self._maxima, dist.ReduceOp.MAX)
        loss, tokens, *sums_by_metric = self._sums.tolist()
        maxima_by_metric = self._maxima.tolist()[1:]  # without that of the number of tokens
        reduced = {"loss": loss, "tokens_trained": tokens}
        for name, total, largest in zip(
            self._metric_names, sums_by_metric, maxima_by_metric, strict=True
        ):
            reduced[name] = largest if name.endswith("_max") else total / tokens
        return reduced


class TrainedNetwork(Network):
    """A network with gradients and an optimiser; subclasses define its loss.
    `loss_scale` is None unless the model is fp16. `head` and `loss` map hidden states
    to the loss [n], with gradient, and to the metrics [n] in `metric_names`, without;
    those that end in `_max` are reduced by maximum, all others by the mean over trained
    tokens.
    """

    head: Head[Any]
    metric_names: Sequence[str]
    names = MetricNames(loss="loss", norm="grad_norm", lr="lr", loss_scale="loss_scale")

    def __init__(
        self,
        chunks: list[GPTModel],
        family: Family,
        settings: Optimizer,
        recipe: Recipe,
        offload: float = 0.0,
        gathers_late: bool = False,
    ) -> None:
        """offload, gathers_late: as optimizer.with_optimizer has them."""
        super().__init__(chunks, family, recipe)
        self.settings = settings
        if family.architecture.experts:
            self.expert_load = ExpertLoad(chunks, recipe.model.moe)
        self.ddp, self.optimizer, self.loss_scale = with_optimizer(
            chunks, settings, recipe, offload, gathers_late
        )
        self._offload = offload
        self._nonfinite: list[NonFiniteTokens] = []

    def loss(self, micro: MicroBatch, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of a micro-batch's trained tokens, [n]."""
        raise NotImplementedError

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Compute the loss's gradients, reduced over ranks, into the chunks' buffers;
        return its metrics.
        """
        self.clear()
        if self.expert_load:
            self.expert_load.start_step(sum(len(s) for s in sequences))
        totals = TokenTotals(self.metric_names, self.device)
        self._nonfinite = []

        def weighted_loss(members: Sequence[int], micro: MicroBatch, output: Any) -> Tensor:
            """Return a micro-batch's part of the loss (a Consume); keep its metrics,
            and which of its tokens have a loss that is not finite.
            """
            losses, metrics = self.loss(micro, output)
            loss = (losses * micro.weight).sum()
            totals.add(loss, micro.counted, metrics)
            with torch.no_grad():
                nonfinite = (micro.counted > 0) & ~torch.isfinite(losses)
            self._nonfinite.append(NonFiniteTokens(members, micro.local_lengths, nonfinite))
            return loss

        microbatches = self.run(self.ddp, sequences, self.head, weighted_loss, forward_only=False)
        metrics = totals.reduce()
        metrics["sequences"] = float(len(sequences))
        metrics["microbatches"] = float(microbatches)
        if self.expert_load:
            metrics |= self.expert_load.metrics()
        return metrics

    def broken(self, metrics: dict[str, float]) -> bool:
        """Return whether the loss is not finite, or the gradient is not and a lower
        loss scale could not help.
        """
        if not math.isfinite(metrics[self.names.loss]):
            return True
        scale_is_lowest = self.loss_scale is None or self.loss_scale.value <= LEAST
        return scale_is_lowest and not math.isfinite(metrics[self.names.norm])

    def offenders(self, sequences: Sequence[TrainSequence]) -> list[dict[str, int | str]]:
        """Return ticket and sample of each rollout with a token whose loss was not
        finite in the latest pass (`cause: loss`). If there is none, return all
        rollouts: only the step's sum or its gradient was not finite (`cause: step`).
        """
        on_this_rank: set[int] = set()
        for members, local_lengths, mask in self._nonfinite:
            if members:
                of_token = np.repeat(members, local_lengths.cpu().numpy())
                on_this_rank.update(of_token[mask.cpu().numpy()].tolist())
        not_finite = sorted(set().union(*gathered(on_this_rank)))
        cause = "loss" if not_finite else "step"
        blamed = [sequences[i] for i in not_finite] or sequences
        return [{"ticket": s.ticket, "sample": s.sample, "cause": cause} for s in blamed]

    def gather_weights(self) -> None:
        """Make this rank's weights complete, which after an update they may not be
        before the next forward pass. COLLECTIVE. Call it before anything but a forward
        pass reads them.
        """
        late_gathering.gather(self.ddp)

    def clear(self) -> None:
        """Set all gradients to 0."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def moments_to_come(self) -> Tensor:
        """Allocate as much memory as AdamW has yet to allocate for its state on this
        rank's device, at its first step: a trial for the size of micro-batches has no
        more room than that step.
        """
        numbers = 0
        for part in self.optimizer.chained_optimizers:
            if part.is_stub_optimizer:
                continue
            for parameter in part.get_parameters():
                if not part.optimizer.state.get(parameter):
                    numbers += parameter.numel()
        moments = 2
        on_device = round(moments * numbers * (1 - self._offload))
        return torch.empty(on_device, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Divide gradients by the loss scale, for `update`; return their norm over all
        ranks, finite only if they all are.
        """
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def update(self, lr: float, norm: float) -> None:
        """Clip the gradients, whose norm is `norm`, and take one AdamW step. Norms,
        biases and other parameters of one dimension do not decay: megatron marks them
        by `wd_mult`, but only its scheduler, which is not used here, applies it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]
        offloads = self._offload > 0
        if parameters := self.optimizer.get_parameters():
            clip_grad_by_total_norm_fp32(
                parameters, self.settings.grad_clip, norm, use_decoupled_grad=offloads
            )
        with self.full_memory_named(), more_threads() if offloads else nullcontext():
            self.optimizer.step_with_ready_grads()
        late_gathering.updated(self.ddp)
        if self.expert_load:
            self.expert_load.balance()
        if self.device.type == "cuda":
            # otherwise its time would be attributed to the next operation that waits
            torch.cuda.synchronize()
