"""Reads and writes megatron's torch_dist checkpoints, shard by shard, without a process
group.

    .metadata         torch.distributed.checkpoint.metadata.Metadata: the shards of
                      every tensor, and where each lies
    __RANK_N.distcp   shards one after another, each as written by torch.save

Reading finds the values of a shard within its file, checks them against the CRC in
torch's archive, and maps them. Writing appends shards and records them, and in the end
makes .metadata from the records.
"""

import io
import json
import math
import mmap
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast
from zipfile import ZipFile

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from checkpoints_tools.layout import StoredPart
from checkpoints_tools.partial import Partial
from megarl.core.base.errors import MegarlError
from megarl.core.models.checkpoint import CRITIC, METADATA, safely
from megarl.core.models.region import Region, Shape

COMMON = "common_state/shard_0_1"  # where megatron puts everything except tensors; it must be there
OPTIMIZER = "optimizer."
DISTCP = ".distcp"
ALIGNMENT = 64  # of archives; torch aligns the values within them, so that they can be mapped
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True)
class StoredTensor(Shape):
    """A tensor in a checkpoint: its shape and type,
    and its shards as boxes within it.
    """

    boxes: tuple[Box, ...]


class Shards:
    """The policy's tensors in a checkpoint directory, by megatron's names, and its
    other objects as stored bytes. MegarlError if the directory is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with safely(path):
            metadata = FileSystemReader(path).read_metadata()
        self.tensors: dict[str, StoredTensor] = {
            key: _stored_tensor(entry)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(CRITIC)
        }
        self._places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._fake = FakeTensorMode()
        self._checked: set[tuple[str, int]] = set()  # archives, by file and offset
        self._check_sizes()

    def objects(self) -> dict[str, bytes]:
        """Return the stored bytes of everything except tensors, by name."""
        objects = {}
        for index, info in self._places.items():
            if index.fqn not in self.tensors and not index.fqn.startswith(CRITIC):
                self._check(index.fqn, info)
                with (self.path / info.relative_path).open("rb") as file:
                    file.seek(info.offset)
                    objects[index.fqn] = file.read(info.length)
        return objects

    def read(self, key: str, box: Box) -> Tensor:
        """Return the values in a box: a view if the box is a shard, else a copy from
        several, with zeros beyond the tensor's end. MegarlError if the stored values
        are damaged or incomplete.
        """
        stored = self.tensors[key]
        offsets, sizes = box
        if box in stored.boxes:
            return self._shard(key, box)
        values = torch.zeros(sizes, dtype=stored.dtype)
        count = 0  # of values that are stored
        for shard in stored.boxes:
            start, lengths = _overlap(box, shard)
            if min(lengths, default=1) > 0:  # a scalar, without dimensions, overlaps itself
                shard_offsets, _ = shard
                in_shard = _slices(start, shard_offsets, lengths)
                in_box = _slices(start, offsets, lengths)
                values[in_box] = self._shard(key, shard)[in_shard]
                count += math.prod(lengths)
        whole_tensor = (0,) * len(stored.shape), stored.shape
        _, lengths = _overlap(box, whole_tensor)
        expected = math.prod(max(0, length) for length in lengths)
        if count != expected:
            raise MegarlError(
                f"{self.path}: {count} of {expected} values of {key} at {offsets} are stored"
            )
        return values

    def _shard(self, key: str, box: Box) -> Tensor:
        """Return the values of a shard, a memory map of its file. MegarlError if they
        are damaged, or of another shape than .metadata says. Where the values lie in
        the archive, torch says while it loads a tensor without data (`_fake`).
        """
        offsets, sizes = box
        info = self._places[MetadataIndex(key, offsets)]
        path = self.path / info.relative_path
        try:
            with path.open("rb") as file, self._fake:
                fake = torch.load(
                    _create_file_view(file, info.offset, info.length), weights_only=True
                )
        except Exception as error:  # a damaged archive can fail in any way
            raise MegarlError(f"{path}: {key} is unreadable: {error}") from None
        self._check(key, info)
        if tuple(fake.shape) != sizes or not fake.is_contiguous() or fake.storage_offset():
            raise MegarlError(
                f"{path}: {key} is stored as {tuple(fake.shape)} {fake.stride()} instead of {sizes}"
            )
        values_offset = info.offset + fake.untyped_storage()._checkpoint_offset
        return Region(sizes, fake.dtype, path, values_offset).tensor()

    def _check(self, key: str, info: _StorageInfo) -> None:
        """Check an archive against its CRCs, which torch writes but does not read. An
        archive is checked only once.
        """
        place = (info.relative_path, info.offset)
        if place in self._checked:
            return
        path = self.path / info.relative_path
        # A map must begin at a page. What precedes the archive does not matter, since
        # zipfile locates it from its end.
        start = info.offset - info.offset % mmap.ALLOCATIONGRANULARITY
        length = info.offset + info.length - start
        try:
            with (
                path.open("rb") as file,
                _Mapped(file.fileno(), length, offset=start, access=mmap.ACCESS_READ) as part,
                ZipFile(cast(BinaryIO, part)) as archive,
            ):
                damaged = archive.testzip()
        except Exception as error:  # a damaged archive can fail in any way
            raise MegarlError(f"{path}: {key} is unreadable: {error}") from None
        if damaged:
            fault = f"{key} has changed since it was written ({damaged})"
            raise MegarlError(f"{path}: {fault}; the checkpoint is damaged, use another")
        self._checked.add(place)

    def _check_sizes(self) -> None:
        """Raise MegarlError if a file is shorter than .metadata says, or missing."""
        ends: dict[str, int] = {}
        for info in self._places.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
        for name, end in sorted(ends.items()):
            file = self.path / name
            size = file.stat().st_size if file.is_file() else 0
            if size < end:
                raise MegarlError(
                    f"{file}: has only {size} of {end} bytes; the checkpoint is damaged, use"
                    " another"
                )


class _Mapped(mmap.mmap):
    """A mapped part of a file, usable as a file."""

    def seekable(self) -> bool:
        """Return True, as mmap itself does from Python 3.13 on; zipfile calls this."""
        return True


class WrittenPiece(msgspec.Struct, array_like=True):
    """Bytes [start, end) of a file: a shard, or another object if `shard` is None."""

    key: str
    start: int
    end: int
    shard: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str] | None = None
    """The shard's offsets and sizes, the shape of the whole tensor, and the dtype."""


