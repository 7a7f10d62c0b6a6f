"""`megarl rollout`: the controller. One asyncio process that decides what everybody does next.

    learner ── Next, Published, Stopped ──► link ─► decision.decide ──► Train | Publish | Wait | Stop
                                                      ▲  looks at
                servers.py   who is up, with whose weights ┤
                tickets.py   admitted, sampled, graded ────┤        every change wakes the one who waits for it
                evaluations  held-out score, server pinned ┘
                ledger.py    the journal: all of it can be rebuilt from there

A `Next` that would be answered by `Wait` is held for a second, and answered at once when something changes.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
import uuid
from dataclasses import dataclass, replace

import uvloop

from megarl.batch import batch_statistics
from megarl.data.prompts import check_disjoint, load_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.errors import MegarlError
from megarl.evaluation import score as evaluation
from megarl.evaluation.schedule import is_due
from megarl.grading import Grader
from megarl.messages import Ack, Next, Publish, Published, Refused, Reply, Request, Stop, Stopped, Train, Wait
from megarl.process import start_logging
from megarl.recipe import Recipe
from megarl.rollout.compute import ComputeClock, session_of
from megarl.rollout.decision import Standing, TrainStep, decide
from megarl.rollout.journal import Evaluated, Journal, PublishedVersion, State
from megarl.rollout.ledger import Ledger
from megarl.rollout.link import Link
from megarl.rollout.places import Places
from megarl.rollout.sampler import Sampler
from megarl.rollout.servers import Servers
from megarl.rollout.status import Meter
from megarl.rollout.tickets import Tickets
from megarl.rundir import RunDir, append_jsonl, latest_rows, write_atomically
from megarl.types import Batch, Prompt

log = logging.getLogger(__name__)

HOLD_S = 1.0
"""How long a question is held before the answer is Wait: the learner looks for RUN/stop between questions."""
STATUS_S = 1.0
DROP_S = 60.0
GRADER_LIMIT_S = 10.0
PUBLISH_TRIES = 3
"""Publications in a row that may fail on a server while no other works."""
END_LIMIT_S = 600.0
"""How long a learner may take to finish its step and save before the controller leaves without its goodbye."""
UNMET_LIMIT_S = 5.0
"""The same for a learner that has never spoken to this controller."""


def main(recipe: Recipe) -> int:
    """Run until the learner has been told to stop and has left; 1 if the run failed."""
    start_logging("controller")
    rundir = RunDir.of(recipe)
    endpoints = rundir.endpoints()
    tokenizer = load_tokenizer(recipe.model.path)
    prompts = load_prompts(recipe.data.train, tokenizer, recipe.length.prompt_tokens)
    heldout = load_prompts(recipe.data.heldout, tokenizer, recipe.length.prompt_tokens)
    check_disjoint(prompts, heldout)
    pipeline = recipe.pipeline
    journal = Journal.open(rundir.rollouts, recipe.batch.prompts, pipeline.max_lag, pipeline.phase_steps)
    journal.append(session_of(rundir))

    async def run() -> int:
        return await Controller(recipe, rundir, journal, tokenizer, prompts, heldout, Link(endpoints.controller)).run()

    return uvloop.run(run())


@dataclass
class _Question:
    """A Next that waits for its answer."""

    peer: bytes
    asked: Next
    until: float  # time.monotonic()


class _End(Exception):
    """Leaves the task group: the controller's work is done."""


