"""The tokenizer of a Hugging Face directory, the ids of a text, and the id that ends a completion."""

from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import MegarlError
from megarl.types import int32


def load_tokenizer(hf_dir: Path | str) -> Any:
    """The transformers tokenizer saved in `hf_dir`; MegarlError where there is none."""
    folder = Path(hf_dir)
    if not folder.is_dir():
        raise MegarlError(f"{folder}: no such directory; a model directory in Hugging Face form is needed (model.path)")
    from transformers import AutoTokenizer  # seconds: only once the directory is known to be there

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MegarlError(
            f"{folder}: no tokenizer can be loaded ({reason}); it needs tokenizer.json beside config.json"
        ) from None


def ids(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids of exactly this text, nothing added in front or behind. [n] int32"""
    return encode_all(tokenizer, [text])[0]


def encode_all(tokenizer: Any, texts: list[str]) -> list[np.ndarray]:
    """`ids` of many texts at once; MegarlError where the tokenizer's vocabulary lacks a character of theirs."""
    try:
        return [int32(tokens) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    except Exception as error:  # tokenizers raises a plain Exception where a closed vocabulary has no such character
        shown = ", ".join(repr(text) for text in texts[:3])
        raise MegarlError(f"{tokenizer.name_or_path}: the tokenizer cannot encode {shown} …: {error}") from None


def end_id(tokenizer: Any) -> int:
    """The id that ends a completion; MegarlError where the tokenizer names none."""
    if tokenizer.eos_token_id is None:
        raise MegarlError(f"{tokenizer.name_or_path}: the tokenizer has no eos_token; set it in tokenizer_config.json")
    return int(tokenizer.eos_token_id)
