"""`megarl study loo | compare | results`: from the command line to a finished study."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, differences
from megarl.lab.study import plan, variants
from megarl.lab.study.run import run


@dataclass(frozen=True)
class Options:
    """What both kinds of study have. directory: "" for runs/studies/KIND-RECIPE; task: the only one to run, or None for all."""

    seeds: Sequence[int]
    directory: str
    task: int | None
    dry_run: bool
    overrides: Sequence[str]


def loo(recipe: str, beside: Sequence[str], options: Options) -> int:
    """ScaleRL's leave-one-out variants of `recipe`, and the recipes `beside` them."""
    recipes = variants.leave_one_out(recipe, options.overrides)
    others = variants.side_by_side(beside, options.overrides)
    twice = recipes.keys() & others.keys()
    if twice:
        raise MegarlError(f"--with: {', '.join(sorted(twice))} is in the study already")
    return _study(f"loo-{variants.short_name(recipe)}", recipes | others, options)


def compare(names: Sequence[str], options: Options) -> int:
    """These recipes."""
    recipes = variants.side_by_side(names, options.overrides)
    return _study("-".join(["compare", *recipes]), recipes, options)


def table_and_plots(path: Path) -> int:
    """Of a study, also of one that is not finished."""
    return _results(plan.opened(path), Console())


def _study(kind: str, recipes: Mapping[str, Recipe], options: Options) -> int:
    path = Path(options.directory or f"runs/studies/{kind}")
    console = Console()
    if options.dry_run:
        console.print(_planned(path, recipes, options.seeds))
        return 0
    study = plan.prepare(path, recipes, options.seeds)
    tasks = study.tasks
    if options.task is not None:
        if not 0 <= options.task < len(tasks):
            raise MegarlError(f"--task: the study has tasks 0 to {len(tasks) - 1}, no {options.task}")
        return run(study, [tasks[options.task]], console)
    status = run(study, tasks, console)
    return status or _results(study, console)


def _results(study: plan.Study, console: Console) -> int:
    from megarl.lab.study import results  # scipy and matplotlib: not before they are needed

    return results.write(study, console)


def _planned(path: Path, recipes: Mapping[str, Recipe], seeds: Sequence[int]) -> Table:
    """The variants and what makes each differ from the first."""
    first = next(iter(recipes.values()))
    seeds_text = ", ".join(map(str, seeds))
    shown = Table(
        box=None, padding=(0, 2), pad_edge=False, title_justify="left",
        title=f"{path}: {len(recipes) * len(seeds)} runs, seeds {seeds_text}",
    )  # fmt: skip
    shown.add_column("variant", style="bold", no_wrap=True)
    shown.add_column("differs from the first in", overflow="fold")
    for name, recipe in recipes.items():
        changed = [
            f"{key}={new}" for key, _, new in differences(first, recipe) if key not in ("description", "run.name")
        ]
        shown.add_row(name, " ".join(changed))
    return shown
