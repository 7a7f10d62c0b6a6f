"""OpenAI's Chat Completions protocol: POST /v1/chat/completions."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from megarl.core.base.types import JsonObject
from megarl.tasks.agents import wire
from megarl.tasks.agents.errors import refused_field
from megarl.tasks.agents.forms import form_of_text
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from megarl.tasks.agents.session import ServedTurn

SEVERAL_ANSWERS = (
    "a request has one answer; for several, send it several times at once. Not one after another:"
    " of a request that is sent again after its answer came, only the last answer is trained"
)


class CalledFunction(msgspec.Struct):
    """The function that a call names, with its arguments."""

    name: str
    arguments: str | JsonObject = ""


class WireCall(msgspec.Struct):
    """A tool call in a message."""

    function: CalledFunction
    id: str = ""


class ChatMessage(msgspec.Struct):
    """A message of the conversation."""

    role: str
    content: wire.Content = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class ChatTool(msgspec.Struct):
    """A tool that the policy may call."""

    type: str
    function: JsonObject = {}


class StreamOptions(msgspec.Struct):
    """Options of an answer that is sent as a stream."""

    include_usage: bool | None = False


class ChatBody(msgspec.Struct):
    """The fields of a request that are read."""

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
    """OpenAI's older protocol."""

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

    def read(self, body: ChatBody, cache: ReadMessages) -> AgentRequest:
        """Return the request in a body. WireError if the policy cannot answer it."""
        if body.n not in (None, 1):
            raise refused_field("n", SEVERAL_ANSWERS)
        if body.modalities not in (None, ["text"]):
            raise refused_field("modalities", "the policy reads and writes text")
        return wire.request_of(
            cache.read(body.messages, ChatMessage, _messages, "messages"),
            [(tool.type, tool.function) for tool in body.tools or ()],
            body.tool_choice,
            (body.max_tokens, body.max_completion_tokens),
            form_of_text("response_format", body.response_format),
            body.stop,
        )

    def reply(self, body: JsonObject, turn: ServedTurn) -> JsonObject:
        """Return the body of an answer."""
        message: JsonObject = {"role": "assistant", "content": turn.message.text}
        if turn.message.calls and not turn.message.text:
            message["content"] = None  # only with calls: agents expect a text without them
        if turn.message.reasoning:
            message["reasoning_content"] = turn.message.reasoning
        if turn.message.calls:
            message["tool_calls"] = _calls(turn.message)
        choice = {"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": None}
        return _head(turn, body, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}

    def events(self, body: JsonObject, turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        """Yield an answer's events as (name, data)."""
        head = _head(turn, body, "chat.completion.chunk")
        message = turn.message
        deltas: list[JsonObject] = [{"role": "assistant", "content": ""}]
        if message.reasoning:
            deltas.append({"reasoning_content": message.reasoning})
        if message.text:
            deltas.append({"content": message.text})
        for n, call in enumerate(_calls(message)):
            deltas.append({"tool_calls": [{"index": n} | call]})
        for delta in deltas:  # events of this protocol have no names
            yield "", head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield "", head | {"choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", head | {"choices": [], "usage": _usage(turn)}
        yield "", "[DONE]"


def _messages(message: ChatMessage, field: str) -> Iterator[CanonicalMessage]:
    """Yield the one canonical message in a message."""
    calls = message.tool_calls or ()
    reasoning = message.reasoning_content
    if not reasoning:
        reasoning = message.reasoning if isinstance(message.reasoning, str) else ""
    yield CanonicalMessage(
        wire.role_of(message.role, f"{field}.role"),
        wire.text_of(message.content, f"{field}.content"),
        tuple(ToolCall.of(call.id, call.function.name, call.function.arguments) for call in calls),
        reasoning,
        marks=frozenset(call.id for call in calls),
        answers=message.tool_call_id or "",
    )


def _calls(message: CanonicalMessage) -> list[JsonObject]:
    """Return a message's calls in this protocol's form."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.json},
        }
        for call in message.calls
    ]


def _head(turn: ServedTurn, body: JsonObject, kind: str) -> JsonObject:
    """Return the fields that an answer, and each chunk of one, begins with. kind: which
    of both it is; body: the request's, which names the model.
    """
    return {
        "id": f"chatcmpl-{turn.node.number}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model", ""),
    }


def _usage(turn: ServedTurn) -> dict[str, int]:
    """Return the numbers of tokens that an answer reports."""
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }
