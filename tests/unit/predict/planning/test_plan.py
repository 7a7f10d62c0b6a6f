"""`megarl plan` as a user meets it: quick, without torch, one line for bad input; and
what its layouts must obey.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from megarl import cli
from megarl.core.algorithm.packing import cost_of
from megarl.core.base import architecture
from megarl.core.recipe import load
from megarl.core.recipe.rules import impossible, impossible_for
from megarl.predict.planning import layouts, show, simulate, speed
from megarl.predict.planning.hardware import Gpu, gpu_named
from megarl.predict.planning.layouts import (
    Plan,
    PlanningProblem,
    as_written,
    search,
    server_of,
)
from megarl.predict.planning.speed import Decoder
from megarl.predict.planning.workload import lognormal, workload
from megarl.run.nodes import Node
from megarl.run.placement import place
from megarl.run.restart import Role


def problem(
    name: str, config: str, gpu: str, gpus: int = 80, mean: float = 8000, *overrides: str
) -> PlanningProblem:
    recipe = load(name, overrides)
    work = workload(recipe, lognormal(recipe, mean, 0.5), 1.0, 0)
    return PlanningProblem(recipe, architecture.read(config), gpu_named(gpu), gpus, work)


def written(asked: PlanningProblem) -> Plan:
    found = as_written(asked)
    assert not isinstance(found, str), found
    return found


def test_no_torch_and_no_matplotlib() -> None:
    code = """
import sys
from megarl.cli import main
arguments = "plan scalerl-8b --gpus 80 --gpu h100 --model-config llama-3.1-8b --json".split()
assert main(arguments) == 0
heavy = {"torch", "transformers", "sglang", "megatron", "matplotlib", "scipy", "tensorboard", "aiohttp"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 8_030_261_248
    assert found["plans"][0]["step_seconds"] <= found["as_written"]["step_seconds"]
    assert sum(found["refused"].values()) > 0


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits 80 columns, and the best plan can be copied into a command."""
    monkeypatch.setenv("COLUMNS", "80")
    arguments = (
        "plan scalerl-17bx16 --gpus 80 --gpu h200 --model-config llama-4-scout --mean-tokens 6000"
    )
    assert cli.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "107.77B parameters, 17.17B active" in " ".join(out.split())
    assert "refused" in out
    assert "largest allocation of a publication: the embedding, 2.1 GB" in " ".join(out.split())
    least, most = show.TAKEN_OVER_PLANNED
    assert "as written: 7,100 steps take" in " ".join(out.split())
    assert f"took {least} to {most} times what is planned" in " ".join(out.split())
    lines = out.splitlines()
    headings = next(line for line in lines if "as written" in line)
    assert headings.split() == [
        "as",
        "written",
        "plan",
        "1",
        "plan",
        "2",
        "plan",
        "3",
        "plan",
        "4",
        "plan",
        "5",
    ]
    (best,) = [line.removeprefix("plan 1 is: ") for line in lines if line.startswith("plan 1 is: ")]
    assert all(len(line) <= 80 for line in lines if not line.startswith("plan 1 is: "))
    recipe = load("scalerl-17bx16", best.split())
    resources = recipe.resources
    assert resources.servers * resources.server_tensor_parallel + resources.learner_ranks == 80


def test_a_run_that_would_be_refused_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """On GPUs before and after Hopper SGLang's attention to so many tokens is not Llama
    4's.
    """
    arguments = "plan scalerl-17bx16 --gpus 80 --gpu gb200 --model-config llama-4-scout"
    assert cli.main(arguments.split()) == 1
    assert "no such run starts on gb200: length: prompt_tokens" in " ".join(
        capsys.readouterr().out.split()
    )
    assert cli.main([*arguments.split(), "length.thinking_tokens=[2000,3000]"]) == 0


def test_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its table, which fits 80 columns."""
    sizes = (
        "batch.prompts=12 sampling.generations=2 length.thinking_tokens=[200,300]"
        " length.answer_tokens=20 pipeline.k=2"
    )
    arguments = (
        f"plan scalerl-8b {sizes} --gpus 4 --gpu gb200 --model-config llama-3.1-8b --simulate"
        " --steps 2"
    )
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k))
    )
    assert cli.main([*arguments.split(), "--json", "--out", str(tmp_path / "plan.png")]) == 0
    simulated = json.loads(capsys.readouterr().out)["simulated"]
    assert set(simulated["plans"]) == {"written (80)", "plan 1", "plan 2", "plan 3"}
    (split,) = [axes for axes in drawn[0].axes if "by the split" in axes.get_title(loc="left")]
    assert [text.get_text() for text in split.texts] == ["as written: 80 GPUs"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert all(s["lag_max"] <= int(k) for k, s in simulated["by_lag"].items())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("plan 1, spread 0.3 ") and len(line.split()) == 12 for line in lines
    ), lines
    assert all(len(line) <= 80 for line in lines if not line.startswith("plan 1 is: "))


