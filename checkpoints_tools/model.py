"""A model wherever it is stored, as chunks of this process (under torchrun: of its ranks, by tensor parallelism)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.errors import MegarlError
from megarl.models import Family, build, checkpoint, family_of, hf, parallel
from megarl.models.family import read_config
from megarl.recipe import Model

# isort: split
from torch.nn import Module

Dtype = Literal["bf16", "fp32"]
TIMEOUT_S = 3600.0  # of a collective: a rank may wait for another that still reads


@dataclass(frozen=True)
class Stored:
    """hf_dir: where configuration and tokenizer are. meta: of a distributed checkpoint, else None."""

    path: Path
    hf_dir: Path
    dtype: Dtype
    meta: checkpoint.Meta | None


def stored(path: Path) -> Stored:
    """What lies at `path`: a Hugging Face directory if it has a config.json, else a checkpoint or a run."""
    if (path / "config.json").is_file():
        return Stored(path, path, _dtype(path), None)
    found = checkpoint.find(path)
    meta = checkpoint.read_meta(found)
    return Stored(found, found / "hf", meta.model["dtype"], meta)


@contextmanager
def loaded(source: Stored) -> Iterator[tuple[list[Module], Family, Model]]:
    """Its weights in memory, in the precision they are stored in."""
    model = Model(
        path=str(source.hf_dir), dtype=source.dtype, tensor_parallel=int(os.environ.get("WORLD_SIZE", "1"))
    )  # fmt: skip
    family = family_of(source.hf_dir)
    parallel.start(model, seed=0, timeout_s=TIMEOUT_S)
    try:
        chunks = build.build(model, source.hf_dir)
        if source.meta is None:
            hf.load(chunks, family, source.path)
        else:
            checkpoint.load_model(source.path, chunks)
        yield chunks, family, model
    finally:
        parallel.stop()


def _dtype(hf_dir: Path) -> Dtype:
    """`bf16` or `fp32`, as config.json says."""
    config = read_config(hf_dir)
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    known: dict[str, Dtype] = {"bfloat16": "bf16", "float32": "fp32"}
    if name not in known:
        raise MegarlError(f"{hf_dir / 'config.json'}: dtype {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]
