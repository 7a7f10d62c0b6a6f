"""Hugging Face -> Megatron at one layout -> another -> Hugging Face, each family, every
bit; and what the learner loads.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints_tools.__main__ import main
from checkpoints_tools.convert import hf_to_megatron, megatron_to_hf
from checkpoints_tools.layout import Parallelism
from checkpoints_tools.safetensors_files import Directory
from megarl.core.base.errors import MegarlError
from megarl.core.models import build, checkpoint, family_of, hf, parallel
from megarl.core.recipe import Model
from tests.tiny import (
    MOONLIGHT,
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_5_moe_multimodal,
    tiny_qwen3_5_multimodal,
    tiny_qwen3_moe,
    tiny_qwen3_next,
    with_experts_apart,
)

# isort: split
from safetensors.torch import load_file, save_file

FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama, tied, odd vocabulary": (tiny_llama, {"tie_word_embeddings": True, "vocab_size": 131}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3": (tiny_qwen3, {}),
    "qwen3-moe, one dense layer": (tiny_qwen3_moe, {"mlp_only_layers": [1]}),
    "llama 4": (tiny_llama4, {"num_key_value_heads": 2}),
    "glm-4.5": (tiny_glm4_moe, {}),
    "deepseek-v3": (tiny_deepseek_v3, {}),
    "moonlight": (tiny_deepseek_v3, MOONLIGHT),
    "gpt-oss": (tiny_gpt_oss, {}),
    "qwen3.5": (tiny_qwen3_5, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "qwen3.5 with a vision tower": (
        tiny_qwen3_5_multimodal,
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    ),
    "qwen3.5-moe": (tiny_qwen3_5_moe, {}),
    "qwen3.5-moe as released": (tiny_qwen3_5_moe_multimodal, {}),
    "qwen3-next": (tiny_qwen3_next, {}),
}
SLOW = ("glm-4.5", "moonlight", "qwen3.5 with a vision tower", "qwen3.5-moe", "qwen3-next")
DENSE = (["--tp", "2", "--pp", "2"], ["--tp", "4"])
EXPERTS = (["--tp", "2", "--pp", "2", "--ep", "2"], ["--pp", "4", "--ep", "4"])


def run(*arguments: object) -> None:
    assert main([str(a) for a in arguments]) == 0


def same(a: Path, b: Path) -> bool:
    left = with_experts_apart(Directory(a))
    right = with_experts_apart(Directory(b))
    return left.keys() == right.keys() and all(
        torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in FAMILIES]
)
def test_every_bit_survives_two_layouts(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    tiny, overrides = FAMILIES[name]
    tiny(tmp_path / "hf", dtype, **overrides)
    family = family_of(tmp_path / "hf")
    first, second = EXPERTS if family.architecture.experts else DENSE
    if name == "llama 4":
        second = ["--tp", "2"]  # experts divided by TP
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "one", *first)
    run("reshard", tmp_path / "one", tmp_path / "two", *second)
    run("convert", "megatron-to-hf", tmp_path / "two", tmp_path / "back")
    assert same(tmp_path / "hf", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )
    run("verify", tmp_path / "one", tmp_path / "back")
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_the_learner_loads_what_was_converted_at_another_layout(tmp_path: Path) -> None:
    """Through megatron's own loading, on one rank.
    tests/parallel does it on several.
    """
    tiny_llama(tmp_path / "hf", tie_word_embeddings=True, vocab_size=131)
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step", "--tp", 2, "--pp", 2)
    model = Model(path=str(tmp_path / "hf"), dtype="fp32")
    parallel.start(model, seed=0, timeout_s=60)
    chunks = build.build(model, tmp_path / "hf")
    checkpoint.load_model(tmp_path / "step", chunks)
    stored = load_file(tmp_path / "hf/model.safetensors")
    exported = dict(hf.export(chunks, family_of(tmp_path / "hf")))
    parallel.stop()
    assert all(torch.equal(stored[name], exported[name]) for name in exported)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtype_rounds_once(tmp_path: Path, dtype: str) -> None:
    tiny_llama(tmp_path / "hf", torch.float32)
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step", "--dtype", dtype)
    run("convert", "megatron-to-hf", tmp_path / "step", tmp_path / "back")
    source = Directory(tmp_path / "hf")
    back = Directory(tmp_path / "back")
    assert all(torch.equal(source[n].to(build.DTYPES[dtype]), back[n]) for n in source)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == str(
        build.DTYPES[dtype]
    ).removeprefix("torch.")


def test_files_and_index(tmp_path: Path) -> None:
    """Several files in, several files out, as transformers names them;
    it loads them.
    """
    reference = tiny_llama(tmp_path / "made")
    reference.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    hf_to_megatron(tmp_path / "hf", tmp_path / "step", Parallelism(2, 2), file_bytes=200_000)
    assert len(list((tmp_path / "step").glob("__3_*.distcp"))) > 1
    megatron_to_hf(tmp_path / "step", tmp_path / "back", file_bytes=100_000)
    assert same(tmp_path / "hf", tmp_path / "back")
    index = json.loads((tmp_path / "back" / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in reference.parameters())
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all(
        torch.equal(a, b) for a, b in zip(copy.parameters(), reference.parameters(), strict=True)
    )


def test_layers_for_multi_token_prediction_are_put_back_untouched(tmp_path: Path) -> None:
    """Released directories have one behind the last layer, which is not trained.
    config.json must announce it.
    """
    tiny_glm4_moe(tmp_path / "hf", num_hidden_layers=2)
    file = tmp_path / "hf/model.safetensors"
    config = tmp_path / "hf/config.json"
    more = {
        f"model.layers.2.{name}": torch.randn(8, 8)
        for name in ("eh_proj.weight", "self_attn.q_proj.weight")
    }
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    with pytest.raises(
        MegarlError, match=r"not of this model 2 tensors \(model.layers.2.eh_proj.weight"
    ):
        hf_to_megatron(tmp_path / "hf", tmp_path / "no", Parallelism())
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step", "--ep", 2)
    run("convert", "megatron-to-hf", tmp_path / "step", tmp_path / "back")
    assert same(tmp_path / "hf", tmp_path / "back")
    model = Model(path=str(tmp_path / "hf"), dtype="fp32")
    parallel.start(model, seed=0, timeout_s=60)
    chunks = build.build(model, tmp_path / "hf")
    family = family_of(tmp_path / "hf")
    hf.load(chunks, family, tmp_path / "hf")
    hf.save(chunks, family, tmp_path / "hf", tmp_path / "saved")
    parallel.stop()
    assert same(tmp_path / "hf", tmp_path / "saved")
    with pytest.raises(MegarlError, match=r"nowhere: lacks tensors model.layers.2.\*"):
        megatron_to_hf(tmp_path / "step", tmp_path / "no", tmp_path / "nowhere")
    tiny_glm4_moe(tmp_path / "without", num_hidden_layers=2, num_nextn_predict_layers=1)
    assert same(
        tmp_path / "without", written(tmp_path / "step", tmp_path / "shorter", tmp_path / "without")
    )


def written(source: Path, destination: Path, base: Path) -> Path:
    megatron_to_hf(source, destination, base)
    return destination


def test_vision_tower_is_put_back_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text model goes through Megatron, and training changes it; the rest comes
    from the original.
    """
    tiny_llama4_multimodal(tmp_path / "hf")
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step", "--ep", 2)
    run("convert", "megatron-to-hf", tmp_path / "step", tmp_path / "back")
    assert same(tmp_path / "hf", tmp_path / "back")
    assert any(name.startswith("vision_model.") for name in Directory(tmp_path / "back"))

    (tmp_path / "hf").rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["convert", "megatron-to-hf", str(tmp_path / "step"), str(tmp_path / "again")]) == 2
    assert "give the original model with --base" in capsys.readouterr().err
    run(
        "convert",
        "megatron-to-hf",
        tmp_path / "step",
        tmp_path / "again",
        "--base",
        tmp_path / "moved",
    )
    assert same(tmp_path / "moved", tmp_path / "again")
    run("verify", tmp_path / "step", tmp_path / "again")


