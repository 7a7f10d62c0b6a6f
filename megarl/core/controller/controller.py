"""`megarl rollout`: the controller, one asyncio process that decides what every role
does next.

    learner ── Next, Published, Stopped ──► conversation ─► decision.decide ──► Train | Publish | Wait | Stop
                                                              ▲  looks at
                servers.py      servers up, their versions ───┤
                parity.py       do both sides agree? ─────────┤
                tickets.py      drawn, sampled, graded ───────┤     every change wakes a waiting `Next`
                evaluations.py  held-out score, server pinned ┘
                journal/        the journal, from which all state can be rebuilt

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
    FromServer,
    Next,
    Publish,
    Published,
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
from megarl.core.controller.conversation import Conversation, ConversationOver, Link
from megarl.core.controller.decision import Decision, TrainStep, decide
from megarl.core.controller.draw import draw_metrics, mixture_of
from megarl.core.controller.evaluations import Evaluations
from megarl.core.controller.metrics import ComputeClock, Meter, Spent, session_of, task_statistics
from megarl.core.controller.parity import Parity
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
from megarl.core.server.checks import positions
from megarl.core.server.membership import listed
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


class Controller:
    """The controller's parts, connected in the running event loop. questions: the
    questions of each evaluation. forecast: predicts the rest of the run from its
    scores. watch: compares the reward with a trusted grader. serve_metrics: starts an
    exporter of the status and returns a function that stops it.
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
        salt = uuid.uuid4().hex[
            :8
        ]  # new in each life: prefixes cached for an earlier life are of older weights
        self.rundir = RunDir(recipe.run.path)
        self.recipe = recipe
        pipeline = recipe.pipeline
        rundir, endpoints, changed = self.rundir, self.rundir.endpoints(), self._on_change
        journal = Journal.open(
            rundir.rollouts, recipe.batch.prompts, pipeline.max_lag, pipeline.phase_steps
        )
        clock.start(rundir.rollouts / "lock")
        journal.append(session_of(rundir))
        self._address = endpoints.controller
        self.link = Link(self._address, endpoints.link)
        spans.write_to(rundir.trace / "controller.jsonl")
        self.servers = Servers(recipe, endpoints, changed)
        self.places = self.servers.places
        self.environments, self.agents = tasks.environments(), tasks.agents()
        self.sampler = Sampler(
            recipe, tokenizer, self.servers, self.environments, self.agents, positions(recipe)
        )
        self.graders = tasks.graders()
        self.teacher = TeacherEndpoint(recipe) if recipe.teacher.weight else None
        self.records = JournalWriter(journal)
        model = in_directory(recipe.model.path)
        prompts = tasks.prompts
        steps = recipe.run.steps
        self.parity = Parity(recipe, tokenizer.end, model, self.servers, changed, self._fail, salt)
        mixture = mixture_of(recipe, prompts, journal.state)
        self.tickets = Tickets(
            recipe, prompts, mixture, self.sampler, self.graders, self.parity, salt, self.teacher
        )
        self.pipeline = Pipeline(
            recipe, self.records, self.places, self.tickets, changed, steps, steps
        )
        self.compute = ComputeClock(journal.state, recipe.resources)
        self.meter = Meter(self.places)
        asker = Asker(
            recipe, tokenizer, self.sampler, self.graders, servers=frozenset(), salt=salt, at_once=0
        )
        self.evaluations = Evaluations(
            rundir,
            questions,
            forecast,
            watch,
            asker,
            self.pipeline,
            self.compute,
            self._fail,
            self._stop,
        )
        self.conversation = Conversation(self.link, self)
        self._exported: StatusAndTotals = {}, {}
        self._close_metrics = serve_metrics(endpoints, lambda: self._exported)
        self.step = 0
        self.phase = "starting"
        self.stop_reason = ""
        self.failure = ""
        self._stopping_since = 0.0
        self._spent: dict[
            int, Spent
        ] = {}  # by version: compute spent at its first publication in this life

    async def run(self) -> int:
        """Run all parts until the learner was told to stop and has left; return 1 if
        the run failed.
        """
        loop = asyncio.get_running_loop()
        for number in ENDING:
            if (
                number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
            ):  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._sampling = tasks.create_task(self.pipeline.run(), name="tickets")
                parts = (
                    self.servers.run(),
                    self.records.run(),
                    self.conversation.listen(),
                    self.conversation.answer(),
                )
                for coroutine in (*parts, self._tick(), self._drop_old()):
                    tasks.create_task(coroutine)
        except* ConversationOver:
            pass
        except* MegarlError as errors:
            raise first_of(errors) from None
        finally:
            await self._close()
        return 1 if self.failure else 0

    # Called by conversation.py: messages of the learner and of joined servers, and the
    # answers to them.

    def of_server(self, said: FromServer) -> Reply:
        return Stop(reason=self.stop_reason) if self.stop_reason else self.servers.answer(said)

    def new_learner(self) -> None:
        """Note that a new learner has taken over: the earlier one is gone, and its
        running publications will never end.
        """
        broken = self.servers.membership.new_learner()
        if broken:
            said = (
                "publication to %s broke off; their requests continue elsewhere from their last"
                " tokens"
            )
            log.warning(said, listed(broken))
        for server in broken:
            self._tasks.create_task(self.servers.abort(server))

    async def published(self, result: Published) -> None:
        """Note the end of a publication. Fail the run if no server has the current
        weights and publication has failed too often on a server that answers; one that
        does not answer may be restarting.
        """
        membership = self.servers.membership
        clean = []
        for r in result.results:
            if membership.published(r.id, result.version, result.incarnation, r.error):
                clean.append(self.servers.clients[r.id].address.url)
            if r.error:
                log.warning("version %d did not reach server %d: %s", result.version, r.id, r.error)
        if clean:
            spent = self._spent.setdefault(result.version, self.compute.spent())
            self.records.write(
                PublishedVersion(
                    version=result.version,
                    time=clock.now(),
                    compute_hours=spent.total,
                    startup_hours=spent.startup,
                    evaluation_hours=spent.evaluation,
                    servers=tuple(clean),
                    pause_seconds=result.pause_seconds,
                    transfer_seconds=result.transfer_seconds,
                    resume_seconds=result.resume_seconds,
                    joined_hours=self.compute.joined_hours(),
                    window=self.pipeline.published(result.version),
                )
            )
            self.parity.published(result.version)
            self.evaluate_if_due(result.version)
        missed: dict[int, str] = {}
        for r in result.results:
            member = membership.members.get(r.id)
            if not r.error or member is None or member.failures < PUBLISH_TRIES:
                continue
            why = f"weights did not reach server {r.id} {PUBLISH_TRIES} times in a row: {r.error}"
            if member.life:
                self.servers.dismiss(r.id, why)
            elif not membership.clean():
                missed[r.id] = why
        answering = await asyncio.gather(*map(self.servers.answers, missed))
        for why in compress(missed.values(), answering):
            self._fail(why)
        self._on_change()

    def scored(self, result: Scored) -> None:
        self.parity.scored(result)
        self._on_change()

    def left(self, step: int) -> None:
        self._stop(f"the learner has left at step {step}")

    def decide(self, asked: Next) -> Decision:
        now = self.pipeline.view(asked.version)
        parity = self.parity.request(asked.version)
        settled = self.pipeline.admitted - len(self.pipeline.running)
        waits = (
            f"{settled} tickets are finished,"
            f" {now.phase_end(asked.step) * self.recipe.batch.prompts} needed"
        )
        now = replace(
            now, parity=parity, stop=self.stop_reason, failure=self.failure, waiting_for=waits
        )
        return decide(asked, now)

    def evaluate_if_due(self, version: int) -> None:
        """Begin the evaluation of this version if it is due and servers have it, unless
        the run is ending.
        """
        if not self.stop_reason:
            self.evaluations.begin_if_due(version, self._spent, self._tasks)

    async def carry_out(self, decision: Decision, asked: Next) -> Reply:
        """Do what must happen before the learner gets this decision, and return the
        reply.
        """
        self.step, self.phase = asked.step, type(decision).__name__.lower()
        match decision:
            case TrainStep():
                return await self._train(decision)
            case Publish():
                servers = [a.id for a in decision.servers]
                self.servers.membership.publish(servers, decision.version, asked.incarnation)
                self.places.refresh()
                log.info("publish version %d to %s", decision.version, listed(servers))
            case Stop():
                log.info("the learner is told to stop: %s", decision.reason)
                self._stop(decision.reason)
            case Refused():
                log.error("the learner is refused: %s", decision.error)
        return decision

    async def _train(self, decision: TrainStep) -> Train | Stop:
        tickets = self.pipeline.admission.batch(decision.step)
        assert tickets is not None
        batch = Batch(step=decision.step, groups=await self.records.groups(tickets))
        reasons = [g.void for g in batch.groups]
        if all(reasons):
            self._fail(
                f"nothing could be generated or graded for batch {decision.step}: {reasons[0]}"
            )
            return Stop(reason=self.failure, error=True)
        self.phase = "replay" if decision.replay else "train"
        if not decision.replay:
            self.pipeline.window.taken(decision.step)
        step = decision.step
        replay = decision.replay
        spent = self.compute.spent()
        held = self.compute.held
        spans.event(
            "controller/batches", f"batch {step}", step=step, replay=replay, tickets=list(tickets)
        )
        running = float(len(self.pipeline.running))
        ahead = float(self.pipeline.ahead(step))
        stats = batch_statistics(batch, self.recipe) | spent.row() | self.meter.step()
        stats |= task_statistics(batch, self.recipe)
        stats |= draw_metrics(self.tickets.mixture) | {
            "tickets_running": running,
            "tickets_ahead": ahead,
        }
        stats |= self.parity.metrics() | {"window": self.pipeline.window.batches}
        save = self._to_be_saved(decision)
        return Train(
            batch=batch,
            compute_hours=spent.total,
            compute_devices=held,
            stats=stats,
            replay=replay,
            save=save,
        )

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

    async def _tick(self) -> None:
        """Each second, check for RUN/stop and expired waits, and write status.json; a
        failure to write it is only logged.
        """
        written = True
        while True:
            await asyncio.sleep(STATUS_S)
            if self.rundir.stop_asked():
                self._stop(f"{self.rundir.stop_file} exists")
            joined = self.servers.membership.joined().values()
            here = urlsplit(self._address).hostname
            # All cores of the controller's own machine are counted already.
            adds = [
                self.compute.unit == "gpu" or urlsplit(m.address.url).hostname != here
                for m in joined
            ]
            self.compute.join(sum(adds))
            if not self.stop_reason and self.servers.seconds_without() > (
                limit := self.recipe.start_limit_s
            ):
                self._fail(
                    f"no server was healthy for {limit:g} s ({START_LIMIT_RULE}); see the servers'"
                    " logs"
                )
            limit = END_LIMIT_S if self.conversation.incarnation else UNMET_LIMIT_S
            if self.stop_reason and time.monotonic() - self._stopping_since > limit:
                log.warning("the learner has not said goodbye within %g s; leaving", limit)
                raise ConversationOver
            status = self._status()
            self._exported = status, self.meter.totals()
            try:
                await asyncio.to_thread(
                    write_atomically, self.rundir.status, json.dumps(status).encode()
                )
                written = True
            except MegarlError as error:
                if written:
                    log.warning("%s; the run goes on without it", error)
                written = False
            await asyncio.to_thread(spans.flush)

    async def _drop_old(self) -> None:
        """Regularly delete journal data that none of the newest checkpoints needs for
        replay, if the recipe says so. Those kept as milestones are to be looked at:
        nothing restarts from them.
        """
        while self.recipe.journal.keep == "checkpoints":
            await asyncio.sleep(DROP_S)
            kept = complete(self.rundir.checkpoints)[-self.recipe.checkpoint.keep :]
            # If the journal is older than the checkpoints, `decide` refuses the
            # learner.
            if kept and step_of(kept[0]) <= self.pipeline.batches():
                await self.records.drop_before(step_of(kept[0]))

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
        """Ask the run to stop, unless it is ending. Slurm may signal all processes of a
        job, the supervisor last.
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
        seconds = self.meter.second()
        state = self.pipeline.state
        pipeline = self.pipeline
        servers = self.servers.membership.members.items()
        ahead = pipeline.ahead(self.step)
        return {
            "time": time.time(),
            "step": self.step,
            "version": state.published_version,
            "phase": self.phase,
            "servers": [
                {"id": s, "state": m.state, "version": m.version, "pinned": m.pinned} | seconds[s]
                for s, m in servers
            ],
            # first those drawn but not trained before this step; then counts by
            # outcome, over all lives
            "tickets": {
                "window": ahead,
                "window_limit": self.recipe.pipeline.window_steps * self.recipe.batch.prompts,
                "running": len(pipeline.running),
                "waiting": max(0, ahead - len(pipeline.running)),
                "finished": state.finished,
                "void": state.void,
                "removed": state.removed,
            },
            "compute_hours": self.compute.hours(),
            "compute_unit": self.compute.unit,
            "eval": self.evaluations.latest,
            "evaluating": sorted(self.evaluations.tasks),
            "rollout_tokens_per_second": sum(use["tokens_per_second"] for use in seconds.values()),
            "parity": self.parity.warning,
            "malformed_requests": self.link.malformed,
            "refused_connections": self.link.refused(),
        }
