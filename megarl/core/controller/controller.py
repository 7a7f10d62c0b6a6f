"""`megarl rollout`: the controller, one asyncio process that decides what every role
does next.

    learner ── Next, Published, Stopped ──► conversation ─► decision.decide
            ◄── Train | Publish | Wait | Stop ────────────────┘   │ looks at
                servers.py      servers up, their versions ◄──────┤
                parity_schedule.py  do both sides agree? ◄────────┤
                tickets.py      drawn, sampled, graded ◄──────────┤
                evaluations.py  held-out score, server pinned ◄───┘
                journal/        the journal, from which all state can be rebuilt

Every change wakes a waiting `Next`.

A `Next` whose answer would be `Wait` is held for up to a second, and decided again as
soon as something changes.
"""

import asyncio
import json
import logging
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any
from urllib.parse import urlsplit

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.architecture import in_directory
from megarl.core.base.contracts import Tasks
from megarl.core.base.errors import MegarlError, first_of
from megarl.core.base.messages import (
    Experts,
    FromServer,
    Next,
    Publish,
    Published,
    RecordedExperts,
    Refused,
    Reply,
    Scored,
    Stop,
    Train,
)
from megarl.core.base.process import ENDING
from megarl.core.base.rundir import Endpoints, RunDir, complete, step_of, write_atomically
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Batch
from megarl.core.client.membership import listed
from megarl.core.client.servable import positions
from megarl.core.controller.conversation import Conversation, ConversationOver, Link
from megarl.core.controller.decision import Decision, TrainStep, decide
from megarl.core.controller.draw import draw_metrics, mixture_of
from megarl.core.controller.evaluations import Evaluations
from megarl.core.controller.metrics import ComputeClock, Meter, Spent, session_of, task_statistics
from megarl.core.controller.parity_schedule import Parity
from megarl.core.controller.pipeline import Pipeline
from megarl.core.controller.servers import Servers
from megarl.core.controller.teacher import TeacherEndpoint
from megarl.core.controller.tickets import Tickets
from megarl.core.evaluation.forecast import Forecast, TrustedWatch
from megarl.core.evaluation.score import Asker, Questions
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import PublishedVersion, clock
from megarl.core.journal.writer import JournalWriter
from megarl.core.recipe import START_LIMIT_RULE, Recipe
from megarl.core.sampling.sampler import Sampler
from megarl.core.telemetry.spans import spans

log = logging.getLogger(__name__)

STATUS_S = 1.0
DROP_S = 10.0
END_LIMIT_S = 600.0
"""How long the controller waits for a learner to finish its step, save and say goodbye,
before it exits anyway.
"""
UNMET_LIMIT_S = 5.0
"""The same limit for a learner that has never spoken to this controller."""
PUBLISH_TRIES = 3
"""The run fails after this many failed publications in a row on a server that answers,
if no server has the weights.
"""

type StatusAndTotals = tuple[Mapping[str, Any], Mapping[int, Mapping[str, float]]]
"""The latest contents of status.json, empty before the first, and each server's totals
by its id.
"""
type ServeMetrics = Callable[[Endpoints, Callable[[], StatusAndTotals]], Callable[[], None]]
"""Starts an exporter at these endpoints, which calls the function for what to export,
and returns a function that stops it.
"""


def _open_journal(rundir: RunDir, recipe: Recipe) -> Journal:
    """Open the run's journal, start its clock and begin a session."""
    journal = Journal.open(
        rundir.rollouts,
        recipe.batch.prompts,
        recipe.pipeline.max_lag,
        recipe.pipeline.phase_steps,
    )
    clock.start(rundir.rollouts / "lock")  # written as the journal was opened
    journal.append(session_of(rundir))
    return journal