@pytest.mark.parametrize("name", ["llama", "qwen3-moe, one dense layer", "llama 4"])
def test_verify_compares_logits_of_megatron_and_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    tiny, overrides = FAMILIES[name]
    tiny(tmp_path / "hf", torch.bfloat16, **overrides)
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step", "--tp", 2)
    capsys.readouterr()
    run("verify", tmp_path / "step", tmp_path / "hf", "--logits", 2)
    out = capsys.readouterr().out
    assert "logits of 2 random prompts of 64 tokens differ by " in out
    assert float(out.split("differ by ")[1].split(",")[0]) < 2e-5


def test_verify_of_other_vocabularies_compares_no_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in (("a", 131), ("b", 100)):
        tiny_llama(tmp_path / name, vocab_size=size)
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b"), "--logits", "1"]) == 1
    assert (
        "logits cannot be compared: the vocabularies have 131 and 100 tokens"
        in capsys.readouterr().out
    )


def test_verify_finds_logits_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same tensors, another rotary embedding: only the logits show it."""
    tiny_llama(tmp_path / "hf")
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "step"), str(tmp_path / "hf"), "--logits", "1"]) == 1
    assert "equal: 39 tensors" in capsys.readouterr().out


def test_a_head_stored_beside_a_tied_embedding_is_not_a_mistake(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "hf/model.safetensors")
    run("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "step")
    run("convert", "megatron-to-hf", tmp_path / "step", tmp_path / "back")
    assert Directory(tmp_path / "back").keys() == tensors.keys() - {"lm_head.weight"}
