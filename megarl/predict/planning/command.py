"""`megarl plan RECIPE --gpus N --gpu h100`: shows the best few layouts that fit, and
why others are refused.

--simulate   also runs the recipe as written and the best few layouts through the
             simulator, and draws a picture

`megarl train RECIPE --plan GPU` divides this machine's GPUs among servers and learner
as in the best plan.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from megarl.core.base import architecture, terminal
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load
from megarl.predict.planning import show
from megarl.predict.planning.hardware import gpu_named
from megarl.predict.planning.layouts import (
    Found,
    Plan,
    PlanningProblem,
    as_written,
    refusal,
    search,
)
from megarl.predict.planning.workload import Lengths, Workload, lengths_of, lognormal, workload
from megarl.run.devices import gpus

SIMULATED = 3


def main(
    posed: PlanningProblem, drawn: tuple[int, Path] | None, as_json: bool, price: float | None
) -> int:
    """Search and show; return 0 if a layout fits and may run.

    drawn: steps to simulate and the picture's path; price: of a GPU-hour."""
    _refuse_too_few(posed)
    written = as_written(posed)
    results = search(posed)
    chosen = show.named(posed, written, results, SIMULATED)
    simulated = show.Simulated()
    if drawn and chosen:
        steps, path = drawn
        simulated = _simulated(posed, chosen, results, steps, path)
    if as_json:
        terminal.say(json.dumps(show.as_json(posed, written, results, simulated, price), indent=2))
    else:
        show.tables(posed, written, results, simulated, price)
        if drawn and simulated.plans:
            terminal.say(f"\n{drawn[1]}")
    fits = bool(results.plans) or isinstance(written, Plan)
    return 0 if fits and not refusal(posed) else 1


def _refuse_too_few(posed: PlanningProblem) -> None:
    if posed.gpus < 2 and not posed.recipe.resources.colocate:
        raise MegarlError(
            f"--gpus: {posed.gpus} is too few: at least one generates and one trains, unless they"
            " share it (resources.colocate, as in scalerl-1gpu)"
        )


def problem(
    recipe: Recipe, gpus: int, gpu: str, model_config: str | None, work: Workload
) -> PlanningProblem:
    """Return the planning problem. gpu: a name in hardware.yaml; model_config: for
    architecture.read; None: the recipe's.
    """
    shape = architecture.read(model_config or recipe.model.path)
    return PlanningProblem(recipe, shape, gpu_named(gpu), gpus, work)


def work(
    recipe: Recipe,
    mean_tokens: float | None = None,
    spread: float = 0.5,
    run: Path | None = None,
    trained_share: float = 1.0,
) -> Workload:
    """Return the work of a step, with lengths from the recipe's limits, or with this
    mean, or from the journal of `run`.
    """
    lengths: Lengths
    if run is None:
        lengths = lognormal(recipe, mean_tokens, spread)
    else:
        lengths = lengths_of(run)
    return workload(recipe, lengths, trained_share, recipe.run.seed)


def _simulated(
    problem: PlanningProblem, plans: dict[str, Plan], results: Found, steps: int, path: Path
) -> show.Simulated:
    """Simulate these plans, and draw the picture."""
    from megarl.predict.planning import figures, simulate

    figures.check_format(path)
    simulations = {name: simulate.simulated(problem, plan, steps) for name, plan in plans.items()}
    # Vary window and tails of the best plan: in a plan limited by its learner they
    # would have no visible effect.
    swept = "plan 1" if "plan 1" in plans else next(iter(plans))
    best = plans[swept]
    simulated = show.Simulated(
        plans={name: simulation.summary for name, simulation in simulations.items()},
        swept=swept,
        by_lag=simulate.by_lag(problem, best, steps),
        by_spread=simulate.by_spread(problem, best, steps),
    )
    figures.draw(simulations, results.plans, simulated, path)
    return simulated


ALONE = "resources.colocate=false weights.transport=process_group serving.memory_fraction=null"


def planned(name: str, overrides: Sequence[str], gpu: str) -> Recipe:
    """Return the recipe with the counts and layout of the best plan. MegarlError if
    there are too few GPUs or nothing fits.
    """
    recipe = load(name, overrides)
    count = len(gpus())
    if recipe.resources.colocate:
        raise MegarlError(
            "--plan: resources.colocate shares GPUs instead of dividing them; to divide them:"
            f" {ALONE}"
        )
    if count < 2:
        raise MegarlError(
            f"--plan: divides the GPUs of this machine, and it has {count}; leave out --plan"
        )
    posed = problem(recipe, count, gpu, None, work(recipe))
    if refused := refusal(posed):
        raise MegarlError(f"--plan: no such run starts on {gpu}: {refused}")
    plans = search(posed).plans
    if not plans:
        raise MegarlError(
            f"--plan: no layout of {name} fits {count} {gpu}; `megarl plan` says why each is"
            " refused"
        )
    chosen = show.overrides(plans[0])
    terminal.say("planned:", *chosen)
    return load(name, [*overrides, *chosen])
