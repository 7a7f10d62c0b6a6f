"""A run directory as a real run leaves it, but with made-up figures: what monitor and
supervisor read.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from megarl.core.base.rundir import RunDir, append_jsonl, write_jsonl
from megarl.core.recipe import Recipe, dump, from_tree
from megarl.tasks.data.arithmetic_models import CHARACTERS, END, LLAMA, SPECIAL
from tests.sparse_weights import write_sparse_weights

Tree = dict[str, Any]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A small recipe whose files exist and can be read."""
    model = tmp_path / "model"
    write_model(model)
    sums = [{"id": f"{n}", "prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(6)]
    write_jsonl(tmp_path / "train.jsonl", sums[:5])
    write_jsonl(tmp_path / "heldout.jsonl", sums[5:])
    write_jsonl(tmp_path / "sft.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    return {
        "run": {"name": "demo", "dir": str(tmp_path / "runs"), "steps": 80},
        "model": {"path": str(model), "dtype": "fp32"},
        "serving": {"kv_tokens": 65_536},
        "length": {"interruption": "...</think>"},
        "data": {
            "tasks": {
                "math": {
                    "train": str(tmp_path / "train.jsonl"),
                    "heldout": str(tmp_path / "heldout.jsonl"),
                }
            }
        },
        "sft": {"data": str(tmp_path / "sft.jsonl"), "init": str(model)},
    }


def write_model(folder: Path) -> None:
    """What of a model's directory is read before a run: a Llama's sizes, the tokenizer
    of sums, weights that nobody loads.
    """
    folder.mkdir()
    sizes = {"vocab_size": 32, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]} | sizes
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<none>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.add_special_tokens([*SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    write_sparse_weights(folder)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def recipe(tree: Tree) -> Recipe:
    return from_tree(tree)


@pytest.fixture
def write_run(recipe: Recipe) -> Callable[[int], RunDir]:
    """write_run(steps): the directory of `recipe`'s run after so many steps."""

    def write(steps: int) -> RunDir:
        rundir = RunDir(recipe.run.path)
        rng = random.Random(0)
        rundir.create()
        rundir.recipe.write_text(dump(recipe))
        rundir.fingerprints.write_text("{}")
        for step in range(steps):
            append_jsonl(rundir.metrics, metrics_row(step, rng))
        for step in range(0, steps + 1, 20):
            append_jsonl(rundir.eval, evaluation_row(step))
        rundir.status.write_text(json.dumps(status_tree(steps)))
        return rundir

    return write


TASKS = {"math": 0.0, "code": -0.2}
"""Two tasks of a recipe, and how far their pass rates are from the mean."""


@pytest.fixture
def write_tasks_run(tree: Tree, tmp_path: Path) -> Callable[[int], tuple[Recipe, RunDir]]:
    """write_tasks_run(steps): a recipe of two tasks,
    and its run after so many steps.
    """

    def write(steps: int) -> tuple[Recipe, RunDir]:
        tasks = dict.fromkeys(TASKS, tree["data"]["tasks"]["math"])
        recipe = from_tree(tree | {"data": {"tasks": tasks}})
        rng = random.Random(0)
        rundir = RunDir(recipe.run.path)
        rundir.create()
        rundir.recipe.write_text(dump(recipe))
        for step in range(steps):
            row = metrics_row(step, rng)
            for task, off in TASKS.items():
                row[f"pass_rate_train/{task}"] = max(0.0, row["pass_rate_train"] + off)
                row[f"truncation_rate/{task}"] = row["truncation_rate"] / 2
                row[f"completion_tokens_mean/{task}"] = row["completion_tokens_mean"] - 20 * off
            append_jsonl(rundir.metrics, row)
        for step in range(0, steps + 1, 20):
            row = evaluation_row(step)
            append_jsonl(
                rundir.eval,
                row | {f"pass_rate/{t}": row["pass_rate"] + off for t, off in TASKS.items()},
            )
        rundir.status.write_text(json.dumps(status_tree(steps)))
        return recipe, rundir

    return write


def pass_rate(step: int) -> float:
    return 0.36 + 0.58 / (1 + math.exp(-(step - 25) / 8))


def parity(cause: str, mean: float, tokens: int) -> Tree:
    """The distribution of one cause at one publication."""
    statistics = {"p50": 0.5, "p99": 5, "p999": 8, "max": 9, "share": 1e3, "k3": 1e-3}
    found = {
        "mean": mean,
        **{name: factor * mean for name, factor in statistics.items()},
        "tokens": float(tokens),
    }
    return {f"parity_{name}/{cause}": value for name, value in found.items()}


def metrics_row(step: int, rng: random.Random) -> Tree:
    train = 0.9 + 0.1 * rng.random()
    wait = 0.5 * rng.random()
    publish = 0.12 + 0.02 * rng.random()
    return {
        "step": step,
        "weight_version": step + 1,
        "time": 1.8e9 + 2 * step,
        "compute_hours": 0.01 + 0.0011 * step,
        "compute_unit": "core",
        "replay": 0,
        "pass_rate_train": min(1.0, max(0.0, pass_rate(step) + rng.gauss(0, 0.05))),
        "truncation_rate": 0.02 * rng.random(),
        "interruption_rate": 0.08 * rng.random(),
        "format_error_rate": 0.03 * rng.random(),
        "completion_tokens_mean": 31 + rng.random(),
        "generated_tokens": 6000 + 100 * rng.random(),
        "groups_in_loss": 20.0 - step / 8,
        "void_groups": 0.0,
        "entropy": 0.4 * math.exp(-step / 60) + 0.01 * rng.random(),
        "grad_norm": 0.6 + 0.2 * rng.random(),
        "loss": rng.gauss(0, 0.02),
        "lr": 1e-4,
        "lag_mean": 1.4 + rng.random(),
        "lag_max": float(rng.randint(2, 5)),
        "window": 6.0,
        "versions_per_rollout": 1.8,
        "parity_rollouts": 4.0,
        **parity("kernels", 2e-6 * (1 + rng.random()), 400 + step),
        **parity("decode", 0.0, 200),
        "parity_mean/staleness": 3e-3 * (1 + rng.random()),
        "warning_parity": 0.0,
        "trained_logprob_diff": 0.01 * rng.random(),
        "tokens_per_second": 6000 / (train + wait + publish),
        "rollout_tokens_per_second": 4000 + 500 * rng.random(),
        "server_busy_share": 0.85,
        "step_seconds": train + wait + publish + 0.01,
        "train_seconds": train,
        "wait_seconds": wait,
        "publish_seconds": publish,
        "checkpoint_seconds": 0.0,
        "pause_seconds": 0.01,
        "transfer_seconds": 0.06,
        "resume_seconds": 0.01,
    }


def evaluation_row(step: int) -> Tree:
    return {
        "step": step,
        "weight_version": step,
        "pass_rate": round(pass_rate(step), 3),
        "n_prompts": 200,
        "samples": 4,
        "compute_hours": 0.01 + 0.0011 * step,
        "compute_unit": "core",
    }


def status_tree(step: int) -> Tree:
    servers = [
        {
            "id": 0,
            "state": "clean",
            "version": step,
            "running": 118,
            "tokens_per_second": 2310.4,
            "busy_share": 0.93,
        },
        {
            "id": 1,
            "state": "publishing",
            "version": step,
            "running": 97,
            "tokens_per_second": 2188.0,
            "busy_share": 0.88,
        },
    ]
    return {
        "time": 1.8e9 + 2 * step,
        "step": step,
        "version": step,
        "phase": "train",
        "servers": servers,
        "tickets": {
            "window": 152,
            "window_limit": 216,
            "running": 140,
            "waiting": 12,
            "finished": 64,
            "void": 0,
        },
        "compute_hours": 0.09,
        "compute_unit": "core",
        "eval": None,
        "rollout_tokens_per_second": 4498.4,
    }
