"""Finds the layouts that a recipe can have on N GPUs, how fast each would be, and why
others are impossible.

    learner GPUs L ─► TP x PP x CP x EP ─► megarl's own rules ─► memory
                   ─► seconds of training ─► the fastest for this L   ┐
    server TP      ─► memory, KV ─► rate of a server ─────────────────┤
           seconds of a step with (N - L) / TP     servers ◄──────────┘

A step is estimated to take as long as the slower of its two halves; `megarl plan
--simulate` simulates the best layouts.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megarl.core.algorithm.packing import cost_of, sizes_to_try
from megarl.core.base.architecture import Architecture
from megarl.core.client.servable import (
    attention_problem,
    copies_problem,
    experts_problem,
    fp8_problem,
    undivided,
)
from megarl.core.recipe import Recipe
from megarl.core.recipe.learner import Learner
from megarl.core.recipe.rules import impossible, impossible_for
from megarl.predict.planning import memory, speed
from megarl.predict.planning.hardware import ASSUMED, GB, Gpu
from megarl.predict.planning.memory import LearnerMemory, ServerMemory
from megarl.predict.planning.speed import Decoder, Packing, Publication
from megarl.predict.planning.workload import Workload

TENSOR = PIPELINE = (1, 2, 4, 8)
CONTEXT = (1, 2, 4)
EXPERT = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SERVER_TENSOR = (*TENSOR, 16, 32)
# approximate number of generator : trainer splits tried; learner GPUs are multiples of
# a power of two
SPLITS = 40
MOST_PACKED = 1024
"""Most sequences packed to estimate a step's micro-batches; of more, a share is packed
for a share of the ranks.
"""


@dataclass(frozen=True)
class PlanningProblem:
    """The input of a search, which replaces the recipe's layout and GPU counts, and
    keeps everything else.
    """

    recipe: Recipe
    shape: Architecture
    gpu: Gpu
    gpus: int
    work: Workload


class LearnerChoice(NamedTuple):
    """A learner that fits. recipe: the recipe with the learner's layout."""

    recipe: Recipe
    memory: LearnerMemory
    train_seconds: float


@dataclass(frozen=True)
class Plan:
    """One division of the GPUs, with its expected performance. gpus: their number."""

    recipe: Recipe
    gpus: int
    learner: LearnerMemory
    server: ServerMemory
    decoder: Decoder
    publication: Publication
    running: float  # requests that a server works on at once
    train_seconds: float
    generate_seconds: float
    step_seconds: float
    tokens_per_second: float  # of completions
    lag: float
    evaluation_seconds: float

    @property
    def learner_idle(self) -> float:
        """Share of a step in which the learner waits."""
        published = sum(self.publication) / self.recipe.pipeline.phase_steps
        return max(0.0, 1 - (self.train_seconds + published) / self.step_seconds)

    @property
    def server_idle(self) -> float:
        """Share of a step in which servers wait."""
        return max(0.0, 1 - self.generate_seconds / self.step_seconds)

    @property
    def gpu_hours_per_1000_steps(self) -> float:
        """GPU-hours of 1,000 steps, without evaluations."""
        return self.gpus * self.step_seconds * 1000 / 3600


class Found(NamedTuple):
    """Plans, best first; counts of refused layouts; changes to `learner` if needed, the
    best step without (0: none fits).
    """

    plans: list[Plan]
    refused: Counter[str]
    saving: dict[str, str | float]
    seconds_without: float = 0.0


SAVING: tuple[dict[str, str | float], ...] = (
    {"recompute": "light"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "optimizer_offload": 0.5},
    {"recompute": "full", "optimizer_offload": 1.0},
)
"""What makes a learner smaller and slower, tried in this order."""
WAITING = 0.5
"""A learner that waits for servers longer than this share of a step may be slower,
where that leaves them more GPUs.
"""


def refusal(problem: PlanningProblem) -> str:
    """Return why no layout of this recipe may run on these GPUs; empty if some may.
    `megarl plan`, `megarl submit` and `megarl train` refuse such a run.
    """
    longest = problem.recipe.length.context_tokens
    return attention_problem(problem.shape, longest, [problem.gpu.capability])


