"""Measures megarl against TRL's GRPOTrainer on a real pretrained model: `python -m
benchmarks.end_to_end --real`.

    megarl   `megarl train quickstart-real` as it is shipped: one core generates, one
             trains
    TRL      the same model, prompts, sizes, rate, grader and steps on both cores
             (trl_real.py)

Of both: tokens generated per second, and seconds of training until the held-out pass
rate first reaches `SCORE`. Neither counts its start. Evaluations are taken out: TRL
stands still meanwhile, so all their time is; megarl trains on beside them, so only the
share of the cores that they hold is, as in `training_hours` of its metrics.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.real_model import SHIPPED
from benchmarks.roles import ROOT, output, trained, with_trl
from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_scores
from megarl.core.recipe import Recipe

SCORE = 0.5
"""Held-out pass rate whose time is measured: the model begins below 0.1, and 60 steps
teach about 0.8.
"""
UNCOUNTED_STEPS = 3
"""First steps, which tokens per second leave out: megarl's window fills, and TRL
allocates.
"""
LIMIT_S = 7200.0
"""Longest time that a side may take, in seconds."""


class TrainingWatch:
    """Counts the seconds since `start`, without those within `paused`. now: a clock, in
    seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = 0.0
        self._paused_seconds = 0.0

    def start(self) -> None:
        self._began = self._now()
        self._paused_seconds = 0.0

    def seconds(self) -> float:
        return self._now() - self._began - self._paused_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = self._now()
        yield
        self._paused_seconds += self._now() - begin


@dataclass(frozen=True)
class HeldOutScore:
    """A held-out pass rate after `step` steps. seconds: of training before it."""

    step: int
    seconds: float
    pass_rate: float


@dataclass(frozen=True)
class MeasuredTraining:
    """What one side did.

    tokens: generated for each step. ends: seconds of training until the end of each
    step.
    """

    tokens: tuple[int, ...]
    ends: tuple[float, ...]
    scores: tuple[HeldOutScore, ...]

    @property
    def tokens_per_second(self) -> float:
        seconds = self.ends[-1] - self.ends[UNCOUNTED_STEPS - 1]
        return sum(self.tokens[UNCOUNTED_STEPS:]) / seconds

    def first_at(self, score: float) -> HeldOutScore | None:
        """Return the first evaluation with at least this pass rate; None if there is
        none.
        """
        for scored in self.scores:
            if scored.pass_rate >= score:
                return scored
        return None


@dataclass(frozen=True)
class Load:
    """Processes that wanted a core, a mean over the minute before a side's start and
    its end.
    """

    before: float
    after: float


def compare(steps: int, trl_settings: str, json_file: Path | None) -> None:
    """Train both for so many steps and print a table.

    trl_settings: a JSON object, GRPOConfig's settings that TRL gets besides those of
    trl_real.py. MegarlError if it is none, or if the model or the questions are not
    there.
    """
    if steps <= UNCOUNTED_STEPS:
        raise MegarlError(
            f"--steps {steps}: the first {UNCOUNTED_STEPS} are not counted; take more"
        )
    chosen = settings_of(trl_settings)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(Path(folder), steps)
        check_files(recipe)
        loads: dict[str, Load] = {}
        trainings: dict[str, MeasuredTraining] = {}
        sides = {
            "megarl": lambda: megarl_training(recipe),
            "TRL": lambda: trl_training(recipe, chosen),
        }
        for name, train in sides.items():
            before = os.getloadavg()[0]
            trainings[name] = train()
            loads[name] = Load(before, os.getloadavg()[0])
            said = f"{name}: {trainings[name].tokens_per_second:,.0f} tokens/s; load {loads[name]}"
            print(said, file=sys.stderr, flush=True)
    print(table(trainings["megarl"], trainings["TRL"]))
    if json_file:
        figures = {
            name: {
                "tokens_per_second": training.tokens_per_second,
                "load": asdict(loads[name]),
                **asdict(training),
            }
            for name, training in trainings.items()
        }
        packages = {
            name: version(name) for name in ("torch", "sglang", "megatron-core", "transformers")
        }
        written = {
            "score": SCORE,
            "steps": steps,
            "trl_settings": chosen,
            "packages": packages,
            **figures,
        }
        json_file.write_text(json.dumps(written, indent=1) + "\n")