def test_a_picture_of_no_format_is_refused_before_anything_is_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (
        "plan scalerl-8b --gpus 80 --gpu h100 --model-config llama-3.1-8b --simulate --out plan.xyz"
    )
    assert cli.main(arguments.split()) == 2
    assert (
        "--out: plan.xyz: no picture is drawn as .xyz; end the name with .png"
        in capsys.readouterr().err
    )


def test_where_nothing_fits_recomputation_and_offload_are_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = "plan scalerl-8b --gpus 16 --gpu h100 --model-config qwen3-30b-a3b"
    assert cli.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "nothing fits without learner.recompute=full, which the plans set" in " ".join(
        out.split()
    )
    (best,) = [
        line.removeprefix("plan 1 is: ")
        for line in out.splitlines()
        if line.startswith("plan 1 is: ")
    ]
    assert isinstance(
        as_written(problem("scalerl-8b", "qwen3-30b-a3b", "h100", 16, 8000, *best.split())), Plan
    )
    smaller = search(problem("scalerl-8b", "qwen3-30b-a3b", "h100", 8))
    assert smaller.saving == {"recompute": "full", "optimizer_offload": 1.0}
    assert "learner.optimizer_offload=1.0" in show.overrides(smaller.plans[0])
    assert search(problem("scalerl-8b", "llama-3.1-8b", "h100")).saving == {}, (
        "what fits is left as it is"
    )
    nothing = search(problem("scalerl-8b", "qwen3-30b-a3b", "h100", 2))
    assert (nothing.plans, nothing.saving) == ([], {})


def test_details_are_those_of_as_many_gpus_as_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The recipe's own 80 GPUs have a column, and a note. If nothing fits there is
    neither table nor detail.
    """
    asked = "plan scalerl-8b --gpu h100 --mean-tokens 8000 --gpus"
    assert cli.main([*asked.split(), "32", "--model-config", "llama-3.1-8b"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "written (80)" in out
    assert "plan 1: 11,600 steps take" in out
    assert "note: the recipe's resources use 80 GPUs, not 32" in out
    assert cli.main([*asked.split(), "32", "--model-config", "deepseek-v3"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits 32 GPUs" in out
    assert "steps take" not in out


def test_a_learner_that_waits_for_servers_saves_memory_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On 80 H100 Scout's learner fits without only on 64, beside two servers that it
    would wait for nine tenths of a step.
    """
    arguments = "plan scalerl-17bx16 --gpus 80 --gpu h100 --model-config llama-4-scout"
    assert cli.main(arguments.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        told := re.search(
            r"a step takes ([\d.]+) s without learner\.recompute=\w+, which the plans set", out
        )
    )
    best = search(problem("scalerl-17bx16", "llama-4-scout", "h100")).plans[0]
    assert best.step_seconds < float(told[1]) / 2
    assert best.recipe.resources.learner_ranks < 64


@pytest.mark.parametrize(
    ("config", "gpus", "width"),
    [("deepseek-v3", 512, 32), ("kimi-k2", 768, 32), ("glm-4.5", 256, 16)],
)
def test_models_larger_than_a_node_have_servers_on_several(
    config: str, gpus: int, width: int
) -> None:
    """1,342 GB of weights in bf16 are 42 GB a GPU on 32 and no rest of 80 on 16. The
    learner divides experts over nodes.
    """
    asked = problem("scalerl-8b", config, "h100", gpus, 8000, "batch.prompts=96")
    best = search(asked).plans[0].recipe
    assert best.resources.server_tensor_parallel == width
    assert best.model.expert_parallel > 16
    placed = place(best, nodes(gpus, 8))
    assert len(placed[Role("server", 0)].nodes) == width // 8
    no_nvlink = replace(asked, gpu=replace(asked.gpu, nvlink_gpus=1))
    assert search(no_nvlink).refused[
        f"server TP {width}: beyond one NVLink domain, and not several whole nodes of 8"
    ]


