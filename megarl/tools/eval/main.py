"""`megarl eval`: asks a model the questions of suites, on servers of its own; writes
answers and results, and prints a table.

    --model ─► subject.py
            ─► suites.py: prompts
            ─► settings.json: do they allow earlier answers to be kept?
            ─► a checkpoint is exported ─► servers.py
            ─► score.py, each answer saved at once ─► metrics ─► result.json, table

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
from pathlib import Path
from typing import NamedTuple

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
from megarl.core.base.types import JsonObject
from megarl.core.evaluation.answers import Answer, Result, SuiteDir
from megarl.core.evaluation.metrics import Outcome, read_outcomes, result_of, settings_of
from megarl.core.evaluation.score import score
from megarl.core.recipe import Recipe
from megarl.core.recipe.data import LM_EVAL
from megarl.run.process import lock, outlive_screen
from megarl.tasks.suites import suites
from megarl.tasks.suites.harness import Documents, means
from megarl.tasks.suites.suites import SuiteQuestions
from megarl.tools.eval.servers import own_servers
from megarl.tools.eval.subject import Subject, recipe_of, subject_of


class LoadedSuite(NamedTuple):
    """A suite with its earlier answers, and the settings of all its answers."""

    questions: SuiteQuestions
    settings: JsonObject


def main(
    model: str,
    suite: str,
    overrides: Sequence[str],
    samples: int | None,
    limit: int | None,
    data: str | None,
    folder: Path | None,
) -> int:
    """Ask the model, write answers and results, and print them; return 0, or 1 if an
    answer is void. suite, data: those of --suite and --data. None: as the suite says;
    for `folder`, a directory in runs/evaluations.
    """
    outlive_screen()
    console = terminal.console()
    subject = subject_of(model)
    if folder is None:
        name = re.sub(r"[^\w@.-]+", "-", subject.name).strip(".-")
        folder = Path("runs") / "evaluations" / name
    words = _suite_words(suite, data)
    options = _suite_options(samples, limit, data)
    recipe, names = recipe_of(subject, words, options, overrides, folder)
    tokenizer = load_tokenizer(subject.hf)
    with lock(RunDir(recipe.run.path).path, "megarl eval", "--out"):
        loaded = [_load(name, subject, recipe, tokenizer, folder, console) for name in names]
        questions = [suite.questions for suite in loaded]
        if any(suite.open for suite in questions):
            _ask(subject, recipe, tokenizer, questions, folder, console)
        results, void_reasons = _write_results(loaded, subject, folder)
    console.print(table(results))
    console.print(f"answers and results: {folder}", highlight=False, soft_wrap=True)
    advice = never_thinks(results, recipe.length.end_of_thinking)
    if advice:
        terminal.say(f"megarl: {advice}", file=sys.stderr)
    if not void_reasons:
        return 0
    terminal.say(f"megarl: {void_answers(void_reasons)}", file=sys.stderr)
    return 1


def _suite_words(suite: str, data: str | None) -> list[str]:
    """Return the names in --suite. MegarlError if there are none, or several with
    --data.
    """
    words = [word for word in suite.split(",") if word]
    if not words:
        raise MegarlError("--suite: names no suite")
    if data and len(words) != 1:
        raise MegarlError(
            "--data: is for one suite; for several, give evaluation.suites.NAME.data=SOURCE"
        )
    return words


def _suite_options(samples: int | None, limit: int | None, data: str | None) -> list[str]:
    """Return the command line's settings of a suite as key=value."""
    options = []
    if samples is not None:
        options.append(f"samples={samples}")
    if limit is not None:
        options.append(f"prompts={limit}")
    if data:
        options.append(f"data={json.dumps(data)}")
    return options


def _load(
    name: str,
    subject: Subject,
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: Path,
    console: Console,
) -> LoadedSuite:
    """Load a suite and its earlier answers; say which rows are left out."""
    rows = recipe.evaluation.suites[name]
    loaded = suites.load(
        name, rows, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate
    )
    for reason, count in loaded.left_out.items():
        text = f"{name}: {count} of {loaded.rows} rows are not asked: {reason}"
        console.print(text, style="yellow", highlight=False)
    settings = {"model": subject.identity, "prompts": loaded.digest} | settings_of(recipe, rows)
    questions = _with_earlier(loaded.questions, SuiteDir(folder, name), settings)
    return LoadedSuite(questions, settings)


