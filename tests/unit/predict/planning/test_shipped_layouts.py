"""The layouts of the shipped recipes: each fits its stated cluster, and no other layout
is much quicker there.

All layouts are enumerated here, not by the planner's own search; each is judged by the
planner's model of memory and of a step. So a layout that the search overlooks is found
here, too.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load, shipped
from megarl.predict.planning import command, show
from megarl.predict.planning.layouts import (
    LearnerChoice,
    Plan,
    PlanningProblem,
    as_written,
    changed,
    evaluate,
    learner_of,
    refusal,
    search,
    server_of,
)
from megarl.run.nodes import Node
from megarl.run.placement import place

BEHIND = 0.03
"""A shipped recipe may take this much longer than the best layout: estimates are not
better than that.
"""


class Cluster(NamedTuple):
    """The cluster that a recipe says it is for, and the model's config."""

    gpu: str
    gpus: int
    config: str


EIGHT = Cluster("h100", 80, "llama-3.1-8b")
TWO_NODES = Cluster("h100", 16, "qwen3-8b")
STATED = {
    "scalerl-8b": EIGHT,
    "scalerl-8b-32k": EIGHT,
    "scalerl-8b-batch-2048": EIGHT,
    "scalerl-8b-math-code": EIGHT,
    "dapo": EIGHT,
    "dr-grpo": EIGHT,
    "grpo": EIGHT,
    "gspo": EIGHT,
    "magistral": EIGHT,
    "minimax-m1": EIGHT,
    "ppo-critic": EIGHT,
    "scalerl-17bx16": Cluster("h200", 80, "llama-4-scout"),
    "scalerl-17bx16-h100": Cluster("h100", 80, "llama-4-scout"),
    "qwen3-8b-2nodes": TWO_NODES,
    "qwen3-8b-zero": TWO_NODES,
    # The teacher has the other four of its sixteen.
    "qwen3-8b-distill": TWO_NODES._replace(gpus=12),
    "qwen3-30b-a3b-2nodes": Cluster("h100", 16, "qwen3-30b-a3b"),
    "qwen3.5-35b-a3b-2nodes": Cluster("h100", 16, "qwen3.5-35b-a3b"),
    "glm-4.7-flash-2nodes": Cluster("h100", 16, "glm-4.7-flash"),
}
LIKE_ANOTHER = ("gspo", "scalerl-8b-math-code", "minimax-m1", "qwen3-8b-zero")
"""Their layout and sizes are those of scalerl-8b, dapo and qwen3-8b-2nodes, which
are always checked.
"""
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8)
CONTEXT = (1, 2, 4)
SERVER_TENSOR = (1, 2, 4, 8, 16, 32)


def asked(recipe: Recipe, cluster: Cluster) -> PlanningProblem:
    return command.problem(recipe, cluster.gpus, cluster.gpu, cluster.config, command.work(recipe))


def nodes(problem: PlanningProblem) -> list[Node]:
    """The nodes of the cluster; the last one may have fewer GPUs for the run."""
    width = problem.gpu.node_gpus
    made: list[Node] = []
    for first in range(0, problem.gpus, width):
        gpus = tuple(map(str, range(min(width, problem.gpus - first))))
        name = f"n{len(made)}"
        made.append(Node(name, name, "", "", gpus, 0, 0, ()))
    return made


def learner_recipes(problem: PlanningProblem, free: int) -> Iterator[Recipe]:
    """Yield the recipe with every number of learner ranks and every layout of them."""
    experts = problem.shape.experts
    divisors = [n for n in range(1, experts + 1) if experts % n == 0] if experts else [1]
    for ranks in range(1, free):
        resources = changed(problem.recipe, "resources", learner_ranks=ranks)
        for tp, pp, cp, ep in itertools.product(TENSOR, PIPELINE, CONTEXT, divisors):
            if ranks % (tp * pp * cp) or ranks % (ep * pp):
                continue
            yield changed(
                resources,
                "model",
                tensor_parallel=tp,
                pipeline_parallel=pp,
                context_parallel=cp,
                expert_parallel=ep,
                virtual_pipeline_parallel=1,
                expert_tensor_parallel=1,
            )


