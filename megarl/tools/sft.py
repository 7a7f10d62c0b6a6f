"""`megarl sft`: a supervised warm start with the learner's own step: cross-entropy on
the tokens that the model should write.

    sft.data ─► traces ─shuffled epochs─► batches of sft.batch_tokens
             ─► Trainer.train_step ─► model.path (Hugging Face)
                    │ ▲
             model.path.unfinished/  checkpoints, and the settings used for them

On a signal it finishes the step, saves and exits with 128 + signal. The same command
continues with the same steps.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base import terminal
from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import start_logging
from megarl.core.base.ranks import gathered
from megarl.core.base.rundir import complete, write_atomically
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.torchrun import become_torchrun, is_rank
from megarl.core.learner import microbatch_size
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import MOST_SKIPPED, Trainer
from megarl.core.models import hf, parallel
from megarl.core.recipe import Recipe
from megarl.run import devices
from megarl.run.launcher import kernel_order
from megarl.run.process import StopRequest, free_ports, lock, outlive_screen, stop_requests
from megarl.tasks.data.traces import MAX_TOKENS, Trace, load_traces
from megarl.tasks.suites.suites import digest_of

log = logging.getLogger(__name__)
SETTINGS = "settings.json"
TRACES = "traces.digest"
# for a collective; a rank waits for another at most as long as that takes to read the
# data
RANKS_LIMIT_S = 600.0


def main(recipe: Recipe) -> int:
    """Train the model in sft.init and write it to model.path. Return 0, or 128 + the
    signal that ended the training.
    """
    output = Path(recipe.model.path)
    if output.exists():
        raise MegarlError(
            f"model.path: {output} exists already; name another, or remove it to train it again"
        )
    unfinished = output.with_name(f"{output.name}.unfinished")
    settings = {  # these must stay the same until the warm start ends
        "sft": recipe.sft.model_dump(mode="json"),
        "run.seed": recipe.run.seed,
        "data.decontaminate": recipe.data.model_dump(mode="json")["decontaminate"],
    }
    settings_file = unfinished / SETTINGS
    earlier_settings = None
    if settings_file.exists():
        earlier_settings = json.loads(settings_file.read_text())
    if complete(unfinished) and earlier_settings != settings:
        raise MegarlError(
            f"{unfinished}: a warm start with other settings was begun there ({SETTINGS}); remove"
            " it to start over, or name another model.path"
        )
    if not is_rank():
        bind_symbols_when_used()
    if not is_rank() and devices.gpus():
        os.environ |= kernel_order(recipe, devices.capabilities())
        os.environ |= devices.kernel_caches() | devices.temporary_folder()
    if recipe.resources.learner_ranks > 1 and not is_rank():
        become_torchrun(recipe.resources.learner_ranks, free_ports(1)[0])
    is_leader = os.environ.get("RANK", "0") == "0"
    with lock(unfinished, "megarl sft", "model.path") if is_leader else nullcontext():
        if is_leader:
            write_atomically(settings_file, json.dumps(settings, indent=1).encode())
        return run(recipe, unfinished)


def bind_symbols_when_used() -> None:
    """Start this process again without LD_BIND_NOW, if that is set, as a learner is
    started. With it Transformer Engine could not be imported, and the loader has read
    it already.
    """
    if os.environ.pop("LD_BIND_NOW", ""):
        os.execv(sys.executable, [sys.executable, "-m", "megarl", *sys.argv[1:]])


def run(recipe: Recipe, unfinished: Path) -> int:
    """Make the warm start, from its latest checkpoint in `unfinished`; return 0, or 128
    + the signal that ended it.
    """
    outlive_screen()
    # No other role is running yet, so the learner can use all cores.
    cores = len(os.sched_getaffinity(0)) // recipe.resources.learner_ranks
    torch.set_num_threads(max(recipe.resources.threads, cores))
    parallel.start(recipe.model, recipe.run.seed, RANKS_LIMIT_S)
    if dist.get_rank() == 0:
        start_logging("warm start")
    sft = recipe.sft
    init = Path(sft.init)
    trainer = Trainer(recipe, init, supervised=True)
    checkpoints = Checkpoints(unfinished, 1, trainer, init)
    checkpoints.load_latest()
    # A model has no trained positions beyond its context.
    limit = min(MAX_TOKENS, in_directory(init).context)
    traces = load_traces(sft.data, load_tokenizer(init), recipe.data.decontaminate, limit)
    check_same(traces, unfinished, trainer.step)
    tokens = sum(len(trace.tokens) for trace in traces)
    log.info(
        "the traces have %d tokens, and sft.steps=%d go through them about %.3g times",
        tokens,
        sft.steps,
        sft.steps * sft.batch_tokens / tokens,
    )
    longest = max(len(trace.tokens) for trace in traces)
    microbatch_size.settle(trainer, longest, sft.batch_tokens, unfinished / "microbatch.json")
    source = batches(traces, sft.batch_tokens, recipe.run.seed)
    with stop_requests() as stop_request:
        signal = train(trainer, source, checkpoints, recipe, stop_request)
        if not signal:  # it has come to its end
            trainer.policy.gather_weights()
            hf.save(trainer.policy.chunks, trainer.policy.family, init, Path(recipe.model.path))
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished)
    parallel.stop()
    return 128 + signal if signal else 0


def check_same(traces: Sequence[Trace], unfinished: Path, step: int) -> None:
    """Raise MegarlError if a warm start that goes on at `step` (0: a new one) was begun
    with other traces. Else write their digest, to compare with at the next start.
    """
    file = unfinished / TRACES
    digest = digest_of(part.tobytes() for trace in traces for part in (trace.tokens, trace.learnt))
    if step and file.exists() and file.read_text() != digest:
        raise MegarlError(
            f"{unfinished}: a warm start with other traces (sft.data) was begun there; put back"
            " what was there, or remove the directory to start over"
        )
    if dist.get_rank() == 0:
        write_atomically(file, digest.encode())


def train(
    trainer: Trainer,
    source: Iterator[list[TrainSequence]],
    checkpoints: Checkpoints,
    recipe: Recipe,
    stop_request: StopRequest,
) -> int:
    """Run the remaining steps, with a progress bar on rank 0; return 0, or the signal
    on which all ranks saved and stopped.
    """
    first_step = trainer.step
    steps = recipe.sft.steps
    losses: list[float] = []
    with _progress() as progress:
        say = progress.console.print
        task = progress.add_task("sft", total=steps, completed=first_step, latest="")
        for batch in islice(source, first_step, steps):  # passes over batches already trained
            start = time.monotonic()
            losses.append(trainer.train_step(batch).get("loss", float("nan")))
            speed = sum(map(len, batch)) / (time.monotonic() - start)
            latest = f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, advance=1, latest=latest)
            _refuse_skipped(trainer, steps)
            checkpoints.poll()
            signal = max(gathered(stop_request.signal))  # of all ranks, so that all stop
            if trainer.step < steps:
                is_regular = trainer.step % recipe.checkpoint.every == 0
                if signal or is_regular or checkpoints.failures:
                    checkpoints.save()
                if signal:
                    checkpoints.finish()
                    say(
                        f"warm start: saved after step {trainer.step} of {steps}; the same command"
                        " continues"
                    )
                    return signal
        checkpoints.poll(blocking=True)  # one that could not be written is no longer needed
        if skipped := trainer.scaler_skipped_steps:
            say(
                f"warm start: {skipped} of {steps} updates were skipped, scaled gradients"
                " overflowed"
            )
        say(
            f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token in steps"
            f" {first_step + 1} to {steps}"
        )
    return 0


def _progress() -> Progress:
    """Return a progress bar, which only rank 0 draws."""
    is_silent = dist.get_rank() != 0
    return Progress(
        TextColumn("warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[latest]}"),
        console=terminal.console(quiet=is_silent),
        disable=is_silent,
    )


def _refuse_skipped(trainer: Trainer, steps: int) -> None:
    """Raise MegarlError if too many steps in a row were skipped. steps: of the whole
    warm start.
    """
    if trainer.skipped_in_row >= MOST_SKIPPED:
        first = trainer.step - MOST_SKIPPED + 1
        raise MegarlError(
            f"steps {first} to {trainer.step} of {steps} were skipped: loss or gradient was not"
            " finite; look at sft.init, lower sft.optimizer.lr or set another model.dtype"
        )


def batches(traces: Sequence[Trace], batch_tokens: int, seed: int) -> Iterator[list[TrainSequence]]:
    """Yield endless batches of at most `batch_tokens` tokens (or one longer trace), the
    same on all ranks. Each epoch has its own order. The weight of a learnt token is one
    over the number of learnt tokens in its batch.
    """
    batch: list[Trace] = []
    tokens = 0
    for trace in _endless(traces, seed):
        if batch and tokens + len(trace.tokens) > batch_tokens:
            yield _sequences(batch)
            batch = []
            tokens = 0
        batch.append(trace)
        tokens += len(trace.tokens)


def _endless(traces: Sequence[Trace], seed: int) -> Iterator[Trace]:
    """Yield the traces of one epoch after the other, each in an order of its own."""
    for epoch in count():
        for i in np.random.default_rng([seed, epoch]).permutation(len(traces)):
            yield traces[i]


def _sequences(traces: Sequence[Trace]) -> list[TrainSequence]:
    """Return a batch's traces as sequences to train on; the weights of all learnt
    tokens add up to 1.
    """
    learnt_tokens = sum(int(trace.learnt.sum()) for trace in traces)
    weight = np.float32(1 / learnt_tokens)
    return [
        TrainSequence(
            ticket=i,
            sample=0,
            tokens=trace.tokens,
            behaviour_logprobs=np.zeros(len(trace.tokens), np.float32),
            loss_weight=trace.learnt * weight,
            advantage=0.0,
        )
        for i, trace in enumerate(traces)
    ]
