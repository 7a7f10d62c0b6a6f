"""`megarl eval`: asks a model the questions of suites, on servers of its own; writes
answers and results, and prints a table.

    --model ─► subject.py ─► suites.py: prompts ─► settings.json: do they allow earlier answers to be kept?
            ─► a checkpoint is exported ─► servers.py ─► score.py, each answer saved at once ─► metrics ─► result.json, table

A repeated command asks only the questions without an answer. Ctrl-C leaves only
complete rows.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import batched
from pathlib import Path

import uvloop
from rich import progress
from rich.console import Console
from rich.table import Column, Table

from megarl.core.base import terminal
from megarl.core.base.contracts import GraderDown
from megarl.core.base.errors import MegarlError, first_of
from megarl.core.base.files import contents
from megarl.core.base.rundir import RunDir, write_atomically
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.evaluation.answers import Answer, Result, SuiteDir
from megarl.core.evaluation.metrics import Outcome, read_outcomes, result_of, settings_of
from megarl.core.evaluation.score import score
from megarl.core.recipe import Recipe
from megarl.lab.evaluation import suites
from megarl.lab.evaluation.servers import own_servers
from megarl.lab.evaluation.subject import Subject, recipe_of, subject_of
from megarl.lab.evaluation.suites import SuiteQuestions
from megarl.run.process import lock, outlive_screen


def main(
    model: str,
    suite: str,
    overrides: Sequence[str],
    samples: int | None,
    limit: int | None,
    data: str | None,
    out: Path | None,
) -> int:
    """Return 0, or 1 if an answer is void. None: as the suite says; for `out`, a
    directory in runs/evaluations.
    """
    outlive_screen()
    console = terminal.console()
    subject = subject_of(model)
    out = out or Path("runs") / "evaluations" / re.sub(r"[^\w@.-]+", "-", subject.name).strip(".-")
    given = {"samples": samples, "prompts": limit, "data": json.dumps(data) if data else None}
    words = [word for word in suite.split(",") if word]
    if not words:
        raise MegarlError("--suite: names no suite")
    if data and len(words) != 1:
        raise MegarlError(
            "--data: is for one suite; for several, give evaluation.suites.NAME.data=SOURCE"
        )
    recipe, names = recipe_of(
        subject, words, [f"{k}={v}" for k, v in given.items() if v is not None], overrides, out
    )
    tokenizer = load_tokenizer(subject.hf)
    questions = []
    results = []
    reasons = Counter[str]()
    with lock(RunDir(recipe.run.path).path, "megarl eval", "--out"):
        for name in names:
            rows = recipe.evaluation.suites[name]
            loaded = suites.load(
                name, rows, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate
            )
            for reason, count in loaded.left_out.items():
                text = f"{name}: {count} of {loaded.rows} rows are not asked: {reason}"
                console.print(text, style="yellow", highlight=False)
            settings = {"model": subject.identity, "prompts": loaded.digest} | settings_of(
                recipe, rows
            )
            questions.append(
                (_with_earlier(loaded.questions, SuiteDir(out, name), settings), settings)
            )
        if any(q.open for q, _ in questions):
            _ask(subject, recipe, tokenizer, [q for q, _ in questions], out, console)
        for q, settings in questions:
            there = asked_now(q, read_outcomes(SuiteDir(out, q.name).answers))
            reasons.update(outcome.void for outcome in there if outcome.void)
            results.append(result_of(q.name, subject.name, q.samples, settings, there))
            SuiteDir(out, q.name).write_result(results[-1])
    console.print(table(results))
    console.print(f"answers and results: {out}", highlight=False, soft_wrap=True)
    if said := never_thinks(results, recipe.length.end_of_thinking):
        terminal.say(f"megarl: {said}", file=sys.stderr)
    if reasons:
        terminal.say(f"megarl: {void_answers(reasons)}", file=sys.stderr)
    return int(bool(reasons))


def void_answers(reasons: Counter[str]) -> str:
    """Return a sentence on answers that are void, with the most frequent reason."""
    why, count = reasons.most_common(1)[0]
    many = f"{reasons.total():,} answers could not be generated or judged and count as wrong"
    return f"{many}; the same command tries them again. The reason of {count:,}: {why}"


def asked_now(questions: SuiteQuestions, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of these questions; an earlier command may have asked more."""
    wanted = {prompt.id for prompt in questions.prompts}
    return [one for one in outcomes if one.id in wanted and one.sample < questions.samples]


