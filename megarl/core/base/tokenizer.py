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
    """A tokenizer and the ids that end a completion."""

    backend: Backend
    end: int  # ends a completion
    path: Path  # its directory, for error messages
    # Number of tokens that the model there knows; a larger id crashes a server.
    vocabulary: int = sys.maxsize
    # Further ids that end a completion; gpt-oss has one that ends a call.
    others: tuple[int, ...] = ()

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
            encodings = self.backend.encode_batch(texts, add_special_tokens=framed)
        # tokenizers raises a plain Exception if a closed vocabulary lacks a character
        except Exception as error:
            examples = ", ".join(repr(text[:80]) for text in texts[:3])
            raise MegarlError(
                f"{self.path}: the tokenizer cannot encode {examples} …: {error}"
            ) from None
        encoded = [int32(encoding.ids) for encoding in encodings]
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
        plain = self.encode_all([text])[0].tolist()
        framed = self.encode_all([text], framed=True)[0].tolist()
        added = framed[: _position(plain, framed)]
        if added != plain[: len(added)]:
            log.warning(
                "%s: its texts do not begin with %s, which the tokenizer puts before a text; write"
                " it there unless the model was trained without",
                source,
                self.decode(int32(added)),
            )

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
        prefix = int32([self.end])
        text = self.decode(np.append(prefix, tokens))
        return text.removeprefix(self.decode(prefix))

    def literal(self) -> "Tokenizer":
        """Return a tokenizer that encodes the names of special tokens as ordinary text,
        for text such as a tool's output.
        """
        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return replace(self, backend=backend)


def _position(part: list[int], ids: list[int]) -> int:
    """Return where `part` begins in the ids; 0 if it is not there."""
    for start in range(len(ids)):
        if ids[start : start + len(part)] == part:
            return start
    return 0


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
        raise MegarlError(
            f"{folder}: no tokenizer can be loaded ({error}); tokenizer.json and"
            " tokenizer_config.json are needed"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    if config.get("add_bos_token") is True:  # DeepSeek's tokenizer.json leaves it out
        _put_before_texts(backend, config.get("bos_token"))
    _, end = _special(backend, config.get("eos_token"))
    if end is None:
        raise MegarlError(
            f"{folder / 'tokenizer_config.json'}: eos_token is missing, or is not in tokenizer.json"
        )
    vocabulary = _vocabulary(folder / "config.json")
    if end >= vocabulary:
        raise MegarlError(
            f"{folder / 'tokenizer_config.json'}: eos_token is token {end}, beyond the model's"
            f" vocabulary of {vocabulary} (vocab_size in config.json); name one that the model can"
            " write"
        )
    others = []
    for id in _end_ids(folder / "config.json") + _end_ids(folder / "generation_config.json"):
        is_known = id < vocabulary and backend.id_to_token(id) is not None
        if is_known and id != end and id not in others:
            others.append(id)
    return Tokenizer(backend, end, folder, vocabulary, tuple(others))


def _put_before_texts(backend: Backend, token: object) -> None:
    """Make the tokenizer put this special token of tokenizer_config.json before every
    text, if tokenizer.json has it.
    """
    text, id = _special(backend, token)
    if id is not None:
        backend.post_processor = TemplateProcessing(
            single=[text, "$A"], special_tokens=[(text, id)]
        )


def _special(backend: Backend, token: object) -> tuple[str, int | None]:
    """Return text and id of a special token of tokenizer_config.json; the id is None if
    tokenizer.json lacks the token.
    """
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return "", None
    return text, backend.token_to_id(text)


def _end_ids(file: Path) -> list[int]:
    """Return the end-of-sequence ids in this file. A server of the model stops at them
    by itself.
    """
    config = read_json(file) if file.is_file() else {}
    text = text_config(config, file)  # where Llama 4 has them
    value = config.get("eos_token_id", text.get("eos_token_id"))
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise MegarlError(
            f"{file}: eos_token_id must be a token id or a list of them, not {value!r}"
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
