"""`megarl learn`: the collective command loop.

    rank 0   ── Next ──► controller ── Train | Publish | Wait | Stop ──► rank 0 ── broadcast ──► all ranks execute it

The learner decides nothing; between commands it only looks whether someone wants it to stop (RUN/stop, SIGTERM) and whether a
checkpoint has reached the disk. Every step leaves one row in RUN/metrics.jsonl.

`contradiction` tells whether the step that a learner trains first is the one that an earlier life recorded there. A learner
that comes back begins with a batch that was trained before, with weights that should be those of that time. Both rows have the
mean, over the same tokens, of |learner's log-prob less behaviour log-prob|. By the triangle inequality two such means differ by
no more than the mean |difference| of the two learners' log-probs. Of that rounding explains, at any layout, no more than it
explains between server and learner: the limit of parity. What differs by more is another model.

The first step alone tells: a learning rate that was changed makes the steps behind it other ones, and may.
"""

import asyncio
import logging
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Next, Publish, Refused, Reply, Request, Score, ServerAddress, Stop, Stopped, Train
from megarl.core.base.process import NODE, log_to, start_logging
from megarl.core.base.ranks import from_rank_0
from megarl.core.base.rundir import Endpoints, RunDir, append_jsonl, by_step, read_jsonl, write_atomically
from megarl.core.base.types import decode, encode
from megarl.core.learner import microbatch_size
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.clock import StepClock
from megarl.core.learner.guards import OutOfMemory
from megarl.core.learner.link import Interrupted, Link
from megarl.core.learner.torchrun import become_torchrun, is_rank
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from megarl.core.server.client import ServerClient
from megarl.core.telemetry.profiler import Profiler
from megarl.core.telemetry.spans import Spans
from megarl.core.weights.offload import Lending
from megarl.core.weights.parity import LIMITS, Limits
from megarl.core.weights.publisher import Publisher

log = logging.getLogger(__name__)

CONTROLLER_LIMIT_S = 600.0
"""How long the controller may be silent; its restart takes seconds."""
SERVERS_POLL_S = 0.5
MOST_SKIPPED = 3
"""Steps in a row without a finite gradient that end the run: one is bad luck, three are broken weights or data."""


class MetricsWriter(Protocol):
    """Keeps and shows the metrics of a run."""

    def row(self, row: dict[str, Any]) -> None:
        """Write the metrics of `row["step"]`. A later row of the same step counts."""

    def close(self) -> None: ...


type OpenMetrics = Callable[[Recipe, RunDir, Endpoints], MetricsWriter]


def main(recipe: Recipe, open_metrics: OpenMetrics) -> int:
    """Run this rank of the learner; with more than one and outside torchrun, become torchrun."""
    rundir = RunDir(recipe.run.path)
    if recipe.resources.learner_ranks > 1 and not is_rank():
        endpoints = rundir.endpoints()
        become_torchrun(
            recipe.resources.learner_ranks,
            endpoints.rendezvous_port,
            endpoints.rendezvous_host,
            endpoints.learner_nodes,
        )
    if is_rank() and NODE in os.environ:
        log_to(rundir.log("learner", os.environ[NODE], int(os.environ["RANK"])))
    start_logging(f"learner {os.environ.get('RANK', '0')}")
    torch.set_num_threads(recipe.resources.threads)
    if recipe.resources.colocate:
        asyncio.run(_let_servers_first(recipe, rundir))
    # Ranks other than 0 wait in a collective as long as rank 0 waits for the controller.
    parallel.start(recipe.model, recipe.run.seed, CONTROLLER_LIMIT_S + recipe.weights.timeout_s)
    learner = Learner(recipe, rundir, open_metrics)
    try:
        learner.run()
    except OutOfMemory as error:  # a learner that starts again replays the same batch
        write_atomically(rundir.failure_file, str(error).encode())
        raise
    finally:
        learner.close()
    parallel.stop()
    return 0


async def _let_servers_first(recipe: Recipe, rundir: RunDir) -> None:
    """Servers on our GPUs take their share of the memory that they find free, so they come first: they answer once they have
    it. They need not be healthy: a learner that died may have left them paused."""
    endpoints, limit_s = rundir.endpoints(), recipe.serving.start_timeout_s
    until = time.monotonic() + limit_s
    for i, url in enumerate(endpoints.servers):
        keys = (endpoints.api_key, endpoints.admin_key)
        async with ServerClient(ServerAddress(id=i, url=url), *keys, recipe.weights.timeout_s) as server:
            while not rundir.stop_file.exists():
                try:
                    await server.whereabouts()
                    break
                except MegarlError as error:
                    if time.monotonic() > until:
                        raise MegarlError(f"not within {limit_s:g} s (serving.start_timeout_s): {error}") from None
                    await asyncio.sleep(SERVERS_POLL_S)


