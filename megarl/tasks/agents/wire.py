"""What the protocols share: which fields of a request are used, ignored or refused;
texts in several parts; OpenAI's errors.

    chat_completions.py   ┐
    anthropic_messages.py ├─► WireProtocol ─► gateway.py
    responses.py          ┘

A table in docs/how-to/agents.md says which field is which. A field is refused if with
it the policy would sample from a distribution other than the one that is trained, or if
it asks for something that the policy cannot do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents.bounds import MOST_STOPS
from megarl.tasks.agents.errors import WireError, refused_field
from megarl.tasks.agents.forms import form_of_choice
from megarl.tasks.agents.messages import (
    AgentRequest,
    AnswerForm,
    CanonicalMessage,
    ReadMessages,
    decoded,
)
from megarl.tasks.agents.session import ServedTurn

NOT_THE_POLICY = (
    "constrains what is sampled, whose log-probs are then not the policy's; leave it out"
)
NO_LOGPROBS = "log-probs are kept for training, and not returned"
NO_STATE = "nothing is kept here by name; send the whole conversation"
NO_PROVIDER = "no provider here can run it"
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a surrogate pair: 12 bytes
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"  # half of one: 6 bytes
    rb"|\\."
)
"""An escape in JSON, or two that make one character."""
_HALF_PAIR = 6
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FormatOption(msgspec.Struct):
    """The field that holds the requested format of an answer."""

    format: Any = None


type Content = str | Sequence[TextPart] | None


class WireProtocol:
    """A provider's format for requests, answers and errors. body: the fields that are
    read; others are ignored. conversation: the field with the messages, which `parse`
    leaves as JSON. refused: the fields that are refused unless they are null, false, 0
    or empty, each with the reason.
    """

    path: str
    conversation: ClassVar[str] = "messages"
    body: type[msgspec.Struct]
    refused: ClassVar[Mapping[str, str]]

    def parse(self, data: bytes) -> JsonObject:
        """Return a body's fields; those that nobody reads stay as JSON. WireError if
        the body is not a JSON object.
        """
        try:
            fields = msgspec.json.decode(with_whole_characters(data), type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            raise WireError(400, "the body is not a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(400, f"the body is not JSON: {error}") from None
        except RecursionError:
            raise WireError(400, "the body is nested too deeply") from None
        decoded_fields = self._fields() - {self.conversation}
        body: JsonObject = {}
        for name, raw in fields.items():
            body[name] = decoded(raw, Any, name) if name in decoded_fields else raw
        return body

    def request(self, body: JsonObject, cache: ReadMessages) -> tuple[str, AgentRequest]:
        """Return the model's name, "" if there is none, and the request. body: of
        `parse`; cache: the messages that were sent before. WireError if a field is
        refused or has a wrong type, or if there are more messages and tools than the
        context can have tokens.
        """
        for field, reason in self.refused.items():
            if body.get(field):
                raise refused_field(field, reason)
        try:
            typed_body = msgspec.convert(body, self.body, strict=True)
        except msgspec.ValidationError as error:
            raise WireError(400, str(error)) from None
        request = self.read(typed_body, cache)
        cache.bounds.check_count(len(request.messages) + len(request.tools))
        return body.get("model") or "", request

    def ignored(self, body: JsonObject) -> Iterator[str]:
        """Yield the names of fields that have a value but are neither read nor
        refused.
        """
        known_fields = self._fields()
        for field, value in body.items():
            if field not in known_fields and bytes(value) != b"null":
                yield field

    def _fields(self) -> set[str]:
        """Return the names of the fields that are read or refused."""
        return {*self.body.__struct_fields__, *self.refused, "model"}

    def read(self, body: Any, cache: ReadMessages) -> AgentRequest:
        """Return the request in a body whose fields have the right types."""
        raise NotImplementedError

    def note_answer(self, turn: ServedTurn, cache: ReadMessages) -> None:
        """Note what later requests may name by an id."""

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        """Return the body of an answer."""
        raise NotImplementedError

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        """Yield an answer's events as (name, data)."""
        raise NotImplementedError

    def error(self, error: WireError) -> JsonObject:
        """Return the body of an error, as OpenAI writes it."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def error_event(self, error: WireError) -> tuple[str, JsonObject]:
        """Return the event, as (name, data), that ends a stream with an error."""
        return "", self.error(error)


def request_of(
    messages: Sequence[CanonicalMessage],
    tools: Iterable[tuple[str, JsonObject]],
    choice: Any,
    limits: Iterable[int | None],
    forms: Iterable[AnswerForm],
    stop: str | list[str] | None = None,
) -> AgentRequest:
    """Return a request. tools: (type, function); choice: the tool choice, a word or an
    object with a type; limits: on the answer's tokens; forms: of its text. WireError if
    the policy cannot continue the messages, or cannot answer as asked.
    """
    if not messages:
        raise WireError(400, "messages: there are none")
    if messages[-1].role == "assistant":
        raise refused_field(
            "messages", "the last one is the assistant's; continuing a message is not supported"
        )
    functions = _functions(tools)
    forms = (*forms, *form_of_choice(choice))
    if choice == "none" or choice == {"type": "none"}:  # the policy is not told of the tools
        functions = ()
    set_limits = [limit for limit in limits if limit is not None]
    if any(limit < 1 for limit in set_limits):
        raise refused_field("max_tokens", "must be 1 or more")
    return AgentRequest(
        messages=tuple(messages),
        tools=functions,
        max_tokens=min(set_limits, default=None),
        stop=_stops(stop),
        forms=forms,
    )


def _functions(tools: Iterable[tuple[str, JsonObject]]) -> tuple[JsonObject, ...]:
    """Return the tools in OpenAI's format. WireError if one is no function, or has no
    name.
    """
    functions: list[JsonObject] = []
    for n, (kind, function) in enumerate(tools):
        if kind != "function":
            raise refused_field(f"tools[{n}]", f"{kind}: {NO_PROVIDER}; the policy calls functions")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise refused_field(f"tools[{n}]", "the function has no name")
        functions.append({"type": "function", "function": function})
    return tuple(functions)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts. WireError if there are too many."""
    if isinstance(stop, str):
        stop = [stop]
    texts = stop or []
    if len(texts) > MOST_STOPS:
        raise refused_field(
            "stop", f"there are {len(texts):,} texts; at most {MOST_STOPS} are looked for"
        )
    return tuple(text for text in texts if text)


