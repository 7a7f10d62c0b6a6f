"""The tokenizer of a Hugging Face directory: text to ids, ids to text, and the id that
ends a completion.

The `tokenizers` library runs `tokenizer.json`, as in transformers' fast tokenizers.
Without transformers, which imports torch, a role starts five seconds faster and takes
700 MB less.
"""

import logging
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json, text_config
from megarl.core.base.types import int32

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    backend: Backend
    end: int  # ends a completion
    path: Path  # its directory, for error messages
    vocabulary: int = (
        sys.maxsize
    )  # number of tokens that the model there knows; a larger id crashes a server
    others: tuple[
        int, ...
    ] = ()  # further ids that end a completion; gpt-oss has one that ends a call

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids that end a completion."""
        return (self.end, *self.others)

    @cached_property
    def longest_token(self) -> int:
        """Most characters in a token. Byte-level tokens are spelled with a character
        per byte.
        """
        return max(map(len, self.backend.get_vocab()), default=1)

    def least_tokens(self, characters: int) -> int:
        """Return the least number of tokens in a text of so many characters.

        Encoding takes several hundred bytes of memory per token, so a text that must be
        too long is not encoded.
        """
        return -(-characters // self.longest_token)

    def ids(self, text: str) -> np.ndarray:
        """Return the token ids [n] int32 of exactly this text, with nothing added
        before or after.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str], framed: bool = False) -> list[np.ndarray]:
        """Return the ids of many texts at once, [n] int32 each. framed: add the special
        tokens that the tokenizer puts around a text, such as Llama 3's
        <|begin_of_text|>. MegarlError if the tokenizer lacks a character, or the model
        a token.
        """
        try:
            encoded = [
                int32(encoding.ids)
                for encoding in self.backend.encode_batch(texts, add_special_tokens=framed)
            ]
        except (
            Exception
        ) as error:  # tokenizers raises a plain Exception if a closed vocabulary lacks a character
            shown = ", ".join(repr(text[:80]) for text in texts[:3])
            raise MegarlError(
                f"{self.path}: the tokenizer cannot encode {shown} …: {error}"
            ) from None
        for text, ids in zip(texts, encoded, strict=True):
            if len(ids) and ids.max() >= self.vocabulary:
                raise MegarlError(
                    f"{self.path}: token {ids.max()} of {text[:80]!r} is beyond the model's"
                    f" vocabulary of {self.vocabulary} (vocab_size in config.json): the tokenizer"
                    " is not this model's"
                )
        return encoded

    def warn_of_beginning(self, source: str, text: str) -> None:
        """Warn if a source's text lacks the tokens that the tokenizer puts before every
        text, such as Llama 3's begin token.
        """
        plain, framed = (self.encode_all([text], framed)[0].tolist() for framed in (False, True))
        begin = next((n for n in range(len(framed)) if framed[n : n + len(plain)] == plain), 0)
        if framed[:begin] != plain[:begin]:
            named = self.decode(int32(framed[:begin]))
            what = (
                "its texts do not begin with %s, which the tokenizer puts before a text; write it"
                " there unless the model was"
            )
            log.warning(f"%s: {what} trained without", source, named)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of ids [n]; special tokens are kept, since `</think>` may be
        one.
        """
        text: str = self.backend.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def continued(self, tokens: np.ndarray) -> str:
        """Return the text of ids [n] that follow others. At the beginning of a text,
        SentencePiece's decoders drop a space.
        """
        return self.decode(np.append(int32([self.end]), tokens)).removeprefix(
            self.decode(int32([self.end]))
        )

    def literal(self) -> "Tokenizer":
        """Return a tokenizer that encodes the names of special tokens as ordinary text,
        for text such as a tool's output.
        """
        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return replace(self, backend=backend)


def load_tokenizer(hf_dir: Path | str) -> Tokenizer:
    """Load the tokenizer saved in `hf_dir`; MegarlError if there is none, or it names
    no end token.
    """
    folder = Path(hf_dir)
    if not folder.is_dir():
        raise MegarlError(
            f"{folder}: no such directory; a model directory in Hugging Face form is needed"
            " (model.path)"
        )
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        config = read_json(folder / "tokenizer_config.json")
    except Exception as error:  # tokenizers raises a plain Exception
        advice = "tokenizer.json and tokenizer_config.json are needed"
        raise MegarlError(f"{folder}: no tokenizer can be loaded ({error}); {advice}") from None
    backend.no_truncation()
    backend.no_padding()
    (_, end), (begin, begin_id) = (
        _special(backend, config.get(name)) for name in ("eos_token", "bos_token")
    )
    if (
        begin_id is not None and config.get("add_bos_token") is True
    ):  # DeepSeek's tokenizer.json leaves it out
        backend.post_processor = TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, begin_id)]
        )
    if end is None:
        raise MegarlError(
            f"{folder / 'tokenizer_config.json'}: eos_token is missing, or is not in tokenizer.json"
        )
    if end >= (vocabulary := _vocabulary(folder / "config.json")):
        raise MegarlError(
            f"{folder / 'tokenizer_config.json'}: eos_token is token {end}, beyond the model's"
            f" vocabulary of {vocabulary} (vocab_size in config.json); name one that the model can"
            " write"
        )
    ids = [
        id
        for name in ("config.json", "generation_config.json")
        for id in _end_ids(folder / name)
        if id < vocabulary
    ]
    others = tuple(
        dict.fromkeys(id for id in ids if id != end and backend.id_to_token(id) is not None)
    )
    return Tokenizer(backend, end, folder, vocabulary, others)


def _special(backend: Backend, named: object) -> tuple[str, int | None]:
    """Return text and id of a special token of tokenizer_config.json; the id is None if
    tokenizer.json lacks the token.
    """
    text = named.get("content") if isinstance(named, dict) else named
    return (text, backend.token_to_id(text)) if isinstance(text, str) else ("", None)


def _end_ids(file: Path) -> list[int]:
    """Return the end-of-sequence ids in this file. A server of the model stops at them
    by itself.
    """
    config = read_json(file) if file.is_file() else {}
    named = config.get(
        "eos_token_id", text_config(config, file).get("eos_token_id")
    )  # Llama 4 has them in text_config
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise MegarlError(
            f"{file}: eos_token_id must be a token id or a list of them, not {named!r}"
        )
    return ids


def _vocabulary(config: Path) -> int:
    """Return the vocabulary size of the model with this config.json; unlimited if there
    is only a tokenizer.
    """
    if not config.is_file():
        return sys.maxsize
    size = text_config(read_json(config), config).get("vocab_size", sys.maxsize)
    if type(size) is not int or size < 1:
        raise MegarlError(f"{config}: vocab_size is {size!r}, not a number of tokens")
    return size
