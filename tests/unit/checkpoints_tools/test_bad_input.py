"""Bad input, full disks, kills: one message that says what and where, exit status 2,
and nothing half-written left.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools import convert, partial
from checkpoints_tools.__main__ import main
from checkpoints_tools.layout import Parallelism
from checkpoints_tools.partial import PROGRESS, Partial, writing
from checkpoints_tools.safetensors_files import Directory
from megarl.core.base.errors import MegarlError
from megarl.core.models import checkpoint
from tests import make
from tests.damage import flip_a_bit
from tests.full_disk import files_no_larger_than
from tests.tiny import tiny_llama, tiny_qwen3_moe

# isort: split
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "hf", torch.bfloat16)
    return tmp_path / "hf"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Its message."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("checkpoints_tools: ")
    assert (
        len(
            [
                line
                for line in message.splitlines()
                if "checkpoints_tools" in line or "Error" in line
            ]
        )
        == 1
    )
    return message


def nothing_left(folder: Path) -> bool:
    return not any("out" in path.name for path in folder.iterdir())


def test_unsupported_architecture(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make.edit_config(directory, architectures=["GPT2LMHeadModel"])
    message = refused(capsys, "convert", "hf-to-megatron", directory, tmp_path / "out")
    assert "GPT2LMHeadModel is not supported; supported: " in message
    assert nothing_left(tmp_path)


def test_config_that_contradicts_the_tensors(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make.edit_config(directory, intermediate_size=80)
    message = refused(capsys, "convert", "hf-to-megatron", directory, tmp_path / "out")
    assert "do not have the shapes config.json says" in message
    assert "model.layers.0.mlp.gate_proj.weight [96, 64] instead of [80, 64]" in message
    assert "(12 in all)" in message
    assert nothing_left(tmp_path)


def test_missing_and_extra_tensors_in_one_message(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.9.x"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors")
    message = refused(capsys, "convert", "hf-to-megatron", directory, tmp_path / "out")
    assert "missing 1 tensor (model.layers.0.mlp.up_proj.weight)" in message
    assert "(model.layers.9.x)" in message
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("kept", [4, 100, 20_000, -1])
def test_cut_off_safetensors(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    message = refused(capsys, "convert", "hf-to-megatron", directory, tmp_path / "out")
    assert "model.safetensors: weights unreadable or incomplete" in message
    assert nothing_left(tmp_path)


def test_file_of_the_index_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(tmp_path / "made").save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    next((tmp_path / "hf").glob("model-00002*")).unlink()
    message = refused(capsys, "convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "out")
    assert "files of weights are missing: model-00002-of-" in message


def test_layout_that_does_not_divide_the_model(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for layout, what in (
        (["--tp", "3"], "num_attention_heads=8"),
        (["--pp", "3"], "num_layers=4"),
        (["--ep", "2"], "no experts"),
    ):
        assert what in refused(
            capsys, "convert", "hf-to-megatron", directory, tmp_path / "out", *layout
        )
    tiny_qwen3_moe(tmp_path / "moe")
    message = refused(
        capsys, "convert", "hf-to-megatron", tmp_path / "moe", tmp_path / "out", "--ep", "3"
    )
    assert "num_moe_experts=4" in message
    assert nothing_left(tmp_path)


def test_destination_that_exists(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["convert", "hf-to-megatron", str(directory), str(tmp_path / "step")])
    for command in (
        ("convert", "hf-to-megatron", directory),
        ("convert", "megatron-to-hf", tmp_path / "step"),
        ("reshard", tmp_path / "step"),
    ):
        assert "exists already" in refused(capsys, *command, directory)


def test_source_that_is_no_checkpoint(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for command in (("convert", "megatron-to-hf"), ("reshard",)):
        assert "no such directory" in refused(
            capsys, *command, tmp_path / "nowhere", tmp_path / "out"
        )
        assert "no complete checkpoint there" in refused(
            capsys, *command, tmp_path / "empty", tmp_path / "out"
        )
    assert "already" in refused(capsys, "convert", "megatron-to-hf", directory, tmp_path / "out")
    assert "has no shards" in refused(capsys, "reshard", directory, tmp_path / "out")
    assert "no config.json" in refused(
        capsys, "convert", "hf-to-megatron", tmp_path / "empty", tmp_path / "out"
    )
    assert nothing_left(tmp_path)


DAMAGES = ["no marker", "cut off", "no file", "no metadata", "other description", "another model"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    step = tmp_path / "step"
    main(["convert", "hf-to-megatron", str(directory), str(step)])
    expected = "__0_0.distcp: "
    match damage:
        case "no marker":
            (step / checkpoint.META).unlink()
            expected = "no complete checkpoint there"
        case "cut off":
            (step / "__0_0.distcp").write_bytes((step / "__0_0.distcp").read_bytes()[:-1])
        case "no file":
            (step / "__0_0.distcp").unlink()
        case "no metadata":
            (step / ".metadata").write_bytes(b"junk")
            expected = ".metadata: its checksum is "
        case "other description":
            make.edit_config(step / "hf", num_hidden_layers=6)
            expected = "config.json: its checksum is "
        case "another model":
            make.edit_config(step / "hf", num_hidden_layers=6, intermediate_size=80)
            meta = checkpoint.read_meta(step)
            unchanged = {
                name: value for name, value in meta.files.items() if not name.startswith("hf/")
            }
            checkpoint.seal(step, meta, unchanged)
            expected = "decoder.layers.mlp.linear_fc2.weight is [4, 64, 96] instead of [6, 64, 80]"
    for command in (("convert", "megatron-to-hf"), ("reshard",)):
        message = refused(capsys, *command, step, tmp_path / "out")
        assert expected in message
        assert str(step) in message
    assert nothing_left(tmp_path)


def test_values_that_are_no_tensor(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is as long as it should be, what is in it is not."""
    step = tmp_path / "step"
    main(["convert", "hf-to-megatron", str(directory), str(step)])
    (step / "__0_0.distcp").write_bytes(bytes((step / "__0_0.distcp").stat().st_size))
    message = refused(capsys, "convert", "megatron-to-hf", step, tmp_path / "out")
    assert "__0_0.distcp: " in message
    assert "is unreadable" in message
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("tool", ["megatron-to-hf", "reshard", "verify"])
def test_a_bit_that_is_not_as_it_was_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    """In the values of a tensor, which torch reads without a look at their CRC."""
    step = tmp_path / "step"
    out = tmp_path / "out"
    main(["convert", "hf-to-megatron", str(directory), str(step)])
    norm = load_file(directory / "model.safetensors")["model.norm.weight"]
    flip_a_bit(step / "__0_0.distcp", within=norm.view(torch.uint8).numpy().tobytes())
    commands = {
        "megatron-to-hf": ("convert", "megatron-to-hf", step, out),
        "reshard": ("reshard", step, out, "--tp", "2"),
        "verify": ("verify", step, directory),
    }
    message = refused(capsys, *commands[tool])
    assert (
        "__0_0.distcp: decoder.final_layernorm.weight has changed since it was written" in message
    )
    assert nothing_left(tmp_path)


