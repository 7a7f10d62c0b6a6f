"""Shows a plan in the terminal, and as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter

from rich.table import Column, Table

from megarl.core.base import terminal
from megarl.core.base.architecture import Architecture
from megarl.lab.planning import memory
from megarl.lab.planning.hardware import ASSUMED, ERRORS, GB, STEP_TAKES
from megarl.lab.planning.layouts import Found, Plan, PlanningProblem, refusal
from megarl.lab.planning.simulate import Summary


@dataclass(frozen=True)
class Simulated:
    """Simulations. plans: summaries by plan. by_lag, by_spread: of plan `swept` with
    other k and other tails of lengths.
    """

    plans: Mapping[str, Summary] = field(default_factory=dict)
    swept: str = ""
    by_lag: Mapping[int, Summary] = field(default_factory=dict)
    by_spread: Mapping[float, Summary] = field(default_factory=dict)


BEST = 5
MOST_REASONS = 12
NEARER = "±: half of the published rows have a smaller error (docs/plan.md)"
LIKELY = "likely: eight of ten published steps of RL took so much, over their plan"
TAKEN_OVER_PLANNED = (1.7, 14)
"""GPU-hours that the ScaleRL paper's runs of 8B took, divided by those planned for them
(a table in docs/plan.md).
"""


def tables(
    problem: PlanningProblem,
    written: Plan | str,
    found: Found,
    simulated: Simulated,
    price: float | None,
) -> None:
    """Print the recipe as written, the best plans, why others are refused, and the
    simulations. price: that of a GPU-hour.
    """
    console = terminal.console()
    work = problem.work
    shape = problem.shape
    console.print(
        f"{problem.gpus} x {problem.gpu.name} ({problem.gpu.memory / GB:.0f} GB); model of"
        f" {shape.parameters / 1e9:.2f}B parameters, {shape.active_parameters / 1e9:.2f}B active;"
        f" {work.prompts} x {work.generations} rollouts a step of {work.mean_tokens:,.0f} tokens on"
        f" average, {work.trained_share:.0%} trained"
    )
    if refused := refusal(problem):
        console.print(f"no such run starts on {problem.gpu.name}: {refused}")
    plans = named(problem, written, found, BEST)
    if not found.plans and not problem.recipe.resources.colocate:
        tried = "not even with learner.recompute=full learner.optimizer_offload=1"
        console.print(f"nothing fits {problem.gpus} GPUs, {tried}; the reasons are below")
    if found.saving:
        saving = " and ".join(f"learner.{key}={value}" for key, value in found.saving.items())
        otherwise = (
            f"a step takes {seconds:.1f} s"
            if (seconds := found.seconds_without)
            else "nothing fits"
        )
        console.print(f"{otherwise} without {saving}, which the plans set")
    table = narrow("", *plans)
    figures = [_figures(plan) for plan in plans.values()]  # a column a plan: it is narrow
    for label in figures[0] if figures else ():
        table.add_row(label, *(texts[label] for texts in figures))
    # Details are those of the first plan that has as many GPUs as were asked for.
    name = next(
        (name for name, plan in plans.items() if plan.gpus == problem.gpus), next(iter(plans), "")
    )
    if plans:
        console.print(table)
        console.print(f"{NEARER}; {LIKELY}")
        console.print(f"{name}: {cost(plans[name], price)}")
    if found.plans:
        console.print(f"plan 1 is: {' '.join(overrides(found.plans[0]))}", soft_wrap=True)
    if isinstance(written, str):
        console.print(f"as written: {written}")
    elif written.gpus != problem.gpus:
        console.print(f"note: the recipe's resources use {written.gpus} GPUs, not {problem.gpus}")
    if plans:
        plan = plans[name]
        console.print(
            largest_allocation(plan, shape), host_memory(plan), *_remarks(problem, plan), sep="\n"
        )
    if found.refused:
        console.print("\nrefused", style="bold")
        for reason, count in found.refused.most_common(MOST_REASONS):
            console.print(f"{count:>6}  {reason}")
    if simulated.plans:
        console.print()
        console.print(_simulated(simulated))


def named(
    problem: PlanningProblem, written: Plan | str, found: Found, best: int
) -> dict[str, Plan]:
    """Name the recipe as written (with its number of GPUs if that differs from the
    planned one) and the best plans.
    """
    plans = {f"plan {i}": plan for i, plan in enumerate(found.plans[:best], 1)}
    if isinstance(written, str):
        return plans
    return {
        "as written" if written.gpus == problem.gpus else f"written ({written.gpus})": written
    } | plans


def narrow(first: str, *headings: str) -> Table:
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    return Table(
        Column(first, no_wrap=True), *columns, box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )


LAYOUT = (
    "resources.servers",
    "resources.server_tensor_parallel",
    "resources.learner_ranks",
    "model.tensor_parallel",
    "model.pipeline_parallel",
    "model.context_parallel",
    "model.expert_parallel",
    "model.expert_tensor_parallel",
)
FIGURES = (
    "running",
    "step_seconds",
    "tokens_per_second",
    "train_seconds",
    "generate_seconds",
    "lag",
    "learner_idle",
    "server_idle",
    "gpu_hours_per_1000_steps",
)


def overrides(plan: Plan) -> list[str]:
    """Return the overrides that turn the recipe into this plan."""
    learner = plan.recipe.learner
    saving = [f"learner.recompute={learner.recompute}"] if learner.recompute != "none" else []
    saving += (
        [f"learner.optimizer_offload={learner.optimizer_offload}"]
        if learner.optimizer_offload
        else []
    )
    # In lower case, as YAML writes true and false; no other value of a layout has
    # letters.
    return [*saving, *(f"{key}={str(attrgetter(key)(plan.recipe)).lower()}" for key in LAYOUT)]


def error(figure: str) -> str:
    """Return the expected error of training, generation or publication."""
    return f"±{ERRORS[figure]:.0%}"


def likely(planned: float) -> tuple[float, float]:
    """Return between which values a planned step's seconds, or what is proportional to
    them, will lie: by what published steps of RL took, over their plan.
    """
    least, most = STEP_TAKES
    return planned * least, planned * most


def in_short(bounds: tuple[float, float]) -> str:
    """Return two bounds as `28-50`, and small ones with a decimal."""
    digits = 1 if bounds[0] < 10 else 0
    return "-".join(f"{bound:,.{digits}f}" for bound in bounds)


def cost(plan: Plan, price: float | None = None) -> str:
    """Describe what all steps of the recipe take, and how far such estimates are from
    real runs. price: that of a GPU-hour.
    """
    steps = plan.recipe.run.steps
    hours = plan.step_seconds * steps / 3600
    money = "" if price is None else f", which cost {hours * plan.gpus * price:,.0f}"
    least, most = TAKEN_OVER_PLANNED
    gpu_hours = hours * plan.gpus
    expected = f"{in_short(likely(hours))} h and {in_short(likely(gpu_hours))} GPU-hours"
    return (
        f"{steps:,} steps take {hours:,.1f} h and {gpu_hours:,.0f} GPU-hours{money} (likely"
        f" {expected}), without starts and evaluations; the ScaleRL paper's runs of 8B took"
        f" {least:g} to {most:g} times what is planned for them (docs/plan.md)"
    )


def largest_allocation(plan: Plan, shape: Architecture) -> str:
    """Describe the largest piece of memory that a publication allocates at once, and
    who holds it.
    """
    size = memory.largest_bucket(plan.recipe, shape)
    what = (
        "the embedding"
        if size > plan.recipe.weights.bucket_mb << 20
        else "a bucket (weights.bucket_mb)"
    )
    held = f"a learner's rank holds {plan.learner.publication / GB:.1f} GB of buckets"
    served = f"{what}, {size / GB:.1f} GB, on a server's GPU beside weights and KV"
    return f"largest allocation of a publication: {served}; {held}"


def host_memory(plan: Plan) -> str:
    """Describe what roles keep in the host's memory, which `megarl train` checks."""
    rank = f"{plan.learner.host / GB:.0f} GB for a learner's rank (a checkpoint, offloaded AdamW)"
    return (
        f"host memory: {rank}, {plan.server.host / GB:.0f} GB for a server's GPU (new weights,"
        " tokens' experts)"
    )