def nodes(gpus: int, each: int) -> list[Node]:
    names = tuple(map(str, range(each)))
    return [
        Node(f"n{i}", f"n{i}", f"10.0.0.{i}", "ib0", names, 96, 0, ()) for i in range(gpus // each)
    ]


def test_a_learner_needs_the_hosts_memory_too() -> None:
    """Scout's copy for a checkpoint and its offloaded AdamW are 3.2 TB: of 80 GPUs,
    nothing on hosts of 30 GB a GPU.
    """
    asked = problem(
        "scalerl-17bx16", "llama-4-scout", "h200", 80, 6000, "learner.optimizer_offload=1.0"
    )
    assert search(asked).plans
    poor = replace(asked, gpu=replace(asked.gpu, host_memory=30e9))
    found = search(poor)
    (reason,) = [reason for reason in found.refused if "host memory" in reason]
    assert reason.startswith("learner: 30 GB of host memory a GPU do not hold a checkpoint's copy")
    assert as_written(poor) == reason
    least = min(plan.learner.host for plan in search(asked).plans)
    assert all(plan.learner.host <= 30e9 for plan in found.plans)
    assert least < 236e9


def test_states_of_delta_networks_are_planned_and_shown() -> None:
    """One H200 holds the weights of Qwen3.5-35B-A3B, but not 79 GiB of states beside
    them; the states of fewer requests it does.
    """
    few = "serving.max_running_requests=64"
    fits = problem("scalerl-8b", "qwen3.5-35b-a3b", "h200", 80, 8000, few)
    refused = server_of(problem("scalerl-8b", "qwen3.5-35b-a3b", "h200"), 1)
    assert isinstance(refused, str)
    assert "weights and states of delta networks (serving.max_running_requests)" in refused
    server = server_of(fits, 1)
    assert not isinstance(server, str)
    assert server.states == pytest.approx(5 * 72 * 61.4 * 2**20, rel=1e-3)
    plan = search(fits).plans[0]
    assert show._figures(plan)["server: states, GB"]
    assert "server: states, GB" not in show._figures(
        written(problem("scalerl-8b", "llama-3.1-8b", "h100"))
    )


@pytest.mark.parametrize(
    ("config", "bucket_mb", "said"),
    [
        (
            "llama-3.1-8b",
            256,
            (
                "the embedding, 1.1 GB, on a server's GPU beside weights and KV; a learner's rank"
                " holds 2.4 GB"
            ),
        ),
        ("llama-3.1-8b", 2048, "a bucket (weights.bucket_mb), 2.1 GB, on"),
    ],
)
def test_the_largest_allocation_is_named(config: str, bucket_mb: int, said: str) -> None:
    """Its size is megatron's on planned ranks: test_planned_ranks."""
    asked = problem("scalerl-8b", config, "h100", 80, 8000, f"weights.bucket_mb={bucket_mb}")
    assert said in show.largest_allocation(written(asked), asked.shape)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpus 80 --gpu h1000", "known: a100"),
        ("--gpus 1 --gpu h100", "too few"),
        ("--gpus 80 --gpu h100 --mean-tokens 20000", "longest completion, 14048"),
        ("--gpus 80 --gpu h100 --trained-share 0", "--trained-share"),
        ("--gpus 80 --gpu h100 --lengths nowhere", "no journal"),
    ],
)
def test_bad_input_is_one_line(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "scalerl-8b", "--model-config", "llama-3.1-8b", *words.split()]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "config", "gpu"),
    [("scalerl-8b", "llama-3.1-8b", "h100"), ("scalerl-17bx16", "llama-4-scout", "h200")],
)
def test_every_plan_obeys_the_rules_and_fits(name: str, config: str, gpu: str) -> None:
    asked = problem(name, config, gpu)
    found = search(asked)
    assert found.plans
    room = asked.gpu.usable
    machines = nodes(80, asked.gpu.node_gpus)
    for plan in found.plans:
        place(plan.recipe, machines)
        r = plan.recipe.resources
        assert r.servers * r.server_tensor_parallel + r.learner_ranks == 80
        assert not list(impossible(plan.recipe))
        assert not list(impossible_for(plan.recipe.model, asked.shape.megatron_sizes()))
        assert plan.learner.total <= room
        server = plan.server
        assert server.weights + server.states + server.kv + server.transient <= room
        assert plan.server.kv_tokens >= plan.recipe.length.context_tokens
    assert [p.step_seconds for p in found.plans] == sorted(p.step_seconds for p in found.plans)


def test_the_layout_of_scout_for_141_gb_does_not_fit_80() -> None:
    assert "does not fit" in str(as_written(problem("scalerl-17bx16", "llama-4-scout", "h100")))


SPLIT = (
    "resources.servers=64",
    "resources.server_tensor_parallel=1",
    "resources.learner_ranks=16",
    "model.tensor_parallel=4",
)
"""How the paper divided its 80 GB200 (arXiv 2510.13786); the layout is ours, it states
none.
"""
PLANS_PAGE = Path(__file__).parents[4] / "docs/how-to/plan.md"


