"""One real run, from `megarl train` to the exported policy: what it leaves is what is
promised.
"""

import asyncio
import gzip
import json
import re
import secrets
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from megarl.core import recipe as recipes
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import (
    Endpoints,
    LinkKeys,
    RunDir,
    latest_rows,
    latest_scores,
    step_folder,
    step_of,
)
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.client.client import ServerClient
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Finished
from megarl.core.models.checkpoint import find
from megarl.core.recipe import Recipe
from megarl.run.logs import PROBLEM
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready
from tests import trace_format
from tests.e2e import runs
from tests.e2e.runs import (
    SMALL,
    START_LIMIT_S,
    LiveRun,
    batches,
    check_ended,
    check_history,
    megarl,
    publications,
    quiet,
)
from tests.processes import SERVERS
from tests.prompts import load_prompts
from tests.summaries import WORDS, recomputed

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

LONG_ENOUGH_US = 50_000.0
"""Microseconds: the busy share of a shorter step means nothing."""


@pytest.fixture(scope="module")
def recipe(finished: LiveRun) -> Recipe:
    return recipes.load(str(finished.rundir.recipe))


@pytest.fixture(scope="module")
def rundir(finished: LiveRun) -> RunDir:
    return finished.rundir


def test_history(rundir: RunDir, recipe: Recipe) -> None:
    check_history(rundir, recipe)


def test_weights_change_within_completions_and_nothing_is_aborted(
    rundir: RunDir, recipe: Recipe
) -> None:
    rollouts = [r for groups in batches(rundir, recipe) for g in groups for r in g.rollouts]
    assert len(rollouts) == recipe.run.steps * recipe.batch.prompts * recipe.sampling.generations
    assert sum(len(np.unique(r.versions)) > 1 for r in rollouts) > 10
    assert {r.finish for r in rollouts} <= {"stop", "length"}
    assert sum(r.retries for r in rollouts) == 0


def test_both_sides_agree_after_every_publication(rundir: RunDir, recipe: Recipe) -> None:
    published = publications(rundir)
    assert {p.version for p in published} >= {0, recipe.run.steps}
    runs.check_parity(rundir)


def test_compute_and_evaluations(rundir: RunDir, recipe: Recipe) -> None:
    rows = latest_rows(rundir.metrics)
    scores = latest_rows(rundir.eval)
    assert [s["step"] for s in scores] == [0, 5, 10]
    for score in scores:
        assert score["weight_version"] == score["step"]
        assert score["n_prompts"] == recipe.evaluation.prompts
        assert score["samples"] == recipe.evaluation.samples
        assert 0 <= score["pass_rate"] <= 1
        assert score["compute_unit"] == "core"
    for series in (rows, scores):
        hours = [row["compute_hours"] for row in series]
        assert hours == sorted(hours)
        assert hours[0] >= 0
        parts = [
            [row[f"{part}_hours"] for row in series]
            for part in ("startup", "evaluation", "training")
        ]
        assert all(part == sorted(part) for part in parts)
        assert all(
            sum(of_row) <= total + 1e-9 for *of_row, total in zip(*parts, hours, strict=True)
        )
    assert scores[0]["startup_hours"] > scores[0]["training_hours"]
    assert (
        scores[0]["evaluation_hours"]
        == 0
        < scores[-1]["evaluation_hours"]
        < scores[-1]["compute_hours"]
    )
    names = {
        "weight_version",
        "tokens_per_second",
        "lag_max",
        "lag_mean",
        "window",
        "pass_rate_train",
    }
    assert all(names <= row.keys() for row in rows)
    assert all(
        json.loads(line, parse_constant=pytest.fail)
        for line in rundir.metrics.read_text().splitlines()
    )


def test_slices_are_of_the_run_s_scores(rundir: RunDir, finished: LiveRun) -> None:
    """By task, by the data's difficulty: weighted by prompts the levels are the task.
    Two points are no law.
    """
    shown = megarl("scaling", "slices", str(rundir.path), "--json", cwd=finished.cwd)
    assert shown.returncode == 0, shown.stderr
    task, *others = json.loads(shown.stdout)
    levels = [part for part in others if part["kind"] == "difficulty"]
    rows = latest_scores(rundir.eval)
    assert [task["before"], task["last"]] == pytest.approx(
        [rows[0]["pass_rate"], rows[-1]["pass_rate"]]
    )
    assert len(levels) > 1
    assert all(level["slice"].startswith("difficulty ") for level in levels)
    weighted = sum(level["prompts"] * level["last"] for level in levels) / task["prompts"]
    assert (sum(level["prompts"] for level in levels), weighted) == (
        task["prompts"],
        pytest.approx(task["last"]),
    )
    assert all("2 points in the window" in part["problem"] for part in (task, *levels))


