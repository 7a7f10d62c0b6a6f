"""`megarl plan RECIPE --gpus N --gpu h100`: layouts that fit, the best few, and why the others are refused.

--simulate   also run the recipe as written and the best few through the simulator, and draw a picture of them

`megarl train RECIPE --plan GPU` divides this machine's GPUs among servers and learner like the best plan for them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megarl.core.base import architecture
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load
from megarl.lab.planning import show
from megarl.lab.planning.hardware import assumed, gpu_named
from megarl.lab.planning.layouts import Found, Plan, Problem, as_written, search
from megarl.lab.planning.workload import Lengths, Workload, lognormal, workload
from megarl.run.devices import gpus

BEST = 5
SIMULATED = 3
SPREAD = 0.5


def main(options: argparse.Namespace) -> int:
    recipe = load(options.recipe, options.overrides)
    if options.gpus < 2 and not recipe.resources.colocate:
        raise MegarlError(
            f"--gpus: {options.gpus} is too few: at least one generates and one trains, unless they share it "
            "(resources.colocate, as in scalerl-1gpu)"
        )
    posed = problem(recipe, options.gpus, options.gpu, options.model_config, _work(recipe, options))
    written, found = as_written(posed), search(posed)
    chosen = _chosen(posed, written, found)
    simulated = _simulated(posed, chosen, found, options) if options.simulate and chosen else show.Simulated()
    if options.json:
        print(json.dumps(show.as_json(posed, written, found, BEST, simulated), indent=2))
    else:
        show.tables(posed, written, found, BEST, simulated)
        if simulated.plans:
            print(f"\n{options.out}")
    return 0 if found.plans or not isinstance(written, str) else 1


def problem(recipe: Recipe, gpus: int, gpu: str, model_config: str | None, work: Workload) -> Problem:
    """Pose the planning problem. gpu: a name in hardware.yaml; model_config: see architecture.read, else the recipe's model."""
    return Problem(
        recipe=recipe,
        shape=architecture.read(model_config or recipe.model.path),
        gpu=gpu_named(gpu),
        assumed=assumed(),
        gpus=gpus,
        work=work,
    )


def work(recipe: Recipe) -> Workload:
    """Return the workload that the recipe's limits suggest, with all groups trained."""
    return workload(recipe, lognormal(recipe, None, SPREAD), 1.0, recipe.run.seed)


def _work(recipe: Recipe, options: argparse.Namespace) -> Workload:
    if options.lengths is not None:
        lengths: Lengths = _measured(options.lengths)
    else:
        lengths = lognormal(recipe, options.mean_tokens, options.spread)
    return workload(recipe, lengths, options.trained_share, recipe.run.seed)


def _measured(run: Path) -> Lengths:
    from megarl.lab.planning.workload import lengths_of

    return lengths_of(run)


def _chosen(problem: Problem, written: Plan | str, found: Found) -> dict[str, Plan]:
    """Return the plans to simulate by a short name."""
    first = {} if isinstance(written, str) else {show.name_of_written(written, problem): written}
    return first | {f"plan {i}": plan for i, plan in enumerate(found.plans[:SIMULATED], 1)}


def _swept(chosen: dict[str, Plan]) -> tuple[str, Plan]:
    """Return the plan whose window and tails are varied: the best one, since a learner bottleneck hides their effect."""
    return next(((n, p) for n, p in chosen.items() if n == "plan 1"), next(iter(chosen.items())))


def _simulated(problem: Problem, chosen: dict[str, Plan], found: Found, options: argparse.Namespace) -> show.Simulated:
    from megarl.lab.planning import figures, scenario

    results = {name: scenario.run(problem, plan, options.steps) for name, plan in chosen.items()}
    first_name, first = _swept(chosen)
    by_lag = scenario.by_lag(problem, first, options.steps)
    by_spread = scenario.by_spread(problem, first, options.steps)
    figures.draw(results, found.plans, first_name, by_lag, by_spread, options.out)
    return show.Simulated({name: result.summary for name, result in results.items()}, first_name, by_lag, by_spread)


ALONE = (
    "resources.colocate=false weights.transport=process_group serving.memory_fraction=null serving.release_memory=false"
)


def planned(name: str, overrides: Sequence[str], gpu: str) -> Recipe:
    """Return the recipe with counts and layout of the best plan. gpu: a name of `megarl plan --gpu`.

    MegarlError if there is nothing to divide, or nothing fits.
    """
    recipe, count = load(name, overrides), len(gpus())
    if recipe.resources.colocate:
        raise MegarlError(f"--plan: resources.colocate shares GPUs instead of dividing them; to divide them: {ALONE}")
    if count < 2:
        raise MegarlError(f"--plan: divides the GPUs of this machine, and it has {count}; leave --plan away")
    plans = search(problem(recipe, count, gpu, None, work(recipe))).plans
    if not plans:
        raise MegarlError(f"--plan: no layout of {name} fits {count} {gpu}; `megarl plan` says why each is refused")
    chosen = show.overrides(plans[0])
    print("planned:", *chosen)
    return load(name, [*overrides, *chosen])