@pytest.mark.parametrize(
    ("prompts", "begins", "hours"),
    [(48, "8B, 768", (1385, 1500)), (128, "8B: 100k", (100_000 / 7.4,) * 2)],
)
def test_the_papers_runs_beside_their_plan(
    prompts: int, begins: str, hours: tuple[float, float]
) -> None:
    """The figures of docs/how-to/plan.md: rates that published clusters reach, and
    mean lengths, which the paper does not state.
    """
    (row,) = [
        line for line in PLANS_PAGE.read_text().splitlines() if line.startswith(f"| {begins}")
    ]
    *_, planned, factors = (cell.strip() for cell in row.strip("|").split("|"))
    keys = (*SPLIT, f"batch.prompts={prompts}")
    for mean, said, factor in zip(
        (6000, 8000, 12_000), planned.split(" / "), factors.split(" / "), strict=True
    ):
        plan = written(problem("scalerl-8b", "llama-3.1-8b", "gb200", 80, mean, *keys))
        found = plan.gpu_hours_per_1000_steps
        assert float(said.replace(",", "")) == pytest.approx(found, rel=0.02)
        bounds = [float(each) for each in factor.split(" to ")]
        expected = [each / found for each in hours][-len(bounds) :]
        assert bounds == pytest.approx(expected, rel=0.04)


def decoder(config: str, gpu: str = "h100", ranks: int = 1, **model: Any) -> Decoder:
    recipe = load(
        "scalerl-8b",
        [
            f"resources.server_tensor_parallel={ranks}",
            *(f"model.{k}={v}" for k, v in model.items()),
        ],
    )
    shape = architecture.read(config)
    return Decoder(recipe, shape, gpu_named(gpu), 131072 / ranks)


def test_one_request_is_limited_by_reading_the_weights() -> None:
    """15 GB (no embedding: one row of it) at a share of 3.35 TB/s; 32 layers' kernels
    and 0.5 ms besides.
    """
    seconds = decoder("llama-3.1-8b").step_seconds(1, 1000)
    share = gpu_named("h100").serving
    assert seconds == pytest.approx(15.01e9 / (3350e9 * share) + 32 * 0.00003 + 0.0005, rel=0.02)


def test_a_server_over_two_nodes_pays_their_network() -> None:
    """Two all-reduces a layer: a row's 16 KB there and back, 15 of 16 parts, at 320
    GB/s of a node's eight adapters instead of 720; a hop up and down.
    """
    apart, together = (
        decoder("llama-3.1-8b", gpu, 16).step_seconds(10, 10) for gpu in ("h100", "gb200")
    )
    gpu = replace(gpu_named("gb200"), nvlink_gpus=8)
    recipe = load("scalerl-8b", ["resources.server_tensor_parallel=16"])
    split = Decoder(recipe, architecture.read("llama-3.1-8b"), gpu, 131072 / 16).step_seconds(
        10, 10
    )
    moved = 10 * 32 * 2 * 2 * 2 * 4096 * 15 / 16
    slower = moved / (8 * gpu.network * 0.8) - moved / (gpu.nvlink * 0.8) + 32 * 2 * 2 * 1e-5
    assert split - together == pytest.approx(slower, rel=1e-6)
    assert apart > together


def test_many_short_requests_are_limited_by_products() -> None:
    """10,000 tokens x 15 GFLOP at half of 989 TFLOP/s."""
    seconds = decoder("llama-3.1-8b").step_seconds(10_000, 10_000)
    assert seconds == pytest.approx(10_000 * 2 * 7.505e9 / (989e12 * 0.5) + 0.0015, rel=0.01)


def test_a_decode_step_never_gets_quicker_by_more_work() -> None:
    scout = decoder("llama-4-scout", "gb200", 4)
    seconds = [scout.step_seconds(n, n * 4000) for n in (1, 2, 8, 32, 128, 512)]
    assert seconds == sorted(seconds)


H100 = gpu_named("h100")
ALONE = ("model.tensor_parallel=1", "resources.learner_ranks=1")


def training(
    *keys: str, config: str = "llama-3.1-8b", gpu: Gpu = H100, by_node: bool = False
) -> float:
    """Seconds for 160 sequences of 1,000 tokens in ten micro-batches, with the layout
    `ALONE` unless keys say otherwise.
    """
    recipe = load("scalerl-8b", [*ALONE, *keys])
    shape = architecture.read(config)
    packed = speed.Packing(microbatches=10, largest=16_000, rank_tokens=160_000, positions=500)
    return speed.train_seconds(recipe, shape, packed, gpu, by_node)


HBM = 3350e9 * 0.75
SLOW_MEMORY = replace(H100, memory_rate=H100.memory_rate / 100)
"""So slow that the GPU and not the CPU that launches its kernels takes the time of
layers with experts.
"""
KEPT = 32 * (8 * 4096 + (2 * 5120 * 2 + 4 * 32) + 6 * 14336)
"""Bytes that Llama 3.1 8B keeps of a token, by hand: both ends of two norms, q, k, v
and output, the gated MLP.
"""


