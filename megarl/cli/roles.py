"""The roles with what they are given: only here do tasks, forecast and metrics writers come together with the core."""

from functools import partial

from megarl.core.base.process import start_logging
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe


def train(recipe: Recipe) -> int:
    """`megarl train`: its inputs are read, then the supervisor runs."""
    from megarl.lab.preflight import check_inputs
    from megarl.run.train import main

    return main(recipe, check_inputs(recipe), write_report)


def write_report(rundir: RunDir) -> None:
    """RUN/report.html and RUN/reward.png. Imported at the end: matplotlib has no place in a run that lives for weeks."""
    from megarl.lab.report.report import write_report

    write_report(rundir)


def rollout(recipe: Recipe) -> int:
    """`megarl rollout`: the controller, with the recipe's tasks and the forecast of its scores."""
    start_logging("controller")
    from megarl.core.base.contracts import Tasks
    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.core.controller.controller import main
    from megarl.lab.evaluation.suites import questions_of
    from megarl.lab.monitoring.prometheus import serve_controller
    from megarl.lab.scaling.outlook import forecast
    from megarl.tasks.data.prompts import load_tasks
    from megarl.tasks.environments.registry import TaskEnvironments
    from megarl.tasks.graders.grader import TaskGraders

    tokenizer = load_tokenizer(recipe.model.path)
    prompts = load_tasks(recipe, tokenizer)
    tasks = Tasks(
        prompts,
        graders=partial(TaskGraders.of, recipe, tokenizer.decode),
        environments=partial(TaskEnvironments, recipe, tokenizer),
    )
    return main(recipe, tokenizer, tasks, questions_of(recipe, prompts, tokenizer), forecast, serve_controller)


def learn(recipe: Recipe) -> int:
    """`megarl learn`: one rank of the learner, whose metrics are written and shown."""
    from megarl.core.learner.main import main
    from megarl.lab.monitoring.metrics import MetricsWriter

    return main(recipe, MetricsWriter)