def never_thinks(results: Sequence[Result], end_of_thinking: str) -> str:
    """Return advice if most answers lack the end of thinking, as those of a model that
    never thinks do; else an empty text.
    """
    missing = [
        r.metrics.get("format_error_rate", 0.0) - r.metrics["truncation_rate"] for r in results
    ]
    if not end_of_thinking or max(missing) < 0.5:
        return ""
    advice = (
        "if the model never writes it, evaluate it with \"length.end_of_thinking=''\" and another"
        " --out"
    )
    return f"most answers count as wrong because they have no {end_of_thinking}; {advice}"


def _with_earlier(
    questions: SuiteQuestions, place: SuiteDir, settings: Mapping[str, object]
) -> SuiteQuestions:
    """Return the questions with the answers that already exist. MegarlError if those
    were made with other settings.
    """
    place.path.mkdir(parents=True, exist_ok=True)
    if place.settings.is_file():
        before = earlier_settings(place.settings)
        if changed := [key for key in settings if before.get(key) != settings[key]]:
            otherwise = (
                f"made with other settings: {', '.join(changed)} changed (see"
                f" {place.settings.name})"
            )
            raise MegarlError(
                f"{place.path}: has answers that were {otherwise}; give another --out, or remove it"
            )
    else:
        write_atomically(place.settings, json.dumps(settings, indent=2).encode() + b"\n")
    return replace(
        questions, answered=[one for one in read_outcomes(place.answers) if not one.void]
    )


def earlier_settings(file: Path) -> dict[str, object]:
    """Return the settings with which answers were made. MegarlError if the file is
    damaged.
    """
    try:
        settings = json.loads(contents(file))
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise MegarlError(
            f"{file}: damaged: not a JSON object; give another --out, or remove {file.parent}"
        )
    return settings


def _ask(
    subject: Subject,
    recipe: Recipe,
    tokenizer: Tokenizer,
    questions: Sequence[SuiteQuestions],
    out: Path,
    console: Console,
) -> None:
    with ExitStack() as stack:
        if subject.run is not None:
            exported = stack.enter_context(
                _exported(subject.source, RunDir(recipe.run.path).path / "model")
            )
            model = recipe.model.model_copy(update={"path": str(exported)})
            recipe = recipe.model_copy(update={"model": model})
        with console.status(
            f"starting {recipe.resources.servers} server{'s' * (recipe.resources.servers > 1)}"
        ):
            servers = stack.enter_context(own_servers(recipe))
        count = stack.enter_context(counted(questions, console))
        places = {q.name: stack.enter_context(closing(SuiteDir(out, q.name))) for q in questions}

        def keep(answer: Answer) -> None:
            places[answer.suite].add(answer)
            count(answer)

        async def ask() -> None:
            async with servers.asker(tokenizer) as asker, asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(servers.watch())
                await score(questions, asker, keep)
                watching.cancel()

        try:
            uvloop.run(ask())
        except ExceptionGroup as errors:
            first = first_of(errors)
            if isinstance(first, GraderDown):
                first = MegarlError(
                    f"the grader is down: {first}; answers are kept, and the same command continues"
                )
            raise first from None


@contextmanager
def _exported(checkpoint: Path, where: Path) -> Iterator[Path]:
    """Yield a temporary Hugging Face directory with the exported checkpoint. Another
    process exports, as that needs torch.
    """
    shutil.rmtree(where, ignore_errors=True)  # a process that was killed may have left it
    command = [
        sys.executable,
        "-m",
        "checkpoints_tools",
        "convert",
        "megatron-to-hf",
        str(checkpoint),
        str(where),
    ]
    if subprocess.run(command).returncode:
        raise MegarlError(f"{checkpoint}: could not be exported to {where}; see above")
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)


