"""A GGUF file becomes the directory that it was made from; what would become another is
refused.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from checkpoints_tools.__main__ import main
from megarl.core.base.model_directory import open_served_model
from tests.full_disk import files_no_larger_than
from tests.tiny import PLAIN_ROPE, tiny_llama, tiny_qwen2

# isort: split
from safetensors.torch import load_file

ALPHABET = sorted(ByteLevel.alphabet())
MERGES = ["1 2", "a n", "an d", "Ġ and"]
TOKENS = ["<|endoftext|>", "<|start|>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "num_hidden_layers": 1,
    "rope_parameters": PLAIN_ROPE,
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows: pairs that are rotated together are neighbours."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: Path, architecture: str, pre: str, **more: Any) -> None:
    """Write what llama.cpp's converter writes for the model in a directory."""
    writer = gguf.GGUFWriter(file, architecture)
    config = json.loads((model / "config.json").read_text())
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    for key, value in more.items():
        writer.add_string(key.replace("__", "."), value)
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[architecture]
    names = gguf.get_tensor_name_map(kind, 1)
    for name, tensor in load_file(model / "model.safetensors").items():
        base, _, ending = name.rpartition(".")
        value = tensor.numpy()
        if architecture == "llama" and ".q_proj" in name:
            value = permuted(value, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in name:
            value = permuted(value, config["num_key_value_heads"])
        writer.add_tensor(f"{names.get_name(base)}.{ending}", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "made", **SIZES, tie_word_embeddings=True)
    return tmp_path / "made"


def test_the_model_that_the_file_was_made_from(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    write_gguf(tmp_path / "in" / "x.gguf", llama, "llama", "smollm")
    out = tmp_path / "out"
    assert main(["import-gguf", str(tmp_path / "in"), str(out), "--dtype", "fp32"]) == 0
    assert "'The capital of France is' continues with" in capsys.readouterr().out
    directory = open_served_model(out)
    before, after = (load_file(path / "model.safetensors") for path in (llama, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    architecture = directory.architecture
    assert (architecture.epsilon, architecture.rope_theta) == (1e-5, 1e4)
    assert architecture.tied
    config = json.loads((out / "config.json").read_text())
    assert not {"_name_or_path", "quantization_config"} & config.keys()
    backend = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert backend.encode("12 and<|endoftext|>").tokens == ["1", "2", "Ġand", "<|endoftext|>"]


def test_a_qwen2_tokenizer_splits_as_qwens_own(tmp_path: Path) -> None:
    """transformers' reader leaves the composition of accents out."""
    tiny_qwen2(tmp_path / "made", **SIZES, head_dim=8)
    write_gguf(tmp_path / "x.gguf", tmp_path / "made", "qwen2", "qwen2")
    assert (
        main(["import-gguf", str(tmp_path / "x.gguf"), str(tmp_path / "out"), "--dtype", "fp32"])
        == 0
    )
    own = json.loads(Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.to_str())
    read = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert read["normalizer"] == own["normalizer"] == {"type": "NFC"}
    assert read["pre_tokenizer"]["pretokenizers"][0] == own["pre_tokenizer"]["pretokenizers"][0]


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["import-gguf", *map(str, words)]) == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    return message


def test_what_would_become_another_model(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    file = tmp_path / "x.gguf"
    assert "no GGUF file there" in refusal(capsys, tmp_path, out)
    write_gguf(file, llama, "llama", "mine")
    assert "pre-tokenizer 'mine', is not known" in refusal(capsys, file, out)
    write_gguf(file, llama, "llama", "smollm", llama__rope__scaling__type="yarn")
    assert "it has rope scaling, which" in refusal(capsys, file, out)
    file.write_bytes(file.read_bytes()[:5000])
    assert "not a complete GGUF file: its header or its tensors do not fit its size" in refusal(
        capsys, file, out
    )
    assert "no such file or directory" in refusal(capsys, tmp_path / "none.gguf", out)
    weights = llama / "model.safetensors"
    assert "not a GGUF file: it does not begin with GGUF" in refusal(capsys, weights, out)
    assert "cannot be written: File name too long" in refusal(capsys, file, tmp_path / ("a" * 300))
    (tmp_path / "y.gguf").touch()
    assert "2 GGUF files (x.gguf, y.gguf); name one" in refusal(capsys, tmp_path, out)
    assert not list(tmp_path.glob("*out*"))
    assert "import-gguf" in _of_verify(capsys, tmp_path)


def test_a_full_disk_leaves_nothing(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    out = tmp_path / "out"
    write_gguf(file, llama, "llama", "smollm")
    capsys.readouterr()
    with files_no_larger_than(50_000):
        assert main(["import-gguf", str(file), str(out)]) == 2
    assert f"{out}: cannot be written: " in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("*out*"))


def _of_verify(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """Return what another tool says of a directory with a GGUF file."""
    assert main(["verify", str(path), str(path)]) == 2
    return capsys.readouterr().err
