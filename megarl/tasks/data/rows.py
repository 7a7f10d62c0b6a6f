"""A row of a prompt set, and how to read one from the columns of another schema.

A dot reaches into a nested column: `reward_model.ground_truth`.

One normal form of texts decides when two are equal and what their words are, for duplicates, splits and decontamination.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

LARGEST_ANSWER = 1 << 20
"""Most characters in an answer. Unit tests of code reach hundreds of megabytes per problem."""

LARGEST_DIFFICULTY = 1 << 31
"""Upper bound of |difficulty|."""


class PromptRow(msgspec.Struct, frozen=True):
    """A row that the project trains on. difficulty: smaller is easier; 0 if unknown."""

    id: str
    prompt: str
    answer: str
    difficulty: Annotated[int, msgspec.Meta(ge=-LARGEST_DIFFICULTY, le=LARGEST_DIFFICULTY)] = 0


class UnfitError(Exception):
    """A row does not fit its schema; the message says how."""


type Raw = Mapping[str, Any]
type Getter = Callable[[Raw], Any]


@dataclass(frozen=True)
class Columns:
    """How to read a row of another schema. Without an id column, a prompt's id is a hash of its text."""

    prompt: Getter
    answer: Getter
    difficulty: Getter = lambda raw: 0
    id: Getter | None = None

    def __call__(self, raw: Raw) -> PromptRow:
        prompt = text_of(self.prompt(raw))
        name = hashed_id(prompt) if self.id is None else str(self.id(raw))
        return PromptRow(name, prompt, answer_of(self.answer(raw)), whole_of(self.difficulty(raw)))


def column(path: str) -> Getter:
    """Return a getter for the value at a dotted path."""

    def get(raw: Raw) -> Any:
        here: object = raw
        for key in path.split("."):
            if not isinstance(here, Mapping) or key not in here:
                raise UnfitError(f"no column {path!r}; the row has {', '.join(map(str, raw))}")
            here = here[key]
        return here

    return get


def text_of(value: Any) -> str:
    """Return a prompt's text, given as a string or as a list of one user message."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        return text_of(value[0].get("content"))
    raise UnfitError(f"the prompt is neither text nor one message of the user's: {shown(value)}")


def answer_of(value: object) -> str:
    if value is None or value != value:  # NaN, as a column of numbers has where one is missing
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UnfitError(f"the answer is neither text nor a number: {shown(value)}")


def whole_of(value: Any) -> int:
    """Return a difficulty: a whole number, or text containing one, such as `Level 5`."""
    if value is None or value != value:
        return 0
    digits = re.search(r"-?\d{1,18}", value) if isinstance(value, str) else None
    number = int(digits.group()) if digits else int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise UnfitError(f"the difficulty is not a whole number: {shown(value)}")
    if abs(number) > LARGEST_DIFFICULTY:
        raise UnfitError(f"the difficulty is not between -2^31 and 2^31: {shown(value)}")
    return number


def shown(value: object) -> str:
    return repr(value)[:60]


EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Kana, Han, Hangul. Each of these characters counts as a word, since spaces need not separate words."""
_WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")


def collapsed(text: str) -> str:
    """Reduce whitespace to single spaces. Texts equal after this are the same prompt; case and punctuation count."""
    return " ".join(text.split())


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of the collapsed text. One in 4e7 sets of a million texts has a collision."""
    return digest(collapsed(text))


def hashed_id(prompt: str) -> str:
    """Return the id of a row that has none."""
    return f"{fingerprint(prompt):016x}"


def digest(text: str) -> int:
    """Return a 64-bit hash of exactly this text."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def words(text: str) -> list[str]:
    """Return runs of letters and digits, lower-cased. Everything else only separates them."""
    return _WORD.findall(text.casefold())