def search(problem: PlanningProblem) -> Found:
    """Search all splits and layouts; none if colocated. Where nothing fits, or only
    learners that wait for the few servers beside them, also with a learner that saves
    memory.
    """
    refused: Counter[str] = Counter()
    if problem.recipe.resources.colocate:
        return Found([], refused, {})
    plans = _search(problem, refused)
    best = Found(plans, refused, {})
    if plans and plans[0].learner_idle <= WAITING:
        return best
    for learner in _smaller_learners(problem.recipe):
        recipe = problem.recipe.model_copy(update={"learner": learner})
        smaller = _search(replace(problem, recipe=recipe), Counter())
        saving = _changes(problem.recipe.learner, learner)
        if smaller and not plans:
            return Found(smaller, refused, saving)
        if smaller and smaller[0].step_seconds < best.plans[0].step_seconds:
            best = Found(smaller, refused, saving, plans[0].step_seconds)
    return best


def _smaller_learners(recipe: Recipe) -> list[Learner]:
    """Return the settings of `SAVING`, from those after the recipe's own on."""
    settings = [recipe.learner.model_copy(update=saving) for saving in SAVING]
    if recipe.learner not in settings:
        return settings
    return settings[settings.index(recipe.learner) + 1 :]


def _changes(original: Learner, learner: Learner) -> dict[str, str | float]:
    """Return the keys of `SAVING` in which a learner differs from the recipe's own."""
    changes = {}
    for key in SAVING[-1]:
        value = getattr(learner, key)
        if value != getattr(original, key):
            changes[key] = value
    return changes