class Writer:
    """Writes shards into files of a directory. parts: the number of parts that each
    file will get.
    """

    def __init__(self, partial: Partial, parts: Mapping[str, int]) -> None:
        self.partial = partial
        self._left = dict(parts)
        self._open: dict[str, tuple[io.BufferedWriter, list[WrittenPiece]]] = {}

    def write(
        self, file: str, tensors: Iterable[tuple[str, Sequence[int], Sequence[int], Tensor]]
    ) -> None:
        """Write one part. tensors: for each shard its key, its offsets, the shape of
        the whole tensor, and its values.
        """
        stream, entries = self._opened(file)
        for key, offsets, tensor_shape, value in tensors:
            stream.write(bytes(-stream.tell() % ALIGNMENT))
            start = stream.tell()
            _save(value, stream)
            shard = (
                tuple(offsets),
                tuple(value.shape),
                tuple(tensor_shape),
                str(value.dtype).removeprefix("torch."),
            )
            entries.append(WrittenPiece(key, start, stream.tell(), shard))
            self.partial.wrote(file, stream.tell() - start)
        self._part_done(file)

    def write_objects(self, file: str, objects: Mapping[str, bytes]) -> None:
        """Write one part that has no tensors."""
        stream, entries = self._opened(file)
        for key, data in objects.items():
            entries.append(WrittenPiece(key, stream.tell(), stream.tell() + len(data)))
            stream.write(data)
            self.partial.wrote(file, len(data))
        self._part_done(file)

    def close(self) -> None:
        """Close all open files, even if they are incomplete."""
        for stream, _ in self._open.values():
            with suppress(OSError):  # on a full disk, the buffer cannot be written either
                stream.close()

    def complete(self) -> None:
        """Write .metadata and metadata.json for all that this process, and killed ones
        before it, have written. The notes on finished files (partial.py) say where each
        piece lies.
        """
        self.partial.flush()
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for file, note in self.partial.finished.items():
            for entry in msgspec.convert(note, list[WrittenPiece]):
                info = _StorageInfo(
                    relative_path=file, offset=entry.start, length=entry.end - entry.start
                )
                if entry.shard is None:
                    tensors[entry.key] = BytesStorageMetadata()
                    places[MetadataIndex(entry.key)] = info
                    continue
                offsets, sizes, tensor_shape, dtype = entry.shard
                properties = TensorProperties(dtype=getattr(torch, dtype))
                tensor = tensors.setdefault(
                    entry.key, TensorStorageMetadata(properties, torch.Size(tensor_shape), [])
                )
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(entry.key, offsets)] = info
        metadata = Metadata(
            tensors, planner_data=None, storage_data=places, storage_meta=StorageMeta()
        )
        _write(self.partial.path / METADATA, pickle.dumps(metadata))
        version = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        _write(self.partial.path / "metadata.json", json.dumps(version).encode())

    def _opened(self, file: str) -> tuple[io.BufferedWriter, list[WrittenPiece]]:
        """Return the stream of an unfinished file, and the pieces written to it."""
        if file not in self._open:
            self._open[file] = self.partial.unfinished(file).open("wb"), []
        return self._open[file]

    def _part_done(self, file: str) -> None:
        """Count a part; finish the file if that was its last."""
        self._left[file] -= 1
        if not self._left[file]:
            stream, entries = self._open.pop(file)
            stream.close()
            self.partial.finish(file, msgspec.to_builtins(entries))


