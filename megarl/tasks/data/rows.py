"""A row of a prompt set, and the normal form of texts.

The normal form decides when two texts are equal and what their words are, for
duplicates, splits and decontamination.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

LARGEST_ANSWER = 1 << 20
"""Most characters in an answer. Unit tests of code reach hundreds of megabytes per
problem.
"""

LARGEST_DIFFICULTY = 1 << 31
"""Upper bound of |difficulty|."""

type Raw = Mapping[str, Any]
"""A row as its source has it: values by column."""

type Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": …}, and more that a
chat template reads, such as tool_calls.
"""


class UnfitError(Exception):
    """A row does not fit its schema; the message says how."""


class PromptRow(msgspec.Struct, frozen=True):
    """A row that the project trains on.

    prompt: what the user says. difficulty: smaller is easier; 0 if unknown.
    alternatives: answers that are as right as `answer`. messages: the conversation that
    the prompt is, if it has more than one message of the user's.
    """

    id: str
    prompt: str
    answer: str
    difficulty: Annotated[int, msgspec.Meta(ge=-LARGEST_DIFFICULTY, le=LARGEST_DIFFICULTY)] = 0
    alternatives: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def identity(self) -> str:
        """A text that rows share only if they ask the same."""
        return identity(self.prompt, self.messages)

    @property
    def transcript(self) -> str:
        """The prompt for people: with the roles if it has several messages."""
        if not self.messages:
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    @property
    def answers(self) -> tuple[str, ...]:
        """All answers that are right."""
        return (self.answer, *self.alternatives)


def identity(prompt: str, messages: Sequence[Message]) -> str:
    """Return a text that prompts share only if all their messages are equal. Of a
    prompt without messages it is the prompt itself.
    """
    if not messages:
        return prompt
    return "".join(f"\0{message['role']}\n{message['content']}\n" for message in messages)


def abbreviated(value: object) -> str:
    """Return the beginning of a value's repr, for error messages."""
    return repr(value)[:60]


EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Kana, Han, Hangul. Each of these characters counts as a word, since spaces need not
separate words."""
_WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")


def collapsed(text: str) -> str:
    """Reduce whitespace to single spaces.

    Texts equal after this are the same prompt; case and punctuation count.
    """
    return " ".join(text.split())


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of the collapsed text.

    One in 4e7 sets of a million texts has a collision.
    """
    return digest(collapsed(text))


def hashed_id(text: str) -> str:
    """Return the id of a row that has none. text: `PromptRow.identity`."""
    return f"{fingerprint(text):016x}"


def digest(text: str) -> int:
    """Return a 64-bit hash of exactly this text."""
    hashed = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(hashed.digest(), "big")


def words(text: str) -> list[str]:
    """Return runs of letters and digits, lower-cased. Everything else only separates
    them.
    """
    return _WORD.findall(text.casefold())