class Controller:
    """The parts of a run, wired; made within the running event loop."""

    def __init__(
        self,
        recipe: Recipe,
        rundir: RunDir,
        journal: Journal,
        tokenizer: Tokenizer,
        prompts: list[Prompt],
        heldout: list[Prompt],
        link: Link,
    ) -> None:
        state: State = journal.state
        salt = uuid.uuid4().hex[:8]  # of this life: prefixes cached for an earlier one hold older weights
        self.recipe, self.rundir, self.link, self._salt = recipe, rundir, link, salt
        self.servers = Servers(recipe, rundir.endpoints(), self._on_change)
        self.places = Places(self.servers.membership, recipe.serving.max_running_requests)
        self.sampler = Sampler(recipe, tokenizer, self.servers.clients, self.places, self.servers)
        self.grader = Grader(recipe.data.grader, recipe.length.end_of_thinking, _grading_processes(), GRADER_LIMIT_S)
        self.ledger = Ledger(journal)
        self.tickets = Tickets(
            recipe, state, prompts, self.servers.membership, self.places, self.sampler, self.grader, self.ledger,
            self._on_change, salt,
        )  # fmt: skip
        self.compute = ComputeClock(state)
        self.meter = Meter(self.places)
        self.heldout = evaluation.choose(heldout, recipe.evaluation.prompts)
        self.published_version = state.published_version
        self.scored = max(state.evaluations, default=None)
        self.evaluations: dict[int, tuple[int, asyncio.Task[None]]] = {}  # version -> server, task
        self.latest_evaluation: dict[str, object] = next(reversed(latest_rows(rundir.eval)), {})
        self._published: dict[int, float] = {}  # version -> compute hours at its first publication in this life
        self.incarnation, self.superseded = "", set[str]()
        self.step, self.phase = 0, "starting"
        self.stop_reason, self.failure = "", ""
        self._stopping_since = 0.0
        self._question: _Question | None = None
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """All of it, until the end; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, f"signal {number.name}")
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._sampling = tasks.create_task(self.tickets.run(), name="tickets")
                for server in self.servers.clients:
                    tasks.create_task(self.servers.watch(server), name=f"watch {server}")
                for coroutine in (self.ledger.run(), self._listen(), self._answer(), self._tick(), self._drop_old()):
                    tasks.create_task(coroutine)
        except* _End:
            pass
        except* MegarlError as errors:
            raise _leaf(errors) from None
        finally:
            await self._close()
        return 1 if self.failure else 0

    # What comes in.

    async def _listen(self) -> None:
        """Requests of the learner, for ever."""
        while True:
            peer, request = await self.link.receive()
            if request.incarnation in self.superseded:
                error = f"a newer learner ({self.incarnation}) has taken over; this one should have ended"
                await self.link.reply(peer, Refused(error=error))
                continue
            if request.incarnation != self.incarnation:
                await self._meet(request.incarnation)
            await self._take(peer, request)

    async def _meet(self, incarnation: str) -> None:
        """Another learner: the earlier one is gone, and what it was publishing will not end."""
        log.info("learner %s speaks%s", incarnation, f"; {self.incarnation} is superseded" if self.incarnation else "")
        if self.incarnation:
            self.superseded.add(self.incarnation)
        if self._question:
            await self.link.reply(self._question.peer, Refused(error="a newer learner has taken over"))
        self._question, self.incarnation = None, incarnation
        broken = self.servers.membership.new_learner()
        if broken:
            log.warning("servers %s were being published to; their requests go on from what has arrived", broken)
            self._tasks.create_task(self.servers.abort(broken))

    async def _take(self, peer: bytes, request: Request) -> None:
        match request:
            case Next():
                self._question = _Question(peer, request, time.monotonic() + HOLD_S)
                self._changed.set()
            case Published():
                self._on_published(request)
                await self.link.reply(peer, Ack())
            case Stopped():
                log.info("the learner has left at step %d", request.step)
                await self.link.reply(peer, Ack())
                if not self._ending():
                    self._stop(f"the learner has left at step {request.step}")
                raise _End

    def _on_published(self, result: Published) -> None:
        """New weights on the servers that worked; a probe that differs too much ends the run."""
        limit = self.recipe.weights.probe_limit
        clean = []
        for r in result.results:
            if self.servers.membership.published(r.id, result.version, result.incarnation, r.error):
                clean.append(r)
                if not r.probe_logprob_diff <= limit:  # also when it is not a number
                    self._fail(
                        f"server {r.id} and the learner disagree by {r.probe_logprob_diff:.3g} in log-prob on the probe at "
                        f"version {result.version} (weights.probe_limit is {limit:g}): the weights did not arrive as they are"
                    )
            if r.error:
                log.warning("version %d did not reach server %d: %s", result.version, r.id, r.error)
        if clean:
            self.published_version = max(self.published_version, result.version)
            hours = self._published.setdefault(result.version, self.compute.hours())
            record = PublishedVersion(
                version=result.version,
                time=time.time(),
                compute_hours=hours,
                servers=tuple(self.servers.clients[r.id].url for r in clean),
                pause_seconds=result.pause_seconds,
                transfer_seconds=result.transfer_seconds,
                resume_seconds=result.resume_seconds,
                probe_seconds=result.probe_seconds,
                probe_logprob_diff=max(r.probe_logprob_diff for r in clean),
            )
            self.ledger.write(record)
            self._evaluate_if_due(result.version)
        self._give_up_if_none_works(result)
        self._on_change()

    def _give_up_if_none_works(self, result: Published) -> None:
        """End the run when no server is clean and one of these has failed too often."""
        membership = self.servers.membership
        for r in result.results:
            if r.error and not membership.clean() and membership.members[r.id].failures >= PUBLISH_TRIES:
                self._fail(f"weights did not reach server {r.id} {PUBLISH_TRIES} times in a row: {r.error}")

    # What goes out.

    async def _answer(self) -> None:
        """Answer the question that waits whenever something has changed, or its time is up."""
        while True:
            self._changed.clear()
            if self._question:
                self._evaluate_if_due(self._question.asked.version)
                decision = decide(self._question.asked, self._standing(self._question.asked))
                if not isinstance(decision, Wait) or time.monotonic() >= self._question.until:
                    question, self._question = self._question, None
                    reply = await self._carry_out(decision, question.asked)
                    await self.link.reply(question.peer, reply)
                    if isinstance(reply, Stop) and reply.error:
                        raise _End  # a learner that is told so says no goodbye
            timeout = max(0.0, self._question.until - time.monotonic()) if self._question else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)

    def _standing(self, asked: Next) -> Standing:
        settled, prompts = self.tickets.admitted - len(self.tickets.running), self.recipe.batch.prompts
        now = Standing(
            batches=self.tickets.batches(),
            published_version=self.published_version,
            final_step=self._final_step(),
            phase_steps=self.recipe.pipeline.phase_steps,
            score_due=self._is_due(asked.version) or asked.version in self.evaluations,
            membership=self.servers.membership,
            stop=self.stop_reason,
            failure=self.failure,
        )
        needed = now.phase_end(asked.step) * prompts
        return replace(now, waiting_for=f"{settled} tickets are finished, {needed} needed")

    def _final_step(self) -> int:
        """run.steps, or as many as the prompts gave batches for."""
        if self.tickets.curriculum.exhausted:
            return min(self.recipe.run.steps, self.tickets.admitted // self.recipe.batch.prompts)
        return self.recipe.run.steps

    def _is_due(self, version: int) -> bool:
        """Whether these weights need an evaluation, and are not being evaluated yet."""
        known = [v for v in (self.scored, *self.evaluations) if v is not None]
        return is_due(version, max(known, default=None), self.recipe.evaluation.every, self._final_step())

    async def _carry_out(self, decision: TrainStep | Reply, asked: Next) -> Reply:
        """What has to happen before the learner is told."""
        self.step, self.phase = asked.step, type(decision).__name__.lower()
        match decision:
            case TrainStep():
                return await self._train(decision)
            case Publish():
                self.servers.membership.publish((a.id for a in decision.servers), decision.version, asked.incarnation)
                log.info("publish version %d to servers %s", decision.version, [a.id for a in decision.servers])
            case Stop():
                log.info("the learner is told to stop: %s", decision.reason)
                self._stop(decision.reason)
            case Refused():
                log.error("the learner is refused: %s", decision.error)
        return decision

    async def _train(self, decision: TrainStep) -> Train | Stop:
        tickets = self.tickets.admission.batch(decision.step)
        assert tickets is not None
        batch = Batch(step=decision.step, groups=await self.ledger.groups(tickets))
        reasons = [g.void for g in batch.groups]
        if all(reasons):
            self._fail(f"nothing could be generated or graded for batch {decision.step}: {reasons[0]}")
            return Stop(reason=self.failure, error=True)
        self.phase = "replay" if decision.replay else "train"
        return Train(
            batch=batch,
            compute_hours=self.compute.hours(),
            compute_devices=self.compute.devices,
            stats=batch_statistics(batch) | self.meter.step() | self._ticket_metrics(),
            replay=decision.replay,
        )

    def _ticket_metrics(self) -> dict[str, float]:
        return {
            "epoch": float(self.tickets.curriculum.epoch),
            "pool_prompts": float(self.tickets.curriculum.pool),
            "excluded_prompts": float(len(self.tickets.curriculum.excluded)),
            "tickets_running": float(len(self.tickets.running)),
            "tickets_ahead": float(self.tickets.admitted - self.step * self.recipe.batch.prompts),
        }

    # Evaluation.

    def _evaluate_if_due(self, version: int) -> None:
        """Hold one of the servers that have these weights, and score them."""
        held = [s for s, v in self.servers.membership.clean().items() if v == version]
        if not held or self._ending() or not self._is_due(version):
            return
        server = min(held, key=lambda s: self.places.use[s].running)
        self.servers.membership.pin(server)
        log.info("version %d is evaluated on server %d", version, server)
        task = self._tasks.create_task(self._evaluate(version, server, self._published[version]))
        self.evaluations[version] = (server, task)

    async def _evaluate(self, version: int, server: int, compute_hours: float) -> None:
        began = time.monotonic()
        try:
            outcomes = await evaluation.score(
                self.heldout, self.recipe, self.sampler, self.grader, server, f"{self._salt}/evaluation/{version}",
                self.places.limit,
            )  # fmt: skip
            scores = evaluation.row(outcomes, self.recipe, version)
            row = scores | {
                "compute_hours": compute_hours,
                "compute_unit": self.compute.unit,
                "time": time.time(),
                "seconds": time.monotonic() - began,
            }
            append_jsonl(self.rundir.eval, row)
            await self.ledger.write(
                Evaluated(
                    version=version,
                    time=time.time(),
                    compute_hours=compute_hours,
                    pass_rate=scores["pass_rate"],
                    n_prompts=int(scores["n_prompts"]),
                    samples=int(scores["samples"]),
                )
            )
            self.scored, self.latest_evaluation = version, row
            log.info("version %d: held-out pass rate %.4f", version, scores["pass_rate"])
        finally:
            del self.evaluations[version]
            self.servers.membership.unpin(server)
            self._on_change()

    # Changes, and the end.

    def _on_change(self) -> None:
        """Something that somebody may wait for has changed."""
        clean = self.servers.membership.clean()
        for server, task in list(self.evaluations.values()):
            if server not in clean:
                task.cancel()  # its weights are gone; the next version is due instead
        self.places.refresh()
        self._changed.set()

    async def _tick(self) -> None:
        """Each second: look for RUN/stop and for waits that have run out, write the status."""
        while True:
            await asyncio.sleep(STATUS_S)
            if self.rundir.stop_file.exists():
                self._stop(f"{self.rundir.stop_file} exists")
            limit = self.recipe.serving.start_timeout_s
            if not self._ending() and self.servers.seconds_without() > limit:
                self._fail(
                    f"no server has been healthy for {limit:g} s (serving.start_timeout_s); see the servers' logs"
                )
            self._leave_if_overdue()
            await asyncio.to_thread(write_atomically, self.rundir.status, json.dumps(self._status()).encode())

    async def _drop_old(self) -> None:
        """Each minute: forget what no kept checkpoint replays, if the recipe says so."""
        while self.recipe.journal.keep == "checkpoints":
            await asyncio.sleep(DROP_S)
            steps = [int(path.name.removeprefix("step-")) for path in self.rundir.checkpoints.glob("step-*")]
            if steps:
                await self.ledger.drop_before(min(steps))

    def _leave_if_overdue(self) -> None:
        limit = END_LIMIT_S if self.incarnation else UNMET_LIMIT_S
        if self._ending() and time.monotonic() - self._stopping_since > limit:
            log.warning("the learner has not said goodbye within %g s; leaving", limit)
            raise _End

    def _ending(self) -> bool:
        return bool(self.stop_reason or self.failure)

    def _fail(self, reason: str) -> None:
        log.error("%s", reason)
        self.failure = self.failure or reason
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        """Sample no more; go on answering the learner until it has left."""
        if self.stop_reason:
            return
        log.info("stopping: %s", reason)
        self.stop_reason, self._stopping_since = reason, time.monotonic()
        self._sampling.cancel()
        for _, task in self.evaluations.values():
            task.cancel()
        self._changed.set()

    async def _close(self) -> None:
        self.grader.close()
        await self.servers.close()
        await self.ledger.close()
        self.link.close()

    def _status(self) -> dict[str, object]:
        """RUN/status.json: how things stand now."""
        ahead = self.tickets.admitted - self.step * self.recipe.batch.prompts
        seconds = self.meter.second()
        members = self.servers.membership.members
        return {
            "time": time.time(),
            "step": self.step,
            "version": self.published_version,
            "phase": self.phase,
            "servers": [
                {"id": s, "state": m.state, "version": m.version, "pinned": m.pinned} | seconds[s]
                for s, m in members.items()
            ],
            "tickets": {
                "window": ahead,
                "window_limit": self.recipe.pipeline.window_steps * self.recipe.batch.prompts,
                "running": len(self.tickets.running),
                "waiting": max(0, ahead - len(self.tickets.running)),
            }
            | self.tickets.counts,
            "compute_hours": self.compute.hours(),
            "compute_unit": self.compute.unit,
            "eval": self.latest_evaluation,
            "evaluating": sorted(self.evaluations),
            "rollout_tokens_per_second": sum(use["tokens_per_second"] for use in seconds.values()),
            "malformed_requests": self.link.malformed,
        }


def _grading_processes() -> int:
    """A quarter of the cores: servers and learner want the others."""
    return max(1, min(32, (os.cpu_count() or 1) // 4))


def _leaf(errors: BaseExceptionGroup[MegarlError]) -> MegarlError:
    """The first error of a group of groups."""
    first = errors.exceptions[0]
    return _leaf(first) if isinstance(first, BaseExceptionGroup) else first
