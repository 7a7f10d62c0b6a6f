"""Asks the questions of suites: the loop that both a run's evaluations and `megarl
eval` use.

    Questions: prompts x samples ─► answer(), on servers that have the weights
                                 ─► Answer ─► keep

    Sampled     Sampler ─► Grader, Votes     answers are sampled here
    Documents   tasks/suites/harness.py    rows of lm-eval's tasks

Interruption works as in training, with the longest thinking budget even during earlier
stages of `length.stages`, so that scores of all versions are comparable.
"""

import asyncio
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET, UnsetType

from megarl.core.base.contracts import Grade, Graders, answer_of
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt
from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.metrics import Outcome
from megarl.core.evaluation.votes import Votes
from megarl.core.recipe import Recipe, Reward, Rows
from megarl.core.sampling.places import Order
from megarl.core.sampling.sampler import Completion, Job, Sampler, Void


@dataclass(frozen=True)
class Asker:
    """The servers and graders of an evaluation."""

    recipe: Recipe
    tokenizer: Tokenizer
    sampler: Sampler
    graders: Graders
    servers: Set[int]  # ids of those that may be asked now
    salt: str  # for cached prefixes
    at_once: int  # number of concurrent answers

    def may_use(self, server: int, _version: int) -> bool:
        """Return whether a request may go to this server, whatever its version."""
        return server in self.servers


class Named(Protocol):
    """A question, identified by its id."""

    @property
    def id(self) -> str:
        """Unique in its suite."""
        ...


@dataclass(frozen=True)
class Questions[Asked: Named](ABC):
    """The questions of one suite, or of a task's held-out prompts. answered: answers
    that exist already.
    """

    name: str
    prompts: Sequence[Asked]
    samples: int
    answered: Sequence[Outcome] = ()
    rows: Rows = field(kw_only=True)

    @property
    def open(self) -> list[tuple[Asked, int]]:
        """The prompts and sample numbers that have no answer yet."""
        answered = {(answer.id, answer.sample) for answer in self.answered}
        questions: list[tuple[Asked, int]] = []
        for prompt in self.prompts:
            for sample in range(self.samples):
                if (prompt.id, sample) not in answered:
                    questions.append((prompt, sample))
        return questions

    @abstractmethod
    def answerer(self, asker: Asker) -> Callable[[Asked, int, Order], Awaitable[Answer]]:
        """Return a function that answers one question, given the sample's number and
        the order of the request. The answer is void if nothing can be generated, or it
        cannot be judged. GraderDown if no answer can be graded.
        """