def test_what_a_run_leaves(rundir: RunDir, recipe: Recipe) -> None:
    summary = runs.summary(rundir)
    assert summary["outcome"] == "finished"
    again = recomputed(rundir.path, recipe.pipeline.lag_limit)
    assert summary.keys() == again.keys() | WORDS
    assert {name: summary[name] for name in again} == pytest.approx(again, rel=1e-9)
    html = rundir.report.read_text()
    assert not re.search(r"""(src|href)=["']?http|url\(["']?http|@import""", html), (
        "it would load something"
    )
    assert rundir.picture.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(rundir.tensorboard))
    events.Reload()
    losses = [
        e
        for tag in events.Tags()["scalars"]
        if tag.endswith("pass_rate_train")
        for e in events.Scalars(tag)
    ]
    assert len(losses) == recipe.run.steps
    logs = list(rundir.logs.glob("*/*.log"))
    assert {log.parent.name for log in logs} == {"server", "controller", "learner"}
    red = [line for log in logs for line in log.read_text().splitlines() if PROBLEM.search(line)]
    assert red == [], "nothing was wrong"
    assert not [
        log for log in logs if log.parent.name == "server" and "egatron" in log.read_text()
    ], "SGLang imports it"


def test_which_checkpoints_stay(rundir: RunDir) -> None:
    """A milestone, `checkpoint.keep` of them, and the best of the evaluated versions 5
    and 10: 5 was written for that.
    """
    scores = {row["step"]: row["pass_rate"] for row in latest_scores(rundir.eval)}
    best = max((5, 10), key=lambda step: scores[step])
    assert set(map(step_of, rundir.checkpoints.iterdir())) == {3, 8, 10, best}
    (log,) = rundir.logs.glob("learner/*.0.log")
    assert "checkpoint step-0000005" in log.read_text()
    assert find(Path(f"{rundir.path}@best")) == step_folder(rundir.checkpoints, best)


def test_trace_tells_the_times_of_metrics_and_journal(
    rundir: RunDir, recipe: Recipe, finished: LiveRun
) -> None:
    done = megarl("trace", str(rundir.path), "--steps", "100", cwd=finished.cwd)
    assert done.returncode == 0, done.stderr
    trace = json.loads(gzip.decompress((rundir.path / "trace.json.gz").read_bytes()))
    trace_format.check(trace)
    trace_format.check(json.loads((finished.cwd / "live.json").read_text()))  # of the run under way
    rows = latest_rows(rundir.metrics)
    threads = trace_format.threads(trace)
    assert trace["otherData"]["steps"] == [row["step"] for row in rows]
    learner = threads["learner/rank 0"]
    for row in rows:
        (step,) = [e for e in learner if e["name"] == f"step {row['step']}"]
        assert step["dur"] == pytest.approx(1e6 * row["step_seconds"], abs=1000)
        parts = [
            e for e in learner if e is not step and step["ts"] <= e["ts"] < step["ts"] + step["dur"]
        ]
        for part in ("wait", "train", "publish", "checkpoint"):
            seconds = sum(e["dur"] for e in parts if e["name"] == part) / 1e6
            assert seconds == pytest.approx(row[f"{part}_seconds"], abs=1e-3)
        assert row["empty"] or {"forward_backward", "optimizer"} <= {e["name"] for e in parts}
    tickets = threads["groups/tickets"]
    ends = {(e["tid"], e["ts"]): e["ts"] + e["dur"] for e in tickets if e["name"] == "generated"}
    generated = {
        e["name"]: ends[e["tid"], e["ts"]] for e in tickets if e["name"].startswith("ticket")
    }
    finishes = {
        r.group.ticket: r
        for r in JournalReader(rundir.rollouts).replay()
        if isinstance(r, Finished)
    }
    begin = trace["otherData"]["begin"]
    for ticket, record in finishes.items():
        assert begin + generated[f"ticket {ticket}"] / 1e6 == pytest.approx(
            record.time, abs=5.0
        )  # its record is on disk
        sampled = [
            e for e in threads["server 0/requests"] if e["name"].startswith(f"ticket {ticket}.")
        ]
        tokens = sum(rollout.trained_tokens for rollout in record.group.rollouts)
        assert sum(e["args"]["tokens"] for e in sampled) == tokens
    arrows = {e["name"] for e in trace["traceEvents"] if e["ph"] == "f"}
    assert arrows == {f"step {row['step']}" for row in rows}
    paused = {e["name"]: e["dur"] for e in threads["server 0/paused"]}
    for publication in publications(rundir):
        seconds = (
            publication.pause_seconds + publication.resume_seconds
        )  # it generated through the transfer
        assert paused[f"version {publication.version}"] == pytest.approx(1e6 * seconds, abs=1000)
    assert len(paused) == len(publications(rundir))
    check_busy(trace, rows)


