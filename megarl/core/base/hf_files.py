"""JSON files of a Hugging Face directory, possibly written by hand. Any fault raises a
`MegarlError`.
"""

import json
import re
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.types import JsonObject

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pth|pt|gguf|h5|msgpack)(\.index\.json)?|\..*")


def read_config(hf_dir: Path | str) -> JsonObject:
    """Read config.json. MegarlError if there is none."""
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        advice = gguf_advice(Path(hf_dir)) or "give a directory that has one"
        raise MegarlError(f"{hf_dir}: no Hugging Face model there (no config.json); {advice}")
    config = read_json(path)
    text_config(config, path)
    return config


def description_files(hf_dir: Path) -> list[Path]:
    """Return all files of a directory but weights: configuration, tokenizer, model
    card. They are copied into checkpoints and exports, which people publish.

    MegarlError if one is a link to a file elsewhere, which may be a secret of the
    user's. Where config.json is such a link, too, the whole directory is made of links
    (a cache of downloads).
    """
    files = sorted(path for path in hf_dir.iterdir() if path.is_file())
    described = [path for path in files if not _WEIGHTS.fullmatch(path.name)]
    if _leads_out(hf_dir / "config.json"):
        return described
    for path in described:
        if _leads_out(path):
            raise MegarlError(
                f"{path}: a link to {path.resolve()}, outside of the directory; put the file itself"
                " there, or remove the link"
            )
    return described


def _leads_out(path: Path) -> bool:
    """Return whether this is a link to something outside of its folder."""
    return not path.resolve().is_relative_to(path.parent.resolve())


def gguf_advice(path: Path) -> str:
    """Return how to import the GGUF file at `path`, or the first in it; empty if there
    is none.
    """
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if not files:
        return ""
    return f"import the GGUF file first: python -m checkpoints_tools import-gguf {files[0]} NEW"


def text_config(config: JsonObject, path: Path) -> JsonObject:
    """Return the language model's part of the config.json at `path`."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise MegarlError(f"{path}: text_config must be a JSON object")
    return text


def read_json(path: Path) -> JsonObject:
    """Read a file with one JSON object."""
    try:
        value = json.loads(contents(path))
    except json.JSONDecodeError as error:
        raise MegarlError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    # not UTF-8, a number of thousands of digits, brackets too deep
    except (ValueError, RecursionError) as error:
        raise MegarlError(f"{path}: not JSON: {error}") from None
    except OSError as error:
        raise MegarlError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise MegarlError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value
