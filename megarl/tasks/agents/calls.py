"""Extracts tool calls from the policy's text, in the format in which the model's own
chat template writes them.

    template, asked to write two calls of N with {K: V}
      ─► one of three formats, between literal marks:

    <tool_call>\\n{"name": "N", "arguments": {"K": "V"}}\\n</tool_call>
        one JSON object
    <calls><call>function<sep>N\\n```json\\n{"K": "V"}\\n```</call>\\n<call>…</calls>
        the name, and a JSON object
    <tool_call>N\\n<key>K</key>\\n<value>V</value>\\n</tool_call>
        the name, and key by key

    text ─► reasoning, up to the end of thinking, or to where a limit cut it
         ─► calls ─► content: all the rest

Text that is not a well-formed call stays in the content: if a malformed call vanished,
the agent would see a final answer.

SGLang's readers (sglang.srt.function_call), which read the same calls in the tests, do
not take the place of this. They drop text after a call, calls of tools that were not
given, and, of some families, malformed calls; they pass on NaN, and arguments that are
no object; and they do not say where in the text a call was. They import torch, too.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any, NamedTuple, Never

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import JsonObject
from megarl.tasks.agents.messages import CanonicalMessage, ToolCall
from megarl.tasks.data.chat import ChatTemplate
from megarl.tasks.thinking import is_opened, opening_of, without_thinking

NAME = "megarl_tool"
KEY = "megarl_key"
VALUE = "megarl-value"
ANSWER_TEXT = "said-by-the-assistant"
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A text."}},
        },
    },
}
"""A made-up tool, given to a template to see how it writes tools and calls."""
_PROBES = (
    (NAME, {KEY: VALUE, "second_key": "second-value"}),
    ("other_tool", {"third_key": "third-value"}),
)
"""Names and arguments of made-up calls."""
_ATOM = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\s+|[^\s<>\[\]]+|.")
_BLANKS = re.compile(r"\s*")
_LONGEST_KEY = 256
"""Most characters in an argument's name. An unlimited search would take seconds in the
text of a policy that repeats itself.
"""
_CHANNEL = "<|channel|>"


class Marks(NamedTuple):
    """Literal texts around a sequence's items, stripped: before the first, before and
    after each, between two, at the end.
    """

    first: str = ""
    opening: str = ""
    closing: str = ""
    joint: str = ""
    last: str = ""

    @staticmethod
    def inferred(prefix: str, infix: str | None, suffix: str) -> "Marks":
        """Infer the marks from the text before the first item, between two (None if
        there are never two), and after the last. Texts are compared tag by tag and word
        by word, so that `<a_end><b>` and `<a_begin><b>` share `<b>`, but not `><b>`.
        """
        if infix is None:
            return Marks(opening=prefix.strip(), closing=suffix.strip())
        prefix_atoms = _ATOM.findall(prefix.strip())
        infix_atoms = _ATOM.findall(infix.strip())
        suffix_atoms = _ATOM.findall(suffix.strip())
        # prefix: first opening; infix: closing joint opening; suffix: closing last
        opening_length = _common(prefix_atoms[::-1], infix_atoms[::-1])
        first = prefix_atoms[: len(prefix_atoms) - opening_length]
        opening = infix_atoms[len(infix_atoms) - opening_length :]
        closing_and_joint = infix_atoms[: len(infix_atoms) - opening_length]
        closing_length = _common(closing_and_joint, suffix_atoms)
        closing = closing_and_joint[:closing_length]
        joint = closing_and_joint[closing_length:]
        last = suffix_atoms[closing_length:]
        marks = (first, opening, closing, joint, last)
        return Marks(*("".join(atoms).strip() for atoms in marks))


class CallSection(NamedTuple):
    """Calls in a text, from their first mark at `start` to `end`, after their last."""

    start: int
    end: int
    calls: list[ToolCall]


@dataclass(frozen=True)
class CallFormat:
    """How a template writes tool calls.

    calls: the marks around calls; if no mark precedes a call, a message with calls
    contains nothing else. arguments: the key of the arguments in a call's JSON object,
    which also holds the name; "" if the name is written before `after_name`, and the
    arguments after it, as a JSON object or key by key. by_ids: the template writes a
    call's id in place of its name (the model was trained with `functions.NAME:0`).
    keys: the marks around key-value pairs; value: the mark between key and value;
    blank: the whitespace around a value. as_text: the template takes arguments as a
    string of JSON. around_text: the marks before and after text that accompanies calls.
    """

    calls: Marks
    arguments: str = ""
    after_name: str = ""
    by_ids: bool = False
    keys: Marks | None = None
    value: str = ""
    blank: str = ""
    as_text: bool = False
    around_text: tuple[str, str] = ("", "")

    def read(self, text: str, tools: Iterable[JsonObject] = ()) -> tuple[str, list[ToolCall]]:
        """Return the text without its calls, and the calls, their `id` still empty.
        tools: their schemas say which arguments are strings, where the format does not.
        """
        content = ""
        calls: list[ToolCall] = []
        at = 0
        for section in self._sections(text, tools):
            content += text[at : section.start]
            calls += section.calls
            at = section.end
        content += text[at:]
        if calls and any(self.around_text):
            prefix, suffix = self.around_text
            stripped = content.strip()
            if stripped.startswith(prefix) and stripped.endswith(suffix):
                content = stripped.removeprefix(prefix).removesuffix(suffix)
        return content, calls

    def places(self, text: str, tools: Iterable[JsonObject] = ()) -> list[tuple[int, int]]:
        """Return where the calls in a text are, with the marks around them, as (start,
        end).
        """
        return [(section.start, section.end) for section in self._sections(text, tools)]

    def template_id(self, call: ToolCall, number: int) -> str:
        """Return the id that the template is given for the `number`-th call of the
        conversation.
        """
        if not self.by_ids:
            return call.id
        return call.written or f"functions.{call.name}:{number}"

    @cached_property
    def begins(self) -> re.Pattern[str] | None:
        """The pattern that precedes calls; None if nothing does, so that a message with
        calls contains nothing else.
        """
        if self.calls.first:
            return re.compile(_literal(self.calls.first))
        if self.calls.opening:
            return self._head
        return None

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """The pattern of everything in a call before its arguments or its JSON object.
        In Harmony the recipient may precede the channel, as the template writes it, or
        follow it, as gpt-oss writes it.
        """
        opening = _literal(self.calls.opening)
        if self.arguments:
            return re.compile(opening)
        name = r"functions\.[\w.-]+:\d+" if self.by_ids else r"[\w.-]+"
        if not self.after_name.startswith(_CHANNEL):
            return re.compile(rf"{opening}\s*({name})\s*{_literal(self.after_name)}")
        channel, kind = map(_literal, self.after_name.split(maxsplit=1))
        kind = rf"\s*(?:<\|constrain\|>)?\s*{kind}"
        return re.compile(rf"{opening}({name}){channel}{kind}|{channel}\s*{opening}({name}){kind}")

    @cached_property
    def _key(self) -> re.Pattern[str]:
        """The pattern of an argument's name, and the mark between it and the value."""
        longest = _LONGEST_KEY - 2  # between the first character and the last
        return re.compile(rf"\s*(\S(?:.{{,{longest}}}?\S)??)\s*{_literal(self.value)}")

    def _sections(self, text: str, tools: Iterable[JsonObject]) -> Iterator[CallSection]:
        """Yield each place with calls. tools: as in `read`. If no mark precedes calls,
        they are all of the text or none.
        """
        schemas = {
            tool["function"]["name"]: _field(tool["function"].get("parameters"), "properties")
            for tool in tools
        }
        if self.begins is None:
            section = self._section(text, 0, schemas)
            if section and not text[section.end :].strip():
                yield section._replace(end=len(text))  # with the whitespace behind it
            return
        at = 0
        while mark := self.begins.search(text, at):
            section = self._section(text, mark.start(), schemas)
            if section:
                at = section.end
                yield section
            else:
                at = mark.end()

    def _section(self, text: str, start: int, schemas: JsonObject) -> CallSection | None:
        """Return the calls that begin at `start`; None if there is no call, or no last
        mark. schemas: the arguments' schemas, by tool.
        """
        marks = self.calls
        may_be_several = bool(marks.first or marks.joint or marks.last)
        calls: list[ToolCall] = []
        end = start
        call_start = _mark_end(text, start, marks.first)
        while call_start is not None:
            call_and_end = self._call(text, call_start, schemas)
            if call_and_end is None:
                break
            call, end = call_and_end
            calls.append(call)
            call_start = _mark_end(text, end, marks.joint) if may_be_several else None
        section_end = _mark_end(text, end, marks.last)
        if not calls or section_end is None:
            return None
        return CallSection(start, section_end, calls)

    def _call(self, text: str, start: int, schemas: JsonObject) -> tuple[ToolCall, int] | None:
        """Return the call that begins at `start`, and where its closing mark ends; None
        if there is no call.
        """
        head = self._head.match(text, _skipped(text, start))
        if head is None:
            return None
        written = head[head.lastindex] if head.lastindex else ""  # the name, if it is there
        name: Any = written
        if self.by_ids:
            name = written.removeprefix("functions.").rpartition(":")[0]
        at = _skipped(text, head.end())
        try:
            if self.keys is not None:
                arguments, at = self._pairs(text, at, self.keys, schemas.get(name))
            else:
                arguments, at = _decoder.raw_decode(text, at)
                if self.arguments:
                    name = arguments["name"]
                    arguments = arguments[self.arguments]
            # ValueError for what no agent could be served: 1e999, or \ud83d alone
            json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        end = _mark_end(text, at, self.calls.closing)
        if end is None or not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall("", name, arguments, written if self.by_ids else ""), end

    def _pairs(self, text: str, at: int, keys: Marks, properties: Any) -> tuple[JsonObject, int]:
        """Return the arguments that begin at `at`, and where the last one's closing
        mark ends. properties: their schemas by name, if they are known. ValueError if
        one has no end.
        """
        arguments: JsonObject = {}
        start = _mark_end(text, at, keys.opening)
        while start is not None:
            key = self._key.match(text, start)
            if key is None:
                raise ValueError("an argument has no end")
            end = text.find(keys.closing, key.end())
            if end < 0:
                raise ValueError("an argument has no end")
            value = text[key.end() : end].removeprefix(self.blank).removesuffix(self.blank)
            types = _types(_field(properties, key[1]))
            arguments[key[1]] = _value(value, types)
            at = end + len(keys.closing)
            pair_start = _mark_end(text, at, keys.joint)
            start = None if pair_start is None else _mark_end(text, pair_start, keys.opening)
        return arguments, at


