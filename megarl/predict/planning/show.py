"""Shows a plan in the terminal, and as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter

from rich.console import Console
from rich.table import Column, Table

from megarl.core.base import terminal
from megarl.core.base.architecture import Architecture
from megarl.predict.planning import memory
from megarl.predict.planning.hardware import ASSUMED, ERRORS, GB, STEP_TAKES
from megarl.predict.planning.layouts import Found, Plan, PlanningProblem, refusal
from megarl.predict.planning.simulate import Summary


@dataclass(frozen=True)
class Simulated:
    """Simulations. plans: summaries by the plan's name. by_lag, by_spread: summaries of
    the plan named `swept`, by k and by the spread of the lengths.
    """

    plans: Mapping[str, Summary] = field(default_factory=dict)
    swept: str = ""
    by_lag: Mapping[int, Summary] = field(default_factory=dict)
    by_spread: Mapping[float, Summary] = field(default_factory=dict)


BEST = 5
MOST_REASONS = 12
ERRORS_NOTE = "±: half of the published rows have a smaller error (docs/how-to/plan.md)"
LIKELY_NOTE = "likely: eight of ten published steps of RL took so much, over their plan"
TAKEN_OVER_PLANNED = (1.7, 14)
"""GPU-hours that the ScaleRL paper's runs of 8B took, divided by those planned for them
(a table in docs/how-to/plan.md).
"""


def tables(
    problem: PlanningProblem,
    written: Plan | str,
    results: Found,
    simulated: Simulated,
    price: float | None,
) -> None:
    """Print the recipe as written, the best plans, why others are refused, and the
    simulations. If no layout may run on these GPUs, that is printed first, and the
    plans follow as estimates. written: the plan of the recipe's own layout, or why it
    does not fit; price: of a GPU-hour; None: no costs.
    """
    console = terminal.console()
    console.print(_problem(problem))
    if refused := refusal(problem):
        console.print(f"no such run starts on {problem.gpu.name}: {refused}")
    _print_limits(console, problem, results)
    plans = named(problem, written, results, BEST)
    if plans:
        console.print(_plans(plans))
        console.print(f"{ERRORS_NOTE}; {LIKELY_NOTE}")
        name = _detailed(plans, problem.gpus)
        console.print(f"{name}: {cost(plans[name], price)}")
    if results.plans:
        console.print(f"plan 1 is: {' '.join(overrides(results.plans[0]))}", soft_wrap=True)
    if isinstance(written, str):
        console.print(f"as written: {written}")
    elif written.gpus != problem.gpus:
        console.print(f"note: the recipe's resources use {written.gpus} GPUs, not {problem.gpus}")
    if plans:
        _print_details(console, problem, plans[_detailed(plans, problem.gpus)])
    _print_refused(console, results)
    if simulated.plans:
        console.print()
        console.print(_simulated(simulated))


def _detailed(plans: Mapping[str, Plan], gpus: int) -> str:
    """Return the name of the plan whose details are printed: the first with this number
    of GPUs, else the first.
    """
    for name, plan in plans.items():
        if plan.gpus == gpus:
            return name
    return next(iter(plans))


def _print_details(console: Console, problem: PlanningProblem, plan: Plan) -> None:
    """Print the memory that a plan takes beside its table, and remarks on it."""
    console.print(largest_allocation(plan, problem.shape), host_memory(plan), sep="\n")
    for remark in _remarks(problem, plan):
        console.print(remark)


def _problem(problem: PlanningProblem) -> str:
    """Describe the GPUs, the model and a step's work in a sentence."""
    work = problem.work
    shape = problem.shape
    return (
        f"{problem.gpus} x {problem.gpu.name} ({problem.gpu.memory / GB:.0f} GB); model of"
        f" {shape.parameters / 1e9:.2f}B parameters, {shape.active_parameters / 1e9:.2f}B active;"
        f" {work.prompts} x {work.generations} rollouts a step of {work.mean_tokens:,.0f} tokens on"
        f" average, {work.trained_share:.0%} trained"
    )


def _print_limits(console: Console, problem: PlanningProblem, results: Found) -> None:
    """Say whether nothing fits, or only what the recipe does not set."""
    if not results.plans and not problem.recipe.resources.colocate:
        console.print(
            f"nothing fits {problem.gpus} GPUs, not even with learner.recompute=full"
            " learner.optimizer_offload=1; the reasons are below"
        )
    if results.saving:
        console.print(_saving(results))


