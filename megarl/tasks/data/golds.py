"""Finds the expected answers that the grader `math` cannot read as a whole, before a
run trains on them.

    answers of a set ──► those that are not plainly numbers, once each
        ──► processes ──► unreadable

An answer that is not read as a whole is right only if it is the same text, and an
answer comes from strangers: reading it may take forever or all memory. So other
processes read (pool.py), each answer within LIMIT_S.
"""

import asyncio
import os
import re
import resource
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from megarl.core.base.contracts import GraderDown
from megarl.core.base.errors import MegarlError, first_of, listed
from megarl.core.base.process import imported
from megarl.core.base.types import Prompt
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import MEMORY_BYTES
from megarl.tasks.graders.pool import Pool

READER = "megarl.tasks.data.golds:is_readable"
"""What the processes run, as a grader of answers: right if it can read the expected
one.
"""
LIMIT_S = 2.0
"""Time for one answer; one that takes longer is unreadable."""
MOST_WORKERS = 32
"""Most processes; nothing else runs yet, so each core may have one."""
MOST_HOSTILE = 50
"""Answers that may run out of time or end their process; a set with more is refused."""
PLAIN = re.compile(
    r"-?(?:\d{1,15}(?:\.\d{1,15})?|\d{1,15}/[1-9]\d{0,14}|\\d?frac\{\d{1,15}\}\{[1-9]\d{0,14}\})"
)
"""Numbers that are certainly readable: most answers of most sets."""
EXAMPLES = 3

type Accepted = tuple[str, ...]
"""All accepted answers of a row."""

readability: dict[str, bool] = {}
"""Whether an answer can be read, for all that this process has asked about."""


def is_readable(submission: Submission) -> bool:
    """Return whether the grader `math` reads an expected answer as a whole. Runs in a
    process.
    """
    _limit_memory()
    readable = imported("megarl.tasks.graders.math:readable")
    return bool(readable(submission.expected))


@cache
def _limit_memory() -> None:
    """Limit this process's memory, at the first call."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def is_plain(answers: Accepted) -> bool:
    """Return whether one of a row's answers is plainly a number."""
    return any(PLAIN.fullmatch(answer.strip()) for answer in answers)


def unreadable(rows: Iterable[Accepted]) -> frozenset[Accepted]:
    """Return the answers of those rows of which none can be read. rows: all accepted
    answers of each row. Shows progress in a terminal.

    MegarlError if the processes fail, or too many answers run out of time.
    """
    doubtful = [answers for answers in dict.fromkeys(rows) if not is_plain(answers)]
    if not doubtful:
        return frozenset()
    texts = dict.fromkeys(text for answers in doubtful for text in answers)
    unread = [text for text in texts if text not in readability]
    if unread:
        asyncio.run(_read_all(unread))
    return frozenset(answers for answers in doubtful if not _any_readable(answers))


def _any_readable(answers: Accepted) -> bool:
    """Return whether one of a row's answers can be read; all have been asked about."""
    return any(readability[text] for text in answers)


async def _read_all(texts: Sequence[str]) -> None:
    """Note in `readability` for each text whether it can be read. MegarlError as in
    `unreadable`.
    """
    hostile: list[str] = []
    remaining = iter(texts)
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)), len(texts))
    pool = Pool(workers, LIMIT_S, READER)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reading answers", total=len(texts))

        async def read_next() -> None:
            """Have texts read until none is left; several do that at the same time."""
            for text in remaining:
                readability[text] = await _reads(pool, text, hostile)
                progress.advance(bar)

        try:
            # GraderDown here means that no process starts, and not that a text ends it.
            await pool.check(Submission("", "1"))
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(read_next())
        except GraderDown as down:
            raise MegarlError(f"answers cannot be read: {down}") from None
        except ExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            await pool.end()


async def _reads(pool: Pool, text: str, hostile: list[str]) -> bool:
    """Return whether an answer can be read. hostile: the answers so far that ended
    their process or took too long; this one is added if it does, too. MegarlError if
    there are more than MOST_HOSTILE.
    """
    try:
        verdict = await pool.check(Submission("", text))
        is_hostile = verdict.timeout
        is_read = verdict.score > 0
    except GraderDown:  # it ends each process that reads it
        is_hostile = True
        is_read = False
    if is_hostile:
        hostile.append(text)
    if len(hostile) > MOST_HOSTILE:
        problem = (
            f"more than {MOST_HOSTILE} answers end the process that reads them, or take over"
            f" {LIMIT_S:g} s; correct them:"
        )
        raise MegarlError(listed(problem, [repr(answer[:60]) for answer in hostile]))
    return is_read


def described(count: int, total: int, examples: Iterable[str]) -> str:
    """Say how many of a set's answers cannot be read, with the first examples."""
    such = ", ".join(repr(example[:80]) for example in islice(examples, EXAMPLES))
    return f"`grader: math` cannot read {count:,} of {total:,} answers as a whole, such as {such}"


def unreadable_in(prompts: Sequence[Prompt]) -> "Unread":
    """Find the prompts whose answers cannot be read."""
    answers = [prompt.answers for prompt in prompts]
    unread = unreadable(answers)
    places = frozenset(n for n, accepted in enumerate(answers) if accepted in unread)
    return Unread(places, prompts)


class Unread(NamedTuple):
    """The places of prompts whose answers cannot be read."""

    places: frozenset[int]
    prompts: Sequence[Prompt]

    def __str__(self) -> str:
        first = (self.prompts[n] for n in sorted(self.places))
        examples = (f"{prompt.id}: {' or '.join(prompt.answers)}" for prompt in first)
        return described(len(self.places), len(self.prompts), examples)