def call_format(chat: ChatTemplate, ends: Iterable[str]) -> CallFormat | None:
    """Return how this template writes calls; None if it writes none, or in an unknown
    format. ends: texts that end a turn. Tried: arguments as objects and as text, names
    and ids, two calls and, for templates that take no more, one.
    """
    end = re.compile("|".join(map(re.escape, ends)))
    for as_text, by_ids, count in product((False, True), (False, True), (2, 1)):
        with suppress(MegarlError, ValueError):
            return _inferred(_ProbeTurn(chat, as_text, by_ids, count), end)
    return None


@dataclass(frozen=True)
class _ProbeTurn:
    """A made-up turn with `count` calls. as_text, by_ids: as in CallFormat."""

    chat: ChatTemplate
    as_text: bool
    by_ids: bool
    count: int

    @property
    def names(self) -> list[str]:
        """What the template should write as the names of the calls."""
        names = [name for name, _ in _PROBES[: self.count]]
        if self.by_ids:
            return [f"functions.{name}:{number}" for number, name in enumerate(names)]
        return names

    def written(self, content: str) -> str:
        """Return the text of an assistant's turn with the calls, without the text that
        precedes an answer, or any turn. MegarlError if the template cannot write it.
        """
        user: JsonObject = {"role": "user", "content": "?"}
        plain: JsonObject = {"role": "assistant", "content": ANSWER_TEXT}
        calling = {"role": "assistant", "content": content, "tool_calls": self._calls()}
        start = self.chat.render([user, plain], [PROBE], reply=False).partition(ANSWER_TEXT)[0]
        text = self.chat.render([user, calling], [PROBE], reply=False)
        if not text.startswith(start):
            start = self.chat.render([user], [PROBE])
        if not text.startswith(start):
            return ""
        return text.removeprefix(start)

    def _calls(self) -> list[JsonObject]:
        """Return the calls as OpenAI's `tool_calls` of an assistant's message."""
        calls: list[JsonObject] = []
        for number, name_written in enumerate(self.names):
            name, arguments = _PROBES[number]
            id = name_written if self.by_ids else f"call0000{number}"
            function = {
                "name": name,
                "arguments": json.dumps(arguments) if self.as_text else arguments,
            }
            calls.append({"id": id, "type": "function", "function": function})
        return calls


