"""Checks for combinations of a recipe's keys that cannot work, or that megatron-core
computes wrongly without warning.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megarl.core.recipe.tree import FP8_MULTIPLE, LM_EVAL, Length, Model, Recipe, Rows

GRADERS = ("math", "exact", "code", "reasoning-gym", "format")
"""Built-in graders; others are services and functions."""
RESERVED = {
    "answer": "the task's own grader",
    "trusted": "the trusted grader",
    "total": "the sum of all rewards",
    "turns": "the sum of an agent's rewards after its turns",
}
"""Names that no reward may have."""
OF_USERS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
LOSSES = ("cispo", "clip", "dppo", "gmpo", "gspo", "reinforce")
"""Built-in losses; others are functions."""
ALGORITHMS = {
    "grpo": "GRPO's loss is clip; the recipe grpo has the rest of it",
    "dapo": "DAPO's loss is clip; the recipe dapo has the rest of it",
    "dr-grpo": "Dr. GRPO's loss is clip; the recipe dr-grpo has the rest of it",
    "ppo": "PPO's loss is clip; the recipe ppo-critic has the rest of it",
    "rloo": "RLOO's loss is reinforce, with batch.centring: leave_one_out",
}
"""Algorithms that people give as a loss, and what to write."""
ENVIRONMENTS = ("python", "calculator", "guessing")
"""Built-in environments; others are classes."""


def impossible(r: Recipe) -> Iterator[str]:
    """Yield each problem in the recipe as `key: what is wrong, what to do`."""
    for rules in RULES:
        yield from rules(r)


def _layout(r: Recipe) -> Iterator[str]:
    """Check parallelism and precision of the learner's model."""
    m = r.model
    ranks = r.resources.learner_ranks
    experts = m.expert_parallel * m.expert_tensor_parallel * m.pipeline_parallel
    for copy, size in (
        ("model of TP x PP x CP", m.model_parallel_size),
        ("experts of EP x ETP x PP", experts),
    ):
        if ranks % size:
            yield (
                f"resources.learner_ranks: {ranks} ranks do not divide into copies of the {copy} ="
                f" {size} ranks; use a multiple of {size}"
            )
    if m.moe.freeze_router and m.moe.aux_loss:
        yield (
            "model.moe.aux_loss: balances by training the router, which model.moe.freeze_router"
            " forbids; unset one of them"
        )
    if m.moe.shared_overlap and m.expert_parallel * m.expert_tensor_parallel == 1:
        yield (
            "model.moe.shared_overlap: hides the exchange of tokens between ranks, and with"
            " model.expert_parallel of 1 there is none; set it to false"
        )
    if m.virtual_pipeline_parallel > 1 and m.pipeline_parallel == 1:
        yield "model.virtual_pipeline_parallel: needs model.pipeline_parallel of 2 or more"
    if m.fp8 != "none" and m.dtype != "bf16":
        yield "model.fp8: needs bf16 weights; set model.dtype=bf16, or model.fp8=none"
    if not ranks % m.model_parallel_size and r.batch.prompts % r.data_parallel:
        yield (
            f"batch.prompts: {r.batch.prompts} is not divisible by the {r.data_parallel}"
            " data-parallel ranks (resources.learner_ranks / TP x PP x CP); use a multiple"
        )


def _prompts(r: Recipe) -> Iterator[str]:
    """Check templates, sources of prompts, and names of suites."""
    for key, rows in _rows(r).items():
        if rows.system and rows.template == "raw":
            yield f"{key}.system: a system message needs template: chat"
        if rows.template_options and rows.template == "raw" and not rows.agent:
            yield (
                f"{key}.template_options: options of a chat template need template: chat, or an"
                " agent"
            )
    for name, task in r.data.tasks.items():
        if task.train.startswith(LM_EVAL):
            yield (
                f"data.tasks.{name}.train: {task.train} is a task of lm-eval, which only"
                " evaluation.suites can have"
            )
    for name, suite in r.evaluation.suites.items():
        key = f"evaluation.suites.{name}"
        if name in r.data.tasks:
            yield (
                f"{key}: a task has this name, and its held-out prompts are scored under it; choose"
                " another"
            )
        if "{prompt}" not in suite.prompt:
            yield f"{key}.prompt: {suite.prompt!r} has no {{prompt}}, the place of the row's prompt"


