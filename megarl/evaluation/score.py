"""Score one version of the weights on held-out prompts.

    chosen prompts x samples ─► Sampler on the servers held, before all rollouts ─► Grader ─► outcomes ─► row of eval.jsonl

The rules of interruption are those of training, with the longest thinking budget for all, also while training is at an
earlier stage of `length.stages`: pass rates of all versions can be compared.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from megarl.grading import Graders
from megarl.recipe import Recipe
from megarl.rollout.sampler import Job, Sampler, Void
from megarl.types import Prompt


class Outcome(NamedTuple):
    """What became of one completion."""

    task: str
    correct: bool
    truncated: bool
    interrupted: bool
    format_ok: bool
    tokens: int


def choose(heldout: Iterable[Sequence[Prompt]], count: int) -> list[Prompt]:
    """At most `count` of each task's, the same in every run: the file may be sorted, so not its first ones."""
    return [
        prompt
        for of_task in heldout
        for prompt in sorted(of_task, key=lambda p: hashlib.blake2b(p.id.encode(), digest_size=8).digest())[:count]
    ]


async def score(
    prompts: Sequence[Prompt],
    recipe: Recipe,
    sampler: Sampler,
    graders: Graders,
    servers: Set[int],
    salt: str,
    at_once: int,
) -> list[Outcome]:
    """Outcomes of all prompts x samples, on `servers`, `at_once` at a time. A server that leaves the set is not asked again; if
    all have, this waits for ever: cancel it.

    GraderDown (in an ExceptionGroup) if an answer cannot be graded.
    """
    outcomes: list[Outcome] = []
    jobs = ((n, prompt, sample) for n, prompt in enumerate(prompts) for sample in range(recipe.evaluation.samples))

    async def work(jobs: Iterator[tuple[int, Prompt, int]]) -> None:
        for n, prompt, sample in jobs:
            job = Job(
                prompt=prompt,
                order=(0, n, sample),
                may_use=lambda candidate, _version: candidate in servers,
                salt=salt,
                thinking_tokens=recipe.length.thinking_tokens[1],
                temperature=recipe.evaluation.temperature,
                top_p=recipe.sampling.top_p,
            )
            outcomes.append(await _outcome(job, prompt, sampler, graders))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work(jobs))
    return outcomes


async def _outcome(job: Job, prompt: Prompt, sampler: Sampler, graders: Graders) -> Outcome:
    try:
        done = await sampler.complete(job)
    except Void:
        return Outcome(prompt.task, correct=False, truncated=False, interrupted=False, format_ok=False, tokens=0)
    grade = await graders[prompt.task].grade_answer(done.text, prompt, done.verdict)
    return Outcome(
        prompt.task, grade.correct, done.finish == "length", done.interrupted, grade.format_ok, len(done.tokens)
    )


def row(outcomes: Sequence[Outcome], recipe: Recipe, version: int) -> dict[str, float]:
    """What eval.jsonl says about these outcomes: rates over all completions, whatever their task, and of each task by itself
    (`pass_rate/math`) when there are several."""
    found: dict[str, float] = {"step": version, "weight_version": version, "samples": recipe.evaluation.samples}
    found |= _rates(outcomes, recipe.evaluation.samples)
    if len(recipe.data.tasks) > 1:
        for task in recipe.data.tasks:
            rates = _rates([o for o in outcomes if o.task == task], recipe.evaluation.samples)
            found |= {f"{name}/{task}": value for name, value in rates.items()}
    return found


def _rates(outcomes: Sequence[Outcome], samples: int) -> dict[str, float]:
    """Shares of completions."""
    n = len(outcomes)
    return {
        "pass_rate": sum(o.correct for o in outcomes) / n,
        "n_prompts": n // samples,
        "truncation_rate": sum(o.truncated for o in outcomes) / n,
        "interruption_rate": sum(o.interrupted for o in outcomes) / n,
        "format_error_rate": sum(not o.format_ok for o in outcomes) / n,
        "completion_tokens_mean": sum(o.tokens for o in outcomes) / n,
    }
