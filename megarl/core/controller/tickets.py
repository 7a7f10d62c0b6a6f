"""Makes the groups of tickets: draws prompts, has them sampled and graded.

    Mixture ─► draw ─► Admitted ═► make: generations x rollout ─► Group
    a rollout: Sampler ─► teacher, if there is one ─► Grader of the task

pipeline.py does the rest.
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
from megarl.core.controller.parity_schedule import Candidate, Parity, compared
from megarl.core.controller.pipeline import settled
from megarl.core.controller.teacher import TeacherEndpoint
from megarl.core.journal.records import Admitted, Finished, Removed
from megarl.core.recipe import Length, Recipe
from megarl.core.sampling import length_control
from megarl.core.sampling.places import SHORT_PROMPT, GroupPlaces
from megarl.core.sampling.sampler import (
    TRAINING,
    Completion,
    Job,
    Sampler,
    Void,
    routed_model,
)
from megarl.core.telemetry.spans import TICKETS, spans

log = logging.getLogger(__name__)


def with_means(group: Sequence[Rollout], reasons: Sequence[str]) -> tuple[Rollout, ...]:
    """Return the rollouts of a group with a reward for each. One that nothing could
    judge (its reward is NaN) gets the others' mean: so it changes neither the mean nor
    the policy. GraderDown, with the first of the `reasons`, if none was judged.
    """
    judged = [rollout for rollout in group if not math.isnan(rollout.reward)]
    if not judged:
        raise GraderDown(next(iter(reasons), "no answer could be judged; the log has the reason"))
    rewards = [rollout.reward for rollout in judged]
    mean = fmean(rewards)
    if len(set(rewards)) == 1:
        mean = rewards[0]  # exactly: rounding must not give equal rewards a variance
    rollouts = []
    for rollout in group:
        if math.isnan(rollout.reward):
            rollout = replace(rollout, reward=mean, graded=judged[0].graded)
        rollouts.append(rollout)
    return tuple(rollouts)


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
        self._prompts: dict[str, dict[str, Prompt]] = {}  # by task and id
        for task, task_prompts in prompts.items():
            self._prompts[task] = {prompt.id: prompt for prompt in task_prompts.train}
        self._sampler = sampler
        self._graders = graders
        self._parity = parity
        self._teacher = teacher
        self.mixture = mixture
        self._routed = routed_model(recipe)

    def draw(self, ticket: int, step: int) -> Admitted:
        """Draw the prompt of a ticket, which `step` would train."""
        task, draw = self.mixture.draw()
        return Admitted(ticket=ticket, task=task, due_step=step, **draw._asdict())

    async def make(self, admitted: Admitted, places: GroupPlaces) -> Finished | Removed:
        """Make a ticket's group, void if a rollout cannot be made or none can be
        graded; return the record that ends it.
        """
        ticket = admitted.ticket
        start = time.monotonic()
        spans.open(TICKETS, "ticket", start, ticket=ticket)
        prompt = self._prompt(admitted)
        if self._sampler.has_agent(prompt.task):
            # Hold no places while agents start; each of their requests claims one.
            places.close()
        if len(prompt.tokens) < SHORT_PROMPT:
            places.let_others_begin()
        group = await self._group(admitted, prompt, places)
        record = settled(self._recipe, group, bool(groups_in_loss([group], self._recipe.batch)))
        spans.span(
            TICKETS,
            "ticket",
            start,
            time.monotonic(),
            ticket=ticket,
            task=prompt.task,
            pass_rate=group.pass_rate,
            void=group.void,
            removed=isinstance(record, Removed),
        )
        return record

    async def _group(self, admitted: Admitted, prompt: Prompt, places: GroupPlaces) -> Group:
        """Sample and grade all rollouts of a ticket."""
        ticket = admitted.ticket
        length = self._recipe.length.at(admitted.due_step)
        void = ""
        rollouts = tuple[Rollout, ...]()
        ungraded = list[str]()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = []
                for sample in range(self._recipe.sampling.generations):
                    rollout = self._rollout(admitted, prompt, places, sample, length, ungraded)
                    running.append(tasks.create_task(rollout))
            rollouts = with_means([task.result() for task in running], ungraded)
        except* (Void, GraderDown) as reasons:
            void = str(reasons.exceptions[0])
        group = Group(
            ticket=ticket, prompt=prompt.brief, rollouts=rollouts, void=void, epoch=admitted.epoch
        )
        if void:
            log.warning("ticket %d is void: %s", ticket, void)
            return group
        if ungraded:
            log.warning(
                "ticket %d: %d of its rollouts cannot be graded: %s",
                ticket,
                len(ungraded),
                ungraded[0],
            )
        self.mixture.observe(prompt.task, prompt.id, group.pass_rate)
        return group

    def _prompt(self, admitted: Admitted) -> Prompt:
        """Return the ticket's prompt. MegarlError if it is no longer in the data."""
        prompt = self._prompts[admitted.task].get(admitted.prompt_id)
        if prompt is None:
            raise MegarlError(
                f"data.tasks.{admitted.task}.train: ticket {admitted.ticket} of the run was given"
                f" prompt {admitted.prompt_id!r}, which is no longer in the file; restore it, or"
                " start a run with another name"
            )
        return prompt

    async def _rollout(
        self,
        admitted: Admitted,
        prompt: Prompt,
        places: GroupPlaces,
        sample: int,
        length: Length,
        ungraded: list[str],
    ) -> Rollout:
        """Make one rollout of a ticket; if it cannot be graded, its reward is NaN, and
        the reason is appended to `ungraded`.
        """
        ticket = admitted.ticket
        name = f"ticket {ticket}.{sample}"
        completion = await self._sampler.complete(
            self._job(admitted, prompt, places, sample, length)
        )
        self._compare(admitted, prompt, places, sample, completion)
        teacher_logprobs = None
        if self._teacher is not None and completion.segments:
            with spans.timed("controller/teacher", name):
                teacher_logprobs = await self._teacher.logprobs(prompt.tokens, completion.segments)
        with spans.timed("controller/grading", name):
            grade = await self._grade(prompt, completion, ungraded)
        routing = None
        if self._routed and completion.routing:
            routing = await asyncio.to_thread(self._routed.routing, completion.routing)
        return Rollout(
            sample=sample,
            segments=tuple(completion.segments),
            reward=length_control.reward(grade, len(completion.tokens), length),
            correct=grade.correct,
            finish=completion.finish,
            graded=grade.reward,
            interrupted=completion.interrupted,
            format_ok=grade.format_ok,
            grader_timeout=grade.timeout,
            grader_error=grade.error,
            rewards=dict(grade.rewards),
            retries=completion.retries,
            routing=routing,
            episode=completion.episode,
            teacher_logprobs=teacher_logprobs,
            paths=completion.paths,
        )

    def _job(
        self, admitted: Admitted, prompt: Prompt, places: GroupPlaces, sample: int, length: Length
    ) -> Job:
        """Return what to sample for one rollout."""
        recipe = self._recipe
        thinking_tokens = length.thinking_tokens[1]
        if length.control == "interruption":
            thinking_tokens = length_control.thinking_budget(
                recipe.run.seed, admitted.ticket, sample, length.thinking_tokens
            )
        return Job(
            prompt=prompt,
            order=(TRAINING, admitted.ticket, sample),
            take=partial(places.take, sample),
            salt=f"{self._salt}/{admitted.ticket}",
            thinking_tokens=thinking_tokens,
            temperature=recipe.sampling.temperature,
            # Below 1 a server's log-probs would not be over the whole vocabulary, as
            # the learner's are.
            top_p=1.0,
            routed=self._routed,
            started=places.let_others_begin,
        )

    def _compare(
        self,
        admitted: Admitted,
        prompt: Prompt,
        places: GroupPlaces,
        sample: int,
        completion: Completion,
    ) -> None:
        """Give the rollout to parity if it is chosen."""
        ticket = admitted.ticket
        if not self._parity.is_chosen(ticket, sample) or not completion.segments:
            return
        server = places.server
        if completion.retries:
            server = None  # a request was lost, and another server may have gone on
        compared_prompt, segments = compared(
            prompt.tokens, completion.segments, completion.paths, ticket + sample
        )
        self._parity.finished(
            Candidate(
                ticket, sample, admitted.due_step, compared_prompt, segments, server, places.began
            )
        )

    async def _grade(self, prompt: Prompt, completion: Completion, ungraded: list[str]) -> Grade:
        """Return the grade, NaN if nothing can judge the rollout."""
        try:
            if completion.down is not None:
                raise completion.down
            return await self._graders[prompt.task].grade(
                completion.text, prompt, completion.verdict, completion.truncated
            )
        except GraderDown as reason:
            ungraded.append(str(reason))
        # Not malformed: nobody has judged it.
        return Grade(math.nan, False, format_ok=True, error=True)