def is_placed(plan: Plan, machines: list[Node]) -> bool:
    try:
        place(plan.recipe, machines)
    except MegarlError:
        return False
    return True


def quickest(problem: PlanningProblem, below: float) -> Plan | None:
    """Return the quickest plan of all layouts whose step takes less than `below`
    seconds; None if none does.
    """
    free = problem.gpus
    machines = nodes(problem)
    width = problem.gpu.node_gpus
    servers = {ranks: server_of(problem, ranks) for ranks in SERVER_TENSOR}
    turns = not problem.recipe.pipeline.max_lag
    decode_seconds: dict[tuple[int, int], float] = {}
    best = None
    for recipe in learner_recipes(problem, free):
        ranks = recipe.resources.learner_ranks
        if ranks > width and ranks % width:
            continue  # no place for it: a learner takes a part of a node, or whole ones
        learner = learner_of(problem, recipe)
        if not isinstance(learner, LearnerChoice) or learner.train_seconds >= below:
            continue
        for server_ranks, server in servers.items():
            count = (free - ranks) // server_ranks
            if isinstance(server, str) or not count:
                continue
            split = (ranks, server_ranks)
            if split in decode_seconds:  # no layout of the learner makes decoding quicker
                decode = decode_seconds[split]
                train = learner.train_seconds
                if (decode + train if turns else max(decode, train)) >= below:
                    continue
            plan = evaluate(problem, learner, server, server_ranks, count)
            pause = plan.publication.pause / problem.recipe.pipeline.phase_steps
            decode_seconds[split] = plan.generate_seconds - pause
            if plan.step_seconds < below and is_placed(plan, machines):
                best = plan
                below = plan.step_seconds
    return best


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Fail if the recipe does not fit its cluster, leaves GPUs idle, or if another
    layout is quicker.
    """
    problem = asked(recipe, cluster)
    written = as_written(problem)
    assert isinstance(written, Plan), written
    assert not refusal(problem)
    assert written.gpus == cluster.gpus
    assert is_placed(written, nodes(problem))
    better = quickest(problem, written.step_seconds * (1 - BEHIND))
    if better is not None:
        layout = " ".join(show.overrides(better))
        pytest.fail(f"{written.step_seconds:.1f} s, and {better.step_seconds:.1f} s with {layout}")


def cases() -> Iterator[Any]:
    for name in STATED:
        slow = [pytest.mark.slow] if name in LIKE_ANOTHER else []
        yield pytest.param(name, marks=slow)


@pytest.mark.parametrize("name", cases())
def test_no_layout_is_much_quicker_on_the_stated_cluster(name: str) -> None:
    check(load(name), STATED[name])


def test_a_slow_layout_is_found() -> None:
    """64 servers of one GPU and 16 trainers: the paper's split, and a third slower on
    H100.
    """
    split = (
        "resources.servers=64",
        "resources.server_tensor_parallel=1",
        "resources.learner_ranks=16",
        "model.tensor_parallel=4",
    )
    with pytest.raises(pytest.fail.Exception, match=r"resources\.servers=14"):
        check(load("scalerl-8b", split), EIGHT)


@pytest.mark.parametrize("name", ["scalerl-8b", "qwen3-30b-a3b-2nodes"])
def test_the_search_overlooks_nothing(name: str) -> None:
    """What `megarl plan` finds is the best of all layouts."""
    problem = asked(load(name), STATED[name])
    found = search(problem).plans[0]
    assert quickest(problem, found.step_seconds * 0.999) is None


def test_every_recipe_for_several_gpus_states_its_cluster() -> None:
    for name in shipped():
        recipe = load(name)
        shares = recipe.resources.colocate
        tiny = recipe.model.dtype == "fp32" or name == "quickstart-real"
        assert (name in STATED) != (shares or tiny), name
