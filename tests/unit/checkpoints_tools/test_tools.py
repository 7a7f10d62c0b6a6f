"""convert, verify and inspect on real checkpoints of one rank."""

import json
from pathlib import Path

import pytest
import torch

from checkpoints_tools.__main__ import main
from megarl.models import build, checkpoint, family_of, hf, parallel
from megarl.recipe import Model
from tests.tiny import tiny_llama

# isort: split
from safetensors.torch import load_file, save_file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """bf16, tied, a vocabulary of odd size, and something that stands for a tokenizer."""
    tiny_llama(tmp_path / "hf", torch.bfloat16, num_hidden_layers=2, tie_word_embeddings=True, vocab_size=131)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def test_round_trip_keeps_every_bit(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, back = tmp_path / "run" / "checkpoints" / "step-0000000", tmp_path / "back"
    assert main(["convert", "hf-to-megatron", str(directory), str(step)]) == 0
    assert main(["convert", "megatron-to-hf", str(tmp_path / "run"), str(back)]) == 0
    stored, again = load_file(directory / "model.safetensors"), load_file(back / "model.safetensors")
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    assert (back / "tokenizer.json").read_text() == "{}"
    config, source = (json.loads((d / "config.json").read_text()) for d in (back, directory))
    assert config == source
    capsys.readouterr()
    assert main(["verify", str(directory), str(step)]) == 0
    assert "equal: 20 tensors" in capsys.readouterr().out


def test_verify_names_what_differs(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(directory / "model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((directory / "config.json").read_text())
    tensors["model.norm.weight"][3] += 0.5
    tensors["x"] = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, other / "model.safetensors")
    assert main(["verify", str(directory), str(other)]) == 1
    out = capsys.readouterr().out
    assert "model.norm.weight: 1 of 64 values differ, by " in out
    assert "model.layers.0.input_layernorm.weight: only in the first" in out
    assert "x: only in the second" in out


def test_latest_complete_checkpoint_is_taken_and_old_ones_pruned(directory: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    model = Model(dtype="bf16")
    parallel.start(model, seed=0, timeout_s=60)
    chunks = build.build(model, directory)
    hf.load(chunks, family_of(directory), directory)
    for step in (1, 2, 3):
        meta = checkpoint.Meta(step=step, version=step, hf_source=str(directory), model=model.model_dump())
        checkpoint.save(checkpoint.folder(checkpoints, step), checkpoint.model_state(chunks), meta)
    parallel.stop()
    (checkpoint.folder(checkpoints, 3) / checkpoint.META).unlink()  # as if it had never been finished
    assert checkpoint.find(tmp_path / "run") == checkpoint.folder(checkpoints, 2)
    (checkpoints / ".step-0000004.partial").mkdir()
    checkpoint.prune(checkpoints, keep=1)
    assert [p.name for p in checkpoints.iterdir()] == ["step-0000002"]


def test_inspect(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "hf-to-megatron", str(directory), str(tmp_path / "step")])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "step")]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "optimiser     none" in out
    sizes = []
    for path in (tmp_path / "step", directory):
        main(["inspect", str(path), "--tensors"])
        lines = capsys.readouterr().out.splitlines()
        sizes.append(next(line.split(",", 1)[1] for line in lines if "weights  " in line))
    assert sizes[0] == sizes[1]  # the same count of values; Megatron has fewer tensors of more values


@pytest.mark.parametrize("damage", ["no directory", "no marker", "cut off", "not a checkpoint"])
def test_unreadable_checkpoints_are_one_message_and_leave_nothing(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    step = tmp_path / "step"
    main(["convert", "hf-to-megatron", str(directory), str(step)])
    match damage:
        case "no directory":
            step = tmp_path / "nowhere"
        case "no marker":
            (step / checkpoint.META).unlink()
        case "cut off":
            for path in step.glob("*.distcp"):
                path.write_bytes(path.read_bytes()[:5000])
        case "not a checkpoint":
            (step / ".metadata").write_bytes(b"junk")
    capsys.readouterr()
    assert main(["convert", "megatron-to-hf", str(step), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert str(step) in error
    assert "Traceback" not in error
    assert not any(p.name.startswith((".out", "out")) for p in tmp_path.iterdir())


def test_destination_that_exists_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "hf-to-megatron", str(directory), str(directory)]) == 2
    assert "exists already" in capsys.readouterr().err
