"""`megarl eval`: a model, suites, its own servers; answers, results and a table.

    --model ─► subject.py ─► suites.py: prompts ─► settings.json: can it continue what is there?
            ─► a checkpoint is exported ─► servers.py ─► score.py, each answer kept as it comes ─► metrics ─► result.json, table

Re-running asks only questions without an answer. Ctrl-C leaves only complete rows.
"""

import asyncio
import json
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from megarl.core.base.contracts import GraderDown
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, write_atomically
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.evaluation.answers import Answer, Result, SuiteDir
from megarl.core.evaluation.metrics import read_outcomes, result_of, settings_of
from megarl.core.evaluation.score import Asker, Questions, score
from megarl.core.recipe import Recipe
from megarl.lab.evaluation import suites
from megarl.lab.evaluation.servers import OwnServers, own_servers
from megarl.lab.evaluation.show import Progress, table
from megarl.lab.evaluation.subject import Subject, recipe_of, subject_of
from megarl.run.process import lock, outlive_screen
from megarl.tasks.graders.grader import TaskGraders


def main(
    model: str,
    suite: str,
    overrides: Sequence[str],
    samples: int | None,
    limit: int | None,
    data: str | None,
    out: Path | None,
) -> int:
    """0 when all is answered; 1 if a void answer is left, which the same command asks again. The parameters are those of the
    command; None: as the suites say, and the usual directory."""
    outlive_screen()
    console = Console()
    subject = subject_of(model)
    out = out or Path("runs") / "evaluations" / re.sub(r"[^\w@.-]+", "-", subject.name).strip(".-")
    given = {"samples": samples, "prompts": limit, "data": json.dumps(data) if data else None}
    words = [word for word in suite.split(",") if word]
    if not words:
        raise MegarlError("--suite: names none")
    if data and len(words) != 1:
        raise MegarlError("--data: belongs to one suite; of several, give evaluation.suites.NAME.data=SOURCE")
    recipe, names = recipe_of(subject, words, [f"{k}={v}" for k, v in given.items() if v is not None], overrides, out)
    tokenizer = load_tokenizer(subject.hf)
    loaded = [_loaded(name, recipe, tokenizer, console) for name in names]
    with lock(RunDir(recipe.run.path).path, "megarl eval", "--out"):
        settings = {
            questions.name: {"model": subject.identity, "prompts": digest} | settings_of(recipe, questions.rows)
            for questions, digest in loaded
        }
        suite_questions = [_with_earlier(q, SuiteDir(out, q.name), settings[q.name]) for q, _ in loaded]
        if any(q.open for q in suite_questions):
            _ask(subject, recipe, tokenizer, suite_questions, out, console)
        results = [_result(q, subject, SuiteDir(out, q.name), settings[q.name]) for q in suite_questions]
    console.print(table(results))
    console.print(f"answers and results: {out}", highlight=False, soft_wrap=True)
    if any(result.metrics["void_rate"] for result in results):
        print(
            "megarl: some answers could not be generated and count as wrong; the same command asks again",
            file=sys.stderr,
        )
        return 1
    return 0


def _loaded(name: str, recipe: Recipe, tokenizer: Tokenizer, console: Console) -> tuple[Questions[Any], str]:
    """Load a suite's questions, and the digest of its prompts."""
    suite = recipe.evaluation.suites[name]
    loaded = suites.load(name, suite, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate)
    for reason, count in loaded.left_out.items():
        console.print(f"{name}: {count} of {loaded.rows} rows are not asked: {reason}", style="yellow", highlight=False)
    return loaded.questions, loaded.digest