class Learner:
    """One rank. Only rank 0 has a link to the controller and writes metrics."""

    def __init__(self, recipe: Recipe, rundir: RunDir, open_metrics: OpenMetrics) -> None:
        self.recipe, self.rundir = recipe, rundir
        self.signalled = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        endpoints = rundir.endpoints()
        self.compute_unit = "gpu" if endpoints.gpus else "core"
        self.leader = dist.get_rank() == 0
        self.link = (
            Link(endpoints.controller, endpoints.link, self._interrupted, limit_s=CONTROLLER_LIMIT_S)
            if self.leader
            else None
        )
        self.incarnation: str = from_rank_0(uuid.uuid4().hex)
        self.trainer = Trainer(recipe, Path(recipe.model.path))
        self.checkpoints = Checkpoints(
            rundir.checkpoints, recipe.checkpoint.keep, self.trainer, Path(recipe.model.path)
        )
        if recipe.run.resume == "auto":
            self.checkpoints.load_latest()
        longest, batch = recipe.length.context_tokens, recipe.batch.prompts * recipe.sampling.generations
        self.lending = Lending(recipe, endpoints)
        microbatch_size.settle(
            self.trainer,
            longest,
            longest * batch,
            rundir.microbatch,
            within=self.lending.borrowed(self.trainer.step),  # as in training
        )
        rows = by_step(read_jsonl(rundir.metrics)) if self.leader else {}
        self.recorded: tuple[int, dict[str, Any]] = self.trainer.step, from_rank_0(rows.get(self.trainer.step, {}))
        self.publisher = Publisher(recipe, endpoints, self.trainer.policy.chunks, self.trainer.policy.family)
        self.spans = Spans(rundir.trace / "learner.jsonl" if self.leader else None)
        self.clock = StepClock(self.spans)
        self.trainer.within = self.clock.within
        self.profiler = Profiler(recipe.monitor.profile, rundir.profile, dist.get_rank())
        self.metrics = open_metrics(recipe, rundir, endpoints) if self.leader else None
        log.info("learner %s ready at step %d", self.incarnation, self.trainer.step)

    def run(self) -> None:
        """Execute commands until Stop."""
        self.profiler.step(self.trainer.step)
        command: Reply = self._next()
        while not isinstance(command, Stop):
            self.checkpoints.poll()
            command = self._execute(command) or self._next()
        self._stop(command)

    def _execute(self, command: Reply) -> Reply | None:
        """Do it; what the controller said to the result, if that is to be obeyed too."""
        match command:
            case Train():
                self._train(command)
                return self._broken()
            case Publish():
                return self._publish(command)
            case Score():
                return self._score(command)
            case Refused():
                raise MegarlError(f"the controller refused step {self.trainer.step}: {command.error}")
        return None

    def close(self) -> None:
        """Not collective: it runs when one rank fails, too."""
        if self.metrics is not None:
            self.metrics.close()
        if self.link is not None:
            self.link.close()
        self.spans.flush()
        self.profiler.stop()

    def _next(self) -> Reply:
        step = self.trainer.step
        with self.clock.spent("wait", step):
            return self._ask(Next(incarnation=self.incarnation, step=step, version=step))

    def _ask(self, request: Request | None) -> Reply:
        """The controller's reply to rank 0's request, on all ranks. What ends the wait early is a Stop."""
        reply = b""
        if self.link is not None and request is not None:
            try:
                reply = self.link.ask(request)
            except Interrupted as reason:
                reply = encode(Stop(reason=str(reason)))
            except MegarlError as error:
                reply = encode(Stop(reason=str(error), error=True))
        return decode(from_rank_0(reply), Reply)

    def _train(self, command: Train) -> None:
        received = time.monotonic()
        trainer = self.trainer
        step = trainer.step
        if command.batch.step != step:
            raise MegarlError(f"the controller sent batch {command.batch.step} to a learner at step {step}")
        with self.clock.spent("train", step), self.lending.borrowed(step):
            metrics = trainer.train_step(trainer.sequences(command.batch))
        self._check_recorded(step, metrics)
        with self.clock.spent("checkpoint", step):
            if self.trainer.step % self.recipe.checkpoint.every == 0:
                self.checkpoints.save()
        seconds = self.clock.next_step(step)
        self.profiler.step(self.trainer.step)
        if self.metrics is None:
            return
        for rollout in self.trainer.offenders:
            append_jsonl(self.rundir.bad_rollouts, {"step": step} | rollout)
        held = (time.monotonic() - received) / 3600 * command.compute_devices
        row = (
            command.stats
            | metrics
            | seconds
            | {
                "step": step,
                "weight_version": self.trainer.step,
                "time": time.time(),
                "compute_hours": command.compute_hours + held,
                "compute_unit": self.compute_unit,
                "replay": int(command.replay),
                "tokens_per_second": command.stats.get("generated_tokens", 0.0) / seconds["step_seconds"],
            }
        )
        with self.clock.within("metrics"):
            self.metrics.row(row)

    def _check_recorded(self, step: int, metrics: dict[str, float]) -> None:
        """The end of the run, before anything of it is written over, if its first step here is not the one it has recorded."""
        first, row = self.recorded
        limits = LIMITS[self.recipe.model.dtype, bool(self.trainer.policy.family.architecture.experts)]
        if step != first or (self.trainer.epochs > 1 and row.get("lr") != metrics.get("lr")):
            return
        if far := contradiction(row, metrics, limits):
            reason = f"step {step}: {far}"
            if self.leader:
                write_atomically(self.rundir.failure_file, reason.encode())
            raise MegarlError(reason)

    def _broken(self) -> Stop | None:
        """The end of the run if too many steps in a row came to nothing. A file says so to the supervisor: it is no crash."""
        if self.trainer.skipped_in_row < MOST_SKIPPED:
            return None
        last = self.trainer.step - 1
        reason = (
            f"steps {last - MOST_SKIPPED + 1} to {last} were skipped: loss or gradient was not finite. "
            f"Their rollouts are in {self.rundir.bad_rollouts}; look at them, lower learner.optimizer.lr or go back to an "
            "earlier checkpoint (remove the newest), then run.resume=auto"
        )
        if self.leader:
            write_atomically(self.rundir.failure_file, reason.encode())
        return Stop(reason=reason, error=True)

    def _publish(self, command: Publish) -> Stop | None:
        if command.version != self.trainer.step:
            raise MegarlError(
                f"the controller asked for version {command.version}; the weights are {self.trainer.step}"
            )
        with self.clock.spent("publish", command.version):
            result = self.publisher.publish(command, self.incarnation)
            reply = self._ask(result)
        if result is not None:
            self.clock.published(result)
        return reply if isinstance(reply, Stop) else None

    def _score(self, command: Score) -> Stop | None:
        with self.clock.spent("parity", command.version):
            reply = self._ask(self.trainer.score(command, self.incarnation))
        return reply if isinstance(reply, Stop) else None

    def _stop(self, command: Stop) -> None:
        """Save and say so."""
        log.info("stopping at step %d: %s", self.trainer.step, command.reason)
        self.checkpoints.save()
        self.checkpoints.finish()
        if self.link is not None and not command.error:
            self.link.tell(Stopped(incarnation=self.incarnation, step=self.trainer.step))
        if command.error:
            raise MegarlError(command.reason)

    def _interrupted(self) -> str:
        if self.signalled:
            return self.signalled
        return f"{self.rundir.stop_file} exists" if self.rundir.stop_file.exists() else ""

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.signalled = f"signal {signal.Signals(number).name}"
        self.rundir.stop(number)


MEASURED = "trained_logprob_diff"


def contradiction(recorded: Mapping[str, Any], now: Mapping[str, Any], limits: Limits) -> str:
    """How far the step is from its recorded row; empty if rounding explains it, or one of them has nothing to compare."""
    before, after = recorded.get(MEASURED), now.get(MEASURED)
    if not isinstance(before, float) or not isinstance(after, float) or not math.isfinite(before):
        return ""
    if abs(after - before) <= limits.mean:
        return ""
    return (
        f"{MEASURED} is {after:.3g} and was {before:.3g} when the step was trained before; rounding explains a difference of "
        f"{limits.mean:g}. The weights are not those that the run had: put back what was changed since (model, checkpoints, "
        "code), or give another run.name"
    )