class _WrittenCall(NamedTuple):
    """Where a call's name and arguments begin and end in a text. arguments, after_name:
    as in CallFormat; before_parts: if the arguments are written key by key, the text
    before each key and each value.
    """

    start: int
    end: int
    arguments: str = ""
    after_name: str = ""
    before_parts: tuple[str, ...] = ()


def _inferred(turn: _ProbeTurn, ends: re.Pattern[str]) -> CallFormat:
    """Return the format, inferred from a turn's text. MegarlError or ValueError if the
    template cannot write such a turn, or not in one of the three formats.
    """
    text = turn.written("")
    calls: list[_WrittenCall] = []
    at = 0
    for written, (name, arguments) in zip(turn.names, _PROBES, strict=False):
        calls.append(_written_call(text, at, written, name, arguments))
        at = calls[-1].end
    first = calls[0]
    prefix = text[: first.start]
    infix = text[first.end : calls[1].start] if turn.count > 1 else None
    suffix = ends.split(text[at:])[0]
    marks = Marks.inferred(prefix, infix, suffix)
    format = CallFormat(
        marks, first.arguments, first.after_name, by_ids=turn.by_ids, as_text=turn.as_text
    )
    if first.before_parts:
        format = _key_by_key(format, first.before_parts)
    with suppress(MegarlError):
        return replace(format, around_text=_around_text(turn, format))
    return format


