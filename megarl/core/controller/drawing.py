"""The draw of a run: its recipe's tasks as a mixture, where the journal left it; and what the metrics say about it."""

import math
from collections.abc import Mapping

from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.controller.curriculum import Curriculum, Draw, Pace
from megarl.core.controller.mixture import Mixture
from megarl.core.journal.state import State
from megarl.core.recipe import Recipe


def mixture_of(recipe: Recipe, prompts: Mapping[str, TaskPrompts], state: State) -> Mixture:
    """It goes on behind the draws in `state`."""
    curricula = {task: _curriculum(recipe, task, of_task) for task, of_task in prompts.items()}
    for task, curriculum in curricula.items():
        if (history := state.tasks.get(task)) is not None:
            last = history.last
            drawn = Draw(last.prompt_id, last.epoch, last.reset, last.pool)
            curriculum.resume(drawn, history.pass_rates, history.drawn)
    return Mixture(curricula, recipe.data.shares)


def _curriculum(recipe: Recipe, task: str, prompts: TaskPrompts) -> Curriculum:
    """At the beginning. A task's share of a batch is what it needs for an epoch, and its share of the draws is its pace."""
    chosen, share = recipe.data.curriculum, recipe.data.shares[task]
    difficulty = {p.id: p.difficulty for p in prompts.train}
    if chosen.kind != "none" and len(set(difficulty.values())) < 2:
        raise MegarlError(
            f"data.curriculum: all prompts of {recipe.data.tasks[task].train} have one difficulty; give its rows a "
            "`difficulty` (a number, smaller is easier), or set data.curriculum.kind=none"
        )
    in_batch = recipe.batch.prompts * share
    return Curriculum(
        difficulty, recipe.run.seed, recipe.batch.positive_threshold, math.ceil(in_batch), recipe.data.on_exhausted,
        difficulty, Pace(chosen.kind, chosen.start, math.ceil(chosen.steps * in_batch)),
    )  # fmt: skip


def draw_metrics(mixture: Mixture) -> dict[str, float]:
    """Of all tasks together, and of each when there are several: how far the passes over the data are."""
    each = {
        task: {"epoch": float(c.epoch), "pool_prompts": float(c.pool), "excluded_prompts": float(len(c.excluded))}
        for task, c in mixture.curricula.items()
    }
    found = {
        "epoch": min(m["epoch"] for m in each.values()),
        "pool_prompts": sum(m["pool_prompts"] for m in each.values()),
        "excluded_prompts": sum(m["excluded_prompts"] for m in each.values()),
    }
    if len(each) > 1:
        found |= {f"{name}/{task}": value for task, metrics in each.items() for name, value in metrics.items()}
    return found
