"""One real run, from `megarl train` to the exported policy: what it leaves is what is promised."""

import asyncio
import json
import re
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from megarl import recipe as recipes
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.recipe import Recipe
from megarl.rollout.client import ServerClient
from megarl.rundir import Endpoints, LinkKeys, RunDir, free_ports, latest_rows
from megarl.serving.health import wait_ready
from tests.e2e import runs
from tests.e2e.runs import (
    SMALL,
    START_LIMIT_S,
    LiveRun,
    batches,
    check_history,
    check_nothing_left,
    megarl,
    publications,
    quiet,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def recipe(finished: LiveRun) -> Recipe:
    return recipes.load(str(finished.rundir.recipe))


@pytest.fixture(scope="module")
def rundir(finished: LiveRun) -> RunDir:
    return finished.rundir


def test_history(rundir: RunDir, recipe: Recipe) -> None:
    check_history(rundir, recipe)


def test_weights_change_within_completions_and_nothing_is_aborted(rundir: RunDir, recipe: Recipe) -> None:
    rollouts = [r for groups in batches(rundir, recipe) for g in groups for r in g.rollouts]
    assert len(rollouts) == recipe.run.steps * recipe.batch.prompts * recipe.sampling.generations
    assert sum(len(np.unique(r.versions)) > 1 for r in rollouts) > 10
    assert {r.finish for r in rollouts} <= {"stop", "length"}
    assert sum(r.retries for r in rollouts) == 0


def test_both_sides_agree_after_every_publication(rundir: RunDir, recipe: Recipe) -> None:
    published = publications(rundir)
    assert {p.version for p in published} >= {0, recipe.run.steps}
    assert all(p.probe_logprob_diff < 1e-4 for p in published)


def test_compute_and_evaluations(rundir: RunDir, recipe: Recipe) -> None:
    rows, scores = latest_rows(rundir.metrics), latest_rows(rundir.eval)
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
    names = {"weight_version", "tokens_per_second", "lag_max", "lag_mean", "probe_logprob_diff", "pass_rate_train"}
    assert all(names <= row.keys() for row in rows)
    assert all(json.loads(line, parse_constant=pytest.fail) for line in rundir.metrics.read_text().splitlines())


def test_what_a_run_leaves(rundir: RunDir, recipe: Recipe) -> None:
    summary = runs.summary(rundir)
    assert summary["outcome"] == "finished"
    html = rundir.report.read_text()
    assert not re.search(r"""(src|href)=["']?http|url\(["']?http|@import""", html), "it would load something"
    assert rundir.picture.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(rundir.tensorboard))
    events.Reload()
    losses = [e for tag in events.Tags()["scalars"] if tag.endswith("pass_rate_train") for e in events.Scalars(tag)]
    assert len(losses) == recipe.run.steps
    assert {log.parent.name for log in rundir.logs.glob("*/*.log")} == {"server", "controller", "learner"}
    names = {p.name for p in rundir.checkpoints.iterdir()}
    assert names == {"step-0000008", "step-0000010"}  # checkpoint.keep of them


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
    rundir: RunDir, recipe: Recipe, finished: LiveRun
) -> None:
    exported = finished.cwd / "policy"
    convert = [sys.executable, "-m", "checkpoints_tools", "convert", "megatron-to-hf", str(rundir.path), str(exported)]
    done = subprocess.run(convert, cwd=finished.cwd, capture_output=True, text=True, timeout=200, env=quiet())
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(exported)
    end = tokenizer.end
    heldout = finished.cwd / recipe.data.tasks["arithmetic"].heldout
    prompts = load_prompts(heldout, tokenizer, recipe.length.prompt_tokens, "arithmetic")[:24]
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
    assert ours == greedy_of_server(exported, finished.cwd, [p.tokens.tolist() for p in prompts], end)


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
    command = [sys.executable, "-m", "megarl", "serve", str(rundir.recipe), "--index", "0", "--port", str(port)]
    with (cwd / "serve.out").open("wb") as log:
        server = psutil.Popen(command, cwd=cwd, stdout=log, stderr=log, env=quiet())
    try:
        wait_ready(url, START_LIMIT_S, server.poll)

        async def ask() -> list[list[int]]:
            client = ServerClient(url, endpoints.api_key, endpoints.admin_key, timeout_s=60)
            try:
                answers = await asyncio.gather(
                    *(
                        client.generate(
                            np.array(p, np.int32), 48, temperature=0.0, top_p=1.0, stop_token_ids=(end,), cache_salt="g"
                        )
                        for p in prompts
                    )
                )
                return [a.tokens.tolist() for a in answers]
            finally:
                await client.close()

        return asyncio.run(ask())
    finally:
        family = [server, *server.children(recursive=True)]
        server.kill()
        check_nothing_left(family, [port])
