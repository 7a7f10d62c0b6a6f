"""A network that learns: gradients of its loss over many sequences, and the AdamW step
that follows from them.

    sequences ──► forward_backward: sum of weight * token loss ──► gradient_norm ──finite?──┬─yes─► update
                                                                                            └─no──► offenders: rollouts to blame
The weights of tokens already are the aggregation, so gradients are summed over
micro-batches and ranks and never averaged. All methods are collective: every rank calls
them with the same sequences.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

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
    before = torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(before, device.CORES // ranks // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TrainedNetwork(Network):
    """A network with gradients and an optimiser; subclasses define its loss.
    `loss_scale` is None unless the model is fp16. `head` and `loss` map hidden states
    to the loss [n], with gradient, and to the metrics [n] in `metric_names`, without;
    those that end in `_max` are reduced by maximum, all others by the mean over trained
    tokens.
    """

    head: Head[Any]
    metric_names: Sequence[str]
    prefix = ""
    loss_name = "loss"
    norm_name = "grad_norm"

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
        self.expert_load = (
            ExpertLoad(chunks, recipe.model.moe) if family.architecture.experts else None
        )
        self.ddp, self.optimizer, self.loss_scale = with_optimizer(
            chunks, settings, recipe, offload, gathers_late
        )
        self._offload = offload
        self._nonfinite: list[tuple[Sequence[int], Tensor, Tensor]] = []

    def loss(self, micro: MicroBatch, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Compute the loss's gradients, reduced over ranks, into the chunks' buffers;
        return its metrics.
        """
        self.clear()
        if self.expert_load:
            self.expert_load.begin(sum(len(s) for s in sequences))
        sums = torch.zeros(2 + len(self.metric_names), device=self.device)
        maxima = torch.full_like(sums, -math.inf)
        self._nonfinite = []

        def summed(members: Sequence[int], micro: MicroBatch, output: Any) -> Tensor:
            losses, metrics = self.loss(micro, output)
            total = (losses * micro.weight).sum()
            with torch.no_grad():
                rows = torch.stack([micro.counted, *(metrics[name] for name in self.metric_names)])
                counted = micro.counted > 0
                self._nonfinite.append(
                    (members, micro.here, counted & ~torch.isfinite(losses))
                )  # read only if needed
                sums[0] += total
                sums[1:] += torch.where(counted, rows, 0.0).sum(-1)
                maxima[1:] = torch.maximum(
                    maxima[1:], torch.where(counted, rows, -math.inf).amax(-1)
                )
            return total

        microbatches = self.run(self.ddp, sequences, self.head, summed, forward_only=False)
        if (
            not parallel_state.is_pipeline_last_stage()
            or parallel_state.get_tensor_model_parallel_rank() != 0
        ):
            sums.zero_()  # the last stage's first tensor-parallel rank counts for all
            maxima.fill_(-math.inf)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        total_loss, tokens, *totals = sums.tolist()
        result = {"loss": total_loss, "tokens_trained": tokens, "sequences": float(len(sequences))}
        result["microbatches"] = float(microbatches)
        for name, total, largest in zip(
            self.metric_names, totals, maxima.tolist()[2:], strict=True
        ):
            result[name] = largest if name.endswith("_max") else total / tokens
        return result | (self.expert_load.metrics() if self.expert_load else {})

    def broken(self, metrics: dict[str, float]) -> bool:
        """Return whether the loss is not finite, or the gradient is not and a lower
        loss scale could not help.
        """
        lowest = self.loss_scale is None or self.loss_scale.value <= LEAST
        return not math.isfinite(metrics[self.loss_name]) or (
            lowest and not math.isfinite(metrics[self.norm_name])
        )

    def offenders(self, sequences: Sequence[TrainSequence]) -> list[dict[str, int | str]]:
        """Return ticket and sample of each rollout with a token whose loss was not
        finite in the latest pass (`cause: loss`). If there is none, return all
        rollouts: only the step's sum or its gradient was not finite (`cause: step`).
        """
        mine: set[int] = set()
        for members, here, broken in self._nonfinite:
            if members:
                mine.update(np.repeat(members, here.cpu().numpy())[broken.cpu().numpy()].tolist())
        not_finite = sorted(set().union(*gathered(mine)))
        cause = "loss" if not_finite else "step"
        chosen = [sequences[i] for i in not_finite] or sequences
        return [{"ticket": s.ticket, "sample": s.sample, "cause": cause} for s in chosen]

    def gather_weights(self) -> None:
        """Make this rank's weights complete, which after an update they may not be
        before the next forward pass. COLLECTIVE. Call it before anything but a forward
        pass reads them.
        """
        late_gathering.gather(self.ddp)

    def clear(self) -> None:
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def moments_to_come(self) -> Tensor:
        """Allocate as much memory as AdamW has yet to allocate for its state on this
        rank's device, at its first step.
        """
        numbers = sum(
            parameter.numel()
            for part in self.optimizer.chained_optimizers
            if not part.is_stub_optimizer
            for parameter in part.get_parameters()
            if not part.optimizer.state.get(parameter)
        )
        return torch.empty(
            round(2 * numbers * (1 - self._offload)), dtype=torch.float32, device=self.device
        )

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
        if parameters := self.optimizer.get_parameters():
            most = self.settings.grad_clip
            offloads = self._offload > 0
            clip_grad_by_total_norm_fp32(parameters, most, norm, use_decoupled_grad=offloads)
        with self.full_memory_named(), more_threads() if self._offload else nullcontext():
            self.optimizer.step_with_ready_grads()
        late_gathering.updated(self.ddp)
        if self.expert_load:
            self.expert_load.balance()
        if self.device.type == "cuda":
            # otherwise its time would be attributed to the next operation that waits
            torch.cuda.synchronize()