def _scores(r: Recipe) -> Iterator[str]:
    """Check which score is forecast and decides when to stop."""
    scored = [*r.data.tasks, *r.evaluation.suites]
    if r.evaluation.forecast and r.evaluation.forecast not in scored:
        yield (
            f"evaluation.forecast: {r.evaluation.forecast!r} is neither a task nor a suite of this"
            f" recipe; {_suggestion(r.evaluation.forecast, scored)}"
        )
    if r.run.stop_when and len(r.data.tasks) > 1 and not r.forecast_column:
        yield (
            f"run.stop_when: one of the tasks ({', '.join(r.data.tasks)}) must decide when to stop;"
            " name it in evaluation.forecast"
        )


def _advantages(r: Recipe) -> Iterator[str]:
    """Check what the advantages are made of, and that it goes together."""
    if r.batch.centring == "none" and r.batch.advantage == "group":
        yield (
            "batch.advantage: a group without variance has no deviation to divide an uncentred"
            " reward by; use batch or none, or set batch.centring"
        )
    from_reward = r.reference.coefficient > 0 and not r.reference.in_loss
    if r.batch.truncated == "drop" and from_reward and not r.has_critic:
        yield (
            "batch.truncated: the reference scores only rollouts in the loss, so that k1, which is"
            " subtracted from the reward, would spare the truncated ones; set"
            " reference.estimator=k2 or k3, or keep"
        )
    if not r.has_critic:
        return
    if r.batch.advantage == "group":
        yield (
            "batch.advantage: a critic gives each token its advantage, not each group; use batch,"
            " running or none"
        )
    yield from _keeps_all_groups(r, "a critic")
    yield from _ends_warm_up(
        r, "critic.warmup_steps", r.critic.warmup_steps, "to train the policy in"
    )


def _keeps_all_groups(r: Recipe, second_source: str) -> Iterator[str]:
    """Check that no group is dropped if the model learns from more than rewards.
    second_source: what else it learns from.
    """
    if r.batch.zero_variance != "keep":
        yield (
            f"batch.zero_variance: with {second_source} a group of equal rewards has a gradient"
            f" too; set keep, not {r.batch.zero_variance}"
        )


def _ends_warm_up(r: Recipe, key: str, steps: int, use: str) -> Iterator[str]:
    if steps >= r.run.steps:
        yield (
            f"{key}: a warm-up of {steps} steps leaves none of run.steps={r.run.steps} {use};"
            " shorten it"
        )


def _losses(r: Recipe) -> Iterator[str]:
    algorithm = r.loss.kind.lower().replace("_", "-")
    if algorithm in ALGORITHMS:
        yield f"loss.kind: {r.loss.kind!r} is not a loss but an algorithm: {ALGORITHMS[algorithm]}"
    else:
        yield from _named("loss.kind", r.loss.kind, "loss", LOSSES)
    if r.loss.kind not in LOSSES and r.loss.correction != "none":
        yield (
            "loss.correction: your own loss applies the importance weight itself; bound it there,"
            " and set none here"
        )
    if r.loss.kind == "cispo" and r.loss.correction != "none":
        yield "loss.correction: cispo already truncates the importance weight; use loss.cap"
    if r.loss.kind in ("gmpo", "gspo") and r.loss.correction == "truncate":
        yield (
            f"loss.correction: {r.loss.kind} has one weight per sequence, so no token's can be"
            " truncated; use mask"
        )
    if r.loss.kind == "gmpo" and r.has_critic:
        yield (
            "loss.kind: gmpo needs one advantage per rollout, but a critic gives each token its"
            " own; use another loss"
        )
    if r.loss.lower and (r.loss.correction != "mask" or r.loss.lower >= r.loss.cap):
        yield (
            f"loss.lower: needs loss.correction=mask, and a value below loss.cap ({r.loss.cap:g});"
            " set these, or 0 here"
        )
    if r.loss.sequence_mask:
        low, high = r.loss.sequence_mask
        if not 0 <= low < 1 < high:
            yield (
                "loss.sequence_mask: give [low, high] around 1, such as [0.99, 1.01], not"
                f" {list(r.loss.sequence_mask)}"
            )


