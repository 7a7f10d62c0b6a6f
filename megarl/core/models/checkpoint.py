"""Distributed checkpoints: written by all ranks at one layout, loaded at any other, and
either complete or absent.

    RUN/checkpoints/step-0000020/
        *.distcp, .metadata, metadata.json    megatron's torch_dist format, keyed by
                                              the whole model's names
        hf/                                   configuration and tokenizer, all that a
                                              conversion needs besides
        megarl.json                           CheckpointMeta, with a checksum of each
                                              file; written last
    RUN/checkpoints/.step-0000020.partial/    being written; renamed when complete

Each rank reads back its files to compute checksums, in the thread that wrote them.
Before any part of a checkpoint is used, all files are verified, each by one of the
ranks. CRC-32 is the fastest checksum: 6.0 GB/s on one core of an AMD EPYC, against 1.2
for blake2b. It guards against accidents only. A checkpoint is read without running any
code in it, wherever it came from:

.metadata       a pickle that torch reads without checks: we read it first, with an
                unpickler that allows only expected classes
*.distcp        torch archives; megatron lets torch unpickle objects of any class:
                within `safely` only plain ones
"""

import logging
import os
import pickle
import queue as queues
import re
import shutil
import zlib
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config
from megarl.core.base.process import environment
from megarl.core.base.retention import named_checkpoint, split_name
from megarl.core.base.rundir import CHECKPOINT, META, complete, write_atomically
from megarl.core.base.safetensors_header import are_counts
from megarl.core.base.schema import check_schema
from megarl.core.models.hf import copy_description, everywhere, partial_of, prepared_partial

log = logging.getLogger(__name__)

SCHEMA_VERSION = 4
CRITIC = "critic."
"""Prefix of a critic's tensor names. Readers that want only the policy load none of
them.
"""
_PARTIAL = re.compile(r"\.step-\d+\.partial")
_EXTRA_STATE = re.compile(r"(.*\.)?_extra_state\d*")
"""Transformer Engine's FP8 scales, of a layer or one of its experts. megarl does not
use them, and other layers have none.
"""


class CorruptCheckpoint(MegarlError):
    """A file of a checkpoint is missing or differs from what was written. Reading it
    again, or elsewhere, does not help.
    """


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a checkpoint. `seal` fills in `files` and `checksum`."""

    step: int
    version: int  # of the weights
    hf_source: str  # the directory that configuration and tokenizer came from
    model: dict[str, Any]  # the recipe's section, with the layout and precision at writing
    critic: bool = False  # whether there is one besides the policy
    schema: int = SCHEMA_VERSION
    files: dict[str, int] = {}  # checksums of all other files, by name
    checksum: int = 0  # of the rest of this file


def metadata() -> dict[str, object]:
    """Return the `metadata` for megatron's sharded_state_dict, of models and
    optimisers, that makes shards fit any layout.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"dp_cp_group": group, "distrib_optim_sharding_type": "fully_reshardable"}


def model_state(chunks: Sequence[Module]) -> ShardedStateDict:
    """Return the sharded state dict of this rank's chunks: {"model": …}, or {"model0":
    …, "model1": …} if several.
    """
    state = {}
    for key, chunk in _named(chunks):
        sharded = chunk.sharded_state_dict(metadata=metadata())
        names = [name for name in sharded if not _EXTRA_STATE.fullmatch(name)]
        state[key] = {name: sharded[name] for name in names}
    return state


def set_model_state(chunks: Sequence[Module], state: StateDict) -> None:
    """Set this rank's chunks to loaded values, keyed as in `model_state`."""
    for key, chunk in _named(chunks):
        unexpected = chunk.load_state_dict(state[key], strict=False).unexpected_keys
        assert not unexpected, unexpected


def _named(chunks: Sequence[Module]) -> list[tuple[str, Module]]:
    """Return the chunks with their keys in a state: `model`, or `model0`, `model1`, …
    if there are several.
    """
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def save(path: Path, state: ShardedStateDict, meta: CheckpointMeta) -> None:
    """Write a checkpoint at `path`. COLLECTIVE over all ranks; if any fails, all raise
    MegarlError and nothing is left.
    """
    request = start_save(path, state, meta)
    with whole_or_gone(path):
        request.execute_sync()
        dist.barrier()


