"""From prompts to finished groups: tickets are admitted while there is room, sampled, graded, written down.

    Mixture ─► draw ─► Admission.admit ─► generations x (Sampler ─► Grader of the task) ─► journal ─► Admission.finish | remove
                  while a server has places free for it                            fsync     the learner may have it now

The order of records in the journal is the order of these events, so a restarted controller goes on exactly as this one would
have: the same tickets, prompts and budgets; of unfinished tickets nothing but the tokens is lost.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.core.base.admission import Admission
from megarl.core.base.contracts import GraderDown, Graders, TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Group, Prompt, Rollout
from megarl.core.controller.draw import Draw, draw_metrics, mixture_of
from megarl.core.controller.parity import Parity
from megarl.core.journal.records import Admitted, Finished, Removed, State
from megarl.core.journal.writer import Ledger
from megarl.core.recipe import Length, Recipe
from megarl.core.sampling import length_control
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import Job, Sampler, Void, routed_layers
from megarl.core.server.membership import Membership
from megarl.core.telemetry.spans import TICKETS, UNRECORDED, Spans

log = logging.getLogger(__name__)


@dataclass
class _Home:
    """The server that a group stays on while that is eligible. began: its version at the group's first request, which left the
    prompt's keys and values in the cache for all others."""

    server: int | None
    began: int | None = None