def _key_by_key(format: CallFormat, before_parts: Sequence[str]) -> CallFormat:
    """Return the format with the marks of keys and values. before_parts: the text
    before each key and value of a call with two arguments. ValueError if there are no
    marks.
    """
    before_key, before_value, before_second_key = before_parts[:3]
    # What precedes the first key also ends the name, and what follows the last value
    # also ends the call.
    keys = Marks.inferred(before_key, before_second_key, format.calls.closing)
    value = before_value.strip()
    if not (keys.opening and keys.closing and value):
        raise ValueError("nothing tells a key from a value")
    return replace(
        format,
        calls=format.calls._replace(closing=keys.last),
        after_name=keys.first,
        keys=keys._replace(first="", last=""),
        value=value,
        blank=before_value[len(before_value.rstrip()) :],
    )


def _around_text(turn: _ProbeTurn, format: CallFormat) -> tuple[str, str]:
    """Return the marks around a text that precedes calls of this format; two empty
    texts if the template drops the text, or nothing tells it from the calls.
    """
    prefix, text, rest_of_turn = turn.written(ANSWER_TEXT).partition(ANSWER_TEXT)
    if text and format.begins is not None and (mark := format.begins.search(rest_of_turn)):
        return prefix.strip(), rest_of_turn[: mark.start()].strip()
    return "", ""


