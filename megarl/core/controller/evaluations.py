"""Which versions are evaluated, when and on which servers. A score is a row of
RUN/eval.jsonl and a record of the journal; the answers are in RUN/evaluations/step-N,
in the format of `megarl eval`.

    version published, or named in a `Next` ─► due? ─► pin some of its servers
        ─► score ─► eval.jsonl, journal ─► unpin

If all its servers are lost, the evaluation is cancelled, and the next version is due
instead. The row includes a forecast from all scores so far (evaluation/forecast.py),
and whether the score has fallen (evaluation/fall.py). If the grader is down, nothing is
written, and a retry follows after RETRY_S; TRIES failures in a row end the run.
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
from megarl.core.client.membership import listed
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
        self._failures = 0  # of the grader, in a row
        self._not_before = 0.0  # time.monotonic() of the next try
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
        servers = self._schedule.pin_servers(version)
        if not servers:
            return
        self._compute.hold(self._schedule.pinned)
        log.info("version %d is evaluated on %s", version, listed(servers))
        task = tasks.create_task(self._evaluate(version, servers, spent[version]))
        self.tasks[version] = task
        # A callback, since a task that is cancelled before its first step would not
        # even run its `finally`.
        task.add_done_callback(lambda _: self._ended(version))

    def cancel_lost(self) -> None:
        """Take servers that lost their weights out of evaluations. Cancel evaluations
        with no server left.
        """
        for version in self._schedule.drop_lost():
            self.tasks[version].cancel()
        self._compute.hold(self._schedule.pinned)

    async def _evaluate(self, version: int, servers: set[int], spent: Spent) -> None:
        """Evaluate the version: write its row and its record, and end the run if
        `run.stop_when` says so. Without a row, the answers are deleted. servers: may
        lose members meanwhile (`cancel_lost`). spent: compute before the version.
        """
        start = time.monotonic()
        server_count = len(servers)
        lane = "controller/evaluation"
        name = f"version {version}"
        spans.open(lane, name, start, servers=sorted(servers))
        folder = step_folder(self._rundir.evaluations, version)
        is_written = False
        try:
            outcomes = await self._ask(version, servers, folder)
            scores = await asyncio.to_thread(row, outcomes, self._recipe, version)
            new_row: Row = scores | spent.row()
            new_row["compute_hours"] = spent.total
            new_row["compute_unit"] = self._compute.unit
            new_row["time"] = time.time()
            new_row["seconds"] = time.monotonic() - start
            new_row["servers"] = server_count
            new_row["tries"] = self._failures + 1
            missing = lacking(new_row)
            if missing:
                raise GraderDown(f"the answers' grades give no valid {missing}")
            new_row |= await asyncio.to_thread(self._further_columns, new_row, outcomes, folder)
            append_jsonl(self._rundir.eval, new_row)
            self.latest = new_row
            self._failures = 0
            is_written = True
            await self._record(version, scores, spent)
            log.info("version %d: held-out pass rate %.4f", version, scores["pass_rate"])
            await asyncio.to_thread(self._drop_answers)
            reason = not_worth_it(new_row, self._recipe.run.stop_when)
            if reason:
                self._stop(f"run.stop_when: {reason}")
        except* GraderDown as errors:
            self._grader_down(version, errors)
        finally:
            if not is_written:
                # An incomplete evaluation is useless.
                shutil.rmtree(folder, ignore_errors=True)
            spans.span(lane, name, start, time.monotonic(), servers=sorted(servers))

    def _further_columns(
        self, new_row: Row, outcomes: Mapping[str, Sequence[Outcome]], folder: Path
    ) -> Row:
        """Write the results, and return the columns that compare this version with
        those before: forecast, trusted grader, fall.
        """
        version = int(new_row["step"])
        tasks = list(self._recipe.data.tasks)
        columns = dict(self._with_forecast(new_row))
        self._write_results(version, outcomes, folder)
        columns |= self._watch(self._rundir, version, tasks)
        columns |= fall_columns(self._rundir.evaluations, version, tasks, self._planned)
        return columns

    async def _record(self, version: int, scores: Mapping[str, float], spent: Spent) -> None:
        """Write the evaluation to the journal."""
        await self._pipeline.records.write(
            Evaluated(
                version=version,
                time=clock.read(),
                compute_hours=spent.total,
                pass_rate=scores["pass_rate"],
                evaluation_hours=self._compute.spent().evaluation,
                n_prompts=int(scores["n_prompts"]),
                samples=int(scores["samples"]),
            )
        )

    def _ended(self, version: int) -> None:
        """Unpin the servers that the evaluation still has."""
        del self.tasks[version]
        self._schedule.unpin_servers(version)
        self._compute.hold(self._schedule.pinned)
        self._pipeline.changed()

    async def _ask(self, version: int, servers: set[int], folder: Path) -> dict[str, list[Outcome]]:
        """Ask all questions, write each answer, and return the outcomes by suite."""
        # Answers that an earlier life left for this version.
        shutil.rmtree(folder, ignore_errors=True)
        directories = {suite.name: SuiteDir(folder, suite.name) for suite in self._questions}
        for directory in directories.values():
            directory.path.mkdir(parents=True)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in directories}

        def keep(answer: Answer) -> None:
            directories[answer.suite].add(answer)
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
            for directory in directories.values():
                directory.close()
        for suite in self._questions:
            _check_judged(suite, outcomes[suite.name])
        return outcomes

    def _write_results(
        self, version: int, outcomes: Mapping[str, Sequence[Outcome]], folder: Path
    ) -> None:
        """Write each suite's result.json, in the format of `megarl eval`."""
        for suite in self._questions:
            model = f"{self._rundir.path}@{version}"
            settings = settings_of(self._recipe, suite.rows)
            result = result_of(suite.name, model, suite.samples, settings, outcomes[suite.name])
            SuiteDir(folder, suite.name).write_result(result)

    def _drop_answers(self) -> None:
        """Delete the answers of all but the newest `evaluation.keep` evaluations, if
        the recipe has it; results stay.
        """
        keep = self._recipe.evaluation.keep
        if not keep:
            return
        results = self._rundir.evaluations.glob("step-*/*/result.json")
        folders = {result.parent.parent for result in results}
        # folders of evaluations have names like those of checkpoints
        evaluations = sorted(path for path in folders if CHECKPOINT.fullmatch(path.name))
        for folder in evaluations[:-keep]:
            for answers in folder.glob("*/answers.jsonl"):
                with suppress(OSError):
                    answers.unlink()

    def _with_forecast(self, row: Row) -> Row:
        """Return the forecast's columns, given this row; empty if there are too few
        scores or no column is chosen.
        """
        column = self._recipe.forecast_column
        if not column:
            return {}
        scores = [
            score for score in latest_scores(self._rundir.eval) if score["step"] < row["step"]
        ]
        scores.append(row)
        metrics = rows_in_order(self._rundir.metrics)
        return self._forecast(scores, metrics, self._recipe.run.steps, column)

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
            log_folder = self._rundir.logs / "controller"
            self._fail(
                f"{reason}; tried {TRIES} times; see {log_folder}, then resume with run.resume=auto"
            )