LINE_S = 30.0  # seconds between progress lines when the output is not a terminal


@contextmanager
def counted(
    questions: Sequence[SuiteQuestions], console: Console
) -> Iterator[Callable[[Answer], None]]:
    """Show the progress of each suite: answers so far, and the share that is right.
    Yield a function that counts an answer.
    """
    name = progress.TextColumn("{task.description}", markup=False)
    share = progress.TextColumn("{task.fields[right]}")
    counts = (name, progress.BarColumn(), progress.MofNCompleteColumn(), share)
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    live = console.is_terminal
    last = time.monotonic()
    shown = progress.Progress(*counts, *times, console=console, disable=not live)
    right = {q.name: sum(one.correct for one in asked_now(q, q.answered)) for q in questions}
    bars = {}
    for q in questions:
        total = len(q.prompts) * q.samples
        shown.add_task(q.name, total=total, completed=total - len(q.open), right="")
        bars[q.name] = shown.tasks[-1]

    def count(answer: Answer) -> None:
        nonlocal last
        bar = bars[answer.suite]
        right[answer.suite] += answer.correct
        shown.update(
            bar.id, advance=1, right=f"{right[answer.suite] / (bar.completed + 1):.1%} right"
        )
        if not live and time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            parts = [
                f"{name}: {bar.completed} of {bar.total} answers" for name, bar in bars.items()
            ]
            console.print(" · ".join(parts), highlight=False, soft_wrap=True)

    with shown:
        yield count


RATES = {
    "truncated": "truncation_rate",
    "interrupted": "interruption_rate",
    "no answer": "format_error_rate",
    "grader ran out of time": "grader_timeout_rate",
    "grader failed": "grader_error_rate",
    "not generated or judged": "void_rate",
}


def table(results: Sequence[Result]) -> Table:
    """Make a table with one column per suite; a row for which no suite has a value is
    left out.
    """
    columns = [Column("", style="dim", no_wrap=True)]
    columns += [Column(result.suite, justify="right", no_wrap=True) for result in results]
    shown = Table(
        *columns,
        box=None,
        padding=(0, 2),
        pad_edge=False,
        title=results[0].model,
        title_justify="left",
    )
    shown.add_row(
        "prompts × answers", *(f"{r.metrics['n_prompts']:.0f} × {r.samples}" for r in results)
    )
    kinds = {"mean@k": "pass_rate", "choice by length": "pass_rate_by_length"}
    for kind in ("pass", "maj", "best"):
        ks = {
            int(m[1])
            for r in results
            for name in r.metrics
            if (m := re.fullmatch(rf"{kind}@(\d+)", name))
        }
        kinds |= {f"{kind}@{k}": f"{kind}@{k}" for k in sorted(ks) if k > 1}
    for label, name in kinds.items():
        if any(name in r.metrics for r in results):
            shown.add_row(label, *(_rate(r, name) for r in results))
    for label, name in RATES.items():
        if any(r.metrics.get(name) for r in results):
            shown.add_row(label, *(f"{r.metrics.get(name, 0.0):.1%}" for r in results))
    lengths = [
        r.metrics[f"completion_tokens_{part}"] for r in results for part in ("mean", "p50", "p95")
    ]
    texts = (" · ".join(f"{length:,.0f}" for length in three) for three in batched(lengths, 3))
    shown.add_row("tokens: mean, median, 95 %", *texts)
    entropies = (f"{r.metrics['entropy']:.3f}" if "entropy" in r.metrics else "–" for r in results)
    shown.add_row("entropy, nats a token", *entropies)
    return shown


def _rate(result: Result, name: str) -> str:
    if name not in result.metrics:
        return "–"
    low = result.metrics[f"{name}_low"]
    high = result.metrics[f"{name}_high"]
    return f"{result.metrics[name]:.3f} [{low:.3f}, {high:.3f}]"