@dataclass(frozen=True)
class Sampled(Questions[Prompt]):
    """Questions whose answers are sampled and graded. rewards: the suite's, to choose
    the best of several answers.
    """

    rewards: Mapping[str, Reward] = field(default_factory=dict, kw_only=True)

    def answerer(self, asker: Asker) -> Callable[[Prompt, int, Order], Awaitable[Answer]]:
        """Return a function that samples and grades an answer."""
        votes = Votes(self.rows.grader, asker.graders[self.name], self.answered)
        return partial(self._answer, asker, votes)

    async def _answer(
        self, asker: Asker, votes: Votes, prompt: Prompt, sample: int, order: Order
    ) -> Answer:
        """Sample and grade one answer. votes: of this suite. The answer is void, with
        the reason, if it cannot be generated or judged.
        """
        completion = Completion()
        void = ""
        grade = Grade(0.0, False, format_ok=True)  # a void answer is not malformed
        try:
            completion = await asker.sampler.complete(_job(asker, prompt, order))
            if completion.down is not None:  # perhaps by the policy's doing
                void = str(completion.down)
            else:
                grade = await self._grade(asker, prompt, completion)
                if math.isnan(grade.reward) and not grade.correct:
                    void = "no grader could judge it"
        except Void as reason:
            void = str(reason)
        text = answer_of(completion.text, asker.recipe.length.end_of_thinking)
        completion_text = completion.text
        if completion.episode is not None:
            completion_text = asker.tokenizer.continued(completion.tokens)
        return Answer(
            suite=self.name,
            id=prompt.id,
            sample=sample,
            prompt=asker.tokenizer.decode(prompt.tokens),
            expected=" or ".join(prompt.brief.answers),
            completion=completion_text,
            answer=text,
            vote=await votes.of(prompt.id, text, prompt.brief.answer, grade.correct),
            correct=grade.correct,
            truncated=not void and completion.finish == "length",
            interrupted=completion.interrupted,
            format_ok=grade.format_ok,
            grader_timeout=grade.timeout,
            grader_error=grade.error,
            tokens=len(completion.tokens),
            entropy=_entropy(completion),
            void=void,
            reward=self._weighted_reward(grade),
            scores={**grade.rewards, "total": grade.reward} if grade.rewards else UNSET,
            difficulty=prompt.difficulty or UNSET,
        )

    async def _grade(self, asker: Asker, prompt: Prompt, completion: Completion) -> Grade:
        """Grade an answer: with further rewards if the suite has them, else only
        whether it is right.
        """
        grader = asker.graders[self.name]
        grade = grader.grade if self.rewards else grader.grade_answer
        return await grade(completion.text, prompt, completion.verdict, completion.truncated)

    def _weighted_reward(self, grade: Grade) -> float | UnsetType:
        """Return the suite's reward; UNSET if it has none, or nothing was graded."""
        if not grade.rewards or not self.rewards:
            return UNSET
        weighted = []
        for name, reward in self.rewards.items():
            weighted.append(reward.weight * grade.rewards[name])
        return sum(weighted)


def _job(asker: Asker, prompt: Prompt, order: Order) -> Job:
    """Return the sampler's job for one answer to this prompt."""
    settings = asker.recipe.evaluation
    return Job(
        prompt=prompt,
        order=order,
        take=partial(asker.sampler.servers.places.take, order, asker.may_use),
        salt=asker.salt,
        thinking_tokens=asker.recipe.length.thinking_tokens[1],
        temperature=settings.temperature,
        top_p=settings.top_p,
    )


def choose[Asked: Named](prompts: Iterable[Asked], count: int | None) -> list[Asked]:
    """Return at most `count` prompts (None: all), the same in every run, chosen by hash
    because the file may be sorted.
    """

    def hashed(prompt: Asked) -> bytes:
        return hashlib.blake2b(prompt.id.encode(), digest_size=8).digest()

    return sorted(prompts, key=hashed)[:count]


async def score(
    questions: Sequence[Questions[Any]], asker: Asker, keep: Callable[[Answer], object]
) -> None:
    """Ask every open question and call `keep` with each answer as it arrives. A server
    removed from `asker.servers` gets no more requests; if none is left, the caller must
    cancel this. GraderDown (in an ExceptionGroup) if one cannot be graded.
    """
    answerers = {suite.name: suite.answerer(asker) for suite in questions}
    open_questions: list[tuple[str, Any, int]] = []
    for suite in questions:
        for prompt, sample in suite.open:
            open_questions.append((suite.name, prompt, sample))
    remaining = iter(enumerate(open_questions))  # shared by all workers

    async def work() -> None:
        """Ask one question after the other, until none is left."""
        for n, (name, prompt, sample) in remaining:
            order = (0, n, sample)  # 0: of an evaluation
            keep(await answerers[name](prompt, sample, order))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(asker.at_once, len(open_questions))):
            tasks.create_task(work())


def _entropy(completion: Completion) -> float | None:
    """Return the mean surprise of the sampled tokens, in nats; None without any."""
    sampled = [s.logprobs for s in completion.segments if s.trained]
    logprobs = np.concatenate([np.zeros(0, np.float32), *sampled])
    if not len(logprobs):
        return None
    return float(-logprobs.mean(dtype=np.float64))
