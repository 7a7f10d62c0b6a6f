"""What the protocols share: which fields of a request are used, ignored or refused;
texts in several parts; OpenAI's errors.

    chat_completions.py, anthropic_messages.py, responses.py ─► WireProtocol ─► gateway.py

A table in docs/agents.md says which field is which. A field is refused if with it the
policy would sample from a distribution other than the one that is trained, or if it
asks for something that the policy cannot do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents.bounds import MOST_STOPS
from megarl.tasks.agents.errors import WireError, refused_field
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, decoded
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


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FormatOption(msgspec.Struct):
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
        read = {*self.body.__struct_fields__, *self.refused, "model"} - {self.conversation}
        try:
            fields = msgspec.json.decode(with_whole_characters(data), type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            raise WireError(400, "the body is not a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(400, f"the body is not JSON: {error}") from None
        except RecursionError:
            raise WireError(400, "the body is nested too deeply") from None
        return {
            name: decoded(raw, Any, name) if name in read else raw for name, raw in fields.items()
        }

    def request(self, body: JsonObject, known: ReadMessages) -> tuple[str, AgentRequest]:
        """Return model name and request. known: messages sent before. WireError if a
        field is refused or has a wrong type, or if there are more messages and tools
        than the context can have tokens.
        """
        for field, why in self.refused.items():
            if body.get(field):
                raise refused_field(field, why)
        try:
            read = msgspec.convert(body, self.body, strict=True)
        except msgspec.ValidationError as error:
            raise WireError(400, str(error)) from None
        request = self.read(read, known)
        known.bounds.check_count(len(request.messages) + len(request.tools))
        return body.get("model") or "", request

    def ignored(self, body: JsonObject) -> Iterator[str]:
        """Yield the names of fields that have a value but are neither read nor refused."""
        known = {*self.body.__struct_fields__, *self.refused, "model"}
        yield from (
            field for field, value in body.items() if field not in known and bytes(value) != b"null"
        )

    def read(self, body: Any, known: ReadMessages) -> AgentRequest:
        """Return the request in a body whose fields have the right types."""
        raise NotImplementedError

    def note_answer(self, turn: ServedTurn, known: ReadMessages) -> None:
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


def asked(
    messages: Sequence[CanonicalMessage],
    tools: Iterable[tuple[str, JsonObject]],
    choice: Any,
    limits: Iterable[int | None],
    stop: str | list[str] | None = None,
    stream: bool | None = None,
) -> AgentRequest:
    """Return a request. tools: (type, function); choice: the tool choice, a word or an
    object with a type; limits: on the answer's tokens. WireError if the policy cannot
    continue the messages, or cannot answer as asked.
    """
    if not messages:
        raise WireError(400, "messages: there are none")
    if messages[-1].role == "assistant":
        raise refused_field(
            "messages", "the last one is the assistant's; continuing a message is not supported"
        )
    functions = list(tools)
    for n, (kind, function) in enumerate(functions):
        if kind != "function":
            raise refused_field(f"tools[{n}]", f"{kind}: {NO_PROVIDER}; the policy calls functions")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise refused_field(f"tools[{n}]", "the function has no name")
    chosen = choice.get("type") if isinstance(choice, dict) else choice
    if chosen not in (None, "auto", "any", "required", "none"):
        raise refused_field("tool_choice", f"a named tool {NOT_THE_POLICY}")
    given = [limit for limit in limits if limit is not None]
    if any(limit < 1 for limit in given):
        raise refused_field("max_tokens", "must be 1 or more")
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MOST_STOPS:
        raise refused_field(
            "stop", f"there are {len(stops):,} texts; at most {MOST_STOPS} are looked for"
        )
    return AgentRequest(
        messages=tuple(messages),
        tools=tuple(
            {"type": "function", "function": function}
            for _, function in functions
            if chosen != "none"
        ),
        max_tokens=min(given, default=None),
        stop=tuple(text for text in stops if text),
        stream=bool(stream),
    )


def text_of(content: Content, where: str, between: str = "") -> str:
    """Return a message's text, its parts joined by `between`. WireError if a part is
    not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in (
            "text",
            "input_text",
            "output_text",
            "refusal",
            "reasoning_text",
            "summary_text",
        ):
            raise refused_field(where, f"a part is {part.type}; the policy reads only text")
    return between.join(part.text or part.refusal or "" for part in content)


def role_of(role: str, where: str) -> str:
    """Return a message's role, with "developer" turned into "system". WireError if the
    role is unknown.
    """
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise refused_field(
            where, f"{role!r} is not one of system, developer, user, assistant, tool"
        )
    return "system" if role == "developer" else role


def refuse_format(given: Any, field: str) -> None:
    """Raise WireError if the requested format of the answer is not text."""
    if given is not None and not (isinstance(given, dict) and given.get("type") == "text"):
        raise refused_field(field, NOT_THE_POLICY)


def with_whole_characters(data: bytes) -> bytes:
    """Return a body of JSON in which U+FFFD stands for each half of a surrogate pair,
    as JavaScript's `toWellFormed` has it. A text that was cut within a character ends
    with one, and no tokenizer knows it.
    """
    if rb"\ud" not in data and rb"\uD" not in data:
        return data
    return _ESCAPE.sub(lambda match: rb"\ufffd" if len(match[0]) == _HALF_PAIR else match[0], data)
