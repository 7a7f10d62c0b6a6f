"""The tiny twin of every shipped recipe: the recipe itself, with overrides that make it
small enough for two CPU cores.

    twin("scalerl-8b") ──► overrides
        ──► megarl train scalerl-8b model.path=models/llama run.steps=4 …

A twin is run in a workplace that `tests.twin_models.write_workplace` makes. RULES is
the whole list of keys that a twin replaces; every other key is the recipe's own:
precision, loss, pipeline, aggregation, advantages, resampling, control of lengths,
critic, reference, graders, sandbox, templates, schedules, phrases.

What a twin cannot keep: an optimiser in the host's memory, for there is no GPU whose
memory that spares, and two processes on one GPU. `resources.colocate` with
`weights.transport: cuda_ipc` needs a GPU, so the twin of such a recipe publishes by
process group, as a recipe does whose servers have GPUs of their own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megarl.core import recipe as recipes
from megarl.core.recipe import Recipe, flat

FAMILIES = {
    "scalerl-17bx16": "llama4-multimodal",
    "scalerl-17bx16-h100": "llama4-multimodal",
    "quickstart-moe": "llama4",
    "quickstart-agent": "qwen3",
    "scalerl-1gpu": "qwen3",
    "qwen3-8b-2nodes": "qwen3",
    "qwen3-30b-a3b-2nodes": "qwen3-moe",
    "qwen3.5-35b-a3b-2nodes": "qwen3.5-moe",
    "glm-4.7-flash-2nodes": "glm4-moe-lite",
    "qwen3-8b-zero": "qwen3-base",
    "qwen3-8b-distill": "qwen3",
}
"""The model family of a recipe; all others have a Llama. Llama 4 Scout is released with
a vision tower; an agent's messages need a chat template that ends answers with the
model's own end token, as this Qwen3's does.
"""

PHASE_STEPS = (
    "a run is four steps, or two steps of a second phase: the first publication of trained weights"
    " is then included"
)


@dataclass(frozen=True)
class Rule:
    """Keys that match `pattern` get the value that `small` makes of the recipe and the
    key's value in it; `why` says by what measure. A key whose value is not changed by
    that stays out of the overrides.
    """

    pattern: str
    small: Callable[[Recipe, Any], Any]
    why: str


def fixed(value: Any) -> Callable[[Recipe, Any], Any]:
    return lambda recipe, old: value


def at_most(limit: float) -> Callable[[Recipe, Any], Any]:
    return lambda recipe, old: None if old is None else min(old, limit)


def steps(recipe: Recipe) -> int:
    return max(4, recipe.pipeline.phase_steps + 2)


def model_ranks(recipe: Recipe) -> int:
    """Ranks of one copy of the twin's model, and of one copy of its experts."""
    model = recipe.model
    of_a_stage = min(model.tensor_parallel, 2) * model.context_parallel
    of_its_experts = min(model.expert_parallel, 2)
    return max(of_a_stage, of_its_experts) * min(model.pipeline_parallel, 2)