def test_training_time_is_flop_over_rate_and_traffic_where_nothing_is_communicated() -> None:
    """One rank: 6 x parameters (no embedding; the head's 8) x tokens, and attention, at
    a share of the peak; what is kept, six times, and all weights, three times a
    micro-batch, through the memory; then AdamW.
    """
    shape = architecture.read("llama-3.1-8b")
    gpu = gpu_named("h100")
    tokens = 160_000
    matrices = (
        6 * (shape.parameters - shape.embedding_parameters) + 2 * shape.embedding_parameters
    ) * tokens
    attention = 3 * 4 * 32 * 4096 * 500 * tokens
    layers = shape.parameters - 2 * shape.embedding_parameters
    traffic = 6 * KEPT * tokens + 10 * 3 * 2 * layers
    expected = (matrices + attention) / (989e12 * gpu.training) + (
        traffic + 30 * shape.parameters
    ) / HBM
    assert training() == pytest.approx(expected, rel=0.001)


def test_recomputation_is_a_further_forward_pass_of_the_layers() -> None:
    """A third more of them and of their traffic, and nothing of the head; selective:
    without attention.
    """
    none, selective, full = (
        training(f"learner.recompute={what}") for what in ("none", "selective", "full")
    )
    shape = architecture.read("llama-3.1-8b")
    rate = 989e12 * gpu_named("h100").training
    passed = (
        2 * KEPT * 160_000 + 10 * 2 * (shape.parameters - 2 * shape.embedding_parameters)
    ) / HBM
    scores = 160_000 * 4 * 32 * 4096 * 500 / rate
    assert full - none == pytest.approx(
        160_000 * 2 * shape.body_parameters / rate + scores + passed, rel=1e-4
    )
    share = shape.layers * shape.attention_parameters / shape.body_parameters
    attention = 160_000 * 2 * shape.layers * shape.attention_parameters / rate
    assert full - selective == pytest.approx(attention + scores + share * passed, rel=1e-4)


def test_light_recomputation_costs_traffic_and_no_product() -> None:
    """160,000 tokens in 48 layers: two numbers read and one written for each that is
    made again.
    """
    none, light, selective = (
        training(f"learner.recompute={what}", config="qwen3-30b-a3b", gpu=SLOW_MEMORY)
        for what in ("none", "light", "selective")
    )
    again = 160_000 * 48 * 3 * 2 * (2048 + 8 * 768)
    assert light - none == pytest.approx(again / (SLOW_MEMORY.memory_rate * 0.75), rel=1e-6)
    assert selective > light


def test_a_reference_model_is_one_more_forward_pass() -> None:
    update = 30 * architecture.read("llama-3.1-8b").parameters / HBM
    plain = training()
    scored = training("reference.coefficient=0.1", "reference.estimator=k3")
    assert scored - update == pytest.approx((plain - update) * 4 / 3)


def test_fp8_quickens_the_linear_maps_and_nothing_else_but_what_they_keep() -> None:
    """6 x parameters of the layers at the FP8 rate; attention, head and AdamW as
    before. Inputs are kept in one byte: less traffic of two norms and of the MLP, more
    of attention's output, which is kept in both widths.
    """
    gpu = gpu_named("h100")
    tokens = 160_000
    flop = tokens * 6 * architecture.read("llama-3.1-8b").body_parameters
    less = 6 * tokens * 32 * (2 * 4096 + 14336 - 4096) / HBM
    rates = flop / (989e12 * gpu.training) - flop / (1979e12 * gpu.fp8_training)
    assert training() - training("model.fp8=blockwise") == pytest.approx(rates + less, rel=1e-6)


def test_small_micro_batches_are_as_slow_as_the_processor_that_starts_kernels() -> None:
    """A hundred tokens: 48 layers with experts, 8.8 ms each, whatever the GPU; the head
    and the update are computed.
    """
    recipe = load("scalerl-8b", [*ALONE])
    shape = architecture.read("qwen3-30b-a3b")
    one, two = (
        speed.train_seconds(recipe, shape, speed.Packing(n, 100, 100 * n, 50), gpu_named("b200"))
        for n in (1, 2)
    )
    assert two - one == pytest.approx(48 * gpu_named("b200").expert_layer_s, rel=0.01)


def test_a_ring_over_nodes_uses_the_adapters_of_all_its_ranks() -> None:
    """16 ranks, no tensor parallelism: eight adapters of 50 GB/s a node, as quick as
    NVLink would be at 400 GB/s; with 8, each group has one. Two bytes of weights
    gathered; gradients are hidden behind the last backward pass, or not.
    """
    slow = replace(H100, network=1e9)
    one, eight = (
        training("resources.learner_ranks=16", f"model.tensor_parallel={tp}", gpu=slow)
        - training("resources.learner_ranks=16", f"model.tensor_parallel={tp}")
        for tp in (1, 8)
    )
    moved = (
        architecture.read("llama-3.1-8b").parameters * 6
    )  # with a network this slow gradients are not hidden
    assert one == pytest.approx(moved * 15 / 16 / (8 * 1e9 * 0.8), rel=0.2)
    assert eight == pytest.approx(moved / 8 / 2 / (1 * 1e9 * 0.8), rel=0.2)


