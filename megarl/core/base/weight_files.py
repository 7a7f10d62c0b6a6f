"""Which files of a Hugging Face directory hold the model's weights, and the tensors in
them.

transformers reads   model.safetensors, or else the files that model.safetensors.index.json names
SGLang reads         the files that the index names, or else every *.safetensors

A directory of which they would read different files is refused: learner and servers
must start from the same model. Formats that neither reads here are refused with what
turns them into this one.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import gguf_advice, read_json
from megarl.core.base.safetensors_header import TensorInFile, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONSOLIDATED = "consolidated.safetensors"
"""Mistral's own format of the same model, which SGLang passes over beside a
model.safetensors.
"""
ADAPTER = "adapter_config.json"
SHOWN = 3


def weight_files(hf_dir: Path) -> list[Path]:
    """Return the files that hold the weights, sorted. MegarlError if there are none, if
    one is missing, or if it is not clear which they are.
    """
    if (hf_dir / ADAPTER).is_file():
        what = f"{ADAPTER} makes it a LoRA adapter for another model"
        advice = "merge it (peft: merge_and_unload, then save_pretrained), or move that file away"
        raise MegarlError(f"{hf_dir}: {what}; {advice}")
    if (hf_dir / INDEX).is_file():
        return _indexed(hf_dir)
    if (hf_dir / SINGLE).is_file():
        return [hf_dir / SINGLE]
    if files := _safetensors(hf_dir):
        return files
    raise MegarlError(f"{hf_dir}: no weights there ({_other_format(hf_dir)})")


def check_served(hf_dir: Path) -> None:
    """Raise MegarlError if SGLang would read other files of weights than
    `weight_files`.
    """
    known = weight_files(hf_dir)
    by_server = known
    if (hf_dir / INDEX).is_file():
        by_server = [file for file in known if file.parent == hf_dir]
    elif (files := _safetensors(hf_dir)) != [hf_dir / CONSOLIDATED, hf_dir / SINGLE]:
        by_server = files
    if extra := [file.name for file in by_server if file not in known]:
        advice = f"move {few_names(extra)} out of the directory"
        raise MegarlError(f"{hf_dir}: SGLang would load it besides {SINGLE}; {advice}")
    if lost := [str(file.relative_to(hf_dir)) for file in known if file not in by_server]:
        advice = f"move {few_names(lost)} up, and correct {INDEX}"
        raise MegarlError(f"{hf_dir}: SGLang reads no files of weights in subfolders; {advice}")


def tensors_in_files(hf_dir: Path) -> dict[str, TensorInFile]:
    """Return all tensors of the files of weights by name. MegarlError if two files have
    one of the same name.
    """
    tensors: dict[str, TensorInFile] = {}
    for file in weight_files(hf_dir):
        for name, tensor in read_header(file).items():
            if name in tensors:
                both = f"{tensors[name].path.name} and {file.name}"
                advice = "remove the file that does not belong to the model"
                raise MegarlError(f"{hf_dir}: {name} is in two files, {both}; {advice}")
            tensors[name] = tensor
    return tensors


def parameters(hf_dir: Path) -> int:
    """Count the parameters of a model's weights."""
    return sum(math.prod(tensor.shape) for tensor in tensors_in_files(hf_dir).values())


def counted(count: int) -> str:
    """Return a number of parameters as people name a model's size: 135M, 8.03B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def few_names(names: Sequence[str]) -> str:
    """Join the first names for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _safetensors(hf_dir: Path) -> list[Path]:
    files = sorted(hf_dir.glob("*.safetensors"))
    return [file for file in files if file.is_file() and not file.name.startswith(".")]


def _indexed(hf_dir: Path) -> list[Path]:
    """Return the files that the index names, if there is no other model beside it."""
    names = _names_in_index(hf_dir / INDEX)
    missing = [name for name in names if not (hf_dir / name).is_file()]
    if (hf_dir / SINGLE).is_file() and names != [SINGLE]:
        if SINGLE not in names:
            raise MegarlError(f"{hf_dir}: {_two_models(names, missing)}")
        if not missing:
            advice = f"rename {SINGLE}, which transformers would read alone, there and in the index"
            raise MegarlError(f"{hf_dir}: {INDEX} names {few_names(names)}; {advice}")
    if missing:
        count = f"{len(missing)} of {len(names)} files of weights are missing"
        raise MegarlError(f"{hf_dir}: {count}: {few_names(missing)}; fetch them")
    return [hf_dir / name for name in names]


def _two_models(names: Sequence[str], missing: Sequence[str]) -> str:
    """Return what is wrong with an index that does not name the model.safetensors
    beside it.
    """
    there = f"{SINGLE} is there, and {INDEX} names other files ({few_names(names)})"
    if missing:
        return f"{there}, of which {len(missing)} are missing; remove the index, which is stale"
    readers = "transformers reads the first and SGLang the others"
    return f"{there}: {readers}; remove {SINGLE}, or the index and its files, whichever is stale"


def _names_in_index(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise MegarlError(f"{index}: not an index of weights: {error!r}; fetch it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise MegarlError(f"{index}: {name!r} is not the name of a file in its directory")
    if not names:
        raise MegarlError(f"{index}: it names no file of weights; fetch it again")
    return names


def _other_format(hf_dir: Path) -> str:
    """Return what to do about a directory without *.safetensors."""
    if advice := gguf_advice(hf_dir):
        return advice
    torch = sorted(file.name for kind in ("*.bin", "*.pth", "*.pt") for file in hf_dir.glob(kind))
    if torch:
        how = "transformers' from_pretrained and save_pretrained write safetensors"
        return f"only {few_names(torch)}: {how}"
    return "*.safetensors; convert other formats with transformers first"
