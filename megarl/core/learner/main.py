"""`megarl learn`: the collective command loop.

    rank 0 ── Next ──► controller
                         └─ Train | Publish | Score | Wait | Stop ──► rank 0
                                               all ranks execute it ◄── broadcast

The learner decides nothing. Between commands it only checks whether it should stop
(RUN/stop, a signal) and whether a checkpoint has reached the disk. Every step adds one
row to RUN/metrics.jsonl.
"""

import asyncio
import logging
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import (
    Experts,
    Next,
    Publish,
    Refused,
    Reply,
    Request,
    Score,
    ServerAddress,
    Stop,
    Stopped,
    Train,
)
from megarl.core.base.process import ENDING, NODE, ignore_late_signals, log_to, start_logging
from megarl.core.base.ranks import bytes_from_rank_0, from_rank_0
from megarl.core.base.rundir import Endpoints, RunDir, append_jsonl, rows_in_order, write_atomically
from megarl.core.base.torchrun import is_rank
from megarl.core.base.types import decode, encode
from megarl.core.client.client import ServerClient
from megarl.core.evaluation.parity import LIMITS, ParityLimits
from megarl.core.learner import microbatch_size
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.clock import StepClock
from megarl.core.learner.network import OutOfMemory
from megarl.core.learner.offload import Offload
from megarl.core.learner.shares import Withheld
from megarl.core.learner.trainer import MOST_SKIPPED, Trainer
from megarl.core.models import build, parallel
from megarl.core.recipe import START_LIMIT_RULE, Recipe
from megarl.core.sync.publisher import Publisher
from megarl.core.telemetry.profiler import Profiler
from megarl.core.telemetry.spans import spans

log = logging.getLogger(__name__)

CONTROLLER_LIMIT_S = 600.0
"""How long the controller may be silent; its restart takes seconds."""
SERVERS_POLL_S = 0.5


class StepMetrics(Protocol):
    """Stores and shows the metrics of a run."""

    def row(self, row: dict[str, object]) -> None:
        """Write the metrics of `row["step"]`. A later row of the same step replaces an
        earlier one.
        """

    def close(self) -> None:
        """Write what is still to be written."""


type OpenMetrics = Callable[[Recipe, RunDir, Endpoints], StepMetrics]


def main(recipe: Recipe, open_metrics: OpenMetrics) -> int:
    """Run this rank of the learner."""
    rundir = RunDir(recipe.run.path)
    endpoints = rundir.endpoints()
    if is_rank() and NODE in os.environ:
        log_to(rundir.log("learner", os.environ[NODE], int(os.environ["RANK"])))
    start_logging(f"learner {os.environ.get('RANK', '0')}")
    torch.set_num_threads(recipe.resources.threads)
    if recipe.resources.colocate:
        asyncio.run(_let_servers_first(recipe, rundir, endpoints))
    # Ranks other than 0 wait in a collective as long as rank 0 waits for the
    # controller.
    parallel.start(recipe.model, recipe.run.seed, CONTROLLER_LIMIT_S + recipe.weights.timeout_s)
    try:
        with closing(LearnerRank(recipe, rundir, endpoints, open_metrics)) as learner:
            learner.run()
    except Interrupted as reason:
        log.info("%s", reason)
    except OutOfMemory as error:  # no restart: the learner would replay the same batch
        write_atomically(rundir.failure_file, str(error).encode())
        raise
    ignore_late_signals()
    parallel.stop()
    return 0


async def _let_servers_first(recipe: Recipe, rundir: RunDir, endpoints: Endpoints) -> None:
    """Wait until the servers on our GPUs answer: then they have taken their memory.
    They are asked for their devices, to which even one that a dead learner left paused
    has an answer.
    """
    limit_s = recipe.start_limit_s
    deadline = time.monotonic() + limit_s
    for i, url in enumerate(endpoints.servers):
        address = ServerAddress(id=i, url=url)
        async with ServerClient(
            address, endpoints.api_key, endpoints.admin_key, recipe.weights.timeout_s
        ) as server:
            while not rundir.stop_asked():
                try:
                    await server.device_identity()
                    break
                except MegarlError as error:
                    if time.monotonic() > deadline:
                        raise MegarlError(
                            f"not within {limit_s:g} s ({START_LIMIT_RULE}): {error}"
                        ) from None
                    await asyncio.sleep(SERVERS_POLL_S)


