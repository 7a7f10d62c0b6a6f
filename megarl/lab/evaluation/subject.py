"""Finds the model that `--model` means, and the recipe with which it is asked.

    DIR         a Hugging Face directory          its own template, its whole context (at most CONTEXT), no interruption;
                                                  asked about RUN:TASK, the lengths and
                                                  the end of thinking of that run
    RUN         the newest checkpoint of a run    lengths, end of thinking and template as in the run's training
    RUN@STEP    an earlier checkpoint             the same
    RUN@best    that of the highest score         the same

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
from megarl.run import devices
from megarl.tasks.data.chat import load_chat, template_source

# most tokens of prompt and completion for a directory: ScaleRL's 14k, and room for the
# prompt
CONTEXT = 16_384
ENDS_OF_THINKING = (
    "</think>",
    "<|channel|>final<|message|>",
)  # of gpt-oss the answer is in its last channel
# KV tokens of a server without a GPU, which needs a number; at least the longest
# sequence
KV_TOKENS = 65_536
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
        files = sorted(path for path in self.source.rglob("*") if path.is_file())
        return {
            "path": str(self.source.resolve()),
            "files": [
                [str(f.relative_to(self.source)), f.stat().st_size, f.stat().st_mtime_ns]
                for f in files
            ],
        }


def subject_of(model: str) -> Subject:
    """Return the model that `--model` names. MegarlError if there is none."""
    path, which = split_name(model)
    if path.is_dir() and (path / "config.json").is_file():
        open_served_model(path)
        return Subject(str(path), path, path)
    rundir = RunDir(path)
    if not rundir.recipe.is_file():
        neither = (
            "neither a Hugging Face directory (config.json) nor a run (recipe.yaml) nor RUN@STEP"
            " nor RUN@best"
        )
        advice = gguf_advice(path)
        raise MegarlError(f"--model: {model!r} is {neither}{'; ' if advice else ''}{advice}")
    if not (there := complete(rundir.checkpoints)):
        raise MegarlError(
            f"--model: {path} has no complete checkpoint yet; there is one every checkpoint.every"
            " steps"
        )
    chosen = named_checkpoint(path, which) if which else there[-1]
    return Subject(f"{path}@{step_of(chosen)}", chosen, chosen / "hf", rundir)


def recipe_of(
    subject: Subject,
    suites: Sequence[str],
    options: Sequence[str],
    overrides: Sequence[str],
    out: Path,
) -> tuple[Recipe, list[str]]:
    """Return the recipe to ask with, and names of the suites asked for. options:
    overrides of each suite, as `samples=4`.
    """
    run = subject.run
    widths = [
        int(m[1])
        for o in overrides
        if (m := re.fullmatch(r"resources\.server_tensor_parallel=(\d+)", o))
    ]
    widths.append(load(str(run.recipe)).resources.server_tensor_parallel if run else 1)
    servers = max(1, len(devices.gpus()) // widths[0])  # as many as the GPUs allow
    fixed = [
        f"run.dir={json.dumps(str(out))}",
        "run.name=.servers",
        f"model.path={json.dumps(str(subject.hf))}",
        "model.moe.routing_replay=false",
        "resources.colocate=false",  # no learner shares the servers' GPUs, or sends weights
        "weights.transport=disk",
        f"resources.servers={servers}",
    ]
    if run:
        base = load(str(run.recipe), fixed)
    else:
        base = from_tree({}, [*fixed, *_of_directory(subject.hf), *_lengths_of_runs(suites)])
    found = [_suite(word, base) for word in dict.fromkeys(suites)]
    if len(asked := {name: keys for name, keys, _ in found}) < len(found):
        raise MegarlError(
            f"--suite: two of {', '.join(suites)} have one name; evaluate each with its own --out"
        )
    tree = base.model_dump(mode="json")
    against = {
        owner.data.decontaminate for _, keys, owner in found if keys.get("heldout")
    }  # decides what is held out
    if len(against) > 1:
        what = "have tasks with another data.decontaminate"
        raise MegarlError(
            f"--suite: the runs of {', '.join(suites)} {what}; evaluate each with its own --out"
        )
    tree["data"]["decontaminate"] = next(iter(against), ())
    for _, _, owner in found:
        tree["data"]["services"] |= owner.model_dump(mode="json")["data"]["services"]
    tree["data"]["tasks"], tree["evaluation"]["forecast"] = {}, ""
    template = _template(base, subject.hf)  # an agent's requests get it, not its prompt
    tree["evaluation"]["suites"] = {
        n: keys if keys.get("agent") else template | keys for n, keys in asked.items()
    }
    given = [f"evaluation.suites.{name}.{option}" for name in asked for option in options]
    return from_tree(tree, [*given, *overrides]), list(asked)


def _suite(word: str, base: Recipe) -> tuple[str, dict[str, object], Recipe]:
    """Return a suite's name, its keys and the recipe that it is of. word: a suite or
    task (held-out prompts) of the run, a shipped suite, YAML, RUN:TASK.
    """
    if word in base.evaluation.suites:
        return word, base.evaluation.suites[word].model_dump(mode="json"), base
    if word in base.data.tasks:
        return word, _heldout(word, base), base
    if word in shipped_suites():
        return word, {}, base
    if word.endswith((".yaml", ".yml")):
        if not Path(word).is_file():
            raise MegarlError(f"--suite: {word!r} is not a file")
        return Path(word).stem, load_suite(Path(word)), base
    path, _, task = word.rpartition(":")
    if path:
        other = _recipe_of_run(path)
        if task not in other.data.tasks:
            raise MegarlError(
                f"--suite: {path} has no task {task!r}; it has {', '.join(other.data.tasks)}"
            )
        return task, _heldout(task, other), other
    known = [*shipped_suites(), *base.evaluation.suites, *base.data.tasks]
    raise MegarlError(
        f"--suite: {word!r} is not one of {', '.join(dict.fromkeys(known))}, nor RUN:TASK or a YAML"
        " file"
    )


def _recipe_of_run(path: str) -> Recipe:
    return load(str(RunDir.opened(Path(path)).recipe))


def _lengths_of_runs(suites: Sequence[str]) -> list[str]:
    """Return the lengths of the run whose tasks are asked, as key=value, so that a
    directory and the run's own checkpoints get equal questions with equal room for the
    answer. Empty without RUN:TASK.
    """
    runs = dict.fromkeys(word.rpartition(":")[0] for word in suites if _is_task_of_run(word))
    lengths = [_recipe_of_run(run).length.model_dump(mode="json") for run in runs]
    if not lengths:
        return []
    if any(length != lengths[0] for length in lengths):
        advice = "evaluate each with its own --out"
        raise MegarlError(f"--suite: {', '.join(runs)} have different keys under length; {advice}")
    return [f"length.{key}={json.dumps(value)}" for key, value in lengths[0].items()]


def _is_task_of_run(word: str) -> bool:
    is_file = word.endswith((".yaml", ".yml"))
    return ":" in word and not is_file


def _heldout(name: str, base: Recipe) -> dict[str, object]:
    task = base.data.tasks[name]
    kept = task.model_dump(mode="json", exclude={"train", "heldout", "weight", "trusted_grader"})
    rows = (
        {"data": task.heldout}
        if isinstance(task.heldout, str)
        else {"data": task.train, "heldout": task.heldout}
    )
    return kept | rows | {"samples": base.evaluation.samples, "prompts": base.evaluation.prompts}


def _of_directory(hf: Path) -> list[str]:
    """Return the settings, as key=value, that follow from a model's own files."""
    config = text_config(read_config(hf), hf / "config.json")
    dtype = config.get("dtype", config.get("torch_dtype")) or open_model(hf).dtype
    if dtype not in DTYPES:
        advice = f"convert it to one of {', '.join(DTYPES)}"
        raise MegarlError(f"{hf / 'config.json'}: dtype {dtype!r} is not supported; {advice}")
    context = min(CONTEXT, config.get("max_position_embeddings") or CONTEXT)
    answer = max(1, min(2048, context // 4))  # the same for the prompt
    thinking = max(1, context - 2 * answer)
    files = [
        path
        for name in ("chat_template.jinja", "tokenizer_config.json")
        if (path := hf / name).is_file()
    ]
    known = load_tokenizer(hf).backend.get_vocab()
    texts = "".join(_text(path) for path in files)
    end = next((end for end in ENDS_OF_THINKING if end in known or end in texts), "")
    return [
        f"model.dtype={DTYPES[dtype]}",
        "length.control=none",
        f"length.prompt_tokens={answer}",
        f"length.thinking_tokens=[{thinking}, {thinking}]",
        f"length.answer_tokens={answer}",
        f"length.end_of_thinking={json.dumps(end)}",
        f"serving.kv_tokens={'null' if devices.gpus() else max(KV_TOKENS, context)}",
    ]


def _text(path: Path) -> str:
    """Return a file's text, to look for marks in it. Bytes that are not UTF-8 are
    `template_source`'s to refuse.
    """
    return contents(path).decode(errors="replace")


def _template(recipe: Recipe, hf: Path) -> dict[str, Any]:
    """Return the template that the run's tasks share.

    If they have several, or there is no task, it is the model's own, or `raw` for a
    model without one. MegarlError if the model has one that cannot be read: a score
    without it would be another.
    """
    keys = {"template", "system", "template_options"}
    trained = [
        task.model_dump(include=keys) for task in recipe.data.tasks.values() if not task.agent
    ]
    if trained and all(one == trained[0] for one in trained):
        return trained[0]
    has_tokenizer = (hf / "tokenizer_config.json").is_file()
    if has_tokenizer and template_source(hf):
        load_chat(hf)
        return {"template": "chat"}
    return {"template": "raw"}
