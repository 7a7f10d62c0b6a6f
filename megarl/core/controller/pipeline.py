"""The pipeline: admits tickets, has their groups made, settles them, schedules
evaluations, and describes the present state.

    Source.draw ─► Admitted ─► GroupPlaces ─► Source.make ─► Finished | Removed
            while a server has places free for it              │ recorded first
                            decision.decide ◄─ view() ◄─ batches()

The controller and the simulator (predict/planning/simulate.py) run this code. They
differ in the `Source` that draws prompts and makes groups, and in where records go: to
the journal, or only into the state. Records are in the order of these events, so a
restarted controller continues with the same tickets, prompts and budgets, and loses
only tokens of unfinished tickets.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from megarl.core.base.types import Group
from megarl.core.controller.decision import ControllerView, is_due
from megarl.core.controller.window import Window
from megarl.core.journal.records import Admitted, Finished, JournalRecord, Removed, State, clock
from megarl.core.recipe import Recipe
from megarl.core.sampling.places import GroupPlaces, Places


class Records(Protocol):
    """The destination of records. `state` is the result of applying all of them."""

    state: State

    def write(self, record: JournalRecord) -> Awaitable[None]:
        """Apply a record to the state. Await the result to be sure that the record
        survives a crash.
        """

    async def settle(self, record: Finished | Removed) -> None:
        """Apply the record that ends a ticket. On return it survives a crash."""


class Source(Protocol):
    """Draws prompts and makes groups from them."""

    def draw(self, ticket: int, step: int) -> Admitted:
        """Return the next prompt for this ticket, which `step` would train."""

    async def make(self, admitted: Admitted, places: GroupPlaces) -> Finished | Removed:
        """Make the group of a ticket, give back all places, and return the record from
        `settled`.
        """


def settled(recipe: Recipe, group: Group, has_gradient: bool) -> Finished | Removed:
    """Return the record that ends a ticket. With `batch.zero_variance: refill`, a group
    without gradient gives up its slot (Removed), unless it is void.
    """
    if recipe.batch.zero_variance != "refill" or group.void or has_gradient:
        return Finished(group=group, time=clock.read())
    tokens = sum(rollout.trained_tokens for rollout in group.rollouts)
    return Removed(
        ticket=group.ticket,
        reason="zero variance",
        pass_rate=group.pass_rate,
        generated_tokens=tokens,
    )


class Pipeline:
    """The tickets of a run. `admission` belongs to the state. changed: called when
    something has changed that a held `Next` may be waiting for. steps: the length of
    the run. admit_steps: the number of steps for which tickets are admitted.
    """

    def __init__(
        self,
        recipe: Recipe,
        records: Records,
        places: Places,
        source: Source,
        changed: Callable[[], None],
        steps: int,
        admit_steps: float,
    ) -> None:
        self.records = records
        self.changed = changed
        self._recipe = recipe
        self._places = places
        self._source = source
        self.final_step = steps
        self._admit_steps = admit_steps
        self.admission = records.state.admission
        self.state = records.state
        self.evaluations = EvaluationSchedule(recipe, places, self.state, steps)
        self.window = Window(recipe, self.state.window)
        self.running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Admit tickets and have their groups made, until cancelled. Raises the errors
        of any ticket.
        """
        async with asyncio.TaskGroup() as tasks:
            for admitted in list(self.state.unfinished.values()):
                self._start(tasks, admitted)
            while True:
                await self._places.changed.wait()
                self._places.changed.clear()
                while self._has_room():
                    self._start(tasks, self._admit())
                    # Let its requests begin: all groups at once would hold the loop up.
                    await asyncio.sleep(0)

    def _admit(self) -> Admitted:
        """Draw the prompt of the next ticket."""
        admitted = self._source.draw(self.admission.next_ticket, self.admission.next_due())
        self.records.write(admitted)
        if self.admitted % self._recipe.batch.prompts == 0:
            self.window.note_drawn(self.admission.next_due())
        return admitted

    def batches(self) -> int:
        """Return the number of complete batches, from the first up to the first
        incomplete one.
        """
        first_unfinished = next(iter(self.admission.unfinished()), None)
        if first_unfinished is not None:
            return self.admission.step_of(first_unfinished)
        return self.admitted // self._recipe.batch.prompts

    @property
    def admitted(self) -> int:
        """Number of tickets admitted and not removed."""
        return self.admission.forgotten + len(self.admission.queue)

    def ahead(self, step: int) -> int:
        """Return the number of tickets drawn, less those trained before `step`."""
        return self.admitted - step * self._recipe.batch.prompts

    def view(self, version: int) -> ControllerView:
        """Return the state for the decision about a learner that has this version."""
        return ControllerView(
            batches=self.batches(),
            oldest=self.admission.forgotten // self._recipe.batch.prompts,
            published_version=self.state.published_version,
            final_step=self.final_step,
            phase_steps=self._recipe.pipeline.phase_steps,
            score_due=self.evaluations.is_due(version) or version in self.evaluations.running,
            membership=self._places.membership,
        )

    def _has_room(self) -> bool:
        """Return whether a step would train another ticket, the window has room, and an
        eligible server has free places.
        """
        if self.admitted >= self._admit_steps * self._recipe.batch.prompts:
            return False
        version = max(self.state.published_version, 0)
        if self.ahead(version) >= self.window.tickets:
            return False
        return self._places.free(self.admission.can_admit) > 0

    def published(self, version: int) -> int:
        """Adapt the window to the times measured up to this publication, and return its
        tickets for the record.
        """
        self.window.note_published(version, self._versions_until_evaluation(version))
        return self.window.tickets

    def _versions_until_evaluation(self, version: int) -> int:
        """Return the number of versions until the next evaluation, 0 while one runs.
        One farther away than the window's lead counts as at its end.
        """
        if self.evaluations.running:
            return 0
        horizon = version + self.window.lead
        for later_version in range(version, min(horizon, self.final_step)):
            if self.evaluations.is_due(later_version):
                return later_version - version
        return horizon - version

    def _start(self, tasks: asyncio.TaskGroup, admitted: Admitted) -> None:
        """Begin to make a ticket's group."""
        ticket = admitted.ticket
        rollouts = self._recipe.sampling.generations
        places = GroupPlaces(self._places, self.admission, ticket, rollouts)
        group = self._settle(admitted, places)
        self.running[ticket] = tasks.create_task(group, name=f"ticket {ticket}")

    async def _settle(self, admitted: Admitted, places: GroupPlaces) -> None:
        """Have the ticket's group made, give back its places, and record the result."""
        ticket = admitted.ticket
        try:
            record = await self._source.make(admitted, places)
        finally:
            places.close()
        await self.records.settle(record)
        del self.running[ticket]
        self.window.note_complete(self.batches())
        self.changed()