def _write_results(
    loaded: Sequence[LoadedSuite], subject: Subject, folder: Path
) -> tuple[list[Result], Counter[str]]:
    """Write each suite's result; return the results, and how many answers are void, by
    reason.
    """
    results = []
    void_reasons = Counter[str]()
    for questions, settings in loaded:
        place = SuiteDir(folder, questions.name)
        outcomes = asked_now(questions, read_outcomes(place.answers))
        void_reasons.update(outcome.void for outcome in outcomes if outcome.void)
        result = result_of(questions.name, subject.name, questions.samples, settings, outcomes)
        if isinstance(questions, Documents):
            result.metrics.update(means(outcomes))
        place.write_result(result)
        results.append(result)
    return results, void_reasons


def void_answers(reasons: Counter[str]) -> str:
    """Return a sentence on answers that are void, with the most frequent reason."""
    reason, count = reasons.most_common(1)[0]
    many = f"{reasons.total():,} answers could not be generated or judged and count as wrong"
    return f"{many}; the same command tries them again. The reason of {count:,}: {reason}"


def asked_now(questions: SuiteQuestions, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return these questions' outcomes; an earlier command may have asked more."""
    ids = {prompt.id for prompt in questions.prompts}
    return [
        outcome for outcome in outcomes if outcome.id in ids and outcome.sample < questions.samples
    ]


def never_thinks(results: Sequence[Result], end_of_thinking: str) -> str:
    """Return advice if most answers to a suite lack the end of thinking, as those of a
    model that never thinks do; else "".
    """
    shares_without_end = []
    for result in results:
        # An answer that is cut off lacks it, too, but says nothing of the model.
        share = result.metrics.get("format_error_rate", 0.0) - result.metrics["truncation_rate"]
        shares_without_end.append(share)
    if not end_of_thinking or max(shares_without_end) < 0.5:
        return ""
    advice = (
        "if the model never writes it, evaluate it with \"length.end_of_thinking=''\" and another"
        " --out"
    )
    return f"most answers count as wrong because they have no {end_of_thinking}; {advice}"


def _with_earlier(
    questions: SuiteQuestions, place: SuiteDir, settings: Mapping[str, object]
) -> SuiteQuestions:
    """Return the questions with the answers that already exist, except for void ones,
    which are asked again. MegarlError if they were made with other settings.
    """
    place.path.mkdir(parents=True, exist_ok=True)
    if place.settings.is_file():
        earlier = earlier_settings(place.settings)
        changed = [key for key in settings if earlier.get(key) != settings[key]]
        if changed:
            otherwise = (
                f"made with other settings: {', '.join(changed)} changed (see"
                f" {place.settings.name})"
            )
            raise MegarlError(
                f"{place.path}: has answers that were {otherwise}; give another --out, or remove it"
            )
    else:
        write_atomically(place.settings, json.dumps(settings, indent=2).encode() + b"\n")
    answered = [outcome for outcome in read_outcomes(place.answers) if not outcome.void]
    return replace(questions, answered=answered)


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
    folder: Path,
    console: Console,
) -> None:
    """Ask the open questions on servers that are started for it, and save each answer
    at once. A run's checkpoint is exported first. MegarlError if a server ends or the
    grader is down; the answers so far are kept.
    """
    with ExitStack() as stack:
        if subject.run is not None:
            exported = stack.enter_context(
                _exported(subject.source, RunDir(recipe.run.path).path / "model")
            )
            model = recipe.model.model_copy(update={"path": str(exported)})
            recipe = recipe.model_copy(update={"model": model})
        number = recipe.resources.servers
        noun = "server" if number == 1 else "servers"
        with console.status(f"starting {number} {noun}"):
            servers = stack.enter_context(own_servers(recipe))
        count = stack.enter_context(counted(questions, console))
        places = {}
        for suite in questions:
            place = SuiteDir(folder, suite.name)
            places[suite.name] = stack.enter_context(closing(place))

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
def _exported(checkpoint: Path, target: Path) -> Iterator[Path]:
    """Yield `target`, a Hugging Face directory with the exported checkpoint, which is
    removed after the block. Another process exports it, as that needs torch.
    """
    shutil.rmtree(target, ignore_errors=True)  # a process that was killed may have left it
    command = [
        sys.executable,
        "-m",
        "checkpoints_tools",
        "convert",
        "megatron-to-hf",
        str(checkpoint),
        str(target),
    ]
    if subprocess.run(command).returncode:
        raise MegarlError(f"{checkpoint}: could not be exported to {target}; see above")
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


