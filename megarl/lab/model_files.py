"""The weights of a Hugging Face directory, by the headers of its files: are they there and whole, and how many are they?"""

import math
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json

INDEX = "model.safetensors.index.json"


def parameters(model: Path) -> int:
    """How many numbers its weights are; MegarlError where there are none, one of their files is missing, or is cut off."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in _files(model):
        try:
            with safe_open(str(file), framework="np") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise MegarlError(f"{file}: weights unreadable or incomplete ({error}); fetch this file again") from None
    return total


def _files(model: Path) -> list[Path]:
    """Those that the index names, else all *.safetensors."""
    index = model / INDEX
    if not index.is_file():
        if found := sorted(model.glob("*.safetensors")):
            return found
        raise MegarlError(f"{model}: no weights there (*.safetensors; convert other formats with transformers first)")
    try:
        found = [model / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError) as error:
        raise MegarlError(f"{index}: not an index of weights: {error!r}; fetch it again") from None
    if missing := [file.name for file in found if not file.is_file()]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise MegarlError(f"{model}: {len(missing)} of {len(found)} files of weights are missing: {shown}; fetch them")
    return found