def settings_of(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; MegarlError if there is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        example = """--trl '{"bf16": false}'"""
        raise MegarlError(
            f"--trl {text}: not a JSON object ({error}); write it as in {example}"
        ) from None


def recipe_of(folder: Path, steps: int) -> Recipe:
    """Return the shipped recipe, of which only the place and the number of steps are
    changed.
    """
    changes = [f"run.dir={folder}", f"run.steps={steps}"]
    return recipes.load(SHIPPED, changes)


def check_files(recipe: Recipe) -> None:
    """Raise MegarlError if the model or the questions of the recipe are missing."""
    (task,) = recipe.data.tasks.values()
    needed = (f"{recipe.model.path}/config.json", task.train, str(task.heldout))
    for file in needed:
        if not (ROOT / file).is_file():
            what = "`make quickstart-real` makes it; as soon as that trains it may be stopped"
            raise MegarlError(f"{file}: no such file; {what}")


def megarl_training(recipe: Recipe) -> MeasuredTraining:
    rows = trained(recipe, LIMIT_S)
    scores = latest_scores(RunDir(recipe.run.path).eval)
    return measured(rows, scores, os.cpu_count() or 1)


def measured(rows: Sequence[Row], scores: Sequence[Row], cores: int) -> MeasuredTraining:
    """Return what a run's metrics.jsonl and eval.jsonl say.

    A step ends when the batch of the next one is handed out, the last with its
    publication.
    """
    seconds_per_hour = 3600 / cores
    hours = [row["training_hours"] for row in (*rows[1:], scores[-1])]
    return MeasuredTraining(
        tokens=tuple(int(row["generated_tokens"]) for row in rows),
        ends=tuple(hour * seconds_per_hour for hour in hours),
        scores=tuple(
            HeldOutScore(row["step"], row["training_hours"] * seconds_per_hour, row["pass_rate"])
            for row in scores
        ),
    )


def trl_training(recipe: Recipe, chosen: Mapping[str, Any]) -> MeasuredTraining:
    file = recipe.run.path.parent / "trl.yaml"
    file.write_text(recipes.dump(recipe))
    command = [sys.executable, "-m", "benchmarks.trl_real", str(file), json.dumps(chosen)]
    printed = output(command, with_trl(), LIMIT_S)
    return msgspec.json.decode(printed.splitlines()[-1], type=MeasuredTraining)


def table(megarl: MeasuredTraining, trl: MeasuredTraining) -> str:
    """Return a table in Markdown of both sides' figures and their ratios."""
    speed_ratio = megarl.tokens_per_second / trl.tokens_per_second
    lines = [
        "| | megarl | TRL | ratio |",
        "|---|---|---|---|",
        (
            f"| completion tokens/s | {megarl.tokens_per_second:,.1f} |"
            f" {trl.tokens_per_second:,.1f} | {speed_ratio:.2f} |"
        ),
        (
            f"| seconds to a held-out pass rate of {SCORE} | {_reached(megarl)} | {_reached(trl)} "
            f"| {_time_ratio(megarl, trl)} |"
        ),
        f"| seconds of training | {megarl.ends[-1]:,.0f} | {trl.ends[-1]:,.0f} | |",
        f"| held out | {_pass_rates(megarl)} | {_pass_rates(trl)} | |",
    ]
    return "\n".join(lines)


def _reached(training: MeasuredTraining) -> str:
    first = training.first_at(SCORE)
    if first is None:
        return f"not in {len(training.tokens)} steps"
    return f"{first.seconds:,.0f} (step {first.step})"


def _time_ratio(megarl: MeasuredTraining, trl: MeasuredTraining) -> str:
    """Return how many times as long TRL took; if it did not arrive, at least how many
    times.
    """
    ours = megarl.first_at(SCORE)
    theirs = trl.first_at(SCORE)
    if ours is None:
        return "–"
    if theirs is None:
        return f"above {trl.ends[-1] / ours.seconds:.2f}"
    return f"{theirs.seconds / ours.seconds:.2f}"


def _pass_rates(training: MeasuredTraining) -> str:
    return " ".join(f"{scored.pass_rate:.2f}" for scored in training.scores)
