"""`megarl eval`: a model, suites, its own servers; answers, results and a table.

    --model ─► subject.py ─► suites.py: prompts ─► settings.json: can it continue what is there?
            ─► a checkpoint is exported ─► servers.py ─► score.py, each answer kept as it comes ─► metrics ─► result.json, table

Re-running asks only questions without an answer. Ctrl-C leaves only complete rows.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.console import Console

from megarl.core.base.contracts import GraderDown
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, write_atomically
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.evaluation.answers import Answer, SuiteDir
from megarl.core.evaluation.metrics import read_outcomes, result_of, settings_of
from megarl.core.evaluation.score import score
from megarl.core.recipe import Recipe
from megarl.lab.evaluation import suites
from megarl.lab.evaluation.servers import OwnServers, own_servers
from megarl.lab.evaluation.show import counted, table
from megarl.lab.evaluation.subject import Subject, recipe_of, subject_of
from megarl.lab.evaluation.suites import SuiteQuestions
from megarl.run.process import lock, outlive_screen


def main(
    model: str, suite: str, overrides: Sequence[str], samples: int | None, limit: int | None, data: str | None, out: Path | None
) -> int:  # fmt: skip
    """Return 0 when all is answered; 1 if a void answer is left. None: as the suites say, and the usual directory."""
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
    questions, results = [], []
    with lock(RunDir(recipe.run.path).path, "megarl eval", "--out"):
        for name in names:
            rows = recipe.evaluation.suites[name]
            loaded = suites.load(name, rows, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate)
            for reason, count in loaded.left_out.items():
                text = f"{name}: {count} of {loaded.rows} rows are not asked: {reason}"
                console.print(text, style="yellow", highlight=False)
            settings = {"model": subject.identity, "prompts": loaded.digest} | settings_of(recipe, rows)
            questions.append((_with_earlier(loaded.questions, SuiteDir(out, name), settings), settings))
        if any(q.open for q, _ in questions):
            _ask(subject, recipe, tokenizer, [q for q, _ in questions], out, console)
        for q, settings in questions:
            wanted = {prompt.id for prompt in q.prompts}  # an earlier command may have left more answers
            there = [o for o in read_outcomes(SuiteDir(out, q.name).answers) if o.id in wanted and o.sample < q.samples]
            results.append(result_of(q.name, subject.name, q.samples, settings, there))
            SuiteDir(out, q.name).write_result(results[-1])
    console.print(table(results))
    console.print(f"answers and results: {out}", highlight=False, soft_wrap=True)
    if void := any(result.metrics["void_rate"] for result in results):
        again = "the same command asks again"
        print(f"megarl: some answers could not be generated and count as wrong; {again}", file=sys.stderr)
    return int(void)


def _with_earlier(questions: SuiteQuestions, place: SuiteDir, settings: Mapping[str, object]) -> SuiteQuestions:
    """Return the questions with the answers that exist; MegarlError if those were made with other settings."""
    place.path.mkdir(parents=True, exist_ok=True)
    if place.settings.is_file():
        before = json.loads(place.settings.read_bytes())
        if changed := [key for key in settings if before.get(key) != settings[key]]:
            raise MegarlError(
                f"{place.path}: has answers that were made otherwise: {', '.join(changed)} changed "
                f"(see {place.settings.name}); give another --out, or remove it"
            )
    else:
        write_atomically(place.settings, json.dumps(settings, indent=2).encode() + b"\n")
    return replace(questions, answered=[one for one in read_outcomes(place.answers) if not one.void])


def _ask(
    subject: Subject, recipe: Recipe, tokenizer: Tokenizer, questions: Sequence[SuiteQuestions], out: Path, console: Console
) -> None:  # fmt: skip
    """Ask all that is open, keeping each answer as it comes."""
    with ExitStack() as stack:
        if subject.run is not None:
            exported = stack.enter_context(_exported(subject.source, RunDir(recipe.run.path).path / "model"))
            model = recipe.model.model_copy(update={"path": str(exported)})
            recipe = recipe.model_copy(update={"model": model})
        with console.status(f"starting {recipe.resources.servers} server{'s' * (recipe.resources.servers > 1)}"):
            servers = stack.enter_context(own_servers(recipe))
        count = stack.enter_context(counted(questions, console))

        def keep(answer: Answer) -> None:
            SuiteDir(out, answer.suite).add(answer)
            count(answer)

        try:
            uvloop.run(_score(tokenizer, questions, servers, keep))
        except ExceptionGroup as errors:
            first: Exception = errors
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            if isinstance(first, GraderDown):
                first = MegarlError(f"the grader is down: {first}; what is answered is kept, the same command goes on")
            raise first from None


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
    tokenizer: Tokenizer, questions: Sequence[SuiteQuestions], servers: OwnServers, keep: Callable[[Answer], object]
) -> None:
    """Ask all that is open, as long as no server ends."""
    async with servers.asker(tokenizer) as asker, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(servers.watch())
        await score(questions, asker, keep)
        watching.cancel()
