"""OpenAI's Chat Completions protocol: POST /v1/chat/completions."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents import wire
from megarl.tasks.agents.errors import refused_field
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from megarl.tasks.agents.session import ServedTurn

SEVERAL_ANSWERS = (
    "a request has one answer; for several, send it several times at once. Not one after another:"
    " of a request that is sent again after its answer came, only the last answer is trained"
)


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | JsonObject = ""


class WireCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: str
    content: wire.Content = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class ChatTool(msgspec.Struct):
    type: str
    function: JsonObject = {}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class ChatBody(msgspec.Struct):
    messages: msgspec.Raw
    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    response_format: Any = None
    modalities: list[str] | None = None


class ChatCompletions(wire.WireProtocol):
    path = "/v1/chat/completions"
    body = ChatBody
    refused: ClassVar = {
        "functions": "deprecated; use tools",
        "chat_template_kwargs": "the recipe sets them for all requests, as template_options",
        "logit_bias": wire.NOT_THE_POLICY,
        "presence_penalty": wire.NOT_THE_POLICY,
        "frequency_penalty": wire.NOT_THE_POLICY,
        "logprobs": wire.NO_LOGPROBS,
        "top_logprobs": wire.NO_LOGPROBS,
    }

    def read(self, body: ChatBody, known: ReadMessages) -> AgentRequest:
        if body.n not in (None, 1):
            raise refused_field("n", SEVERAL_ANSWERS)
        wire.refuse_format(body.response_format, "response_format")
        if body.modalities not in (None, ["text"]):
            raise refused_field("modalities", "the policy reads and writes text")
        return wire.asked(
            known.read(body.messages, ChatMessage, _messages, "messages"),
            [(tool.type, tool.function) for tool in body.tools or ()],
            body.tool_choice,
            (body.max_tokens, body.max_completion_tokens),
            body.stop,
            body.stream,
        )

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        text = turn.message.text or (
            None if turn.message.calls else ""
        )  # agents strip it without a look
        message: JsonObject = {"role": "assistant", "content": text}
        if turn.message.reasoning:
            message["reasoning_content"] = turn.message.reasoning
        if turn.message.calls:
            message["tool_calls"] = _calls(turn.message)
        choice = {"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": None}
        return _head(turn, body, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        head = _head(turn, body, "chat.completion.chunk")
        message = turn.message
        deltas: list[JsonObject] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": message.reasoning}] if message.reasoning else []
        deltas += [{"content": message.text}] if message.text else []
        deltas += [{"tool_calls": [{"index": n} | call]} for n, call in enumerate(_calls(message))]
        for delta in deltas:
            yield "", head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield "", head | {"choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", head | {"choices": [], "usage": _usage(turn)}
        yield "", "[DONE]"


def _messages(m: ChatMessage, where: str) -> Iterator[CanonicalMessage]:
    yield CanonicalMessage(
        wire.role_of(m.role, f"{where}.role"),
        wire.text_of(m.content, f"{where}.content"),
        tuple(ToolCall.of(c.id, c.function.name, c.function.arguments) for c in m.tool_calls or ()),
        m.reasoning_content or (m.reasoning if isinstance(m.reasoning, str) else ""),
        frozenset(call.id for call in m.tool_calls or ()),
        m.tool_call_id or "",
    )


def _calls(message: CanonicalMessage) -> list[JsonObject]:
    return [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.json}}
        for c in message.calls
    ]


def _head(turn: ServedTurn, body: JsonObject, kind: str) -> JsonObject:
    made = {"id": f"chatcmpl-{turn.node.number}", "object": kind, "created": int(time.time())}
    return made | {"model": body.get("model", "")}


def _usage(turn: ServedTurn) -> dict[str, int]:
    sent = turn.prompt_tokens
    made = turn.completion_tokens
    return {"prompt_tokens": sent, "completion_tokens": made, "total_tokens": sent + made}
