"""Finds the model that `--model` means, and the recipe with which it is asked.

    DIR        a Hugging Face directory        its own template, its whole context (at
                                               most CONTEXT), no interruption; asked
                                               about RUN:TASK, the lengths and the end
                                               of thinking of that run
    RUN        the newest checkpoint of a run  lengths, end of thinking and template as
                                               in the run's training
    RUN@STEP   an earlier checkpoint           the same
    RUN@best   that of the highest score       the same

The user's key=value arguments override all of these settings.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.hf_files import gguf_advice, read_config, text_config
from megarl.core.base.model_directory import open_model, open_served_model
from megarl.core.base.retention import named_checkpoint, split_name
from megarl.core.base.rundir import RunDir, complete, step_of
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.recipe import Recipe, from_tree, load, load_suite, shipped_suites
from megarl.core.recipe.data import LM_EVAL
from megarl.run import devices
from megarl.tasks.data.chat import load_chat, template_source

CONTEXT = 16_384
"""Most tokens of prompt and completion for a directory: ScaleRL's 14k, and room for the
prompt.
"""
ENDS_OF_THINKING = ("</think>", "<|channel|>final<|message|>")
"""The answer of gpt-oss is in its last channel."""
KV_TOKENS = 65_536
"""KV tokens of a server without a GPU, which needs a number; at least the longest
sequence.
"""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Subject(NamedTuple):
    """The model to ask. source: a Hugging Face directory, or a run's checkpoint; hf:
    the directory with its configuration and tokenizer; run: the run that a checkpoint
    belongs to.
    """

    name: str
    source: Path
    hf: Path
    run: RunDir | None = None

    @property
    def identity(self) -> dict[str, object]:
        """The path of the model, and name, size and time of every file. It is equal as
        long as the model is unchanged.
        """
        files = []
        for path in sorted(path for path in self.source.rglob("*") if path.is_file()):
            name = str(path.relative_to(self.source))
            files.append([name, path.stat().st_size, path.stat().st_mtime_ns])
        return {"path": str(self.source.resolve()), "files": files}


def subject_of(model: str) -> Subject:
    """Return the model that `--model` names. MegarlError if there is none."""
    path, checkpoint_name = split_name(model)
    if path.is_dir() and (path / "config.json").is_file():
        open_served_model(path)
        return Subject(str(path), path, path)
    rundir = RunDir(path)
    if not rundir.recipe.is_file():
        problem = (
            f"{model!r} is neither a Hugging Face directory (config.json) nor a run (recipe.yaml)"
            " nor RUN@STEP nor RUN@best"
        )
        advice = gguf_advice(path)
        if advice:
            problem += f"; {advice}"
        raise MegarlError(f"--model: {problem}")
    checkpoints = complete(rundir.checkpoints)
    if not checkpoints:
        raise MegarlError(
            f"--model: {path} has no complete checkpoint yet; there is one every checkpoint.every"
            " steps"
        )
    checkpoint = checkpoints[-1]
    if checkpoint_name:
        checkpoint = named_checkpoint(path, checkpoint_name)
    return Subject(f"{path}@{step_of(checkpoint)}", checkpoint, checkpoint / "hf", rundir)


class NamedSuite(NamedTuple):
    """A suite or task that `--suite` names. keys: its section of evaluation.suites;
    owner: the recipe that it is of, whose services it may use.
    """

    name: str
    keys: dict[str, object]
    owner: Recipe


def recipe_of(
    subject: Subject,
    words: Sequence[str],
    options: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
) -> tuple[Recipe, list[str]]:
    """Return the recipe to ask with, and names of the suites asked for. words: those of
    --suite; options: overrides of each suite, as `samples=4`; overrides: of the whole
    recipe; folder: of the answers.
    """
    base = _base_recipe(subject, words, overrides, folder)
    named = [_suite(word, base) for word in dict.fromkeys(words)]
    suites = {suite.name: suite.keys for suite in named}
    if len(suites) < len(named):
        raise MegarlError(
            f"--suite: two of {', '.join(words)} have one name; evaluate each with its own --out"
        )
    tree = base.model_dump(mode="json")
    tree["data"]["decontaminate"] = _decontaminate(named, words)
    template = _template(base, subject.hf)
    for name, keys in suites.items():
        if not keys.get("agent"):  # of an agent, each request gets the template instead
            suites[name] = template | keys
    for suite in named:
        tree["data"]["services"] |= suite.owner.model_dump(mode="json")["data"]["services"]
    tree["data"]["tasks"] = {}
    tree["evaluation"]["forecast"] = ""
    tree["evaluation"]["suites"] = suites
    suite_overrides = [
        f"evaluation.suites.{name}.{option}" for name in suites for option in options
    ]
    return from_tree(tree, [*suite_overrides, *overrides]), list(suites)


def _base_recipe(
    subject: Subject, words: Sequence[str], overrides: Sequence[str], folder: Path
) -> Recipe:
    """Return the recipe of the subject's run, or for a directory the defaults with what
    its files say; in both cases with servers of its own, as many as the GPUs allow.
    """
    fixed = [
        f"run.dir={json.dumps(str(folder))}",
        "run.name=.servers",
        f"model.path={json.dumps(str(subject.hf))}",
        "model.moe.routing_replay=false",
        "resources.colocate=false",  # no learner shares the servers' GPUs, or sends weights
        "weights.transport=disk",
    ]
    width = 1
    if subject.run:
        width = load(str(subject.run.recipe)).resources.server_tensor_parallel
    for override in overrides:
        match = re.fullmatch(r"resources\.server_tensor_parallel=(\d+)", override)
        if match:
            width = int(match[1])
            break
    servers = max(1, len(devices.gpus()) // width)
    fixed.append(f"resources.servers={servers}")
    if subject.run:
        return load(str(subject.run.recipe), fixed)
    return from_tree({}, [*fixed, *_of_directory(subject.hf), *_lengths_of_runs(words)])


def _decontaminate(named: Sequence[NamedSuite], words: Sequence[str]) -> Sequence[str]:
    """Return the data.decontaminate of the runs whose tasks are asked: it decides which
    of a task's rows are held out. Empty without such a task. MegarlError if the runs
    have different ones.
    """
    settings = {suite.owner.data.decontaminate for suite in named if suite.keys.get("heldout")}
    if len(settings) > 1:
        problem = "have tasks with another data.decontaminate"
        raise MegarlError(
            f"--suite: the runs of {', '.join(words)} {problem}; evaluate each with its own --out"
        )
    return next(iter(settings), ())


def _suite(word: str, base: Recipe) -> NamedSuite:
    """Return the suite that a word of --suite names: a suite or task (held-out prompts)
    of the recipe `base`, a shipped suite, lm-eval:TASK, a YAML file, RUN:TASK.
    MegarlError if it names none.
    """
    if word in base.evaluation.suites:
        return NamedSuite(word, base.evaluation.suites[word].model_dump(mode="json"), base)
    if word in base.data.tasks:
        return NamedSuite(word, _heldout(word, base), base)
    if word in shipped_suites():
        return NamedSuite(word, {}, base)
    if word.startswith(LM_EVAL):
        return NamedSuite(_harness_name(word), {"data": word}, base)
    if word.endswith((".yaml", ".yml")):
        if not Path(word).is_file():
            raise MegarlError(f"--suite: {word!r} is not a file")
        return NamedSuite(Path(word).stem, load_suite(Path(word)), base)
    run, _, task = word.rpartition(":")
    if run:
        return _suite_of_run(run, task)
    own_suites = base.evaluation.suites
    names = dict.fromkeys([*shipped_suites(), *own_suites, *base.data.tasks])
    raise MegarlError(
        f"--suite: {word!r} is not one of {', '.join(names)}, nor RUN:TASK, lm-eval:TASK or a"
        " YAML file"
    )


def _suite_of_run(run: str, task: str) -> NamedSuite:
    """Return the held-out prompts of a run's task. MegarlError if there is none."""
    recipe = _recipe_of_run(run)
    if task not in recipe.data.tasks:
        raise MegarlError(
            f"--suite: {run} has no task {task!r}; it has {', '.join(recipe.data.tasks)}"
        )
    return NamedSuite(task, _heldout(task, recipe), recipe)