def _teacher(r: Recipe) -> Iterator[str]:
    if not r.teacher.weight:
        return
    if not r.teacher.url:
        yield (
            "teacher.url: teacher.weight above 0 needs a teacher; give an SGLang server's address"
            " (`megarl serve --model DIR` starts one), or set teacher.weight=0"
        )
    yield from _keeps_all_groups(r, "a teacher")
    if r.has_critic:
        yield (
            "teacher.weight: with batch.centring=critic the critic gives tokens their advantages;"
            " set another centring"
        )
    if r.loss.kind == "gmpo":
        yield (
            "loss.kind: gmpo needs one advantage per rollout, but a teacher gives each token its"
            " own; use another loss"
        )
    if r.sampling.temperature != 1:
        yield (
            "sampling.temperature: the teacher scores at temperature 1, but rollouts are sampled"
            f" at {r.sampling.temperature:g}; set 1"
        )


def _learner(r: Recipe) -> Iterator[str]:
    """Check the warm-up against the schedule, the optimiser's offload, and the steps to
    profile.
    """
    optimizer = r.learner.optimizer
    profiled = r.monitor.profile_steps
    if profiled and not 0 <= profiled[0] <= profiled[1]:
        yield f"monitor.profile_steps: should be [first, last], 0 or more, got {list(profiled)}"
    if optimizer.schedule != "constant":
        use = f"for the schedule {optimizer.schedule}"
        steps = optimizer.warmup_steps
        if r.has_critic and r.critic.warmup_steps:
            use += " (critic.warmup_steps included)"
            steps += r.critic.warmup_steps
        yield from _ends_warm_up(r, "learner.optimizer.warmup_steps", steps, use)
    if r.learner.optimizer_offload and r.model.dtype != "bf16":
        reason = "loss scaling (model.dtype=fp16) has not been tested with an offloaded optimiser"
        if r.model.dtype == "fp32":
            reason = (
                "megatron-core cannot load the offloaded optimiser of FP32 weights from a"
                " checkpoint"
            )
        yield f"learner.optimizer_offload: {reason}; set model.dtype=bf16, or 0 here"


def _sharing(r: Recipe) -> Iterator[str]:
    """Check settings that depend on whether servers and learner share GPUs."""
    if not r.resources.colocate:
        if r.weights.transport == "cuda_ipc":
            yield (
                "weights.transport: cuda_ipc shares memory within a GPU, but learner and servers"
                " are on different GPUs; set process_group, or resources.colocate=true"
            )
        return
    gpus = r.resources.servers * r.resources.server_tensor_parallel
    if gpus != r.resources.learner_ranks:
        yield (
            "resources.colocate: each GPU has a learner rank and (a part of) a server, but the"
            f" servers take {gpus} GPUs and resources.learner_ranks is {r.resources.learner_ranks};"
            " make them equal"
        )
    if r.weights.transport == "process_group":
        yield (
            "weights.transport: with resources.colocate server and learner share a GPU, and NCCL"
            " cannot connect two processes on one GPU; set weights.transport=cuda_ipc"
        )
    if r.weights.transport == "cuda_ipc" and r.model.pipeline_parallel > 1:
        yield (
            "weights.transport: cuda_ipc shares memory within a GPU, but with"
            " model.pipeline_parallel a GPU has only some of the layers; set"
            " model.pipeline_parallel=1, or weights.transport=disk"
        )
    if r.serving.memory_fraction is None:
        yield (
            "serving.memory_fraction: with resources.colocate say which share of a GPU the servers"
            " may fill, such as 0.4; the learner gets the rest"
        )


