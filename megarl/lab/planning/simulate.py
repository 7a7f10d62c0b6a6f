"""Runs the pipeline in virtual time: core/controller/pipeline.py and decision.py with
modelled servers and a modelled learner.

    groups    generations x (GroupPlaces.take ─► SimulatedServer ─► give back)
    learner   decide(Next) ─► TrainStep: seconds of training this batch │ Publish: transfer, then parity │ Wait

The model covers lengths, and the seconds of prompts, decode steps, training and
publications. It does not cover grading, the network between controller and servers, or
failures. One seed determines all randomness.

`run` gives asyncio a clock that jumps to the next timer when nothing is ready.
asyncio.sleep, call_later and timeouts follow that clock, so asyncio code
(core/sampling/places.py) runs unchanged. Nothing may wait for a socket or a thread: a
simulation that waits for something that cannot happen is an error.
"""

import asyncio
import math
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megarl.core.algorithm.packing import cost_of
from megarl.core.base.admission import Admission
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Next, Publish, ServerAddress, Stop
from megarl.core.base.types import Group, Prompt, int32
from megarl.core.controller.decision import TrainStep, decide
from megarl.core.controller.pipeline import Pipeline, settled
from megarl.core.journal.records import (
    Admitted,
    Evaluated,
    Finished,
    JournalRecord,
    PublishedVersion,
    Removed,
    State,
)
from megarl.core.recipe import Recipe
from megarl.core.sampling.places import GroupPlaces, Places
from megarl.core.server.membership import Membership
from megarl.lab.planning import speed
from megarl.lab.planning.layouts import Plan, PlanningProblem, changed
from megarl.lab.planning.server_model import SimulatedServer, StepSeconds
from megarl.lab.planning.workload import LogNormal, Workload, workload

LEARNER = "simulated"
PROMPT = Prompt(id="", tokens=int32(()), answer="")


@dataclass(frozen=True)
class Costs:
    """Seconds that things take, and the most requests that a server works on at once
    (limit).
    """

    step_seconds: StepSeconds
    train_seconds: Callable[[Sequence[int]], float]  # for sequences of these lengths
    transfer: float  # of a publication; servers that do not generate meanwhile stand still
    parity: float  # after transfer and swap, while new requests wait
    limit: int
    swap: float = 0.0  # of staged weights; servers stand still


@dataclass(frozen=True)
class SimulatedStep:
    """One step. ended: seconds since the start, as are busy_seconds and running_seconds
    of all servers. lags: tokens by lag.
    """

    step: int
    ended: float
    wait: float
    train: float
    publish: float
    tokens: int
    tickets: tuple[int, ...]
    lags: Counter[int]
    busy_seconds: float
    running_seconds: float


@dataclass
class _Ticket:
    """varied: whether the group has a gradient. lengths: those of its rollouts.
    versions: tokens by version of the weights.
    """

    varied: bool
    lengths: list[int]
    versions: Counter[int] = field(default_factory=Counter)


def simulate(
    recipe: Recipe, work: Workload, costs: Costs, steps: int, seed: int = 0, evaluate: bool = False
) -> list[SimulatedStep]:
    """Return the first `steps` steps of the recipe's pipeline, in order, of a run that
    would go on after them.
    """
    return run(_SimulatedRun(recipe, work, costs, steps, seed, evaluate).run())


class _End(Exception):
    """Raised to leave the task group after the last step; that cancels the tickets of
    later steps.
    """


@dataclass
class _Unwritten:
    """A journal that only applies records to the state, and writes nothing."""

    state: State

    def write(self, record: JournalRecord) -> Awaitable[None]:
        self.state.apply(record)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written


