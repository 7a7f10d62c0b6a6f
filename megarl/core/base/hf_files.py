"""Files of a Hugging Face directory, possibly written by hand. Any fault in its JSON files raises a `MegarlError`."""

import json
import math
from pathlib import Path

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.types import JsonObject


def read_config(hf_dir: Path | str) -> JsonObject:
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise MegarlError(f"{hf_dir}: no Hugging Face model there (no config.json); give a directory that has one")
    config = read_json(path)
    text_config(config, path)
    return config


def text_config(config: JsonObject, path: Path) -> JsonObject:
    """Return the language model's part of the config.json at `path`."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise MegarlError(f"{path}: text_config must be a JSON object")
    return text


def read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(contents(path))
    except json.JSONDecodeError as error:
        raise MegarlError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, brackets too deep
        raise MegarlError(f"{path}: not JSON: {error}") from None
    except OSError as error:
        raise MegarlError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise MegarlError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


INDEX = "model.safetensors.index.json"


def parameters(model: Path) -> int:
    """Count the parameters of a model's weights; MegarlError if there are none, or a file is missing or truncated."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in weight_files(model):
        try:
            with safe_open(str(file), framework="np") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise MegarlError(f"{file}: weights unreadable or incomplete ({error}); fetch this file again") from None
    return total


def check_head(model: Path) -> None:
    """Raise MegarlError if the embedding is also the head (tie_word_embeddings), but the weights have another head:
    transformers would use that one, and servers and learner the embedding."""
    config = read_config(model)
    if not config.get("tie_word_embeddings", text_config(config, model).get("tie_word_embeddings", False)):
        return
    stored: dict[str, np.ndarray] = {}  # the bytes of both
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")
            try:
                header = json.loads(opened.read(begin - 8))
            except (ValueError, MemoryError, OverflowError) as error:
                advice = "fetch this file again"
                raise MegarlError(f"{file}: weights unreadable or incomplete ({error}); {advice}") from None
        for name in header:
            if name.endswith(("lm_head.weight", "embed_tokens.weight")):
                first, end = header[name]["data_offsets"]
                stored[name] = np.memmap(file, np.uint8, "r", begin + first, (end - first,))
    both = list(stored.values())
    if len(both) == 2 and not np.array_equal(both[0], both[1]):
        what = "but by tie_word_embeddings in config.json they are the same; set it to false to keep the head"
        raise MegarlError(f"{model}: {' and '.join(sorted(stored))} differ, {what}")


def weight_files(model: Path) -> list[Path]:
    """Return the files of weights: those in the index, or all *.safetensors without one. MegarlError if any is missing."""
    index = model / INDEX
    if not index.is_file():
        if files := sorted(model.glob("*.safetensors")):
            return files
        raise MegarlError(f"{model}: no weights there (*.safetensors; convert other formats with transformers first)")
    try:
        files = [model / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError) as error:
        raise MegarlError(f"{index}: not an index of weights: {error!r}; fetch it again") from None
    if missing := [file.name for file in files if not file.is_file()]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise MegarlError(f"{model}: {len(missing)} of {len(files)} files of weights are missing: {shown}; fetch them")
    return files
