"""Anthropic's Messages protocol: POST /v1/messages, and /v1/messages/count_tokens."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents import wire
from megarl.tasks.agents.errors import ContextFull, WireError
from megarl.tasks.agents.forms import form_of_text
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from megarl.tasks.agents.session import ServedTurn

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A line that Claude Code puts at the head of its system prompt. It changes with each
request and tells a model nothing.
"""
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
NOT_TEXT = ("tool_use", "thinking", "redacted_thinking")


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
    """A message of the conversation."""

    role: str
    content: str | list[Block]


class NamedTool(msgspec.Struct):
    """A tool that the policy may call."""

    name: str
    type: str | None = None
    description: str = ""
    input_schema: JsonObject = {}


class MessagesBody(msgspec.Struct):
    """The fields of a request that are read."""

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
    """Anthropic's protocol."""

    path = "/v1/messages"
    body = MessagesBody
    refused: ClassVar = {"mcp_servers": wire.NO_PROVIDER, "container": wire.NO_STATE}

    def read(self, body: MessagesBody, cache: ReadMessages) -> AgentRequest:
        """Return the request in a body. WireError if the policy cannot answer it."""
        forms = form_of_text("output_format", body.output_format)
        if body.output_config:
            forms += form_of_text("output_config.format", body.output_config.format)
        system = BILLING.sub("", wire.text_of(body.system, "system", "\n\n"), count=1)
        messages = [CanonicalMessage("system", system)] if system else []
        messages += cache.read(body.messages, BlockMessage, _messages, "messages")
        return wire.request_of(
            messages,
            [_tool(tool) for tool in body.tools or ()],
            body.tool_choice,
            [body.max_tokens],
            forms,
            body.stop_sequences,
        )

    def error(self, error: WireError) -> JsonObject:
        """Return the body of an error."""
        message = str(error)
        if isinstance(error, ContextFull):
            message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
        default = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ERRORS.get(error.status, default)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, error: WireError) -> tuple[str, JsonObject]:
        """Return the event that ends a stream with an error."""
        return "error", self.error(error)

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        """Return the body of an answer."""
        stop_reason = STOP_REASONS[turn.finish]
        if turn.finish == "stop" and turn.node.stopped:
            stop_reason = "stop_sequence"
        return {
            "id": f"msg_{turn.node.number}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model", ""),
            "content": _blocks(turn),
            "stop_reason": stop_reason,
            "stop_sequence": turn.node.stopped or None,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens},
        }

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        """Yield an answer's events as (name, data)."""
        reply = self.reply(body, turn)
        start = reply | {"content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = reply["usage"] | {"output_tokens": 0}
        events: list[JsonObject] = [{"type": "message_start", "message": start}]
        for n, block in enumerate(reply["content"]):
            events += _block_events(n, block)
        delta = {key: reply[key] for key in ("stop_reason", "stop_sequence")}
        events.append({"type": "message_delta", "delta": delta, "usage": reply["usage"]})
        events.append({"type": "message_stop"})
        for event in events:
            yield event["type"], event


def _tool(tool: NamedTool) -> tuple[str, JsonObject]:
    """Return a tool's type and function, as OpenAI has them."""
    kind = "function" if tool.type in (None, "custom") else tool.type
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return kind, function


def _blocks(turn: ServedTurn) -> list[JsonObject]:
    """Return the blocks of an answer: thinking, text, calls."""
    message = turn.message
    blocks: list[JsonObject] = []
    if message.reasoning:
        signature = f"sig_{turn.node.number}"
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.text or not message.calls:
        blocks.append({"type": "text", "text": message.text})
    for call in message.calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )
    return blocks


def _block_events(index: int, block: JsonObject) -> Iterator[JsonObject]:
    """Yield the events of one block of an answer: its start, without content, the
    content in deltas, and its end. index: its place in the answer.
    """
    empty: JsonObject  # the fields that a block starts with, and deltas fill
    match block["type"]:
        case "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [{"type": f"{key}_delta", key: block[key]} for key in empty]
        case "text":
            empty = {"text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        case _:
            empty = {"input": {}}
            json_text = msgspec.json.encode(block["input"]).decode()
            deltas = [{"type": "input_json_delta", "partial_json": json_text}]
    yield {"type": "content_block_start", "index": index, "content_block": block | empty}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _messages(message: BlockMessage, field: str) -> Iterator[CanonicalMessage]:
    """Yield the canonical messages in a message: one for an assistant's; for a user's,
    one per tool result or run of texts.
    """
    role = wire.role_of(message.role, f"{field}.role")
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [Block("text", blocks)]
    if role == "assistant":
        yield _assistant_message(blocks, field)
        return
    for are_results, group in groupby(blocks, lambda block: block.type == "tool_result"):
        if not are_results:
            yield CanonicalMessage(role, wire.text_of(list(group), f"{field}.content", "\n"))
            continue
        for block in group:
            text = wire.text_of(block.content, f"{field}.content", "\n")
            yield CanonicalMessage("tool", text, answers=block.tool_use_id)


def _assistant_message(blocks: Sequence[Block], field: str) -> CanonicalMessage:
    """Return the assistant's message that these blocks are: thinking, texts and calls,
    whose ids and signatures are its marks. field: the message's place, for errors.
    """
    calls = [
        ToolCall.of(block.id, block.name, block.input)
        for block in blocks
        if block.type == "tool_use"
    ]
    thinking = [block for block in blocks if block.type == "thinking"]
    texts = [block for block in blocks if block.type not in NOT_TEXT]
    marks = [call.id for call in calls]
    marks += [block.signature for block in thinking if block.signature]
    return CanonicalMessage(
        "assistant",
        wire.text_of(texts, f"{field}.content"),
        tuple(calls),
        reasoning="".join(block.thinking for block in thinking),
        marks=frozenset(marks),
    )
