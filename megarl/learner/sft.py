"""`megarl sft`: a supervised warm start with the learner's own step, cross-entropy on what the model is to write.

sft.data ──► traces ──shuffled epochs──► batches of sft.batch_tokens ──► Trainer.train_step ──► sft.output (Hugging Face)
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megarl.batch import TrainSequence
from megarl.data.tokenizer import load_tokenizer
from megarl.data.traces import Trace, load_traces
from megarl.errors import MegarlError
from megarl.learner import microbatch_size
from megarl.learner.losses import supervised_loss
from megarl.learner.ranks import become_torchrun, is_rank
from megarl.learner.trainer import Trainer
from megarl.models import hf, parallel
from megarl.recipe import Recipe
from megarl.rundir import free_ports

RANKS_LIMIT_S = 600.0
"""Of a collective; ranks differ by no more than reading the data."""


def main(recipe: Recipe) -> int:
    """Train sft.init on sft.data for sft.steps steps and write sft.output."""
    if Path(recipe.sft.output).exists():
        raise MegarlError(f"sft.output: {recipe.sft.output} exists already; remove it, or name another directory")
    if recipe.resources.learner_ranks > 1 and not is_rank():
        become_torchrun(recipe.resources.learner_ranks, free_ports(1)[0])
    # Nothing else of the run is alive yet: all cores are the learner's.
    torch.set_num_threads(max(recipe.resources.threads, (os.cpu_count() or 1) // recipe.resources.learner_ranks))
    parallel.start(recipe.model, recipe.run.seed, RANKS_LIMIT_S)
    init = Path(recipe.sft.init)
    trainer = Trainer(
        recipe, init, optimizer=recipe.sft.optimizer, loss=supervised_loss(), temperature=1.0, steps=recipe.sft.steps
    )
    microbatch_size.settle(trainer, recipe.sft.max_length, recipe.sft.batch_tokens, record=None)
    traces = load_traces(recipe.sft.data, load_tokenizer(init), recipe.sft.max_length, recipe.data.decontaminate)
    train(trainer, batches(traces, recipe.sft.batch_tokens, recipe.run.seed), recipe.sft.steps)
    hf.save(trainer.policy.chunks, trainer.policy.family, init, Path(recipe.sft.output))
    parallel.stop()
    return 0


def train(trainer: Trainer, source: Iterator[list[TrainSequence]], steps: int) -> None:
    """That many steps, with a progress bar on rank 0."""
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    losses: list[float] = []
    with Progress(*columns, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task("sft", total=steps, now="")
        for _ in range(steps):
            begin = time.monotonic()
            batch = next(source)
            metrics = trainer.train_step(batch)
            losses.append(metrics.get("loss", float("nan")))
            speed = sum(map(len, batch)) / (time.monotonic() - begin)
            progress.update(task, advance=1, now=f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
        progress.console.print(f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token in {steps} steps")


def batches(traces: Sequence[Trace], batch_tokens: int, seed: int) -> Iterator[list[TrainSequence]]:
    """Endless batches of at most `batch_tokens` tokens (or one trace), each epoch in an order of its own; the same on all
    ranks. A token that is learnt weighs one over those of its batch."""
    batch: list[Trace] = []
    tokens = 0
    for trace in _shuffled(traces, seed):
        if batch and tokens + len(trace.tokens) > batch_tokens:
            yield _sequences(batch)
            batch, tokens = [], 0
        batch.append(trace)
        tokens += len(trace.tokens)


def _shuffled(traces: Sequence[Trace], seed: int) -> Iterator[Trace]:
    epoch = 0
    while True:
        for i in np.random.default_rng([seed, epoch]).permutation(len(traces)):
            yield traces[i]
        epoch += 1


def _sequences(traces: Sequence[Trace]) -> list[TrainSequence]:
    weight = np.float32(1 / sum(int(t.learnt.sum()) for t in traces))
    return [
        TrainSequence(
            ticket=i,
            sample=0,
            tokens=trace.tokens,
            behaviour_logprobs=np.zeros(len(trace.tokens), np.float32),
            loss_weight=trace.learnt * weight,
            advantage=0.0,
            prompt_length=trace.prompt_tokens,
        )
        for i, trace in enumerate(traces)
    ]
