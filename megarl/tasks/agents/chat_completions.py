"""OpenAI's chat completions on the wire: POST /v1/chat/completions.

Which fields are honoured, ignored and refused is the table of docs/agents.md. A field is refused if it would have the policy
sample from another distribution than the one that is trained, or if it needs what the policy cannot do.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ToolCall, WireError, checked, refused_field
from megarl.tasks.agents.session import ServedTurn


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


type Content = str | list[TextPart] | None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class WireCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: str
    content: Content = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class ChatTool(msgspec.Struct):
    type: str
    function: dict[str, Any] = {}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class ChatBody(msgspec.Struct):
    """What is read of a request; other fields are ignored."""

    messages: list[ChatMessage]
    model: str = ""
    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    response_format: Any = None
    logit_bias: Any = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Any = None
    modalities: list[str] | None = None


NOT_THE_POLICY = "constrains what is sampled, whose log-probs are then not the policy's; leave it out"


class ChatCompletions:
    """The protocol. `fields`: those that are read; the rest is ignored."""

    path = "/v1/chat/completions"
    fields = frozenset(field.name for field in msgspec.structs.fields(ChatBody))

    def request(self, body: Mapping[str, Any]) -> tuple[str, AgentRequest]:
        """Return the name of the model and the request. WireError if a field has another type, or is refused."""
        try:
            read = msgspec.convert(body, ChatBody, strict=True)
        except msgspec.ValidationError as error:
            raise WireError(400, str(error)) from None
        self._refuse(read)
        tools = [tool.function for tool in read.tools or ()] if read.tool_choice != "none" else []
        stop = [read.stop] if isinstance(read.stop, str) else read.stop or []
        limits = [n for n in (read.max_tokens, read.max_completion_tokens) if n is not None]
        return read.model, AgentRequest(
            messages=checked([_message(n, m) for n, m in enumerate(read.messages)]),
            tools=tuple({"type": "function", "function": tool} for tool in tools),
            max_tokens=min(limits, default=None),
            stop=tuple(text for text in stop if text),
            stream=bool(read.stream),
        )

    def _refuse(self, read: ChatBody) -> None:
        if read.n is not None and read.n != 1:
            raise refused_field("n", "one answer at a time; send the request again for another")
        if read.functions:
            raise refused_field("functions", "deprecated; use tools")
        for tool in read.tools or ():
            if tool.type != "function" or not isinstance(tool.function.get("name"), str):
                raise refused_field(
                    "tools", f"{tool.type} is run by a provider; the policy calls functions with a name"
                )
        if isinstance(read.tool_choice, dict):
            raise refused_field("tool_choice", f"a named tool {NOT_THE_POLICY}")
        form = read.response_format
        if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
            raise refused_field("response_format", NOT_THE_POLICY)
        for field, value in (("logit_bias", read.logit_bias), ("presence_penalty", read.presence_penalty),
                             ("frequency_penalty", read.frequency_penalty)):  # fmt: skip
            if value:
                raise refused_field(field, NOT_THE_POLICY)
        if read.logprobs or read.top_logprobs:
            raise refused_field("logprobs", "are kept for training, and not told")
        if read.modalities not in (None, ["text"]):
            raise refused_field("modalities", "the policy reads and writes text")
        for limit in (read.max_tokens, read.max_completion_tokens):
            if limit is not None and limit < 1:
                raise refused_field("max_tokens", "must be 1 or more")

    def error(self, error: WireError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def reply(self, body: Mapping[str, Any], turn: ServedTurn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.message.text or None}
        if turn.message.reasoning:
            message["reasoning_content"] = turn.message.reasoning
        if turn.message.calls:
            message["tool_calls"] = _calls(turn.message)
        choice = {"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": None}
        return _head(body, turn, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}

    def events(self, body: Mapping[str, Any], turn: ServedTurn) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream as (name, data); chat completions name none."""
        head, message = _head(body, turn, "chat.completion.chunk"), turn.message
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": message.reasoning}] if message.reasoning else []
        deltas += [{"content": message.text}] if message.text else []
        deltas += [{"tool_calls": [{"index": n} | call]} for n, call in enumerate(_calls(message))]
        for delta in deltas:
            yield "", head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield "", head | {"choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", head | {"choices": [], "usage": _usage(turn)}
        yield "", "[DONE]"


def text_of(content: Content, where: str) -> str:
    """Return a message's text, its parts joined. WireError if a part is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise refused_field(where, f"a part is {part.type}; the policy reads text alone")
    return "".join(part.text or part.refusal or "" for part in content)


def _message(n: int, m: ChatMessage) -> CanonicalMessage:
    role = "system" if m.role == "developer" else m.role
    if role not in ("system", "user", "assistant", "tool"):
        raise refused_field(f"messages[{n}].role", f"{role!r} is none of system, developer, user, assistant, tool")
    reasoning = m.reasoning_content or (m.reasoning if isinstance(m.reasoning, str) else "")
    return CanonicalMessage(
        role,
        text_of(m.content, f"messages[{n}].content"),
        tuple(ToolCall.of(c.id, c.function.name, c.function.arguments) for c in m.tool_calls or ()),
        reasoning or "",
        frozenset(call.id for call in m.tool_calls or ()),
        m.tool_call_id or "",
    )


def _calls(message: CanonicalMessage) -> list[dict[str, Any]]:
    return [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.json}} for c in message.calls]


def _head(body: Mapping[str, Any], turn: ServedTurn, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{turn.node.number}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model", ""),
    }


def _usage(turn: ServedTurn) -> dict[str, int]:
    sent, made = turn.prompt_tokens, turn.completion_tokens
    return {"prompt_tokens": sent, "completion_tokens": made, "total_tokens": sent + made}
