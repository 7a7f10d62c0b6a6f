"""What stands in the way of a run is said before anything is started."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import cli
from megarl.checks import inputs, start
from megarl.core.base.architecture import CONFIGS
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import META, Endpoints, RunDir, append_jsonl, latest_rows
from megarl.core.base.weight_files import INDEX, parameters
from megarl.core.controller.metrics import session_of
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted
from megarl.core.recipe import Recipe, differences, dump, from_tree, load
from megarl.predict.planning import memory
from megarl.run import devices, train
from megarl.run.devices import HostBytes
from megarl.run.nodes import this_node
from megarl.run.placement import place
from megarl.run.prepare import endpoints_of, prepare
from tests import make
from tests.make import start_facts

Tree = dict[str, Any]


pytestmark = pytest.mark.usefixtures("no_gpu")


def test_all_is_there(recipe: Recipe) -> None:
    inputs.check_inputs(recipe)
    inputs.check_sft(recipe)


def test_a_disk_without_room_for_checkpoints(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are kept while the third is written. Those of a run that goes on are there
    already.
    """
    short = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"every": recipe.run.steps})}
    )
    recipe = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"every": 1})}
    )
    size = 16 * parameters(Path(recipe.model.path))
    free = SimpleNamespace(free=3 * size - 1)
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        MegarlError,
        match=r"^run\.dir: 0\.0 GB are free on the disk of .* of which up to 3 are there",
    ):
        inputs.check_all(recipe)
    free.free = 3 * size
    inputs.check_all(recipe)
    milestones = recipe.checkpoint.model_copy(update={"milestones": (3, "1 core-hours")})
    with pytest.raises(MegarlError, match="of which up to 5 are there"):
        inputs.check_all(recipe.model_copy(update={"checkpoint": milestones}))
    best = recipe.checkpoint.model_copy(update={"keep_best": True})
    with pytest.raises(MegarlError, match="of which up to 5 are there"):
        inputs.check_all(recipe.model_copy(update={"checkpoint": best}))
    older = RunDir(recipe.run.path).checkpoints / "step-0000002"
    older.mkdir(parents=True)
    (older / META).write_text("{}")
    free.free = 2 * size
    start.check_disk(recipe, RunDir(recipe.run.path), Path("/"))
    free.free = size  # with no more steps than this, one is written
    shutil.rmtree(older)
    start.check_disk(short, RunDir(recipe.run.path), Path("/"))
    free.free = 0
    with pytest.raises(MegarlError, match="of which up to 1 are there"):
        start.check_disk(short, RunDir(recipe.run.path), Path("/"))
    with pytest.raises(MegarlError, match="of which up to 1 are there"):
        train.main(short, start_facts(short), inputs.check_start, lambda _: None)


def test_missing_model(tree: Tree) -> None:
    with pytest.raises(
        MegarlError,
        match=r"model\.path: '/nowhere' is not a Hugging Face model directory.*hf download",
    ):
        inputs.check_inputs(make.recipe(tree, model={"path": "/nowhere"}, sft={"init": ""}))


def test_prompts_in_which_the_template_has_closed_the_thinking(tree: Tree) -> None:
    """As Qwen3's without thinking: no completion would have an end of thinking, and
    each count as wrong.
    """
    template = (
        "{{ messages[0].content }}{% if think is defined and not think %}<think></think>{% endif %}"
    )
    (Path(tree["model"]["path"]) / "chat_template.jinja").write_text(template)
    math = tree["data"]["tasks"]["math"] | {"template": "chat"}
    tree["data"]["tasks"]["math"] = math | {"template_options": {"think": True}}
    inputs.check_inputs(from_tree(tree))
    tree["data"]["tasks"]["math"] = math | {"template_options": {"think": False}}
    with pytest.raises(
        MegarlError,
        match=r"data\.tasks\.math\.template_options: the prompts end with </think> already",
    ):
        inputs.check_inputs(from_tree(tree))
    inputs.check_inputs(make.recipe(tree, length={"end_of_thinking": "", "control": "none"}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), r"model\.path: .*no tokenizer can be loaded"),
        (lambda m: (m / "model.safetensors").unlink(), r"model\.path: .*model: no weights there"),
        (
            lambda m: (m / "model.safetensors").write_bytes(b"version https://git-lfs"),
            r"unreadable or incomplete",
        ),
        (
            lambda m: (m / INDEX).write_text(
                '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
            ),
            r"1 of 2 files of weights are missing: model-2\.safetensors",
        ),
        (
            lambda m: (m / INDEX).write_text("[]"),
            r"index\.json: must hold a JSON object, not a list",
        ),
    ],
)
def test_missing_parts_of_a_model(tree: Tree, damage: Callable[[Path], object], said: str) -> None:
    damage(Path(tree["model"]["path"]))
    with pytest.raises(MegarlError, match=said):
        inputs.check_all(from_tree(tree))


