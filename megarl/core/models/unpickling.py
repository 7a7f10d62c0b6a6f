"""A checkpoint is read without running anything that is in it, wherever it came from.

.metadata       a pickle that torch reads as it is: read here first, by an unpickler that knows only what belongs there
*.distcp        torch archives; megatron lets torch unpickle objects of any class: within `safely` only plain ones
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.core.base.errors import MegarlError

METADATA = ".metadata"
OF_METADATA = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}
"""What torch and megatron write there, beside types of tensors."""
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def safely(path: Path) -> Iterator[None]:
    """Within it torch reads the checkpoint at `path`. MegarlError if its .metadata is more than that."""
    _check_metadata(path / METADATA)
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"  # torch looks at it in every load, also in those that ask for anything
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in OF_METADATA
        if known or (module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it wants to load {module}.{name}, which no checkpoint needs and which may run anything; "
            "do not trust where this checkpoint came from"
        )


def _check_metadata(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            _Metadata(stream).load()
    except Exception as error:  # a pickle that is cut off or foreign can fail in any way
        raise MegarlError(f"{file}: unreadable: {error}") from None
