"""Ask prompts of suites and grade what is answered: the one loop of a run's evaluations and of `megarl eval`.

    Questions: prompts x samples ─► Sampler, on servers that hold the weights ─► Grader, Votes ─► Answer ─► keep

The rules of interruption are those of training, with the longest thinking budget for all, also while training is at an
earlier stage of `length.stages`: scores of all versions can be compared.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET, UnsetType

from megarl.evaluation.answers import Answer
from megarl.evaluation.votes import Votes
from megarl.grading import Grade, Graders
from megarl.grading.answer import answer_of
from megarl.recipe import Recipe, Rows
from megarl.rollout.sampler import Completion, Job, Sampler, Void
from megarl.types import Prompt


@dataclass(frozen=True)
class Questions:
    """Of one suite, or of a task's held-out prompts. answered: what needs no answer any more."""

    name: str
    rows: Rows
    prompts: Sequence[Prompt]
    samples: int
    answered: Sequence[Answer] = ()

    @property
    def open(self) -> list[tuple[Prompt, int]]:
        """Prompts and samples that are to be asked."""
        there = {(answer.id, answer.sample) for answer in self.answered}
        return [(p, n) for p in self.prompts for n in range(self.samples) if (p.id, n) not in there]


@dataclass(frozen=True)
class Asker:
    """Who is asked, and who grades. servers: that may be asked now; at_once: answers at a time; salt: of cached prefixes."""

    recipe: Recipe
    sampler: Sampler
    graders: Graders
    decode: Callable[[np.ndarray], str]
    servers: Set[int]
    salt: str
    at_once: int


def choose(prompts: Iterable[Prompt], count: int | None) -> list[Prompt]:
    """At most `count`, the same in every run: the file may be sorted, so not its first ones. None: all."""
    return sorted(prompts, key=lambda p: hashlib.blake2b(p.id.encode(), digest_size=8).digest())[:count]


async def score(questions: Sequence[Questions], asker: Asker, keep: Callable[[Answer], object]) -> None:
    """Ask all that is open; `keep` is called with each answer as it comes. A server that leaves the set is not asked again; if
    all have, this waits for ever: cancel it.

    GraderDown (in an ExceptionGroup) if an answer cannot be graded.
    """
    votes = {q.name: Votes(q.rows.grader, asker.graders[q.name], q.answered) for q in questions}
    open_ones = [(q, prompt, sample) for q in questions for prompt, sample in q.open]
    jobs = ((n, *one) for n, one in enumerate(open_ones))

    async def work(jobs: Iterator[tuple[int, Questions, Prompt, int]]) -> None:
        for n, of, prompt, sample in jobs:
            keep(await _answer(of, prompt, sample, (0, n, sample), asker, votes[of.name]))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(asker.at_once, len(open_ones))):
            tasks.create_task(work(jobs))


async def _answer(
    of: Questions, prompt: Prompt, sample: int, order: tuple[int, int, int], asker: Asker, votes: Votes
) -> Answer:
    recipe = asker.recipe
    job = Job(
        prompt=prompt.tokens,
        order=order,
        may_use=lambda candidate, _version: candidate in asker.servers,
        salt=asker.salt,
        thinking_tokens=recipe.length.thinking_tokens[1],
        temperature=recipe.evaluation.temperature,
        top_p=recipe.sampling.top_p,
    )
    void, done, grade = "", Completion(), Grade(0.0, correct=False, format_ok=False)
    reward: float | UnsetType = UNSET
    try:
        done = await asker.sampler.complete(job)
    except Void as why:
        void = str(why)
    else:
        grader = asker.graders[of.name]
        if of.rows.rewards:
            grade = await grader.grade(done.text, prompt)
            reward = sum(one.weight * grade.rewards[name] for name, one in of.rows.rewards.items())
        else:
            grade = await grader.grade_answer(done.text, prompt)
    answer = answer_of(done.text, recipe.length.end_of_thinking)
    return Answer(
        suite=of.name,
        id=prompt.id,
        sample=sample,
        prompt=asker.decode(prompt.tokens),
        expected=prompt.answer,
        completion=done.text,
        answer=answer,
        vote=await votes.of(prompt.id, answer, prompt.answer, grade.correct),
        correct=grade.correct,
        truncated=not void and done.finish == "length",
        interrupted=done.interrupted,
        format_ok=grade.format_ok,
        grader_timeout=grade.timeout,
        grader_error=grade.error,
        tokens=len(done.tokens),
        entropy=_entropy(done),
        void=void,
        reward=reward,
    )


def _entropy(done: Completion) -> float | None:
    """Mean of -log p over the tokens that were sampled."""
    logprobs = np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in done.segments if s.trained)])
    return float(-logprobs.mean(dtype=np.float64)) if len(logprobs) else None
