"""`megarl study loo | run | compare | results`: runs a study's tasks in turn, or in a
Slurm array one per job.

    waiting or begun ─► `megarl train STUDY/recipes/NAME.yaml` ─► done | failed

A task that has begun resumes from its checkpoint.

Ctrl-C and SIGTERM are passed on to the run, which saves and exits; the same command
resumes it. A failed task does not stop the others. The run dies with this process,
however that ends.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe
from megarl.predict.study.files import variants_of
from megarl.predict.study.running import (
    USUAL,
    StudyHooks,
    StudyOptions,
    prepared,
    run,
    side_by_side,
)
from megarl.predict.study.search import table_and_plots


def run_variants(study: str, recipe: str, others: Sequence[str], options: StudyOptions) -> int:
    """Study the variants of `recipe` that a study file names, and `others`, further
    recipes; return the exit status.
    """
    recipes = variants_of(study, recipe, options.overrides)
    other_recipes = side_by_side(others, options.overrides)
    if twice := recipes.keys() & other_recipes.keys():
        raise MegarlError(f"--with: {', '.join(sorted(twice))} is in the study already")
    kind = f"{Path(study).stem}-{Path(recipe).stem}"
    return run_study(kind, recipes | other_recipes, options)


def compare(names: Sequence[str], options: StudyOptions) -> int:
    """Study these recipes as they are; return the exit status."""
    recipes = side_by_side(names, options.overrides)
    return run_study("-".join(["compare", *recipes]), recipes, options)


def run_study(
    kind: str,
    recipes: Mapping[str, Recipe],
    options: StudyOptions,
    hooks: StudyHooks = USUAL,
    end: Callable[[Path], int] = table_and_plots,
) -> int:
    """Run a study's tasks, or the one that the options name; return the exit status. A
    dry run only shows them, and returns 0. end: called with the study's directory once
    all tasks are done, returns the exit status.
    """
    study = prepared(kind, recipes, options)
    if study is None:
        return 0
    if options.task is not None:
        return run(study, [study.tasks[options.task]], terminal.console(), hooks)
    status = run(study, study.tasks, terminal.console(), hooks)
    if status:
        return status
    return end(study.path)