def test_a_disk_that_fills(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["convert", "hf-to-megatron", str(directory), str(tmp_path / "step")])
    for command in (
        ("convert", "hf-to-megatron", directory),
        ("convert", "megatron-to-hf", tmp_path / "step"),
        ("reshard", tmp_path / "step"),
    ):
        for size in (50_000, 1000, 0):
            with files_no_larger_than(size):
                message = refused(capsys, *command, tmp_path / "out")
            assert "out: could not be written (is the disk full?): File too large" in message
            assert nothing_left(tmp_path)


def test_an_error_waits_for_the_second_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a file that this renames meanwhile would stay, and with it the directory."""
    settle = partial._settle
    remove = shutil.rmtree
    there = list[list[str]]()

    def settle_late(path: Path) -> None:
        time.sleep(0.3)
        settle(path)

    def remove_seen(path: Path, **how: Any) -> None:
        there.append(sorted(file.name for file in path.iterdir()))
        remove(path, **how)

    monkeypatch.setattr(partial, "_settle", settle_late)
    monkeypatch.setattr(shutil, "rmtree", remove_seen)

    def fail() -> None:
        with partial.writing(tmp_path / "out", {}) as directory:
            directory.unfinished("a").write_bytes(b"1")
            directory.finish("a", None)
            raise OSError("no room")

    with pytest.raises(MegarlError, match="is the disk full"):
        fail()
    assert there == [["a", PROGRESS]]
    assert nothing_left(tmp_path)


def test_a_place_that_cannot_be_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(
        capsys, "convert", "hf-to-megatron", directory, tmp_path / "file" / "out"
    )


def test_a_note_that_a_kill_cut_off_spoils_no_later_one(tmp_path: Path) -> None:
    """It would, if the next one were written behind it on the same line."""
    same = {"command": "x"}
    folder = tmp_path / ".out.partial"
    folder.mkdir()
    (folder / PROGRESS).write_text(json.dumps(same) + '\n{"file": "a.safeten')
    with suppress(KeyboardInterrupt), writing(tmp_path / "out", same) as begun:
        begun.unfinished("b").write_bytes(b"weights")
        begun.finish("b", 1)
        begun.flush()
        raise KeyboardInterrupt
    identity, note = map(json.loads, (folder / PROGRESS).read_text().splitlines())
    assert (identity, note) == (same, {"file": "b", "bytes": 7, "note": 1})


DIES = """
import os, signal, sys
from pathlib import Path
from checkpoints_tools import convert, partial
from checkpoints_tools.layout import Parallelism
after, finish = int(sys.argv[1]), partial.Partial._finish
def dies(self, name, note):
    if len(self.finished) == after:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self, name, note)