class _SimulatedRun:
    """Modelled servers and a modelled learner around the pipeline. It is also the
    source of the pipeline's groups.
    """

    def __init__(
        self, recipe: Recipe, work: Workload, costs: Costs, steps: int, seed: int, evaluate: bool
    ) -> None:
        self.recipe = recipe
        self.work = work
        self.costs = costs
        self.count = steps
        self.random = np.random.default_rng(seed)
        addresses = [ServerAddress(i, "") for i in range(recipe.resources.servers)]
        self.membership = Membership(addresses, recipe.stages_weights)
        self.servers = [SimulatedServer(costs.step_seconds) for _ in self.membership.members]
        self.places = Places(self.membership, costs.limit)
        self.tickets: dict[int, _Ticket] = {}
        self.changed = asyncio.Event()
        self.steps: list[SimulatedStep] = []
        state = State(
            Admission(recipe.batch.prompts, recipe.pipeline.max_lag, recipe.pipeline.phase_steps)
        )
        if not evaluate:
            state.apply(_evaluated(steps))
        self.pipeline = Pipeline(
            recipe, _Unwritten(state), self.places, self, self._on_change, steps, math.inf
        )

    async def run(self) -> list[SimulatedStep]:
        for server in self.membership.members:
            self.membership.seen(server)
        with suppress(_End):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.pipeline.run())
                await self._learn(tasks)
                raise _End
        return self.steps

    # The source of groups.

    def draw(self, ticket: int, due: int) -> Admitted:
        return Admitted(ticket=ticket, task="", prompt_id="", epoch=0, due=due)

    async def make(self, admitted: Admitted, places: GroupPlaces) -> Finished | Removed:
        lengths = self.work.lengths.draw(self.random, self.work.generations)
        ticket = _Ticket(bool(self.random.random() < self.work.trained_share), lengths.tolist())
        self.tickets[admitted.ticket] = ticket
        async with asyncio.TaskGroup() as rollouts:
            for sample, length in enumerate(ticket.lengths):
                rollouts.create_task(self._rollout(ticket, places, sample, length))
        record = settled(
            self.recipe, Group(ticket=admitted.ticket, prompt=PROMPT, rollouts=()), ticket.varied
        )
        if isinstance(record, Removed):
            del self.tickets[admitted.ticket]
        return record

    async def _rollout(
        self, ticket: _Ticket, places: GroupPlaces, sample: int, length: int
    ) -> None:
        context = self.work.prompt_tokens
        legs = [length]
        if (
            self.recipe.length.control == "interruption"
        ):  # of thinking; the answer is then a request of its own
            low, high = self.recipe.length.thinking_tokens
            budget = int(self.random.integers(low, high + 1))
            legs = [budget, length - budget] if length > budget else legs
        for tokens in legs:
            server, _ = await places.take(sample)
            places.cached()
            ticket.versions.update(await self.servers[server].generate(context, tokens))
            context += tokens
            self.places.give_back(server)

    # The learner.

    async def _learn(self, tasks: asyncio.TaskGroup) -> None:
        now = asyncio.get_running_loop().time
        schedule = self.pipeline.evaluations
        step = 0
        spent = {"wait": 0.0, "train": 0.0, "publish": 0.0}
        kept = self.recipe.batch.zero_variance == "keep"
        while True:
            self.changed.clear()
            if schedule.is_due(step) and (servers := schedule.pin_servers(step)):
                tasks.create_task(self._evaluate(step, servers))
            decision = decide(Next(LEARNER, step, step), self.pipeline.view(step))
            start = now()
            match decision:
                case TrainStep():
                    tickets = self.pipeline.admission.batch(step)
                    assert tickets is not None
                    self.pipeline.window.note_taken(step)
                    chosen = [self.tickets[t] for t in tickets]
                    lengths = [
                        n + self.work.prompt_tokens
                        for t in chosen
                        if kept or t.varied
                        for n in t.lengths
                    ]
                    await asyncio.sleep(self.costs.train_seconds(lengths) if lengths else 0.0)
                    spent["train"] += now() - start
                    self._close_step(step, tickets, spent)
                    step = step + 1
                    spent = dict.fromkeys(spent, 0.0)
                case Publish():
                    await self._publish(decision)
                    spent["publish"] += now() - start
                case Stop():
                    return
                case _:
                    await self.changed.wait()
                    spent["wait"] += now() - start

    def _close_step(self, step: int, tickets: tuple[int, ...], spent: dict[str, float]) -> None:
        lags: Counter[int] = Counter()
        for number in tickets:
            for version, count in self.tickets.pop(number).versions.items():
                lags[step - version] += count
        self.pipeline.admission.forget(step + 1)
        busy = sum(s.busy_seconds for s in self.servers)
        running = sum(s.running_seconds for s in self.servers)
        now = asyncio.get_running_loop().time()
        done = SimulatedStep(
            step=step,
            ended=now,
            tokens=lags.total(),
            tickets=tickets,
            lags=lags,
            busy_seconds=busy,
            running_seconds=running,
            **spent,
        )
        self.steps.append(done)
        self.places.refresh()

    async def _publish(self, command: Publish) -> None:
        ids = [address.id for address in command.servers]
        self.membership.publish(ids, command.version, LEARNER)
        self.places.refresh()
        pause = self.costs.transfer
        if self.recipe.generates_meanwhile:
            await asyncio.sleep(self.costs.transfer)
            pause = self.costs.swap
        for i in ids:
            self.servers[i].pause()
        await asyncio.sleep(pause)
        for i in ids:
            self.servers[i].resume(command.version)
        await asyncio.sleep(self.costs.parity)
        for i in ids:
            self.membership.published(i, command.version, LEARNER, "")
        window = self.pipeline.published(command.version)
        published = PublishedVersion(
            version=command.version, time=0.0, compute_hours=0.0, servers=(), window=window
        )
        self.pipeline.state.apply(published)
        self._on_change()

    # Evaluation.

    async def _evaluate(self, version: int, servers: set[int]) -> None:
        count = self.recipe.evaluation.prompts * self.recipe.evaluation.samples
        lengths = iter(enumerate(self.work.lengths.draw(self.random, count).tolist()))

        async def work() -> None:
            for n, length in lengths:
                server, _ = await self.places.take(
                    (0, n, 0), lambda candidate, _: candidate in servers
                )
                await self.servers[server].generate(self.work.prompt_tokens, length)
                self.places.give_back(server)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self.places.limit * len(servers), count)):
                workers.create_task(work())
        self.pipeline.state.apply(_evaluated(version))
        self.pipeline.evaluations.unpin_servers(version)
        self._on_change()

    def _on_change(self) -> None:
        self.places.refresh()
        self.changed.set()


