"""`megarl recipes new --model DIR --data FILE`: a short recipe for a model, a set of
questions and this machine.

    config, template, vocabulary ──► KnownModel ───┐
    rows, as the model will see them ──► KnownData ├─► keys with their reasons ──► YAML,
    cores, GPUs ───────────────────► Machine ──────┘   which `train --dry-run` takes

It has no base, so that no task is inherited. Everything it leaves out is ScaleRL's
default.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.core.base import architecture, terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config
from megarl.core.base.rundir import write_atomically
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.weight_files import counted, parameters
from megarl.core.recipe import Length, Rows, from_tree
from megarl.run import devices
from megarl.tasks.data.chat import template_source
from megarl.tasks.data.mappings import read_own
from megarl.tasks.data.prompts import EncodedRow, Render, renderer, rows_with_tokens
from megarl.tasks.data.survey import FAULTS, survey_of
from megarl.tools.inspection.data import MOST_TOKENS, kind_of_answer, reader, token_counts

NATIVE_BF16_FROM = 50e6
"""Parameters from which a CPU with bf16 products trains in bf16; smaller models are
quick enough in fp32.
"""
RATES = (
    (20e6, 2.0e-4, "as the quickstart's model of 1M"),
    (1e9, 3.0e-5, "as quickstart-real, 135M"),
    (4e9, 1.0e-6, "as scalerl-1gpu, 1.7B"),
    (math.inf, 5.0e-7, "the ScaleRL paper's, for 8B and more"),
)
"""(most parameters, learning rate, reason)."""
STATE_BYTES = 18
"""Bytes a parameter takes in a learner: weights, FP32 gradients, FP32 weights and the
two moments of AdamW.
"""
GPU_SHARE = 0.7
"""Most of a GPU's memory that the learner's state may take; activations need the rest.
"""
ASSUMED_GPU_BYTES = 80e9
"""Memory of a GPU of another machine (--gpus)."""
MOST_RANKS = 16
MOST_HELD_OUT = 120
THINK_END = "</think>"
MARKS = {"<|channel|>final": "<|channel|>final<|message|>", THINK_END: THINK_END}
"""What a chat template mentions ──► the end of thinking of such a model."""
INTERRUPTIONS = {
    "<|channel|>final<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>"
}
"""How a trace is interrupted, where the default phrase does not end with the model's
end of thinking.
"""
VAGUE_NAMES = ("train", "data", "questions", "prompts")
TREE_WIDTH = 44


@dataclass(frozen=True)
class KnownModel:
    """What a recipe depends on of a model. is_chat: whether it has a chat template;
    end_of_thinking: empty if it does not think; interruption: the phrase that
    interrupts its thinking, empty for the default.
    """

    path: Path
    parameters: int
    is_chat: bool
    end_of_thinking: str
    interruption: str = ""


@dataclass(frozen=True)
class KnownData:
    """A set of prompts. Lengths are in tokens."""

    rows: int
    held_out: int  # of these rows
    prompts: tuple[int, ...]  # lengths with the template; held-out ones of another set, too
    longest_question: int  # without the template
    longest_answer: int  # of the expected ones
    grader: str

    @property
    def trained(self) -> int:
        """Rows that are not held out."""
        return self.rows - self.held_out


@dataclass(frozen=True)
class Machine:
    """Where the run will be."""

    cores: int
    gpus: int
    gpu_bytes: float
    memory: float
    bf16: str  # what the CPU computes bf16 with; empty: nothing


@dataclass(frozen=True)
class NewRecipeOptions:
    """The command line. grader, heldout: empty for a choice from the data."""

    data: str
    heldout: str
    grader: str
    system: str
    mapping: str
    columns: Sequence[str]


@dataclass(frozen=True)
class RecipeKey:
    """A key of the recipe, dotted, with its value and the reason for it."""

    key: str
    value: Any
    reason: str = ""


def new(model: Path, options: NewRecipeOptions, gpus: int | None, path: Path | None) -> int:
    """Write the recipe to `path`, or print it if that is None; return 0. gpus: of
    another machine; None: this one. MegarlError if model or data cannot be read, or the
    model is too large for the machine.
    """
    if path is not None:
        _check_path(path)
    read_config(model)  # MegarlError if there is none, with what to do about a GGUF file
    tokenizer = load_tokenizer(model)
    properties = known_model(model, tokenizer)
    if options.system and not properties.is_chat:
        raise MegarlError(f"--system: {model} has no chat template; write it into the prompts")
    machine = this_machine() if gpus is None else another_machine(gpus)
    data = known_data(properties, tokenizer, options)
    entries = list(entries_of(properties, data, options, machine))
    from_tree(tree_of(entries))  # MegarlError if they do not go together
    text = _text(properties, options, entries)
    if path is None:
        terminal.say(text, end="")
        return 0
    write_atomically(path, text.encode())
    terminal.say(f"{path}: read it, then `megarl train {path} --dry-run`")
    return 0


def _check_path(path: Path) -> None:
    """Raise MegarlError if the recipe cannot be written there."""
    if path.exists():
        raise MegarlError(f"--out: {path} exists already; remove it or give another name")
    if not path.parent.is_dir():
        raise MegarlError(f"--out: {path.parent}: no such directory")


def entries_of(
    model: KnownModel, data: KnownData, options: NewRecipeOptions, machine: Machine
) -> Iterator[RecipeKey]:
    """Yield the keys of the recipe. MegarlError if the model is too large for the
    machine.
    """
    yield from _task_keys(model, data, options)
    yield from _length_keys(model, data, machine)
    yield from _machine_keys(model, data, machine)


def known_model(path: Path, tokenizer: Tokenizer) -> KnownModel:
    """Return what a recipe depends on of the model in a directory, which need not have
    weights.
    """
    has_weights = any(path.glob("*.safetensors*"))
    count = parameters(path) if has_weights else architecture.read(str(path)).parameters
    source = template_source(path)
    end = _end_of_thinking(source, tokenizer)
    return KnownModel(path, count, bool(source), end, _interruption(end, tokenizer))


def _end_of_thinking(template: str, tokenizer: Tokenizer) -> str:
    """Return what ends the thinking: by the chat template, or without one ("") by the
    vocabulary; "" if the model does not think. If it has the token and does not think,
    its template does not mention the token.
    """
    if template:
        return next((end for mark, end in MARKS.items() if mark in template), "")
    is_token = tokenizer.backend.token_to_id(THINK_END) is not None
    return THINK_END if is_token else ""


def _interruption(end: str, tokenizer: Tokenizer) -> str:
    """Return the phrase that interrupts the thinking; empty for the default. It is the
    bare end of thinking if the tokenizer cannot write the default phrase.
    """
    if end in INTERRUPTIONS:
        return INTERRUPTIONS[end]
    try:
        tokenizer.ids(Length().interruption)
    except MegarlError:  # a closed vocabulary, such as the quickstart's
        return end
    return ""


def this_machine() -> Machine:
    """Return what this machine has."""
    import psutil

    return Machine(
        cores=len(os.sched_getaffinity(0)),
        gpus=len(devices.gpus()),
        gpu_bytes=devices.memory(),
        memory=psutil.virtual_memory().total,
        bf16=devices.bf16_on_cpu(),
    )


def another_machine(gpus: int) -> Machine:
    """Return what another machine with so many GPUs is taken to have."""
    return Machine(cores=1, gpus=gpus, gpu_bytes=ASSUMED_GPU_BYTES, memory=math.inf, bf16="")


def known_data(model: KnownModel, tokenizer: Tokenizer, options: NewRecipeOptions) -> KnownData:
    """Read all rows, as the model will see them. MegarlError if they cannot be used, or
    none can.
    """
    template = Rows(template="chat", system=options.system) if model.is_chat else Rows()
    render = renderer(template, tokenizer)
    rows = _encoded(options.data, options, render, tokenizer)
    held_out = _held_out(options, len(rows))
    other_rows = [] if held_out else _encoded(options.heldout, options, render, tokenizer)
    kinds = Counter(kind_of_answer(encoded.row.answer) for encoded in rows)
    questions = token_counts([encoded.row.identity for encoded in rows], tokenizer)
    answers = token_counts([encoded.row.answer for encoded in rows], tokenizer)
    return KnownData(
        rows=len(rows),
        held_out=held_out,
        prompts=tuple(encoded.length for encoded in (*rows, *other_rows)),
        longest_question=max(questions),
        longest_answer=max(answers),
        grader=options.grader or grader_for(kinds),
    )


def _encoded(
    source: str, options: NewRecipeOptions, render: Render, tokenizer: Tokenizer
) -> list[EncodedRow]:
    """Read a set as a run of the recipe will. Like that, it refuses faults in rows of
    the user's own, which can be corrected; those of published sets are left out.
    """
    read = reader(options.mapping, options.columns)
    refused = FAULTS if read is read_own else frozenset()
    surveyed = survey_of(source, read, refuse=refused)
    return list(rows_with_tokens(surveyed, render, tokenizer, MOST_TOKENS))


def _held_out(options: NewRecipeOptions, rows: int) -> int:
    """Return how many of the rows are to be held out: the number that the user gave,
    none for another set, else a fifth, at most MOST_HELD_OUT. MegarlError if too few
    are left, or none is held out.
    """
    if rows < 2 and not options.heldout:
        raise MegarlError(
            f"{options.data}: only one question; at least two are needed, as one is held out"
        )
    if not options.heldout:
        return max(1, min(MOST_HELD_OUT, rows // 5))
    if not re.fullmatch(r"[-+]?[0-9]+", options.heldout):  # another set
        return 0
    count = int(options.heldout)
    if not 1 <= count < rows:
        raise MegarlError(
            f"--heldout: {count} of the {rows:,} rows of {options.data} cannot be held out; give a"
            f" number from 1 to {rows - 1:,}, or another set"
        )
    return count


def grader_for(kinds: Counter[str]) -> str:
    """Choose a grader by the kind that most answers have. kinds: as `kind_of_answer`
    names them, with their numbers.
    """
    kind = kinds.most_common(1)[0][0]
    if kind == "unit tests":
        return "code"
    if kind == "reasoning-gym problem":
        return "reasoning-gym"
    return "exact" if kind in ("word", "text", "choice") else "math"


def _name(source: str) -> str:
    """Return a task's name from its file: data/gsm8k/train.jsonl is gsm8k."""
    path = Path(source)
    stem = path.name.partition(".")[0]
    chosen = stem
    if stem in VAGUE_NAMES and path.parent.name:
        chosen = path.parent.name
    return re.sub(r"[^A-Za-z0-9_-]+", "-", chosen).strip("-") or "task"


