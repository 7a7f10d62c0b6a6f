"""What an agent's request says, whatever the protocol: canonical messages, and when two of them are the same.

    chat completions ┐
    messages         ├─► AgentRequest: CanonicalMessage …, tools ─► tree.py: which conversation goes on ─► tokens
    responses        ┘

Agents seldom send back what they were served: they join parts, strip blanks, write the JSON of arguments anew, drop ids and
reasoning. Two messages are the same if role, text (an assistant's without blanks at both ends) and calls agree, arguments
as JSON values: 1, 1.0 and true are three of them, and the order of keys is none. Reasoning and ids are compared apart
(tree.py).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from megarl.core.base.types import JsonObject

LARGEST_BODY = 32 << 20
"""Bytes of a request; a conversation of 500 turns and 193,000 tokens has 1.5 million."""


class WireError(Exception):
    """The request is not served. status: of HTTP; code: as in OpenAI's errors."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def refused_field(field: str, why: str) -> WireError:
    """Return the error for a field that would change what is sampled, or whose use the policy does not know."""
    return WireError(400, f"{field}: {why}", "unsupported_parameter")


class ToolCall(NamedTuple):
    """A call by the policy. arguments: a JSON value, or the text as it is if that is none. written: the id that the
    policy wrote in it, "" if none."""

    id: str
    name: str
    arguments: Any
    written: str = ""

    @staticmethod
    def of(id: str, name: str, arguments: Any) -> "ToolCall":
        """Make a call from the wire, where arguments are JSON in a text, or an object."""
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = msgspec.json.decode(arguments or "{}")
        return ToolCall(id, name, arguments)

    @property
    def json(self) -> str:
        """Return the arguments as they are served."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class CanonicalMessage:
    """A message. marks: opaque ids of ours in it, of an assistant's; answers: id of the call whose result it is."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    marks: frozenset[str] = frozenset()
    answers: str = ""

    @cached_property
    def key(self) -> bytes:
        """Return the hash of what must agree in two messages that are the same."""
        text = self.text.strip() if self.role == "assistant" else self.text
        return hashlib.sha256(tagged([self.role, text, [[call.name, call.arguments] for call in self.calls]])).digest()


@dataclass(frozen=True)
class AgentRequest:
    """A request for the next message. tools: functions, as OpenAI writes them; max_tokens: None if the agent names no limit."""

    messages: tuple[CanonicalMessage, ...]
    tools: tuple[JsonObject, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False


def tagged(value: Any) -> bytes:
    """Return JSON that is equal for equal values of equal types alone."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may have as \\ud800
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def checked(messages: Sequence[CanonicalMessage]) -> tuple[CanonicalMessage, ...]:
    """Return the messages of a request; WireError if the policy cannot go on from them."""
    if not messages:
        raise WireError(400, "messages: there are none")
    if messages[-1].role == "assistant":
        raise refused_field("messages", "the last one is the assistant's; going on within a message is not supported")
    return tuple(messages)


class ReadMessages:
    """What a session has sent before, by the hash of its JSON: an agent sends the whole conversation with each request.

    It holds as much as one body can have; at more, all is forgotten and read again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[type, bytes], tuple[CanonicalMessage, ...]] = {}
        self._bytes = 0

    def read[T](
        self, raw: msgspec.Raw, kind: type[T], said: Callable[[T, str], Iterable[CanonicalMessage]], field: str
    ) -> list[CanonicalMessage]:
        """Return the messages of `raw`, the list in a request's `field`. kind: the type of its items; said: returns an item's
        messages, given its place for errors. WireError if an item is no `kind`, or `said` raises it."""
        messages: list[CanonicalMessage] = []
        for n, item in enumerate(_decoded(raw, list[msgspec.Raw], field)):
            digest = hashlib.sha256(item).digest()
            made = self._known.get((kind, digest))
            if made is None:
                where = f"{field}[{n}]"
                made = tuple(said(_decoded(item, kind, where), where))
                self._bytes += len(bytes(item))
                if self._bytes > LARGEST_BODY:
                    self._known.clear()
                    self._bytes = 0
                self._known[kind, digest] = made
            messages += made
        return messages


def _decoded[T](raw: msgspec.Raw, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        said, _, inner = str(error).partition(" - at `$")
        raise WireError(400, f"{said} - at `$.{where}{inner or '`'}") from None
