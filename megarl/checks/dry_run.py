"""What `megarl train --dry-run` shows of a run that can start, and the warnings of
both.

brief      model, data, a prompt as the model sees it, lengths, layout: a line each
changes    the keys in which a recipe differs from its base
warnings   what is allowed and most likely a mistake
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.checks.start import counted
from megarl.core.base import weight_files
from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.recipe import Recipe, Task, base_of, differences
from megarl.run import devices
from megarl.tasks.data.chat import template_source
from megarl.tasks.data.mappings import mapping_of
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.data.rows import PromptRow, UnfitError
from megarl.tasks.data.sources import Unreadable, stream

SHOWN_PROMPT = 400
"""Characters shown of a prompt."""
BUSY = 3.0
"""Running processes and threads for each core from which a machine is called busy. A
warm start that has just ended, which uses all cores, leaves 1 to 2 in the load average.
"""
ANSWERS = 1000
"""Rows of a task whose expected answers are compared with the limit of an answer."""
WRITTEN_AS_EXPECTED = ("math", "exact")
"""Graders to which an answer is right if it is the expected one, in words or value."""
NAMED_SECTIONS = ("data.tasks", "data.services", "evaluation.suites")


def brief(recipe: Recipe, starts: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) for each line. starts: the processes, as the checks name
    them. The inputs must have been checked.
    """
    tokenizer = load_tokenizer(recipe.model.path)
    tasks = load_tasks(recipe, tokenizer)
    settings = recipe.data.tasks
    counts = [_counted(name, settings[name], prompts) for name, prompts in tasks.items()]
    yield "model", _model(recipe)
    yield "data", "; ".join(counts)
    for name, prompts in tasks.items():
        text = tokenizer.decode(prompts.train[0].tokens)[:SHOWN_PROMPT]
        yield "prompt", f"{name}, {settings[name].template}: {text!r}"
    yield "lengths", _lengths(recipe, tasks)
    yield "layout", f"{starts}, {_work(recipe)}"


def _model(recipe: Recipe) -> str:
    """Return the model's path, size, precision, and whether it has a chat template."""
    path = Path(recipe.model.path)
    template = "a chat template" if template_source(path) else "no chat template"
    count = weight_files.counted(weight_files.parameters(path))
    return f"{path}, {count} parameters, {recipe.model.dtype}, {template}"


def _counted(name: str, task: Task, prompts: TaskPrompts) -> str:
    """Return how many prompts a task has, and its grader."""
    return (
        f"{name}: {len(prompts.train):,} to train on, {len(prompts.heldout):,} held out, grader"
        f" {task.grader}"
    )


def _lengths(recipe: Recipe, tasks: dict[str, TaskPrompts]) -> str:
    """Return the lengths of prompts and their limit, and limits of completions."""
    length = recipe.length
    lengths = [len(prompt.tokens) for prompts in tasks.values() for prompt in prompts.train]
    prompts = f"prompts of {min(lengths):,} to {max(lengths):,} tokens"
    prompts += f" (limit {length.prompt_tokens:,})"
    thinking = "no thinking"
    if length.thinking_tokens[1]:
        mark = f" up to {length.end_of_thinking!r}" if length.end_of_thinking else ""
        thinking = f"{length.thinking_tokens[1]:,} of thinking{mark}"
    return (
        f"{prompts}, completions of {length.completion_tokens:,}: {thinking},"
        f" {length.answer_tokens:,} of answer"
    )


def _work(recipe: Recipe) -> str:
    """Return how many steps of how many rollouts a run has and, without a GPU, the
    threads of each process.
    """
    rollouts = f"{recipe.batch.prompts} x {recipe.sampling.generations} rollouts"
    steps = f"{recipe.run.steps} steps of {rollouts}; `megarl plan --measured RUN` says how long"
    if devices.gpus():
        return steps
    threads = counted(recipe.resources.threads, "thread")
    return f"{threads} each on {len(os.sched_getaffinity(0))} cores, {steps}"


def changes(name: str, recipe: Recipe) -> tuple[str, list[str]]:
    """Return the name of the base of a recipe, and a line for each key in which it
    differs; a line for a task or suite that only one of them has.
    """
    base, base_recipe = base_of(name)
    lines: dict[str, None] = {}  # each once, in order: keys of one task may give the same line
    for key, old, new in differences(base_recipe, recipe):
        lines[_change(key, old, new, base_recipe, recipe)] = None
    return base, list(lines)