def check_busy(trace: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Between two batches the server was busy for the share that the row says."""
    taken = [
        e["ts"] for e in trace["traceEvents"] if e["ph"] == "i" and e["name"].startswith("batch")
    ]
    busy = trace_format.threads(trace)["server 0/busy"]
    steps = [(row, *ends) for row, ends in zip(rows[1:], pairwise(taken), strict=True)]
    steps = [(row, begin, end) for row, begin, end in steps if end - begin > LONG_ENOUGH_US]
    assert steps
    for row, begin, end in steps:
        both = sum(max(0, min(e["ts"] + e["dur"], end) - max(e["ts"], begin)) for e in busy)
        assert both / (end - begin) == pytest.approx(row["server_busy_share"], abs=0.1)


def test_metrics_for_prometheus(finished: LiveRun, rundir: RunDir) -> None:
    families = {
        role: {f.name: f for f in text_string_to_metric_families(t)}
        for role, t in finished.scrapes.items()
    }
    assert families["learner"]["megarl_steps"].samples[0].value >= 2
    assert families["controller"]["megarl_server_tokens"].samples[0].value > 0
    assert "sglang:num_running_reqs" in families["server"]


def test_a_profile_of_the_steps_asked_for(rundir: RunDir) -> None:
    (path,) = rundir.profile.iterdir()
    assert path.name == "step-0000003-rank-0.json.gz"
    names = {e.get("name") for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"forward_backward", "optimizer"} <= names


def test_rollouts_show(rundir: RunDir, finished: LiveRun) -> None:
    shown = megarl("rollouts", "show", str(rundir.path), "--ticket", "40", cwd=finished.cwd)
    assert shown.returncode == 0, shown.stderr
    assert "<think>" in shown.stdout


def test_a_finished_run_is_not_trained_over(finished: LiveRun) -> None:
    again = megarl("train", "quickstart", "run.name=whole", *SMALL, cwd=finished.cwd)
    assert again.returncode == 2
    assert "run.resume=auto" in again.stderr
    assert "Traceback" not in again.stderr


def test_exported_policy_answers_the_same_in_transformers_and_sglang(
    recipe: Recipe, finished: LiveRun, exported: Path
) -> None:
    tokenizer = load_tokenizer(exported)
    end = tokenizer.end
    heldout = recipe.data.tasks["arithmetic"].heldout
    assert isinstance(heldout, str)
    prompts = load_prompts(
        finished.cwd / heldout, tokenizer, recipe.length.prompt_tokens, "arithmetic"
    )[:24]
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ours = []
    for prompt in prompts:
        ids = torch.tensor(prompt.tokens.tolist())[None]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=48,
            eos_token_id=end,
            pad_token_id=0,
        )
        ours.append(out[0, ids.shape[1] :].tolist())
    assert ours == greedy_of_server(
        exported, finished.cwd, [p.tokens.tolist() for p in prompts], end
    )


def greedy_of_server(model: Path, cwd: Path, prompts: list[list[int]], end: int) -> list[list[int]]:
    """Greedy answers of a server that `megarl serve` starts on this directory."""
    port, controller, rendezvous = free_ports(3)
    url = f"http://127.0.0.1:{port}"
    overrides = (f"model.path={model}", "run.name=serve-exported")
    recipe = recipes.load("quickstart", overrides)
    rundir = RunDir(cwd / recipe.run.path)
    rundir.create()
    endpoints = Endpoints(
        session="export",
        controller=f"tcp://127.0.0.1:{controller}",
        servers=(url,),
        api_key=secrets.token_hex(8),
        admin_key=secrets.token_hex(8),
        link=LinkKeys.new(),
        rendezvous_port=rendezvous,
    )
    rundir.write_endpoints(endpoints)
    rundir.recipe.write_text(recipes.dump(recipe))
    command = ["serve", str(rundir.recipe), "--index", "0", "--port", str(port)]
    server = SERVERS.megarl(command, cwd, quiet(), cwd / "serve.out")
    try:
        wait_ready(url, START_LIMIT_S, server.poll)

        async def ask() -> list[list[int]]:
            client = ServerClient(
                ServerAddress(id=0, url=url), endpoints.api_key, endpoints.admin_key, timeout_s=60
            )
            try:
                answers = await asyncio.gather(
                    *(
                        client.generate(
                            np.array(p, np.int32),
                            48,
                            temperature=0.0,
                            top_p=1.0,
                            stop_token_ids=(end,),
                            cache_salt="g",
                        )
                        for p in prompts
                    )
                )
                return [a.tokens.tolist() for a in answers]
            finally:
                await client.close()

        return asyncio.run(ask())
    finally:
        first = psutil.Process(server.pid)
        family = [first, *first.children(recursive=True)]
        server.kill()
        check_ended(family, [port])