def test_context_parallelism_gathers_k_and_v() -> None:
    """CP 2: each rank gets the other's 8,000 tokens of k and v, 1,024 numbers each of
    two bytes, and gives gradients back.
    """
    recipe = load("scalerl-8b", [*ALONE, "model.context_parallel=2", "resources.learner_ranks=2"])

    def microbatch(nvlink: float) -> float:
        gpu = replace(H100, nvlink=nvlink)
        ten, twenty = (speed.Packing(n, 16_000, 16_000 * n, 500) for n in (10, 20))
        shape = architecture.read("llama-3.1-8b")
        return (
            speed.train_seconds(recipe, shape, twenty, gpu)
            - speed.train_seconds(recipe, shape, ten, gpu)
        ) / 10

    exchanged = 32 * 2 * 8000 * 2 * 1024 * 2
    assert microbatch(100e9) - microbatch(200e9) == pytest.approx(
        exchanged / (200e9 * 0.8), rel=1e-6
    )


def test_rows_that_cross_once_for_a_node_save_the_network() -> None:
    """EP 16 on H100, 8 of 128 experts a token: 8 rows to two nodes' experts, or 2 x (1
    - 1/256) to the nodes; half stay.
    """
    keys = ("model.expert_parallel=16", "resources.learner_ranks=16")

    def network(by_node: bool) -> float:
        slow, slower = (replace(H100, network=rate, expert_layer_s=0.0) for rate in (2e8, 1e8))
        both = [
            training(*keys, config="qwen3-30b-a3b", gpu=each, by_node=by_node)
            for each in (slow, slower)
        ]
        return both[1] - both[0]

    rows = 4 * 160_000 * 48 * 2 * 2048 / 2 / (2e8 * 0.8)
    assert network(False) - network(True) == pytest.approx(rows * (8 - 2 * (1 - 2**-8)), rel=1e-6)


def test_a_prompt_takes_its_products_or_its_layers() -> None:
    """8,000 tokens of Llama 3.1 8B: 15 GFLOP each at half the peak, and attention. 10
    tokens: 32 layers, a third of 0.5 ms.
    """
    server = decoder("llama-3.1-8b")
    flop = 8000 * (2 * 7.505e9 + 4 * 32 * 4096 * 4000)
    assert server.prefill_seconds(8000) == pytest.approx(flop / (989e12 * 0.5), rel=0.01)
    assert server.prefill_seconds(10) == pytest.approx(32 * 0.0005 / 3)
    assert server.prefill_seconds(1000, 8) > server.prefill_seconds(1000)


def test_a_batch_ends_with_its_longest_request() -> None:
    """Constant 1,000 tokens take 1,000 steps. Half of 100 and half of 1,900: as many
    tokens, 1,900 steps, of ever fewer requests. Twice the requests that fit at once:
    the others are worked off first.
    """
    server = decoder("llama-3.1-8b")
    even = server.batch_seconds(np.full(64, 1000), 1, 64, 256)
    uneven = server.batch_seconds(np.array([100] * 32 + [1900] * 32), 1, 64, 256)
    assert even == pytest.approx(1000 * server.step_seconds(64, 64 * 500), rel=0.35)
    assert 1.5 < uneven / even < 1.9
    assert server.batch_seconds(np.full(64, 1000), 1, 64, 32) > 1.5 * server.batch_seconds(
        np.full(64, 1000), 1, 32, 32
    )


def test_prompts_that_wait_are_read_one_by_one() -> None:
    """64 prompts of 100 tokens are one chunk, however few layers' kernels it takes; of
    128 the second 64 are read alone.
    """
    server = decoder("llama-3.1-8b")
    lengths = np.full(64, 1000)
    first = server.batch_seconds(lengths, 100, 64, 64)
    held = server.step_seconds(64, 64 * (100 + 500))
    waiting = server.batch_seconds(lengths, 100, 128, 64) - first
    assert waiting == pytest.approx(1000 * held + 64 * server.prefill_seconds(100))


