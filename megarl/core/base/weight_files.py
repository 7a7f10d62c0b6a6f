"""Which files of a Hugging Face directory hold the model's weights, and the tensors in
them.

transformers reads   model.safetensors, or else the files that
                     model.safetensors.index.json names
SGLang reads         the files that the index names, or else every *.safetensors

A directory of which they would read different files is refused: learner and servers
must start from the same model. Formats that neither reads here are refused with what
turns them into this one.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from megarl.core.base.errors import MegarlError, few
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
        raise MegarlError(
            f"{hf_dir}: {ADAPTER} makes it a LoRA adapter for another model; merge it (peft:"
            " merge_and_unload, then save_pretrained), or move that file away"
        )
    if (hf_dir / INDEX).is_file():
        return _indexed(hf_dir)
    if (hf_dir / SINGLE).is_file():
        return [hf_dir / SINGLE]
    files = _safetensors(hf_dir)
    if files:
        return files
    raise MegarlError(f"{hf_dir}: no weights there ({_other_format(hf_dir)})")


def check_served(hf_dir: Path) -> None:
    """Raise MegarlError if SGLang would read other files of weights than
    `weight_files`.
    """
    files = weight_files(hf_dir)
    files_of_server = _files_of_server(hf_dir, files)
    added = [file.name for file in files_of_server if file not in files]
    if added:
        raise MegarlError(
            f"{hf_dir}: SGLang would load it besides {SINGLE}; move {few(added, SHOWN)} out of the"
            " directory"
        )
    unread = [str(file.relative_to(hf_dir)) for file in files if file not in files_of_server]
    if unread:
        raise MegarlError(
            f"{hf_dir}: SGLang reads no files of weights in subfolders; move {few(unread, SHOWN)}"
            f" up, and correct {INDEX}"
        )


def _files_of_server(hf_dir: Path, files: Sequence[Path]) -> Sequence[Path]:
    """Return the files that SGLang would read. files: those of `weight_files`."""
    if (hf_dir / INDEX).is_file():
        return [file for file in files if file.parent == hf_dir]
    all_files = _safetensors(hf_dir)
    if all_files == [hf_dir / CONSOLIDATED, hf_dir / SINGLE]:  # it passes over the former
        return files
    return all_files


def tensors_in_files(hf_dir: Path) -> dict[str, TensorInFile]:
    """Return all tensors of the files of weights by name. MegarlError if two files have
    one of the same name.
    """
    tensors: dict[str, TensorInFile] = {}
    for file in weight_files(hf_dir):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise MegarlError(
                    f"{hf_dir}: {name} is in two files, {tensors[name].path.name} and {file.name};"
                    " remove the file that does not belong to the model"
                )
            tensors[name] = tensor
    return tensors


def parameters(hf_dir: Path) -> int:
    """Count the parameters of a model's weights."""
    return sum(math.prod(tensor.shape) for tensor in tensors_in_files(hf_dir).values())


def counted(count: int) -> str:
    """Return a number of parameters as people name a model's size: 135M, 8.03B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.3g}M"


def _safetensors(hf_dir: Path) -> list[Path]:
    """Return the directory's *.safetensors, sorted, without hidden ones."""
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
            raise MegarlError(
                f"{hf_dir}: {INDEX} names {few(names, SHOWN)}; rename {SINGLE}, which transformers"
                " would read alone, there and in the index"
            )
    if missing:
        raise MegarlError(
            f"{hf_dir}: {len(missing)} of {len(names)} files of weights are missing:"
            f" {few(missing, SHOWN)}; fetch them"
        )
    return [hf_dir / name for name in names]


def _two_models(names: Sequence[str], missing: Sequence[str]) -> str:
    """Return what is wrong with an index that does not name the model.safetensors
    beside it.
    """
    problem = f"{SINGLE} is there, and {INDEX} names other files ({few(names, SHOWN)})"
    if missing:
        return f"{problem}, of which {len(missing)} are missing; remove the index, which is stale"
    return (
        f"{problem}: transformers reads the first and SGLang the others; remove {SINGLE}, or the"
        " index and its files, whichever is stale"
    )


def _names_in_index(index: Path) -> list[str]:
    """Return the names of files in an index, sorted. MegarlError if it is no index,
    names none, or one outside its directory.
    """
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
    advice = gguf_advice(hf_dir)
    if advice:
        return advice
    torch_files = sorted(
        file.name for file in hf_dir.glob("*") if file.suffix in (".bin", ".pth", ".pt")
    )
    if torch_files:
        return (
            f"only {few(torch_files, SHOWN)}: transformers' from_pretrained and save_pretrained"
            " write safetensors"
        )
    return "*.safetensors; convert other formats with transformers first"
