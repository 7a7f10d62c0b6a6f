"""A study on disk: its tasks, and the state of each. One task is one run: a recipe of
the study with one seed.

STUDY/study.json         names of the recipes and the seeds, in order
STUDY/recipes/NAME.yaml  resolved recipe, one per task
STUDY/rungs/STEP.json    a search's decision at this step (search.py)
STUDY/logs/NAME.log      output of `megarl train`
STUDY/runs/NAME/         the task's run directory

These files are written once: a resumed study uses them, and a different study in the
same directory is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.hf_files import read_json
from megarl.core.base.rundir import RunDir, write_atomically
from megarl.core.recipe import Recipe, differences, dump, load

TaskState = Literal["waiting", "begun", "done", "failed"]


@dataclass(frozen=True)
class StudyTask:
    """A run of the study: a variant with one seed. study: the study's directory; steps:
    the step at which it ends for now (a search may let it go on), 0 for the recipe's
    last.
    """

    study: Path
    variant: str
    seed: int
    steps: int = 0

    @property
    def name(self) -> str:
        """The variant's name and the seed; names the task's files."""
        return f"{self.variant}-seed{self.seed}"

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.study / "recipes" / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        """Output of `megarl train`."""
        return self.study / "logs" / f"{self.name}.log"

    @property
    def rundir(self) -> RunDir:
        """The task's run directory."""
        return RunDir(self.study / "runs" / self.name)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `megarl train`."""
        if self.steps:
            return [str(self.recipe), f"run.steps={self.steps}"]
        return [str(self.recipe)]

    def state(self) -> TaskState:
        """Return the state, from the run's own files. `begun` means that it would
        resume if started again, alive or not; so would one that has ended before
        `steps`.
        """
        if not self.rundir.summary.exists():
            return "begun" if self.rundir.recipe.exists() else "waiting"
        outcome = read_json(self.rundir.summary).get("outcome")
        if outcome == "failed":
            return "failed"
        if outcome != "finished":
            return "begun"
        if self.steps and load(str(self.rundir.recipe)).run.steps < self.steps:
            return "begun"
        return "done"


@dataclass(frozen=True)
class Study:
    """A study. All recipes run with one seed before any runs with the next, so that a
    stopped study has complete rounds. rungs: steps at which a search (search.py) drops
    variants. branch: the step up to which all variants share one run per seed, the
    trunk; 0 for none. steps: as in `StudyTask`, for all tasks.
    """

    path: Path
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    rungs: tuple[int, ...] = ()
    branch: int = 0
    steps: int = 0

    @property
    def tasks(self) -> list[StudyTask]:
        """All tasks, in the order in which they run."""
        return [
            StudyTask(self.path, variant, seed, self.steps)
            for seed in self.seeds
            for variant in self.variants
        ]

    @property
    def trunk(self) -> "Study":
        """The study of the runs, one per seed, from which all variants branch; they
        have the first variant's recipe. Without a branch it has no tasks.
        """
        return replace(self, variants=("trunk",) if self.branch else (), steps=self.branch)


def prepare(
    path: Path,
    recipes: Mapping[str, Recipe],
    seeds: Sequence[int],
    rungs: Sequence[int] = (),
    branch: int = 0,
) -> Study:
    """Return the study at `path`, newly written or found there. MegarlError if a
    different one is there.
    """
    study = Study(path, tuple(recipes), tuple(seeds), tuple(rungs), branch)
    recipes_of = _recipes_of_tasks(study, recipes)
    if (path / "study.json").exists():
        _check_same(study, recipes_of)
        return study
    folders = ["recipes", "runs", "logs"]
    if rungs:
        folders.append("rungs")
    for folder in folders:
        (path / folder).mkdir(parents=True, exist_ok=True)
    for task, recipe in recipes_of.items():
        write_atomically(task.recipe, dump(recipe).encode())
    record: dict[str, object] = {"variants": study.variants, "seeds": study.seeds}
    if rungs:
        record |= {"rungs": study.rungs, "branch": branch}
    write_atomically(path / "study.json", json.dumps(record, indent=2).encode())
    return study


def _recipes_of_tasks(study: Study, recipes: Mapping[str, Recipe]) -> dict[StudyTask, Recipe]:
    """Return the recipe of every task, those of the trunk included."""
    first_recipe = next(iter(recipes.values()))
    recipes = {"trunk": first_recipe, **recipes}
    recipes_of = {}
    for task in [*study.tasks, *study.trunk.tasks]:
        keys = {
            "name": task.name,
            "dir": str(study.path / "runs"),
            "seed": task.seed,
            "resume": "auto",
        }
        if study.branch and task.variant != "trunk":
            keys["fork"] = f"{study.path}/runs/trunk-seed{task.seed}@{study.branch}"
        recipe = recipes[task.variant]
        run = recipe.run.model_copy(update=keys)
        recipes_of[task] = recipe.model_copy(update={"run": run})
    return recipes_of


def _check_same(study: Study, recipes_of: Mapping[StudyTask, Recipe]) -> None:
    """Raise MegarlError if the study in the directory is another, or has other keys."""
    on_disk = opened(study.path)
    if on_disk != study:
        difference = (
            f"holds a study of {', '.join(on_disk.variants)} with seeds"
            f" {', '.join(map(str, on_disk.seeds))}"
        )
        if on_disk.rungs:
            difference += f", rungs {', '.join(map(str, on_disk.rungs))}"
        if on_disk.branch:
            difference += f", branch {on_disk.branch}"
        raise MegarlError(f"{study.path}: {difference}; go on with the same, or give another --dir")
    for task, recipe in recipes_of.items():
        if changes := differences(load(str(task.recipe)), recipe):
            key, old, new = changes[0]
            raise MegarlError(
                f"{task.recipe}: this study began with {key}: {old!r}, not {new!r}; undo the"
                " change, or give another --dir"
            )


class StudyRecord(msgspec.Struct):
    """STUDY/study.json. Names of variants are names of files."""

    variants: tuple[Annotated[str, msgspec.Meta(pattern=r"^[^/\0]+$")], ...]
    seeds: tuple[int, ...]
    rungs: tuple[int, ...] = ()
    branch: int = 0


def opened(path: Path) -> Study:
    """Return the study in this directory. MegarlError if there is none."""
    file = path / "study.json"
    if not file.exists():
        raise MegarlError(
            f"{path}: no study (no study.json); `megarl study loo` or `compare` makes one"
        )
    try:
        record = msgspec.json.decode(contents(file), type=StudyRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MegarlError(f"{file}: not what a study writes: {error}") from None
    return Study(path, record.variants, record.seeds, record.rungs, record.branch)
