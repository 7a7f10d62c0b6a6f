"""Checks for combinations of keys of several sections that cannot work, or that
megatron-core computes wrongly without warning.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.core.recipe.algorithm import keep_all_groups
from megarl.core.recipe.data import GRADERS, Rows
from megarl.core.recipe.generation import Length
from megarl.core.recipe.model import FP8_MULTIPLE, Model
from megarl.core.recipe.section import Section, suggestion, unknown_name
from megarl.core.recipe.tree import Recipe


def impossible(r: Recipe) -> Iterator[str]:
    """Yield each problem in the recipe as `key: what is wrong, what to do`."""
    yield from _problems_of_sections(r)
    for rules in RULES:
        yield from rules(r)


def _problems_of_sections(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the problems of this section and of those in it."""
    for problem in section.problems():
        yield f"{prefix}{problem}"
    for name, value in section:
        if isinstance(value, Section):
            yield from _problems_of_sections(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            for key, part in value.items():
                if isinstance(part, Section):
                    yield from _problems_of_sections(part, f"{prefix}{name}.{key}.")


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
    has_whole_copies = ranks % m.model_parallel_size == 0
    if has_whole_copies and r.batch.prompts % r.data_parallel:
        yield (
            f"batch.prompts: {r.batch.prompts} is not divisible by the {r.data_parallel}"
            " data-parallel ranks (resources.learner_ranks / TP x PP x CP); use a multiple"
        )


def _suites(r: Recipe) -> Iterator[str]:
    """Check names of suites."""
    for name in r.evaluation.suites:
        if name in r.data.tasks:
            yield (
                f"evaluation.suites.{name}: a task has this name, and its held-out prompts are scored under it; choose"
                " another"
            )


def _scores(r: Recipe) -> Iterator[str]:
    """Check which score is forecast and decides when to stop."""
    scored = [*r.data.tasks, *r.evaluation.suites]
    if r.evaluation.forecast and r.evaluation.forecast not in scored:
        yield (
            f"evaluation.forecast: {r.evaluation.forecast!r} is neither a task nor a suite of this"
            f" recipe; {suggestion(r.evaluation.forecast, scored)}"
        )
    if r.run.stop_when and len(r.data.tasks) > 1 and not r.forecast_column:
        yield (
            f"run.stop_when: one of the tasks ({', '.join(r.data.tasks)}) must decide when to stop;"
            " name it in evaluation.forecast"
        )


def _advantages(r: Recipe) -> Iterator[str]:
    """Check what the advantages are made of, and that it goes together."""
    from_reward = r.reference.coefficient > 0 and not r.reference.in_loss
    if r.batch.truncated == "drop" and from_reward and not r.has_critic:
        yield (
            "batch.truncated: the reference scores only rollouts in the loss, so that k1, which is"
            " subtracted from the reward, would spare the truncated ones; set"
            " reference.estimator=k2 or k3, or keep"
        )
    if not r.has_critic:
        return
    yield from _ends_warm_up(
        r, "critic.warmup_steps", r.critic.warmup_steps, "to train the policy in"
    )


def _ends_warm_up(r: Recipe, key: str, steps: int, use: str) -> Iterator[str]:
    """Check that a warm-up ends before the run. use: what the steps after it are for,
    as the end of a sentence.
    """
    if steps >= r.run.steps:
        yield (
            f"{key}: a warm-up of {steps} steps leaves none of run.steps={r.run.steps} {use};"
            " shorten it"
        )


def _losses(r: Recipe) -> Iterator[str]:
    """Check that the loss can take a critic's advantages."""
    if r.loss.kind == "gmpo" and r.has_critic:
        yield (
            "loss.kind: gmpo needs one advantage per rollout, but a critic gives each token its"
            " own; use another loss"
        )


def _teacher(r: Recipe) -> Iterator[str]:
    """Check what a teacher asks for, which gives the tokens of every group their own
    advantages, by scores at temperature 1.
    """
    if not r.teacher.weight:
        return
    if r.batch.zero_variance != "keep":
        yield keep_all_groups("batch.zero_variance", "a teacher", r.batch.zero_variance)
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
    """Check the warm-up against the schedule, and the optimiser's offload."""
    optimizer = r.learner.optimizer
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
    """Check what a server's GPUs divide, and what they may compute in FP8."""
    if r.serving.expert_parallel and r.resources.server_tensor_parallel == 1:
        yield (
            "serving.expert_parallel: divides the experts among a server's GPUs, and with"
            " resources.server_tensor_parallel of 1 there is one; set it to false"
        )
    copies = r.serving.attention_copies
    ranks = r.resources.server_tensor_parallel
    if ranks % copies:
        yield (
            f"serving.attention_copies: {copies} copies cannot have equally many of a server's"
            f" {ranks} GPUs (resources.server_tensor_parallel); use a divisor of {ranks}"
        )
    if r.serving.max_running_requests < copies:
        yield (
            f"serving.max_running_requests: {r.serving.max_running_requests} requests are fewer"
            f" than the copies of the attention (serving.attention_copies: {copies}); raise it"
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
    key_heads = sizes.get("linear_num_key_heads") or 0
    heads_ranks = m.tensor_parallel * m.context_parallel
    if key_heads % heads_ranks:
        yield (
            f"model.tensor_parallel x model.context_parallel: linear_num_key_heads={key_heads} of"
            f" {m.path} is not divisible by {heads_ranks}, among which the heads of its delta"
            " networks are divided; use fewer"
        )
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
    if "kv_lora_rank" in sizes or "linear_num_key_heads" in sizes:
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
    """Check that replies fit."""
    room = _shortest_room(r.length)
    for key, rows in _rows(r).items():
        if rows.environment and rows.reply_tokens >= room:
            yield (
                f"{key}.reply_tokens: a reply of {rows.reply_tokens} tokens leaves nothing of the"
                f" shortest budget for thinking and replies, which is {room}"
                " (length.thinking_tokens); lower it"
            )


def _agents(r: Recipe) -> Iterator[str]:
    """Check what a run with an agent cannot have."""
    for key, rows in _rows(r).items():
        if rows.agent:
            yield from _agent_run(r, key)


def _agent_run(r: Recipe, key: str) -> Iterator[str]:
    """Check what a run cannot have with an agent in the task or suite at `key`."""
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
    if r.agent.interface and r.data.sandbox == "bubblewrap":
        yield (
            "agent.interface: agents in bubblewrap reach no network interface; leave it out, or set"
            " data.sandbox=rlimits"
        )
    if r.length.control == "overlong_penalty":
        yield (
            f"{key}.agent: length.control=overlong_penalty is for one completion, but a session"
            " has many; set none"
        )


def _rows(r: Recipe) -> dict[str, Rows]:
    """Return tasks and suites by their dotted keys."""
    rows: dict[str, Rows] = {f"data.tasks.{name}": task for name, task in r.data.tasks.items()}
    for name, suite in r.evaluation.suites.items():
        rows[f"evaluation.suites.{name}"] = suite
    return rows


def _graders(r: Recipe) -> Iterator[str]:
    """Check for unknown graders."""
    for key, grader in _named_graders(r).items():
        yield from unknown_name(key, grader, "grader", (*GRADERS, *r.data.services))


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


RULES: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _layout,
    _suites,
    _scores,
    _sharing,
    _serving,
    _graders,
    _environments,
    _agents,
    _advantages,
    _losses,
    _teacher,
    _learner,
)