def _written_call(
    text: str, at: int, written: str, name: str, arguments: dict[str, str]
) -> _WrittenCall:
    """Return the next call in a text, in the first of the three formats that it has.
    written: the text written as its name. ValueError if there is none.
    """
    name_start = text.index(written, at)
    name_end = name_start + len(written)
    with suppress(ValueError):  # one JSON object with name and arguments
        start = text.rindex("{", at, name_start)
        value, end = _decoder.raw_decode(text, start)
        keys = [key for key, item in value.items() if item == arguments]
        if value.get("name") == name and keys:
            return _WrittenCall(start, end, arguments=keys[0])
    with suppress(ValueError):  # the name, and a JSON object
        start = text.index("{", name_end)
        value, end = _decoder.raw_decode(text, start)
        if value == arguments:
            return _WrittenCall(name_start, end, after_name=text[name_end:start].strip())
    end = name_end  # the name, and key by key
    before_parts: list[str] = []
    for part in chain.from_iterable(arguments.items()):
        start = text.index(part, end)
        before_parts.append(text[end:start])
        end = start + len(part)
    return _WrittenCall(name_start, end, before_parts=tuple(before_parts))


def read_turn(
    text: str,
    format: CallFormat | None,
    end_of_thinking: str,
    number: int,
    tools: Iterable[JsonObject] = (),
    cut: bool = False,
    prompt: str = "",
) -> CanonicalMessage:
    """Return the message that the agent is served for a turn. number: its node's, part
    of every opaque id that we create. The text before `end_of_thinking` becomes
    reasoning, without its opening tag (`<think>` for `</think>`). cut: the policy did
    not end the turn itself, so all of it is reasoning if its thinking was opened, by
    itself or by the end of its prompt.
    """
    places: list[tuple[int, int]] = []
    if format is not None and end_of_thinking in text:
        places = format.places(text, tools)
    reasoning = ""
    parts = without_thinking(text, end_of_thinking, prompt, places)
    if parts is not None:
        reasoning, text = parts
    elif cut and is_opened(text, end_of_thinking, prompt):
        reasoning = text
        text = ""
    reasoning = reasoning.lstrip().removeprefix(opening_of(end_of_thinking))
    calls: list[ToolCall] = []
    if format is not None:
        text, calls = format.read(text, tools)
    if calls:
        text = text.strip("\n") if text.strip() else ""
    calls = [call._replace(id=f"call_{number:04}_{n:03}") for n, call in enumerate(calls)]
    marks = frozenset(
        [f"rs_{number}", f"msg_{number}", f"sig_{number}", *(call.id for call in calls)]
    )
    return CanonicalMessage("assistant", text, tuple(calls), reasoning, marks)


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many items two sequences have in common at their beginnings."""
    shorter = min(len(first), len(second))
    for length in range(shorter):
        if first[length] != second[length]:
            return length
    return shorter


def _literal(mark: str) -> str:
    """Return a pattern for a mark. Where the mark has whitespace, the pattern matches
    any amount of it.
    """
    return r"\s*".join(map(re.escape, mark.split()))


def _mark_end(text: str, at: int, mark: str) -> int | None:
    """Return where the mark that begins at `at`, after optional whitespace, ends; None
    if it is not there.
    """
    if not mark:
        return at
    match = re.compile(rf"\s*{_literal(mark)}").match(text, at)
    return match.end() if match else None


def _skipped(text: str, at: int) -> int:
    """Return the position of the next character that is not whitespace."""
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]


def _field(value: Any, key: str) -> Any:
    """Return the field of a JSON object; None if it has none, or is no object."""
    return value.get(key) if isinstance(value, dict) else None


def _types(schema: Any) -> set[str]:
    """Return the names of the types that a JSON schema allows; empty if it does not
    say.
    """
    named = _field(schema, "type")
    names = named if isinstance(named, list) else [named]
    types = {name for name in names if isinstance(name, str)}
    alternatives = _field(schema, "anyOf")
    if isinstance(alternatives, list):
        types = types.union(*map(_types, alternatives))
    return types


def _value(text: str, types: set[str]) -> Any:
    """Return an argument's value: decoded from JSON, or the text itself if it is not
    JSON or must be a string.
    """
    is_null = text == "null" and "null" in types
    if types and types <= {"string", "null"} and not is_null:
        return text
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return text


def _not_json(constant: str) -> Never:
    """Raise ValueError for NaN or Infinity, which Python's decoder would take."""
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_not_json)