def _figures(plan: Plan) -> dict[str, str]:
    m = plan.recipe.model
    r = plan.recipe.resources
    return {
        "servers x GPUs": f"{r.servers} x {r.server_tensor_parallel}",
        "learner GPUs": str(r.learner_ranks),
        "TP, PP, CP": f"{m.tensor_parallel}, {m.pipeline_parallel}, {m.context_parallel}",
        "EP, DP": f"{m.expert_parallel}, {plan.recipe.data_parallel}",
        "learner, GB a GPU": f"{plan.learner.total / GB:.0f}",
        "server: KV tokens": f"{plan.server.kv_tokens / 1000:,.0f}k",
        "rollouts at once": f"{plan.running:.0f}",
        "step, s": f"{plan.step_seconds:.1f}",
        "  likely": in_short(likely(plan.step_seconds)),
        "tokens/s": f"{plan.tokens_per_second:,.0f}",
        f"training, s {error('training')}": f"{plan.train_seconds:.1f}",
        f"generation, s {error('generation')}": f"{plan.generate_seconds:.1f}",
        f"publication, s {error('publication')}": f"{plan.publication.transfer:.1f}",
        "servers pause, s": f"{plan.publication.pause:.1f}",
        "lag": f"{plan.lag:.1f}",
        "learner idle": f"{plan.learner_idle:.0%}",
        "servers idle": f"{plan.server_idle:.0%}",
        "GPU-h/1k steps": f"{plan.gpu_hours_per_1000_steps:,.0f}",
    }


