"""One optimiser step of the whole learner world.

    [TrainSequence] ──► plan: balanced micro-batches ──► Megatron's schedule (1F1B, interleaved) ──► gradients ──► AdamW
                                                          head: log-probs of trained tokens
                                                          loss: sum of weight * token loss

The weights already are the aggregation, so gradients are summed over micro-batches and ranks and never averaged. All
methods are collective: every rank calls them with the same sequences.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl import models
from megarl.batch import TrainSequence, advantage_statistics
from megarl.learner.expert_load import ExpertLoad
from megarl.learner.logprobs import selected_logprobs
from megarl.learner.losses import Loss, policy_loss
from megarl.learner.losses.tokens import Tokens
from megarl.learner.microbatch import Layout, MicroBatch, Plan, assemble, plan
from megarl.learner.nonfinite import NonFinite
from megarl.learner.replay import Replay
from megarl.models import build, hf
from megarl.recipe import Optimizer, Recipe

log = logging.getLogger(__name__)

COMMON_METRICS = ("loss", "entropy", "tokens_trained")


class Trainer:
    """Model, optimiser and the step count of this rank. `step` is the next to train and also the version of the weights.

    skipped_in_row: steps up to the latest whose loss or gradient was not finite; offenders: the rollouts of the latest.
    """

    def __init__(
        self,
        recipe: Recipe,
        hf_dir: Path,
        *,
        optimizer: Optimizer | None = None,
        loss: Loss | None = None,
        temperature: float | None = None,
        steps: int | None = None,
    ) -> None:
        """What is not given is the recipe's for reinforcement learning. steps: of the whole run, for the schedule."""
        self.recipe = recipe
        self.settings = optimizer or recipe.learner.optimizer
        self.steps = steps or recipe.run.steps
        self.loss = loss or policy_loss(recipe.loss)
        self.temperature = temperature or recipe.sampling.temperature
        self.family = models.family_of(hf_dir)
        self.chunks = build.build(recipe.model, hf_dir)
        hf.load(self.chunks, self.family, hf_dir)
        self.layout = layout_of(recipe)
        self.expert_load = ExpertLoad(self.chunks, recipe.model.moe) if self.family.experts else None
        self.replay = Replay(self.chunks) if recipe.model.moe.routing_replay else None
        self.device = next(self.chunks[0].parameters()).device
        self.ddp, self.optimizer = _with_optimizer(self.chunks, self.settings, recipe)
        self.step = 0
        self.skipped_steps = self.skipped_in_row = 0
        self.offenders: list[dict[str, Any]] = []

    def train_step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train step `self.step` and count it, also when nothing is trained. The same metrics on all ranks."""
        lr = learning_rate(self.step, self.settings, self.steps)
        self.step += 1
        if not sequences:
            return {"lr": lr, "empty": 1.0, "skipped": 0.0, "tokens_trained": 0.0}
        metrics = self.forward_backward(sequences)
        grad_norm = self._update(lr, math.isfinite(metrics["loss"]))
        skipped = not math.isfinite(grad_norm) or not math.isfinite(metrics["loss"])
        if skipped:
            self.skipped_steps += 1
            log.warning("step %d skipped: loss %s, gradient norm %s", self.step - 1, metrics["loss"], grad_norm)
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        self.offenders = self.nonfinite.offenders() if skipped else []
        return metrics | {
            "grad_norm": grad_norm,
            "lr": lr,
            "empty": 0.0,
            "skipped": float(skipped),
            "skipped_steps": float(self.skipped_steps),
        }

    def logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-prob, at temperature 1, of each token of each sequence but its first. [len - 1] float32 each, on all ranks."""
        tokens = [_scored(i, ids) for i, ids in enumerate(sequences)]
        steps = plan([len(t) for t in tokens], self.recipe.learner.microbatch_tokens, self.layout)
        out = torch.zeros(sum(len(t) for t in tokens), device=self.device)
        starts = np.cumsum([0] + [len(t) for t in tokens])
        mine = steps.members[parallel_state.get_data_parallel_rank()]
        pending = iter(mine)

        def collect(micro: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            members = next(pending)
            if len(micro.of):
                where = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])[micro.of]
                out[torch.from_numpy(where).to(self.device)] = output[0]
            return output[0].sum(), torch.tensor(0, dtype=torch.int), {}

        with torch.no_grad():
            self._schedule(tokens, steps, collect, temperature=1.0, forward_only=True)
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            out.zero_()
        dist.all_reduce(out)
        values = out.cpu().numpy()
        return [values[a + 1 : b] for a, b in itertools.pairwise(starts)]

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Gradients of the loss into the chunks' buffers, reduced over ranks; the metrics of that."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        lengths = [len(s) for s in sequences]
        steps = plan(lengths, self.recipe.learner.microbatch_tokens, self.layout)
        if self.expert_load:
            self.expert_load.begin(sum(lengths))
        sums = torch.zeros(len(COMMON_METRICS) + len(self.loss.metrics), device=self.device)
        maxima = torch.full_like(sums, -math.inf)
        sharers = parallel_state.get_context_parallel_group() if self.layout.context_parallel > 1 else None
        self.nonfinite = NonFinite(sequences, steps.members[parallel_state.get_data_parallel_rank()])

        def token_loss(micro: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logp, entropy = output
            losses, metrics = self.loss.function(
                Tokens(
                    logp, micro.behaviour, micro.advantage, entropy, micro.counted, micro.here, micro.lengths, sharers
                )
            )
            self.nonfinite.seen(micro, losses)
            loss = (losses * micro.weight).sum()
            with torch.no_grad():
                rows = torch.stack([entropy, micro.counted, *metrics.values()])
                counted = micro.counted > 0
                sums[0] += loss
                sums[1:] += torch.where(counted, rows, 0.0).sum(-1)
                maxima[1:] = torch.maximum(maxima[1:], torch.where(counted, rows, -math.inf).amax(-1))
            return loss, torch.tensor(0, dtype=torch.int), {}

        self._schedule(sequences, steps, token_loss, self.temperature, forward_only=False)
        sizes = {"microbatches": float(len(steps.members[0])), "sequences": float(len(sequences))}
        found = self._reduced(sums, maxima) | sizes | advantage_statistics(sequences)
        return found | (self.expert_load.metrics() if self.expert_load else {})

    def _schedule(
        self,
        sequences: Sequence[TrainSequence],
        steps: Plan,
        loss: Callable[[MicroBatch, Any], tuple[Tensor, Tensor, dict[str, Tensor]]],
        temperature: float,
        forward_only: bool,
    ) -> None:
        """Run Megatron's schedule over this rank's micro-batches. `loss` sees them in order, on the last stage only."""
        mine = steps.members[parallel_state.get_data_parallel_rank()]
        micros = [
            assemble([sequences[i] for i in members], steps.rows, steps.length, self.layout, self.device)
            for members in mine
        ]
        head = partial(selected_logprobs, vocab_size=self.family.vocabulary, temperature=temperature)
        replay = None if forward_only else self.replay
        expert_load = None if forward_only else self.expert_load

        def forward(iterator: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
            micro = next(iterator)
            replayed = (
                replay.of(self.ddp.index(chunk), micro.experts, micro.tokens.numel()) if replay else nullcontext()
            )
            with replayed:
                output = chunk(
                    micro.tokens,
                    None,
                    None,
                    packed_seq_params=micro.packed,
                    padding_mask=expert_load.padding_mask(chunk.module, micro) if expert_load else None,
                    output_processor=head,
                    output_processor_context=micro,
                )
            return output, partial(loss, micro)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micros) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(micros),
            seq_length=steps.length,
            micro_batch_size=steps.rows,
            forward_only=forward_only,
        )
        if replay:
            replay.end()

    def _reduced(self, sums: Tensor, maxima: Tensor) -> dict[str, float]:
        """Metrics over all ranks; other than the last stage's first tensor-parallel rank has nothing to add."""
        if not parallel_state.is_pipeline_last_stage() or parallel_state.get_tensor_model_parallel_rank() != 0:
            sums.zero_()
            maxima.fill_(-math.inf)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        names = ("loss", "entropy", "tokens_trained", *self.loss.metrics)
        total, largest = dict(zip(names, sums.tolist(), strict=True)), dict(zip(names, maxima.tolist(), strict=True))
        tokens = total["tokens_trained"]
        means = {n: largest[n] if n.endswith("_max") else total[n] / tokens for n in self.loss.metrics}
        return {
            "loss": total["loss"],
            "entropy": total["entropy"] / tokens,
            "tokens_trained": tokens,
        } | self.loss.finish(means)

    @torch.no_grad()
    def _update(self, lr: float, finite: bool) -> float:
        """One AdamW step with clipped gradients, unless they are not finite; the norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not finite or not math.isfinite(norm):
            return norm
        parameters = self.optimizer.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, self.settings.grad_clip, norm)
        self.optimizer.step_with_ready_grads()
        return norm


def learning_rate(step: int, settings: Optimizer, steps: int) -> float:
    """Of step `step` of `steps`, counted from 0: linear warm-up, then the schedule, whose end is after the last step."""
    if step < settings.warmup_steps:
        return settings.lr * ((step + 1) / settings.warmup_steps)
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.final_lr_ratio + (1 - settings.final_lr_ratio) * left)


def layout_of(recipe: Recipe) -> Layout:
    """What micro-batches need to know of the recipe and of this rank's place."""
    model = recipe.model
    return Layout(
        packing=recipe.learner.packing,
        data_parallel=parallel_state.get_data_parallel_world_size(),
        context_parallel=model.context_parallel,
        context_rank=parallel_state.get_context_parallel_rank(),
        sequence_shards=model.tensor_parallel if model.sequence_parallel else 1,
        pipeline_parallel=model.pipeline_parallel,
        virtual_pipeline_parallel=model.virtual_pipeline_parallel,
    )


def _with_optimizer(
    chunks: list[Any], settings: Optimizer, recipe: Recipe
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Chunks wrapped for data parallelism with FP32 gradients, and AdamW with its state divided among the ranks."""
    config = chunks[0].config
    # The micro-batches of a step have one size (microbatch.py), so stages need not tell each other shapes.
    config.variable_seq_lengths = False
    # Gradients are summed, not averaged: scaling factor 1 in DDP, and no division by a number of tokens at the end.
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = lambda model, _tokens, **groups: finalize_model_grads(model, None, **groups)
    overlap = torch.cuda.is_available() and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap
    )
    ddp = [DistributedDataParallel(config, ddp_config, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    if overlap:
        config.no_sync_func = [d.no_sync for d in ddp] if len(ddp) > 1 else ddp[0].no_sync
    bf16 = recipe.model.dtype == "bf16"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.grad_clip,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
        ),
        ddp,
    )
    return ddp, optimizer


def _scored(index: int, ids: np.ndarray) -> TrainSequence:
    """A sequence of which every token but the first is asked for."""
    wanted = np.ones(len(ids), np.float32)
    wanted[0] = 0
    return TrainSequence(index, 0, ids, np.zeros_like(wanted), wanted, 0.0, 1)