def start_save(path: Path, state: ShardedStateDict, meta: CheckpointMeta) -> AsyncRequest:
    """Return megatron's request to write a checkpoint: first each rank's part, then, on
    all ranks, the move to `path`.
    """
    source = Path(meta.hf_source)

    def fill(partial: Path) -> None:
        """Make the directory, if the description can be read that belongs into it."""
        read_config(source)
        partial.mkdir(parents=True)

    partial = prepared_partial(path, fill)
    own_checksums: Future[dict[str, int]] = Future()

    def complete_on_rank_0(written: list[dict[str, int]]) -> None:
        """Add the rest of the files and move all to `path`. written: each rank's
        checksums.
        """
        if dist.get_rank() == 0:
            copy_description(source, partial / "hf")
            seal(partial, meta, checksums(partial, ChainMap(*written)))
            os.replace(partial, path)

    def finish() -> None:
        written = everywhere(own_checksums.result)
        everywhere(lambda: complete_on_rank_0(written))

    # For the results of the writing threads. megatron's own queue needs a manager
    # process, which takes seconds to start and serves only if another process writes.
    filesystem_async._results_queue = queues.Queue()
    # Copies of the model divide the tensors among themselves. By default the first one
    # writes all, and the others nothing.
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy(), metadata()["dp_cp_group"]
    )
    with whole_or_gone(path):
        request = dist_checkpointing.save(
            state, str(partial), strategy, async_sharded_save=True, async_strategy="mcore"
        )
    request = _with_checksums(request, own_checksums)
    request.add_finalize_fn(finish)
    return request


def seal(path: Path, meta: CheckpointMeta, files: Mapping[str, int]) -> None:
    """Write megarl.json, which turns the files in directory `path` into a checkpoint.
    files: checksums by name.
    """
    sealed = msgspec.structs.replace(meta, files=dict(files))
    sealed = msgspec.structs.replace(sealed, checksum=_own_checksum(sealed))
    write_atomically(path / META, msgspec.json.encode(sealed))


@contextmanager
def whole_or_gone(path: Path) -> Iterator[None]:
    """Return a context for writing the checkpoint at `path`: a failure raises
    MegarlError and leaves no files behind.
    """
    try:
        yield
    # Anything: megatron, torch and the operating system each have their own errors.
    # torch's CheckpointException is no Exception.
    except (Exception, CheckpointException) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial_of(path), ignore_errors=True)
        raise MegarlError(
            f"{path}: the checkpoint could not be written (is the disk full?): {_last_line(error)}"
        ) from error


def load(path: Path, state: ShardedStateDict) -> StateDict:
    """Load the values of `state` from the checkpoint at `path`, of any layout.
    COLLECTIVE. CorruptCheckpoint if a file is damaged; another MegarlError if all files
    are intact but loading failed.
    """

    with ExitStack() as while_reading:

        def check_own_share() -> None:
            """Check every n-th file, of n ranks, so that each rank reads about as much;
            then make it safe to read all of them until the load is over.
            """
            files = read_meta(path).files
            own_names = sorted(files)[dist.get_rank() :: dist.get_world_size()]
            check(path, {name: files[name] for name in own_names})
            while_reading.enter_context(safely(path))

        intact_everywhere(check_own_share)
        try:
            # Copies of the model divide the tensors to read and pass them on. By
            # default each one reads all.
            strategy = FullyParallelLoadStrategyWrapper(_Reading(), metadata()["dp_cp_group"])
            return dist_checkpointing.load(state, str(path), strategy)
        # Anything: a foreign file can fail anywhere in the unpickling.
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise MegarlError(
                f"{path}: its files are intact, but cannot be loaded: {_last_line(error)}; start"
                " again, in case storage or memory failed; if the checkpoint belongs to another"
                " model, move it away"
            ) from error


class _Reading(TorchDistLoadShardedStrategy):
    """Reads this rank's part. COLLECTIVE: if any rank cannot read its own, all raise,
    or the others would wait for it.
    """

    def load(self, *args: Any, **named: Any) -> StateDict:
        """Read this rank's part, with megatron's arguments. MegarlError on all ranks if
        one fails.
        """
        loaded: StateDict = {}

        def read() -> None:
            """Read this rank's part; any error becomes a MegarlError."""
            try:
                loaded.update(super(_Reading, self).load(*args, **named))
            except (Exception, CheckpointException) as error:  # the latter is no Exception
                raise MegarlError(_last_line(error)) from error

        everywhere(read)
        return loaded


def intact_everywhere[T](work: Callable[[], T]) -> list[T]:
    """Return each rank's result of `work()`. COLLECTIVE. If a rank finds damage
    (CorruptCheckpoint), all raise it, with the damage that any of them found. Any other
    error on a rank comes first, as a MegarlError on all.
    """

    def result_or_damage() -> tuple[list[T], str]:
        """Return the result in a list, or no result and the damage as text."""
        try:
            return [work()], ""
        except CorruptCheckpoint as error:
            return [], str(error)

    results, damages = zip(*everywhere(result_or_damage), strict=True)
    errors = list(dict.fromkeys(filter(None, damages)))
    if errors:
        raise CorruptCheckpoint("\n".join(errors))
    return [value for values in results for value in values]