class Tickets:
    """The tickets of a run. `salt` keeps the cached prefixes of this life apart from those of an earlier one.

    counts: tickets of all lives by what became of them.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: State,
        prompts: Mapping[str, TaskPrompts],
        membership: Membership,
        places: Places,
        sampler: Sampler,
        graders: Graders,
        ledger: Ledger,
        parity: Parity,
        changed: Callable[[], None],
        salt: str,
        spans: Spans = UNRECORDED,
    ) -> None:
        self._recipe, self._salt, self._spans = recipe, salt, spans
        self._prompts = {task: of_task.train for task, of_task in prompts.items()}
        self._at = {task: {p.id: n for n, p in enumerate(of_task)} for task, of_task in self._prompts.items()}
        self._membership, self._places, self._sampler, self._graders = membership, places, sampler, graders
        self._ledger, self._parity, self._changed = ledger, parity, changed
        self.admission: Admission = copy.deepcopy(state.admission)  # the journal's own is its thread's
        self.mixture = mixture_of(recipe, prompts, state)
        self.counts = {"finished": state.finished, "void": state.void, "removed": state.removed}
        self.running: dict[int, asyncio.Task[None]] = {}
        self._routed = routed_layers(recipe)
        self._unfinished = list(state.unfinished.values())

    async def run(self) -> None:
        """Admit and sample until cancelled; fails as its tickets fail."""
        async with asyncio.TaskGroup() as tasks:
            for admitted in self._unfinished:
                self._start(tasks, admitted)
            while True:
                await self._places.changed.wait()
                self._places.changed.clear()
                while self._room():
                    known = self.mixture.exhausted
                    drawn = self.mixture.draw()
                    if drawn is None:
                        if not known:
                            self._changed()  # the run may be over; only once, for a change leads back here
                        break
                    self._admit(tasks, *drawn)
                    # One turn of the loop for the ticket to start its rollouts, one for those to claim their places.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)

    def batches(self) -> int:
        """How many batches are complete, from the first on without a gap."""
        first_unfinished = next(iter(self.admission.unfinished()), None)
        if first_unfinished is not None:
            return self.admission.due(first_unfinished)
        return self.admitted // self._recipe.batch.prompts

    @property
    def admitted(self) -> int:
        """Tickets admitted and not removed."""
        return self.admission.forgotten + len(self.admission.queue)

    def metrics(self, step: int) -> dict[str, float]:
        """Of the row of `step`, which is being taken now."""
        return {
            **draw_metrics(self.mixture),
            "tickets_running": float(len(self.running)),
            "tickets_ahead": float(self.ahead(step)),
        }

    def status(self, step: int) -> dict[str, int]:
        """For RUN/status.json, when `step` is the next one."""
        ahead = self.ahead(step)
        return {
            "window": ahead,
            "window_limit": self._recipe.pipeline.window_steps * self._recipe.batch.prompts,
            "running": len(self.running),
            "waiting": max(0, ahead - len(self.running)),
        } | self.counts

    def ahead(self, step: int) -> int:
        """Tickets drawn and not trained before `step`."""
        return self.admitted - step * self._recipe.batch.prompts

    def _room(self) -> bool:
        """Whether a step will train the next ticket, and a server may work on it and has places nobody else waits for."""
        wanted = self.admitted < self._recipe.run.steps * self._recipe.batch.prompts
        return wanted and self._places.free(self.admission.can_admit) > 0

    def _admit(self, tasks: asyncio.TaskGroup, task: str, drawn: Draw) -> None:
        ticket = self.admission.admit()
        admitted = Admitted(
            ticket=ticket,
            task=task,
            prompt_id=drawn.prompt_id,
            epoch=drawn.epoch,
            due=self.admission.due(ticket),
            reset=drawn.reset,
            pool=drawn.pool,
        )
        self._ledger.write(admitted)
        self._start(tasks, admitted)

    def _start(self, tasks: asyncio.TaskGroup, admitted: Admitted) -> None:
        ticket = admitted.ticket
        self.running[ticket] = tasks.create_task(
            self._finish(admitted, self._prompt(admitted)), name=f"ticket {ticket}"
        )

    def _prompt(self, admitted: Admitted) -> Prompt:
        at = self._at[admitted.task].get(admitted.prompt_id)
        if at is None:
            raise MegarlError(
                f"data.tasks.{admitted.task}.train: ticket {admitted.ticket} of the run was given prompt "
                f"{admitted.prompt_id!r}, which is not in the file any more; put it back, or start a run of another name"
            )
        return self._prompts[admitted.task][at]

    async def _finish(self, admitted: Admitted, prompt: Prompt) -> None:
        """The whole life of a ticket."""
        ticket, begin, removed = admitted.ticket, time.monotonic(), False
        self._spans.open(TICKETS, "ticket", begin, ticket=ticket)
        group = await self._group(admitted, prompt)
        if group.void:
            log.warning("ticket %d is void: %s", ticket, group.void)
        else:
            self.mixture.observe(prompt.task, prompt.id, group.pass_rate)
        if self._recipe.batch.zero_variance == "refill" and not group.void and not group.has_variance:
            tokens = sum(r.trained_tokens for r in group.rollouts)
            await self._ledger.write(
                Removed(ticket=ticket, reason="zero variance", pass_rate=group.pass_rate, generated_tokens=tokens)
            )
            self.admission.remove(ticket)
            self.counts["removed"] += 1
            removed = True
        else:
            await self._ledger.write(Finished(group=group, time=time.time()))
            self.admission.finish(ticket)
            self.counts["finished"] += 1
            self.counts["void"] += bool(group.void)
        del self.running[ticket]
        self._spans.span(
            TICKETS,
            "ticket",
            begin,
            time.monotonic(),
            ticket=ticket,
            task=prompt.task,
            pass_rate=group.pass_rate,
            void=group.void,
            removed=removed,
        )
        self._changed()

    async def _group(self, admitted: Admitted, prompt: Prompt) -> Group:
        ticket, length = admitted.ticket, self._recipe.length.at(admitted.due)
        home = _Home(self._places.emptiest(lambda version: self.admission.eligible(ticket, version)))
        samples = range(self._recipe.sampling.generations)
        void = ""
        rollouts: tuple[Rollout, ...] = ()
        try:
            async with asyncio.TaskGroup() as tasks:
                each = [tasks.create_task(self._rollout(admitted, prompt, home, sample, length)) for sample in samples]
            rollouts = tuple(task.result() for task in each)
        except* (Void, GraderDown) as reasons:
            void = str(reasons.exceptions[0])
        return Group(ticket=ticket, prompt=prompt.shown, rollouts=rollouts, void=void, epoch=admitted.epoch)

    async def _rollout(self, admitted: Admitted, prompt: Prompt, home: _Home, sample: int, length: Length) -> Rollout:
        ticket = admitted.ticket

        def may_use(server: int, version: int) -> bool:
            if server != home.server and self._is_eligible(ticket, home.server):
                return False
            return self.admission.eligible(ticket, version)

        def placed(server: int) -> None:
            home.server = server
            if home.began is None:
                home.began = self._membership.clean_version(server)

        recipe = self._recipe
        budget = length.thinking_tokens[1]
        if length.control == "interruption":
            budget = length_control.thinking_budget(recipe.run.seed, ticket, sample, length.thinking_tokens)
        done = await self._sampler.complete(
            Job(
                prompt=prompt,
                order=(1, ticket, sample),
                may_use=may_use,
                salt=f"{self._salt}/{ticket}",
                thinking_tokens=budget,
                temperature=recipe.sampling.temperature,
                top_p=recipe.sampling.top_p,
                placed=placed,
                routed=self._routed,
            )
        )
        if self._parity.is_chosen(ticket, sample):
            server = None if done.retries else home.server
            self._parity.finished(ticket, sample, admitted.due, prompt, tuple(done.segments), server, home.began)
        begin = time.monotonic()
        grade = await self._graders[prompt.task].grade(done.text, prompt, done.verdict)
        self._spans.span("controller/grading", f"ticket {ticket}.{sample}", begin, time.monotonic())
        return Rollout(
            sample=sample,
            segments=tuple(done.segments),
            reward=length_control.reward(grade, len(done.tokens), length),
            correct=grade.correct,
            finish=done.finish,
            graded=grade.reward,
            interrupted=done.interrupted,
            format_ok=grade.format_ok,
            grader_timeout=grade.timeout,
            grader_error=grade.error,
            rewards=dict(grade.rewards),
            retries=done.retries,
            routing=None if self._routed is None else self._routed.joined(done.routing),
            episode=done.episode,
        )

    def _is_eligible(self, ticket: int, server: int | None) -> bool:
        version = self._membership.clean_version(server)
        return version is not None and self.admission.eligible(ticket, version)
