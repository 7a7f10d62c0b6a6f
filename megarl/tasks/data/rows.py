"""A row of a prompt set, and how it is read from a row of another schema: by columns.

A dot goes into a column of columns: `reward_model.ground_truth`.

One normal form of texts serves duplicates, splits and decontamination: when two are the same, and the words of one.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

LARGEST_ANSWER = 1 << 20
"""Characters. Unit tests of code reach hundreds of megabytes a problem."""

LARGEST_DIFFICULTY = 1 << 31
"""On either side of 0."""


class Row(msgspec.Struct, frozen=True):
    """What the project trains on. difficulty: smaller is easier; 0 where it is not known."""

    id: str
    prompt: str
    answer: str
    difficulty: Annotated[int, msgspec.Meta(ge=-LARGEST_DIFFICULTY, le=LARGEST_DIFFICULTY)] = 0


class UnfitError(Exception):
    """A row that is not of its schema; the text says how."""


type Raw = Mapping[str, Any]
type Getter = Callable[[Raw], Any]


@dataclass(frozen=True)
class Columns:
    """How a row of another schema is read. Without an id a prompt is named by its text, the same in any order of rows."""

    prompt: Getter
    answer: Getter
    difficulty: Getter = lambda raw: 0
    id: Getter | None = None

    def __call__(self, raw: Raw) -> Row:
        prompt = text_of(self.prompt(raw))
        name = f"{fingerprint(prompt):016x}" if self.id is None else str(self.id(raw))
        return Row(name, prompt, answer_of(self.answer(raw)), whole_of(self.difficulty(raw)))


def column(path: str) -> Getter:
    """The value at a dotted path."""

    def get(raw: Raw) -> Any:
        here: Any = raw
        for key in path.split("."):
            if not isinstance(here, Mapping) or key not in here:
                raise UnfitError(f"no column {path!r}; the row has {', '.join(map(str, raw))}")
            here = here[key]
        return here

    return get


def text_of(value: Any) -> str:
    """A prompt: text, or one message of the user's as a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        return text_of(value[0].get("content"))
    raise UnfitError(f"the prompt is neither text nor one message of the user's: {shown(value)}")


def answer_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UnfitError(f"the answer is neither text nor a number: {shown(value)}")


def whole_of(value: Any) -> int:
    """A difficulty: a whole number, or text with one in it, such as `Level 5`."""
    if value is None:
        return 0
    digits = re.search(r"-?\d{1,18}", value) if isinstance(value, str) else None
    number = int(digits.group()) if digits else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise UnfitError(f"the difficulty is not a whole number: {shown(value)}")
    if abs(number) > LARGEST_DIFFICULTY:
        raise UnfitError(f"the difficulty is not between -2^31 and 2^31: {shown(value)}")
    return number


def shown(value: Any) -> str:
    return repr(value)[:60]


EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Kana, Han, Hangul: written without blanks, so each character is a word."""
_WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")


def collapsed(text: str) -> str:
    """With single blanks. Texts that are equal so are the same prompt; case and signs count, as in `27+5` and `27-5`."""
    return " ".join(text.split())


def fingerprint(text: str) -> int:
    """64 bits of a hash of the collapsed text. Of a million texts two different ones agree once in 4e7 sets."""
    return digest(collapsed(text))


def digest(text: str) -> int:
    """64 bits of a hash of exactly this text."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case. Everything between them only divides."""
    return _WORD.findall(text.casefold())
