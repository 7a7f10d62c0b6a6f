"""A real run of a tiny Llama 4, of a tiny DeepSeek-V3 whose routers' biases move, of a
tiny gpt-oss and of a tiny Qwen3.5: experts divided over two ranks, and the learner
takes the experts that the server chose.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools.__main__ import main as convert
from megarl.core.journal.journal import JournalReader
from megarl.tasks.data.arithmetic_models import LLAMA, save_model
from tests.e2e import runs
from tests.e2e.runs import batches, check_history, check_nothing_left, check_parity, publications

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

OVERRIDES = (
    "run.steps=4",
    "batch.prompts=12",
    "batch.zero_variance=keep",
    "evaluation.every=4",
    "evaluation.prompts=20",
    "evaluation.samples=2",
    "checkpoint.every=2",
    "resources.learner_ranks=2",
    "model.expert_parallel=2",
    "model.moe.routing_replay=true",
)


DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 96,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}


GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "head_dim": 32,
    "intermediate_size": 192,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,  # shorter than most sequences
    "rope_parameters": (
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "truncate": False}
        | {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 256}
    ),
}


QWEN3_5 = LLAMA | {
    "model_type": "qwen3_5_moe_text",
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
    },
}


def test_experts_over_two_ranks_with_routing_replay(workplace: Path) -> None:
    check_run(workplace, [], layers=4, chosen=1)


@pytest.mark.slow
def test_deepseek_learns_with_moving_biases(workplace: Path) -> None:
    folder = workplace / "runs/quickstart-data/init-deepseek"
    save_model(folder, DEEPSEEK, seed=0)
    overrides = [
        f"sft.init={folder}",
        "model.path=runs/deepseek-sft",
        "run.name=deepseek",
        "model.moe.bias_update_rate=0.01",
    ]
    check_run(workplace, overrides, layers=3, chosen=2)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = load_file(workplace / "runs/deepseek-sft/model.safetensors")[bias]
    converted = workplace / "converted"
    assert (
        convert(["convert", "megatron-to-hf", str(workplace / "runs/deepseek"), str(converted)])
        == 0
    )
    moved = (load_file(converted / "model.safetensors")[bias] - before).abs()
    assert 0 < moved.max() <= 4 * 0.01 + 1e-6, "four steps of 0.01"


@pytest.mark.slow
def test_gpt_oss_learns(workplace: Path) -> None:
    folder = workplace / "runs/quickstart-data/init-gpt-oss"
    save_model(folder, GPT_OSS, seed=0)
    check_run(
        workplace,
        [f"sft.init={folder}", "model.path=runs/gpt-oss-sft", "run.name=gpt-oss"],
        layers=4,
        chosen=2,
    )
    sinks = "model.layers.1.self_attn.sinks"
    before = load_file(folder / "model.safetensors")[sinks]
    converted = workplace / "converted-gpt-oss"
    assert (
        convert(["convert", "megatron-to-hf", str(workplace / "runs/gpt-oss"), str(converted)]) == 0
    )
    assert not torch.equal(load_file(converted / "model.safetensors")[sinks], before), (
        "the warm start trains them"
    )


@pytest.mark.slow
def test_qwen3_5_learns(workplace: Path) -> None:
    """transformers writes no full_attention_interval into its config.json."""
    folder = workplace / "runs/quickstart-data/init-qwen3-5"
    save_model(folder, QWEN3_5, seed=0)
    overrides = [f"sft.init={folder}", "model.path=runs/qwen3-5-sft", "run.name=qwen3-5"]
    check_run(workplace, overrides, layers=4, chosen=2)
    decay = "model.layers.1.linear_attn.A_log"
    before = load_file(folder / "model.safetensors")[decay]
    converted = workplace / "converted-qwen3-5"
    run = workplace / "runs/qwen3-5"
    assert convert(["convert", "megatron-to-hf", str(run), str(converted)]) == 0
    assert not torch.equal(load_file(converted / "model.safetensors")[decay], before)


def check_run(workplace: Path, more: list[str], layers: int, chosen: int) -> None:
    """more: overrides. layers: with experts. chosen: experts of a token."""
    runs.warm_start("quickstart-moe", "sft.steps=20", *more, cwd=workplace)
    run = runs.start(workplace, *OVERRIDES, *more, recipe="quickstart-moe")
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    check_history(run.rundir, run.recipe)

    published = publications(run.rundir)
    assert {p.version for p in published} >= {0, 4}
    compared = check_parity(run.rundir)
    assert max(row["parity_routing"] for row in compared) < 0.01
    tickets = [g.ticket for groups in batches(run.rundir, run.recipe) for g in groups]
    groups = JournalReader(run.rundir.rollouts).whole_groups(tickets)
    rollouts = [r for group in groups for r in group.rollouts]
    tables = [r.routing.table for r in rollouts if r.routing is not None]
    assert len(tables) == len(rollouts)
    assert {table.shape[1:] for table in tables} == {(layers, chosen)}
    assert set(np.unique(np.concatenate(tables))) == {0, 1, 2, 3}
