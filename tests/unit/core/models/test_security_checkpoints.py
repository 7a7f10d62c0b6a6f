"""Checkpoints that want to run something when they are read: nothing runs, and the
message says so.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from checkpoints_tools.__main__ import main
from megarl.core.base.errors import MegarlError
from megarl.core.models import build, checkpoint, family_of, hf, parallel
from megarl.core.models.checkpoint import FORCE, METADATA, CheckpointMeta, checksums
from megarl.core.recipe import from_tree
from tests.tiny import tiny_llama


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


@pytest.fixture
def chunks(tmp_path: Path) -> Iterator[list[Any]]:
    tiny_llama(tmp_path / "hf")
    model = from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "fp32"}}).model
    parallel.start(model, seed=0, timeout_s=60)
    made = build.build(model, tmp_path / "hf")
    hf.load(made, family_of(tmp_path / "hf"), tmp_path / "hf")
    yield made
    parallel.stop()


@pytest.fixture
def saved(tmp_path: Path, chunks: list[Any]) -> Path:
    """A sound checkpoint of the weights, and of an object beside them."""
    path = tmp_path / "step-0000001"
    meta = CheckpointMeta(
        step=1, version=1, hf_source=str(tmp_path / "hf"), model={"dtype": "fp32"}
    )
    checkpoint.save(path, checkpoint.model_state(chunks) | {"more": {"step": 1}}, meta)
    return path


def objects(path: Path) -> list[Any]:
    """Where what is no tensor lies, by torch's own reader."""
    places = FileSystemReader(path).read_metadata().storage_data
    return [info for index, info in places.items() if "common_state" in index.fqn]


def attacked(place: Callable[[Path, Attack], object], path: Path, mark: Path) -> None:
    """With checksums that fit: they are made against accidents, and keep nobody out."""
    place(path, Attack(mark))
    meta = checkpoint.read_meta(path)
    (path / checkpoint.META).unlink()
    checkpoint.seal(path, meta, checksums(path))


def in_metadata(path: Path, attack: Attack) -> None:
    (path / METADATA).write_bytes(pickle.dumps(attack))


def within_metadata(path: Path, attack: Attack) -> None:
    metadata = FileSystemReader(path).read_metadata()
    metadata.planner_data = attack
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def in_object(path: Path, attack: Attack) -> None:
    """In place of the object that megatron reads first; the file's other contents stay
    where they are.
    """
    (info,) = objects(path)
    data = io.BytesIO()
    torch.save([attack], data)
    file = path / info.relative_path
    whole = file.read_bytes()
    metadata = FileSystemReader(path).read_metadata()
    for index, place in metadata.storage_data.items():
        if "common_state" in index.fqn:
            place.offset, place.length = len(whole), len(data.getvalue())
    file.write_bytes(whole + data.getvalue())
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def in_tensor(path: Path, attack: Attack) -> None:
    metadata = FileSystemReader(path).read_metadata()
    place = next(p for i, p in metadata.storage_data.items() if i.offset is not None)
    data = io.BytesIO()
    torch.save(attack, data)
    file = path / place.relative_path
    place.offset, place.length = file.stat().st_size, len(data.getvalue())
    with file.open("ab") as stream:
        stream.write(data.getvalue())
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def in_common(path: Path, attack: Attack) -> None:
    """The file that older versions of megatron read first."""
    torch.save({"a": attack}, path / "common.pt")


@pytest.mark.parametrize("place", [in_metadata, within_metadata, in_object, in_tensor, in_common])
def test_a_checkpoint_runs_nothing(
    place: Callable[[Path, Attack], None], saved: Path, chunks: list[Any], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    attacked(place, saved, mark)
    with pytest.raises(MegarlError, match="step-0000001"):
        checkpoint.load_model(saved, chunks)
    assert not mark.exists()


@pytest.mark.parametrize("place", [in_metadata, within_metadata, in_object])
def test_the_attacks_are_real(
    place: Callable[[Path, Attack], None],
    saved: Path,
    chunks: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing guards, each of them makes its file (the others, torch guards
    against by itself).
    """
    monkeypatch.setattr(checkpoint, "safely", nullcontext)
    mark = tmp_path / "mark"
    attacked(place, saved, mark)
    with suppress(MegarlError):
        checkpoint.load_model(saved, chunks)
    assert mark.exists()


@pytest.mark.parametrize("place", [in_metadata, within_metadata, in_tensor])
def test_nor_do_the_tools_run_it(
    place: Callable[[Path, Attack], None],
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mark = tmp_path / "mark"
    attacked(place, saved, mark)
    parallel.stop()  # the tools have their own
    for command in (["inspect", saved], ["convert", "megatron-to-hf", saved, tmp_path / "out"]):
        main([str(word) for word in command])
    assert not mark.exists()
    said = capsys.readouterr().err
    assert said.startswith("checkpoints_tools: ")
    assert "step-0000001" in said


def test_the_message_names_what_it_wanted(saved: Path, chunks: list[Any], tmp_path: Path) -> None:
    attacked(in_metadata, saved, tmp_path / "mark")
    with pytest.raises(
        MegarlError, match=r"\.metadata: .* wants to load _?io\.open, .* do not trust"
    ):
        checkpoint.load_model(saved, chunks)


def test_what_a_load_asks_for_is_overruled_only_within_it(
    saved: Path, chunks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORCE, raising=False)
    checkpoint.load_model(saved, chunks)
    assert FORCE not in os.environ


def with_slot_state(path: Path) -> None:
    """GLOBAL, state, BUILD: `Metadata` itself gets the state."""
    state = pickle.dumps((None, {"mark": True}), protocol=2)[2:-1]
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (path / METADATA).write_bytes(b"\x80\x02" + name + state + b"b.")


def outside(path: Path, to: str) -> None:
    """A shard in a file that no checksum covers."""
    metadata = FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = to
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def no_sizes(path: Path) -> None:
    metadata = FileSystemReader(path).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        entry.chunks = [None]
    (path / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (with_slot_state, r"\.metadata: unreadable: it changes .*Metadata"),
        (lambda path: outside(path, "/etc/hostname"), r"'/etc/hostname', which has no checksum"),
        (lambda path: outside(path, "../step-9/__0_0.distcp"), r"which has no checksum"),
        (no_sizes, r"\.metadata: unreadable"),
    ],
)
def test_metadata_that_is_not_what_torch_writes(
    attack: Callable[[Path], object],
    says: str,
    saved: Path,
    chunks: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attacked(lambda path, _: attack(path), saved, tmp_path / "mark")
    with pytest.raises(MegarlError, match=says):
        checkpoint.load_model(saved, chunks)
    assert not hasattr(Metadata, "mark")
    parallel.stop()
    assert main(["inspect", str(saved)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_link_to_a_users_file_is_not_exported(
    saved: Path, chunks: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel.stop()
    (tmp_path / "key").write_text("secret")
    (saved / "hf" / "NOTES.md").symlink_to(tmp_path / "key")
    assert main(["convert", "megatron-to-hf", str(saved), str(tmp_path / "out")]) == 2
    assert "NOTES.md: a link to" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["../../proc/kmsg", "/dev/zero"])
def test_a_checkpoint_that_names_files_outside(name: str, saved: Path, chunks: list[Any]) -> None:
    meta = checkpoint.read_meta(saved)
    checkpoint.seal(saved, meta, meta.files | {name: 0})
    with pytest.raises(
        MegarlError, match=r"megarl\.json: '.*' is not the name of a file in the checkpoint"
    ):
        checkpoint.load_model(saved, chunks)
