"""Bad directories and layouts end in one message that says what and where; nothing
half-written stays.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from megarl.core import models
from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.base.model_directory import open_model, open_served_model
from megarl.core.models import build, checkpoint, family_of, hf, parallel
from megarl.core.recipe import Model
from tests import make
from tests.damage import flip_a_bit
from tests.full_disk import files_no_larger_than
from tests.tiny import (
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_qwen2,
    tiny_qwen3_5,
    tiny_qwen3_5_moe_multimodal,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)

# isort: split
from safetensors.torch import load_file, save_file


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    tiny_llama4(tmp_path / "experts", num_hidden_layers=2, moe_layers=[1], no_rope_layers=[1, 0])
    return tmp_path / "experts"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "hf", num_hidden_layers=2)
    return tmp_path / "hf"


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(
        MegarlError, match=r"nowhere: no Hugging Face model there \(no config.json\)"
    ):
        family_of(tmp_path / "nowhere")


def test_unsupported_architecture_names_the_supported(directory: Path) -> None:
    make.edit_config(directory, architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        MegarlError, match=r"GPT2LMHeadModel is not supported; supported: .*LlamaForCausalLM"
    ):
        family_of(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn"}},
        {
            "rope_scaling": {"rope_type": "yarn"}
        },  # beside the rope_parameters, as Qwen3's README has it
    ],
)
def test_unsupported_settings_are_refused(directory: Path, change: dict[str, Any]) -> None:
    make.edit_config(directory, **change)
    with pytest.raises(MegarlError, match=r"config.json: .* not supported"):
        family_of(directory)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=false or num_experts_per_tok=1"),
        (
            {"num_experts_per_tok": 1, "topk_group": 1},
            "norm_topk_prob=false or num_experts_per_tok=1",
        ),
        # Megatron would rank each group by its best 3, or its best 1: other experts,
        # and no word.
        ({"num_experts_per_tok": 6}, "topk_group=2 with 6 of 8 experts"),
        ({"num_experts_per_tok": 3}, "topk_group=2 with 3 of 8 experts"),
        ({"n_group": 3}, "n_group=3"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"v_head_dim": 25}, "v_head_dim=25"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type 'llama3'"),
    ],
)
def test_unsupported_experts_and_latent_attention_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    tiny_deepseek_v3(tmp_path, num_hidden_layers=1)
    family_of(tmp_path)
    make.edit_config(tmp_path, **change)
    with pytest.raises(MegarlError, match=rf"config.json: .*{re.escape(said)}.* not supported"):
        family_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": False}, "attention_bias=False is not supported"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"layer_types": ["chunked_attention"]}, "layer_types is not supported"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is not supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_type 'llama3' is not supported",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method mxfp4"),
    ],
)
def test_unsupported_gpt_oss_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    tiny_gpt_oss(tmp_path, num_hidden_layers=1)
    family_of(tmp_path)
    make.edit_config(tmp_path, **change)
    with pytest.raises(MegarlError, match=said):
        family_of(tmp_path)


FOURTH = ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5 is no multiple of"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        # SGLang would take attention to be elsewhere, or find none.
        ({"full_attention_interval": 2}, "layer_types is not supported"),
        ({"layer_types": FOURTH[::-1]}, "layer_types is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types is not supported"),
        ({"layer_types": FOURTH[:3]}, "layer_types is not supported"),
        ({"layer_types": FOURTH, "full_attention_interval": 3}, "layer_types is not supported"),
        ({"attn_output_gate": "yes"}, "attn_output_gate is 'yes', not true or false"),
    ],
)
def test_unsupported_delta_networks_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    tiny_qwen3_next(tmp_path)
    family_of(tmp_path)
    make.edit_config(tmp_path, **change)
    with pytest.raises(MegarlError, match=rf"config.json: {re.escape(said)}"):
        family_of(tmp_path)


def test_the_layers_of_a_delta_network_follow_either_key(tmp_path: Path) -> None:
    """transformers writes only layer_types, early releases had only the interval."""
    tiny_qwen3_5(tmp_path, full_attention_interval=2)
    assert in_directory(tmp_path).delta_layers == (0, 2)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "full_attention_interval"):
        without = {name: value for name, value in config.items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(without))
        assert in_directory(tmp_path).delta_layers == (0, 2)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tensor_parallel": 4}, "linear_num_key_heads=2 of x is not divisible by 4"),
        (
            {"tensor_parallel": 2, "context_parallel": 2},
            "linear_num_key_heads=2 of x is not divisible by 4",
        ),
        ({"fp8": "blockwise"}, "model.fp8: is not implemented for the attention of x"),
    ],
)
def test_layouts_that_do_not_divide_delta_networks_are_refused(
    tmp_path: Path, layout: dict[str, Any], said: str
) -> None:
    tiny_qwen3_5(tmp_path)
    architecture = in_directory(tmp_path)
    build.transformer_config(Model(path="x", tensor_parallel=2), architecture, False)
    build.transformer_config(Model(path="x", context_parallel=2), architecture, False)
    with pytest.raises(MegarlError, match=re.escape(said)):
        build.transformer_config(Model.model_validate({"path": "x"} | layout), architecture, False)


def test_a_stack_of_experts_of_another_size_is_refused(tmp_path: Path) -> None:
    tiny_qwen3_5_moe_multimodal(tmp_path)
    open_served_model(tmp_path)  # SGLang loads these stacks
    make.edit_config(
        tmp_path,
        text_config=json.loads((tmp_path / "config.json").read_text())["text_config"]
        | {"num_experts": 7},
    )
    with pytest.raises(MegarlError, match=r"weights do not fit config.json: missing"):
        open_model(tmp_path)


def test_experts_with_biases_are_not_divided(tmp_path: Path) -> None:
    tiny_gpt_oss(tmp_path, num_hidden_layers=1)
    architecture = in_directory(tmp_path)
    build.transformer_config(Model(path="x", tensor_parallel=2), architecture, False)
    with pytest.raises(
        MegarlError, match=r"model.expert_tensor_parallel: experts of x have biases.*set it to 1"
    ):
        build.transformer_config(
            Model(path="x", tensor_parallel=2, expert_tensor_parallel=2), architecture, False
        )


def test_glm_without_plain_rotation_is_refused(tmp_path: Path) -> None:
    tiny_glm4_moe(tmp_path, num_hidden_layers=1)
    make.edit_config(
        tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(MegarlError, match="rope_type 'yarn' is not supported"):
        family_of(tmp_path)


def test_a_temperature_of_llama4_that_no_server_loads(tmp_path: Path) -> None:
    """The first releases have 4, which transformers 5 refuses."""
    tiny_llama4(tmp_path)
    make.edit_config(tmp_path, attn_temperature_tuning=4)
    with pytest.raises(
        MegarlError, match=r"attn_temperature_tuning=4 is not supported: .* set it to true"
    ):
        family_of(tmp_path)
    with pytest.raises(StrictDataclassFieldValidationError):
        AutoConfig.from_pretrained(tmp_path)


def test_dual_chunk_attention_is_refused(tmp_path: Path) -> None:
    tiny_qwen2(tmp_path, num_hidden_layers=1)
    make.edit_config(
        tmp_path, dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192}
    )
    with pytest.raises(
        MegarlError, match=r"dual_chunk_attention_config=\{.* is not supported, only None"
    ):
        family_of(tmp_path)


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    """Qwen2 may have them; released configurations name a window and do not use it."""
    tiny_qwen2(tmp_path, num_hidden_layers=1)
    make.edit_config(tmp_path, sliding_window=4096, use_sliding_window=False)
    family_of(tmp_path)
    make.edit_config(tmp_path, use_sliding_window=True)
    with pytest.raises(
        MegarlError, match=r"config.json: use_sliding_window=True is not supported, only False"
    ):
        family_of(tmp_path)


def test_missing_and_extra_tensors_in_one_message(one_rank: None, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.9.x"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        MegarlError,
        match=r"missing 1 tensor \(model.layers.0.mlp.up_proj.weight\); .*\(model.layers.9.x\)",
    ):
        hf.load(build.build(Model(dtype="fp32"), directory), family_of(directory), directory)


def test_a_tied_head_that_is_another_matrix(directory: Path) -> None:
    """transformers 5 keeps both; megarl and SGLang would drop the head and
    say nothing.
    """
    open_model(directory)  # not tied
    make.edit_config(directory, tie_word_embeddings=True)
    with pytest.raises(
        MegarlError,
        match=r"lm_head.weight and model.embed_tokens.weight differ, .* set it to false",
    ):
        open_model(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    open_model(directory)
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    open_model(directory)
    (directory / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(MegarlError, match=r"model.safetensors: weights unreadable or incomplete"):
        open_model(directory)


@pytest.mark.parametrize("names", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_the_type_in_a_copied_description(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from/config.json").write_text(json.dumps(dict.fromkeys(names, "float32")))
    hf.copy_description(tmp_path / "from", tmp_path / "to", torch.bfloat16)
    assert json.loads((tmp_path / "to/config.json").read_text()) == dict.fromkeys(
        names or ("dtype",), "bfloat16"
    )
    assert (
        AutoConfig.for_model("llama", **dict.fromkeys(names or ("dtype",), "bfloat16")).dtype
        == torch.bfloat16
    )


def test_wrong_shapes(one_rank: None, directory: Path) -> None:
    make.edit_config(directory, intermediate_size=80)
    with pytest.raises(MegarlError, match=r"do not have the shapes config.json says"):
        hf.load(build.build(Model(dtype="fp32"), directory), family_of(directory), directory)


def test_cut_off_weights(one_rank: None, directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(MegarlError, match="unreadable or incomplete"):
        hf.load(build.build(Model(dtype="fp32"), directory), family_of(directory), directory)


def test_another_number_of_experts(one_rank: None, experts: Path) -> None:
    make.edit_config(experts, num_local_experts=2)
    with pytest.raises(MegarlError, match=r"router.weight \[4, 64\] instead of \[2, 64\]"):
        hf.load(build.build(Model(dtype="fp32"), experts), family_of(experts), experts)


def test_expert_of_another_size(one_rank: None, experts: Path) -> None:
    make.edit_config(experts, intermediate_size=64)
    with pytest.raises(MegarlError, match=r"do not have the shapes config.json says: .*experts"):
        hf.load(build.build(Model(dtype="fp32"), experts), family_of(experts), experts)


def test_more_than_one_expert_of_llama4_is_refused(experts: Path) -> None:
    make.edit_config(experts, num_experts_per_tok=2)
    with pytest.raises(MegarlError, match=r"num_experts_per_tok=2 is not supported, only 1"):
        family_of(experts)


def test_config_without_a_size(experts: Path) -> None:
    config = json.loads((experts / "config.json").read_text())
    del config["intermediate_size_mlp"]
    (experts / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        MegarlError,
        match=r"config.json: 'intermediate_size_mlp' is missing, which Llama4ForCausalLM needs",
    ):
        family_of(experts)


def test_a_router_without_effect_is_refused(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, num_hidden_layers=1)
    make.edit_config(tmp_path, num_experts_per_tok=1)
    with pytest.raises(
        MegarlError, match=r"norm_topk_prob with num_experts_per_tok=1 is not supported"
    ):
        family_of(tmp_path)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"expert_parallel": 3},
            r"model.expert_parallel: num_moe_experts=4 .* is not divisible by 3",
        ),
        (
            {"expert_parallel": 2, "expert_tensor_parallel": 5},
            r"model.expert_tensor_parallel: moe_ffn_hidden_size=48 .* is not divisible by 5",
        ),
    ],
)
def test_layouts_that_experts_do_not_allow(
    one_rank: None, experts: Path, layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(MegarlError, match=message):
        build.build(Model(path="m", **layout), experts)


def test_expert_parallel_without_experts(one_rank: None, directory: Path) -> None:
    with pytest.raises(MegarlError, match=r"model.expert_parallel: m has no experts; set it to 1"):
        build.build(Model(path="m", expert_parallel=2), directory)


def test_saving_without_the_vision_tower_to_copy(one_rank: None, tmp_path: Path) -> None:
    tiny_llama4_multimodal(tmp_path / "hf", num_hidden_layers=1, moe_layers=[0], no_rope_layers=[1])
    family = family_of(tmp_path / "hf")
    chunks = build.build(Model(dtype="fp32"), tmp_path / "hf")
    hf.load(chunks, family, tmp_path / "hf")
    hf.copy_description(tmp_path / "hf", tmp_path / "description")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MegarlError, match=r"description: no weights there"):
        hf.save(chunks, family, tmp_path / "description", tmp_path / "copy")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_without_a_text_is_an_error_on_all_ranks(one_rank: None) -> None:
    def fail() -> None:
        raise TimeoutError

    with pytest.raises(MegarlError, match="TimeoutError"):
        hf.everywhere(fail)


def test_layout_that_does_not_fit_the_ranks() -> None:
    with pytest.raises(
        MegarlError, match=r"1 ranks do not divide into copies of the model of 2 ranks"
    ):
        parallel.start(Model(tensor_parallel=2), seed=0, timeout_s=5)


def test_model_that_does_not_divide(one_rank: None, directory: Path) -> None:
    with pytest.raises(
        MegarlError, match=r"model.tensor_parallel: num_attention_heads=8 .* is not divisible by 3"
    ):
        build.build(Model(path="m", tensor_parallel=3), directory)


def test_save_refuses_what_exists_and_cleans_up_when_it_fails(
    one_rank: None, directory: Path
) -> None:
    family = family_of(directory)
    chunks = build.build(Model(dtype="fp32"), directory)
    hf.load(chunks, family, directory)
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(MegarlError, match="exists already"):
        hf.save(chunks, family, directory, directory)
    with files_no_larger_than(20_000), pytest.raises(MegarlError):
        hf.save(chunks, family, directory, directory.parent / "copy")
    assert sorted(directory.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", "metadata.json", "hf/config.json", checkpoint.META]
)
def test_checkpoint_of_which_one_bit_has_changed(
    one_rank: None, directory: Path, name: str
) -> None:
    """Nothing of it is loaded; with the bit as it was, all is."""
    chunks = build.build(Model(dtype="fp32"), directory)
    hf.load(chunks, family_of(directory), directory)
    meta = checkpoint.CheckpointMeta(
        step=1, version=1, hf_source=str(directory), model=Model().model_dump()
    )
    path = directory.parent / "step-1"
    checkpoint.save(path, checkpoint.model_state(chunks), meta)
    assert checkpoint.read_meta(path).files.keys() == {
        file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()
    } - {checkpoint.META}
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.data.zero_()
    flip_a_bit(path / name)
    with pytest.raises(MegarlError, match=rf"step-1/{name}: .*(damaged|unreadable)"):
        checkpoint.load_model(path, chunks)
    assert not any(p.any() for p in parameters)
    flip_a_bit(path / name)
    checkpoint.load_model(path, chunks)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


def test_checkpoint_of_which_a_file_is_gone_or_that_is_of_another_schema(
    one_rank: None, directory: Path
) -> None:
    chunks = build.build(Model(dtype="fp32"), directory)
    hf.load(chunks, family_of(directory), directory)
    meta = checkpoint.CheckpointMeta(
        step=1, version=1, hf_source=str(directory), model=Model().model_dump()
    )
    path = directory.parent / "step-1"
    checkpoint.save(path, checkpoint.model_state(chunks), meta)
    (path / "hf" / "config.json").unlink()
    with pytest.raises(
        MegarlError, match=r"step-1/hf/config.json: missing; the checkpoint is damaged"
    ):
        checkpoint.load_model(path, chunks)
    without_checksums = {
        "step": 1,
        "version": 1,
        "hf_source": "",
        "model": {},
        "critic": False,
        "schema": 3,
    }
    (path / checkpoint.META).write_text(json.dumps(without_checksums))
    with pytest.raises(
        MegarlError,
        match=r"megarl.json: written in schema version 3, this version of megarl reads 4",
    ):
        checkpoint.load_model(path, chunks)


def test_checkpoint_cleans_up_when_it_fails(one_rank: None, directory: Path) -> None:
    chunks = build.build(Model(dtype="fp32"), directory)
    hf.load(chunks, family_of(directory), directory)
    meta = checkpoint.CheckpointMeta(
        step=1, version=1, hf_source=str(directory), model=Model().model_dump()
    )
    before = sorted(directory.parent.rglob("*"))
    with (
        files_no_larger_than(20_000),
        pytest.raises(MegarlError, match="step-1: the checkpoint could not be written"),
    ):
        checkpoint.save(directory.parent / "step-1", checkpoint.model_state(chunks), meta)
    assert sorted(directory.parent.rglob("*")) == before


def broken_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "transformer_engine.py").write_text(
        "raise ImportError('undefined symbol: _ZN3c104cuda')"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(
        sys.modules, "transformer_engine", raising=False
    )  # megarl hides it on a CPU


def test_a_broken_transformer_engine_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    models._check_transformer_engine()  # where there is none, layers are megarl's
    broken_engine(tmp_path, monkeypatch)
    with pytest.raises(
        MegarlError,
        match=r"cannot be imported: ImportError: undefined symbol: _ZN3c104cuda\. Build it again",
    ):
        models._check_transformer_engine()


def test_transformer_engine_takes_torchs_cudnn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By itself it takes that of CUDNN_HOME, which a cluster's module sets, or the
    toolkit's: two versions in one process.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn-9.12-for-cuda-12")
    (tmp_path / "transformer_engine").mkdir()
    for name in ("__init__", "pytorch"):
        (tmp_path / "transformer_engine" / f"{name}.py").touch()
        monkeypatch.delitem(
            sys.modules, f"transformer_engine.{name}".removesuffix(".__init__"), raising=False
        )
    monkeypatch.syspath_prepend(tmp_path)
    models._check_transformer_engine()
    assert list(Path(os.environ["CUDNN_HOME"]).glob("lib/libcudnn.so.*"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("flash_mla", "raise OSError('libcuda.so.1: cannot open shared object file')"),
        ("deep_ep", "assert False, 'cuda_home is not None'"),
    ],
)
def test_the_stack_for_gpus_where_there_is_no_driver(
    package: str, code: str, tmp_path: Path
) -> None:
    """A login node converts and inspects checkpoints. megatron-core imports packages
    that raise what it does not expect.
    """
    (tmp_path / f"{package}.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    words = [sys.executable, "-c", "import megarl.core.models.build"]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_broken_transformer_engine_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken_engine(tmp_path, monkeypatch)
    models._check_transformer_engine()
    assert build.layers_made_by(Model()) == "megarl"
