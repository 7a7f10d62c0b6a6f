"""Asks the questions of suites: the loop that both a run's evaluations and `megarl
eval` use.

    Questions: prompts x samples ─► answer(), on servers that have the weights ─► Answer ─► keep

    Sampled     Sampler ─► Grader, Votes     answers are sampled here
    Choices     multiple_choice.py           choices are only scored

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
from msgspec import UNSET

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
        return server in self.servers


class Named(Protocol):
    """A question, identified by its id."""

    @property
    def id(self) -> str: ...


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
        there = {(answer.id, answer.sample) for answer in self.answered}
        return [(p, n) for p in self.prompts for n in range(self.samples) if (p.id, n) not in there]

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
        return partial(
            self._answer, asker, Votes(self.rows.grader, asker.graders[self.name], self.answered)
        )

    async def _answer(
        self, asker: Asker, votes: Votes, asked: Prompt, sample: int, order: Order
    ) -> Answer:
        done = Completion()
        void = ""
        grade = Grade(0.0, False, format_ok=True)  # a void answer is not malformed
        grader = asker.graders[self.name]
        settings = asker.recipe.evaluation
        ask = grader.grade if self.rewards else grader.grade_answer
        job = Job(
            prompt=asked,
            order=order,
            take=partial(asker.sampler.servers.places.take, order, asker.may_use),
            salt=asker.salt,
            thinking_tokens=asker.recipe.length.thinking_tokens[1],
            temperature=settings.temperature,
            top_p=settings.top_p,
        )
        try:
            done = await asker.sampler.complete(job)
            if done.down is not None:  # perhaps by the policy's doing
                void = str(done.down)
            else:
                grade = await ask(done.text, asked, done.verdict, done.truncated)
                if math.isnan(grade.reward) and not grade.correct:
                    void = "no grader could judge it"
        except Void as why:
            void = str(why)
        weighted = [
            one.weight * grade.rewards[name] for name, one in self.rewards.items() if grade.rewards
        ]
        text = answer_of(done.text, asker.recipe.length.end_of_thinking)
        return Answer(
            suite=self.name,
            id=asked.id,
            sample=sample,
            prompt=asker.tokenizer.decode(asked.tokens),
            expected=" or ".join(asked.brief.answers),
            completion=(
                done.text if done.episode is None else asker.tokenizer.continued(done.tokens)
            ),
            answer=text,
            vote=await votes.of(asked.id, text, asked.brief.answer, grade.correct),
            correct=grade.correct,
            truncated=not void and done.finish == "length",
            interrupted=done.interrupted,
            format_ok=grade.format_ok,
            grader_timeout=grade.timeout,
            grader_error=grade.error,
            tokens=len(done.tokens),
            entropy=_entropy(done),
            void=void,
            reward=sum(weighted) if weighted else UNSET,
            scores={**grade.rewards, "total": grade.reward} if grade.rewards else UNSET,
            difficulty=asked.difficulty or UNSET,
        )


def choose[Asked: Named](prompts: Iterable[Asked], count: int | None) -> list[Asked]:
    """Return at most `count` prompts (None: all), the same in every run, chosen by hash
    because the file may be sorted.
    """
    return sorted(prompts, key=lambda p: hashlib.blake2b(p.id.encode(), digest_size=8).digest())[
        :count
    ]


async def score(
    questions: Sequence[Questions[Any]], asker: Asker, keep: Callable[[Answer], object]
) -> None:
    """Ask every open question and call `keep` with each answer as it arrives. A server
    removed from `asker.servers` gets no more requests; if none is left, the caller must
    cancel this. GraderDown (in an ExceptionGroup) if one cannot be graded.
    """
    answerers = {suite.name: suite.answerer(asker) for suite in questions}
    open_ones = [(suite, asked, sample) for suite in questions for asked, sample in suite.open]
    left = iter(enumerate(open_ones))

    async def work() -> None:
        for n, (suite, asked, sample) in left:
            keep(await answerers[suite.name](asked, sample, (0, n, sample)))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(asker.at_once, len(open_ones))):
            tasks.create_task(work())


def _entropy(done: Completion) -> float | None:
    logprobs = np.concatenate(
        [np.zeros(0, np.float32), *(s.logprobs for s in done.segments if s.trained)]
    )
    return float(-logprobs.mean(dtype=np.float64)) if len(logprobs) else None
