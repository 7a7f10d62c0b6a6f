"""The grader of a run: `exact` at once, `math` in worker processes."""

from typing import Literal

from megarl.grading.answer import Grade, answer_of, graded
from megarl.grading.pool import Pool


class Grader:
    """Grades completions; made within a running event loop.

    workers: processes for `math`. limit_s: for one answer; one that takes longer is wrong (Grade.timeout).
    """

    def __init__(self, kind: Literal["math", "exact"], end_of_thinking: str, workers: int, limit_s: float) -> None:
        self._end_of_thinking = end_of_thinking
        self._pool = Pool(workers, limit_s) if kind == "math" else None

    async def grade(self, text: str, expected: str) -> Grade:
        """The grade of a completion's text, `expected` being the right answer. GraderDown if no worker can be had."""
        answer = answer_of(text, self._end_of_thinking)
        if not answer:
            return graded(answer, correct=False)
        if self._pool is None:
            return graded(answer, answer == expected.strip())
        verdict = await self._pool.check(answer, expected)
        return graded(answer, verdict.correct, verdict.timeout)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