def _change(key: str, old: Any, new: Any, base: Recipe, recipe: Recipe) -> str:
    """Return the line of `changes` for one key: its old and new value, or that the task
    or suite it belongs to was added or left out.
    """
    for section in NAMED_SECTIONS:
        if not key.startswith(f"{section}."):
            continue
        name = key.removeprefix(f"{section}.").partition(".")[0]
        if name not in _named(base, section):
            return f"{section}.{name}: added"
        if name not in _named(recipe, section):
            return f"{section}.{name}: left out"
    return f"{key}: {old!r} → {new!r}"


def _named(recipe: Recipe, section: str) -> dict[str, Any]:
    """Return a mapping of names to sections, such as the tasks."""
    outer, inner = section.split(".")
    sections: dict[str, Any] = getattr(getattr(recipe, outer), inner)
    return sections


def warnings(recipe: Recipe) -> Iterator[str]:
    """Yield what will most likely make a run useless or slow, with what to do. The
    inputs must have been checked.
    """
    tokenizer = load_tokenizer(recipe.model.path)
    source = template_source(Path(recipe.model.path))
    for name, task in recipe.data.tasks.items():
        is_raw_by_default = task.template == "raw" and "template" not in task.model_fields_set
        if source and is_raw_by_default and not task.agent and not _is_marked(task, tokenizer):
            yield (
                f"data.tasks.{name}.template: {recipe.model.path} has a chat template, and the"
                " prompts are given without it (template: raw); set template: chat, or template:"
                " raw if that is meant"
            )
        if task.grader in WRITTEN_AS_EXPECTED:
            yield from _long_answers(recipe, name, tokenizer)
    end = recipe.length.end_of_thinking.strip()
    is_token = tokenizer.backend.token_to_id(end) is not None
    # a warm start (sft.data) teaches the model to write it
    if end and end not in source and not is_token and not recipe.sft.data:
        yield (
            "length.end_of_thinking: neither the chat template nor the vocabulary of"
            f" {recipe.model.path} has {end!r}, so that no answer may ever be found; if it does not"
            " think, set length.end_of_thinking='' length.control=none"
            " length.thinking_tokens=[0,0]"
        )
    if not devices.gpus():
        yield from _busy(recipe)


def _is_marked(task: Task, tokenizer: Tokenizer) -> bool:
    """Return whether the task's first readable training prompt has special tokens in
    it, such as a chat template's; False if none can be read.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    for _, row in _readable(task):
        prompt = tokenizer.ids(row.prompt)
        return bool(special & set(prompt.tolist()))
    return False


def _long_answers(recipe: Recipe, name: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Warn if the policy may not write as many tokens as some of a task's expected
    answers have.
    """
    task = recipe.data.tasks[name]
    key = "length.answer_tokens"
    limit = recipe.length.answer_tokens
    if recipe.length.control != "interruption":
        key = "length.*"
        limit = recipe.length.completion_tokens
    too_long = []
    for number, row in islice(_readable(task), ANSWERS):
        shortest = min(row.answers, key=len)
        # A token is at least a byte.
        if len(shortest.encode()) <= limit:
            continue
        tokens = len(tokenizer.ids(shortest))
        if tokens > limit:
            too_long.append(f"{task.train}:{number} has {tokens:,}")
    if too_long:
        yield (
            f"data.tasks.{name}: {counted(len(too_long), 'expected answer')} of the first"
            f" {ANSWERS:,} rows with more tokens than the policy may answer with ({key}:"
            f" {limit:,}): {too_long[0]}; raise the limit, or leave such rows out"
        )


def _readable(task: Task) -> Iterator[tuple[int, PromptRow]]:
    """Yield the number and content of each of the task's rows that can be read."""
    read = mapping_of(task.mapping, task.columns)
    for number, raw in stream(task.train):
        if isinstance(raw, Unreadable):
            continue
        with suppress(UnfitError):
            yield number, read(raw)


def _busy(recipe: Recipe) -> Iterator[str]:
    """Warn of a machine whose cores have other work: roles of several threads wait for
    each other's slowest thread.
    """
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    if load <= BUSY * cores:
        return
    remedy = ""
    if recipe.resources.threads > 1:
        remedy = "; with other work beside it resources.threads=1 is faster"
    yield (
        f"resources: the machine is busy: {load:.0f} processes want its {cores} cores (load average"
        f" of a minute), so the run will take several times as long{remedy}"
    )