def load_model(path: Path, chunks: Sequence[Module]) -> None:
    """Load only the weights of a checkpoint that may have an optimiser's state, too.
    COLLECTIVE.
    """
    set_model_state(chunks, load(path, model_state(chunks)))


def read_meta(path: Path) -> CheckpointMeta:
    """Read the description of the checkpoint at `path`. MegarlError if there is none or
    it is of another version, CorruptCheckpoint if it is damaged.
    """
    if not path.is_dir():
        raise MegarlError(f"{path}: no such checkpoint")
    if not (path / META).is_file():
        raise MegarlError(f"{path}: not a complete checkpoint (no {META})")
    try:
        meta = msgspec.json.decode((path / META).read_bytes(), type=CheckpointMeta)
    except msgspec.DecodeError as error:
        raise CorruptCheckpoint(f"{path / META}: unreadable: {error}") from None
    check_schema(path / META, meta.schema, SCHEMA_VERSION)
    if meta.checksum != _own_checksum(meta):
        raise CorruptCheckpoint(
            f"{path / META}: not as it was written; the checkpoint is damaged, use an older one"
        )
    return meta


def prune(checkpoints: Path, keep: int, protected: Collection[Path] = ()) -> None:
    """Remove all checkpoints but the newest `keep` and those in `protected`, and what
    killed writers left.

    Call this on one rank, while none is written. Files that cannot be removed stay,
    with a warning, until the next call.
    """
    old = [path for path in complete(checkpoints)[:-keep] if path not in protected]
    for path in (*old, *_incomplete(checkpoints)):
        try:
            # first, so that a kill leaves nothing that looks complete
            (path / META).unlink(missing_ok=True)
            shutil.rmtree(path)
        # NFS keeps files that are open elsewhere; somebody may have protected them
        except OSError as error:
            log.warning("%s: cannot be removed, trying again later: %s", path, error)


def _incomplete(checkpoints: Path) -> list[Path]:
    """Return directories that killed writers left, and checkpoints that could only
    partly be removed.
    """
    incomplete = []
    for path in checkpoints.glob("*"):  # hidden ones, too; none if there is no such directory
        is_partial = _PARTIAL.fullmatch(path.name)
        is_unsealed = CHECKPOINT.fullmatch(path.name) and not (path / META).exists()
        if is_partial or is_unsealed:
            incomplete.append(path)
    return incomplete


def find(source: Path) -> Path:
    """Return the checkpoint in a step's directory, the one that RUN@STEP or RUN@best
    names, or the latest complete one in a run's or checkpoints directory.
    """
    run, checkpoint_name = split_name(str(source))
    if checkpoint_name:
        return named_checkpoint(run, checkpoint_name)
    if (source / META).is_file():
        return source
    for checkpoints in (source / "checkpoints", source):
        paths = complete(checkpoints)
        if paths:
            return paths[-1]
    problem = "no complete checkpoint there" if source.is_dir() else "no such directory"
    raise MegarlError(
        f"{source}: {problem}; give RUN, RUN@STEP, RUN@best, RUN/checkpoints or"
        " RUN/checkpoints/step-N"
    )


def _with_checksums(request: AsyncRequest, own_checksums: "Future[dict[str, int]]") -> AsyncRequest:
    """Return a request that also reads this rank's files back after writing;
    `own_checksums` gets their checksums by name.
    """
    write = request.async_fn
    if write is None:  # nothing to write on this rank
        own_checksums.set_result({})
        return request

    def write_and_sum(rank: int, buckets: list[tuple[str, str, object]], results: object) -> None:
        """Write, then read back. buckets: of each file path, name and tensors."""
        write(rank, buckets, results)
        try:
            own_checksums.set_result({name: checksum(Path(file)) for file, name, _ in buckets})
        except OSError as error:  # also if it was not written, which megatron reports
            own_checksums.set_exception(error)

    return request._replace(async_fn=write_and_sum)


def _own_checksum(meta: CheckpointMeta) -> int:
    """Return the checksum of a description without its own checksum."""
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(meta, checksum=0)))


def _last_line(error: BaseException) -> str:
    """Return an error's type and its last line, which in torch's gathered tracebacks is
    the error itself.
    """
    last_line = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {last_line}"