def text_of(content: Content, field: str, joint: str = "") -> str:
    """Return the text in a field of a message, its parts joined by `joint`. WireError
    if a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXT_TYPES:
            raise refused_field(field, f"a part is {part.type}; the policy reads only text")
    return joint.join(part.text or part.refusal or "" for part in content)


def role_of(role: str, field: str) -> str:
    """Return a message's role, with "developer" turned into "system". WireError if the
    role is unknown.
    """
    if role not in _ROLES:
        raise refused_field(field, f"{role!r} is not one of {', '.join(_ROLES)}")
    return "system" if role == "developer" else role


def with_whole_characters(data: bytes) -> bytes:
    """Return a body of JSON in which U+FFFD stands for each half of a surrogate pair,
    as JavaScript's `toWellFormed` has it. A text that was cut within a character ends
    with one, and no tokenizer knows it.
    """
    if rb"\ud" not in data and rb"\uD" not in data:
        return data
    return _ESCAPE.sub(_whole_character, data)


def _whole_character(escape: re.Match[bytes]) -> bytes:
    """Return what stands for a match of _ESCAPE: U+FFFD for half a surrogate pair, and
    others as they are.
    """
    if len(escape[0]) == _HALF_PAIR:
        return rb"\ufffd"
    return escape[0]
