"""Runs the pipeline in virtual time: core/controller/pipeline.py and decision.py with
modelled servers and a modelled learner.

    groups    generations x (GroupPlaces.take ─► SimulatedServer ─► give back)
    learner   decide(Next) ─► TrainStep: seconds of training this batch
                            │ Publish: transfer, then parity
                            │ Wait

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
from megarl.core.client.membership import Membership
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
from megarl.predict.planning import speed
from megarl.predict.planning.layouts import Plan, PlanningProblem, changed
from megarl.predict.planning.server_model import SimulatedServer, StepSeconds
from megarl.predict.planning.workload import LogNormal, Workload, workload

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


@dataclass
class _SpentSeconds:
    """What the learner has spent in the present step."""

    wait: float = 0.0
    train: float = 0.0
    publish: float = 0.0


def _time() -> float:
    """Return virtual seconds since the start."""
    return asyncio.get_running_loop().time()


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
        """Apply the record; what is returned is done."""
        self.state.apply(record)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    async def settle(self, record: Finished | Removed) -> None:
        """Apply the record that ends a ticket."""
        self.state.apply(record)


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
        """Run all steps, and return them."""
        for server in self.membership.members:
            self.membership.answered(server)
        with suppress(_End):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.pipeline.run())
                await self._learn(tasks)
                raise _End
        return self.steps

    # The source of groups.

    def draw(self, ticket: int, due_step: int) -> Admitted:
        """Return the ticket's record; prompts are all alike."""
        return Admitted(ticket=ticket, task="", prompt_id="", epoch=0, due_step=due_step)

    async def make(self, admitted: Admitted, places: GroupPlaces) -> Finished | Removed:
        """Sample a ticket's group, of random lengths."""
        lengths = self.work.lengths.draw(self.random, self.work.generations)
        is_trained = bool(self.random.random() < self.work.trained_share)
        ticket = _Ticket(is_trained, lengths.tolist())
        self.tickets[admitted.ticket] = ticket
        async with asyncio.TaskGroup() as rollouts:
            for sample, length in enumerate(ticket.lengths):
                rollouts.create_task(self._rollout(ticket, places, sample, length))
        group = Group(ticket=admitted.ticket, prompt=PROMPT, rollouts=())
        record = settled(self.recipe, group, ticket.varied)
        if isinstance(record, Removed):
            del self.tickets[admitted.ticket]
        return record

    async def _rollout(
        self, ticket: _Ticket, places: GroupPlaces, sample: int, length: int
    ) -> None:
        """Generate `length` tokens of one rollout, and count them in the ticket by
        version of the weights. Interrupted thinking takes a second request for its
        answer.
        """
        context = self.work.prompt_tokens
        legs = [length]
        if self.recipe.length.control == "interruption":
            # The first request thinks, the second answers.
            low, high = self.recipe.length.thinking_tokens
            budget = int(self.random.integers(low, high + 1))
            if length > budget:
                legs = [budget, length - budget]
        for tokens in legs:
            server, _ = await places.take(sample)
            places.let_others_begin()
            ticket.versions.update(await self.servers[server].generate(context, tokens))
            context += tokens
            self.places.give_back(server)

    # The learner.

    async def _learn(self, tasks: asyncio.TaskGroup) -> None:
        """Do what the pipeline decides, step after step, until it decides to stop.
        Evaluations that are due run beside it in `tasks`.
        """
        schedule = self.pipeline.evaluations
        step = 0
        seconds = _SpentSeconds()
        while True:
            self.changed.clear()
            if schedule.is_due(step) and (servers := schedule.pin_servers(step)):
                tasks.create_task(self._evaluate(step, servers))
            decision = decide(Next(LEARNER, step, step), self.pipeline.view(step))
            start = _time()
            match decision:
                case TrainStep():
                    tickets = self.pipeline.admission.batch(step)
                    assert tickets is not None
                    self.pipeline.window.note_taken(step)
                    lengths = self._trained_lengths(tickets)
                    await asyncio.sleep(self.costs.train_seconds(lengths) if lengths else 0.0)
                    seconds.train += _time() - start
                    self._close_step(step, tickets, seconds)
                    step = step + 1
                    seconds = _SpentSeconds()
                case Publish():
                    await self._publish(decision)
                    seconds.publish += _time() - start
                case Stop():
                    return
                case _:
                    await self.changed.wait()
                    seconds.wait += _time() - start

    def _trained_lengths(self, tickets: tuple[int, ...]) -> list[int]:
        """Return the sequence lengths of the batch's rollouts that are trained."""
        keeps_all = self.recipe.batch.zero_variance == "keep"
        lengths = []
        for number in tickets:
            ticket = self.tickets[number]
            if keeps_all or ticket.varied:
                lengths += [length + self.work.prompt_tokens for length in ticket.lengths]
        return lengths

    def _close_step(self, step: int, tickets: tuple[int, ...], seconds: "_SpentSeconds") -> None:
        """Record a trained step with the lags of its tokens, and forget its tickets."""
        lags: Counter[int] = Counter()
        for number in tickets:
            for version, count in self.tickets.pop(number).versions.items():
                lags[step - version] += count
        self.pipeline.admission.forget(step + 1)
        record = SimulatedStep(
            step=step,
            ended=_time(),
            wait=seconds.wait,
            train=seconds.train,
            publish=seconds.publish,
            tokens=lags.total(),
            tickets=tickets,
            lags=lags,
            busy_seconds=sum(server.busy_seconds for server in self.servers),
            running_seconds=sum(server.running_seconds for server in self.servers),
        )
        self.steps.append(record)
        self.places.refresh()

    async def _publish(self, command: Publish) -> None:
        """Bring a version of the weights to the servers in virtual time: they pause
        during the transfer or, if they generate meanwhile, only to swap weights.
        """
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
        record = PublishedVersion(
            version=command.version, time=0.0, compute_hours=0.0, servers=(), window=window
        )
        self.pipeline.state.apply(record)
        self._on_change()

    # Evaluation.

    async def _evaluate(self, version: int, servers: set[int]) -> None:
        """Generate an evaluation's rollouts on its servers, as many at once as these
        hold, then record that it has ended.
        """
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
    first = steps[warm_up]
    counted = steps[warm_up + 1 :]
    last = counted[-1]
    lags = sum((step.lags for step in counted), Counter[int]())
    seconds = last.ended - first.ended
    total = lags.total()
    return Summary(
        steps=len(counted),
        step_seconds=seconds / len(counted),
        tokens_per_second=total / seconds,
        learner_idle=sum(s.wait for s in counted) / seconds,
        training=sum(s.train for s in counted) / seconds,
        publishing=sum(s.publish for s in counted) / seconds,
        server_busy=(last.busy_seconds - first.busy_seconds) / seconds / servers,
        server_running=(last.running_seconds - first.running_seconds) / seconds / servers,
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
    """Return what things take with this plan."""
    recipe = plan.recipe
    work = problem.work
    microbatch_tokens = recipe.learner.microbatch_tokens
    assert microbatch_tokens != "auto"  # a plan says how many
    cost = cost_of(problem.shape)
    one_size = recipe.model.pipeline_parallel > 1
    decoder = plan.decoder
    # Nothing is decoded while a prompt is read; that time is spread over the tokens of
    # the request.
    prefill = decoder.prefill_seconds(work.prompt_tokens) / work.mean_tokens

    def train_seconds(lengths: Sequence[int]) -> float:
        packed = speed.packing(lengths, microbatch_tokens, recipe.data_parallel, cost, one_size)
        return speed.train_seconds(recipe, problem.shape, packed, problem.gpu)

    def step_seconds(running: float, context_tokens: float) -> float:
        return decoder.step_seconds(running, context_tokens) + running * prefill

    limit = min(recipe.serving.max_running_requests, plan.server.kv_tokens / work.live_context)
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
    count = steps + warm_up + 1
    results = simulate(recipe, problem.work, costs(problem, plan), count, recipe.run.seed)
    return Simulation(plan, results, warm_up, summary(results, recipe.resources.servers, warm_up))


def by_lag(problem: PlanningProblem, plan: Plan, steps: int) -> dict[int, Summary]:
    """Simulate the plan with each of `LAGS` as pipeline.k."""
    summaries = {}
    for k in LAGS:
        with_k = replace(plan, recipe=changed(plan.recipe, "pipeline", k=k))
        summaries[k] = simulated(problem, with_k, steps).summary
    return summaries


def by_spread(problem: PlanningProblem, plan: Plan, steps: int) -> dict[float, Summary]:
    """Simulate the plan with shorter and longer tails of the lengths, at the same
    mean.
    """
    recipe = plan.recipe
    work = problem.work
    summaries = {}
    for spread in SPREADS:
        lengths = LogNormal(work.mean_tokens, spread, recipe.length.completion_tokens)
        varied_work = workload(recipe, lengths, work.trained_share, recipe.run.seed)
        varied = replace(problem, work=varied_work)
        summaries[spread] = simulated(varied, plan, steps).summary
    return summaries


class Standstill(Exception):
    """All tasks wait, and no timer is set."""


class _Jump(selectors.SelectSelector):
    """A selector that waits for no file, and instead moves the clock forward by
    `timeout` seconds.
    """

    time = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Move the clock in place of waiting; no file is ever ready. Standstill if no
        timer is set.
        """
        if timeout is None:
            raise Standstill("every task waits for another")
        self.time += max(timeout, 0.0)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._jump.time


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in virtual time and return its result. Raises Standstill where
    it would wait forever in real time.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