def _harness_name(word: str) -> str:
    """Return a suite's name for a task of lm-eval, or for the YAML file of one."""
    task = Path(word.removeprefix(LM_EVAL)).stem
    return re.sub(r"[^A-Za-z0-9_-]", "-", task)


def _recipe_of_run(path: str) -> Recipe:
    return load(str(RunDir.opened(Path(path)).recipe))


def _lengths_of_runs(words: Sequence[str]) -> list[str]:
    """Return the lengths of the run whose tasks are asked, as key=value, so that a
    directory and the run's own checkpoints get equal questions with equal room for the
    answer. Empty without RUN:TASK.
    """
    runs = dict.fromkeys(word.rpartition(":")[0] for word in words if _is_task_of_run(word))
    lengths = [_recipe_of_run(run).length.model_dump(mode="json") for run in runs]
    if not lengths:
        return []
    if any(length != lengths[0] for length in lengths):
        advice = "evaluate each with its own --out"
        raise MegarlError(f"--suite: {', '.join(runs)} have different keys under length; {advice}")
    return [f"length.{key}={json.dumps(value)}" for key, value in lengths[0].items()]


def _is_task_of_run(word: str) -> bool:
    """Return whether a word of --suite has the form RUN:TASK."""
    is_file = word.endswith((".yaml", ".yml"))
    return ":" in word and not is_file and not word.startswith(LM_EVAL)