class LearnerRank:
    """One rank of the learner. Only rank 0 has a link to the controller and writes
    metrics.
    """

    def __init__(
        self, recipe: Recipe, rundir: RunDir, endpoints: Endpoints, open_metrics: OpenMetrics
    ) -> None:
        self.recipe = recipe
        self.rundir = rundir
        self.signalled = ""
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)
        self.compute_unit = "gpu" if endpoints.gpus else "core"
        self.leader = dist.get_rank() == 0
        self.link: ControllerLink | None = None
        if self.leader:
            self.link = ControllerLink(
                endpoints.controller,
                endpoints.link,
                self._interrupted,
                limit_s=CONTROLLER_LIMIT_S,
            )
        self.incarnation: str = from_rank_0(uuid.uuid4().hex)
        self.offload = Offload(recipe, endpoints)
        self.clock = StepClock()
        self.trainer = Trainer(recipe, Path(recipe.model.path), within=self.clock.within)
        self.checkpoints = self._resume()
        first = self.trainer.step
        # The row that an earlier life wrote for this life's first step; {} if none did.
        self.recorded: dict[str, object] = from_rank_0(self._recorded_row(first))
        self.publisher = Publisher(
            recipe, endpoints, self.trainer.policy.chunks, self.trainer.policy.family
        )
        if self.leader:
            spans.write_to(rundir.trace / "learner.jsonl")
        self.clock.start()
        self.profiler = Profiler(recipe.monitor.profile_steps, rundir.profile, dist.get_rank())
        self.metrics = open_metrics(recipe, rundir, endpoints) if self.leader else None
        made_by = build.layers_made_by(recipe.model)
        log.info("learner %s ready at step %d, layers by %s", self.incarnation, first, made_by)

    def _resume(self) -> Checkpoints:
        """Load the newest checkpoint into the trainer, if there is one, and settle the
        size of micro-batches. COLLECTIVE.
        """
        recipe = self.recipe
        settings = recipe.checkpoint
        checkpoints = Checkpoints(
            self.rundir.checkpoints,
            settings.keep,
            self.trainer,
            Path(recipe.model.path),
            settings.milestones,
            settings.keep_best,
        )
        checkpoints.load_latest()
        longest = recipe.length.context_tokens
        rollouts = recipe.batch.prompts * recipe.sampling.generations
        microbatch_size.settle(
            self.trainer,
            longest,
            longest * rollouts,
            self.rundir.microbatch,
            within=self.offload.released(self.trainer.step),
        )
        return checkpoints

    def _recorded_row(self, step: int) -> dict[str, object]:
        """Return the step's row of an earlier life; empty if there is none, and on
        other ranks than 0.
        """
        if not self.leader:
            return {}
        row = next(rows_in_order(self.rundir.metrics, step), {})
        return row if row.get("step") == step else {}

    def run(self) -> None:
        """Execute commands until the controller, a signal or RUN/stop ends it."""
        self.profiler.step(self.trainer.step)
        command = self._next()
        while not isinstance(command, Stop):
            self.checkpoints.poll()
            command = self._execute(command) or self._next()
        self._stop(command)

    def close(self) -> None:
        """Close files and sockets. Not collective, since it also runs when a single
        rank fails.
        """
        if self.metrics is not None:
            self.metrics.close()
        if self.link is not None:
            self.link.close()
        spans.flush()
        self.profiler.stop()

    def _next(self) -> Reply:
        """Return the controller's next command, on all ranks."""
        step = self.trainer.step
        with self.clock.spent("wait", step):
            return self._ask(Next(incarnation=self.incarnation, step=step, version=step))

    def _ask(self, request: Request | None) -> Reply:
        """Return, on all ranks, the controller's reply to rank 0's request, or a Stop
        if the wait is interrupted or fails.
        """
        reply = b""
        if self.link is not None and request is not None:
            try:
                reply = self.link.ask(request)
            except Interrupted as reason:
                reply = encode(Stop(reason=str(reason)))
            except MegarlError as error:
                reply = encode(Stop(reason=str(error), error=True))
        return decode(bytes_from_rank_0(reply), Reply)

    def _fetch(self, ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        """Return the recorded experts of these rollouts of the step's batch, on rank 0
        (shares.Fetch).
        """
        assert self.link is not None
        step = self.trainer.step
        request = Experts(
            incarnation=self.incarnation, step=step, ticket=ticket, rollouts=tuple(rollouts)
        )
        body, *choices = self.link.ask_for_data(request)
        reply: Reply = decode(body, Reply)
        if isinstance(reply, Refused):
            raise Withheld(reply)  # as a refused Next: this learner must not save
        return choices

    def _execute(self, command: Reply) -> Reply | None:
        """Execute the command. Return the controller's reply to its result, our own
        Stop, or None to ask `Next`.
        """
        match command:
            case Train():
                try:
                    self._train(command)
                except Withheld as withheld:
                    return withheld.reply
                return self._broken()
            case Publish():
                return self._publish(command)
            case Score():
                with self.clock.spent("parity", command.version):
                    return self._ask(self.trainer.score(command, self.incarnation))
            case Refused():
                raise MegarlError(
                    f"the controller refused step {self.trainer.step}: {command.error}"
                )
        return None

    def _train(self, command: Train) -> None:
        """Train the batch, save checkpoints that are due, and write the step's row of
        metrics. MegarlError if the batch is of another step, or the result contradicts
        the recorded row.
        """
        received = time.monotonic()
        step = self.trainer.step
        if command.batch.step != step:
            raise MegarlError(
                f"the controller sent batch {command.batch.step} to a learner at step {step}"
            )
        if command.save and not self.checkpoints.has_begun():
            with self.clock.spent("checkpoint", step):
                self.checkpoints.save()
        with self.clock.spent("train", step):
            sequences = self.trainer.in_loss(command.batch, self._fetch)
            with self.offload.released(step):
                completed = self.trainer.completed(sequences, command.batch)
                metrics = self.trainer.train_step(completed)
        self._check_recorded(step, command.stats | metrics)
        with self.clock.spent("checkpoint", step):
            if self._needs_checkpoint():
                self.checkpoints.save()
        seconds = self.clock.next_step(step)
        self.profiler.step(self.trainer.step)
        if self.metrics is None:
            return
        for rollout in self.trainer.offenders:
            append_jsonl(self.rundir.bad_rollouts, {"step": step} | rollout)
        step_hours = (time.monotonic() - received) / 3600 * command.compute_devices
        generated_tokens = command.stats.get("generated_tokens", 0.0)
        row = {
            "step": step,
            "weight_version": self.trainer.step,
            "time": time.time(),
            "compute_hours": command.compute_hours + step_hours,
            "compute_unit": self.compute_unit,
            "replay": int(command.replay),
            "tokens_per_second": generated_tokens / seconds["step_seconds"],
        }
        if self.checkpoints.write_seconds is not None:
            row["checkpoint_write_seconds"] = self.checkpoints.write_seconds
            self.checkpoints.write_seconds = None
        with self.clock.within("metrics"):
            self.metrics.row({**command.stats, **metrics, **seconds, **row})

    def _needs_checkpoint(self) -> bool:
        """Return whether the step just trained ends with a checkpoint."""
        if self.checkpoints.failures:
            return True
        settings = self.recipe.checkpoint
        step = self.trainer.step
        return step % settings.every == 0 or step in settings.milestones

    def _check_recorded(self, step: int, metrics: dict[str, float]) -> None:
        """Fail the run, before any of its files is overwritten, if the first step of
        this life contradicts the row that an earlier life wrote for it. Later steps are
        not compared.
        """
        if step != self.recorded.get("step"):
            return
        has_other_rate = self.recorded.get("lr") != metrics.get("lr")
        if self.trainer.epochs > 1 and has_other_rate:
            # Metrics are those of the last epoch, whose weights the earlier epochs have
            # updated with this learning rate.
            return
        has_experts = bool(self.trainer.policy.family.architecture.experts)
        limits = LIMITS[self.recipe.model.dtype, has_experts]
        if fault := contradiction(self.recorded, metrics, limits):
            raise MegarlError(self._failed(f"step {step}: {fault}"))

    def _broken(self) -> Stop | None:
        """Return a Stop if too many steps in a row were skipped."""
        if self.trainer.skipped_in_row < MOST_SKIPPED:
            return None
        last = self.trainer.step - 1
        reason = (
            f"steps {last - MOST_SKIPPED + 1} to {last} were skipped: loss or gradient was not"
            f" finite. Their rollouts are in {self.rundir.bad_rollouts}; look at them, lower"
            " learner.optimizer.lr or go back to an earlier checkpoint (remove the newest), then"
            " run.resume=auto"
        )
        return Stop(reason=self._failed(reason), error=True)

    def _failed(self, reason: str) -> str:
        """Write the file that tells the supervisor that the following exit is not a
        crash; return the reason.
        """
        if self.leader:
            write_atomically(self.rundir.failure_file, reason.encode())
        return reason

    def _publish(self, command: Publish) -> Reply:
        """Publish the present weights; return the controller's reply to the result.
        MegarlError if it asked for another version.
        """
        step = self.trainer.step
        if command.version != step:
            raise MegarlError(
                f"the controller asked for version {command.version}; the weights are {step}"
            )
        with self.clock.spent("publish", step):
            self.trainer.policy.gather_weights()
            result = self.publisher.publish(command, self.incarnation)
            if result is not None:
                self.clock.published(result)
            return self._ask(result)

    def _stop(self, command: Stop) -> None:
        """Save, and say goodbye. MegarlError instead of a goodbye if the command says
        that the run has failed.
        """
        log.info("stopping at step %d: %s", self.trainer.step, command.reason)
        self.checkpoints.save()
        self.checkpoints.finish()
        if command.error:
            raise MegarlError(command.reason)
        if self.link is not None:
            self.link.tell(Stopped(incarnation=self.incarnation, step=self.trainer.step))

    def _interrupted(self) -> str:
        """Return why to wait no longer for the controller; empty to go on."""
        if self.signalled:
            return self.signalled
        if self.rundir.stop_asked():
            return f"{self.rundir.stop_file} exists"
        return ""

    def _on_signal(self, number: int, _frame: object) -> None:
        """Ask the run to stop, all its roles."""
        self.signalled = f"signal {signal.Signals(number).name}"
        self.rundir.stop(number)


MEASURED = "trained_logprob_diff"
OF_BATCH = "generated_tokens"
"""Metrics by which two rows of one step are compared: what was measured on the batch,
and what tells another batch.
"""
MANY_TOKENS = 1_000_000
"""The number of tokens assumed where it is not known: the limit is lowest for many."""


def contradiction(
    recorded: Mapping[str, object], trained: Mapping[str, object], limits: ParityLimits
) -> str:
    """Return how a step contradicts its recorded row; empty if rounding explains the
    difference or nothing can be compared.

    Both rows have the mean of |learner's log-prob - behaviour log-prob| over the same
    tokens. By the triangle inequality, the two differ by at most the mean |difference|
    of the two learners' log-probs, which rounding, at any layout, makes no larger than
    that between server and learner: the limit of parity. A larger one means different
    weights.
    """
    tokens = trained.get(OF_BATCH)
    if recorded.get(OF_BATCH, tokens) != tokens:
        return (
            "it was trained before, on other rollouts: RUN/rollouts is older than"
            " RUN/metrics.jsonl, as after a restore from a backup. Restore the newer one; or, to"
            " make these steps anew, remove the rows of this step and of later ones from"
            " metrics.jsonl and eval.jsonl"
        )
    recorded_value = recorded.get(MEASURED)
    value = trained.get(MEASURED)
    if not isinstance(recorded_value, float) or not isinstance(value, float):
        return ""
    if not math.isfinite(recorded_value):
        return ""
    limit = limits.mean_of("kernels", _tokens(trained))
    if abs(value - recorded_value) <= limit:
        return ""
    return (
        f"{MEASURED} is {value:.3g} and was {recorded_value:.3g} when the step was trained before;"
        f" rounding explains a difference of {limit:.2g}. The weights are not those that the run had: undo"
        " what was changed since (model, checkpoints, code), or give another run.name"
    )


def _tokens(row: Mapping[str, object]) -> int:
    """Return over how many tokens a step's means are; many if the row does not say."""
    tokens = row.get("tokens_trained")
    return int(tokens) if isinstance(tokens, float) and tokens >= 1 else MANY_TOKENS
