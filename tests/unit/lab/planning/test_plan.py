"""`megarl plan` as a user meets it: quick, without torch, one line for bad input; and what its layouts must obey."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megarl import cli
from megarl.core.algorithm.packing import cost_of
from megarl.core.base import architecture
from megarl.core.recipe import load
from megarl.core.recipe.rules import impossible, impossible_for
from megarl.lab.planning import show, simulate, speed
from megarl.lab.planning.hardware import ASSUMED, gpu_named
from megarl.lab.planning.layouts import Plan, PlanningProblem, as_written, search
from megarl.lab.planning.speed import Decoder
from megarl.lab.planning.workload import lognormal, workload


def problem(name: str, config: str, gpu: str, gpus: int = 80, mean: float = 8000, *overrides: str) -> PlanningProblem:
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 8_030_261_248
    assert found["plans"][0]["step_seconds"] <= found["as_written"]["step_seconds"]
    assert sum(found["refused"].values()) > 0


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits 80 columns, and the best plan can be copied into a command."""
    monkeypatch.setenv("COLUMNS", "80")
    arguments = "plan scalerl-17bx16 --gpus 80 --gpu gb200 --model-config llama-4-scout --mean-tokens 6000"
    assert cli.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "107.77B parameters, 17.17B active" in " ".join(out.split())
    assert "refused" in out
    least, most = show.TAKEN_OVER_PLANNED
    assert "as written: 7,100 steps take" in " ".join(out.split())
    assert f"took {least} to {most} times what is planned" in " ".join(out.split())
    lines = out.splitlines()
    headings = next(line for line in lines if "as written" in line)
    assert headings.split() == ["as", "written", "plan", "1", "plan", "2", "plan", "3", "plan", "4", "plan", "5"]
    (best,) = [line.removeprefix("plan 1 is: ") for line in lines if line.startswith("plan 1 is: ")]
    assert all(len(line) <= 80 for line in lines if not line.startswith("plan 1 is: "))
    recipe = load("scalerl-17bx16", best.split())
    resources = recipe.resources
    assert resources.servers * resources.server_tensor_parallel + resources.learner_ranks == 80


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its table, which fits 80 columns."""
    sizes = (
        "batch.prompts=4 sampling.generations=2 length.thinking_tokens=[200,300] length.answer_tokens=20 pipeline.k=2"
    )
    arguments = f"plan scalerl-8b {sizes} --gpus 4 --gpu gb200 --model-config llama-3.1-8b --simulate --steps 2"
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k)))
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
    assert any(line.startswith("plan 1, spread 0.3 ") and len(line.split()) == 12 for line in lines), lines
    assert all(len(line) <= 80 for line in lines if not line.startswith("plan 1 is: "))


def test_where_nothing_fits_recomputation_and_offload_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan scalerl-8b --gpus 16 --gpu h100 --model-config qwen3-30b-a3b"
    assert cli.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "nothing fits without learner.recompute=full, which the plans set" in " ".join(out.split())
    (best,) = [line.removeprefix("plan 1 is: ") for line in out.splitlines() if line.startswith("plan 1 is: ")]
    assert isinstance(as_written(problem("scalerl-8b", "qwen3-30b-a3b", "h100", 16, 8000, *best.split())), Plan)
    smaller = search(problem("scalerl-8b", "qwen3-30b-a3b", "h100", 8))
    assert smaller.saving == {"recompute": "full", "optimizer_offload": 1.0}
    assert "learner.optimizer_offload=1.0" in show.overrides(smaller.plans[0])
    assert search(problem("scalerl-8b", "llama-3.1-8b", "h100")).saving == {}, "what fits is left as it is"
    nothing = search(problem("scalerl-8b", "qwen3-30b-a3b", "h100", 2))
    assert (nothing.plans, nothing.saving) == ([], {})


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
def test_bad_input_is_one_line(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "scalerl-8b", "--model-config", "llama-3.1-8b", *words.split()]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "config", "gpu"),
    [("scalerl-8b", "llama-3.1-8b", "h100"), ("scalerl-17bx16", "llama-4-scout", "gb200")],
)
def test_every_plan_obeys_the_rules_and_fits(name: str, config: str, gpu: str) -> None:
    asked = problem(name, config, gpu)
    found = search(asked)
    assert found.plans
    room = asked.gpu.usable
    for plan in found.plans:
        r = plan.recipe.resources
        assert r.servers * r.server_tensor_parallel + r.learner_ranks == 80
        assert not list(impossible(plan.recipe))
        assert not list(impossible_for(plan.recipe.model, asked.shape.megatron_sizes()))
        assert plan.learner.total <= room
        assert plan.server.weights + plan.server.kv + plan.server.transient <= room
        assert plan.server.kv_tokens >= plan.recipe.length.context_tokens
    assert [p.step_seconds for p in found.plans] == sorted(p.step_seconds for p in found.plans)


def test_scout_does_not_fit_16_ranks_of_80_gb() -> None:
    assert "does not fit" in str(as_written(problem("scalerl-17bx16", "llama-4-scout", "h100")))


PAPER = {"scalerl-8b": ("llama-3.1-8b", 100_000 / 7.4), "scalerl-17bx16": ("llama-4-scout", 50_000 / 7.1)}
"""GPU-hours per 1,000 steps of 2,048 rollouts on 80 GB200 (arXiv 2510.13786)."""


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_took_up_to_eleven_times_what_is_planned(name: str) -> None:
    """Peak rates of well-tuned code, and a mean length the paper does not state: benchmarks/scaling-out.md says why."""
    config, hours = PAPER[name]
    plan = written(problem(name, config, "gb200", 80, 8000, "batch.prompts=128"))
    assert 0.8 < hours / plan.gpu_hours_per_1000_steps < 11


def decoder(config: str, gpu: str = "h100", ranks: int = 1, **model: Any) -> Decoder:
    recipe = load(
        "scalerl-8b", [f"resources.server_tensor_parallel={ranks}", *(f"model.{k}={v}" for k, v in model.items())]
    )
    shape = architecture.read(config)
    return Decoder(recipe, shape, gpu_named(gpu), 131072 / ranks)


def test_one_request_is_limited_by_reading_the_weights() -> None:
    """15 GB (no embedding: one row of it) at 3.35 TB/s: 4.5 ms, at a bandwidth efficiency of 0.75 6 ms; 2 ms overhead."""
    seconds = decoder("llama-3.1-8b").step_seconds(1, 1000)
    assert seconds == pytest.approx(15.01e9 / (3350e9 * 0.75) + 0.002, rel=0.02)


def test_many_short_requests_are_limited_by_products() -> None:
    """10,000 tokens x 15 GFLOP at half of 989 TFLOP/s."""
    seconds = decoder("llama-3.1-8b").step_seconds(10_000, 10_000)
    assert seconds == pytest.approx(10_000 * 2 * 7.505e9 / (989e12 * 0.5) + 0.002, rel=0.01)


def test_a_decode_step_never_gets_quicker_by_more_work() -> None:
    scout = decoder("llama-4-scout", "gb200", 4)
    seconds = [scout.step_seconds(n, n * 4000) for n in (1, 2, 8, 32, 128, 512)]
    assert seconds == sorted(seconds)


def test_training_time_is_flop_over_rate_where_nothing_is_communicated() -> None:
    """One rank: 6 x parameters (no embedding; the head's 8) x tokens, and attention, at half of the peak; then AdamW."""
    layout = ["model.tensor_parallel=1", "model.sequence_parallel=false", "resources.learner_ranks=1"]
    recipe, shape, gpu = load("scalerl-8b", layout), architecture.read("llama-3.1-8b"), gpu_named("h100")
    packed = speed.packing([1000] * 160, 16384, 1, cost_of(shape))
    found = speed.train_seconds(recipe, shape, packed, gpu)
    tokens = 160_000
    matrices = (6 * (shape.parameters - shape.embedding_parameters) + 2 * shape.embedding_parameters) * tokens
    attention = 3 * 4 * 32 * 4096 * 500 * tokens
    update = 30 * shape.parameters / (3350e9 * 0.75)
    assert found == pytest.approx((matrices + attention) / (989e12 * 0.5) + update, rel=0.01)


def test_recomputation_is_a_further_forward_pass_of_the_layers() -> None:
    """A third more of them and nothing of the head; selective: without attention."""
    layout = ["model.tensor_parallel=1", "model.sequence_parallel=false", "resources.learner_ranks=1"]
    shape, gpu = architecture.read("llama-3.1-8b"), gpu_named("h100")
    packed = speed.packing([1000] * 160, 16384, 1, cost_of(shape))
    none, selective, full = (
        speed.train_seconds(load("scalerl-8b", [*layout, f"learner.recompute={what}"]), shape, packed, gpu)
        for what in ("none", "selective", "full")
    )
    forward = 160_000 * (2 * shape.body_parameters + 4 * 32 * 4096 * 500)
    attention = 160_000 * (2 * shape.layers * shape.attention_parameters + 4 * 32 * 4096 * 500)
    assert full - none == pytest.approx(forward / (989e12 * 0.5))
    assert full - selective == pytest.approx(attention / (989e12 * 0.5))


def test_fp8_quickens_the_linear_maps_and_nothing_else() -> None:
    """6 x parameters of the layers at the FP8 rate; attention, head and AdamW as before."""
    layout = ["model.tensor_parallel=1", "model.sequence_parallel=false", "resources.learner_ranks=1"]
    shape, gpu = architecture.read("llama-3.1-8b"), gpu_named("h100")
    packed = speed.packing([1000] * 160, 16384, 1, cost_of(shape))
    bf16, fp8 = (
        speed.train_seconds(load("scalerl-8b", [*layout, f"model.fp8={x}"]), shape, packed, gpu)
        for x in ("none", "blockwise")
    )
    flop = 160_000 * 6 * shape.body_parameters
    rate = 1979e12 * ASSUMED.fp8_efficiency
    assert bf16 - fp8 == pytest.approx(flop / (989e12 * 0.5) - flop / rate)


def test_fp8_is_refused_where_there_is_none() -> None:
    refused = as_written(problem("scalerl-8b", "llama-3.1-8b", "a100", 80, 8000, "model.fp8=tensorwise"))
    assert refused == "model.fp8: a100 has no FP8 products"


def test_an_offloaded_optimiser_is_as_slow_as_the_host() -> None:
    """8B parameters on one rank: 4 bytes each way over PCIe, 30 through the host's memory."""
    layout = ["model.tensor_parallel=1", "model.sequence_parallel=false", "resources.learner_ranks=1"]
    shape, gpu = architecture.read("llama-3.1-8b"), gpu_named("h100")
    packed = speed.packing([1000], 16384, 1, cost_of(shape))
    here, there = (
        speed.train_seconds(load("scalerl-8b", [*layout, f"learner.optimizer_offload={x}"]), shape, packed, gpu)
        for x in (0.0, 1.0)
    )
    expected = shape.parameters * (8 / (64e9 * 0.8) + 30 / 40e9 - 30 / (3350e9 * 0.75))
    assert there - here == pytest.approx(expected)


def test_auto_plans_with_the_largest_micro_batch_that_fits() -> None:
    """Not less than the longest sequence; more where recomputation leaves room."""
    plain = written(problem("scalerl-8b", "llama-3.1-8b", "gb200", 80, 8000, "learner.microbatch_tokens=auto"))
    keys = ("learner.microbatch_tokens=auto", "learner.recompute=full")
    less = written(problem("scalerl-8b", "llama-3.1-8b", "gb200", 80, 8000, *keys))
    longest = plain.recipe.length.context_tokens
    assert longest <= plain.recipe.learner.microbatch_tokens < less.recipe.learner.microbatch_tokens
    room = gpu_named("gb200").usable
    assert plain.learner.total <= room
    assert less.learner.total <= room


def test_estimate_and_simulation_agree() -> None:
    """A learner that limits, and servers that limit: within 15 %."""
    small = ("batch.prompts=16", "resources.servers=6", "resources.learner_ranks=8", "pipeline.k=4")
    asked = problem("scalerl-8b", "llama-3.1-8b", "h100", 14, 3000, *small)
    plan = written(asked)
    result = simulate.simulated(asked, plan, 20).summary
    assert result.tokens_per_second == pytest.approx(plan.tokens_per_second, rel=0.15)


def test_one_gpu_is_planned_as_it_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of both on it, its time divided between them, and nothing to split."""
    assert (
        cli.main(["plan", "scalerl-1gpu", "--gpus", "1", "--gpu", "h100", "--model-config", "qwen3-1.7b", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    plan = found["as_written"]
    assert found["plans"] == []
    assert plan["step_seconds"] == pytest.approx(plan["generate_seconds"] + plan["train_seconds"], rel=0.1)
    both = plan["learner_bytes"]["total"] + sum(plan["server_bytes"][part] for part in ("weights", "kv", "transient"))
    assert both < gpu_named("h100").memory
    assert cli.main(["plan", "scalerl-1gpu", "--gpus", "1", "--gpu", "l40s", "--model-config", "qwen3-1.7b"]) == 1
    assert "learner and server together need" in capsys.readouterr().out


@pytest.mark.parametrize("release", [False, True])
def test_memory_that_is_lent_is_counted_once(release: bool) -> None:
    overrides = (f"serving.release_memory={str(release).lower()}", "pipeline.k=0", "serving.memory_fraction=0.4")
    found = as_written(problem("scalerl-1gpu", "qwen3-1.7b", "h100", 1, 1000, *overrides))
    assert isinstance(found, Plan) is release
