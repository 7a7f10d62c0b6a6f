"""The graders of a run: for each task one that decides right or wrong, and others whose
weighted rewards are added.

recipe ─► a Check for each distinct name, which tasks share
    ─┬─ exact, format             in this process, immediately
     ├─ math, reasoning-gym       worker processes (pool.py)
     ├─ code                      sandboxes (code.py)
     ├─ a name of data.services   HTTP (remote.py)
     └─ package.module:function   the user's, in worker processes
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.base.contracts import WRONG, Grade, GraderDown, Verdict, answer_of
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Prompt
from megarl.core.recipe import Recipe, Rows, Task
from megarl.core.recipe.data import GRADERS
from megarl.tasks.data.reasoning_gym import check_package
from megarl.tasks.graders.answer import Submission, graded, judged
from megarl.tasks.graders.code import Code
from megarl.tasks.graders.functions import check_importable
from megarl.tasks.graders.math import has_complete_answer
from megarl.tasks.graders.pool import Pool
from megarl.tasks.graders.remote import Remote, headers
from megarl.tasks.graders.sandbox import Limits, Sandbox, places

log = logging.getLogger(__name__)
Check = Callable[[Submission], Awaitable[Verdict]]
"""Grades a submission. GraderDown if there can be no verdict."""
READS_TRUNCATED = ("math", "exact", "reasoning-gym", "code")
"""Graders for which `length.grade_truncated` counts: with it, a truncated answer is to
them a finished one.
"""
Decode = Callable[[np.ndarray], str]
LIMIT_S = 10.0
"""Time limit for one answer in a worker process; an answer that takes longer is wrong.
"""


async def exact(submission: Submission) -> Verdict:
    """Return right if the answer equals the expected one, up to whitespace."""
    return judged(submission.answer == submission.expected.strip())


async def well_formed(submission: Submission) -> Verdict:
    """Return right if the thinking trace was closed and an answer follows it."""
    return judged(bool(submission.answer))


def _guarded(name: str, check: Check) -> Check:
    """Return the check; an error at an answer, other than those that graders may raise,
    costs that answer its verdict, and not the run.
    """

    async def guarded(submission: Submission) -> Verdict:
        """Return the check's verdict; turn errors that it should not raise into
        GraderDown.
        """
        try:
            return await check(submission)
        except (GraderDown, MegarlError):
            raise
        except Exception as error:
            log.exception(
                "the grader %s failed in a way that nobody foresaw; the answer: %.80r",
                name,
                submission.answer,
            )
            raise GraderDown(f"the grader {name} failed: {type(error).__name__}: {error}") from None

    return guarded


async def any_of(check: Check, submissions: Sequence[Submission]) -> Verdict:
    """Return the best verdict on one answer, compared with each accepted answer until
    one is equal. submissions: the same answer with each accepted one; of none the score
    is NaN.

    If the grader runs out of time, that is the verdict: it would with the others, too.
    """
    best = Verdict(math.nan)
    for submission in submissions:
        verdict = await check(submission)
        if verdict.score > 0 or verdict.timeout:
            return verdict
        if math.isnan(best.score) or verdict.score > best.score:
            best = verdict
    return best


def unless_cut_off(check: Check) -> Check:
    """Return the check, to which a truncated answer is wrong unless it states its
    result completely.
    """

    async def checked(submission: Submission) -> Verdict:
        if submission.truncated and not has_complete_answer(submission.answer):
            return Verdict(WRONG)
        return await check(submission)

    return checked


def as_finished(check: Check) -> Check:
    """Return the check, to which a truncated answer is like a finished one."""

    async def checked(submission: Submission) -> Verdict:
        return await check(submission._replace(truncated=False))

    return checked


def _logged(name: str, check: Check) -> Check:
    """Return the check; it logs its failures, only at each doubling of their number, so
    that the log does not fill.
    """
    failures = 0

    async def logged(submission: Submission) -> Verdict:
        """Return the check's verdict; log failures at each doubling of their number."""
        nonlocal failures
        verdict = await check(submission)
        problem = verdict.error
        if not problem and verdict.timeout:
            problem = "out of time"
        if not problem:
            return verdict
        failures += 1
        is_power_of_two = failures.bit_count() == 1
        if is_power_of_two:
            log.warning(
                "the grader %s failed, and the answer %s (%d so far): %s; the answer: %.80r",
                name,
                "has no verdict" if math.isnan(verdict.score) else "counts as wrong",
                failures,
                problem,
                submission.answer,
            )
        return verdict

    return logged


def check_graders(recipe: Recipe) -> None:
    """Raise MegarlError if a grader's sandbox, function (tried in another process) or
    service key is unusable here.
    """
    for name in _named(recipe):
        if name == "code":
            Sandbox(recipe.data.sandbox, 1).check()
        elif name == "reasoning-gym":
            check_package()
        elif name in recipe.data.services:
            headers(name, recipe.data.services[name])
        elif name not in GRADERS:
            tasks = recipe.sampled.items()
            owner = next(task_name for task_name, task in tasks if name in task.graders)
            key = "data.tasks" if owner in recipe.data.tasks else "evaluation.suites"
            check_importable(f"{key}.{owner}: the grader", name)


def _named(recipe: Recipe) -> list[str]:
    """Return the graders of all tasks and suites, each once."""
    names: set[str] = set()
    for task in recipe.sampled.values():
        names.update(task.graders)
    return sorted(names)


