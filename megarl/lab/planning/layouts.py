"""Finds the layouts that a recipe can have on N GPUs, how fast each would be, and why
others are impossible.

    learner GPUs L ─► TP x PP x CP x EP ─► megarl's own rules ─► memory ─► seconds of training ─► the fastest for this L  ┐
    server TP      ─► memory, KV        ─► rate of a server ──────────────────────────────────────────────────────────┤
                                                                  (N - T - L) / TP servers: seconds of a step ◄────────┘

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
from megarl.core.recipe import Recipe
from megarl.core.recipe.rules import impossible, impossible_for
from megarl.core.server.checks import attention_problem, fp8_problem, undivided
from megarl.lab.planning import memory, speed
from megarl.lab.planning.hardware import ASSUMED, GB, Gpu
from megarl.lab.planning.memory import LearnerMemory, ServerMemory
from megarl.lab.planning.speed import Decoder, Packing, Publication
from megarl.lab.planning.workload import Workload

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
        published = sum(self.publication) / self.recipe.pipeline.phase_steps
        return max(0.0, 1 - (self.train_seconds + published) / self.step_seconds)

    @property
    def server_idle(self) -> float:
        return max(0.0, 1 - self.generate_seconds / self.step_seconds)

    @property
    def gpu_hours_per_1000_steps(self) -> float:
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
    best = Found(plans := _search(problem, refused), refused, {})
    if plans and plans[0].learner_idle <= WAITING:
        return best
    own = problem.recipe.learner
    tried = [own.model_copy(update=saving) for saving in SAVING]
    for learner in tried[tried.index(own) + 1 :] if own in tried else tried:
        saving = {
            key: getattr(learner, key)
            for key in SAVING[-1]
            if getattr(learner, key) != getattr(own, key)
        }
        recipe = problem.recipe.model_copy(update={"learner": learner})
        smaller = _search(replace(problem, recipe=recipe), Counter())
        if smaller and not plans:
            return Found(smaller, refused, saving)
        if smaller and smaller[0].step_seconds < best.plans[0].step_seconds:
            best = Found(smaller, refused, saving, plans[0].step_seconds)
    return best


def _search(problem: PlanningProblem, refused: Counter[str]) -> list[Plan]:
    """Return the plans with the recipe's learner settings, best first; count in
    `refused` the layouts that are refused.
    """
    tried = {ranks: server_of(problem, ranks) for ranks in SERVER_TENSOR}
    refused.update(reason for reason in tried.values() if isinstance(reason, str))
    plans = []
    gpus = problem.gpus
    step = 1 << max(0, (gpus // SPLITS).bit_length() - 1)
    for learner_gpus in range(step, gpus, step):
        if learner_gpus > (node := problem.gpu.node_gpus) and learner_gpus % node:
            refused[f"learner: more GPUs than a node has, and not whole nodes of {node}"] += 1
            continue
        if (learner := _quickest(problem, learner_gpus, refused)) is None:
            continue
        left = gpus - learner_gpus
        for ranks, memory_of in tried.items():
            if isinstance(memory_of, str):
                continue
            if left % ranks:
                refused[f"{ranks} GPUs per server do not divide the generators"] += 1
            else:
                plans.append(evaluate(problem, learner, memory_of, ranks, left // ranks))
    return sorted(plans, key=lambda p: p.step_seconds)


def as_written(problem: PlanningProblem) -> Plan | str:
    """Return a plan with the recipe's own layout and counts, or the reason why it does
    not fit.
    """
    recipe = problem.recipe
    learner = learner_of(problem, recipe)
    memory_of = server_of(problem, recipe.resources.server_tensor_parallel)
    if isinstance(learner, str):
        return learner
    if isinstance(memory_of, str):
        return memory_of
    if recipe.resources.colocate:
        # Two processes share a GPU, so the memory that each reserves counts twice.
        room = problem.gpu.usable - ASSUMED.reserved_gb * GB
        step = (
            learner.memory.total - learner.memory.state
        )  # alternates with KV if memory is released
        served = memory_of.kv + memory_of.transient
        turns = max(step, served) if recipe.lends_memory else step + served
        need = learner.memory.state + memory_of.weights + turns
        if need > room:
            advice = "lower serving.memory_fraction or learner.microbatch_tokens"
            needs = f"{need / GB:.0f} GB, and {room / GB:.0f} GB of a GPU can be used"
            return f"learner and server together need {needs}; {advice}"
    return evaluate(
        problem,
        learner,
        memory_of,
        recipe.resources.server_tensor_parallel,
        recipe.resources.servers,
    )


def _quickest(
    problem: PlanningProblem, learner_gpus: int, refused: Counter[str]
) -> LearnerChoice | None:
    best = None
    recipe = changed(problem.recipe, "resources", learner_ranks=learner_gpus)
    experts = [e for e in EXPERT if not problem.shape.experts % e] if problem.shape.experts else [1]
    for tp, pp, cp, ep in itertools.product(TENSOR, PIPELINE, CONTEXT, experts):
        if tp * pp * cp > learner_gpus or ep * pp > learner_gpus:
            continue
        layout = {
            "tensor_parallel": tp,
            "pipeline_parallel": pp,
            "context_parallel": cp,
            "expert_parallel": ep,
        }
        layout |= {"virtual_pipeline_parallel": 1, "expert_tensor_parallel": 1}
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
    sizes = problem.shape.megatron_sizes()
    for broken in itertools.chain(
        impossible(recipe), impossible_for(model, sizes, recipe.learner.recompute)
    ):
        key = broken.split(":")[0]
        return f"{key}: {_RULES.get(key, 'breaks a rule of the recipe')}"
    if model.fp8 != "none" and not problem.gpu.fp8:
        return f"model.fp8: {problem.gpu.name} has no FP8 products"
    if model.tensor_parallel * model.context_parallel > problem.gpu.nvlink_gpus:
        return f"TP x CP is beyond the {problem.gpu.nvlink_gpus} GPUs of one NVLink domain"
    recipe = _with_microbatch_tokens(problem, recipe)
    shape = problem.shape
    room = problem.gpu.usable
    tokens = recipe.learner.microbatch_tokens
    one_size = model.pipeline_parallel > 1
    micro = packed(problem.work, shape, tokens, recipe.data_parallel, one_size)
    need = memory.learner(recipe, shape, micro.largest, micro.microbatches)
    if need.total > room:
        parts = {
            "weights, gradients and AdamW are": need.state,
            "activations are": need.activations,
        }
        parts["the head's logits are"] = need.head
        largest = max(parts, key=parts.__getitem__)
        return f"learner: does not fit {room / GB:.0f} GB a GPU; {largest} the largest part"
    # Ranks that do not fill a machine may use the host memory of its other GPUs.
    node = min(problem.gpu.nvlink_gpus, problem.gpu.node_gpus)
    if need.host * min(recipe.resources.learner_ranks, node) > problem.gpu.host_memory * node:
        has = f"{problem.gpu.host_memory / GB:.0f} GB of host memory a GPU"
        return (
            f"learner: {has} do not hold a checkpoint's copy and what of AdamW is offloaded; more"
            " ranks share them"
        )
    return LearnerChoice(recipe, need, speed.train_seconds(recipe, shape, micro, problem.gpu))


def _with_microbatch_tokens(problem: PlanningProblem, recipe: Recipe) -> Recipe:
    """Replace `auto` by the size that the learner would find
    (megarl/core/learner/microbatch_size.py), by estimated memory.
    """
    if recipe.learner.microbatch_tokens != "auto":
        return recipe
    longest = recipe.length.context_tokens
    stages = recipe.model.pipeline_parallel
    share = recipe.data_parallel * (4 * stages if stages > 1 else 1)
    sizes = sizes_to_try(longest, longest * problem.work.rollouts // share)
    room = problem.gpu.usable
    # A size below the longest sequence is useless.
    fitting = (
        n
        for n in sizes
        if n >= longest and memory.learner(recipe, problem.shape, n, 2 * stages).total <= room
    )
    return changed(recipe, "learner", microbatch_tokens=max(fitting, default=longest))


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
    taken = min(count * ranks // data_parallel, MOST_PACKED)
    some = speed.packing(
        work.trained[:taken].tolist(), microbatch_tokens, ranks, cost_of(shape), one_size
    )
    more = (count / data_parallel) / (taken / ranks)
    return some._replace(
        microbatches=round(some.microbatches * more), rank_tokens=round(some.rank_tokens * more)
    )


def server_of(problem: PlanningProblem, ranks: int) -> ServerMemory | str:
    """Return the memory of a server with this many GPUs, or the reason why it is
    impossible.
    """
    shape = problem.shape
    gpu = problem.gpu
    longest = problem.recipe.length.context_tokens
    if what := undivided(shape, ranks):
        return f"server TP {ranks}: does not divide {what}"
    if (keys := problem.recipe.serving.fp8_keys) and not gpu.fp8:
        return f"{keys[0]}: {gpu.name} has no FP8 products"
    if why := fp8_problem(problem.recipe, shape, ranks):
        return f"server TP {ranks}: {why}"
    if ranks > gpu.nvlink_gpus and (gpu.nvlink_gpus < gpu.node_gpus or ranks % gpu.nvlink_gpus):
        return (
            f"server TP {ranks}: beyond one NVLink domain, and not several whole nodes of"
            f" {gpu.node_gpus}"
        )
    needed = memory.server(
        changed(problem.recipe, "resources", server_tensor_parallel=ranks), shape, gpu.memory
    )
    room = gpu.usable - needed.weights - needed.transient
    fitting = replace(needed, kv=min(needed.kv, max(room, 0.0)))
    if fitting.kv_tokens < longest:
        what = "weights" if needed.kv_tokens < longest else "weights and logits"
        return f"server TP {ranks}: {what} leave no room for the KV of one longest sequence"
    return fitting


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
    shared = recipe.resources.colocate
    gpus = learner_gpus if shared else servers * ranks + learner_gpus
    published = speed.publication(recipe, problem.shape, problem.gpu, gpus)
    decoder = Decoder(recipe, problem.shape, problem.gpu, server.kv_token)
    most_tokens = float(work.sample.max())
    # A batch is complete when its longest rollout is, and only the window's batches are
    # in progress, so of the window's rollouts the share mean / longest is running.
    window = pipeline.window_steps * work.rollouts / servers * work.mean_tokens / most_tokens
    limit = min(recipe.serving.max_running_requests, server.kv_tokens / work.live_context)
    running = min(limit, window)
    prefill = decoder.prefill_seconds(work.prompt_tokens)
    seconds = (
        decoder.step_seconds(running, running * work.live_context)
        + running * prefill / work.mean_tokens
    )
    tokens = work.rollouts * work.mean_tokens
    longest = most_tokens * seconds
    paused = published.pause / pipeline.phase_steps
    busy = learner.train_seconds + sum(published) / pipeline.phase_steps
    if k := float(pipeline.max_lag):
        decode = tokens / (servers * running / seconds)
        # Learner and servers that share a GPU take turns.
        step = decode + busy if shared else max(decode + paused, busy)
        # If the learner is the bottleneck, the window is full: k steps' tickets are
        # ahead of it. If not, tokens wait for the last of their group, and half of them
        # are sampled in the first half of that time.
        lag = k if busy > decode + paused else min(k, 0.5 + longest / 2 / step)
    else:  # nothing is made ahead: the halves alternate, each phase waits for its last rollout; lag is half a phase
        requests = pipeline.phase_steps * work.rollouts / servers
        decode = (
            decoder.batch_seconds(work.sample, work.prompt_tokens, requests, limit)
            / pipeline.phase_steps
        )
        step = decode + busy
        lag = (pipeline.phase_steps - 1) / 2
    scoring = recipe.evaluation_servers * running / seconds
    evaluated = recipe.evaluation.prompts * recipe.evaluation.samples * work.mean_tokens / scoring
    return Plan(
        recipe=recipe,
        gpus=gpus,
        learner=learner.memory,
        server=server,
        decoder=decoder,
        publication=published,
        running=running,
        train_seconds=learner.train_seconds,
        generate_seconds=decode + paused,
        step_seconds=step,
        tokens_per_second=tokens / step,
        lag=lag,
        evaluation_seconds=evaluated,
    )