def _saving(results: Found) -> str:
    """Say which changes of the learner the plans need, and how it is without."""
    saving = " and ".join(f"learner.{key}={value}" for key, value in results.saving.items())
    otherwise = "nothing fits"
    if results.seconds_without:
        otherwise = f"a step takes {results.seconds_without:.1f} s"
    return f"{otherwise} without {saving}, which the plans set"


def _plans(plans: Mapping[str, Plan]) -> Table:
    """Make a table with a column a plan: it is narrow."""
    table = narrow("", *plans)
    figures = [_figures(plan) for plan in plans.values()]
    for label in figures[0]:
        table.add_row(label, *(texts[label] for texts in figures))
    return table


def _print_refused(console: Console, results: Found) -> None:
    """Print for what reasons layouts were refused, the most frequent first."""
    if not results.refused:
        return
    console.print("\nrefused", style="bold")
    for reason, count in results.refused.most_common(MOST_REASONS):
        console.print(f"{count:>6}  {reason}")


def named(
    problem: PlanningProblem, written: Plan | str, results: Found, best: int
) -> dict[str, Plan]:
    """Name the recipe as written (with its number of GPUs if that differs from the
    planned one) and the best plans.
    """
    plans = {}
    if not isinstance(written, str):
        same_gpus = written.gpus == problem.gpus
        name = "as written" if same_gpus else f"written ({written.gpus})"
        plans[name] = written
    for i, plan in enumerate(results.plans[:best], 1):
        plans[f"plan {i}"] = plan
    return plans


def narrow(first: str, *headings: str) -> Table:
    """Make an empty table without a frame; all columns but the first are numbers."""
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
    texts = []
    if learner.recompute != "none":
        texts.append(f"learner.recompute={learner.recompute}")
    if learner.optimizer_offload:
        texts.append(f"learner.optimizer_offload={learner.optimizer_offload}")
    for key in LAYOUT:
        # In lower case, as YAML writes true and false; no other value of a layout has
        # letters.
        value = str(attrgetter(key)(plan.recipe)).lower()
        texts.append(f"{key}={value}")
    return texts


def error(figure: str) -> str:
    """Return the expected error of training, generation or publication."""
    return f"±{ERRORS[figure]:.0%}"


def likely(planned: float) -> tuple[float, float]:
    """Return between which values a planned step's seconds, or what is proportional to
    them, will lie: by what published steps of RL took, over their plan.
    """
    low, high = STEP_TAKES
    return planned * low, planned * high


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
    gpu_hours = hours * plan.gpus
    money = "" if price is None else f", which cost {gpu_hours * price:,.0f}"
    low, high = TAKEN_OVER_PLANNED
    return (
        f"{steps:,} steps take {hours:,.1f} h and {gpu_hours:,.0f} GPU-hours{money} (likely"
        f" {in_short(likely(hours))} h and {in_short(likely(gpu_hours))} GPU-hours), without starts"
        f" and evaluations; the ScaleRL paper's runs of 8B took {low:g} to {high:g} times what is"
        " planned for them (docs/how-to/plan.md)"
    )


def largest_allocation(plan: Plan, shape: Architecture) -> str:
    """Describe the largest piece of memory that a publication allocates at once, and
    who holds it.
    """
    size = memory.largest_bucket(plan.recipe, shape)
    piece = "a bucket (weights.bucket_mb)"
    if size > plan.recipe.weights.bucket_mb << 20:
        piece = "the embedding"
    return (
        f"largest allocation of a publication: {piece}, {size / GB:.1f} GB, on a server's GPU"
        " beside weights and KV; a learner's rank holds"
        f" {plan.learner.publication / GB:.1f} GB of buckets"
    )


def host_memory(plan: Plan) -> str:
    """Describe what roles keep in the host's memory, which `megarl train` checks."""
    return (
        f"host memory: {plan.learner.host / GB:.0f} GB for a learner's rank (a checkpoint,"
        f" offloaded AdamW), {plan.server.host / GB:.0f} GB for a server's GPU (new weights,"
        " tokens' experts)"
    )