class EvaluationSchedule:
    """Decides which versions are evaluated on which servers. running: the servers of
    each running evaluation, by version.
    """

    def __init__(self, recipe: Recipe, places: Places, state: State, steps: int) -> None:
        self._settings = recipe.evaluation
        self._server_limit = recipe.evaluation_servers
        self._steps = steps
        self._membership = places.membership
        self._places = places
        self._state = state
        self.running: dict[int, set[int]] = {}

    def is_due(self, version: int) -> bool:
        """Return whether these weights need an evaluation that has not begun."""
        newest = max((*self._state.evaluations, *self.running), default=None)
        return is_due(version, newest, self._settings, self._steps)

    def pin_servers(self, version: int) -> set[int]:
        """Pin the least busy of the servers that have these weights, and return them;
        empty if no server has them.
        """
        clean = self._membership.clean()
        candidates = [server for server in clean if clean[server] == version]
        candidates.sort(key=lambda server: self._places.use[server].running)
        servers = set(candidates[: self._server_limit])
        for server in servers:
            self._membership.pin(server)
        if servers:
            self.running[version] = servers
        return servers

    def unpin_servers(self, version: int) -> None:
        """Unpin the servers that an evaluation still has."""
        for server in self.running.pop(version):
            self._membership.unpin(server)

    def drop_lost(self) -> list[int]:
        """Drop servers that no longer have an evaluation's weights; return the versions
        that have none left.
        """
        clean = self._membership.clean()
        for version, servers in self.running.items():
            lost_servers = {server for server in servers if clean.get(server) != version}
            servers -= lost_servers  # in place: the evaluation uses this set
        return [version for version, servers in self.running.items() if not servers]

    @property
    def pinned(self) -> int:
        """The number of servers that evaluate now."""
        return sum(len(servers) for servers in self.running.values())
