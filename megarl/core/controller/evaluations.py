"""Which versions are scored, when and on which server; each score is a row of RUN/eval.jsonl and a record of the journal. The
answers are in RUN/evaluations/step-N, as those of `megarl eval` are in its directory.

a version is published, or asked about ─► due? ─► pin some of its servers ─► score ─► eval.jsonl, journal ─► unpin
              │ its servers are lost, every one: cancelled, the next version is due instead
              │ what all scores so far say about the rest of the run goes with it (evaluation/forecast.py)
              └ the grader is down: nothing is written, tried again after RETRY_S; the TRIES-th time in a row ends the run
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.core.base.contracts import GraderDown, Graders
from megarl.core.base.rundir import RunDir, append_jsonl, lacking, latest_rows, latest_scores, step_folder
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.controller.decision import is_due
from megarl.core.controller.metrics import ComputeClock, Spent
from megarl.core.evaluation.answers import Answer, SuiteDir
from megarl.core.evaluation.forecast import Forecast, Row, enough
from megarl.core.evaluation.metrics import Outcome, result_of, settings_of, summarise
from megarl.core.evaluation.score import Asker, Questions, score
from megarl.core.journal.records import Evaluated, State
from megarl.core.journal.writer import Ledger
from megarl.core.recipe import Recipe
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import Sampler
from megarl.core.server.membership import Membership
from megarl.core.telemetry.spans import UNRECORDED, Spans

log = logging.getLogger(__name__)

TRIES = 3
RETRY_S = 10.0
"""A score without the answers that could not be graded would be wrong; one that never comes would hold the run for ever."""


class Evaluations:
    """Of a run. `running`: servers and task of each version being scored; `latest`: the newest row, empty before the first."""

    def __init__(
        self,
        recipe: Recipe,
        rundir: RunDir,
        state: State,
        questions: Sequence[Questions[Any]],
        forecast: Forecast,
        tokenizer: Tokenizer,
        membership: Membership,
        places: Places,
        sampler: Sampler,
        graders: Graders,
        ledger: Ledger,
        compute: ComputeClock,
        changed: Callable[[], None],
        fail: Callable[[str], None],
        stop: Callable[[str], None],
        salt: str,
        spans: Spans = UNRECORDED,
    ) -> None:
        self._recipe, self._rundir, self._salt, self._spans = recipe, rundir, salt, spans
        self._membership, self._places, self._sampler, self._graders = membership, places, sampler, graders
        self._ledger, self._compute, self._changed, self._fail = ledger, compute, changed, fail
        self._stop = stop
        self._questions, self._tokenizer, self._forecast = questions, tokenizer, forecast
        self._scored = max(state.evaluations, default=None)
        self._failures, self._not_before = 0, 0.0  # of the grader, in a row; time.monotonic()
        self.running: dict[int, tuple[set[int], asyncio.Task[None]]] = {}
        self.latest: dict[str, object] = next(reversed(latest_scores(rundir.eval)), {})

    def is_due(self, version: int, final_version: int) -> bool:
        """Whether these weights need an evaluation, and are not being evaluated yet."""
        known = [v for v in (self._scored, *self.running) if v is not None]
        return is_due(version, max(known, default=None), self._recipe.evaluation.every, final_version)

    def begin(self, version: int, spent: Callable[[int], Spent], tasks: asyncio.TaskGroup) -> None:
        """Hold some of the servers that have these weights, if any, and score them. spent: until a version was published."""
        held = [s for s, v in self._membership.clean().items() if v == version]
        if not held or time.monotonic() < self._not_before:
            return
        servers = set(sorted(held, key=lambda s: self._places.use[s].running)[: self._recipe.evaluation.servers])
        for server in servers:
            self._membership.pin(server)
        self._compute.hold(len(servers))
        log.info("version %d is evaluated on servers %s", version, sorted(servers))
        self.running[version] = (servers, tasks.create_task(self._evaluate(version, servers, spent(version))))

    def cancel_lost(self) -> None:
        """Servers that have lost their weights score no more. One with none left ends: the next version is due."""
        clean = self._membership.clean()
        for version, (servers, task) in list(self.running.items()):
            held = len(servers)
            servers &= {s for s, v in clean.items() if v == version}
            self._compute.hold(len(servers) - held)
            if not servers:
                task.cancel()

    def cancel(self) -> None:
        """End them all."""
        for _, task in self.running.values():
            task.cancel()

    async def _evaluate(self, version: int, servers: set[int], spent: Spent) -> None:
        began, held = time.monotonic(), len(servers)
        self._spans.open("controller/evaluation", f"version {version}", began, servers=sorted(servers))
        folder = step_folder(self._rundir.evaluations, version)
        try:
            outcomes = await self._ask(version, servers)
            scores = await asyncio.to_thread(row, outcomes, self._recipe, version)
            new = (
                scores
                | spent.row()
                | {
                    "compute_hours": spent.total,
                    "compute_unit": self._compute.unit,
                    "time": time.time(),
                    "seconds": time.monotonic() - began,
                    "servers": held,
                    "tries": self._failures + 1,
                }
            )
            if missing := lacking(new):
                raise GraderDown(f"of what came back no {missing} can be told")
            new |= await asyncio.to_thread(self._with_forecast, new)
            await asyncio.to_thread(self._write_results, version, outcomes)
            append_jsonl(self._rundir.eval, new)
            await self._ledger.write(
                Evaluated(
                    version=version,
                    time=time.time(),
                    compute_hours=spent.total,
                    evaluation_hours=self._compute.spent().evaluation,
                    pass_rate=scores["pass_rate"],
                    n_prompts=int(scores["n_prompts"]),
                    samples=int(scores["samples"]),
                )
            )
            self._scored, self.latest, self._failures = version, new, 0
            log.info("version %d: held-out pass rate %.4f", version, scores["pass_rate"])
            if new.get("enough") and self._recipe.run.stop_at_asymptote:
                self._stop(f"run.stop_at_asymptote: {enough(new)}")
        except* GraderDown as errors:
            self._grader_down(version, errors)
        finally:
            if self._scored != version:
                shutil.rmtree(folder, ignore_errors=True)  # half an evaluation is none
            self._spans.span(
                "controller/evaluation", f"version {version}", began, time.monotonic(), servers=sorted(servers)
            )
            del self.running[version]
            self._compute.hold(-len(servers))
            for server in servers:
                self._membership.unpin(server)
            self._changed()

    async def _ask(self, version: int, servers: set[int]) -> dict[str, list[Outcome]]:
        """Every answer is written; of each what counts comes back, by task and suite."""
        folder = step_folder(self._rundir.evaluations, version)
        shutil.rmtree(folder, ignore_errors=True)  # of a life before: of the same version, but not what is scored now
        places = {of.name: SuiteDir(folder, of.name) for of in self._questions}
        for place in places.values():
            place.path.mkdir(parents=True)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in places}

        def keep(answer: Answer) -> None:
            places[answer.suite].add(answer)
            outcomes[answer.suite].append(Outcome.of(answer))

        asker = Asker(
            self._recipe, self._tokenizer, self._sampler.clients, self._places, self._sampler, self._graders, servers,
            f"{self._salt}/evaluation/{version}", self._places.limit * len(servers),
        )  # fmt: skip
        await score(self._questions, asker, keep)
        for of in self._questions:
            if missing := len(of.open) - len(outcomes[of.name]):
                raise GraderDown(f"{of.name}: {missing} of {len(of.open)} answers never came")
        return outcomes

    def _write_results(self, version: int, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        folder, model = step_folder(self._rundir.evaluations, version), f"{self._rundir.path}@{version}"
        for of in self._questions:
            settings = settings_of(self._recipe, of.rows)
            found = result_of(of.name, model, of.samples, settings, outcomes[of.name])
            SuiteDir(folder, of.name).write_result(found)

    def _with_forecast(self, row: Row) -> Row:
        """The forecast with this score; nothing while there are too few, or nobody has said whose score to forecast."""
        score = self._recipe.forecast_column
        if not score:
            return {}
        earlier = [r for r in latest_scores(self._rundir.eval) if r["step"] < row["step"]]
        return self._forecast([*earlier, row], latest_rows(self._rundir.metrics), self._recipe.run.steps, score)

    def _grader_down(self, version: int, errors: BaseExceptionGroup[GraderDown]) -> None:
        """The version stays due."""
        self._failures += 1
        self._not_before = time.monotonic() + RETRY_S
        reason = f"version {version} could not be scored, the grader is down: {errors.exceptions[0]}"
        log.warning("%s (%d of %d tries)", reason, self._failures, TRIES)
        if self._failures >= TRIES:
            place = self._rundir.logs / "controller"
            self._fail(f"{reason}; tried {TRIES} times, see {place}; then go on with run.resume=auto")


def row(outcomes: Mapping[str, Sequence[Outcome]], recipe: Recipe, version: int) -> dict[str, float]:
    """What eval.jsonl says about the outcomes of tasks and suites: of all held-out prompts together, of each task by itself
    (`pass_rate/math`) when there are several, and of each suite (`pass_rate/aime24`)."""
    tasks = list(recipe.data.tasks)
    heldout = [one._replace(id=f"{task}/{one.id}") for task in tasks for one in outcomes[task]]
    found: dict[str, float] = {"step": version, "weight_version": version, "samples": recipe.evaluation.samples}
    found |= summarise(heldout)
    alone = [*(tasks if len(tasks) > 1 else []), *recipe.evaluation.suites]
    for name in alone:
        found |= {f"{metric}/{name}": value for metric, value in summarise(outcomes[name]).items()}
    found |= {f"samples/{name}": suite.samples for name, suite in recipe.evaluation.suites.items()}
    return found
