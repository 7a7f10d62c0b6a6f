"""Real runs of the quickstart at a smaller size, and what can be read from what they
leave.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.admission import Admission
from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.process import shared_memory_mark
from megarl.core.base.rundir import RunDir, latest_rows, read_jsonl
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Batch, Group
from megarl.core.controller.draw import mixture_of
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Admitted, Finished, PublishedVersion, Removed, State
from megarl.core.recipe import Recipe
from tests.processes import LEARNERS, command_line
from tests.prompts import load_prompts

WARNING = re.compile(r"(WARNING|ERROR) megarl\..*")
START_LIMIT_S = 400.0
RUN_LIMIT_S = 900.0
SMALL = (
    "run.steps=10",
    "evaluation.every=5",
    "evaluation.prompts=40",
    "evaluation.samples=2",
    "checkpoint.every=4",
    "batch.prompts=12",
    # so that most batches are generated while weights change, however long the learner
    # takes to come up,
    "pipeline.k=3",
    "serving.max_running_requests=64",  # and one after another
)
"""Overrides of the quickstart: one minute."""


def megarl(
    *arguments: str, cwd: Path, limit_s: float = RUN_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "megarl", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=quiet(),
    )


def warm_start(recipe: str, *overrides: str, cwd: Path) -> None:
    """`megarl sft`, in a process that has imported it."""
    status, said = LEARNERS.run(
        command_line, [["sft", recipe, *overrides]], cwd, quiet(), RUN_LIMIT_S
    )
    assert status == 0, said


def quiet() -> dict[str, str]:
    """This environment with wide output, a thread for each process (a warm start would
    take all cores), and bytecode kept: without it every role compiles all it imports.
    """
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"COLUMNS": "120", "OMP_THREAD_LIMIT": "1"}


@dataclass
class LiveRun:
    """A `megarl train` under way."""

    cwd: Path
    name: str  # of the recipe
    overrides: tuple[str, ...]
    output: Path
    process: subprocess.Popen[bytes]
    scrapes: dict[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return recipes.load(self.name, self.overrides)

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.cwd / self.recipe.run.path)

    def wait_for(
        self, condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S
    ) -> None:
        """Until it holds; an error with the run's last output if it does not within the
        limit.
        """
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.tail()}"
            assert time.monotonic() < end, f"no {what} within {limit_s:g} s:\n{self.tail()}"
            time.sleep(0.1)

    def steps(self) -> int:
        """Rows in metrics.jsonl so far, superseded ones not counted."""
        return len(latest_rows(self.rundir.metrics))

    def finish(self, limit_s: float = RUN_LIMIT_S) -> int:
        """Wait for the end; the exit status."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run did not end within {limit_s:g} s:\n{self.tail()}"
            ) from None

    def tail(self) -> str:
        logs = [
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in self.rundir.logs.glob("*/*.log")
        ]
        return "\n".join([self.output.read_text(errors="replace")[-3000:], *logs])

    def has_trained(self, steps: int) -> bool:
        return self.steps() >= steps

    def has_role(self, role: str) -> bool:
        return role in self.roles()

    def roles(self) -> dict[str, psutil.Process]:
        """The main process of each role, by role."""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                words = child.cmdline()
            except psutil.Error:  # it has just ended
                continue
            found |= {role: child for role in ("serve", "rollout", "learn") if role in words}
        return found

    def family(self) -> list[psutil.Process]:
        """Every process of the run now."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def ports(self) -> list[int]:
        """Ports the run's endpoints name."""
        endpoints = self.rundir.endpoints()
        metrics = (endpoints.controller_metrics, endpoints.learner_metrics)
        urls = (endpoints.controller, *endpoints.servers, *metrics)
        return [int(url.rsplit(":", 1)[1]) for url in urls if url]

    def scraped(self) -> dict[str, str]:
        """What Prometheus is told now, by role: it finds addresses and key in
        RUN/prometheus.
        """
        key = (self.rundir.prometheus / "key").read_text()
        scrapes = {}
        for target in json.loads((self.rundir.prometheus / "targets.json").read_text()):
            role = target["labels"]["role"]
            url = f"http://{target['targets'][0]}/metrics"
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
            scrapes[role] = self._answer(request, f"metrics of the {role}")
        return scrapes

    def _answer(self, request: urllib.request.Request, what: str) -> str:
        """The text that is answered; a role may be restarting."""
        answers: list[str] = []

        def is_answered() -> bool:
            with suppress(OSError):
                answers.append(urllib.request.urlopen(request, timeout=60).read().decode())
            return bool(answers)

        self.wait_for(is_answered, what)
        return answers[0]

    def kill(self) -> None:
        """For the end of a test, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def start(cwd: Path, *overrides: str, recipe: str = "quickstart") -> LiveRun:
    """`megarl train` of a recipe with these overrides, in the background."""
    output = cwd / "train.out"
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl", "train", recipe, *overrides],
            cwd=cwd,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=quiet(),
            start_new_session=True,
        )
    return LiveRun(cwd, recipe, overrides, output, process)


def batches(rundir: RunDir, recipe: Recipe, steps: int | None = None) -> list[tuple[Group, ...]]:
    """What each step trained, from the journal: the tickets that were not removed, in
    order, `batch.prompts` a step.
    """
    reader = JournalReader(rundir.rollouts)
    size = recipe.batch.prompts
    removed = {r.ticket for r in reader.replay() if isinstance(r, Removed)}
    admitted = sorted(
        r.ticket for r in reader.replay() if isinstance(r, Admitted) and r.ticket not in removed
    )
    finished = {r.group.ticket: r.group for r in reader.replay() if isinstance(r, Finished)}
    wanted = range(recipe.run.steps if steps is None else steps)
    return [
        tuple(finished[t] for t in admitted[step * size : (step + 1) * size]) for step in wanted
    ]


def check_draws(rundir: RunDir, recipe: Recipe, cwd: Path) -> list[Admitted]:
    """Every prompt was drawn as by a mixture that was never interrupted, from the
    results before it; all admissions.
    """
    prompts = {}
    tokenizer = load_tokenizer(cwd / recipe.model.path)
    for name, task in recipe.data.tasks.items():
        train = load_prompts(cwd / task.train, tokenizer, recipe.length.prompt_tokens, name)
        prompts[name] = TaskPrompts(train, [])
    mixture = mixture_of(
        recipe, prompts, State(Admission(recipe.batch.prompts, recipe.pipeline.max_lag))
    )
    admitted: dict[int, Admitted] = {}
    for record in JournalReader(rundir.rollouts).replay():
        match record:
            case Admitted():
                name, drawn = mixture.draw()
                assert (name, drawn) == (
                    record.task,
                    (record.prompt_id, record.epoch, record.reset, record.pool),
                )
                admitted[record.ticket] = record
            case Finished(group=group) if not group.void:
                mixture.observe(group.prompt.task, group.prompt.id, group.pass_rate)
            case Removed(pass_rate=float(pass_rate)):
                mixture.observe(
                    admitted[record.ticket].task, admitted[record.ticket].prompt_id, pass_rate
                )
    return list(admitted.values())


def publications(rundir: RunDir) -> list[PublishedVersion]:
    return [r for r in JournalReader(rundir.rollouts).replay() if isinstance(r, PublishedVersion)]


def check_history(rundir: RunDir, recipe: Recipe) -> None:
    """Each ticket trained in exactly one step of the surviving history, within the lag,
    and replays bit for bit the same.
    """
    trained = batches(rundir, recipe)
    tickets = [group.ticket for groups in trained for group in groups]
    assert len(tickets) == len(set(tickets)) == recipe.run.steps * recipe.batch.prompts
    rows = latest_rows(rundir.metrics)
    assert [row["step"] for row in rows] == list(range(recipe.run.steps))
    for row, groups in zip(rows, trained, strict=True):
        statistics = batch_statistics(Batch(step=row["step"], groups=groups))
        for name in ("generated_tokens", "pass_rate_train", "lag_max", "lag_mean"):
            assert row[name] == statistics[name], (
                f"step {row['step']} did not train the journal's batch: {name}"
            )
        for group in groups:
            for rollout in group.rollouts:
                assert row["step"] - int(rollout.versions.min()) <= recipe.pipeline.k
    first: dict[int, dict[str, Any]] = {}
    for row in read_jsonl(rundir.metrics):
        before = first.setdefault(row["step"], row)
        for name in ("loss", "grad_norm", "entropy", "ratio_mean", "tokens_trained"):
            assert row.get(name) == before.get(name), (
                f"step {row['step']} replayed differently: {name}"
            )


def check_nothing_left(family: list[psutil.Process], ports: list[int]) -> None:
    """No process of the run, nobody on its ports, and no shared memory, within a few
    seconds.
    """
    check_ended(family, ports)
    check_no_shared_memory(family)


def check_ended(family: list[psutil.Process], ports: list[int]) -> None:
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    taken = {
        c.laddr.port
        for c in psutil.net_connections("tcp")
        if c.laddr and c.status == psutil.CONN_LISTEN
    }
    assert not taken & set(ports)


def check_no_shared_memory(family: list[psutil.Process]) -> None:
    left = [
        (p, file)
        for p in family
        for file in Path("/dev/shm").glob(f"*{shared_memory_mark(p.pid)}*")
    ]
    # An older file is of another process that had the same number.
    assert not [file for p, file in left if file.stat().st_mtime >= p.create_time() - 1]


def check_parity(rundir: RunDir, limit: float = 1e-4) -> list[dict[str, Any]]:
    """Servers and learner were compared, agreed within `limit` on average each time,
    and nobody was warned; the rows.
    """
    rows = [row for row in latest_rows(rundir.metrics) if "parity_rollouts" in row]
    assert rows
    assert all(row["parity_mean/kernels"] < limit and not row["warning_parity"] for row in rows)
    return rows


def warnings(rundir: RunDir) -> Counter[str]:
    """What the controller, the learner and the servers warn of, `role: LEVEL module:
    text`, and how often.
    """
    found: Counter[str] = Counter()
    for log in rundir.logs.glob("*/*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if said := WARNING.search(line):
                found[f"{log.parent.name}: {said[0]}"] += 1
    return found


def summary(rundir: RunDir) -> dict[str, Any]:
    return json.loads(rundir.summary.read_text())