@dataclass(frozen=True)
class TaskGrader:
    """A `Grader`. check: decides right or wrong; compare: the same without a log,
    because it compares answers of the policy, which may be unreadable; others, weights:
    further rewards, by name; trusted: if any, asked only by `grade_answer`, with weight
    0; decode: maps tokens to text.
    """

    check: Check
    compare: Check
    others: Mapping[str, Check]
    weights: Mapping[str, float]
    trusted: Check | None
    end_of_thinking: str
    decode: Decode

    async def grade(
        self, text: str, prompt: Prompt, verdict: Verdict | None = None, truncated: bool = False
    ) -> Grade:
        """Grade a completion, with all rewards. verdict: the main one, if it is known
        without the grader; truncated: whether a length limit cut the completion off.
        """
        submission = self._submission(text, prompt, truncated)
        return await self._grade(submission, prompt, verdict, self.others)

    async def grade_answer(
        self, text: str, prompt: Prompt, verdict: Verdict | None = None, truncated: bool = False
    ) -> Grade:
        """Grade a completion as `grade` does, but with the other rewards only if there
        is a trusted grader, which then judges too.
        """
        others: Mapping[str, Check] = {}
        if self.trusted is not None:
            others = {**self.others, "trusted": self.trusted}
        submission = self._submission(text, prompt, truncated)
        return await self._grade(submission, prompt, verdict, others)

    def _submission(self, text: str, prompt: Prompt, truncated: bool) -> Submission:
        """Return what graders see of a completion, `text`."""
        return Submission(
            answer=answer_of(text, self.end_of_thinking),
            expected=prompt.answer,
            completion=text,
            prompt=self.decode(prompt.tokens),
            task=prompt.task,
            truncated=truncated,
        )

    async def _grade(
        self,
        submission: Submission,
        prompt: Prompt,
        verdict: Verdict | None,
        others: Mapping[str, Check],
    ) -> Grade:
        """Grade a submission with the main grader (or `verdict`, if given) and the
        others, all at once; each compares it with every accepted answer.
        """
        submissions = [submission._replace(expected=expected) for expected in prompt.answers]
        checks = [any_of(check, submissions) for check in others.values()]
        main, *verdicts = await asyncio.gather(self._judge(submissions, verdict), *checks)
        named_verdicts = dict(zip(others, verdicts, strict=True))
        weights = {"trusted": 0.0, **self.weights}  # its verdict is only recorded
        return graded(submission.answer, main, named_verdicts, weights)

    async def agrees(self, answer: str, expected: str) -> bool:
        """Return whether two answers of the policy are the same."""
        verdict = await self.compare(Submission(answer, expected))
        return verdict.score > 0

    async def _judge(self, submissions: Sequence[Submission], verdict: Verdict | None) -> Verdict:
        """Return the main verdict: the given one, if any, or the grader's. An empty
        answer is wrong without asking it.
        """
        if verdict is not None:
            return verdict
        if not submissions[0].answer:
            return Verdict(WRONG)
        return await any_of(self.check, submissions)


class TaskGraders:
    """The graders of a recipe's tasks and suites, by name. Create it within a running
    event loop. workers: processes per pool, and programs at once (default: `places()`);
    limit_s: time limit for one answer in a worker; limits: those of a program.
    MegarlError as in `check_graders`.
    """

    def __init__(
        self,
        recipe: Recipe,
        decode: Decode,
        workers: int | None = None,
        limit_s: float = LIMIT_S,
        limits: Limits | None = None,
    ) -> None:
        self._recipe = recipe
        self._decode = decode
        self._workers = workers or places()
        self._limit_s = limit_s
        self._limits = limits
        self._pools: list[Pool] = []
        check_graders(recipe)
        self._silent_checks = {
            name: _guarded(name, self._new_check(name)) for name in _named(recipe)
        }
        self._logging_checks = {
            name: _logged(name, check) for name, check in self._silent_checks.items()
        }
        self._graders = {name: self._grader(task) for name, task in recipe.sampled.items()}

    def __getitem__(self, task: str) -> TaskGrader:
        return self._graders[task]

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._pools:
            pool.close()

    def _grader(self, task: Rows) -> TaskGrader:
        """Return the grader of a task or suite, made of checks that others share."""
        trusted = None
        if isinstance(task, Task) and task.trusted_grader:
            trusted = self._logging_checks[task.trusted_grader]
        return TaskGrader(
            check=self._logging_checks[task.grader],
            # Compares the policy's answers with each other, and may often fail.
            compare=self._silent_checks[task.grader],
            others={
                name: self._logging_checks[reward.grader] for name, reward in task.rewards.items()
            },
            weights={name: reward.weight for name, reward in task.rewards.items()},
            trusted=trusted,
            end_of_thinking=self._recipe.length.end_of_thinking,
            decode=self._decode,
        )

    def _new_check(self, name: str) -> Check:
        """Return a check, with the recipe's rule for truncated answers. Programs need
        none: the code grader itself looks for a closed block.
        """
        check = self._bare_check(name)
        if self._recipe.length.grade_truncated and name in READS_TRUNCATED:
            return as_finished(check)
        if name in READS_TRUNCATED and name != "code":
            return unless_cut_off(check)
        return check

    def _bare_check(self, name: str) -> Check:
        """Return the check of this name, without regard to truncated answers. It may
        start a pool of worker processes, which `close` ends.
        """
        if name == "exact":
            return exact
        if name == "format":
            return well_formed
        data = self._recipe.data
        if name == "code":
            return Code(Sandbox(data.sandbox, self._workers, self._limits)).check
        if name in data.services:
            return Remote(name, data.services[name]).check
        pool = Pool(self._workers, self._limit_s, name)
        self._pools.append(pool)
        return pool.check
