"""Makes the groups of tickets: draws prompts, has them sampled and graded.

Mixture ─► draw ─► Admitted ═► make: generations x (Sampler ─► teacher, if any ─► Grader of the task) ─► Group
                                                                                       (pipeline.py
                                                                                       does
                                                                                       the
                                                                                       rest)
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from msgspec.structs import replace

from megarl.core.algorithm.batch import groups_in_loss
from megarl.core.base.contracts import Grade, GraderDown, Graders, TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Group, Prompt, Rollout
from megarl.core.controller.draw import Mixture
from megarl.core.controller.parity import Candidate, Parity, compared
from megarl.core.controller.pipeline import settled
from megarl.core.controller.teacher import TeacherEndpoint
from megarl.core.journal.records import Admitted, Finished, Removed
from megarl.core.recipe import Length, Recipe
from megarl.core.sampling import length_control
from megarl.core.sampling.places import SHORT_PROMPT, GroupPlaces
from megarl.core.sampling.sampler import Job, Sampler, Void, routed_model
from megarl.core.telemetry.spans import TICKETS, spans

log = logging.getLogger(__name__)


def with_means(group: Sequence[Rollout], reasons: Sequence[str]) -> tuple[Rollout, ...]:
    """Return the rollouts of a group; one without a reward (NaN), because nothing could
    judge it, gets the others' mean. So it moves neither that mean nor the policy.
    GraderDown, with the first of the `reasons`, if none has a reward.
    """
    judged = [rollout for rollout in group if not math.isnan(rollout.reward)]
    if not judged:
        raise GraderDown(next(iter(reasons), "no answer could be judged; the log has the reason"))
    rewards = [rollout.reward for rollout in judged]
    mean = (
        rewards[0] if len(set(rewards)) == 1 else fmean(rewards)
    )  # of equal rewards it must be the same number
    return tuple(
        replace(r, reward=mean, graded=judged[0].graded) if math.isnan(r.reward) else r
        for r in group
    )


class Tickets:
    """Makes a run's groups. salt: new at each start of the controller, so that servers
    do not use prefixes cached before it.
    """

    def __init__(
        self,
        recipe: Recipe,
        prompts: Mapping[str, TaskPrompts],
        mixture: Mixture,
        sampler: Sampler,
        graders: Graders,
        parity: Parity,
        salt: str,
        teacher: TeacherEndpoint | None = None,
    ) -> None:
        self._recipe = recipe
        self._salt = salt
        self._prompts = {task: of_task.train for task, of_task in prompts.items()}
        self._at = {
            task: {p.id: n for n, p in enumerate(of_task)}
            for task, of_task in self._prompts.items()
        }
        self._sampler = sampler
        self._graders = graders
        self._parity = parity
        self._teacher = teacher
        self.mixture = mixture
        self._routed = routed_model(recipe)

    def draw(self, ticket: int, due: int) -> Admitted:
        task, drawn = self.mixture.draw()
        return Admitted(ticket=ticket, task=task, due=due, **drawn._asdict())

    async def make(self, admitted: Admitted, places: GroupPlaces) -> Finished | Removed:
        """Make a ticket's group, void if a rollout cannot be made or none can be
        graded; return the record that ends it.
        """
        ticket = admitted.ticket
        begin = time.monotonic()
        length = self._recipe.length.at(admitted.due)
        spans.open(TICKETS, "ticket", begin, ticket=ticket)
        prompt = self._prompt(admitted)
        void = ""
        if self._sampler.has_agent(prompt.task):
            places.close()  # hold no places while agents start; each of their requests claims one
        if len(prompt.tokens) < SHORT_PROMPT:
            places.cached()
        rollouts = tuple[Rollout, ...]()
        down = list[str]()
        try:
            async with asyncio.TaskGroup() as tasks:
                each = [
                    tasks.create_task(self._rollout(admitted, prompt, places, sample, length, down))
                    for sample in range(self._recipe.sampling.generations)
                ]
            rollouts = with_means([task.result() for task in each], down)
        except* (Void, GraderDown) as reasons:
            void = str(reasons.exceptions[0])
        group = Group(
            ticket=ticket, prompt=prompt.shown, rollouts=rollouts, void=void, epoch=admitted.epoch
        )
        if void:
            log.warning("ticket %d is void: %s", ticket, void)
        else:
            if down:
                log.warning(
                    "ticket %d: %d of its rollouts cannot be graded: %s", ticket, len(down), down[0]
                )
            self.mixture.observe(prompt.task, prompt.id, group.pass_rate)
        record = settled(self._recipe, group, bool(groups_in_loss([group], self._recipe.batch)))
        spans.span(
            TICKETS,
            "ticket",
            begin,
            time.monotonic(),
            ticket=ticket,
            task=prompt.task,
            pass_rate=group.pass_rate,
            void=void,
            removed=isinstance(record, Removed),
        )
        return record

    def _prompt(self, admitted: Admitted) -> Prompt:
        at = self._at[admitted.task].get(admitted.prompt_id)
        if at is None:
            raise MegarlError(
                f"data.tasks.{admitted.task}.train: ticket {admitted.ticket} of the run was given"
                f" prompt {admitted.prompt_id!r}, which is no longer in the file; restore it, or"
                " start a run with another name"
            )
        return self._prompts[admitted.task][at]

    async def _rollout(
        self,
        admitted: Admitted,
        prompt: Prompt,
        places: GroupPlaces,
        sample: int,
        length: Length,
        down: list[str],
    ) -> Rollout:
        """Make one rollout of a ticket; if it cannot be graded, its reward is NaN, and
        the reason is appended to `down`.
        """
        ticket = admitted.ticket
        recipe = self._recipe
        budget = length.thinking_tokens[1]
        if length.control == "interruption":
            budget = length_control.thinking_budget(
                recipe.run.seed, ticket, sample, length.thinking_tokens
            )
        done = await self._sampler.complete(
            Job(
                prompt=prompt,
                order=(1, ticket, sample),
                take=partial(places.take, sample),
                salt=f"{self._salt}/{ticket}",
                thinking_tokens=budget,
                temperature=recipe.sampling.temperature,
                # below 1 a server's log-probs would not be over the whole vocabulary,
                # as the learner's are
                top_p=1.0,
                routed=self._routed,
                started=places.cached,
            )
        )
        if self._parity.is_chosen(ticket, sample) and done.segments:
            server = None if done.retries else places.server
            before, segments = compared(prompt.tokens, done.segments, done.paths, ticket + sample)
            self._parity.finished(
                Candidate(ticket, sample, admitted.due, before, segments, server, places.began)
            )
        name = f"ticket {ticket}.{sample}"
        scores = None
        if self._teacher is not None and done.segments:
            with spans.timed("controller/teacher", name):
                scores = await self._teacher.logprobs(prompt.tokens, done.segments)
        with spans.timed("controller/grading", name):
            try:
                if done.down is not None:
                    raise done.down
                grade = await self._graders[prompt.task].grade(
                    done.text, prompt, done.verdict, done.truncated
                )
            except GraderDown as why:
                down.append(str(why))
                grade = Grade(
                    math.nan, False, format_ok=True, error=True
                )  # not malformed: nobody has judged it
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
            routing=self._routed.routing(done.routing) if self._routed and done.routing else None,
            episode=done.episode,
            teacher_logprobs=scores,
            paths=done.paths,
        )
