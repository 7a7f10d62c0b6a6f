"""`megarl sft`: a supervised warm start with the learner's own step: cross-entropy on
the tokens that the model should write.

sft.data ──► traces ──shuffled epochs──► batches of sft.batch_tokens ──► Trainer.train_step ──► model.path (Hugging Face)
                                                                              │ ▲
                                           model.path.unfinished/  checkpoints, and the
                                           settings used for them

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
from megarl.lab.evaluation.suites import digest_of
from megarl.run import devices
from megarl.run.launcher import kernel_order
from megarl.run.process import StopRequest, free_ports, lock, outlive_screen, stop_requests
from megarl.tasks.data.traces import MAX_TOKENS, Trace, load_traces

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
    begun_with = json.loads(file.read_text()) if (file := unfinished / SETTINGS).exists() else None
    if complete(unfinished) and begun_with != settings:
        advice = "remove it to start over, or name another model.path"
        raise MegarlError(
            f"{unfinished}: a warm start with other settings was begun there ({SETTINGS}); {advice}"
        )
    if not is_rank():
        bind_symbols_when_used()
    if not is_rank() and devices.gpus():
        os.environ |= kernel_order(recipe, devices.capabilities())
        os.environ |= devices.kernel_caches() | devices.temporary_folder()
    if recipe.resources.learner_ranks > 1 and not is_rank():
        become_torchrun(recipe.resources.learner_ranks, free_ports(1)[0])
    leader = os.environ.get("RANK", "0") == "0"
    with lock(unfinished, "megarl sft", "model.path") if leader else nullcontext():
        if leader:
            write_atomically(file, json.dumps(settings, indent=1).encode())
        return run(recipe, unfinished)


def bind_symbols_when_used() -> None:
    """Start this process again without LD_BIND_NOW, as a learner is started: the loader
    has read it already, and Transformer Engine could not be imported.
    """
    if os.environ.pop("LD_BIND_NOW", ""):
        os.execv(sys.executable, [sys.executable, "-m", "megarl", *sys.argv[1:]])


def run(recipe: Recipe, unfinished: Path) -> int:
    outlive_screen()
    # No other role is running yet, so the learner can use all cores.
    torch.set_num_threads(
        max(
            recipe.resources.threads, len(os.sched_getaffinity(0)) // recipe.resources.learner_ranks
        )
    )
    parallel.start(recipe.model, recipe.run.seed, RANKS_LIMIT_S)
    if dist.get_rank() == 0:
        start_logging("warm start")
    sft, init = recipe.sft, Path(recipe.sft.init)
    trainer = Trainer(recipe, init, supervised=True)
    checkpoints = Checkpoints(unfinished, 1, trainer, init)
    checkpoints.load_latest()
    most = min(
        MAX_TOKENS, in_directory(init).context
    )  # a model has no trained positions beyond its context
    traces = load_traces(sft.data, load_tokenizer(init), recipe.data.decontaminate, most)
    check_same(traces, unfinished, trainer.step)
    tokens = sum(len(trace.tokens) for trace in traces)
    passes = sft.steps * sft.batch_tokens / tokens
    log.info(
        "the traces have %d tokens, and sft.steps=%d go through them about %.3g times",
        tokens,
        sft.steps,
        passes,
    )
    longest = max(len(trace.tokens) for trace in traces)
    microbatch_size.settle(trainer, longest, sft.batch_tokens, unfinished / "microbatch.json")
    with stop_requests() as stop_request:
        asked = train(
            trainer,
            batches(traces, sft.batch_tokens, recipe.run.seed),
            checkpoints,
            recipe,
            stop_request,
        )
        if not asked:
            trainer.policy.gather_weights()
            hf.save(trainer.policy.chunks, trainer.policy.family, init, Path(recipe.model.path))
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished)
    parallel.stop()
    return 128 + asked if asked else 0


def check_same(traces: Sequence[Trace], unfinished: Path, step: int) -> None:
    """Raise MegarlError if a warm start that goes on at `step` was begun with other
    traces. Else note what these are.
    """
    file = unfinished / TRACES
    now = digest_of(part.tobytes() for t in traces for part in (t.tokens, t.learnt))
    if step and file.exists() and file.read_text() != now:
        advice = "put back what was there, or remove the directory to start over"
        raise MegarlError(
            f"{unfinished}: a warm start with other traces (sft.data) was begun there; {advice}"
        )
    if dist.get_rank() == 0:
        write_atomically(file, now.encode())


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
    now = TextColumn("{task.fields[now]}")
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        now,
    )
    begun = trainer.step
    steps = recipe.sft.steps
    losses: list[float] = []
    others = dist.get_rank() != 0
    with Progress(*columns, console=terminal.console(quiet=others), disable=others) as progress:
        say = progress.console.print
        task = progress.add_task("sft", total=steps, completed=begun, now="")
        for batch in islice(source, begun, steps):
            begin = time.monotonic()
            losses.append(trainer.train_step(batch).get("loss", float("nan")))
            speed = sum(map(len, batch)) / (time.monotonic() - begin)
            progress.update(task, advance=1, now=f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
            if trainer.skipped_in_row >= MOST_SKIPPED:
                what = (
                    "loss or gradient was not finite; look at sft.init, lower sft.optimizer.lr or"
                    " set another model.dtype"
                )
                first = trainer.step - MOST_SKIPPED + 1
                raise MegarlError(
                    f"steps {first} to {trainer.step} of {steps} were skipped: {what}"
                )
            checkpoints.poll()
            asked = max(gathered(stop_request.signal))
            due = asked or trainer.step % recipe.checkpoint.every == 0 or checkpoints.failures
            if trainer.step < steps and due:
                checkpoints.save()
            if asked and trainer.step < steps:
                checkpoints.finish()
                say(
                    f"warm start: saved after step {trainer.step} of {steps}; the same command"
                    " continues"
                )
                return asked
        checkpoints.poll(blocking=True)  # one that could not be written is no longer needed
        if skipped := trainer.scaler_skipped_steps:
            say(
                f"warm start: {skipped} of {steps} updates were skipped, scaled gradients"
                " overflowed"
            )
        say(
            f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token in steps"
            f" {begun + 1} to {steps}"
        )
    return 0


def batches(traces: Sequence[Trace], batch_tokens: int, seed: int) -> Iterator[list[TrainSequence]]:
    """Yield endless batches of at most `batch_tokens` tokens (or one longer trace), the
    same on all ranks. Each epoch has its own order. The weight of a learnt token is one
    over the number of learnt tokens in its batch.
    """
    batch: list[Trace] = []
    tokens = 0
    shuffled = (np.random.default_rng([seed, epoch]).permutation(len(traces)) for epoch in count())
    for trace in (traces[i] for order in shuffled for i in order):
        if batch and tokens + len(trace.tokens) > batch_tokens:
            yield _sequences(batch)
            batch = []
            tokens = 0
        batch.append(trace)
        tokens += len(trace.tokens)


def _sequences(traces: Sequence[Trace]) -> list[TrainSequence]:
    weight = np.float32(1 / sum(int(t.learnt.sum()) for t in traces))
    return [
        TrainSequence(
            ticket=i,
            sample=0,
            tokens=t.tokens,
            behaviour_logprobs=np.zeros(len(t.tokens), np.float32),
            loss_weight=t.learnt * weight,
            advantage=0.0,
        )
        for i, t in enumerate(traces)
    ]
