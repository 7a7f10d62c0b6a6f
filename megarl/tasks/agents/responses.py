"""OpenAI's Responses protocol: POST /v1/responses. Its input is a list of items; one
message can span several of them.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents import wire
from megarl.tasks.agents.errors import ContextFull, WireError, refused_field
from megarl.tasks.agents.forms import form_of_text
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from megarl.tasks.agents.session import ServedTurn

UNKNOWN_ITEM = (
    "no answer of this session has an item with this id; send the item itself, as clients do with"
    " `store: false`"
)


class Item(msgspec.Struct):
    """An item of the input: a message, a part of one, or a reference to one."""

    type: str = "message"
    role: str = ""
    content: wire.Content = None
    id: str | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: wire.Content = None
    summary: list[wire.TextPart] | None = None
    encrypted_content: str | None = None


class ResponsesBody(msgspec.Struct):
    """The fields of a request that are read."""

    input: msgspec.Raw
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    text: wire.FormatOption | None = None


class Responses(wire.WireProtocol):
    """OpenAI's newer protocol."""

    path = "/v1/responses"
    conversation = "input"
    body = ResponsesBody
    refused: ClassVar = {
        "previous_response_id": wire.NO_STATE,
        "conversation": wire.NO_STATE,
        "background": wire.NO_STATE,
        "prompt": wire.NO_STATE,
        "top_logprobs": wire.NO_LOGPROBS,
    }

    def read(self, body: ResponsesBody, cache: ReadMessages) -> AgentRequest:
        """Return the request in a body. WireError if the policy cannot answer it."""
        forms = form_of_text("text.format", body.text.format) if body.text else []
        items = body.input
        if bytes(items).startswith(b'"'):  # a text alone is the user's message
            item = Item(role="user", content=msgspec.json.decode(items))
            items = msgspec.Raw(msgspec.json.encode([item]))
        messages = [CanonicalMessage("system", body.instructions)] if body.instructions else []
        read_item = partial(_messages, answered=cache.answered)
        for message in cache.read(items, Item, read_item, "input"):
            if message.role == "assistant" and messages and messages[-1].role == "assistant":
                message = _join(messages.pop(), message)
            messages.append(message)
        tools: list[tuple[str, JsonObject]] = []
        for tool in body.tools or ():
            function = {key: value for key, value in tool.items() if key != "type"}
            tools.append((tool.get("type", ""), function))
        return wire.request_of(messages, tools, body.tool_choice, [body.max_output_tokens], forms)

    def error(self, error: WireError) -> JsonObject:
        """Return the body of an error."""
        body = super().error(error)
        if isinstance(error, ContextFull):
            body["error"]["message"] = (
                f"Your input exceeds the context window of this model: {error.tokens} of"
                f" {error.limit} tokens. Please adjust your input and try again."
            )
        return body

    def error_event(self, error: WireError) -> tuple[str, JsonObject]:
        """Return the event that ends a stream with an error."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": None}
        return "error", event | {"sequence_number": 0}

    def note_answer(self, turn: ServedTurn, cache: ReadMessages) -> None:
        """Note the answer's items, which later requests may name by their ids."""
        for item in _items(turn):
            (message,) = _messages(msgspec.convert(item, Item), "output", {})
            cache.answered[item["id"]] = message

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        """Return the body of an answer."""
        status = "completed"
        details = None
        if turn.finish == "length":
            status = "incomplete"
            details = {"reason": "max_output_tokens"}
        return {
            "id": f"resp_{turn.node.number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.get("model", ""),
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": _items(turn),
            "instructions": body.get("instructions"),
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": turn.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.prompt_tokens + turn.completion_tokens,
            },
        }

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        """Yield an answer's events as (name, data): the beginning, those of each item,
        and the whole answer.
        """
        reply = self.reply(body, turn)
        unfinished: JsonObject = {
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }
        start = {"response": reply | unfinished}
        events: list[tuple[str, JsonObject]] = [("created", start), ("in_progress", start)]
        for n, item in enumerate(reply["output"]):
            events += _item_events(n, item)
        events.append((reply["status"], {"response": reply}))
        for n, (kind, event) in enumerate(events):
            yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": n} | event


def _item_events(index: int, item: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Yield the events of one item of an answer as (kind, event). index: its place in
    the answer. A message or reasoning has one part, a call none.
    """
    place: JsonObject = {"output_index": index, "item_id": item["id"]}
    parts: list[JsonObject] = []
    if item["type"] == "function_call":
        kind = "function_call_arguments"
        delta = item["arguments"]
        content: JsonObject = {"arguments": item["arguments"], "name": item["name"]}
        empty: JsonObject = {"arguments": ""}
    else:
        parts = item["content"]
        (part,) = parts  # the only one
        place["content_index"] = 0
        kind = part["type"]
        delta = part["text"]
        content = {"text": part["text"]}
        empty = {"content": []}
    started = item | empty | {"status": "in_progress"}
    yield "output_item.added", {"output_index": index, "item": started}
    for part in parts:
        yield "content_part.added", place | {"part": part | {"text": ""}}
    yield f"{kind}.delta", place | {"delta": delta}
    yield f"{kind}.done", place | content
    for part in parts:
        yield "content_part.done", place | {"part": part}
    yield "output_item.done", {"output_index": index, "item": item}


def _join(first: CanonicalMessage, second: CanonicalMessage) -> CanonicalMessage:
    """Join two consecutive messages of the assistant."""
    return replace(
        second,
        text=first.text + second.text,
        calls=first.calls + second.calls,
        reasoning=first.reasoning + second.reasoning,
        marks=first.marks | second.marks,
    )


def _messages(
    item: Item, field: str, answered: Mapping[str, CanonicalMessage]
) -> Iterator[CanonicalMessage]:
    """Yield the one canonical message in an item. `read` joins consecutive messages of
    the assistant. answered: the parts of answers that an `item_reference` may name.
    """
    match item.type:
        case "message":
            role = wire.role_of(item.role, f"{field}.role")
            text = wire.text_of(item.content, f"{field}.content")
            marks = frozenset([item.id] if item.id and role == "assistant" else [])
            yield CanonicalMessage(role, text, marks=marks)
        case "reasoning":
            text = wire.text_of(item.content, f"{field}.content")
            marks = frozenset(filter(None, (item.id, item.encrypted_content)))
            yield CanonicalMessage("assistant", reasoning=text, marks=marks)
        case "function_call":
            call = ToolCall.of(item.call_id, item.name, item.arguments)
            yield CanonicalMessage("assistant", calls=(call,), marks=frozenset([call.id]))
        case "function_call_output":
            text = wire.text_of(item.output, f"{field}.output")
            yield CanonicalMessage("tool", text, answers=item.call_id)
        case "item_reference":
            message = answered.get(item.id or "")
            if message is None:
                raise refused_field(field, UNKNOWN_ITEM)
            yield message
        case _:
            raise refused_field(field, f"the policy does not support {item.type}")


def _items(turn: ServedTurn) -> list[JsonObject]:
    """Return the items of an answer: reasoning, text, calls."""
    number = turn.node.number
    message = turn.message
    items: list[JsonObject] = []
    part: JsonObject
    if message.reasoning:
        part = {"type": "reasoning_text", "text": message.reasoning}
        mark = f"rs_{number}"
        items.append(
            {
                "type": "reasoning",
                "id": mark,
                "summary": [],
                "content": [part],
                "encrypted_content": mark,
            }
        )
    if message.text or not message.calls:
        answer = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [answer]}
        )
    for call in message.calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.json,
            }
        )
    return [item | {"status": "completed"} for item in items]