def _serving(r: Recipe) -> Iterator[str]:
    """Check how servers divide experts, and what they may compute in FP8."""
    if r.serving.expert_parallel and r.resources.server_tensor_parallel == 1:
        yield (
            "serving.expert_parallel: divides the experts among a server's GPUs, and with"
            " resources.server_tensor_parallel of 1 there is one; set it to false"
        )
    if r.model.dtype == "bf16":
        return
    if r.serving.quantization == "fp8":
        yield (
            "serving.quantization: FP8 products give bf16 numbers; set model.dtype=bf16, or"
            " serving.quantization=none"
        )
    if r.serving.kv_cache_dtype == "fp8_e4m3":
        yield (
            "serving.kv_cache_dtype: fp8_e4m3 goes with bf16; set model.dtype=bf16, or"
            " serving.kv_cache_dtype=auto"
        )


def _budgets(length: Length) -> Iterator[str]:
    """Check that thinking budgets are intervals, and rise from stage to stage."""
    budgets = [("stages", stage.thinking_tokens) for stage in length.stages]
    budgets.append(("thinking_tokens", length.thinking_tokens))
    least = 1 if length.control == "interruption" else 0
    for key, (shortest, longest) in budgets:
        if not least <= shortest <= longest:
            yield f"length.{key}: give [shortest, longest], {least} or more"
    steps = [stage.until_step for stage in length.stages]
    if steps != sorted(set(steps)):
        yield (
            "length.stages: until_step must rise from stage to stage; it is"
            f" {', '.join(map(str, steps))}"
        )
    all_longest = [longest for _, (_, longest) in budgets]
    if all_longest != sorted(all_longest):
        yield (
            "length.stages: budgets must not fall, up to length.thinking_tokens; the longest are"
            f" {', '.join(map(str, all_longest))}"
        )


def _lengths(r: Recipe) -> Iterator[str]:
    """Check thinking budgets, and how thinking ends."""
    length = r.length
    end = length.end_of_thinking
    yield from _budgets(length)
    if end and not end.strip():
        yield (
            f"length.end_of_thinking: {end!r} is only white space, which every thinking trace"
            " contains; give what ends one"
        )
    if not end and length.control == "interruption":
        yield (
            "length.end_of_thinking: is empty, so no thinking trace is ever interrupted; set"
            " length.control=none, or give what ends a trace"
        )
    if length.control == "interruption" and not length.interruption.endswith(end):
        yield (
            "length.interruption: must end with length.end_of_thinking, or the model would go on"
            " thinking in its answer"
        )


