"""`megarl plan RECIPE --measured RUN`: how long a run will take by what another has
taken, on CPUs or any other machine.

    metrics of RUN ──► Speeds: seconds of servers and learner for a rollout
                   ──► a step, an evaluation, all steps

Servers and learner work at once (pipeline.k above 0), so that a step takes as long as
the slower of the two; with k = 0 they take turns. A run of five steps is enough, on a
machine that is as busy as it will be.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, is_figure, latest_rows
from megarl.core.recipe import Recipe, differences, load
from megarl.run.summary import steady

FEWEST_STEPS = 2
SAME = ("model", "resources", "length", "sampling.temperature", "learner.microbatch_tokens")
"""Keys and sections in which the run should be like the recipe: the speeds depend on
them.
"""


@dataclass(frozen=True)
class Speeds:
    """What a run's steps took. server_tokens: tokens a second of one busy server;
    learner_seconds: for a rollout of the batch, trained or not; other_seconds: the rest
    of a step, such as publications.
    """

    steps: int
    server_tokens: float
    learner_seconds: float
    other_seconds: float
    mean_tokens: float


@dataclass(frozen=True)
class DurationEstimate:
    """Seconds that a recipe's parts will take. servers, learner, step: of one step;
    evaluation: of one.
    """

    servers: float
    learner: float
    step: float
    evaluation: float
    evaluations: int
    total: float


def main(recipe: Recipe, run: Path, mean_tokens: float | None, as_json: bool) -> int:
    """Print the estimate; return 0. mean_tokens: of a completion; None: as in the
    run.
    """
    run_recipe = load(str(RunDir.opened(run).recipe))
    speeds = speeds_of(run, run_recipe)
    tokens = speeds.mean_tokens if mean_tokens is None else mean_tokens
    duration = estimate(recipe, speeds, tokens)
    if as_json:
        terminal.say(json.dumps({"speeds": asdict(speeds), "estimate": asdict(duration)}, indent=2))
        return 0
    rollouts = recipe.batch.prompts * recipe.sampling.generations
    answers = answers_of(recipe)
    slower = "servers" if duration.servers > duration.learner else "learner"
    terminal.say(
        f"measured: {run}, {speeds.steps} steps; a server {speeds.server_tokens:,.0f} tokens/s"
        f" while it generates, the learner {speeds.learner_seconds:.3g} s a rollout",
        f"a step: {rollouts} rollouts of {tokens:,.0f} tokens: servers {duration.servers:,.1f} s,"
        f" learner {duration.learner:,.1f} s ({speeds.other_seconds:,.1f} of them not training);"
        f" {duration.step:,.1f} s, by the {slower}",
        f"an evaluation: {answers:,} answers, {duration.evaluation:,.1f} s;"
        f" {duration.evaluations} of them",
        f"all: {recipe.run.steps} steps in {in_words(duration.total)}, starts and checkpoints not"
        " counted",
        sep="\n",
    )
    for key, old, new in differences(run_recipe, recipe):
        if _changes_speed(key):
            terminal.say(
                f"note: {key} was {old!r} there and is {new!r} here, which changes the speeds"
            )
    return 0


def _changes_speed(key: str) -> bool:
    if key == "model.path":
        return False
    return any(key == same or key.startswith(f"{same}.") for same in SAME)


def speeds_of(run: Path, recipe: Recipe) -> Speeds:
    """Return what the steps of a run took. recipe: the run's own. MegarlError if it has
    made too few.
    """
    rundir = RunDir(run)
    rows = [row for row in steady(latest_rows(rundir.metrics), rundir) if _is_timed(row)]
    if len(rows) < FEWEST_STEPS:
        steps = FEWEST_STEPS + 1
        raise MegarlError(
            f"--measured: {run}: {len(rows)} steps were timed there, and {FEWEST_STEPS} are needed"
            f" besides the first of each start; let it make {steps} or more (run.steps={steps + 2})"
        )
    tokens = _sum(rows, "generated_tokens")
    busy = math.fsum(row["server_busy_share"] * row["step_seconds"] for row in rows)
    if not tokens or not busy:
        raise MegarlError(
            f"--measured: {run}: no tokens were generated in its {len(rows)} timed steps; take"
            " another run"
        )
    training = _sum(rows, "train_seconds")
    rollouts = recipe.batch.prompts * recipe.sampling.generations * len(rows)
    other_seconds = _sum(rows, "step_seconds") - training - _sum(rows, "wait_seconds")
    return Speeds(
        steps=len(rows),
        server_tokens=tokens / busy / recipe.resources.servers,
        learner_seconds=training / rollouts,
        other_seconds=max(0.0, other_seconds / len(rows)),
        mean_tokens=tokens / rollouts,
    )


def _is_timed(row: Row) -> bool:
    names = (
        "generated_tokens",
        "server_busy_share",
        "step_seconds",
        "train_seconds",
        "wait_seconds",
    )
    return all(is_figure(row.get(name)) for name in names)


def _sum(rows: list[Row], name: str) -> float:
    return math.fsum(row[name] for row in rows)


def answers_of(recipe: Recipe) -> int:
    """Return the answers of one evaluation of held-out prompts."""
    return len(recipe.data.tasks) * recipe.evaluation.prompts * recipe.evaluation.samples


def estimate(recipe: Recipe, speeds: Speeds, mean_tokens: float) -> DurationEstimate:
    """Return how long a recipe will take at these speeds."""
    rollouts = recipe.batch.prompts * recipe.sampling.generations
    rate = speeds.server_tokens * recipe.resources.servers
    servers = rollouts * mean_tokens / rate
    learner = rollouts * speeds.learner_seconds + speeds.other_seconds
    step = max(servers, learner) if recipe.pipeline.max_lag else servers + learner
    evaluation_rate = speeds.server_tokens * recipe.evaluation_servers
    evaluation = answers_of(recipe) * mean_tokens / evaluation_rate
    evaluations = 1 + math.ceil(recipe.run.steps / recipe.evaluation.every)
    total = recipe.run.steps * step + evaluations * evaluation
    return DurationEstimate(servers, learner, step, evaluation, evaluations, total)


def in_words(seconds: float) -> str:
    """Return a duration in minutes, or in hours from two hours on."""
    return f"{seconds / 60:,.1f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"
