"""Reads tool calls out of what the policy wrote, in the form in which the model's own chat template writes them.

    template, asked to write a call of N with {K: V} ─► <tool_call>\\n{"name": "N", "arguments": {"K": "V"}}\\n</tool_call>
                                                        └ opening ┘ └ a JSON object ──────────────────┘ └ closing ┘
    text ─► reasoning, up to the end of thinking ─► calls ─► content: all the rest

What is no call stays in the content: a malformed call that vanished would look to the agent like a final answer.
"""

import json
from dataclasses import dataclass
from typing import Any, Never

from megarl.core.base.errors import MegarlError
from megarl.tasks.agents.messages import CanonicalMessage, ToolCall
from megarl.tasks.data.chat import ChatTemplate

NAME, KEY, VALUE, SAID = "megarl_tool", "megarl_key", "megarl-value", "said-by-the-assistant"
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": "A text."}}},
    },
}
"""A tool to ask templates with."""


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a call. opening, closing: around its JSON object, without blanks at their ends; both may be empty,
    and a message with a call is then nothing but one. arguments: its key of the arguments."""

    opening: str
    closing: str
    arguments: str

    def read(self, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Return the text without its calls, and their names and arguments."""
        if not self.opening:
            found = self._call(text, 0)
            return (text, []) if found is None or text[found[1] :].strip() else ("", [found[0]])
        rest, calls, at = "", list[tuple[str, dict[str, Any]]](), 0
        while (begin := text.find(self.opening, at)) >= 0:
            found = self._call(text, begin + len(self.opening))
            end = begin + len(self.opening) if found is None else found[1]
            rest += text[at : end if found is None else begin]
            calls += [] if found is None else [found[0]]
            at = end
        return rest + text[at:], calls

    def _call(self, text: str, at: int) -> tuple[tuple[str, dict[str, Any]], int] | None:
        """Return the call that begins here, and where its closing ends; None if there is none."""
        while text[at : at + 1].isspace():
            at += 1
        try:
            value, at = _decoder.raw_decode(text, at)
            name, arguments = value["name"], value[self.arguments]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        while self.closing and text[at : at + 1].isspace():
            at += 1
        if not (isinstance(name, str) and isinstance(arguments, dict) and text.startswith(self.closing, at)):
            return None
        return (name, arguments), at + len(self.closing)


def call_format(chat: ChatTemplate, end: str) -> CallFormat | None:
    """Return how this template writes calls; None if it writes none, or not as JSON. end: the text that ends a turn."""
    asked: dict[str, Any] = {"role": "user", "content": "?"}
    function = {"name": NAME, "arguments": {KEY: VALUE}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    try:
        header = chat.render([asked, {"role": "assistant", "content": SAID}], [PROBE], reply=False).partition(SAID)[0]
        text = chat.render([asked, called], [PROBE], reply=False)
    except MegarlError:
        return None
    before, _, _ = text.rpartition(f'"{NAME}"')
    begin = before.rfind("{")
    if begin < 0 or not text.startswith(header) or begin < len(header):
        return None
    try:
        value, stop = _decoder.raw_decode(text, begin)
    except ValueError:
        return None
    keys = [key for key, given in value.items() if given == {KEY: VALUE}]
    if value.get("name") != NAME or not keys:
        return None
    return CallFormat(text[len(header) : begin].strip(), text[stop:].partition(end)[0].strip(), keys[0])


def read_turn(text: str, format: CallFormat | None, end_of_thinking: str, number: int) -> CanonicalMessage:
    """Return what the agent is served of a turn. number: of its node, which all opaque ids that we mint have.

    The text before `end_of_thinking` is reasoning, without the tag that opens it (`<think>` for `</think>`).
    """
    reasoning = ""
    if end_of_thinking and end_of_thinking in text:
        reasoning, _, text = text.partition(end_of_thinking)
        reasoning = reasoning.lstrip().removeprefix(end_of_thinking.strip().replace("/", "", 1))
    content, found = (text, []) if format is None else format.read(text)
    calls = tuple(ToolCall(f"call_{number:04}_{n:03}", *call) for n, call in enumerate(found))
    marks = frozenset([*(call.id for call in calls), *(mark + str(number) for mark in ("rs_", "msg_", "sig_"))])
    return CanonicalMessage("assistant", content.strip("\n") if calls else content, calls, reasoning, marks)


def _not_json(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_not_json)