DIVIDED = {
    "tensor_parallel": (
        "num_attention_heads",
        "num_query_groups",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_pos_emb_head_dim",
        "ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_parallel": ("num_moe_experts",),
    "expert_tensor_parallel": ("moe_ffn_hidden_size",),
}
"""The sizes, by megatron's names, that each kind of parallelism divides."""


def impossible_for(m: Model, sizes: Mapping[str, Any], recompute: str = "none") -> Iterator[str]:
    """Check a layout against a model's sizes: divisibility, and what megatron refuses.
    sizes: by megatron's names. recompute: `learner.recompute`.
    """
    yield from _undivided(m, sizes)
    if sizes.get("add_bias_linear") and m.expert_tensor_parallel > 1:
        yield (
            f"model.expert_tensor_parallel: experts of {m.path} have biases, which megatron does"
            " not divide; set it to 1 (checkpoints_tools: give --ep with --tp)"
        )
    if m.moe.bias_update_rate and not sizes.get("moe_router_enable_expert_bias"):
        yield f"model.moe.bias_update_rate: the routers of {m.path} have no bias; set it to 0"
    if m.fp8 != "none":
        yield from _impossible_in_fp8(m, sizes)
    if m.moe.shared_overlap and not sizes.get("moe_shared_expert_intermediate_size"):
        yield f"model.moe.shared_overlap: {m.path} has no shared experts; set it to false"
    if sizes.get("num_moe_experts"):
        return
    if recompute == "light":
        yield f"learner.recompute: light is for experts, and {m.path} has none; set it to selective"
    if m.expert_parallel > 1:
        yield f"model.expert_parallel: {m.path} has no experts; set it to 1"


def _undivided(m: Model, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Check that ranks divide the model's dimensions and layers."""
    for layout, names in DIVIDED.items():
        ranks = getattr(m, layout)
        for name in names:
            if (sizes.get(name) or 0) % ranks:
                yield f"model.{layout}: {name}={sizes[name]} of {m.path} is not divisible by {ranks}"
    layers = sizes.get("num_layers")
    if not layers:
        return
    chunks = m.pipeline_parallel * m.virtual_pipeline_parallel
    if m.virtual_pipeline_parallel > 1 and layers % chunks:
        yield (
            f"model.virtual_pipeline_parallel: num_layers={layers} of {m.path} is not divisible by"
            f" {chunks}; set it to 1"
        )
        return
    per_stage, in_last_stage = m.stage_layers(layers)
    if in_last_stage < 1:
        yield (
            f"model.pipeline_parallel: {m.pipeline_parallel} stages of {per_stage} are more than"
            f" num_layers={layers} of {m.path}; use fewer"
        )


def _impossible_in_fp8(m: Model, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Check that Transformer Engine can compute a rank's products in FP8."""
    if "kv_lora_rank" in sizes:
        yield f"model.fp8: is not implemented for the attention of {m.path}; set model.fp8=none"
    for name, size in _products(m, sizes).items():
        if size % FP8_MULTIPLE:
            yield (
                f"model.fp8: {name} of {m.path} is {size} on each rank, but products in FP8"
                f" need multiples of {FP8_MULTIPLE}; use another layout, or model.fp8=none"
            )


def _products(m: Model, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return the input and output widths of a rank's linear maps, by name; 0 if `sizes`
    does not determine them.
    """
    tp = m.tensor_parallel
    head_dim = sizes.get("kv_channels", 0)
    heads = sizes.get("num_attention_heads", 0)
    groups = sizes.get("num_query_groups", 0)
    return {
        "hidden_size": sizes.get("hidden_size", 0),
        "kv_channels x num_attention_heads": head_dim * heads // tp,
        "kv_channels x (num_attention_heads + 2 num_query_groups)": (
            head_dim * (heads + 2 * groups) // tp
        ),
        "ffn_hidden_size": sizes.get("ffn_hidden_size", 0) // tp,
        "moe_shared_expert_intermediate_size": (
            sizes.get("moe_shared_expert_intermediate_size", 0) // tp
        ),
        "moe_ffn_hidden_size": sizes.get("moe_ffn_hidden_size", 0) // m.expert_tensor_parallel,
    }


def _shortest_room(length: Length) -> int:
    """Return the tokens of a run's shortest budget for thinking and replies."""
    rooms = []
    for stage in (length, *(length.at(stage.until_step - 1) for stage in length.stages)):
        if stage.control == "interruption":
            rooms.append(stage.thinking_tokens[0])
        else:
            rooms.append(stage.completion_tokens)
    return min(rooms)


def _environments(r: Recipe) -> Iterator[str]:
    """Check for unknown environments, and replies that cannot fit."""
    room = _shortest_room(r.length)
    for key, rows in _rows(r).items():
        if not rows.environment:
            continue
        yield from _named(
            f"{key}.environment",
            rows.environment,
            "environment",
            ENVIRONMENTS,
            "package.module:Class",
        )
        if rows.environment == "python" and "code" in rows.graders:
            yield (
                f"{key}.environment: python runs every turn that has a program in it, so an answer"
                " for the grader code could never be the last turn; leave one of them out"
            )
        if rows.reply_tokens >= room:
            yield (
                f"{key}.reply_tokens: a reply of {rows.reply_tokens} tokens leaves nothing of the"
                f" shortest budget for thinking and replies, which is {room}"
                " (length.thinking_tokens); lower it"
            )


def _agents(r: Recipe) -> Iterator[str]:
    """Check tasks and suites with an agent, and what a run with one cannot have."""
    for key, rows in _rows(r).items():
        if rows.agent:
            yield from _agent_rows(key, rows)
            yield from _agent_run(r, key)


def _agent_rows(key: str, rows: Rows) -> Iterator[str]:
    """Check the keys of a task or suite with an agent."""
    if isinstance(rows.agent, str) and not OF_USERS.fullmatch(rows.agent):
        yield (
            f"{key}.agent: {rows.agent!r} is not a package.module:function; give a command as a"
            " list: [python, agent.py]"
        )
    if rows.environment:
        yield (
            f"{key}.agent: a task has an environment or an agent, not both; leave one of them out"
        )
    if rows.template != "raw" or rows.system:
        yield (
            f"{key}.template: an agent is given the prompt as it is, and its requests get the"
            " template; leave it out"
        )


def _agent_run(r: Recipe, key: str) -> Iterator[str]:
    """Check what a run cannot have with an agent in the task or suite at `key`."""
    if r.model.moe.routing_replay:
        yield (
            f"{key}.agent: experts are not recorded for an agent's paths; set"
            " model.moe.routing_replay=false"
        )
    if r.teacher.weight:
        yield f"{key}.agent: a teacher cannot score an agent's paths; set teacher.weight=0"
    if r.agent.credit == "turn" and r.has_critic:
        yield (
            "agent.credit: with batch.centring=critic the critic gives turns their advantages;"
            " set episode"
        )
    if r.agent.credit == "turn" and r.loss.kind == "gmpo":
        yield (
            "agent.credit: gmpo needs one advantage per rollout, but turns have their own; set"
            " episode"
        )
    if r.length.control == "overlong_penalty":
        yield (
            f"{key}.agent: length.control=overlong_penalty is for one completion, but a session"
            " has many; set none"
        )


def _named(
    key: str,
    name: str,
    thing: str,
    built_in: Sequence[str],
    users: str = "package.module:function",
) -> Iterator[str]:
    """Check that a name is known, or has the form of a user's own function or class."""
    if name not in built_in and not OF_USERS.fullmatch(name):
        yield f"{key}: unknown {thing} {name!r}; {_suggestion(name, built_in)}, and {users}"


def _suggestion(name: str, names: Sequence[str]) -> str:
    """Return a text that suggests the name that was meant, and lists all of them."""
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def _rows(r: Recipe) -> dict[str, Rows]:
    """Return tasks and suites by their dotted keys."""
    rows: dict[str, Rows] = {f"data.tasks.{name}": task for name, task in r.data.tasks.items()}
    for name, suite in r.evaluation.suites.items():
        rows[f"evaluation.suites.{name}"] = suite
    return rows


def _graders(r: Recipe) -> Iterator[str]:
    """Check for unknown graders, and services with a grader's name."""
    for key, grader in _named_graders(r).items():
        yield from _named(key, grader, "grader", (*GRADERS, *r.data.services))
    for name, task in r.data.tasks.items():
        if task.train.startswith("reasoning-gym:") and task.grader in ("math", "exact"):
            yield (
                f"data.tasks.{name}.grader: problems of reasoning-gym need grader: reasoning-gym,"
                " or one of your own"
            )
    for name in r.data.services:
        if name in GRADERS:
            yield f"data.services.{name}: a built-in grader has this name; choose another"


def _named_graders(r: Recipe) -> dict[str, str]:
    """Return every grader that the recipe names, by its key."""
    graders = {}
    for name, task in r.data.tasks.items():
        if task.trusted_grader:
            graders[f"data.tasks.{name}.trusted_grader"] = task.trusted_grader
    for key, rows in _rows(r).items():
        graders[f"{key}.grader"] = rows.grader
        for name, reward in rows.rewards.items():
            graders[f"{key}.rewards.{name}.grader"] = reward.grader
    return graders


def _reward_names(r: Recipe) -> Iterator[str]:
    """Check for rewards with a reserved name."""
    for key, rows in _rows(r).items():
        for name in sorted(RESERVED.keys() & rows.rewards.keys()):
            yield (
                f"{key}.rewards.{name}: {RESERVED[name]} is logged under this name; choose another"
            )


RULES: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _layout,
    _prompts,
    _scores,
    _sharing,
    _serving,
    _lengths,
    _reward_names,
    _graders,
    _environments,
    _agents,
    _advantages,
    _losses,
    _teacher,
    _learner,
)
