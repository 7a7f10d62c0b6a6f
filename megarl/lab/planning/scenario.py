"""From a plan to a simulation: turns the plan's speeds into the simulator's costs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.core.algorithm.packing import cost_of
from megarl.lab.planning import speed
from megarl.lab.planning.layouts import Plan, PlanningProblem
from megarl.lab.planning.simulate import Costs, SimulatedStep, Summary, simulate, summary
from megarl.lab.planning.workload import LogNormal, workload

LAGS = (0, 1, 2, 4, 8, 12)
SPREADS = (0.1, 0.3, 0.5, 0.7, 0.9)


class Simulation(NamedTuple):
    """A simulated plan. warm_up: steps that only fill the pipeline, not counted in `summary`."""

    plan: Plan
    steps: list[SimulatedStep]
    warm_up: int
    summary: Summary


def costs(problem: PlanningProblem, plan: Plan) -> Costs:
    """Return the simulator's costs for this plan."""
    recipe = plan.recipe
    microbatch_tokens = recipe.learner.microbatch_tokens
    assert microbatch_tokens != "auto"  # a plan says how many
    cost, one_size = cost_of(problem.shape), recipe.model.pipeline_parallel > 1

    def train_seconds(lengths: Sequence[int]) -> float:
        packed = speed.packing(lengths, microbatch_tokens, recipe.data_parallel, cost, one_size)
        return speed.train_seconds(recipe, problem.shape, packed, problem.gpu, problem.assumed)

    limit = min(recipe.serving.max_running_requests, plan.server.kv_tokens / problem.work.live_context)
    return Costs(plan.decoder.step_seconds, train_seconds, *plan.publication, limit=max(1, int(limit)))


def run(problem: PlanningProblem, plan: Plan, steps: int) -> Simulation:
    """Simulate `steps` steps of the plan, after those that fill its window."""
    recipe, warm_up = plan.recipe, 2 * plan.recipe.pipeline.window_steps
    done = simulate(recipe, problem.work, costs(problem, plan), steps + warm_up + 1, recipe.run.seed)
    return Simulation(plan, done, warm_up, summary(done, recipe.resources.servers, warm_up))


def by_lag(problem: PlanningProblem, plan: Plan, steps: int) -> dict[int, Summary]:
    """Simulate the same plan with other windows: pipeline.k."""
    pipelines = {k: plan.recipe.pipeline.model_copy(update={"k": k}) for k in LAGS}
    recipes = {k: plan.recipe.model_copy(update={"pipeline": pipeline}) for k, pipeline in pipelines.items()}
    return {k: run(problem, replace(plan, recipe=recipe), steps).summary for k, recipe in recipes.items()}


def by_spread(problem: PlanningProblem, plan: Plan, steps: int) -> dict[float, Summary]:
    """Simulate the same plan with shorter and longer tails of the lengths, at the same mean."""
    recipe, work, summaries = plan.recipe, problem.work, {}
    for spread in SPREADS:
        lengths = LogNormal(work.mean_tokens, spread, recipe.length.completion_tokens)
        other = replace(problem, work=workload(recipe, lengths, work.trained_share, recipe.run.seed))
        summaries[spread] = run(other, plan, steps).summary
    return summaries