partial.Partial._finish = dies
"""
COMMANDS = {
    "hf-to-megatron": (
        "convert.hf_to_megatron(Path('hf'), Path('out'), Parallelism(2, 2), file_bytes=200_000)"
    ),
    "megatron-to-hf": "convert.megatron_to_hf(Path('step'), Path('out'), file_bytes=50_000)",
    "reshard": "convert.reshard(Path('step'), Path('out'), Parallelism(1, 4), file_bytes=200_000)",
}


@pytest.mark.processes
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_conversion_goes_on(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It writes no file twice, and ends with what an undisturbed one writes."""
    monkeypatch.chdir(tmp_path)
    convert.hf_to_megatron(Path("hf"), Path("step"), Parallelism(2))
    code = DIES + COMMANDS[command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    died = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "3"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not Path("out").exists()
    lines = Path(".out.partial", PROGRESS).read_text().splitlines()
    kept = {
        row["file"]: Path(".out.partial", row["file"]).stat().st_mtime_ns
        for row in map(json.loads, lines[1:])
    }
    assert len(kept) == 3
    exec(COMMANDS[command], {"convert": convert, "Path": Path, "Parallelism": Parallelism})
    assert {name: Path("out", name).stat().st_mtime_ns for name in kept} == kept
    assert not Path(".out.partial").exists()
    assert not Path("out", PROGRESS).exists()

    Path("out").rename("resumed")
    exec(COMMANDS[command], {"convert": convert, "Path": Path, "Parallelism": Parallelism})
    in_any_order = {".metadata", checkpoint.META}
    written, resumed = (
        {
            p.name: p.read_bytes()
            for p in Path(folder).iterdir()
            if p.is_file() and p.name not in in_any_order
        }
        for folder in ("out", "resumed")
    )
    assert written == resumed
    if command != "megatron-to-hf":
        convert.megatron_to_hf(Path("resumed"), Path("back"))
    else:
        Path("resumed").rename("back")
    source = Directory(directory)
    back = Directory(Path("back"))
    assert all(torch.equal(source[name], back[name]) for name in source)


def test_another_source_or_layout_begins_anew(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stopped conversion left is used only by the same conversion of the same
    files.
    """
    finish = Partial.finish

    def stopped(self: Partial, name: str, note: object) -> None:
        finish(self, name, note)
        self.flush()
        raise KeyboardInterrupt

    for change in ("layout", "source"):
        with monkeypatch.context() as patch:
            patch.setattr(Partial, "finish", stopped)
            assert main(["convert", "hf-to-megatron", str(directory), str(tmp_path / "out")]) == 2
        partial = tmp_path / ".out.partial"
        (partial / "stale").write_text("")
        if change == "source":
            save_file(load_file(directory / "model.safetensors"), directory / "model.safetensors")
        layout = Parallelism(2) if change == "layout" else Parallelism()
        convert.hf_to_megatron(directory, tmp_path / "out", layout)
        assert not partial.exists()
        assert not (tmp_path / "out" / "stale").exists()
        (tmp_path / "out").rename(tmp_path / change)


def test_two_conversions_to_one_place(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(self: Partial, name: str, note: object) -> None:
        convert.hf_to_megatron(directory, tmp_path / "out", Parallelism())

    monkeypatch.setattr(Partial, "finish", second)
    with pytest.raises(MegarlError, match="another conversion is writing there"):
        convert.hf_to_megatron(directory, tmp_path / "out", Parallelism())
