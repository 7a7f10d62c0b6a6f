"""Between the learner's distributed checkpoints and Hugging Face directories, without changing a bit."""

from pathlib import Path

from checkpoints_tools.model import loaded, stored
from megarl.errors import MegarlError
from megarl.models import checkpoint, hf


def megatron_to_hf(source: Path, destination: Path) -> None:
    """`source`: a run or its checkpoints directory (the latest complete one), or one checkpoint; its optimiser is left out."""
    checkpoint.find(source)
    what = stored(source)
    _refuse_existing(destination)
    with loaded(what) as (chunks, family, _):
        hf.save(chunks, family, what.hf_dir, destination)
    print(f"{what.path} -> {destination}")


def hf_to_megatron(source: Path, destination: Path) -> None:
    """`destination` becomes one checkpoint of weights, step 0."""
    if not (source / "config.json").is_file():
        raise MegarlError(f"{source}: no Hugging Face model there (no config.json)")
    what = stored(source)
    _refuse_existing(destination)
    with loaded(what) as (chunks, _, model):
        meta = checkpoint.Meta(step=0, version=0, hf_source=str(source.resolve()), model=model.model_dump())
        checkpoint.save(destination, checkpoint.model_state(chunks), meta)
    print(f"{source} -> {destination}")


def _refuse_existing(destination: Path) -> None:
    """Before anything is read: reading may take long."""
    if destination.exists():
        raise MegarlError(f"{destination}: exists already; remove it or name another directory")
