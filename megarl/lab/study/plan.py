"""A study on disk: its tasks, and how far each is. One task is one run: a recipe of the study with one seed.

STUDY/study.json       names of the recipes and the seeds, in order       STUDY/logs/NAME.log    output of `megarl train`
STUDY/recipes/NAME.yaml  resolved, one per task                           STUDY/runs/NAME/       its run directory

Written once: a resumed study uses these files, and one that would be another study is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, latest_scores, write_atomically
from megarl.core.recipe import Recipe, differences, dump, load

State = Literal["waiting", "begun", "done", "failed"]


@dataclass(frozen=True)
class Task:
    """A run of the study. `recipe` is the resolved one, on disk."""

    variant: str
    seed: int
    recipe: Path
    rundir: RunDir
    log: Path

    @property
    def name(self) -> str:
        return task_name(self.variant, self.seed)

    def state(self) -> State:
        """Return the state, from the run's own files. `begun`: would resume if started again, whether alive or not."""
        if not self.rundir.summary.exists():
            return "begun" if self.rundir.recipe.exists() else "waiting"
        summary = json.loads(self.rundir.summary.read_text())
        if summary["outcome"] == "finished":
            return "done"
        return "failed" if summary["outcome"] == "failed" else "begun"

    def pass_rates(self) -> list[float]:
        """Return the pass rates of the evaluations so far."""
        return [row["pass_rate"] for row in latest_scores(self.rundir.eval)]


@dataclass(frozen=True)
class Study:
    """A study. All recipes run with one seed before any runs with the next, so that a stopped study has complete rounds."""

    path: Path
    variants: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def tasks(self) -> list[Task]:
        return [self._task(variant, seed) for seed in self.seeds for variant in self.variants]

    def _task(self, variant: str, seed: int) -> Task:
        name = task_name(variant, seed)
        return Task(
            variant,
            seed,
            self.path / "recipes" / f"{name}.yaml",
            RunDir(self.path / "runs" / name),
            self.path / "logs" / f"{name}.log",
        )


def task_name(variant: str, seed: int) -> str:
    return f"{variant}-seed{seed}"


def prepare(path: Path, recipes: Mapping[str, Recipe], seeds: Sequence[int]) -> Study:
    """Return the study at `path`, written or found there. MegarlError if another one is there."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise MegarlError(f"--seeds: give one or more different seeds, not {','.join(map(str, seeds))!r}")
    study = Study(path, tuple(recipes), tuple(seeds))
    wanted = {task.name: _of_task(recipes[task.variant], task, path) for task in study.tasks}
    if (path / "study.json").exists():
        _check_same(opened(path), study, wanted)
        return study
    for folder in ("recipes", "runs", "logs"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    for task in study.tasks:
        write_atomically(task.recipe, dump(wanted[task.name]).encode())
    record = {"variants": study.variants, "seeds": study.seeds}
    write_atomically(path / "study.json", json.dumps(record, indent=2).encode())
    return study


def opened(path: Path) -> Study:
    """Open the study that is there."""
    try:
        record = json.loads((path / "study.json").read_text())
    except FileNotFoundError:
        raise MegarlError(
            f"{path}: no study (no study.json in it); `megarl study loo` or `compare` makes one"
        ) from None
    return Study(path, tuple(record["variants"]), tuple(record["seeds"]))


def _of_task(recipe: Recipe, task: Task, path: Path) -> Recipe:
    run = {"name": task.name, "dir": str(path / "runs"), "seed": task.seed, "resume": "auto"}
    return recipe.model_copy(update={"run": recipe.run.model_copy(update=run)})


def _check_same(there: Study, study: Study, wanted: Mapping[str, Recipe]) -> None:
    if (there.variants, there.seeds) != (study.variants, study.seeds):
        raise MegarlError(
            f"{study.path}: holds a study of {', '.join(there.variants)} with seeds {', '.join(map(str, there.seeds))}; "
            "go on with the same, or give another --dir"
        )
    for task in study.tasks:
        changed = differences(load(str(task.recipe)), wanted[task.name])
        if changed:
            key, old, new = changed[0]
            raise MegarlError(
                f"{task.recipe}: this study began with {key}: {old!r}, not {new!r}; undo the change, or give another --dir"
            )
