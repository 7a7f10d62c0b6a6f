"""Bad directories and layouts end in one message that says what and where; nothing half-written stays."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.errors import MegarlError
from megarl.models import build, checkpoint, family_of, hf, parallel
from megarl.recipe import Model
from tests.tiny import tiny_llama

# isort: split
from safetensors.torch import load_file, save_file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "hf", num_hidden_layers=2)
    return tmp_path / "hf"


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """As on a full disk: writing more fails with OSError."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match=r"nowhere: no Hugging Face model there \(no config.json\)"):
        family_of(tmp_path / "nowhere")


def test_unsupported_architecture_names_the_supported(directory: Path) -> None:
    edit_config(directory, architectures=["GPT2LMHeadModel"])
    with pytest.raises(MegarlError, match=r"GPT2LMHeadModel is not supported; supported: .*LlamaForCausalLM"):
        family_of(directory)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"rope_parameters": {"rope_type": "yarn"}}]
)
def test_unsupported_settings_are_refused(directory: Path, change: dict[str, object]) -> None:
    edit_config(directory, **change)
    with pytest.raises(MegarlError, match=r"config.json: .* not supported"):
        family_of(directory)


def test_missing_and_extra_tensors_in_one_message(one_rank: None, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.9.x"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        MegarlError, match=r"missing 1 tensors \(model.layers.0.mlp.up_proj.weight\); .*\(model.layers.9.x\)"
    ):
        hf.load(build.build(Model(dtype="fp32"), directory), family_of(directory), directory)


def test_wrong_shapes(one_rank: None, directory: Path) -> None:
    edit_config(directory, intermediate_size=80)
    with pytest.raises(MegarlError, match=r"do not have the shapes config.json says"):
        hf.load(build.build(Model(dtype="fp32"), directory), family_of(directory), directory)


def test_cut_off_weights(one_rank: None, directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(MegarlError, match="unreadable or incomplete"):
        hf.load(build.build(Model(dtype="fp32"), directory), family_of(directory), directory)


def test_layout_that_does_not_fit_the_ranks() -> None:
    with pytest.raises(MegarlError, match=r"1 ranks do not divide into copies of the model of 2 ranks"):
        parallel.start(Model(tensor_parallel=2), seed=0, timeout_s=5)


def test_model_that_does_not_divide(one_rank: None, directory: Path) -> None:
    with pytest.raises(MegarlError, match=r"model.tensor_parallel: num_attention_heads=8 .* does not divide by 3"):
        build.build(Model(path="m", tensor_parallel=3), directory)


def test_save_refuses_what_exists_and_cleans_up_when_it_fails(one_rank: None, directory: Path) -> None:
    family, chunks = family_of(directory), build.build(Model(dtype="fp32"), directory)
    hf.load(chunks, family, directory)
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(MegarlError, match="exists already"):
        hf.save(chunks, family, directory, directory)
    with files_no_larger_than(20_000), pytest.raises(MegarlError):
        hf.save(chunks, family, directory, directory.parent / "copy")
    assert sorted(directory.parent.rglob("*")) == before


def test_checkpoint_cleans_up_when_it_fails(one_rank: None, directory: Path) -> None:
    chunks = build.build(Model(dtype="fp32"), directory)
    hf.load(chunks, family_of(directory), directory)
    meta = checkpoint.Meta(step=1, version=1, hf_source=str(directory), model=Model().model_dump())
    before = sorted(directory.parent.rglob("*"))
    with files_no_larger_than(20_000), pytest.raises(MegarlError, match="step-1: the checkpoint could not be written"):
        checkpoint.save(directory.parent / "step-1", checkpoint.model_state(chunks), meta)
    assert sorted(directory.parent.rglob("*")) == before