def _remarks(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    evaluation = plan.recipe.evaluation
    recipe = plan.recipe
    if recipe.has_critic:
        size = memory.critic_state(recipe, problem.shape) / GB
        what = (
            f"a critic of the policy's size in {recipe.critic.dtype} takes {size:,.0f} GB of a rank"
        )
        yield f"note: {what} (critic.dtype); its time is not counted"
    if (late := plan.evaluation_seconds / plan.step_seconds) > evaluation.every:
        yield (
            f"note: an evaluation ({evaluation.prompts} x {evaluation.samples} rollouts,"
            f" {recipe.evaluation_servers} servers) takes as long as {late:,.0f} steps, and"
            f" evaluation.every is {evaluation.every}; lower evaluation.prompts or samples, or"
            " evaluate less often"
        )


def _simulated(simulated: Simulated) -> Table:
    """Make a table that fits 80 columns, with headings of two lines."""
    table = narrow(
        "\nsimulated",
        "\nstep, s",
        "\ntokens/s",
        "mean\nlag",
        "max\nlag",
        "learner\nidle",
        "servers\nidle",
        "rollouts\nat once",
        "publi-\ncation",
    )
    lags = {f"{simulated.swept}, k = {k}": s for k, s in simulated.by_lag.items()}
    spreads = {f"{simulated.swept}, spread {x:g}": s for x, s in simulated.by_spread.items()}
    for name, s in {**simulated.plans, **lags, **spreads}.items():
        table.add_row(
            name,
            f"{s.step_seconds:.1f}",
            f"{s.tokens_per_second:,.0f}",
            f"{s.lag_mean:.1f}",
            str(s.lag_max),
            f"{s.learner_idle:.0%}",
            f"{1 - s.server_busy:.0%}",
            f"{s.server_running:.0f}",
            f"{s.publishing:.0%}",
        )
    return table


def as_json(
    problem: PlanningProblem,
    written: Plan | str,
    found: Found,
    simulated: Simulated,
    price: float | None,
) -> dict[str, object]:
    """Return as JSON what `tables` prints, unrounded."""
    return {
        "gpus": problem.gpus,
        "gpu": problem.gpu.name,
        "parameters": problem.shape.parameters,
        "active_parameters": problem.shape.active_parameters,
        "rollouts": problem.work.rollouts,
        "mean_tokens": problem.work.mean_tokens,
        "assumed": asdict(ASSUMED),
        "errors": ERRORS,
        "step_takes": STEP_TAKES,
        "as_written": written if isinstance(written, str) else _plan(written, price),
        "plans": [_plan(plan, price) for plan in found.plans[:BEST]],
        "saving": found.saving,
        "refusal": refusal(problem),
        "refused": dict(found.refused.most_common()),
        "simulated": asdict(simulated),
    }


def _plan(plan: Plan, price: float | None) -> dict[str, object]:
    layout = [key for key in LAYOUT if key != "model.expert_tensor_parallel"]
    return {
        **{key.partition(".")[2]: attrgetter(key)(plan.recipe) for key in layout},
        "data_parallel": plan.recipe.data_parallel,
        "learner_bytes": asdict(plan.learner) | {"total": plan.learner.total},
        "server_bytes": asdict(plan.server) | {"host": plan.server.host},
        "kv_tokens": plan.server.kv_tokens,
        "sync_seconds": plan.publication.transfer,
        "pause_seconds": plan.publication.pause,
        "evaluation_steps": plan.evaluation_seconds / plan.step_seconds,
        **{key: getattr(plan, key) for key in FIGURES},
        "cost_of_1000_steps": None if price is None else plan.gpu_hours_per_1000_steps * price,
    }
