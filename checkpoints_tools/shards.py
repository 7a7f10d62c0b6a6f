"""megatron's torch_dist checkpoints, shard by shard, without a process group.

    .metadata           torch.distributed.checkpoint.Metadata: the shards of every tensor, and where each lies
    __RANK_N.distcp     shards one after another, each as torch.save wrote it

Reading finds the values of a shard within its file, checks them against the CRC in torch's archive, and maps them; writing
appends, and makes .metadata of what was noted.
"""

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

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

from checkpoints_tools.partial import Partial
from checkpoints_tools.region import Region
from megarl.core.base.errors import MegarlError
from megarl.core.models.checkpoint import CRITIC, METADATA, safely

COMMON = "common_state/shard_0_1"  # where megatron puts what is no tensor; it must be there
OPTIMIZER = "optimizer."
DISTCP = ".distcp"
ALIGNMENT = 64  # of torch's archives, within which values are so aligned: then they can be mapped
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its shape, and its shards as boxes within it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shards:
    """The policy's tensors of a checkpoint directory by megatron's name, and its objects as the bytes they are stored as."""

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = _read_metadata(path)
        self.tensors: dict[str, Stored] = {
            key: Stored(
                tuple(entry.size),
                entry.properties.dtype,
                tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
            )
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(CRITIC)
        }
        self._places = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): info
            for index, info in metadata.storage_data.items()
        }
        self._fake = FakeTensorMode()
        self._checked: set[tuple[str, int]] = set()
        self._check_files()

    def objects(self) -> dict[str, bytes]:
        """Everything that is no tensor."""
        return {
            key: self._bytes(key, info)
            for (key, offset), info in self._places.items()
            if key not in self.tensors and not key.startswith(CRITIC)
        }

    def read(self, key: str, box: Box) -> Tensor:
        """The values in a box: a view of a shard if it is one, else copied together. Zeros beyond the tensor's end: padding."""
        stored = self.tensors[key]
        offsets, sizes = box
        if box in stored.boxes:
            return self._shard(key, box)
        out = torch.zeros(sizes, dtype=stored.dtype)
        wanted = [max(0, min(o + n, end) - o) for o, n, end in zip(offsets, sizes, stored.shape, strict=True)]
        found = 0
        for shard in stored.boxes:
            begin = [max(a, b) for a, b in zip(offsets, shard[0], strict=True)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, *shard, strict=True)]
            length = [e - b for b, e in zip(begin, end, strict=True)]
            if min(length, default=1) > 0:
                source = self._shard(key, shard)[_slices(begin, shard[0], length)]
                out[_slices(begin, offsets, length)] = source
                found += math.prod(length)
        if found != math.prod(wanted):
            raise MegarlError(f"{self.path}: {found} of {math.prod(wanted)} values of {key} at {offsets} are stored")
        return out

    def _shard(self, key: str, box: Box) -> Tensor:
        offsets, sizes = box
        info = self._places[key, offsets]
        path = self.path / info.relative_path
        try:
            with path.open("rb") as file, self._fake:
                fake = torch.load(_create_file_view(file, info.offset, info.length), weights_only=True)
        except Exception as error:  # a damaged archive can fail in any way
            raise MegarlError(f"{path}: {key} is unreadable: {error}") from None
        self._check(key, info)
        if tuple(fake.shape) != sizes or not fake.is_contiguous() or fake.storage_offset():
            raise MegarlError(f"{path}: {key} is stored as {tuple(fake.shape)} {fake.stride()} instead of {sizes}")
        return Region(path, info.offset + fake.untyped_storage()._checkpoint_offset, sizes, fake.dtype).tensor()

    def _bytes(self, key: str, info: Any) -> bytes:
        self._check(key, info)
        with (self.path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return file.read(info.length)

    def _check(self, key: str, info: Any) -> None:
        """Read an archive against its CRCs, which torch writes and does not look at; once, however many boxes lie in it."""
        place = (info.relative_path, info.offset)
        if place in self._checked:
            return
        path = self.path / info.relative_path
        with path.open("rb") as file:
            try:
                with ZipFile(_Part(file, info.offset, info.length)) as archive:
                    damaged = archive.testzip()
            except Exception as error:  # a damaged archive can fail in any way
                raise MegarlError(f"{path}: {key} is unreadable: {error}") from None
        if damaged:
            raise MegarlError(
                f"{path}: {key} is not as it was written ({damaged}); the checkpoint is damaged, use another"
            )
        self._checked.add(place)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self._places.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            size = file.stat().st_size if file.is_file() else 0
            if size < end:
                raise MegarlError(f"{file}: {size} of {end} bytes are there; the checkpoint is damaged, use another")


class _Part(io.RawIOBase):
    """`length` bytes of a file from `begin` on, as a file. (torch's own view of that kind goes astray from the end.)"""

    def __init__(self, file: io.BufferedReader, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._length}[whence]
        return self._file.seek(self._begin + origin + offset) - self._begin

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(memoryview(buffer)[: max(0, self._length - self.tell())])


class Writer:
    """Shards into files of a directory. `plan`: of each file the parts it gets, as (name, number of parts)."""

    def __init__(self, partial: Partial, plan: Mapping[str, int]) -> None:
        self.partial = partial
        self._left = dict(plan)
        self._open: dict[str, io.BufferedWriter] = {}
        self._notes: dict[str, list[Any]] = {}

    def write(self, file: str, tensors: Iterable[tuple[str, Sequence[int], Sequence[int], Tensor]]) -> None:
        """One part: of each shard its key, its offsets, the shape of the whole, and its values."""
        stream = self._stream(file)
        for key, offsets, whole, value in tensors:
            stream.write(bytes(-stream.tell() % ALIGNMENT))
            begin = stream.tell()
            _save(value, stream)
            self._note(
                file, [key, list(offsets), list(value.shape), list(whole), str(value.dtype), begin, stream.tell()]
            )
        self._part_done(file)

    def write_objects(self, file: str, objects: Mapping[str, bytes]) -> None:
        """One part: what is no tensor."""
        stream = self._stream(file)
        for key, data in objects.items():
            begin = stream.tell()
            stream.write(data)
            self._note(file, [key, None, None, None, None, begin, stream.tell()])
        self._part_done(file)

    def abandon(self) -> None:
        """Close what is open, whatever is in it."""
        for stream in self._open.values():
            with suppress(OSError):  # a full disk: its buffer cannot be written either
                stream.close()

    def complete(self) -> None:
        """.metadata and metadata.json, of what this process and any that was killed before it have written."""
        self.partial.flush()
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for file, notes in self.partial.finished.items():
            for key, offsets, sizes, whole, dtype, begin, end in notes:
                info = _StorageInfo(relative_path=file, offset=begin, length=end - begin)
                if offsets is None:
                    tensors[key] = BytesStorageMetadata()
                    places[MetadataIndex(key)] = info
                    continue
                properties = TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch.")))
                entry = tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(whole), []))
                entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(key, torch.Size(offsets))] = info
        metadata = Metadata(tensors, planner_data=None, storage_data=places, storage_meta=StorageMeta())
        _write(self.partial.path / METADATA, pickle.dumps(metadata))
        version = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        _write(self.partial.path / "metadata.json", json.dumps(version).encode())

    def _stream(self, file: str) -> io.BufferedWriter:
        if file not in self._open:
            self._open[file] = self.partial.unfinished(file).open("wb")
            self._notes[file] = []
        return self._open[file]

    def _note(self, file: str, note: list[Any]) -> None:
        self._notes[file].append(note)
        self.partial.wrote(file, note[-1] - note[-2])

    def _part_done(self, file: str) -> None:
        self._left[file] -= 1
        if not self._left[file]:
            self._open.pop(file).close()
            self.partial.finish(file, self._notes.pop(file))


