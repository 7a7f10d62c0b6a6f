"""What an agent's request says, whatever the protocol: canonical messages, and when two of them are the same.

    chat completions ┐
    messages         ├─► AgentRequest: CanonicalMessage …, tools ─► tree.py: which conversation goes on ─► tokens
    responses        ┘

Agents seldom send back what they were served: they join parts, strip blanks, write the JSON of arguments anew, drop ids and
reasoning. Two messages are the same if role, text (an assistant's without blanks at both ends) and calls agree, arguments
as JSON values: 1, 1.0 and true are three of them, and the order of keys is none. Reasoning and ids are compared apart
(tree.py).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec


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

    @property
    def key(self) -> bytes:
        """Return what must agree in two messages that are the same."""
        text = self.text.strip() if self.role == "assistant" else self.text
        return tagged([self.role, text, [[call.name, call.arguments] for call in self.calls]])


@dataclass(frozen=True)
class AgentRequest:
    """A request for the next message. tools: functions, as OpenAI writes them; max_tokens: None if the agent names no limit."""

    messages: tuple[CanonicalMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
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