def plan_files(parts: Iterable[StoredPart], copies: int, limit: int) -> list[str]:
    """Return the name of each part's file. A rank's parts fill its files in turn; a new
    one begins when the last has `limit` bytes. copies: how many tensors of a part's
    size are written for it.
    """
    number: Counter[int] = Counter()  # of each rank's last file
    filled: Counter[int] = Counter()  # bytes of that file
    files = []
    for part in parts:
        if filled[part.rank] >= limit:
            number[part.rank] += 1
            filled[part.rank] = 0
        filled[part.rank] += part.nbytes * copies
        files.append(f"__{part.rank}_{number[part.rank]}.distcp")
    return files


def no_objects() -> dict[str, bytes]:
    """Return the objects of a checkpoint that has only weights."""
    data = io.BytesIO()
    torch.save([{}], data)
    return {COMMON: data.getvalue()}


def _stored_tensor(entry: TensorStorageMetadata) -> StoredTensor:
    """Return a tensor as torch's metadata describe it."""
    boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
    return StoredTensor(tuple(entry.size), entry.properties.dtype, boxes)


def _save(value: Tensor, stream: io.BufferedWriter) -> None:
    """Write a tensor as torch.save does. OSError if the stream cannot be written."""
    # torch.save writes the whole storage behind a view, so the same memory is wrapped
    # in a storage of its own.
    value_bytes = torch.from_numpy(value.reshape(-1).view(torch.uint8).numpy())
    wrapped = value_bytes.view(value.dtype).view(value.shape)
    try:
        torch.save(wrapped, stream)
    except RuntimeError as error:
        # After an OSError torch complains that its archive ends too early.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _overlap(a: Box, b: Box) -> tuple[list[int], list[int]]:
    """Return where the overlap of two boxes begins, and its length, in each dimension;
    a length of 0 or less if they do not overlap.
    """
    starts = []
    lengths = []
    for a_start, a_size, b_start, b_size in zip(*a, *b, strict=True):
        start = max(a_start, b_start)
        end = min(a_start + a_size, b_start + b_size)
        starts.append(start)
        lengths.append(end - start)
    return starts, lengths


def _slices(
    start: Sequence[int], origin: Sequence[int], lengths: Sequence[int]
) -> tuple[slice, ...]:
    """Return the slices of an array that begins at `origin` for the box at `start`."""
    slices = []
    for first, offset, length in zip(start, origin, lengths, strict=True):
        slices.append(slice(first - offset, first - offset + length))
    return tuple(slices)


def _write(path: Path, data: bytes) -> None:
    """Write a file, and put it on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
