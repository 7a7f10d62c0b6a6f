"""Each kind of directory that users bring, at each door: taken with the weights that
transformers loads from it, or refused in one line that names what is wrong.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM

from checkpoints_tools import convert
from checkpoints_tools.__main__ import main
from checkpoints_tools.layout import Parallelism
from megarl.checks import inputs
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_jsonl
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.recipe import Model, from_tree
from megarl.tasks.data.arithmetic_models import CHARACTERS, END, SPECIAL
from megarl.tools.eval.subject import subject_of
from tests.tiny import tiny_deepseek_v3, tiny_llama, tiny_qwen3_moe

# isort: split
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], object]


def one_layer(path: Path) -> None:
    tiny_llama(path, torch.bfloat16, num_hidden_layers=1)


def tied(path: Path) -> None:
    tiny_llama(path, torch.bfloat16, num_hidden_layers=1, tie_word_embeddings=True)


def moe(path: Path) -> None:
    tiny_qwen3_moe(path, torch.bfloat16, num_hidden_layers=1)


def latent(path: Path) -> None:
    tiny_deepseek_v3(path, torch.bfloat16, num_hidden_layers=1, first_k_dense_replace=0)


def stacked(path: Path) -> None:
    model = tiny_qwen3_moe(path, torch.bfloat16, num_hidden_layers=1)
    model.save_pretrained(path, save_original_format=False)


@cache
def made(make: Change, folder: Path) -> Path:
    make(folder / make.__name__)
    return folder / make.__name__


def weights(change: Callable[[Tensors], object]) -> Change:
    """Change the tensors of model.safetensors."""

    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def config(**values: object) -> Change:
    def apply(path: Path) -> None:
        before = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(before | values))

    return apply


def without(*keys: str) -> Change:
    def apply(path: Path) -> None:
        before = json.loads((path / "config.json").read_text())
        after = {key: value for key, value in before.items() if key not in keys}
        (path / "config.json").write_text(json.dumps(after))

    return apply


def both(*changes: Change) -> Change:
    def apply(path: Path) -> None:
        for change in changes:
            change(path)

    return apply


def sharded(path: Path) -> None:
    """Two files and their index, as save_pretrained writes them."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    file_of: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, path / file)
        file_of |= dict.fromkeys(half, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def old_shards(path: Path) -> None:
    """model.safetensors beside the index of an older model of zeros."""
    tensors = load_file(path / "model.safetensors")
    shutil.copy(path / "model.safetensors", path / "new")
    sharded(path)
    for file in path.glob("model-*.safetensors"):
        save_file({n: torch.zeros_like(t) for n, t in load_file(file).items()}, file)
    (path / "new").rename(path / "model.safetensors")
    assert tensors


def stale_index(path: Path) -> None:
    old_shards(path)
    for file in path.glob("model-*.safetensors"):
        file.unlink()


def two_files(path: Path) -> None:
    """A tensor in each of two files, without an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file(
        {"model.norm.weight": torch.zeros_like(tensors["model.norm.weight"])},
        path / "b.safetensors",
    )


def two_in_index(path: Path) -> None:
    """A tensor in each of two files of an index."""
    sharded(path)
    first, second = sorted(path.glob("model-*.safetensors"))
    extra = load_file(first)["lm_head.weight"]
    save_file(load_file(second) | {"lm_head.weight": extra * 0}, second)


def reindexed(name_of: Callable[[Path, str], str]) -> Change:
    def apply(path: Path) -> None:
        sharded(path)
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] = {n: name_of(path, file) for n, file in index["weight_map"].items()}
        (path / INDEX).write_text(json.dumps(index))

    return apply


def hub_snapshot(path: Path) -> None:
    """Files that are links to blobs, as in huggingface_hub's cache."""
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))


def linked(name: str) -> Change:
    """A file of the directory that is elsewhere."""

    def apply(path: Path) -> None:
        secret = path.parent / "secret"
        (path / name).touch()
        (path / name).rename(secret)
        (path / name).symlink_to(secret)

    return apply


def beside(name: str) -> Change:
    """Another file of tensors beside the model's."""
    return lambda path: save_file({"other.weight": torch.ones(3)}, path / name)