def test_the_recipe_of_a_cluster_does_not_start_on_a_login_node(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    most = make.recipe(tree, resources={"servers": 3, "learner_ranks": 1, "threads": 4})
    assert inputs.check_all(most) == "3 servers, 1 rank, 0 GPUs"
    for resources in (
        {"servers": 64, "learner_ranks": 16, "threads": 8},
        {"servers": 1, "learner_ranks": 24},
        {"servers": 2, "server_tensor_parallel": 8},
    ):
        with pytest.raises(
            MegarlError,
            match=r"^resources: .* threads, and this machine has no GPU and 2 cores; start",
        ):
            inputs.check_all(make.recipe(tree, resources=resources))
        with monkeypatch.context() as confirmed:
            confirmed.setenv("MEGARL_LARGE_ON_CPU", "1")
            inputs.check_all(make.recipe(tree, resources=resources))
    with pytest.raises(
        MegarlError, match=r"^resources: 24 learner ranks of 1 threads are 24 threads"
    ):
        inputs.check_sft(make.recipe(tree, resources={"learner_ranks": 24}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(80))))
    monkeypatch.setattr(start, "check_kernels", lambda: None)
    there = make.recipe(
        tree, resources={"servers": 64, "learner_ranks": 16, "threads": 8}, model={"dtype": "bf16"}
    )
    assert inputs.check_all(there) == "64 servers, 16 ranks, 80 GPUs"


