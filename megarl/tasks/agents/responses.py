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
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from megarl.tasks.agents.session import ServedTurn

UNKNOWN_ITEM = (
    "no answer of this session has an item with this id; send the item itself, as clients do with"
    " `store: false`"
)


class Item(msgspec.Struct):
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
    input: msgspec.Raw
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    text: wire.FormatOption | None = None


class Responses(wire.WireProtocol):
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

    def read(self, body: ResponsesBody, known: ReadMessages) -> AgentRequest:
        wire.refuse_format(body.text and body.text.format, "text.format")
        items = body.input
        if bytes(items).startswith(b'"'):
            items = msgspec.Raw(
                msgspec.json.encode([Item(role="user", content=msgspec.json.decode(items))])
            )
        messages = [CanonicalMessage("system", body.instructions)] if body.instructions else []
        for said in known.read(items, Item, partial(_messages, answered=known.answered), "input"):
            if said.role == "assistant" and messages and messages[-1].role == "assistant":
                before = messages.pop()
                said = replace(
                    said,
                    text=before.text + said.text,
                    calls=before.calls + said.calls,
                    reasoning=before.reasoning + said.reasoning,
                    marks=before.marks | said.marks,
                )
            messages.append(said)
        tools = [
            (tool.get("type", ""), {key: value for key, value in tool.items() if key != "type"})
            for tool in body.tools or ()
        ]
        return wire.asked(
            messages, tools, body.tool_choice, [body.max_output_tokens], stream=body.stream
        )

    def error(self, error: WireError) -> JsonObject:
        made = super().error(error)
        if isinstance(error, ContextFull):
            made["error"]["message"] = (
                f"Your input exceeds the context window of this model: {error.tokens} of"
                f" {error.limit} tokens. Please adjust your input and try again."
            )
        return made

    def error_event(self, error: WireError) -> tuple[str, JsonObject]:
        event = {"type": "error", "code": error.code, "message": str(error), "param": None}
        return "error", event | {"sequence_number": 0}

    def note_answer(self, turn: ServedTurn, known: ReadMessages) -> None:
        for item in _items(turn):
            (part,) = _messages(msgspec.convert(item, Item), "output", {})
            known.answered[item["id"]] = part

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        whole = turn.finish != "length"
        sent = turn.prompt_tokens
        made = turn.completion_tokens
        return {
            "id": f"resp_{turn.node.number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.get("model", ""),
            "status": "completed" if whole else "incomplete",
            "error": None,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": _items(turn),
            "instructions": body.get("instructions"),
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": {
                "input_tokens": sent,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": sent + made,
            },
        }

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        whole = self.reply(body, turn)
        begun = {
            "response": (
                whole
                | {
                    "status": "in_progress",
                    "output": [],
                    "usage": None,
                    "incomplete_details": None,
                }
            )
        }
        events: list[tuple[str, JsonObject]] = [("created", begun), ("in_progress", begun)]
        for n, item in enumerate(whole["output"]):
            at: JsonObject = {"output_index": n, "item_id": item["id"]}
            empty: JsonObject
            if item["type"] == "function_call":
                told = {"arguments": item["arguments"], "name": item["name"]}
                empty = {"arguments": ""}
                kind = "function_call_arguments"
                parts = []
            else:
                (part,) = item["content"]
                told = {"text": part["text"]}
                at["content_index"] = 0
                empty = {"content": []}
                kind = part["type"]
                parts = [part]
            written = next(iter(told.values()))
            events.append(
                (
                    "output_item.added",
                    {"output_index": n, "item": item | empty | {"status": "in_progress"}},
                )
            )
            events += [("content_part.added", at | {"part": part | {"text": ""}}) for part in parts]
            events += [(f"{kind}.delta", at | {"delta": written}), (f"{kind}.done", at | told)]
            events += [("content_part.done", at | {"part": part}) for part in parts]
            events.append(("output_item.done", {"output_index": n, "item": item}))
        events.append((whole["status"], {"response": whole}))
        for n, (kind, event) in enumerate(events):
            yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": n} | event


def _messages(
    item: Item, where: str, answered: Mapping[str, CanonicalMessage]
) -> Iterator[CanonicalMessage]:
    """Yield the one canonical message in an item. `read` joins consecutive messages of
    the assistant. answered: the parts of answers that an `item_reference` may name.
    """
    match item.type:
        case "message":
            role = wire.role_of(item.role, f"{where}.role")
            marks = frozenset([item.id] if item.id and role == "assistant" else [])
            yield CanonicalMessage(
                role, wire.text_of(item.content, f"{where}.content"), marks=marks
            )
        case "reasoning":
            marks = frozenset(filter(None, (item.id, item.encrypted_content)))
            yield CanonicalMessage(
                "assistant", reasoning=wire.text_of(item.content, f"{where}.content"), marks=marks
            )
        case "function_call":
            call = ToolCall.of(item.call_id, item.name, item.arguments)
            yield CanonicalMessage("assistant", calls=(call,), marks=frozenset([call.id]))
        case "function_call_output":
            yield CanonicalMessage(
                "tool", wire.text_of(item.output, f"{where}.output"), answers=item.call_id
            )
        case "item_reference":
            part = answered.get(item.id or "")
            if part is None:
                raise refused_field(where, UNKNOWN_ITEM)
            yield part
        case _:
            raise refused_field(where, f"the policy does not support {item.type}")


def _items(turn: ServedTurn) -> list[JsonObject]:
    """Return the items of an answer: reasoning, text, calls."""
    number = turn.node.number
    message = turn.message
    done = {"status": "completed"}
    items: list[JsonObject] = []
    if message.reasoning:
        text = {"type": "reasoning_text", "text": message.reasoning}
        mark = f"rs_{number}"
        items.append(
            {
                "type": "reasoning",
                "id": mark,
                "summary": [],
                "content": [text],
                "encrypted_content": mark,
            }
        )
    if message.text or not message.calls:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{c.id}",
            "call_id": c.id,
            "name": c.name,
            "arguments": c.json,
        }
        for c in message.calls
    ]
    return [item | done for item in items]
