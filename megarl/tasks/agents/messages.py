"""The content of an agent's request, independent of the protocol: canonical messages,
and when two messages are the same.

    chat completions ┐
    messages         ├─► AgentRequest: CanonicalMessage …, tools
    responses        ┘     ─► tree.py: which conversation it continues ─► tokens

Agents seldom send back exactly what they were served: they join parts, strip
whitespace, re-encode the arguments' JSON, drop ids and reasoning. Two messages are the
same if their roles, texts (an assistant's stripped of whitespace) and calls agree.
Arguments are compared as JSON values (`number_of`): 1, 1.0 and 1e0 are one number; true
and "1" are others; the order of keys does not matter. Reasoning and ids are compared
separately (tree.py).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents.bounds import RequestBounds
from megarl.tasks.agents.errors import WireError

CACHED_MESSAGE = 500
"""Bytes that a message of the cache occupies besides its text."""


class ToolCall(NamedTuple):
    """A tool call by the policy. arguments: a JSON value, or the text as written if it
    is not JSON. written: the id that the policy wrote in the call, "" if none.
    """

    id: str
    name: str
    arguments: Any
    written: str = ""

    @staticmethod
    def of(id: str, name: str, arguments: Any) -> "ToolCall":
        """Make a call from the fields of a request, where the arguments are a string of
        JSON or an object.
        """
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = msgspec.json.decode(arguments or "{}")
        return ToolCall(id, name, arguments)

    @property
    def json(self) -> str:
        """The arguments as the text that is served."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class CanonicalMessage:
    """A message. marks: opaque ids in an assistant's message, made by us; answers: the
    id of the call that a tool answers.
    """

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    marks: frozenset[str] = frozenset()
    answers: str = ""

    @cached_property
    def key(self) -> bytes:
        """A hash of what must agree for two messages to be the same."""
        text = self.text.strip() if self.role == "assistant" else self.text
        calls = [[call.name, comparable(call.arguments)] for call in self.calls]
        return hashlib.sha256(tagged([self.role, text, calls])).digest()


class AnswerForm(NamedTuple):
    """A form that a request demands of its answer. field: where it does; words: how the
    policy is asked for it.
    """

    field: str
    words: str


@dataclass(frozen=True)
class AgentRequest:
    """A request for the next message. tools: functions in OpenAI's format; max_tokens:
    None if the agent sets no limit.
    """

    messages: tuple[CanonicalMessage, ...]
    tools: tuple[JsonObject, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    forms: tuple[AnswerForm, ...] = ()


def tagged(value: Any) -> bytes:
    """Return JSON that is equal only for equal values of equal types."""
    return msgspec.json.encode(value, order="sorted")


def comparable(arguments: Any) -> Any:
    """Return a call's arguments with their numbers made comparable."""
    return json.loads(json.dumps(arguments), parse_int=number_of, parse_float=number_of)


def number_of(text: str) -> float | list[str]:
    """Return the number as a double, as which JavaScript reads it: 1.0, 1 and 1e0 are
    equal, -0.0 and 0 too, and so are integers above 2**53 that have the same double. A
    number that no double can hold equals only itself.
    """
    number = float(text)
    if math.isfinite(number):
        return number + 0.0  # -0.0 becomes 0.0
    return [text]


class ReadMessages:
    """A cache of messages that a session has sent, by the hash of their JSON: each
    request repeats the whole conversation. It holds as much as two bodies can contain;
    when it would exceed that, it is emptied. answered: the parts of the session's
    answers by their items' ids (responses.py), by which some clients name them.
    """

    def __init__(self, bounds: RequestBounds) -> None:
        self.bounds = bounds
        self.answered: dict[str, CanonicalMessage] = {}
        self._messages: dict[tuple[type, bytes], tuple[CanonicalMessage, ...]] = {}
        self._bytes = 0

    def read[T](
        self,
        raw: msgspec.Raw,
        kind: type[T],
        read_item: Callable[[T, str], Iterable[CanonicalMessage]],
        field: str,
    ) -> list[CanonicalMessage]:
        """Return the messages in `raw`, the list in a request's `field`. kind: the type
        of its items; read_item: maps an item and its place (for errors) to the item's
        messages. WireError if there are too many, if an item is not a `kind`, or if
        `read_item` raises it.
        """
        messages: list[CanonicalMessage] = []
        items = decoded(raw, list[msgspec.Raw], field)
        self.bounds.check_count(len(items))
        for n, item in enumerate(items):
            key = (kind, hashlib.sha256(item).digest())
            item_messages = self._messages.get(key)
            if item_messages is None:
                place = f"{field}[{n}]"
                item_messages = tuple(read_item(decoded(item, kind, place), place))
                self._bytes += len(bytes(item)) + CACHED_MESSAGE * len(item_messages)
                if self._bytes > 2 * self.bounds.body_bytes:
                    self._messages.clear()
                    self._bytes = 0
                self._messages[key] = item_messages
            messages += item_messages
        return messages


def decoded[T](raw: msgspec.Raw, kind: type[T], field: str) -> T:
    """Return the JSON of a body's field as a `kind`. WireError if it is none; the place
    that it names begins at the body, `$.messages[0].role`, and not at the field, as in
    msgspec's error.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem, _, place_in_field = str(error).partition(" - at `$")
        raise WireError(400, f"{problem} - at `$.{field}{place_in_field or '`'}") from None
    except RecursionError:
        raise WireError(400, f"{field}: nested too deeply") from None