def _evaluated(version: int) -> Evaluated:
    return Evaluated(
        version=version, time=0.0, compute_hours=0.0, pass_rate=0.0, n_prompts=0, samples=0
    )


@dataclass(frozen=True)
class Summary:
    """Figures for the steps after the pipeline has filled: shares of their time, lags
    in steps, completion tokens/s.
    """

    steps: int
    step_seconds: float
    tokens_per_second: float
    learner_idle: float
    training: float
    publishing: float
    server_busy: float
    server_running: float
    lag_mean: float
    lag_max: int
    lags: dict[int, float]


def summary(steps: Sequence[SimulatedStep], servers: int, warm_up: int) -> Summary:
    """Summarise the steps after step `warm_up`; their time starts when that step ends.
    MegarlError if there are none.
    """
    if len(steps) < warm_up + 2:
        raise MegarlError(
            f"--steps: {len(steps)} leave none after the first {warm_up}, which fill the pipeline"
        )
    before = steps[warm_up]
    counted = steps[warm_up + 1 :]
    last = counted[-1]
    lags = sum((step.lags for step in counted), Counter[int]())
    seconds = last.ended - before.ended
    total = lags.total()
    return Summary(
        steps=len(counted),
        step_seconds=seconds / len(counted),
        tokens_per_second=total / seconds,
        learner_idle=sum(s.wait for s in counted) / seconds,
        training=sum(s.train for s in counted) / seconds,
        publishing=sum(s.publish for s in counted) / seconds,
        server_busy=(last.busy_seconds - before.busy_seconds) / seconds / servers,
        server_running=(last.running_seconds - before.running_seconds) / seconds / servers,
        lag_mean=sum(lag * count for lag, count in lags.items()) / total,
        lag_max=max(lags),
        lags={lag: lags[lag] / total for lag in sorted(lags)},
    )