def test_each_source_of_a_publication_has_a_link() -> None:
    """Scout, TP 4 and PP 2, to servers of four GPUs: a stage sends from two copies if
    there are two, so by four adapters of 40 GB/s in place of two. A server's rank
    copies a quarter of the model to the host and reads it again, at 51 GB/s.
    """
    shape = architecture.read("llama-4-scout")
    sixteen = ["resources.learner_ranks=16", "model.expert_parallel=8"]
    four, two, disk = (
        speed.publication(load("scalerl-17bx16", [*sixteen, *keys]), shape, H100, 80)
        for keys in (
            [],
            ["resources.learner_ranks=8", "model.expert_parallel=4"],
            ["weights.transport=disk"],
        )
    )
    size = 2 * shape.parameters
    assert two.transfer - four.transfer == pytest.approx(size / 80e9 - size / 160e9)
    to_host = size / 4 / 51.2e9
    assert disk.transfer - two.transfer == pytest.approx(size / 40e9 - size / 80e9 - 2 * to_host)
    assert [(p.pause, p.swap) for p in (four, disk)] == [(p.transfer, 0) for p in (four, disk)]
    together = speed.publication(
        load("scalerl-17bx16", sixteen), shape, replace(H100, nvlink_gpus=80), 80
    )
    assert together.transfer == pytest.approx(3 * to_host, rel=0.2), (
        "by NVLink, it is the host that limits"
    )


def test_servers_pause_for_the_swap_alone() -> None:
    """Where they limit, a step ends sooner by what they generate while weights are
    staged.
    """
    few = (*SPLIT, "resources.servers=4")
    staged, disk = (
        written(
            problem(
                "scalerl-8b",
                "llama-3.1-8b",
                "gb200",
                20,
                6000,
                *few,
                f"weights.transport={transport}",
            )
        )
        for transport in ("process_group", "disk")
    )
    assert disk.server_idle == staged.server_idle == 0
    assert disk.step_seconds - staged.step_seconds == pytest.approx(
        disk.publication.transfer - staged.publication.swap
    )


def test_fp8_is_refused_where_there_is_none() -> None:
    refused = as_written(
        problem("scalerl-8b", "llama-3.1-8b", "a100", 80, 8000, "model.fp8=tensorwise")
    )
    assert refused == "model.fp8: a100 has no FP8 products"


def test_servers_in_fp8_are_refused_where_they_cannot_be() -> None:
    """No FP8 products; a width of 192 on four GPUs a server; another family."""
    given = {
        (
            "llama-3.1-8b",
            "a100",
            "serving.quantization=fp8",
        ): "serving.quantization: a100 has no FP8 products",
        (
            "llama-3.1-8b",
            "a100",
            "serving.kv_cache_dtype=fp8_e4m3",
        ): "serving.kv_cache_dtype: a100 has no FP8 products",
        (
            "qwen3-30b-a3b",
            "h200",
            "serving.quantization=fp8",
        ): "server TP 4: the width of an expert is 192",
        (
            "glm-4.5",
            "h200",
            "serving.kv_cache_dtype=fp8_e4m3",
        ): "server TP 4: FP8 is for LlamaForCausalLM",
    }
    for (config, gpu, key), said in given.items():
        found = layouts.server_of(problem("scalerl-8b", config, gpu, 80, 8000, key), 4)
        assert str(found).startswith(said), found


def test_whole_experts_fit_where_a_part_of_each_is_too_narrow() -> None:
    """Qwen3-30B-A3B has 128 experts of 768 columns."""
    keys = (
        "serving.expert_parallel=true",
        "serving.quantization=fp8",
        "resources.server_tensor_parallel=4",
    )
    qwen = problem("scalerl-8b", "qwen3-30b-a3b", "h200", 80, 8000, *keys)
    assert not isinstance(layouts.server_of(qwen, 4), str)
    assert layouts.server_of(qwen, 1) == (
        "server TP 1: has no GPUs among which to divide experts (serving.expert_parallel)"
    )
    dense = problem("scalerl-8b", "llama-3.1-8b", "h200", 80, 8000, keys[0], keys[2])
    assert str(layouts.server_of(dense, 4)).startswith("server TP 4: serving.expert_parallel: the")


def test_it_says_for_what_the_overlap_of_shared_experts_is() -> None:
    """Qwen3-MoE has none. The recipe alone does not show it."""
    keys = (
        "model.expert_parallel=4",
        "model.moe.shared_overlap=true",
        "resources.learner_ranks=32",
    )
    refused = as_written(problem("scalerl-8b", "qwen3-30b-a3b", "h200", 80, 8000, *keys))
    assert (
        refused
        == "model.moe.shared_overlap: is for shared experts beside an exchange between ranks"
    )