def test_servers_with_gpus_need_sglangs_kernels_where_they_run(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container they have another Python than the supervisor,
    which is not asked.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    recipe = make.recipe(
        tree, resources={"servers": 1, "learner_ranks": 1}, model={"dtype": "bf16"}
    )
    monkeypatch.setattr("megarl.core.client.servable.find_spec", lambda name: None)
    with pytest.raises(MegarlError, match="SGLang's kernels for GPUs"):
        inputs.check_all(recipe)
    monkeypatch.setenv("MEGARL_STEP_COMMAND", "apptainer exec image python")
    assert inputs.check_all(recipe) == "1 server, 1 rank, 2 GPUs"


def test_a_large_model_needs_a_gpu(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LARGE", parameters(Path(tree["model"]["path"])) - 1)
    for dtype in ("bf16", "fp16"):
        with pytest.raises(
            MegarlError, match=rf"^model\.dtype: {dtype} for .*B parameters, .* no GPU"
        ):
            inputs.check_all(make.recipe(tree, model={"dtype": dtype}))
    inputs.check_all(make.recipe(tree, model={"dtype": "fp32"}))
    monkeypatch.setenv("MEGARL_LARGE_ON_CPU", "1")
    inputs.check_all(make.recipe(tree, model={"dtype": "bf16"}))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"grader": "code"}, r"^data.sandbox: bubblewrap is not installed"),
        (
            {"grader": "nowhere:judge"},
            (
                r"^data.tasks.math: the grader nowhere:judge cannot be used: .*No module named"
                r" 'nowhere'"
            ),
        ),
        ({"grader": "judge"}, r"^data.services.judge.api_key: MEGARL_NO_KEY is not set"),
        ({"rewards": {"taste": {"grader": "judge", "weight": 0.1}}}, "MEGARL_NO_KEY is not set"),
    ],
)
def test_missing_graders(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Tree, words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    services = {"judge": {"url": "http://127.0.0.1:1/", "api_key": "env:MEGARL_NO_KEY"}}
    tasks = {"math": tree["data"]["tasks"]["math"] | task}
    with pytest.raises(MegarlError, match=words):
        inputs.check_inputs(make.recipe(tree, data={"tasks": tasks, "services": services}))


@pytest.mark.parametrize(
    ("task", "data", "words"),
    [
        (
            {"environment": "nowhere:Game", "reply_tokens": 4},
            {},
            r"math\.environment: nowhere:Game cannot be used",
        ),
        ({"agent": ["python"]}, {"sandbox": "rlimits"}, "the model has no chat template"),
        (
            {},
            {"curriculum": {"kind": "linear"}},
            r"^data\.curriculum: all prompts of .* have one difficulty",
        ),
    ],
)
def test_what_would_end_the_controller_as_it_starts(
    tree: Tree, task: Tree, data: Tree, words: str
) -> None:
    tasks = {"math": tree["data"]["tasks"]["math"] | task}
    with pytest.raises(MegarlError, match=words):
        inputs.check_inputs(make.recipe(tree, data={"tasks": tasks} | data))


def test_a_loss_of_the_users(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_losses.py").write_text(
        "def good(tokens, settings):\n    return -tokens.logp * tokens.advantage, {}\nbad = 3\n"
    )
    inputs.check_own_loss(make.recipe(tree, loss={"kind": "my_losses:good"}))
    with pytest.raises(
        MegarlError, match=r"^loss\.kind: my_losses:bad is a int and cannot be called; see docs"
    ):
        inputs.check_inputs(make.recipe(tree, loss={"kind": "my_losses:bad"}))


def test_missing_warm_start(tree: Tree) -> None:
    with pytest.raises(
        MegarlError, match=r"model\.path: .*run `megarl sft` with this recipe first"
    ):
        inputs.check_inputs(make.recipe(tree, model={"path": "/nowhere"}))


def test_missing_data(tree: Tree) -> None:
    cures = {
        "x/held.jsonl": "left out by data.tasks.math=null",
        "x/quickstart-data/held.jsonl": "megarl data arithmetic x/quickstart-data",
    }
    for file, cure in cures.items():
        tasks = {"math": tree["data"]["tasks"]["math"] | {"heldout": file}}
        with pytest.raises(
            MegarlError, match=f"data.tasks.math.heldout: '{file}' is not a file.*{cure}"
        ):
            inputs.check_inputs(make.recipe(tree, data={"tasks": tasks}))
    math = tree["data"]["tasks"]["math"] | {"heldout": 3}
    inputs.check_inputs(make.recipe(tree, data={"tasks": {"math": math}}))
    with pytest.raises(MegarlError, match=r"data\.decontaminate: 'aime\.parquet' is not a file"):
        inputs.check_inputs(
            make.recipe(tree, data={"tasks": {"math": math}, "decontaminate": ["aime.parquet"]})
        )
    with pytest.raises(MegarlError, match=r"the model has no chat template"):
        inputs.check_inputs(
            make.recipe(tree, data={"tasks": {"math": math | {"template": "chat"}}})
        )
    with pytest.raises(MegarlError, match=r"data\.tasks: there is none; give one"):
        inputs.check_inputs(make.recipe(tree, data={"tasks": {}}))
    with pytest.raises(MegarlError, match=r"sft\.data: 'gone' is not a file"):
        inputs.check_sft(make.recipe(tree, sft={"data": "gone"}))


def test_a_warm_start_on_more_ranks_than_the_machine_has_gpus(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    inputs.check_sft(make.recipe(tree, resources={"learner_ranks": 2}))
    with pytest.raises(
        MegarlError,
        match=r"resources\.learner_ranks: 4 ranks, and this machine, .* has 2 GPUs; set",
    ):
        inputs.check_sft(make.recipe(tree, resources={"learner_ranks": 4}))


def test_metrics_have_addresses_and_a_key_if_they_are_wanted(tree: Tree) -> None:
    def endpoints(**monitor: Any) -> Endpoints:
        recipe = make.recipe(tree, monitor=monitor)
        return endpoints_of(
            recipe, place(recipe, (this_node(2 * (4 + recipe.resources.servers), ""),))
        )

    without = endpoints()
    assert (without.controller_metrics, without.learner_metrics, without.metrics_key) == (
        "",
        "",
        "",
    )
    found = endpoints(prometheus=True)
    urls = (found.controller, *found.servers, found.controller_metrics, found.learner_metrics)
    ports = [int(url.rpartition(":")[2]) for url in urls]
    assert len({*ports, found.rendezvous_port}) == len(ports) + 1
    assert len({found.metrics_key, found.api_key, found.admin_key}) == 3


def test_the_ranks_of_a_server_on_several_nodes_meet_at_a_port_of_the_first(tree: Tree) -> None:
    recipe = make.recipe(tree, resources={"servers": 2, "server_tensor_parallel": 8})
    nodes = [
        replace(this_node(20, ""), name=f"n{n}", address=f"10.0.0.{n}", gpus=tuple("0123"))
        for n in range(5)
    ]
    found = endpoints_of(recipe, place(recipe, nodes))
    assert [url.rpartition(":")[0] for url in found.servers] == [
        "http://10.0.0.0",
        "http://10.0.0.2",
    ]
    assert {role: meeting.nodes for role, meeting in found.meetings.items()} == {
        "server-0": 2,
        "server-1": 2,
    }
    for n, url in enumerate(found.servers):
        port = found.meetings[f"server-{n}"].port
        assert port in nodes[2 * n].ports
        assert port != int(url.rpartition(":")[2])
    assert (
        endpoints_of(
            recipe, place(recipe, [replace(nodes[0], gpus=tuple(map(str, range(20))))])
        ).meetings
        == {}
    )


@pytest.mark.parametrize(
    ("key", "value"), [("microbatch_tokens", "auto"), ("optimizer_offload", 0.5)]
)
def test_what_saves_a_gpus_memory_needs_one(tree: Tree, key: str, value: Any) -> None:
    model = {"dtype": "bf16"} if key == "optimizer_offload" else {}
    with pytest.raises(MegarlError, match=rf"learner\.{key}: .* this machine has none"):
        inputs.check_all(make.recipe(tree, learner={key: value}, model=model))


def test_the_hosts_memory_holds_what_roles_copy(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node holds the copies of all its ranks. In scalerl-8b twelve of the weights,
    thirteen of AdamW: 1,445 GB.
    """
    monkeypatch.setattr(start, "check_kernels", lambda: None)
    resources = {"learner_ranks": 4, "servers": 1, "server_tensor_parallel": 1}
    recipe = make.recipe(tree, resources=resources, model={"dtype": "bf16"})
    nodes = [
        replace(
            this_node(20, ""),
            name=f"n{i}",
            gpus=tuple("0123"),
            memory=100 * 10**9,
            capabilities=(capability,),
        )
        for i, capability in enumerate(["10.0", "9.0"])
    ]
    placed = place(recipe, nodes)
    asked: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(start, "check_gpus", lambda *arguments: asked.append(arguments))
        start.check_served(recipe, placed)
    start.check_host(recipe, placed, HostBytes(25e9, 0))
    assert asked == [(recipe, {"10.0"})], "the servers' node, not the one that asks"
    with pytest.raises(
        MegarlError,
        match=r"^resources: n1 has 100 GB .* ranks for checkpoints, 4 x 26 GB need 104 GB; spread",
    ):
        start.check_host(recipe, placed, HostBytes(26e9, 0))
    with monkeypatch.context() as patched:
        patched.setattr(memory, "host_bytes", lambda recipe: HostBytes(1e15, 0))
        with pytest.raises(MegarlError, match=r"4 x 1000000 GB need 4000000 GB"):
            inputs.check_all(make.recipe(tree, resources=resources))
    start.check_host(recipe, placed, HostBytes(20e9, 16e9))
    small = [replace(node, memory=16 * 10**9) for node in nodes]
    with pytest.raises(
        MegarlError,
        match=(
            r"^resources: n0 has 16 GB .* servers for new weights and tokens' experts, 1 x 17 GB"
            r" need 17 GB"
        ),
    ):
        start.check_host(recipe, place(recipe, small), HostBytes(1e9, 17e9))
    spanning = make.recipe(
        tree, resources=resources | {"server_tensor_parallel": 8}, model={"dtype": "bf16"}
    )
    third = replace(small[0], name="n2")
    start.check_host(
        spanning, place(spanning, [*small, third]), HostBytes(1e9, 17e9)
    )  # half of it on each node
    scale = load("scalerl-8b", [f"model.path={CONFIGS / 'llama-3.1-8b.json'}"])
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '81559 MiB\\n76294 MiB\\n'\n")  # 80 GB
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert 24 * memory.host_bytes(scale).rank == pytest.approx(
        (12 * (2 + 12) + 12) * 8.03e9, rel=0.01
    )
    assert memory.host_bytes(scale).server == pytest.approx(2 * 8.03e9, rel=0.01)
    experts = load("qwen3-30b-a3b-2nodes", [f"model.path={CONFIGS / 'qwen3-30b-a3b.json'}"])
    table = (
        2 * (80e9 * 0.86 - 30.5e9) / 49_152 * 4 * 48 * 8
    )  # on each of two ranks, for tokens of 48 KiB of KV
    assert memory.host_bytes(experts).server == pytest.approx(2 * 30.5e9 + table, rel=0.01)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_cannot_be_handed_over(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sharing: dict[str, Any] = {
        "resources": {
            "colocate": True,
            "servers": 1,
            "server_tensor_parallel": 1,
            "learner_ranks": 1,
        },
        "weights": {"transport": "cuda_ipc"},
        "serving": {"memory_fraction": 0.4},
    }
    for value, refused in (
        ("max_split_size_mb:64", False),
        ("max_split_size_mb:64, expandable_segments: True", True),
    ):
        monkeypatch.setenv(name, value)
        inputs.check_all(from_tree(tree))  # nothing is handed over
        if refused:
            with pytest.raises(
                MegarlError, match=rf"^{name}: expandable_segments:True.*weights\.transport=disk"
            ):
                inputs.check_all(make.recipe(tree, **sharing))
        else:
            inputs.check_all(make.recipe(tree, **sharing))


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert devices.gpus() == ("3", "5")


def test_new_run(recipe: Recipe) -> None:
    assert start.check_history(recipe, RunDir(recipe.run.path), {}) is False


def test_run_is_not_overwritten(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    with pytest.raises(
        MegarlError, match=r"demo: already holds a run; resume it with run\.resume=auto"
    ):
        start.check_history(recipe, write_run(1), {})


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("pipeline", {"k": 2}, r"pipeline\.k: 8 in .*recipe\.yaml, 2 now"),
        ("run", {"seed": 7}, r"run\.seed: 0 in .*recipe\.yaml, 7 now"),
        ("batch", {"prompts": 12}, r"batch\.prompts: 48 in .*, 12 now"),
        ("loss", {"cap": 8.0}, r"loss\.cap: 4\.0 in .*, 8\.0 now"),
        ("agent", {"trained_tokens": 9}, r"agent\.trained_tokens: 65536 in .*, 9 now"),
        ("sampling", {"temperature": 0.7}, r"sampling\.temperature: 1\.0 in .*, 0\.7 now"),
        (
            "data",
            {"curriculum": {"kind": "linear"}},
            r"data\.curriculum\.kind: 'none' in .*, 'linear' now",
        ),
        ("data", {"tasks": {}}, r"data\.tasks\.math\.weight: 1\.0 in .*, None now"),
        (
            "model",
            {"moe": {"routing_replay": True}},
            r"model\.moe\.routing_replay: False in .*, True now",
        ),
        (
            "data",
            {
                "tasks": {
                    "math": {"train": "a", "heldout": "b"},
                    "code": {"train": "c", "heldout": "d"},
                }
            },
            r"data\.tasks\.code\.train: None in .*, 'c' now",
        ),
    ],
)
def test_history_is_not_altered(
    tree: Tree, write_run: Callable[[int], RunDir], section: str, change: Tree, said: str
) -> None:
    tree["run"]["resume"] = "auto"
    with pytest.raises(MegarlError, match=said):
        start.check_history(make.recipe(tree, **{section: change}), write_run(1), {})


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("resources", {"servers": 3, "learner_ranks": 2}),
        ("model", {"tensor_parallel": 1}),
        ("model", {"moe": {"aux_loss": 0.1}}),
        ("run", {"steps": 500}),
        ("evaluation", {"every": 5}),
        ("agent", {"at_once": 2}),
        ("checkpoint", {"keep": 9}),
        ("pipeline", {"window": "auto"}),
    ],
)
def test_the_rest_may_change(
    tree: Tree, write_run: Callable[[int], RunDir], section: str, change: Tree
) -> None:
    tree["run"]["resume"] = "auto"
    assert start.check_history(make.recipe(tree, **{section: change}), write_run(1), {}) is True


def test_routers_may_be_frozen_but_not_thawed(
    tree: Tree, write_run: Callable[[int], RunDir]
) -> None:
    """Their part of the optimiser is in no checkpoint since."""
    tree["run"]["resume"] = "auto"
    rundir = write_run(1)
    frozen = make.recipe(tree, model={"moe": {"freeze_router": True}})
    assert start.check_history(frozen, rundir, {})
    rundir.recipe.write_text(dump(frozen))
    with pytest.raises(MegarlError, match=r"model\.moe\.freeze_router: True in .*, False now"):
        start.check_history(from_tree(tree), rundir, {})


def test_recipe_of_another_version(tree: Tree, write_run: Callable[[int], RunDir]) -> None:
    tree["run"]["resume"] = "auto"
    rundir = write_run(1)
    rundir.recipe.write_text(rundir.recipe.read_text() + "gone: 1\n")
    with pytest.raises(MegarlError, match="cannot be read by this version"):
        start.check_history(from_tree(tree), rundir, {})


@pytest.mark.parametrize("left", ["", "# nothing\n", None])
@pytest.mark.parametrize("kept", ["metrics.jsonl", "checkpoints", "rollouts"])
def test_a_run_that_lost_its_recipe_is_not_trained_on(
    tree: Tree, write_run: Callable[[int], RunDir], left: str | None, kept: str
) -> None:
    """Whatever of it is still there, and whether it is asked to go on or to begin."""
    rundir = write_run(1)
    begin_journal(rundir)
    (rundir.checkpoints / "step-0000001").mkdir()
    for path in (rundir.metrics, rundir.eval, rundir.checkpoints, rundir.rollouts):
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    rundir.recipe.unlink() if left is None else rundir.recipe.write_text(left)
    tree["run"]["resume"] = "auto"
    with pytest.raises(
        MegarlError, match=r"demo: has .* of a run, but not the recipe|the file is empty"
    ):
        start.check_history(from_tree(tree), rundir, {})
    tree["run"]["resume"] = "never"
    with pytest.raises(
        MegarlError, match=r"demo: has .* of a run, but not the recipe|already holds a run"
    ):
        start.check_history(from_tree(tree), rundir, {})


def test_a_start_that_came_to_nothing_is_no_history(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """The prompts were bad, or a role could not start: the same command begins again,
    with other prompts and another batch.
    """
    rundir = write_run(0)
    rundir.eval.unlink()
    Journal.open(rundir.rollouts, prompts_per_batch=7, max_lag=1).close()
    assert not start.check_history(recipe, rundir, {"model.path: weights": "others"})
    placed = place(recipe, (this_node(2 * (4 + recipe.resources.servers), ""),))
    prepare(recipe, rundir, placed, {"model.path: weights": "others"}, resumed=False)
    Journal.open(rundir.rollouts, prompts_per_batch=8, max_lag=1).close()
    begin_journal(rundir, prompts_per_batch=8)
    with pytest.raises(MegarlError, match="already holds a run"):
        start.check_history(recipe, rundir, {})


def begin_journal(rundir: RunDir, prompts_per_batch: int = 7) -> None:
    journal = Journal.open(rundir.rollouts, prompts_per_batch, max_lag=1)
    journal.append(Admitted(ticket=0, task="math", prompt_id="0", epoch=0, due_step=0))
    journal.close()


def test_contents_are_compared_with_those_the_run_began_with(
    tree: Tree, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(1)
    tree["run"]["resume"] = "auto"
    recipe = from_tree(tree)
    rundir.fingerprints.write_text(json.dumps(inputs.check_inputs(recipe)["fingerprints"]))
    folder = Path(recipe.model.path)
    train = Path(recipe.data.tasks["math"].train)

    def changes(path: Path, old: bytes, new: bytes) -> str:
        """What is said with another content of this file; nothing with the old one."""
        before = path.read_bytes()
        assert old in before
        path.write_bytes(before.replace(old, new))
        with pytest.raises(MegarlError, match="not what the run began with") as error:
            start.check_history(recipe, rundir, inputs.check_inputs(recipe)["fingerprints"])
        path.write_bytes(before)
        os.utime(path, (1, 1))
        assert start.check_history(recipe, rundir, inputs.check_inputs(recipe)["fingerprints"])
        return str(error.value).partition("\n")[0]

    assert changes(folder / "model.safetensors", bytes(12), bytes(11) + b"1").startswith(
        "model.path: weights: not"
    )
    assert changes(
        folder / "tokenizer_config.json", b'"eos_token"', b'"x": 1, "eos_token"'
    ).startswith("model.path: tokenizer: not")
    assert changes(folder / "config.json", b"{", b'{"x": 1, ').startswith(
        "model.path: config.json: not"
    )
    assert changes(train, b'"answer": "3"', b'"answer": "4"').startswith(
        "data.tasks.math.train: prompts: not"
    )
    assert changes(train, b'"prompt": "2+1="', b'"prompt": "2+2="').startswith(
        "data.tasks.math.train: prompts: not"
    )
    train.write_bytes(b"\n" + train.read_bytes().replace(b": ", b":"))  # the same rows
    assert start.check_history(recipe, rundir, inputs.check_inputs(recipe)["fingerprints"])
    rundir.fingerprints.unlink()
    with pytest.raises(MegarlError, match=r"fingerprints\.json: is gone"):
        start.check_history(recipe, rundir, inputs.check_inputs(recipe)["fingerprints"])


def test_a_run_goes_on_where_model_and_prompts_have_moved_to(
    tree: Tree, write_run: Callable[[int], RunDir], tmp_path: Path
) -> None:
    """Their contents are compared instead of their paths, if they are known."""
    rundir = write_run(1)
    there = tmp_path / "there"
    tree["run"]["resume"] = "auto"
    rundir.fingerprints.write_text(json.dumps(inputs.check_inputs(from_tree(tree))["fingerprints"]))
    shutil.copytree(tree["model"]["path"], there)
    prompts = shutil.copy(tree["data"]["tasks"]["math"]["train"], there)
    data = {
        "tasks": {"math": tree["data"]["tasks"]["math"] | {"train": prompts}},
        "services": {"judge": {"url": "http://another-node/"}},
    }
    moved = make.recipe(tree, model={"path": str(there)}, data=data)
    assert start.check_history(moved, rundir, inputs.check_inputs(moved)["fingerprints"])
    Path(prompts).write_text(Path(prompts).read_text().replace('"answer": "3"', '"answer": "4"'))
    with pytest.raises(
        MegarlError, match=r"data\.tasks\.math\.train: prompts: not what the run began with"
    ):
        start.check_history(moved, rundir, inputs.check_inputs(moved)["fingerprints"])
    rundir.fingerprints.write_text("{}")
    with pytest.raises(MegarlError, match=r"model\.path: '.*model' in .*, '.*there' now"):
        start.check_history(moved, rundir, inputs.check_inputs(moved)["fingerprints"])


def test_a_new_life_knows_the_hours_in_the_status_of_the_last(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """The supervisor removes that status before the new controller starts. A life that
    left none keeps what it began with.
    """
    rundir = write_run(1)
    placed = place(recipe, (this_node(2 * (4 + recipe.resources.servers), ""),))
    for left in ('{"compute_hours": 12.5}', "", "{", "[]"):
        rundir.status.write_text(left) if left else rundir.status.unlink(missing_ok=True)
        prepare(recipe, rundir, placed, {}, resumed=True)
        assert not rundir.status.exists()
        assert session_of(rundir).spent == 12.5
    prepare(recipe, rundir, placed, {}, resumed=False)
    assert session_of(rundir).spent == 0.0


def test_a_controller_that_starts_again_takes_no_other_prompts(
    tree: Tree, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run lives, so nobody else compares them."""
    rundir = write_run(1)
    train = Path(tree["data"]["tasks"]["math"]["train"])
    rundir.fingerprints.write_text(json.dumps(inputs.check_inputs(from_tree(tree))["fingerprints"]))
    monkeypatch.setattr(cli, "start_logging", lambda _: None)
    with pytest.raises(MegarlError, match=r"endpoints\.json: no such file"):
        cli.rollout(str(rundir.recipe), [])
    train.write_bytes(train.read_bytes().replace(b'"answer": "3"', b'"answer": "4"'))
    with pytest.raises(
        MegarlError, match=r"data\.tasks\.math\.train: prompts: not what the run began with"
    ):
        cli.rollout(str(rundir.recipe), [])


def test_large_weights_are_known_by_a_sample(tree: Tree) -> None:
    recipe = from_tree(tree)
    weights = Path(recipe.model.path) / "model.safetensors"
    size = 4 * inputs.WHOLE + 12_345

    def fingerprint(at: int) -> str:
        """With one byte changed there, of a sparse file of zeros."""
        with weights.open("wb") as file:
            file.truncate(size)
            file.seek(at)
            file.write(b"1")
        return inputs.read_inputs(recipe)["model.path: weights"]

    places = [0, inputs.BLOCK - 1, size // 3, size - inputs.BLOCK, size - 1]
    assert len({fingerprint(at) for at in places}) == len(places)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("train.jsonl", b"[" * 100_000, r"train\.jsonl:1: not a row: .*recursion"),
        (
            "train.jsonl",
            b'{"question": "0+1=", "answer": 1}',
            (
                r"train\.jsonl:1: no column prompt; the row has question, answer: say which it is,"
                r" such as --column prompt"
            ),
        ),
        (
            "train.jsonl",
            b'{"id": "0", "prompt": "0+1=", "answer": "1", "difficulty": 1' + b"0" * 30 + b"}",
            r"train\.jsonl:1: the difficulty is not between -2\^31 and 2\^31",
        ),
        (
            "train.jsonl",
            b'{"id": "0", "prompt": "0+x=", "answer": "1"}',
            r"train\.jsonl: prompt '0': .*cannot encode '0\+x='",
        ),
        (
            "train.jsonl",
            b'{"id": "0", "prompt": "' + b"1" * 3_000 + b'", "answer": "1"}',
            "raise length.prompt_tokens",
        ),
        (
            "train.jsonl",
            b'{"id": "0", "prompt": "0+1=\\ud800", "answer": "1"}',
            r"train\.jsonl:1: not a row",
        ),
        ("train.jsonl", b'{"id": "\xff"}', r"train\.jsonl:1: not a row"),
        ("model/config.json", b"{", r"config\.json:1: not JSON"),
        ("model/config.json", b"[" * 100_000, r"config\.json: not JSON"),
        ("model/config.json", b"[1]", r"config\.json: must hold a JSON object, not a list"),
        (
            "model/config.json",
            b'{"architectures": ["LlamaForCausalLM"]}',
            r"config\.json: '.*' is missing",
        ),
        (
            "model/config.json",
            b'{"architectures": ["LlamaForCausalLM"], "text_config": 3}',
            r"config\.json: ",
        ),
        ("model/tokenizer.json", b"{}", r"model: no tokenizer can be loaded"),
        (
            "model/tokenizer_config.json",
            b'{"eos_token": 5}',
            r"tokenizer_config\.json: eos_token is missing",
        ),
        ("model/tokenizer_config.json", b"\xff", r"tokenizer_config\.json: not JSON"),
    ],
)
@pytest.mark.timeout(60)
def test_all_that_is_given_is_read_before_anything_starts(
    recipe: Recipe, tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MegarlError, match=said) as error:
        inputs.check_inputs(recipe)
    assert str(tmp_path / name.partition("/")[0]) in str(error.value)
    assert len(str(error.value)) < 1_500


def test_lengths_that_servers_would_refuse_are_refused_before(tree: Tree) -> None:
    inputs.check_all(from_tree(tree))
    with pytest.raises(
        MegarlError, match=r"serving\.kv_tokens: 1 cannot hold one longest sequence"
    ):
        inputs.check_all(make.recipe(tree, serving={"kv_tokens": 1}))


def test_a_configuration_whose_values_are_of_other_types(recipe: Recipe) -> None:
    file = Path(recipe.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": "many"}))
    with pytest.raises(
        MegarlError, match=r"config\.json: max_position_embeddings is 'many', not a whole"
    ):
        inputs.check_all(recipe)


def test_a_folder_that_cannot_be_written_in(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    inputs.check_all(make.recipe(tree, run={"dir": str(tmp_path / "not" / "yet")}))
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(MegarlError, match=r"run\.dir: cannot write in .*/file; give another"):
            inputs.check_all(make.recipe(tree, run={"dir": str(folder)}))
    monkeypatch.setattr(
        "os.access", lambda path, mode: False
    )  # a file system that was mounted to be read
    with pytest.raises(MegarlError, match=r"run\.dir: cannot write in "):
        inputs.check_all(from_tree(tree))


def test_a_price_in_hours_that_the_run_does_not_count(tree: Tree) -> None:
    inputs.check_all(make.recipe(tree, run={"stop_when": "gain < 0.1 per core-hour"}))
    priced = make.recipe(tree, run={"stop_when": "gain < 0.1 per GPU-hour"})
    with pytest.raises(
        MegarlError,
        match=r"run\.stop_when: 'gain < 0.1 per GPU-hour', but this run counts core-hours",
    ):
        inputs.check_all(priced)
    with pytest.raises(
        MegarlError, match=r"run\.stop_when: .* counts core-hours"
    ):  # in a job, only now are its devices known
        train.main(priced, start_facts(priced), inputs.check_start, lambda _: None)
    inputs.check_all(make.recipe(tree, checkpoint={"milestones": [5, "1 core-hours"]}))
    with pytest.raises(
        MegarlError, match=r"checkpoint\.milestones: '1 GPU-hours', but this run counts core-hours"
    ):
        inputs.check_all(make.recipe(tree, checkpoint={"milestones": ["1 GPU-hours"]}))


@pytest.mark.parametrize("forked", [False, True])
def test_hours_of_gpus_and_of_cores_are_not_added(
    recipe: Recipe, write_run: Callable[[int], RunDir], forked: bool
) -> None:
    rundir = write_run(3)
    resumed = not forked
    if forked:
        run = recipe.run.model_copy(update={"fork": f"{rundir.path}@3", "name": "child"})
        recipe = recipe.model_copy(update={"run": run})
    child = RunDir(recipe.run.path)
    placed = place(recipe, (this_node(20, ""),))
    rows = latest_rows(rundir.metrics)
    for unit in ("core", "gpu"):
        rundir.metrics.write_text("")
        for row in rows:
            append_jsonl(rundir.metrics, row | {"compute_unit": unit})
        if unit == "core":
            start.check_units(recipe, placed, child, resumed)
    with pytest.raises(
        MegarlError, match="its compute is in gpu-hours, to which core-hours cannot be added"
    ):
        start.check_units(recipe, placed, child, resumed)


@pytest.mark.processes
def test_a_file_system_that_is_mounted_to_be_read(tree: Tree, tmp_path: Path) -> None:
    """Root may write wherever permissions are asked, but not there."""
    (tmp_path / "mounted").mkdir()
    (tmp_path / "recipe.yaml").write_text(
        dump(make.recipe(tree, run={"dir": str(tmp_path / "mounted" / "runs")}))
    )
    mount = "mount --bind mounted mounted && mount -o remount,bind,ro mounted"
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*private, mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount in a namespace of his own")
    dry = f"{shlex.quote(sys.executable)} -m megarl train recipe.yaml --dry-run"
    done = subprocess.run(
        [*private, f"{mount} && {dry}"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert f"run.dir: cannot write in {tmp_path}/mounted; give another run.dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_differences_are_dotted(tree: Tree) -> None:
    other = make.recipe(tree, learner={"optimizer": {"lr": 1e-3}})
    assert differences(from_tree(tree), other) == [("learner.optimizer.lr", 5e-7, 1e-3)]
    assert "resume: never" in dump(other)