def plan_files[P](parts: Sequence[P], rank: Callable[[P], int], size: Callable[[P], int], limit: int) -> list[str]:
    """The file of each part: those of a rank in turn, a new one when the last has `limit` bytes."""
    number: dict[int, int] = {}
    filled: dict[int, int] = {}
    files = []
    for part in parts:
        r = rank(part)
        if filled.get(r, 0) >= limit:
            number[r], filled[r] = number.get(r, 0) + 1, 0
        filled[r] = filled.get(r, 0) + size(part)
        files.append(f"__{r}_{number.get(r, 0)}.distcp")
    return files


def no_objects() -> dict[str, bytes]:
    """The objects of a checkpoint of weights alone."""
    data = io.BytesIO()
    torch.save([{}], data)
    return {COMMON: data.getvalue()}


def _save(value: Tensor, stream: io.BufferedWriter) -> None:
    # torch.save writes the whole storage behind a view: the same memory as a storage of its own.
    alone = torch.from_numpy(value.reshape(-1).view(torch.uint8).numpy()).view(value.dtype).view(value.shape)
    try:
        torch.save(alone, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch trips over its archive that ends too early
            raise error.__context__ from None
        raise


def _slices(begin: Sequence[int], origin: Sequence[int], length: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, b - o + n) for b, o, n in zip(begin, origin, length, strict=True))


def _read_metadata(path: Path) -> Metadata:
    with safely(path):
        return FileSystemReader(path).read_metadata()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