CHUNK_BYTES = 4 << 20


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file. Other threads keep running: neither reading nor
    summing holds the interpreter lock.
    """
    crc = 0
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def checksums(folder: Path, computed: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the checksum of every file below `folder`, by name (`hf/config.json`).
    Files in `computed` are not read again.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    names = sorted(file.relative_to(folder).as_posix() for file in files)
    result = {}
    for name in names:
        if computed is not None and name in computed:
            result[name] = computed[name]
        else:
            result[name] = checksum(folder / name)
    return result


def check(folder: Path, expected: Mapping[str, int]) -> None:
    """Raise CorruptCheckpoint if a file is missing, is not in the checkpoint, or has
    another checksum.
    """
    for name, expected_checksum in expected.items():
        file = folder / name
        if not _is_inside(name):
            raise CorruptCheckpoint(
                f"{folder / META}: {name!r} is not the name of a file in the checkpoint"
            )
        if not file.is_file():
            raise CorruptCheckpoint(f"{file}: missing; the checkpoint is damaged, use an older one")
        actual_checksum = checksum(file)
        if actual_checksum != expected_checksum:
            raise CorruptCheckpoint(
                f"{file}: its checksum is {actual_checksum:08x}, and was {expected_checksum:08x}"
                " when it was written; the checkpoint is damaged, use an older one"
            )


def _is_inside(name: str) -> bool:
    """Return whether a relative path does not lead out of its directory."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


METADATA = ".metadata"
_IN_METADATA = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
}
"""The classes, by module, that torch and megatron use in .metadata, besides tensors'
dtypes.
"""


def _stand_in(named: Any) -> object:
    """Return what can be called in place of a class or function. It shares no attribute
    with that, so that a pickle which sets one changes nothing of ours. Classes become
    subclasses; an Enum and torch.Size, of which none can be made, become functions.
    """
    if isinstance(named, type) and not issubclass(named, Enum | torch.Size):
        return type(named.__name__, (named,), {"__module__": named.__module__})
    return lambda *arguments: named(*arguments)


FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def safely(path: Path) -> Iterator[None]:
    """Make it safe for torch to read the checkpoint at `path` within this context.
    MegarlError if its .metadata cannot be read, CorruptCheckpoint if it is not a pickle
    of the expected classes, or names files that no checksum covers.
    """
    try:
        with (path / METADATA).open("rb") as stream:
            _check_metadata(_MetadataUnpickler(stream).checked(), read_meta(path).files)
    except (OSError, MemoryError) as error:
        raise MegarlError(
            f"{path / METADATA}: cannot be read: {error or 'out of memory'}"
        ) from None
    except CorruptCheckpoint:
        raise
    except Exception as error:  # a truncated or foreign pickle can fail in any way
        raise CorruptCheckpoint(f"{path / METADATA}: unreadable: {error}") from None
    # With this, torch unpickles only plain objects, even where a caller allows all.
    with environment({FORCE: "1"}):
        yield


def _check_metadata(metadata: Any, files: Mapping[str, int]) -> None:
    """Raise an error if this is not what torch writes. files: those with a checksum."""
    for key, entry in metadata.state_dict_metadata.items():
        chunks = getattr(entry, "chunks", ())
        is_typed = not chunks or isinstance(entry.properties.dtype, torch.dtype)
        if not isinstance(key, str) or not is_typed:
            raise ValueError(f"{key!r} is not described as a tensor")
        for chunk in chunks:
            if not are_counts(*chunk.offsets, *chunk.sizes, *entry.size):
                raise ValueError(f"{key} has no sizes")
    for index, place in metadata.storage_data.items():
        if place.relative_path not in files:
            raise ValueError(f"{index.fqn} is in {place.relative_path!r}, which has no checksum")
        if not are_counts(place.offset, place.length):
            raise ValueError(f"{index.fqn} has no place in {place.relative_path}")


class _MetadataUnpickler(pickle.Unpickler):
    """Loads a stand-in for each class, since a pickle may set attributes of what it
    names.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self._stand_ins: dict[tuple[str, str], object] = {}

    def checked(self) -> object:
        """Return the object. UnpicklingError if loading has changed a class."""
        attributes = set(vars(_stand_in(object)))
        loaded = self.load()
        for (module, name), stand_in in self._stand_ins.items():
            if isinstance(stand_in, type) and vars(stand_in).keys() - attributes:
                raise pickle.UnpicklingError(f"it changes {module}.{name}")
        return loaded

    def find_class(self, module: str, name: str) -> object:
        """Return a dtype, or the stand-in of an expected class. UnpicklingError for any
        other.
        """
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return super().find_class(module, name)
        if name not in _IN_METADATA.get(module, "").split():
            raise pickle.UnpicklingError(
                f"it wants to load {module}.{name}, which no checkpoint needs and which may run"
                " anything; do not trust the source of this checkpoint"
            )
        if (module, name) not in self._stand_ins:
            self._stand_ins[module, name] = _stand_in(super().find_class(module, name))
        return self._stand_ins[module, name]