def _task_keys(
    model: KnownModel, data: KnownData, options: NewRecipeOptions
) -> Iterator[RecipeKey]:
    """Yield the run's name, the model, and its task: prompts, grader and template."""
    task = f"data.tasks.{_name(options.data)}"
    yield RecipeKey("run.name", f"{model.path.resolve().name}-{_name(options.data)}")
    yield RecipeKey("model.path", str(model.path), f"{counted(model.parameters)} parameters")
    yield RecipeKey(f"{task}.train", options.data, f"{data.rows:,} prompts")
    if data.held_out:
        yield RecipeKey(f"{task}.heldout", data.held_out, "of these, never trained on")
    else:
        yield RecipeKey(f"{task}.heldout", options.heldout)
    reason = "" if options.grader else "by the answers in the file; yours: module:function"
    yield RecipeKey(f"{task}.grader", data.grader, reason)
    if options.mapping:
        yield RecipeKey(f"{task}.mapping", options.mapping)
    if options.columns:
        columns = dict(column.split("=", 1) for column in options.columns)
        yield RecipeKey(f"{task}.columns", columns)
    if model.is_chat:
        yield RecipeKey(f"{task}.template", "chat", "the model has a chat template")
    if options.system:
        yield RecipeKey(f"{task}.system", options.system)