LINE_S = 30.0  # seconds between progress lines when the output is not a terminal


@contextmanager
def counted(
    questions: Sequence[SuiteQuestions], console: Console
) -> Iterator[Callable[[Answer], None]]:
    """Show the progress of each suite in the block: answers so far, and the share that
    is right. Yield a function to call with each answer.
    """
    columns = [
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[right]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    ]
    live = console.is_terminal
    last = time.monotonic()
    view = progress.Progress(*columns, console=console, disable=not live)
    right = {}
    bars = {}
    for suite in questions:
        right[suite.name] = sum(outcome.correct for outcome in asked_now(suite, suite.answered))
        total = len(suite.prompts) * suite.samples
        view.add_task(suite.name, total=total, completed=total - len(suite.open), right="")
        bars[suite.name] = view.tasks[-1]

    def count(answer: Answer) -> None:
        """Count an answer; without a terminal, print a line every LINE_S seconds."""
        nonlocal last
        bar = bars[answer.suite]
        right[answer.suite] += answer.correct
        share = right[answer.suite] / (bar.completed + 1)
        view.update(bar.id, advance=1, right=f"{share:.1%} right")
        if not live and time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            parts = [
                f"{name}: {bar.completed} of {bar.total} answers" for name, bar in bars.items()
            ]
            console.print(" · ".join(parts), highlight=False, soft_wrap=True)

    with view:
        yield count


RATES = {  # labels in the table: metrics
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
    rows = Table(
        *columns,
        box=None,
        padding=(0, 2),
        pad_edge=False,
        title=results[0].model,
        title_justify="left",
    )
    sizes = [f"{result.metrics['n_prompts']:.0f} × {result.samples}" for result in results]
    rows.add_row("prompts × answers", *sizes)
    for label, metric in _scores(results).items():
        rows.add_row(label, *(_with_interval(result, metric) for result in results))
    for label, metric in RATES.items():
        if any(result.metrics.get(metric) for result in results):
            rows.add_row(label, *(f"{result.metrics.get(metric, 0.0):.1%}" for result in results))
    for metric in _harness_metrics(results):
        rows.add_row(metric, *(_mean(result, metric) for result in results))
    rows.add_row("tokens: mean, median, 95 %", *map(_lengths, results))
    rows.add_row("entropy, nats a token", *(_mean(result, "entropy") for result in results))
    return rows


def _scores(results: Sequence[Result]) -> dict[str, str]:
    """Return the metrics with an interval that any suite has, by their labels in the
    table.
    """
    metrics = {"mean@k": "pass_rate", "choice by length": "pass_rate_by_length"}
    existing = set[str]().union(*(result.metrics for result in results))
    for kind in ("pass", "maj", "best"):
        matches = [re.fullmatch(rf"{kind}@(\d+)", name) for name in existing]
        numbers = sorted(int(match[1]) for match in matches if match)
        # Of one answer each of them is mean@k.
        metrics |= {f"{kind}@{k}": f"{kind}@{k}" for k in numbers if k > 1}
    return {label: metric for label, metric in metrics.items() if metric in existing}


def _harness_metrics(results: Sequence[Result]) -> list[str]:
    """Return the names of lm-eval's metrics, in the order in which suites have them."""
    names: dict[str, None] = {}
    for result in results:
        names |= dict.fromkeys(name for name in result.metrics if name.startswith(LM_EVAL))
    return list(names)


def _with_interval(result: Result, metric: str) -> str:
    """Return the text of a metric with its interval; a dash if the suite has none."""
    if metric not in result.metrics:
        return "–"
    low = result.metrics[f"{metric}_low"]
    high = result.metrics[f"{metric}_high"]
    return f"{result.metrics[metric]:.3f} [{low:.3f}, {high:.3f}]"


def _mean(result: Result, metric: str) -> str:
    """Return the text of a metric without an interval; a dash if the suite has none."""
    if metric not in result.metrics:
        return "–"
    return f"{result.metrics[metric]:.3f}"


def _lengths(result: Result) -> str:
    """Return the mean, median and 95 % quantile of a suite's tokens."""
    values = [result.metrics[f"completion_tokens_{part}"] for part in ("mean", "p50", "p95")]
    return " · ".join(f"{value:,.0f}" for value in values)