def _with_earlier(questions: Questions[Any], place: SuiteDir, settings: Mapping[str, Any]) -> Questions[Any]:
    """Return the questions with the answers that exist; MegarlError if those were made with other settings."""
    place.path.mkdir(parents=True, exist_ok=True)
    if place.settings.is_file():
        before = json.loads(place.settings.read_bytes())
        changed = [key for key in settings if before.get(key) != settings[key]]
        if changed:
            raise MegarlError(
                f"{place.path}: has answers that were made otherwise: {', '.join(changed)} changed "
                f"(see {place.settings.name}); give another --out, or remove it"
            )
    else:
        write_atomically(place.settings, json.dumps(settings, indent=2).encode() + b"\n")
    return replace(questions, answered=[one for one in read_outcomes(place.answers) if not one.void])


def _ask(
    subject: Subject,
    recipe: Recipe,
    tokenizer: Tokenizer,
    questions: Sequence[Questions[Any]],
    out: Path,
    console: Console,
) -> None:
    """Ask all that is open, keeping each answer as it comes."""
    with ExitStack() as stack:
        if subject.run is not None:
            exported = stack.enter_context(_exported(subject.source, RunDir(recipe.run.path).path / "model"))
            model = recipe.model.model_copy(update={"path": str(exported)})
            recipe = recipe.model_copy(update={"model": model})
        with console.status(f"starting {recipe.resources.servers} server{'s' * (recipe.resources.servers > 1)}"):
            servers = stack.enter_context(own_servers(recipe))
        progress = stack.enter_context(Progress(questions, console))

        def keep(answer: Answer) -> None:
            SuiteDir(out, answer.suite).add(answer)
            progress.count(answer)

        try:
            uvloop.run(_score(recipe, tokenizer, questions, servers, keep))
        except ExceptionGroup as errors:
            raise _first(errors) from None


@contextmanager
def _exported(checkpoint: Path, where: Path) -> Iterator[Path]:
    """Export the checkpoint as a Hugging Face directory for as long as it is needed, in another process: it needs torch."""
    shutil.rmtree(where, ignore_errors=True)  # it may be left, complete, by a process that was killed
    command = [sys.executable, "-m", "checkpoints_tools", "convert", "megatron-to-hf", str(checkpoint), str(where)]
    if subprocess.run(command).returncode:
        raise MegarlError(f"{checkpoint}: could not be exported to {where}; see above")
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)


async def _score(
    recipe: Recipe,
    tokenizer: Tokenizer,
    questions: Sequence[Questions[Any]],
    servers: OwnServers,
    keep: Callable[[Answer], object],
) -> None:
    graders, asked = TaskGraders.of(recipe, tokenizer.decode), servers.asked(tokenizer)
    at_once = recipe.serving.max_running_requests * recipe.resources.servers
    asker = Asker(
        recipe,
        tokenizer,
        asked.clients,
        asked.places,
        asked.sampler,
        graders,
        servers.ids,
        secrets.token_hex(8),
        at_once,
    )
    watching = asyncio.create_task(servers.watch())
    scoring = asyncio.create_task(score(questions, asker, keep))
    try:
        await asyncio.wait((watching, scoring), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        scoring.result()
    finally:
        for task in (watching, scoring):
            task.cancel()
        await asyncio.gather(watching, scoring, return_exceptions=True)
        graders.close()
        await asked.close()


def _first(errors: BaseExceptionGroup[Exception]) -> MegarlError:
    """Return the first failure in words for the user."""
    error = errors.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(error)
    if isinstance(error, GraderDown):
        return MegarlError(f"the grader is down: {error}; what is answered is kept, the same command goes on")
    if isinstance(error, MegarlError):
        return error
    raise error


def _result(questions: Questions[Any], subject: Subject, place: SuiteDir, settings: dict[str, Any]) -> Result:
    """Compute the result for the prompts and samples asked for; an earlier command may have left more answers."""
    wanted = {prompt.id for prompt in questions.prompts}
    there = read_outcomes(place.answers)
    outcomes = [one for one in there if one.id in wanted and one.sample < questions.samples]
    result = result_of(questions.name, subject.name, questions.samples, settings, outcomes)
    place.write_result(result)
    return result