def test_servers_in_fp8_read_half_as_much_and_multiply_quicker() -> None:
    """A few requests: the time is that to read the weights. Many: that of the products,
    of which the head's stay in bf16.
    """
    shape = architecture.read("llama-3.1-8b")
    gpu = H100
    recipes = [
        load("scalerl-8b", [*ALONE, key])
        for key in ("serving.quantization=none", "serving.quantization=fp8")
    ]
    bf16, fp8 = (speed.Decoder(recipe, shape, gpu, 2.0**17) for recipe in recipes)
    maps = shape.dense_parameters - shape.vector_parameters
    saved = maps * (1 - 4 / 128**2) / (gpu.memory_rate * gpu.serving) / bf16.ranks
    assert bf16.step_seconds(1, 1) - fp8.step_seconds(1, 1) == pytest.approx(saved)
    share = gpu.bf16 * gpu.training / (gpu.fp8 * gpu.fp8_training)
    quicker = 1e6 * 2 * shape.body_parameters * (1 - share) / (gpu.bf16 * 0.5) / bf16.ranks
    assert bf16.prefill_seconds(1e6) - fp8.prefill_seconds(1e6) == pytest.approx(quicker)
    sent = [speed.publication(recipe, shape, gpu, 80).transfer for recipe in recipes]
    assert sent[1] < 0.75 * sent[0]


def test_an_offloaded_optimiser_is_as_slow_as_the_host() -> None:
    """8B parameters on one rank: 4 bytes each way over PCIe, 30 through the host's
    memory.
    """
    layout = ["model.tensor_parallel=1", "resources.learner_ranks=1"]
    shape = architecture.read("llama-3.1-8b")
    gpu = gpu_named("h100")
    packed = speed.packing([1000], 16384, 1, cost_of(shape))
    here, there = (
        speed.train_seconds(
            load("scalerl-8b", [*layout, f"learner.optimizer_offload={x}"]), shape, packed, gpu
        )
        for x in (0.0, 1.0)
    )
    expected = shape.parameters * (8 / (64e9 * 0.8) + 30 / 40e9 - 30 / (3350e9 * 0.75))
    assert there - here == pytest.approx(expected)


def test_auto_plans_with_the_largest_micro_batch_that_fits() -> None:
    """Not less than the longest sequence; more where recomputation leaves room."""
    plain = written(
        problem("scalerl-8b", "llama-3.1-8b", "gb200", 80, 8000, "learner.microbatch_tokens=auto")
    )
    keys = ("learner.microbatch_tokens=auto", "learner.recompute=full")
    less = written(problem("scalerl-8b", "llama-3.1-8b", "gb200", 80, 8000, *keys))
    longest = plain.recipe.length.context_tokens
    few, many = (found.recipe.learner.microbatch_tokens for found in (plain, less))
    assert isinstance(few, int)
    assert isinstance(many, int)
    assert longest <= few < many
    room = gpu_named("gb200").usable
    assert plain.learner.total <= room
    assert less.learner.total <= room


@pytest.mark.parametrize(("k", "within"), [(4, 0.15), (0, 0.2)])
def test_estimate_and_simulation_agree(k: int, within: float) -> None:
    """A learner that limits, and servers that limit. Halves that take turns: a step
    ends with its longest rollout, which the estimate has of one draw and the simulation
    of twenty.
    """
    sizes = ("batch.prompts=16", "resources.servers=6", "resources.learner_ranks=8")
    small = (*SPLIT, *sizes, f"pipeline.k={k}")
    asked = problem("scalerl-8b", "llama-3.1-8b", "h100", 14, 3000, *small)
    plan = written(asked)
    result = simulate.simulated(asked, plan, 20).summary
    assert result.tokens_per_second == pytest.approx(plan.tokens_per_second, rel=within)


def test_one_gpu_is_planned_as_it_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of both on it, its time divided between them, and nothing to split."""
    assert (
        cli.main(
            [
                "plan",
                "scalerl-1gpu",
                "--gpus",
                "1",
                "--gpu",
                "h100",
                "--model-config",
                "qwen3-1.7b",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    plan = found["as_written"]
    assert found["plans"] == []
    assert plan["step_seconds"] == pytest.approx(
        plan["generate_seconds"] + plan["train_seconds"], rel=0.1
    )
    both = plan["learner_bytes"]["total"] + sum(
        plan["server_bytes"][part] for part in ("weights", "states", "kv", "transient")
    )
    assert both < gpu_named("h100").memory
    assert (
        cli.main(
            ["plan", "scalerl-1gpu", "--gpus", "1", "--gpu", "l40s", "--model-config", "qwen3-1.7b"]
        )
        == 1
    )
    assert "learner and server together need" in capsys.readouterr().out


@pytest.mark.parametrize(("k", "lends"), [(1, False), (0, True)])
def test_memory_that_is_lent_is_counted_once(k: int, lends: bool) -> None:
    overrides = (f"pipeline.k={k}", "serving.memory_fraction=0.4")
    found = as_written(problem("scalerl-1gpu", "qwen3-1.7b", "h100", 1, 1000, *overrides))
    assert isinstance(found, Plan) is lends