RULES = (
    # Model and data
    Rule(
        "model.path",
        lambda r, old: f"models/{family_of(r)}",
        "a model of the same family, of 0.2 million parameters",
    ),
    Rule(
        "data.tasks.*.train",
        fixed("{kind}.jsonl"),
        "made prompts of the task's grader or environment",
    ),
    Rule("data.tasks.*.heldout", fixed("{kind}-heldout.jsonl"), "likewise, others"),
    # Layout: the same kinds of parallelism, each of two ranks; one data-parallel copy
    Rule("model.tensor_parallel", at_most(2), "several ranks are two"),
    Rule("model.pipeline_parallel", at_most(2), "several stages are two"),
    Rule("model.expert_parallel", at_most(2), "two of four experts a rank"),
    Rule(
        "resources.learner_ranks",
        lambda r, old: model_ranks(r),
        "one copy of the model: no data parallelism",
    ),
    Rule(
        "resources.servers",
        lambda r, old: min(old, 2 if r.resources.server_tensor_parallel == 1 else 1),
        "several are two; of servers that are tensor parallel themselves one, for each of its ranks"
        " is a process",
    ),
    Rule("resources.server_tensor_parallel", at_most(2), "several ranks are two"),
    Rule("resources.threads", fixed(1), "two cores for all roles"),
    Rule("resources.colocate", fixed(False), "NOT KEPT: there is no GPU to share"),
    Rule(
        "learner.optimizer_offload",
        fixed(0.0),
        "NOT KEPT: there is no GPU whose memory it would spare",
    ),
    Rule(
        "weights.transport",
        lambda r, old: "process_group" if old == "cuda_ipc" else old,
        "NOT KEPT: cuda_ipc needs a GPU",
    ),
    # Sizes
    Rule(
        "length.prompt_tokens",
        fixed(128),
        "a chat template with a system message takes about 100 characters",
    ),
    Rule(
        "length.thinking_tokens", fixed([6, 12]), "some thoughts are interrupted and some are not"
    ),
    Rule(
        "length.answer_tokens",
        fixed(40),
        "the program of the grader `code` has 24 characters; ordinary answers meet the "
        "overlong penalty",
    ),
    Rule("data.tasks.*.reply_tokens", lambda r, old: 4 if is_turns(r) else old, "a reply has one"),
    Rule("sampling.generations", fixed(4), "a group usually has answers of both kinds"),
    Rule("batch.prompts", fixed(4), "16 rollouts a step"),
    Rule("learner.microbatch_tokens", fixed(1024), "two or three micro-batches a step"),
    Rule("weights.bucket_mb", fixed(1), "the smallest"),
    Rule("evaluation.prompts", fixed(8), "16 answers of a task"),
    Rule("evaluation.samples", fixed(2), "16 answers of a task"),
    # Steps and intervals, and the rate that goes with the model's size
    Rule("run.steps", lambda r, old: steps(r), PHASE_STEPS),
    Rule("evaluation.every", lambda r, old: steps(r), "at the start and at the end"),
    Rule("checkpoint.every", lambda r, old: steps(r) // 2, "two of them"),
    Rule("learner.optimizer.warmup_steps", at_most(1), "of so few steps"),
    Rule(
        "learner.optimizer.lr",
        fixed(2e-4),
        "the quickstart's: a rate for billions of parameters moves none of these",
    ),
    Rule("critic.warmup_steps", at_most(2), "of so few steps"),
    Rule("critic.optimizer.lr", fixed(3e-4), "as above: that of ppo-critic with base=quickstart"),
    # Limits
    Rule("serving.kv_tokens", fixed(32768), "what fits is not known on a CPU"),
    Rule("serving.memory_fraction", fixed(None), "a GPU's"),
    Rule(
        "serving.max_running_requests",
        at_most(16),
        "a batch at a time, so that weights change between them",
    ),
    Rule("weights.timeout_s", fixed(120), "of a busy machine"),
)
"""Every key that a twin replaces, by what, and why."""


def twin(name: str) -> tuple[str, ...]:
    """The overrides that make the shipped recipe of this name its twin."""
    recipe = recipes.load(name)
    keys = flat(recipe.model_dump(mode="json"))
    found = {}
    for key, old in keys.items():
        rule = next((rule for rule in RULES if fnmatchcase(key, rule.pattern)), None)
        new = old if rule is None else _named(rule.small(recipe, old), recipe, key)
        if new != old:
            found[key] = new
    return tuple(f"{key}={json.dumps(value)}" for key, value in found.items())


def family_of(recipe: Recipe) -> str:
    """Name of the model's directory in the workplace."""
    return FAMILIES.get(recipe.run.name, "llama")


def kind_of(recipe: Recipe, task: str) -> str:
    """What the prompts of a task are made for: its environment if it has one, or its
    grader.
    """
    rows = recipe.data.tasks[task]
    return rows.environment or rows.grader


def is_turns(recipe: Recipe) -> bool:
    return any(task.environment for task in recipe.data.tasks.values())


def _named(value: Any, recipe: Recipe, key: str) -> Any:
    """A name of a data file with the kind of the key's task in it."""
    if isinstance(value, str) and "{kind}" in value:
        return f"data/{value.format(kind=kind_of(recipe, key.split('.')[2]))}"
    return value
