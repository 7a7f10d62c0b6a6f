"""`megarl submit` refuses what `megarl plan` refuses: every shipped recipe on every
kind of GPU.
"""

from collections import Counter
from functools import cache

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load, shipped
from megarl.predict.planning import command
from megarl.predict.planning.hardware import GPUS
from megarl.predict.planning.layouts import Found
from megarl.predict.planning.workload import Workload
from megarl.run.devices import needed
from megarl.tools import submit
from megarl.tools.submit import JobOptions

CONFIGS = {
    "scalerl-17bx16": "llama-4-scout",
    "glm-4.7-flash": "glm-4.7-flash",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3.5-35b": "qwen3.5-35b-a3b",
    "qwen3-8b": "qwen3-8b",
    "scalerl-8b": "llama-3.1-8b",
}
"""The model's config, by how a recipe's name begins; the others have a small one."""
BASELINES = ("dapo", "dr-grpo", "grpo", "gspo", "magistral", "minimax-m1", "ppo-critic")
NOT_ON_BLACKWELL = {"scalerl-17bx16", "scalerl-17bx16-h100"}


def config_of(name: str) -> str:
    if name in BASELINES:
        return "llama-3.1-8b"
    return next((c for start, c in CONFIGS.items() if name.startswith(start)), "qwen3-0.6b")


def job_of(recipe: Recipe, gpu: str) -> JobOptions:
    """Return a job with as many nodes as the recipe needs."""
    width = GPUS[gpu].node_gpus
    name = recipe.run.name
    return JobOptions(
        recipe=name,
        overrides=(),
        nodes=-(-needed(recipe) // width),
        gpus_per_node=width,
        gpu=gpu,
        model_config=config_of(name),
        time="1:00:00",
        partition=None,
        account=None,
        container="none",
        image="",
        mounts="",
        price=None,
        kubernetes=False,
    )


def plan_refuses(recipe: Recipe, job: JobOptions) -> bool:
    gpus = job.nodes * job.gpus_per_node
    asked = command.problem(recipe, gpus, job.gpu, job.model_config, command.work(recipe))
    return command.main(asked, None, True, None) != 0


def submit_refuses(recipe: Recipe, job: JobOptions) -> bool:
    try:
        submit.choose(recipe, job)
    except MegarlError:
        return True
    return False


@pytest.fixture
def only_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other layout is searched for, and a recipe's lengths are drawn once: both take
    long.
    """

    @cache
    def drawn(name: str) -> Workload:
        return work(load(name))

    def nothing(_: object) -> Found:
        return Found([], Counter(), {})

    work = command.work
    monkeypatch.setattr(command, "work", lambda recipe: drawn(recipe.run.name))
    for module in (command, submit):
        monkeypatch.setattr(module, "search", nothing)


def test_submit_refuses_what_plan_refuses(only_as_written: None) -> None:
    refused: dict[str, set[str]] = {gpu: set() for gpu in GPUS}
    for name in shipped():
        recipe = load(name)
        for gpu in GPUS:
            job = job_of(recipe, gpu)
            refuses = plan_refuses(recipe, job)
            assert submit_refuses(recipe, job) == refuses, (name, gpu)
            if refuses:
                refused[gpu].add(name)
    for gpu in ("b200", "b300", "gb200", "gb300"):
        assert refused[gpu] >= NOT_ON_BLACKWELL, gpu
        assert "scalerl-8b" not in refused[gpu]
    assert refused["h200"] == set()
    assert refused["h100"] == {"scalerl-17bx16"}, "its activations need 141 GB"
    assert "scalerl-8b" in refused["rtx-4090"]


def test_what_is_refused_says_why_and_where_it_runs() -> None:
    recipe = load("scalerl-17bx16")
    job = job_of(recipe, "gb200")
    with pytest.raises(
        MegarlError, match=r"no such run starts on gb200: length: .* only on Hopper"
    ):
        submit.choose(recipe, job)
    short = load("scalerl-17bx16", ["length.thinking_tokens=[2000,3000]"])
    assert submit.choose(short, job).overrides == ()
