"""`megarl train RECIPE --plan GPU`: this machine's GPUs divided among servers and learner as the best plan for them does."""

from collections.abc import Sequence

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load
from megarl.lab.planning import command, show
from megarl.lab.planning.layouts import search
from megarl.run.devices import gpus

ALONE = (
    "resources.colocate=false weights.transport=process_group serving.memory_fraction=null serving.release_memory=false"
)


def planned(name: str, overrides: Sequence[str], gpu: str) -> Recipe:
    """The recipe with the plan's counts and layout in the place of its own. gpu: a name of `megarl plan --gpu`.

    MegarlError if there is nothing to divide, or nothing fits.
    """
    recipe, count = load(name, overrides), len(gpus())
    if recipe.resources.colocate:
        raise MegarlError(f"--plan: resources.colocate shares GPUs instead of dividing them; to divide them: {ALONE}")
    if count < 2:
        raise MegarlError(f"--plan: divides the GPUs of this machine, and it has {count}; leave --plan away")
    plans = search(command.problem(recipe, count, gpu, None, command.work(recipe))).plans
    if not plans:
        raise MegarlError(f"--plan: no layout of {name} fits {count} {gpu}; `megarl plan` says why each is refused")
    chosen = show.overrides(plans[0])
    print("planned:", *chosen)
    return load(name, [*overrides, *chosen])