def _length_keys(model: KnownModel, data: KnownData, machine: Machine) -> Iterator[RecipeKey]:
    """Yield limits of prompts and completions. What a model writes is not known before
    it writes, so the answer's limit is a guess: four times the longest expected answer,
    or the longest question's length if that is more. MegarlError if all prompts are
    longer than their limit.
    """
    most_tokens = 2048 if machine.gpus else 512
    longest = max(data.prompts)
    limit = min(most_tokens, _rounded_up(longest, 8))
    left_out = sum(length > limit for length in data.prompts)
    if left_out == len(data.prompts):
        raise MegarlError(
            f"--data: all {left_out:,} prompts have more than {limit:,} tokens, the shortest"
            f" {min(data.prompts):,}; shorten the questions or --system"
        )
    reason = f"the longest has {longest:,}"
    if left_out:
        reason += f"; {left_out:,} are left out"
    yield RecipeKey("length.prompt_tokens", limit, reason)
    yield from _thinking_keys(model, machine)
    answer = _rounded_up(max(4 * data.longest_answer, data.longest_question), 16)
    answer_limit = min(most_tokens, max(16, answer))
    yield RecipeKey("length.answer_tokens", answer_limit, "raise it if many answers are truncated")


def _thinking_keys(model: KnownModel, machine: Machine) -> Iterator[RecipeKey]:
    """Yield how the thinking ends, and its limit."""
    if not model.end_of_thinking:
        reason = "the chat template knows none" if model.is_chat else "a base model"
        yield RecipeKey("length.control", "none")
        yield RecipeKey("length.end_of_thinking", "", reason)
        yield RecipeKey("length.thinking_tokens", [0, 0], "it does not think")
        return
    budget = 2048 if machine.gpus else 256
    reason = "of the chat template" if model.is_chat else "of the vocabulary"
    yield RecipeKey("length.end_of_thinking", model.end_of_thinking, reason)
    if model.interruption:
        yield RecipeKey("length.interruption", model.interruption)
    limits = [budget - budget // 8, budget]
    yield RecipeKey("length.thinking_tokens", limits, "raise it where memory and time allow")


def _rounded_up(length: int, step: int) -> int:
    """Round a length up to a multiple of `step`."""
    return -(-length // step) * step


def _machine_keys(model: KnownModel, data: KnownData, machine: Machine) -> Iterator[RecipeKey]:
    """Yield what the machine decides, and the learning rate for the model's size."""
    if not machine.gpus:
        yield from _cpu_keys(model, data, machine)
    elif machine.gpus == 1:
        yield from _one_gpu_keys(model, data, machine)
    else:
        yield from _gpu_keys(model, machine)
    for most_parameters, rate, reason in RATES:
        if model.parameters <= most_parameters:
            yield RecipeKey("learner.optimizer.lr", rate, reason)
            break


def _cpu_keys(model: KnownModel, data: KnownData, machine: Machine) -> Iterator[RecipeKey]:
    """Yield the keys of a server and a learner that share the cores. Sizes are those of
    a run of a 135M model on two cores, which made a step of 96 rollouts in ten seconds.
    MegarlError if the memory does not hold the model's state.
    """
    needed = (STATE_BYTES + 4) * model.parameters  # 4: the server's weights
    if needed > machine.memory:
        raise MegarlError(
            f"--model: {model.path}: the state of learner and server alone takes"
            f" {needed / 1e9:.0f} GB, and this machine has no GPU and"
            f" {machine.memory / 1e9:.0f} GB of memory; take a smaller model, or plan with --gpus N"
        )
    dtype = "fp32"
    reason = "this CPU would emulate bf16"
    if machine.bf16 and model.parameters >= NATIVE_BF16_FROM:
        dtype = "bf16"
        reason = f"this CPU computes it with {machine.bf16}"
    elif machine.bf16:
        reason = "small enough; the two sides then agree to 1e-5"
    prompts = min(12, data.trained)
    steps_of_an_epoch = -(-data.trained // prompts)
    steps = min(100, max(20, steps_of_an_epoch))
    yield RecipeKey("model.dtype", dtype, reason)
    threads = max(min(2, machine.cores), machine.cores // 2)
    yield RecipeKey(
        "resources.threads", threads, f"for each of server and learner, of {machine.cores} cores"
    )
    yield RecipeKey("run.steps", steps, "at least 20, at most 100; else one pass over the prompts")
    yield from _batch_keys(prompts, generations=8, k=2)
    yield RecipeKey("learner.optimizer.warmup_steps", 3)
    yield RecipeKey(
        "learner.optimizer.schedule", "linear", "falls to 0 at the last step; ScaleRL's is constant"
    )
    yield RecipeKey("learner.microbatch_tokens", 2048)
    yield RecipeKey("serving.kv_tokens", 65_536, "what fits is not known on a CPU")
    yield RecipeKey("serving.max_running_requests", prompts * 8)
    yield RecipeKey("weights.bucket_mb", 64)
    yield from _evaluation_keys(every=max(5, steps // 4), prompts=MOST_HELD_OUT, samples=2)


def _one_gpu_keys(model: KnownModel, data: KnownData, machine: Machine) -> Iterator[RecipeKey]:
    """Yield the keys of a server and a learner that share a GPU, with the sizes of
    scalerl-1gpu. MegarlError if the GPU does not hold the learner's state.
    """
    _check_state(model, machine, 1)
    prompts = min(16, data.trained)
    yield RecipeKey("resources.colocate", True, "server and learner share the GPU")
    yield RecipeKey("weights.transport", "cuda_ipc")
    yield RecipeKey("weights.bucket_mb", 128)
    yield RecipeKey("serving.memory_fraction", 0.25)
    yield RecipeKey("serving.max_running_requests", 64)
    steps_of_an_epoch = -(-data.trained // prompts)
    steps = min(400, max(40, steps_of_an_epoch))
    yield RecipeKey("run.steps", steps, "about one pass over the prompts")
    yield from _batch_keys(prompts, generations=8, k=8)
    yield RecipeKey("learner.optimizer.warmup_steps", 20)
    yield RecipeKey("learner.microbatch_tokens", 8192)
    yield from _evaluation_keys(every=50, prompts=200, samples=4)


def _gpu_keys(model: KnownModel, machine: Machine) -> Iterator[RecipeKey]:
    """Yield the keys of a learner on about a quarter of the GPUs, and of as many
    servers as the others allow. MegarlError if the GPUs hold no learner, or no server
    beside it.
    """
    parallel = next((size for size in (1, 2, 4, 8) if _fits(model, machine, size)), 8)
    _check_state(model, machine, parallel)
    quarter = 1 << int(math.log2(max(1, machine.gpus // 4)))  # as a power of 2
    ranks = max(parallel, min(MOST_RANKS, quarter))
    sizes = (1, 2, 4, 8, 16)
    weights = 2 * model.parameters
    # Half of a server's memory at most has weights, the rest keys and values.
    server_gpus = next(size for size in sizes if weights / size < machine.gpu_bytes / 2)
    servers = (machine.gpus - ranks) // server_gpus
    if servers < 1:
        raise MegarlError(
            f"--model: {model.path}: {ranks} GPUs for the learner and {server_gpus} for a server"
            f" are more than {machine.gpus}; take a smaller model or more GPUs"
        )
    reason = "the least that holds the state; `megarl plan` finds the fastest"
    yield RecipeKey("model.tensor_parallel", parallel, reason)
    yield RecipeKey("resources.learner_ranks", ranks)
    yield RecipeKey("resources.servers", servers)
    yield RecipeKey("resources.server_tensor_parallel", server_gpus)
    yield RecipeKey("run.steps", 400)
    # A prompt may be drawn again: a small set is no reason for another batch.
    yield from _batch_keys(48, generations=16, k=8)


def _fits(model: KnownModel, machine: Machine, parallel: int) -> bool:
    """Return whether the learner's state fits, divided over so many GPUs."""
    return STATE_BYTES * model.parameters / parallel <= GPU_SHARE * machine.gpu_bytes


def _check_state(model: KnownModel, machine: Machine, parallel: int) -> None:
    """Raise MegarlError if the learner's state does not fit so many GPUs."""
    if not _fits(model, machine, parallel):
        state = STATE_BYTES * model.parameters / 1e9
        raise MegarlError(
            f"--model: {model.path}: the learner's state takes {state:.0f} GB, and {parallel} GPUs"
            f" of {machine.gpu_bytes / 1e9:.0f} GB do not hold it; take a smaller model or more"
            " GPUs; `megarl plan` tries pipeline and expert parallelism"
        )


def _batch_keys(prompts: int, generations: int, k: int) -> Iterator[RecipeKey]:
    """Yield the size of a batch, and the most steps that a token may lag behind."""
    yield RecipeKey(
        "batch.prompts", prompts, f"x {generations} = {prompts * generations} rollouts a step"
    )
    yield RecipeKey("sampling.generations", generations)
    yield RecipeKey("pipeline.k", k, "most steps by which a trained token may be old")


def _evaluation_keys(every: int, prompts: int, samples: int) -> Iterator[RecipeKey]:
    """Yield the size of evaluations, and how often they and checkpoints are made."""
    yield RecipeKey("evaluation.every", every)
    yield RecipeKey("evaluation.prompts", prompts)
    yield RecipeKey("evaluation.samples", samples)
    yield RecipeKey("checkpoint.every", every)


def tree_of(entries: Sequence[RecipeKey]) -> dict[str, Any]:
    """Return the entries as the nested mapping that a recipe file holds."""
    tree: dict[str, Any] = {}
    for entry in entries:
        *sections, last = entry.key.split(".")
        section_tree = tree
        for section in sections:
            section_tree = section_tree.setdefault(section, {})
        section_tree[last] = entry.value
    return tree


def _text(model: KnownModel, options: NewRecipeOptions, entries: Sequence[RecipeKey]) -> str:
    """Return the text of the recipe file, with each reason beside its key."""
    reasons = {entry.key: entry.reason for entry in entries}
    lines = [
        f"# {model.path.resolve().name} on {options.data}, written by `megarl recipes new`.",
        "# What is not here is ScaleRL's default; `megarl recipes show FILE` shows all of it.",
    ]
    for section, keys in tree_of(entries).items():
        lines += ["", *_lines(section, keys, section, reasons)]
    return "\n".join(lines) + "\n"


def _lines(
    key: str, value: Any, dotted: str, reasons: Mapping[str, str], indent: str = ""
) -> Iterator[str]:
    """Yield the lines of one key, with its reason as a comment, and of all keys below
    it. dotted: its full name; reasons: by full names.
    """
    # A mapping that `reasons` has is the value of one key, such as `columns`.
    if isinstance(value, dict) and dotted not in reasons:
        yield f"{indent}{key}:"
        for below, inner in value.items():
            yield from _lines(below, inner, f"{dotted}.{below}", reasons, f"{indent}  ")
        return
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    plain = text.removesuffix("...\n").rstrip()  # YAML's end mark after a plain value
    line = f"{indent}{key}: {plain}"
    reason = reasons.get(dotted, "")
    yield f"{line:<{TREE_WIDTH}}  # {reason}" if reason else line
