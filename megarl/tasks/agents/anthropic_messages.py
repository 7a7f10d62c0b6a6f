"""Anthropic's Messages protocol: POST /v1/messages, and /v1/messages/count_tokens."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents import wire
from megarl.tasks.agents.errors import ContextFull, WireError
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from megarl.tasks.agents.session import ServedTurn

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A line that Claude Code puts at the head of its system prompt. It changes with each
request and tells a model nothing.
"""
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class Block(wire.TextPart):
    """A part of a message: text, thinking, a tool call, or a tool's result."""

    id: str = ""
    name: str = ""
    input: Any = None
    thinking: str = ""
    signature: str = ""
    tool_use_id: str = ""
    content: wire.Content = None


class BlockMessage(msgspec.Struct):
    role: str
    content: str | list[Block]


class NamedTool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str = ""
    input_schema: JsonObject = {}


class MessagesBody(msgspec.Struct):
    messages: msgspec.Raw
    system: wire.Content = None
    tools: list[NamedTool] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    max_tokens: int | None = None
    output_config: wire.FormatOption | None = None
    output_format: Any = None


class AnthropicMessages(wire.WireProtocol):
    path = "/v1/messages"
    body = MessagesBody
    refused: ClassVar = {"mcp_servers": wire.NO_PROVIDER, "container": wire.NO_STATE}

    def read(self, body: MessagesBody, known: ReadMessages) -> AgentRequest:
        wire.refuse_format(body.output_format, "output_format")
        wire.refuse_format(body.output_config and body.output_config.format, "output_config.format")
        system = BILLING.sub("", wire.text_of(body.system, "system", "\n\n"), count=1)
        messages = [CanonicalMessage("system", system)] if system else []
        messages += known.read(body.messages, BlockMessage, _messages, "messages")
        tools = [
            (
                "function" if tool.type in (None, "custom") else tool.type,
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            )
            for tool in body.tools or ()
        ]
        return wire.asked(
            messages, tools, body.tool_choice, [body.max_tokens], body.stop_sequences, body.stream
        )

    def error(self, error: WireError) -> JsonObject:
        said = str(error)
        if isinstance(error, ContextFull):
            said = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
        kind = ERRORS.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
        return {"type": "error", "error": {"type": kind, "message": said}}

    def error_event(self, error: WireError) -> tuple[str, JsonObject]:
        return "error", self.error(error)

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        message = turn.message
        thinking = {
            "type": "thinking",
            "thinking": message.reasoning,
            "signature": f"sig_{turn.node.number}",
        }
        blocks: list[JsonObject] = [thinking] if message.reasoning else []
        if message.text or not message.calls:
            blocks.append({"type": "text", "text": message.text})
        blocks += [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments}
            for c in message.calls
        ]
        finish = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[turn.finish]
        return {
            "id": f"msg_{turn.node.number}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model", ""),
            "content": blocks,
            "stop_reason": (
                "stop_sequence" if finish == "end_turn" and turn.node.stopped else finish
            ),
            "stop_sequence": turn.node.stopped or None,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens},
        }

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        whole = self.reply(body, turn)
        begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = whole["usage"] | {"output_tokens": 0}
        events: list[JsonObject] = [{"type": "message_start", "message": begun}]
        empty: JsonObject
        for n, block in enumerate(whole["content"]):
            match block["type"]:
                case "thinking":
                    empty = {"thinking": "", "signature": ""}
                    deltas = [{"type": f"{key}_delta", key: block[key]} for key in empty]
                case "text":
                    empty = {"text": ""}
                    deltas = [{"type": "text_delta", "text": block["text"]}]
                case _:
                    written = msgspec.json.encode(block["input"]).decode()
                    empty = {"input": {}}
                    deltas = [{"type": "input_json_delta", "partial_json": written}]
            events.append(
                {"type": "content_block_start", "index": n, "content_block": block | empty}
            )
            events += [
                {"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas
            ]
            events.append({"type": "content_block_stop", "index": n})
        ended = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        events += [
            {"type": "message_delta", "delta": ended, "usage": whole["usage"]},
            {"type": "message_stop"},
        ]
        yield from ((event["type"], event) for event in events)


def _messages(message: BlockMessage, where: str) -> Iterator[CanonicalMessage]:
    """Yield the canonical messages in a message: one for an assistant's; for a user's,
    one per tool result or run of texts.
    """
    role = wire.role_of(message.role, f"{where}.role")
    content = message.content
    blocks = [Block("text", content)] if isinstance(content, str) else content
    if role == "assistant":
        calls = tuple(ToolCall.of(b.id, b.name, b.input) for b in blocks if b.type == "tool_use")
        thinking = [b for b in blocks if b.type == "thinking"]
        rest = [b for b in blocks if b.type not in ("tool_use", "thinking", "redacted_thinking")]
        text = wire.text_of(rest, f"{where}.content")
        marks = frozenset(
            [*(call.id for call in calls), *(b.signature for b in thinking if b.signature)]
        )
        yield CanonicalMessage(role, text, calls, "".join(b.thinking for b in thinking), marks)
        return
    for kind, group in groupby(blocks, lambda b: b.type == "tool_result"):
        if kind:
            yield from (
                CanonicalMessage(
                    "tool", wire.text_of(b.content, f"{where}.content", "\n"), answers=b.tool_use_id
                )
                for b in group
            )
        else:
            yield CanonicalMessage(role, wire.text_of(list(group), f"{where}.content", "\n"))