LAGS = (0, 1, 2, 4, 8, 12)
SPREADS = (0.1, 0.3, 0.5, 0.7, 0.9)


class Simulation(NamedTuple):
    """A simulated plan. warm_up: the number of steps that only fill the pipeline and
    are not counted in `summary`.
    """

    plan: Plan
    steps: list[SimulatedStep]
    warm_up: int
    summary: Summary


def costs(problem: PlanningProblem, plan: Plan) -> Costs:
    recipe = plan.recipe
    microbatch_tokens = recipe.learner.microbatch_tokens
    assert microbatch_tokens != "auto"  # a plan says how many
    cost = cost_of(problem.shape)
    one_size = recipe.model.pipeline_parallel > 1

    def train_seconds(lengths: Sequence[int]) -> float:
        packed = speed.packing(lengths, microbatch_tokens, recipe.data_parallel, cost, one_size)
        return speed.train_seconds(recipe, problem.shape, packed, problem.gpu)

    # Nothing is decoded while a prompt is read; that time is spread over the tokens of
    # the request.
    decoder, prefill = (
        plan.decoder,
        plan.decoder.prefill_seconds(problem.work.prompt_tokens) / problem.work.mean_tokens,
    )

    def step_seconds(running: float, held: float) -> float:
        return decoder.step_seconds(running, held) + running * prefill

    limit = min(
        recipe.serving.max_running_requests, plan.server.kv_tokens / problem.work.live_context
    )
    return Costs(
        step_seconds, train_seconds, limit=max(1, int(limit)), **plan.publication._asdict()
    )


def simulated(problem: PlanningProblem, plan: Plan, steps: int) -> Simulation:
    """Simulate `steps` steps of the plan, after steps that fill its window and, if it
    is `auto`, let it shrink.
    """
    pipeline = plan.recipe.pipeline
    recipe = plan.recipe
    warm_up = (4 if pipeline.window == "auto" else 2) * pipeline.window_steps
    done = simulate(
        recipe, problem.work, costs(problem, plan), steps + warm_up + 1, recipe.run.seed
    )
    return Simulation(plan, done, warm_up, summary(done, recipe.resources.servers, warm_up))


def by_lag(problem: PlanningProblem, plan: Plan, steps: int) -> dict[int, Summary]:
    """Simulate the plan with each of `LAGS` as pipeline.k."""
    plans = {k: replace(plan, recipe=changed(plan.recipe, "pipeline", k=k)) for k in LAGS}
    return {k: simulated(problem, other, steps).summary for k, other in plans.items()}


def by_spread(problem: PlanningProblem, plan: Plan, steps: int) -> dict[float, Summary]:
    """Simulate the plan with shorter and longer tails of the lengths, at the same mean."""
    recipe = plan.recipe
    work = problem.work
    summaries = {}
    for spread in SPREADS:
        lengths = LogNormal(work.mean_tokens, spread, recipe.length.completion_tokens)
        other = replace(
            problem, work=workload(recipe, lengths, work.trained_share, recipe.run.seed)
        )
        summaries[spread] = simulated(other, plan, steps).summary
    return summaries


class Standstill(Exception):
    """All tasks wait, and no timer is set."""


class _Jump(selectors.SelectSelector):
    """A selector that waits for no file, and instead moves the clock forward by
    `timeout` seconds.
    """

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Standstill("every task waits for another")
        self.now += max(timeout, 0.0)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in virtual time and return its result. Raises Standstill where
    it would wait forever in real time.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