def _figures(plan: Plan) -> dict[str, str]:
    """Return a plan's column of the table of plans: the text of each row, by label."""
    model = plan.recipe.model
    resources = plan.recipe.resources
    layout = (model.tensor_parallel, model.pipeline_parallel, model.context_parallel)
    return {
        "servers x GPUs": f"{resources.servers} x {resources.server_tensor_parallel}",
        "learner GPUs": str(resources.learner_ranks),
        "TP, PP, CP": ", ".join(map(str, layout)),
        "EP, DP": f"{model.expert_parallel}, {plan.recipe.data_parallel}",
        "learner, GB a GPU": f"{plan.learner.total / GB:.0f}",
        "server: KV tokens": f"{plan.server.kv_tokens / 1000:,.0f}k",
        **_states(plan),
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


def _states(plan: Plan) -> dict[str, str]:
    """Return the row of a server's slots for states of delta networks; none without."""
    if not plan.server.states:
        return {}
    return {"server: states, GB": f"{plan.server.states / GB:.1f}"}


def _remarks(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Yield notes on what the plan does not count, and on an evaluation that takes
    longer than the steps between two.
    """
    recipe = plan.recipe
    evaluation = recipe.evaluation
    if recipe.has_critic:
        size = memory.critic_state(recipe, problem.shape) / GB
        yield (
            f"note: a critic of the policy's size in {recipe.critic.dtype} takes {size:,.0f} GB of"
            " a rank (critic.dtype); its time is not counted"
        )
    if recipe.serving.expert_parallel:
        yield (
            "note: whole experts on each GPU of a server (serving.expert_parallel) are planned like"
            " a part of each; what the GPU with the most tokens costs is not counted"
        )
    if recipe.serving.attention_copies > 1:
        yield (
            "note: copies of the attention (serving.attention_copies) are planned as if each always"
            " had its share of the requests, and as if exchanges cost what they cost without"
        )
    evaluation_steps = plan.evaluation_seconds / plan.step_seconds
    if evaluation_steps > evaluation.every:
        yield (
            f"note: an evaluation ({evaluation.prompts} x {evaluation.samples} rollouts,"
            f" {recipe.evaluation_servers} servers) takes as long as"
            f" {evaluation_steps:,.0f} steps, and evaluation.every is {evaluation.every}; lower"
            " evaluation.prompts or samples, or evaluate less often"
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
    rows = dict(simulated.plans)
    for k, summary in simulated.by_lag.items():
        rows[f"{simulated.swept}, k = {k}"] = summary
    for spread, summary in simulated.by_spread.items():
        rows[f"{simulated.swept}, spread {spread:g}"] = summary
    for name, summary in rows.items():
        table.add_row(
            name,
            f"{summary.step_seconds:.1f}",
            f"{summary.tokens_per_second:,.0f}",
            f"{summary.lag_mean:.1f}",
            str(summary.lag_max),
            f"{summary.learner_idle:.0%}",
            f"{1 - summary.server_busy:.0%}",
            f"{summary.server_running:.0f}",
            f"{summary.publishing:.0%}",
        )
    return table


def as_json(
    problem: PlanningProblem,
    written: Plan | str,
    results: Found,
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
        "plans": [_plan(plan, price) for plan in results.plans[:BEST]],
        "saving": results.saving,
        "refusal": refusal(problem),
        "refused": dict(results.refused.most_common()),
        "simulated": asdict(simulated),
    }


def _plan(plan: Plan, price: float | None) -> dict[str, object]:
    """Return a plan as JSON. price: of a GPU-hour; None: no costs."""
    layout = {}
    for key in LAYOUT:
        if key != "model.expert_tensor_parallel":
            layout[key.partition(".")[2]] = attrgetter(key)(plan.recipe)
    price_of_1000_steps = None
    if price is not None:
        price_of_1000_steps = plan.gpu_hours_per_1000_steps * price
    return {
        **layout,
        "data_parallel": plan.recipe.data_parallel,
        "learner_bytes": asdict(plan.learner) | {"total": plan.learner.total},
        "server_bytes": asdict(plan.server) | {"host": plan.server.host},
        "kv_tokens": plan.server.kv_tokens,
        "sync_seconds": plan.publication.transfer,
        "pause_seconds": plan.publication.pause,
        "evaluation_steps": plan.evaluation_seconds / plan.step_seconds,
        **{key: getattr(plan, key) for key in FIGURES},
        "cost_of_1000_steps": price_of_1000_steps,
    }