def _search(problem: PlanningProblem, refused: Counter[str]) -> list[Plan]:
    """Return the plans with the recipe's learner settings, best first; count in
    `refused` the layouts that are refused.
    """
    servers: dict[int, ServerMemory] = {}
    for ranks in SERVER_TENSOR:
        server = server_of(problem, ranks)
        if isinstance(server, str):
            refused[server] += 1
        else:
            servers[ranks] = server
    plans = []
    gpus = problem.gpus
    node = problem.gpu.node_gpus
    step = 1 << max(0, (gpus // SPLITS).bit_length() - 1)
    for learner_gpus in range(step, gpus, step):
        if learner_gpus > node and learner_gpus % node:
            refused[f"learner: more GPUs than a node has, and not whole nodes of {node}"] += 1
            continue
        learner = _quickest(problem, learner_gpus, refused)
        if learner is None:
            continue
        server_gpus = gpus - learner_gpus
        for ranks, server in servers.items():
            if server_gpus % ranks:
                refused[f"{ranks} GPUs per server do not divide the generators"] += 1
            else:
                plans.append(evaluate(problem, learner, server, ranks, server_gpus // ranks))
    return sorted(plans, key=lambda plan: plan.step_seconds)


def as_written(problem: PlanningProblem) -> Plan | str:
    """Return a plan with the recipe's own layout and counts, or the reason why it does
    not fit.
    """
    recipe = problem.recipe
    ranks = recipe.resources.server_tensor_parallel
    learner = learner_of(problem, recipe)
    server = server_of(problem, ranks)
    if isinstance(learner, str):
        return learner
    if isinstance(server, str):
        return server
    if recipe.resources.colocate:
        # Two processes share a GPU, so the memory that each reserves counts twice.
        room = problem.gpu.usable - ASSUMED.reserved_gb * GB
        need = _shared_bytes(recipe, learner.memory, server)
        if need > room:
            return (
                f"learner and server together need {need / GB:.0f} GB, and {room / GB:.0f} GB of a"
                " GPU can be used; lower serving.memory_fraction or learner.microbatch_tokens"
            )
    return evaluate(problem, learner, server, ranks, recipe.resources.servers)


def _shared_bytes(recipe: Recipe, learner: LearnerMemory, server: ServerMemory) -> float:
    """Return the bytes of learner and server on a GPU that they share. If memory is
    released, a training step alternates with KV and states.
    """
    training = learner.total - learner.state
    generating = server.kv + server.states + server.transient
    temporary = training + generating
    if recipe.lends_memory:
        temporary = max(training, generating)
    return learner.state + server.weights + temporary


def _quickest(
    problem: PlanningProblem, learner_gpus: int, refused: Counter[str]
) -> LearnerChoice | None:
    """Return the fastest learner that fits these GPUs; count the refused layouts."""
    best = None
    recipe = changed(problem.recipe, "resources", learner_ranks=learner_gpus)
    experts = [1]
    if problem.shape.experts:
        experts = [ranks for ranks in EXPERT if not problem.shape.experts % ranks]
    for tp, pp, cp, ep in itertools.product(TENSOR, PIPELINE, CONTEXT, experts):
        if tp * pp * cp > learner_gpus or ep * pp > learner_gpus:
            continue
        layout = {
            "tensor_parallel": tp,
            "pipeline_parallel": pp,
            "context_parallel": cp,
            "expert_parallel": ep,
            "virtual_pipeline_parallel": 1,
            "expert_tensor_parallel": 1,
        }
        choice = learner_of(problem, changed(recipe, "model", **layout))
        if isinstance(choice, str):
            refused[choice] += 1
        elif best is None or choice.train_seconds < best.train_seconds:
            best = choice
    return best


def learner_of(problem: PlanningProblem, recipe: Recipe) -> LearnerChoice | str:
    """Return the learner of this recipe, or the reason why it is impossible, in few
    words so that reasons can be counted.
    """
    model = recipe.model
    shape = problem.shape
    gpu = problem.gpu
    if broken_rule := _broken_rule(recipe, shape):
        return broken_rule
    if model.fp8 != "none" and not gpu.fp8:
        return f"model.fp8: {gpu.name} has no FP8 products"
    if model.tensor_parallel * model.context_parallel > gpu.nvlink_gpus:
        return f"TP x CP is beyond the {gpu.nvlink_gpus} GPUs of one NVLink domain"
    recipe = _with_microbatch_tokens(problem, recipe)
    tokens = recipe.learner.microbatch_tokens
    one_size = model.pipeline_parallel > 1
    micro = packed(problem.work, shape, tokens, recipe.data_parallel, one_size)
    need = memory.learner(recipe, shape, micro.largest, micro.microbatches)
    if need.total > gpu.usable:
        parts = {
            "weights, gradients and AdamW are": need.state,
            "activations are": need.activations,
            "the head's logits are": need.head,
        }
        largest = max(parts, key=parts.__getitem__)
        return f"learner: does not fit {gpu.usable / GB:.0f} GB a GPU; {largest} the largest part"
    # Ranks that do not fill a machine may use the host memory of its other GPUs.
    node = min(gpu.nvlink_gpus, gpu.node_gpus)
    if need.host * min(recipe.resources.learner_ranks, node) > gpu.host_memory * node:
        return (
            f"learner: {gpu.host_memory / GB:.0f} GB of host memory a GPU do not hold a"
            " checkpoint's copy and what of AdamW is offloaded; more ranks share them"
        )
    return LearnerChoice(recipe, need, speed.train_seconds(recipe, shape, micro, gpu))


def _broken_rule(recipe: Recipe, shape: Architecture) -> str:
    """Return the first of its rules that the recipe breaks, in few words; else ""."""
    of_recipe = impossible(recipe)
    of_model = impossible_for(recipe.model, shape.megatron_sizes(), recipe.learner.recompute)
    for broken in itertools.chain(of_recipe, of_model):
        key = broken.split(":")[0]
        return f"{key}: {_RULES.get(key, 'breaks a rule of the recipe')}"
    return ""


def _with_microbatch_tokens(problem: PlanningProblem, recipe: Recipe) -> Recipe:
    """Replace `auto` by the size that the learner would find
    (megarl/core/learner/microbatch_size.py), by estimated memory.
    """
    if recipe.learner.microbatch_tokens != "auto":
        return recipe
    longest = recipe.length.context_tokens
    stages = recipe.model.pipeline_parallel
    microbatches_of_rank = 4 * stages if stages > 1 else 1
    share = recipe.data_parallel * microbatches_of_rank
    largest_fitting = 0
    for tokens in sizes_to_try(longest, longest * problem.work.rollouts // share):
        if tokens < longest:  # useless
            continue
        need = memory.learner(recipe, problem.shape, tokens, 2 * stages)
        if need.total <= problem.gpu.usable:
            largest_fitting = max(largest_fitting, tokens)
    return changed(recipe, "learner", microbatch_tokens=largest_fitting or longest)


_RULES = {
    "batch.prompts": "does not divide by the data-parallel ranks",
    "resources.learner_ranks": "does not divide into copies of the model or of its experts",
    "model.tensor_parallel": "does not divide heads, key-value groups or inner sizes",
    "model.pipeline_parallel": "leaves a stage without layers",
    "model.expert_parallel": "does not divide the experts",
    "model.fp8": "needs sizes on each rank that divide by 16",
    "learner.recompute": "is for experts, and the model has none",
    "model.moe.shared_overlap": "is for shared experts beside an exchange between ranks",
}


@lru_cache(maxsize=4096)
def packed(
    work: Workload, shape: Architecture, microbatch_tokens: int, data_parallel: int, one_size: bool
) -> Packing:
    """Pack the step's sequences; if there are more than MOST_PACKED, pack a share of
    them for a share of the ranks.
    """
    count = len(work.trained)
    ranks = max(1, data_parallel * min(count, MOST_PACKED) // count)
    sample_size = min(count * ranks // data_parallel, MOST_PACKED)
    lengths = work.trained[:sample_size].tolist()
    sample = speed.packing(lengths, microbatch_tokens, ranks, cost_of(shape), one_size)
    scale = (count / data_parallel) / (sample_size / ranks)
    return sample._replace(
        microbatches=round(sample.microbatches * scale),
        rank_tokens=round(sample.rank_tokens * scale),
    )


def server_of(problem: PlanningProblem, ranks: int) -> ServerMemory | str:
    """Return the memory of a server with this many GPUs, or the reason why it is
    impossible.
    """
    shape = problem.shape
    gpu = problem.gpu
    longest = problem.recipe.length.context_tokens
    serving = problem.recipe.serving
    copies = serving.attention_copies
    if reason := _indivisible(problem, ranks):
        return reason
    if sizes := undivided(shape, ranks, serving):
        return f"server TP {ranks}: does not divide {sizes}"
    fp8_keys = serving.fp8_keys
    if fp8_keys and not gpu.fp8:
        return f"{fp8_keys[0]}: {gpu.name} has no FP8 products"
    if reason := fp8_problem(problem.recipe, shape, ranks):
        return f"server TP {ranks}: {reason}"
    is_of_nodes = gpu.nvlink_gpus >= gpu.node_gpus and not ranks % gpu.nvlink_gpus
    if ranks > gpu.nvlink_gpus and not is_of_nodes:
        return (
            f"server TP {ranks}: beyond one NVLink domain, and not several whole nodes of"
            f" {gpu.node_gpus}"
        )
    recipe = changed(problem.recipe, "resources", server_tensor_parallel=ranks)
    needed = memory.server(recipe, shape, gpu.memory)
    room = gpu.usable - needed.weights - needed.states - needed.transient
    fitting = replace(needed, kv=min(needed.kv, max(room, 0.0)))
    if fitting.kv_tokens < copies * longest:
        largest_part = "weights and logits"
        if needed.kv_tokens < copies * longest:
            largest_part = "weights"
        if needed.states:
            largest_part += " and states of delta networks (serving.max_running_requests)"
        return f"server TP {ranks}: {largest_part} leave no room for the KV of one longest sequence"
    return fitting


def _indivisible(problem: PlanningProblem, ranks: int) -> str:
    """Return why experts or attention cannot be divided among a server's GPUs as the
    recipe asks (serving.expert_parallel, serving.attention_copies); empty if they can.
    """
    recipe = problem.recipe
    shape = problem.shape
    copies = recipe.serving.attention_copies
    if recipe.serving.expert_parallel and ranks == 1:
        return "server TP 1: has no GPUs among which to divide experts (serving.expert_parallel)"
    if reason := experts_problem(recipe, shape, ranks):
        return f"server TP {ranks}: serving.expert_parallel: {reason}"
    if ranks % copies:
        return f"server TP {ranks}: is no multiple of serving.attention_copies ({copies})"
    if copies > 1 and ranks > problem.gpu.node_gpus:
        return (
            f"server TP {ranks}: copies of the attention (serving.attention_copies) are for servers"
            f" within a node of {problem.gpu.node_gpus} GPUs"
        )
    if reason := copies_problem(recipe, shape):
        return f"serving.attention_copies: {reason}"
    return ""


def changed(recipe: Recipe, section: str, **keys: object) -> Recipe:
    """Return the recipe with these keys of a section changed."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def evaluate(
    problem: PlanningProblem, learner: LearnerChoice, server: ServerMemory, ranks: int, servers: int
) -> Plan:
    """Estimate the performance of this learner with `servers` servers of `ranks` GPUs
    each.
    """
    work = problem.work
    pipeline = problem.recipe.pipeline
    learner_gpus = learner.recipe.resources.learner_ranks
    recipe = changed(learner.recipe, "resources", servers=servers, server_tensor_parallel=ranks)
    gpus = learner_gpus
    if not recipe.resources.colocate:
        gpus += servers * ranks
    published = speed.publication(recipe, problem.shape, problem.gpu, gpus)
    decoder = Decoder(recipe, problem.shape, problem.gpu, server.kv_token)
    # A batch is complete when its longest rollout is, and only the window's batches are
    # in progress, so of the window's rollouts the share mean / longest is running.
    most_tokens = float(work.sample.max())
    window = pipeline.window_steps * work.rollouts / servers * work.mean_tokens / most_tokens
    limit = min(recipe.serving.max_running_requests, server.kv_tokens / work.live_context)
    running = min(limit, window)
    prefill = decoder.prefill_seconds(work.prompt_tokens)
    token_seconds = (
        decoder.step_seconds(running, running * work.live_context)
        + running * prefill / work.mean_tokens
    )
    busy = learner.train_seconds + sum(published) / pipeline.phase_steps
    paused = published.pause / pipeline.phase_steps
    if pipeline.max_lag:
        tokens = work.rollouts * work.mean_tokens
        decoding = tokens / (servers * running / token_seconds)
        longest = most_tokens * token_seconds
        halves = _overlapping(recipe, decoding, paused, busy, longest)
    else:
        halves = _alternating(recipe, work, decoder, limit, busy)
    return Plan(
        recipe=recipe,
        gpus=gpus,
        learner=learner.memory,
        server=server,
        decoder=decoder,
        publication=published,
        running=running,
        train_seconds=learner.train_seconds,
        generate_seconds=halves.decoding + paused,
        step_seconds=halves.step,
        tokens_per_second=work.rollouts * work.mean_tokens / halves.step,
        lag=halves.lag,
        evaluation_seconds=_evaluation_seconds(recipe, work, running, token_seconds),
    )


class _Halves(NamedTuple):
    """Seconds of decoding and of a whole step, and the mean lag in steps."""

    decoding: float
    step: float
    lag: float


def _overlapping(
    recipe: Recipe, decoding: float, paused: float, busy: float, longest: float
) -> _Halves:
    """Return the halves of a step that are made at once. busy: seconds of the learner;
    longest: of the longest rollout.
    """
    lag_limit = float(recipe.pipeline.max_lag)
    step = max(decoding + paused, busy)
    if recipe.resources.colocate:  # learner and servers that share a GPU take turns
        step = decoding + busy
    # If the learner is the bottleneck, the window is full: k steps' tickets are ahead
    # of it. If not, tokens wait for the last of their group, and half of them are
    # sampled in the first half of that time.
    lag = lag_limit
    if busy <= decoding + paused:
        lag = min(lag_limit, 0.5 + longest / 2 / step)
    return _Halves(decoding, step, lag)


def _alternating(
    recipe: Recipe, work: Workload, decoder: Decoder, limit: float, busy: float
) -> _Halves:
    """Return the halves of a step of which nothing is made ahead: each phase waits for
    its last rollout, and the lag is half a phase.
    """
    phase_steps = recipe.pipeline.phase_steps
    requests = phase_steps * work.rollouts / recipe.resources.servers
    phase = decoder.batch_seconds(work.sample, work.prompt_tokens, requests, limit)
    decoding = phase / phase_steps
    return _Halves(decoding, decoding + busy, (phase_steps - 1) / 2)


def _evaluation_seconds(
    recipe: Recipe, work: Workload, running: float, token_seconds: float
) -> float:
    tokens_per_second = recipe.evaluation_servers * running / token_seconds
    answers = recipe.evaluation.prompts * recipe.evaluation.samples
    return answers * work.mean_tokens / tokens_per_second