def only_bin(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def only_gguf(path: Path) -> None:
    (path / "model.safetensors").rename(path / "x.gguf")
    (path / "config.json").unlink()


def renamed(prefix: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return weights(change)


def dtypes(dtype: torch.dtype, only: str = "") -> Change:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if only in name:
                tensors[name] = tensor.to(dtype)
        if dtype in (torch.float32, torch.float64):  # digits that bf16 does not have
            tensors["model.norm.weight"] *= 1 + 1e-4

    return weights(change)


def set_value(name: str, value: float) -> Change:
    return weights(lambda tensors: tensors[name].view(-1)[:1].fill_(value))


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def appended(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(bytes(8))


def scales(path: Path) -> None:
    """A quantised directory whose scales are F8_E8M0."""
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1).to(torch.float8_e8m0fnu)
    save_file(tensors, path / "model.safetensors")
    config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(path)


ALL = ("train", "sft", "eval", "learner", "convert", "verify", "inspect")
SERVED = ("train", "eval")
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True)
class Case:
    """says: what the message names; empty: the directory is taken. at: the doors that
    refuse it, while the others take it. rounds: what the learner and a conversion say
    of lost digits.
    """

    change: Change
    says: str = ""
    base: Change = one_layer
    at: tuple[str, ...] = ALL
    rounds: str = ""


LAYER = "model.layers.0."
CASES = {
    "as saved": Case(lambda path: None),
    "shards and an index": Case(sharded),
    "links into a cache": Case(hub_snapshot),
    "model and an older index": Case(
        old_shards, r"model\.safetensors is there.*index\.json names other"
    ),
    "model and a stale index": Case(stale_index, r"remove the index"),
    "a tensor in two files": Case(two_files, r"a\.safetensors and b\.safetensors"),
    "a tensor in two files of the index": Case(two_in_index, r"lm_head\.weight is in two files"),
    "an index with paths upwards": Case(
        reindexed(lambda path, file: f"../{path.name}/{file}"), "not the name of a file"
    ),
    "an index with absolute paths": Case(
        reindexed(lambda path, file: str(path / file)), "not the name of a file"
    ),
    "a link to a file elsewhere": Case(linked("README.md"), r"README\.md: a link to .*secret"),
    "weights that are a link": Case(linked("model.safetensors")),
    "an index of text": Case(
        lambda path: (path / INDEX).write_text('{"weight_map": {"a": 3}}'), INDEX
    ),
    "a file that is cut off": Case(cut, r"model\.safetensors: .*unreadable or incomplete"),
    "an empty file": Case(
        lambda p: (p / "model.safetensors").write_bytes(b""), "unreadable or incomplete"
    ),
    "bytes after the tensors": Case(appended, "unreadable or incomplete"),
    "only a .bin": Case(only_bin, r"pytorch_model\.bin"),
    "a GGUF file": Case(
        lambda p: [(p / "model.safetensors").rename(p / "x.gguf"), (p / "config.json").unlink()],
        "import-gguf",
    ),
    "no weights": Case(lambda path: (path / "model.safetensors").unlink(), "no weights there"),
    "an adapter": Case(lambda path: (path / "adapter_config.json").write_text("{}"), "LoRA"),
    "an adapter's file beside it": Case(
        beside("adapter_model.safetensors"), "move adapter_model", at=SERVED
    ),
    "an optimizer beside it": Case(beside("optimizer.safetensors"), "move optimizer", at=SERVED),
    "consolidated beside it": Case(beside("consolidated.safetensors")),
    "a stray file outside the index": Case(both(sharded, beside("old.safetensors"))),
    "a head outside the index": Case(
        both(
            sharded,
            lambda p: save_file({"lm_head.weight": torch.ones(128, 64)}, p / "head.safetensors"),
        ),
        base=tied,
    ),
    "tied and another head": Case(
        weights(lambda t: t.update({"lm_head.weight": torch.ones(128, 64)})), "tie_word", base=tied
    ),
    "tied and the same head": Case(
        weights(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
        base=tied,
    ),
    "tied and the same head in FP32": Case(
        weights(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].float()})),
        base=tied,
    ),
    'tied: "false"': Case(config(tie_word_embeddings="false"), r"tie_word_embeddings is 'false'"),
    "no head": Case(weights(lambda t: t.pop("lm_head.weight")), r"missing.*lm_head\.weight"),
    "no norm": Case(weights(lambda t: t.pop("model.norm.weight")), r"missing.*model\.norm\.weight"),
    "a layer more": Case(config(num_hidden_layers=2), r"missing.*layers\.1\."),
    "a layer fewer": Case(
        weights(lambda t: t.update({"model.layers.1.x": torch.ones(1)})), "not of this model"
    ),
    "other rows": Case(
        config(intermediate_size=80), r"up_proj\.weight \[96, 64\] instead of \[80, 64\]"
    ),
    "other heads": Case(
        config(num_attention_heads=4), r"q_proj\.weight \[128, 64\] instead of \[64, 64\]"
    ),
    "other vocabulary": Case(
        config(vocab_size=130), r"embed_tokens\.weight \[128, 64\] instead of"
    ),
    "_orig_mod.": Case(renamed("_orig_mod."), r"begins with '_orig_mod\.'"),
    "module.": Case(renamed("module."), r"begins with 'module\.'"),
    "biases": Case(
        weights(lambda t: t.update({f"{LAYER}self_attn.q_proj.bias": torch.ones(128)})),
        r"q_proj\.bias",
    ),
    "frequencies": Case(
        weights(lambda t: t.update({f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    ),
    "stacked experts": Case(lambda path: None, "stacked", stacked, SERVED),
    "experts apart": Case(lambda path: None, base=moe),
    "FP32 under a bf16 config": Case(dtypes(torch.float32)),
    "FP32 norms": Case(
        dtypes(torch.float32, "norm"),
        rounds=r"3 tensors of float32 are rounded to bfloat16 \(.*norm",
    ),
    "float64": Case(dtypes(torch.float64), rounds="12 tensors of float64 are rounded to float32"),
    "no dtype in the config": Case(without("dtype", "torch_dtype")),
    "FP8 without a config": Case(
        dtypes(torch.float8_e4m3fn, "up_proj"), r"up_proj\.weight F8_E4M3"
    ),
    "integers": Case(dtypes(torch.int8, "up_proj"), r"up_proj\.weight I8"),
    "F8_E8M0 scales": Case(scales, "quantised"),
    "NaN": Case(
        set_value("model.norm.weight", float("nan")),
        r"NaN or infinite",
        at=("learner", "convert", "verify"),
    ),
    "infinity": Case(
        set_value("lm_head.weight", float("inf")),
        r"NaN or infinite",
        at=("learner", "convert", "verify"),
    ),
    "rope_theta: null": Case(
        config(rope_parameters={"rope_type": "default", "rope_theta": None}), "rope_theta is null"
    ),
    "rope_theta as text": Case(
        config(rope_parameters=ROPE | {"rope_theta": "1e4"}), "rope_theta is '1e4'"
    ),
    "rms_norm_eps as text": Case(config(rms_norm_eps="1e-5"), "rms_norm_eps is '1e-5'"),
    "rms_norm_eps: NaN": Case(config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "a factor of null": Case(
        config(rope_parameters=ROPE | {"rope_type": "llama3", "factor": None}), "factor is null"
    ),
    "architectures as text": Case(
        config(architectures="LlamaForCausalLM"), "architectures is 'LlamaForCausalLM'"
    ),
    "an unknown architecture": Case(
        config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported"
    ),
    "an unknown model_type": Case(config(model_type="mine"), "model_type is 'mine'"),
    "no model_type": Case(without("model_type"), "model_type is None"),
    "no architectures": Case(without("architectures"), "architecture none is not supported"),
    "layers as text": Case(config(num_hidden_layers="1"), "num_hidden_layers is '1'"),
    "10^9 layers": Case(config(num_hidden_layers=10**9), "num_hidden_layers is 1,000,000,000"),
    "10^9 predicting layers": Case(
        config(num_nextn_predict_layers=10**9), "more than any model", latent
    ),
    "10^9 experts": Case(
        config(num_experts=10**9, num_local_experts=10**9), "more than any model", moe
    ),
    "3 key-value heads of 8": Case(config(num_key_value_heads=3), "num_key_value_heads=3"),
    "9 of 4 experts": Case(config(num_experts_per_tok=9), "num_experts_per_tok=9", moe),
    "two kinds of rope": Case(
        config(rope_scaling={"rope_type": "linear", "factor": 2.0}), "beside rope_parameters"
    ),
    "rope_scaling: null": Case(config(rope_scaling=None)),
    "a flag of 1": Case(config(attention_bias=0), "attention_bias is 0, not true or false"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def directory(case: Case, folder: Path, path: Path) -> Path:
    shutil.copytree(made(case.base, folder), path / "model")
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<none>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.add_special_tokens([*SPECIAL])
    backend.save(str(path / "model" / "tokenizer.json"))
    (path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    case.change(path / "model")
    return path / "model"


def recipe_for(path: Path) -> Any:
    for name in ("train", "heldout"):
        rows = [{"id": "0", "prompt": f"{len(name)}+1=", "answer": "1"}]
        write_jsonl(path.parent / f"{name}.jsonl", rows)
    write_jsonl(path.parent / "sft.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    task = {name: str(path.parent / f"{name}.jsonl") for name in ("train", "heldout")}
    lengths = {"prompt_tokens": 16, "thinking_tokens": [8, 8], "answer_tokens": 8}
    return from_tree(
        {
            "run": {"name": "x", "dir": str(path.parent / "runs")},
            "model": {"path": str(path), "dtype": "fp32"},
            "length": lengths | {"control": "none", "interruption": ""},
            "serving": {"kv_tokens": 4096},
            "data": {"tasks": {"math": task}},
            "sft": {"init": str(path), "data": str(path.parent / "sft.jsonl")},
        }
    )


def learner(path: Path) -> Tensors:
    chunks = build.build(Model(dtype="fp32"), path)
    family = family_of(path)
    hf.load(chunks, family, path)
    return {name: tensor.clone() for name, tensor in hf.export(chunks, family)}


def converted(path: Path) -> Tensors:
    convert.hf_to_megatron(path, path.parent / "step", Parallelism())
    convert.megatron_to_hf(path.parent / "step", path.parent / "back")
    return load_file(path.parent / "back" / "model.safetensors")


def told(capsys: pytest.CaptureFixture[str], *words: object) -> None:
    """Run a tool; raise its message. `verify` and `inspect` say what is wrong in their
    answer.
    """
    capsys.readouterr()
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    if status == 2:
        raise MegarlError(err.strip())
    bad = [line for line in out.splitlines() if "unusable" in line or "/model: " in line]
    if status or bad:
        raise MegarlError("\n".join(bad))


def through(door: str, path: Path, capsys: pytest.CaptureFixture[str]) -> Tensors | None:
    """Return the weights that this door reads, if it reads any."""
    match door:
        case "train":
            inputs.check_all(recipe_for(path))
        case "sft":
            inputs.check_sft(recipe_for(path))
        case "eval":
            subject_of(str(path))
        case "learner":
            hf.load([], family_of(path), path)  # a refusal needs no rank
            return read_by_learner(path)
        case "convert":
            return converted(path)
        case "verify":
            told(capsys, "verify", path, path)
        case "inspect":
            told(capsys, "inspect", path)
    return None


def by_transformers(path: Path) -> Tensors:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return tensors


def read_by_learner(path: Path) -> Tensors:
    parallel.start(Model(dtype="fp32"), seed=0, timeout_s=60)
    try:
        return learner(path)
    finally:
        parallel.stop()


@pytest.mark.parametrize("name", CASES)
def test_a_directory_at_every_door(
    name: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    caplog.set_level("INFO", logger="megarl")
    case = CASES[name]
    path = directory(case, folder, tmp_path)
    for door in case.at if case.says else ():
        with pytest.raises(MegarlError, match=case.says) as error:
            through(door, path, capsys)
        assert len(str(error.value).splitlines()) == 1
    for door in ALL if not case.says else set(ALL) - set(case.at):
        caplog.clear()
        capsys.readouterr()
        if read := through(door, path, capsys):
            same_as_transformers(read, path, caplog.text + capsys.readouterr().out, case)


def same_as_transformers(read: Tensors, path: Path, text: str, case: Case) -> None:
    """text: what the door said. It must speak of rounding if, and only if,
    it rounded.
    """
    wanted = by_transformers(path)
    shared = wanted.keys() & read.keys()
    assert len(shared) >= 7  # of experts transformers has other names
    for key in shared:
        assert torch.equal(read[key], wanted[key].to(read[key].dtype)), key
    exact = all(torch.equal(read[key].double(), wanted[key]) for key in shared)
    assert exact != ("rounded to" in text)
    assert exact or (case.rounds and re.search(case.rounds, text))