class Controller:
    """The controller's parts, connected in the running event loop. questions: the
    questions of each evaluation. forecast: predicts the rest of the run from its
    scores. watch: compares the reward with a trusted grader.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        tasks: Tasks,
        questions: Sequence[Questions[Any]],
        forecast: Forecast,
        watch: TrustedWatch,
        serve_metrics: ServeMetrics,
    ) -> None:
        # New in each life: prefixes cached for an earlier life are of older weights.
        salt = uuid.uuid4().hex[:8]
        self.rundir = RunDir(recipe.run.path)
        self.recipe = recipe
        endpoints = self.rundir.endpoints()
        changed = self._on_change
        journal = _open_journal(self.rundir, recipe)
        self.records = JournalWriter(journal)
        self._address = endpoints.controller
        self.link = Link(self._address, endpoints.link)
        spans.write_to(self.rundir.trace / "controller.jsonl")
        self.servers = Servers(recipe, endpoints, changed)
        self.places = self.servers.places
        self.environments = tasks.environments()
        self.agents = tasks.agents()
        self.graders = tasks.graders()
        self.sampler = Sampler(
            recipe, tokenizer, self.servers, self.environments, self.agents, positions(recipe)
        )
        self.teacher = TeacherEndpoint(recipe) if recipe.teacher.weight else None
        model = in_directory(recipe.model.path)
        self.parity = Parity(recipe, tokenizer.end, model, self.servers, changed, self._fail, salt)
        mixture = mixture_of(recipe, tasks.prompts, journal.state)
        prompts = tasks.prompts
        self.tickets = Tickets(
            recipe, prompts, mixture, self.sampler, self.graders, self.parity, salt, self.teacher
        )
        steps = recipe.run.steps
        self.pipeline = Pipeline(
            recipe, self.records, self.places, self.tickets, changed, steps, steps
        )
        self.compute = ComputeClock(journal.state, recipe.resources)
        self.meter = Meter(self.places)
        asker = Asker(
            recipe, tokenizer, self.sampler, self.graders, servers=frozenset(), salt=salt, at_once=0
        )
        self.evaluations = self._make_evaluations(questions, forecast, watch, asker)
        self.conversation = Conversation(self.link, self)
        self._exported: StatusAndTotals = ({}, {})
        self._close_metrics = serve_metrics(endpoints, lambda: self._exported)
        self.step = 0
        self.phase = "starting"
        self.stop_reason = ""
        self.failure = ""
        self._stopping_since = 0.0
        self._status_is_written = True
        # By version: compute spent at its first publication in this life.
        self._spent: dict[int, Spent] = {}

    def _make_evaluations(
        self,
        questions: Sequence[Questions[Any]],
        forecast: Forecast,
        watch: TrustedWatch,
        asker: Asker,
    ) -> Evaluations:
        """Return the run's evaluations, connected to the controller's other parts."""
        return Evaluations(
            self.rundir,
            questions,
            forecast,
            watch,
            asker,
            self.pipeline,
            self.compute,
            self._fail,
            self._stop,
        )

    async def run(self) -> int:
        """Run all parts until the learner was told to stop and has left; return 1 if
        the run failed.
        """
        self._handle_signals()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._sampling = tasks.create_task(self.pipeline.run(), name="tickets")
                tasks.create_task(self.servers.run())
                tasks.create_task(self.records.run())
                tasks.create_task(self.conversation.listen())
                tasks.create_task(self.conversation.answer())
                tasks.create_task(self._watch())
                tasks.create_task(self._drop_old())
        except* ConversationOver:
            pass
        except* MegarlError as errors:
            raise first_of(errors) from None
        finally:
            await self._close()
        return 1 if self.failure else 0

    def _handle_signals(self) -> None:
        """Have signals that ask to end stop the run, except SIGHUP under `nohup`."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            ignored_by_nohup = (
                number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            )
            if not ignored_by_nohup:
                loop.add_signal_handler(number, self._on_signal, number)

    # Called by conversation.py: messages of the learner and of joined servers, and the
    # answers to them.

    def of_server(self, message: FromServer) -> Reply:
        """Return the answer to a joined server's message."""
        if self.stop_reason:
            return Stop(reason=self.stop_reason)
        return self.servers.answer(message)

    def new_learner(self) -> None:
        """Note that a new learner has taken over: the earlier one is gone, and its
        running publications will never end.
        """
        broken = self.servers.membership.new_learner()
        if broken:
            log.warning(
                "publication to %s broke off; their requests continue elsewhere from their last"
                " tokens",
                listed(broken),
            )
        for server in broken:
            self._tasks.create_task(self.servers.abort(server))

    async def published(self, result: Published) -> None:
        """Note the end of a publication. Fail the run if no server has the current
        weights and publication has failed too often on a server that answers; one that
        does not answer may be restarting.
        """
        urls = self._note_results(result)
        if urls:
            self._note_version(result, urls)
        reasons = self._reasons_to_fail(result)
        answering = await asyncio.gather(*map(self.servers.answers, reasons))
        for reason in compress(reasons.values(), answering):
            self._fail(reason)
        self._on_change()

    def _note_results(self, result: Published) -> list[str]:
        """Note each server's result; return the URLs of those that have the version
        now.
        """
        urls = []
        for server in result.results:
            has_version = self.servers.membership.published(
                server.id, result.version, result.incarnation, server.error
            )
            if has_version:
                urls.append(self.servers.clients[server.id].address.url)
            if server.error:
                log.warning(
                    "version %d did not reach server %d: %s",
                    result.version,
                    server.id,
                    server.error,
                )
        return urls

    def _note_version(self, result: Published, urls: list[str]) -> None:
        """Write a publication to the journal, and evaluate its version if due."""
        spent = self._spent.setdefault(result.version, self.compute.spent())
        self.records.write(
            PublishedVersion(
                version=result.version,
                time=clock.read(),
                compute_hours=spent.total,
                startup_hours=spent.startup,
                evaluation_hours=spent.evaluation,
                servers=tuple(urls),
                pause_seconds=result.pause_seconds,
                transfer_seconds=result.transfer_seconds,
                resume_seconds=result.resume_seconds,
                joined_hours=self.compute.joined_hours(),
                window=self.pipeline.published(result.version),
            )
        )
        self.parity.published(result.version)
        self.evaluate_if_due(result.version)

    def _reasons_to_fail(self, result: Published) -> dict[int, str]:
        """Return, for each server that publication has failed on too often while no
        other has the weights, the reason to fail the run. It holds only if that server
        answers. Servers that have joined are dismissed instead.
        """
        membership = self.servers.membership
        reasons: dict[int, str] = {}
        for server in result.results:
            member = membership.members.get(server.id)
            if not server.error or member is None or member.failures < PUBLISH_TRIES:
                continue
            reason = (
                f"weights did not reach server {server.id} {PUBLISH_TRIES} times in a row:"
                f" {server.error}"
            )
            if member.life:
                self.servers.dismiss(server.id, reason)
            elif not membership.clean():
                reasons[server.id] = reason
        return reasons

    def scored(self, result: Scored) -> None:
        """Note what the learner computed for parity."""
        self.parity.scored(result)
        self._on_change()

    def learner_left(self, step: int) -> None:
        """Note that the learner has left, which ends the run."""
        self._stop(f"the learner has left at step {step}")

    def decide(self, request: Next) -> Decision:
        """Return what the learner is to do next."""
        view = self.pipeline.view(request.version)
        finished = self.pipeline.admitted - len(self.pipeline.running)
        needed = view.phase_end(request.step) * self.recipe.batch.prompts
        view = replace(
            view,
            parity=self.parity.request(request.version),
            stop=self.stop_reason,
            failure=self.failure,
            waiting_for=f"{finished} tickets are finished, {needed} needed",
        )
        return decide(request, view)

    def evaluate_if_due(self, version: int) -> None:
        """Begin the evaluation of this version if it is due and servers have it, unless
        the run is ending.
        """
        if not self.stop_reason:
            self.evaluations.begin_if_due(version, self._spent, self._tasks)

    async def carry_out(self, decision: Decision, request: Next) -> Reply:
        """Do what must happen before the learner gets this decision, and return the
        reply.
        """
        self.step = request.step
        self.phase = type(decision).__name__.lower()
        match decision:
            case TrainStep():
                return await self._train(decision)
            case Publish():
                servers = [address.id for address in decision.servers]
                self.servers.membership.publish(servers, decision.version, request.incarnation)
                self.places.refresh()
                log.info("publish version %d to %s", decision.version, listed(servers))
            case Stop():
                log.info("the learner is told to stop: %s", decision.reason)
                self._stop(decision.reason)
            case Refused():
                log.error("the learner is refused: %s", decision.error)
        return decision

    async def _train(self, decision: TrainStep) -> Train | Stop:
        """Return the step's batch with its metrics. If all its groups are void, fail
        the run and return a Stop.
        """
        tickets = self.pipeline.admission.batch(decision.step)
        assert tickets is not None
        step = decision.step
        batch = Batch(step=step, groups=await self.records.groups(tickets))
        reasons = [group.void for group in batch.groups]
        if all(reasons):
            self._fail(f"nothing could be generated or graded for batch {step}: {reasons[0]}")
            return Stop(reason=self.failure, error=True)
        self.phase = "replay" if decision.replay else "train"
        if not decision.replay:
            self.pipeline.window.note_taken(step)
        spent = self.compute.spent()
        devices = self.compute.devices
        spans.event(
            "controller/batches",
            f"batch {step}",
            step=step,
            replay=decision.replay,
            tickets=list(tickets),
        )
        return Train(
            batch=batch,
            compute_hours=spent.total,
            compute_devices=devices,
            stats=self._statistics(batch, spent),
            replay=decision.replay,
            save=self._to_be_saved(decision),
        )

    async def experts(self, request: Experts) -> tuple[Reply, list[bytes]]:
        """Return the recorded experts of rollouts of a batch. Refused if the batch does
        not have them; if they cannot be read, the run fails, too.
        """
        admission = self.pipeline.admission
        is_forgotten = request.step * admission.prompts_per_batch < admission.forgotten
        if is_forgotten or request.ticket not in (admission.batch(request.step) or ()):
            return Refused(error=f"ticket {request.ticket} is not in batch {request.step}"), []
        try:
            choices = await self.records.choices(request.ticket, request.rollouts)
        except MegarlError as error:
            self._fail(str(error))
            return Refused(error=str(error)), []
        return RecordedExperts(), choices

    def _statistics(self, batch: Batch, spent: Spent) -> dict[str, float]:
        """Return the metrics that the controller adds to those of a step."""
        statistics = batch_statistics(batch, self.recipe)
        statistics |= spent.row()
        statistics |= self.meter.step()
        statistics |= task_statistics(batch, self.recipe)
        statistics |= draw_metrics(self.tickets.mixture)
        statistics["tickets_running"] = float(len(self.pipeline.running))
        statistics["tickets_ahead"] = float(self.pipeline.ahead(batch.step))
        statistics |= self.parity.metrics()
        statistics["window"] = self.pipeline.window.batches
        return statistics

    def _to_be_saved(self, decision: TrainStep) -> bool:
        """Return whether the learner's weights may be the best so far, so that they
        need a checkpoint.
        """
        step = decision.step
        evaluated = step in self.evaluations.tasks or step in self.pipeline.state.evaluations
        return self.recipe.checkpoint.keep_best and evaluated and not decision.replay

    # Changes of state, and the end of the run.

    def _on_change(self) -> None:
        """React to a change that a held `Next` may be waiting for."""
        self.evaluations.cancel_lost()
        self.places.refresh()
        self.conversation.changed.set()

    async def _watch(self) -> None:
        """Each second, check RUN/stop and limits of waits, and write status.json."""
        while True:
            await asyncio.sleep(STATUS_S)
            if self.rundir.stop_asked():
                self._stop(f"{self.rundir.stop_file} exists")
            self._count_joined_devices()
            self._check_servers_limit()
            self._check_learner_limit()
            await self._write_status()
            await asyncio.to_thread(spans.flush)

    def _count_joined_devices(self) -> None:
        """Note how many of the servers that have joined add devices to the run's. On
        CPUs those on the controller's own machine do not: all its cores are counted
        already.
        """
        own_machine = urlsplit(self._address).hostname
        with_devices = 0
        for member in self.servers.membership.joined_servers().values():
            machine = urlsplit(member.address.url).hostname
            if self.compute.unit == "gpu" or machine != own_machine:
                with_devices += 1
        self.compute.join(with_devices)

    def _check_servers_limit(self) -> None:
        """Fail the run if no server has been healthy for too long."""
        limit = self.recipe.start_limit_s
        if not self.stop_reason and self.servers.seconds_without() > limit:
            self._fail(
                f"no server was healthy for {limit:g} s ({START_LIMIT_RULE}); see the servers' logs"
            )

    def _check_learner_limit(self) -> None:
        """Raise ConversationOver if the run ends and the learner does not leave."""
        limit = END_LIMIT_S if self.conversation.incarnation else UNMET_LIMIT_S
        if self.stop_reason and time.monotonic() - self._stopping_since > limit:
            log.warning("the learner has not said goodbye within %g s; leaving", limit)
            raise ConversationOver

    async def _write_status(self) -> None:
        """Write status.json. A failure is logged once, and the run goes on."""
        status = self._status()
        self._exported = (status, self.meter.totals())
        data = json.dumps(status).encode()
        try:
            await asyncio.to_thread(write_atomically, self.rundir.status, data)
            self._status_is_written = True
        except MegarlError as error:
            if self._status_is_written:
                log.warning("%s; the run goes on without it", error)
            self._status_is_written = False

    async def _drop_old(self) -> None:
        """Regularly delete journal data that none of the `checkpoint.keep` newest
        checkpoints needs for replay, if the recipe says so. Older ones, kept as
        milestones, do not count: nothing restarts from them.
        """
        while self.recipe.journal.keep == "checkpoints":
            await asyncio.sleep(DROP_S)
            checkpoints = complete(self.rundir.checkpoints)[-self.recipe.checkpoint.keep :]
            if not checkpoints:
                continue
            oldest_step = step_of(checkpoints[0])
            # If the journal is older than the checkpoints, the learner is refused.
            if oldest_step <= self.pipeline.batches():
                await self.records.drop_before(oldest_step)

    def _fail(self, reason: str) -> None:
        """End the run as failed. RUN/failure tells the supervisor that this is not a
        crash and a restart would fail, too.
        """
        log.error("%s", reason)
        if not self.failure:
            self.failure = reason
            write_atomically(self.rundir.failure_file, reason.encode())
        self._stop(reason)

    def _on_signal(self, number: signal.Signals) -> None:
        """Have the whole run stop, unless it is ending. The controller asks for that
        itself, as Slurm may signal all processes of a job, and the supervisor last.
        """
        if not self.stop_reason:
            self.rundir.stop(number)
        self._stop(f"signal {number.name}")

    def _stop(self, reason: str) -> None:
        """Stop sampling, but keep answering the learner until it has left."""
        if self.stop_reason:
            return
        log.info("stopping: %s", reason)
        self._stopping_since = time.monotonic()
        self.stop_reason = reason
        for task in (self._sampling, *self.evaluations.tasks.values()):
            task.cancel()
        self.parity.cancel()
        self.conversation.changed.set()

    async def _close(self) -> None:
        """Close all parts. The link, spans and exporter are closed even if the journal
        cannot be.
        """
        self.graders.close()
        self.environments.close()
        await self.agents.close()
        await self.servers.close()
        if self.teacher is not None:
            await self.teacher.close()
        try:
            await self.records.close()
        finally:
            self.link.close()
            spans.flush()
            self._close_metrics()

    def _status(self) -> dict[str, object]:
        """Return the contents of status.json. The servers' rates are those since the
        last call.
        """
        totals = self.meter.second()
        pipeline = self.pipeline
        state = pipeline.state
        servers = [
            {
                "id": server,
                "state": member.state,
                "version": member.version,
                "pinned": member.pinned,
                **totals[server],
            }
            for server, member in self.servers.membership.members.items()
        ]
        tickets_ahead = pipeline.ahead(self.step)
        return {
            "time": time.time(),
            "step": self.step,
            "version": state.published_version,
            "phase": self.phase,
            "servers": servers,
            "tickets": {
                # Drawn, but not trained before this step.
                "window": tickets_ahead,
                "window_limit": self.recipe.pipeline.window_steps * self.recipe.batch.prompts,
                "running": len(pipeline.running),
                "waiting": max(0, tickets_ahead - len(pipeline.running)),
                # By outcome, over all lives.
                "finished": state.finished,
                "void": state.void,
                "removed": state.removed,
            },
            "compute_hours": self.compute.hours(),
            "compute_unit": self.compute.unit,
            "eval": self.evaluations.latest,
            "evaluating": sorted(self.evaluations.tasks),
            "rollout_tokens_per_second": sum(
                server["tokens_per_second"] for server in totals.values()
            ),
            "parity": self.parity.warning,
            "malformed_requests": self.link.malformed,
            "refused_connections": self.link.refused(),
        }