def _heldout(name: str, base: Recipe) -> dict[str, object]:
    """Return a suite's keys for the held-out prompts of a task, with as many prompts
    and samples as the run's own evaluations have.
    """
    task = base.data.tasks[name]
    keys = task.model_dump(mode="json", exclude={"train", "heldout", "weight", "trusted_grader"})
    if isinstance(task.heldout, str):  # a set of its own
        keys["data"] = task.heldout
    else:  # so many rows of the training set
        keys |= {"data": task.train, "heldout": task.heldout}
    return keys | {"samples": base.evaluation.samples, "prompts": base.evaluation.prompts}


def _of_directory(hf: Path) -> list[str]:
    """Return the settings, as key=value, that follow from a model's own files."""
    config = text_config(read_config(hf), hf / "config.json")
    dtype = config.get("dtype", config.get("torch_dtype")) or open_model(hf).dtype
    if dtype not in DTYPES:
        advice = f"convert it to one of {', '.join(DTYPES)}"
        raise MegarlError(f"{hf / 'config.json'}: dtype {dtype!r} is not supported; {advice}")
    context = min(CONTEXT, config.get("max_position_embeddings") or CONTEXT)
    prompt_or_answer = max(1, min(2048, context // 4))  # tokens of each
    thinking = max(1, context - 2 * prompt_or_answer)
    kv_tokens = str(max(KV_TOKENS, context))
    if devices.gpus():
        kv_tokens = "null"  # as many as fit
    return [
        f"model.dtype={DTYPES[dtype]}",
        "length.control=none",
        f"length.prompt_tokens={prompt_or_answer}",
        f"length.thinking_tokens=[{thinking}, {thinking}]",
        f"length.answer_tokens={prompt_or_answer}",
        f"length.end_of_thinking={json.dumps(_end_of_thinking(hf))}",
        f"serving.kv_tokens={kv_tokens}",
    ]


def _end_of_thinking(hf: Path) -> str:
    """Return the end of thinking in a model's vocabulary or template; "" if none."""
    files = [hf / "chat_template.jinja", hf / "tokenizer_config.json"]
    texts = "".join(_text(path) for path in files if path.is_file())
    vocabulary = load_tokenizer(hf).backend.get_vocab()
    return next((end for end in ENDS_OF_THINKING if end in vocabulary or end in texts), "")


def _text(path: Path) -> str:
    """Return a file's text, to look for marks in it. Bytes that are not UTF-8 are
    `template_source`'s to refuse.
    """
    return contents(path).decode(errors="replace")


def _template(recipe: Recipe, hf: Path) -> dict[str, Any]:
    """Return the keys of a suite for the template that the run's tasks share.

    If the tasks have several, or there is no task, it is the model's own, or `raw` for
    a model without one. MegarlError if the model has one that cannot be read: without
    it, the score would be another.
    """
    keys = {"template", "system", "template_options"}
    trained = [
        task.model_dump(include=keys) for task in recipe.data.tasks.values() if not task.agent
    ]
    if trained and all(settings == trained[0] for settings in trained):
        return trained[0]
    has_tokenizer = (hf / "tokenizer_config.json").is_file()
    if has_tokenizer and template_source(hf):
        load_chat(hf)
        return {"template": "chat"}
    return {"template": "raw"}
