"""Which versions are evaluated, when and on which servers. A score is a row of
RUN/eval.jsonl and a record of the journal; the answers are in RUN/evaluations/step-N,
in the format of `megarl eval`.

version published, or named in a `Next` ─► due? ─► pin some of its servers ─► score ─► eval.jsonl, journal ─► unpin
              │ if all its servers are lost, the evaluation is cancelled, and the next version is due instead
              │ the row includes a forecast from all scores so far (evaluation/forecast.py), and whether
              │ the score has fallen (evaluation/fall.py)
              └ if the grader is down, nothing is written; a retry follows after
              RETRY_S; TRIES failures in a row end the run
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.base.contracts import GraderDown
from megarl.core.base.rundir import (
    CHECKPOINT,
    Row,
    RunDir,
    append_jsonl,
    lacking,
    latest_scores,
    rows_in_order,
    step_folder,
)
from megarl.core.controller.decision import planned_evaluations
from megarl.core.controller.metrics import ComputeClock, Spent
from megarl.core.controller.pipeline import Pipeline
from megarl.core.evaluation.answers import Answer, SuiteDir
from megarl.core.evaluation.fall import fall_columns
from megarl.core.evaluation.forecast import Forecast, TrustedWatch, not_worth_it
from megarl.core.evaluation.metrics import Outcome, result_of, settings_of, summarise
from megarl.core.evaluation.score import Asker, Questions, score
from megarl.core.journal.records import Evaluated, clock
from megarl.core.recipe import Recipe
from megarl.core.server.membership import listed
from megarl.core.telemetry.spans import spans

log = logging.getLogger(__name__)

TRIES = 3
RETRY_S = 10.0
"""Time until the next try. A score without the answers that could not be graded would
be wrong; endless tries would block.
"""


class Evaluations:
    """The evaluations of a run. asker: what an evaluation needs, except servers and
    salt. fail, stop: end the run for a reason. tasks: the running evaluations by
    version. latest: the newest row, empty before the first.
    """

    def __init__(
        self,
        rundir: RunDir,
        questions: Sequence[Questions[Any]],
        forecast: Forecast,
        watch: TrustedWatch,
        asker: Asker,
        pipeline: Pipeline,
        compute: ComputeClock,
        fail: Callable[[str], None],
        stop: Callable[[str], None],
    ) -> None:
        self._recipe = asker.recipe
        self._rundir = rundir
        self._asker = asker
        self._questions = questions
        self._forecast = forecast
        self._watch = watch
        self._pipeline = pipeline
        self._schedule = pipeline.evaluations
        self._compute = compute
        self._fail = fail
        self._stop = stop
        self._planned = planned_evaluations(self._recipe.evaluation, self._recipe.run.steps)
        self._failures = 0
        self._not_before = 0.0  # of the grader, in a row; time.monotonic() of the next try
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.latest: dict[str, object] = next(reversed(latest_scores(rundir.eval)), {})

    def begin_if_due(
        self, version: int, spent: Mapping[int, Spent], tasks: asyncio.TaskGroup
    ) -> None:
        """If an evaluation is due, begin it on some of the servers with these weights.
        spent: compute before each version.
        """
        if not self._schedule.is_due(version) or time.monotonic() < self._not_before:
            return
        if servers := self._schedule.begin(version):
            self._compute.hold(self._schedule.held)
            log.info("version %d is evaluated on %s", version, listed(servers))
            self.tasks[version] = tasks.create_task(
                self._evaluate(version, servers, spent[version])
            )
            # A callback, since a task that is cancelled before its first step would not
            # even run its `finally`.
            self.tasks[version].add_done_callback(lambda _: self._ended(version))

    def cancel_lost(self) -> None:
        """Take servers that lost their weights out of evaluations. Cancel evaluations
        with no server left.
        """
        for version in self._schedule.drop_lost():
            self.tasks[version].cancel()
        self._compute.hold(self._schedule.held)

    async def _evaluate(self, version: int, servers: set[int], spent: Spent) -> None:
        began = time.monotonic()
        held = len(servers)
        spans.open("controller/evaluation", f"version {version}", began, servers=sorted(servers))
        folder = step_folder(self._rundir.evaluations, version)
        done = False
        try:
            outcomes = await self._ask(version, servers, folder)
            scores = await asyncio.to_thread(row, outcomes, self._recipe, version)
            new: Row = scores | spent.row()
            new |= {
                "compute_hours": spent.total,
                "compute_unit": self._compute.unit,
                "time": time.time(),
            }
            new |= {
                "seconds": time.monotonic() - began,
                "servers": held,
                "tries": self._failures + 1,
            }
            if missing := lacking(new):
                raise GraderDown(f"the answers' grades give no valid {missing}")
            new |= await asyncio.to_thread(self._with_forecast, new)
            await asyncio.to_thread(self._write_results, version, outcomes, folder)
            tasks = list(self._recipe.data.tasks)
            new |= await asyncio.to_thread(self._watch, self._rundir, version, tasks)
            new |= await asyncio.to_thread(
                fall_columns, self._rundir.evaluations, version, tasks, self._planned
            )
            append_jsonl(self._rundir.eval, new)
            self.latest = new
            self._failures = 0
            done = True
            await self._pipeline.records.write(
                Evaluated(
                    version=version,
                    time=clock.now(),
                    compute_hours=spent.total,
                    pass_rate=scores["pass_rate"],
                    evaluation_hours=self._compute.spent().evaluation,
                    n_prompts=int(scores["n_prompts"]),
                    samples=int(scores["samples"]),
                )
            )
            log.info("version %d: held-out pass rate %.4f", version, scores["pass_rate"])
            await asyncio.to_thread(self._drop_answers)
            if why := not_worth_it(new, self._recipe.run.stop_when):
                self._stop(f"run.stop_when: {why}")
        except* GraderDown as errors:
            self._grader_down(version, errors)
        finally:
            if not done:
                shutil.rmtree(folder, ignore_errors=True)  # an incomplete evaluation is useless
            now = time.monotonic()
            spans.span(
                "controller/evaluation", f"version {version}", began, now, servers=sorted(servers)
            )

    def _ended(self, version: int) -> None:
        """Unpin the servers that the evaluation still has."""
        del self.tasks[version]
        self._schedule.end(version)
        self._compute.hold(self._schedule.held)
        self._pipeline.changed()

    async def _ask(self, version: int, servers: set[int], folder: Path) -> dict[str, list[Outcome]]:
        """Ask all questions, write each answer, and return the outcomes by suite."""
        shutil.rmtree(
            folder, ignore_errors=True
        )  # answers that an earlier life left for this version
        places = {suite.name: SuiteDir(folder, suite.name) for suite in self._questions}
        for place in places.values():
            place.path.mkdir(parents=True)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in places}

        def keep(answer: Answer) -> None:
            places[answer.suite].add(answer)
            outcomes[answer.suite].append(Outcome.of(answer))

        asker = replace(
            self._asker,
            servers=servers,
            salt=f"{self._asker.salt}/evaluation/{version}",
            at_once=self._asker.sampler.servers.places.limit * len(servers),
        )
        try:
            await score(self._questions, asker, keep)
        finally:
            for place in places.values():
                place.close()
        for suite in self._questions:
            if missing := len(suite.open) - len(outcomes[suite.name]):
                raise GraderDown(
                    f"{suite.name}: {missing} of {len(suite.open)} answers never arrived"
                )
            if (voids := [outcome.void for outcome in outcomes[suite.name]]) and all(voids):
                raise GraderDown(
                    f"{suite.name}: no answer could be generated and judged; of the first:"
                    f" {voids[0]}"
                )
        return outcomes

    def _write_results(
        self, version: int, outcomes: Mapping[str, Sequence[Outcome]], folder: Path
    ) -> None:
        for suite in self._questions:
            model = f"{self._rundir.path}@{version}"
            settings = settings_of(self._recipe, suite.rows)
            result = result_of(suite.name, model, suite.samples, settings, outcomes[suite.name])
            SuiteDir(folder, suite.name).write_result(result)

    def _drop_answers(self) -> None:
        """Delete the answers of all but the newest `evaluation.keep` evaluations, if
        the recipe has it; results stay.
        """
        if keep := self._recipe.evaluation.keep:
            ended = {
                path.parent.parent for path in self._rundir.evaluations.glob("step-*/*/result.json")
            }
            for folder in sorted(path for path in ended if CHECKPOINT.fullmatch(path.name))[:-keep]:
                for answers in folder.glob("*/answers.jsonl"):
                    with suppress(OSError):
                        answers.unlink()

    def _with_forecast(self, row: Row) -> Row:
        """Return the forecast's columns, given this row; empty if there are too few
        scores or no column is chosen.
        """
        if not (score := self._recipe.forecast_column):
            return {}
        earlier = [r for r in latest_scores(self._rundir.eval) if r["step"] < row["step"]]
        return self._forecast(
            [*earlier, row], rows_in_order(self._rundir.metrics), self._recipe.run.steps, score
        )

    def _grader_down(self, version: int, errors: BaseExceptionGroup[GraderDown]) -> None:
        """Count the failure; the version stays due. Fail the run after TRIES failures
        in a row.
        """
        self._failures += 1
        self._not_before = time.monotonic() + RETRY_S
        reason = (
            f"version {version} could not be scored, the grader is down: {errors.exceptions[0]}"
        )
        log.warning("%s (%d of %d tries)", reason, self._failures, TRIES)
        if self._failures >= TRIES:
            place = self._rundir.logs / "controller"
            self._fail(
                f"{reason}; tried {TRIES} times; see {place}, then resume with run.resume=auto"
            )


def row(
    outcomes: Mapping[str, Sequence[Outcome]], recipe: Recipe, version: int
) -> dict[str, float]:
    """Return a row of eval.jsonl: all held-out prompts, each task (`pass_rate/math`) if
    there are several, and each suite.
    """
    tasks = list(recipe.data.tasks)
    heldout = [one._replace(id=f"{task}/{one.id}") for task in tasks for one in outcomes[task]]
    row: dict[str, float] = {
        "step": version,
        "weight_version": version,
        "samples": recipe.evaluation.samples,
    }
    row |= summarise(heldout)
    alone = [*(tasks if len(tasks) > 1 else []), *recipe.evaluation.suites]
    for name in alone:
        row |= {f"{metric}/{name}": value for metric, value in summarise(outcomes[name]).items()}
    row |= {f"samples/{name}": 1 for name in recipe.evaluation.suites}  # of multiple choice
    return row | {
        f"samples/{name}": suite.samples for name, suite in recipe.evaluation.sampled.items()
    }