def _check_judged(suite: Questions[Any], outcomes: Sequence[Outcome]) -> None:
    """Raise GraderDown if answers of a suite are missing, or none could be judged."""
    missing = len(suite.open) - len(outcomes)
    if missing:
        raise GraderDown(f"{suite.name}: {missing} of {len(suite.open)} answers never arrived")
    if outcomes and all(outcome.void for outcome in outcomes):
        raise GraderDown(
            f"{suite.name}: no answer could be generated and judged; of the first:"
            f" {outcomes[0].void}"
        )


def row(
    outcomes: Mapping[str, Sequence[Outcome]], recipe: Recipe, version: int
) -> dict[str, float]:
    """Return a row of eval.jsonl: all held-out prompts, each task (`pass_rate/math`) if
    there are several, and each suite.
    """
    tasks = list(recipe.data.tasks)
    heldout = []
    for task in tasks:
        for outcome in outcomes[task]:
            heldout.append(outcome._replace(id=f"{task}/{outcome.id}"))
    columns: dict[str, float] = {
        "step": version,
        "weight_version": version,
        "samples": recipe.evaluation.samples,
    }
    columns |= summarise(heldout)
    suites = list(recipe.evaluation.suites)
    if len(tasks) > 1:
        suites = tasks + suites
    for name in suites:
        for metric, value in summarise(outcomes[name]).items():
            columns[f"{metric}/{name}"] = value
    sampled_suites = recipe.evaluation.sampled
    for name in recipe.evaluation.suites:
        is_sampled = name in sampled_suites  # the others are multiple choice
        columns[f"samples/{name}"] = sampled_suites[name].samples if is_sampled else 1
    return columns
