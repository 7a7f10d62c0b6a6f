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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from typing import Any, NamedTuple, Never

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import JsonObject
from megarl.tasks.agents.messages import CanonicalMessage, ToolCall
from megarl.tasks.data.chat import ChatTemplate
from megarl.tasks.thinking import is_opened, opening_of, without_thinking

NAME = "megarl_tool"
KEY = "megarl_key"
VALUE = "megarl-value"
SAID = "said-by-the-assistant"
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
    def told(before: str, between: str | None, behind: str) -> "Marks":
        """Infer the marks from the text before the first item, between two (None if
        there are never two), and after the last. Texts are compared tag by tag and word
        by word, so that `<a_end><b>` and `<a_begin><b>` share `<b>`, but not `><b>`.
        """
        if between is None:
            return Marks(opening=before.strip(), closing=behind.strip())
        b, m, a = (_ATOM.findall(text.strip()) for text in (before, between, behind))
        n = _common(b[::-1], m[::-1])
        m, opening = m[: len(m) - n], m[len(m) - n :]
        k = _common(m, a)
        return Marks(
            *("".join(part).strip() for part in (b[: len(b) - n], opening, m[:k], m[k:], a[k:]))
        )


@dataclass(frozen=True)
class CallFormat:
    """How a template writes tool calls.

    calls: the marks around calls; if no mark precedes a call, a message with calls
    contains nothing else. arguments: the key of the arguments in a call's JSON object,
    which also holds the name; "" if the name is written before `behind_name`, and the
    arguments after it, as a JSON object or key by key. by_ids: the template writes a
    call's id in place of its name (the model was trained with `functions.NAME:0`).
    keys: the marks around key-value pairs; value: the mark between key and value;
    blank: the whitespace around a value. as_text: the template takes arguments as a
    string of JSON. beside: the marks before and after text that accompanies calls.
    """

    calls: Marks
    arguments: str = ""
    behind_name: str = ""
    by_ids: bool = False
    keys: Marks | None = None
    value: str = ""
    blank: str = ""
    as_text: bool = False
    beside: tuple[str, str] = ("", "")

    def read(self, text: str, tools: Iterable[JsonObject] = ()) -> tuple[str, list[ToolCall]]:
        """Return the text without its calls, and the calls, their `id` still empty.
        tools: their schemas say which arguments are strings, where the format does not.
        """
        rest = ""
        calls: list[ToolCall] = []
        at = 0
        for begin, end, made in self._sections(text, tools):
            rest += text[at:begin]
            calls += made
            at = end
        rest += text[at:]
        before, behind = self.beside
        said = rest.strip()
        if calls and any(self.beside) and said.startswith(before) and said.endswith(behind):
            rest = said.removeprefix(before).removesuffix(behind)
        return rest, calls

    def places(self, text: str, tools: Iterable[JsonObject] = ()) -> list[tuple[int, int]]:
        """Return where the calls in a text are, with the marks around them, as (begin,
        end).
        """
        return [(begin, end) for begin, end, _ in self._sections(text, tools)]

    def template_id(self, call: ToolCall, number: int) -> str:
        """Return the id that the template is given for the `number`-th call of the
        conversation.
        """
        return (call.written or f"functions.{call.name}:{number}") if self.by_ids else call.id

    @cached_property
    def begins(self) -> re.Pattern[str] | None:
        """The pattern that precedes calls; None if nothing does, so that a message with
        calls contains nothing else.
        """
        if self.calls.first:
            return re.compile(_literal(self.calls.first))
        return self._head if self.calls.opening else None

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """The pattern of everything in a call before its arguments or its JSON object.
        In Harmony the recipient may precede the channel, as the template writes it, or
        follow it, as gpt-oss writes it.
        """
        if self.arguments:
            return re.compile(_literal(self.calls.opening))
        name = r"functions\.[\w.-]+:\d+" if self.by_ids else r"[\w.-]+"
        to = _literal(self.calls.opening)
        behind = _literal(self.behind_name)
        if not self.behind_name.startswith(_CHANNEL):
            return re.compile(rf"{to}\s*({name})\s*{behind}")
        channel, kind = (_literal(part) for part in self.behind_name.split(maxsplit=1))
        kind = rf"\s*(?:<\|constrain\|>)?\s*{kind}"
        return re.compile(rf"{to}({name}){channel}{kind}|{channel}\s*{to}({name}){kind}")

    def _sections(
        self, text: str, tools: Iterable[JsonObject]
    ) -> Iterator[tuple[int, int, list[ToolCall]]]:
        """Yield the begin, the end and the calls of each place with calls."""
        schemas = {
            tool["function"]["name"]: _field(tool["function"].get("parameters"), "properties")
            for tool in tools
        }
        if self.begins is None:
            section = self._section(text, 0, schemas)
            if section and not text[section[1] :].strip():
                yield 0, len(text), section[0]
            return
        at = 0
        while begin := self.begins.search(text, at):
            section = self._section(text, begin.start(), schemas)
            at = section[1] if section else begin.end()
            if section:
                yield begin.start(), at, section[0]

    def _section(
        self, text: str, at: int, schemas: JsonObject
    ) -> tuple[list[ToolCall], int] | None:
        """Return the calls that begin at `at`, and where their last mark ends; None if
        there is no call, or no last mark.
        """
        calls, marks = list[ToolCall](), self.calls
        begin = _after(text, at, marks.first)
        while begin is not None and (found := self._call(text, begin, schemas)) is not None:
            call, at = found
            calls.append(call)
            begin = (
                _after(text, at, marks.joint) if marks.first or marks.joint or marks.last else None
            )
        end = _after(text, at, marks.last)
        return (calls, end) if calls and end is not None else None

    def _call(self, text: str, at: int, schemas: JsonObject) -> tuple[ToolCall, int] | None:
        """Return the call that begins at `at`, and where its closing mark ends; None if
        there is no call.
        """
        if (head := self._head.match(text, _skipped(text, at))) is None:
            return None
        written = head[head.lastindex] if head.lastindex else ""
        name: Any = (
            written.removeprefix("functions.").rpartition(":")[0] if self.by_ids else written
        )
        at = _skipped(text, head.end())
        try:
            if self.keys is not None:
                arguments, at = self._pairs(text, at, self.keys, schemas.get(name))
            else:
                arguments, at = _decoder.raw_decode(text, at)
                if self.arguments:
                    name = arguments["name"]
                    arguments = arguments[self.arguments]
            json.dumps(
                [name, arguments], ensure_ascii=False, allow_nan=False
            ).encode()  # no 1e999, no \ud83d alone
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        end = _after(text, at, self.calls.closing)
        if not (isinstance(name, str) and isinstance(arguments, dict)) or end is None:
            return None
        return ToolCall("", name, arguments, written if self.by_ids else ""), end

    def _pairs(self, text: str, at: int, keys: Marks, properties: Any) -> tuple[JsonObject, int]:
        """Return the arguments that begin at `at`, and where the last one's closing
        mark ends. ValueError if one has no end.
        """
        found: JsonObject = {}
        begin: int | None = at
        while begin is not None and (begin := _after(text, begin, keys.opening)) is not None:
            key = re.compile(
                rf"\s*(\S(?:.{{,{_LONGEST_KEY - 2}}}?\S)??)\s*{_literal(self.value)}"
            ).match(text, begin)
            if key is None or (end := text.find(keys.closing, key.end())) < 0:
                raise ValueError("an argument has no end")
            value = text[key.end() : end].removeprefix(self.blank).removesuffix(self.blank)
            found[key[1]] = _value(value, _types(_field(properties, key[1])))
            at = end + len(keys.closing)
            begin = _after(text, at, keys.joint)
        return found, at


def call_format(chat: ChatTemplate, ends: Iterable[str]) -> CallFormat | None:
    """Return how this template writes calls; None if it writes none, or in an unknown
    format. ends: texts that end a turn.
    """
    for as_text, by_ids, count in product((False, True), (False, True), (2, 1)):
        with suppress(MegarlError, ValueError):
            return _told(chat, "|".join(map(re.escape, ends)), as_text, by_ids, count)
    return None


def _told(chat: ChatTemplate, ends: str, as_text: bool, by_ids: bool, count: int) -> CallFormat:
    """Return the format, inferred from a message with `count` calls. MegarlError or
    ValueError if the template cannot write such a message, or not in one of the three
    formats.
    """
    asked: JsonObject = {"role": "user", "content": "?"}
    calls = []
    whats = []
    for n, (name, given) in enumerate(_PROBES[:count]):
        whats.append(f"functions.{name}:{n}" if by_ids else name)
        function = {"name": name, "arguments": json.dumps(given) if as_text else given}
        calls.append(
            {"id": whats[n] if by_ids else f"call0000{n}", "type": "function", "function": function}
        )

    def turn(content: str) -> str:
        """Return the text of an assistant's turn with the calls, without the text that
        precedes an answer, or any turn.
        """
        said = chat.render(
            [asked, {"role": "assistant", "content": SAID}], [PROBE], reply=False
        ).partition(SAID)[0]
        called = {"role": "assistant", "content": content, "tool_calls": calls}
        text = chat.render([asked, called], [PROBE], reply=False)
        before = said if text.startswith(said) else chat.render([asked], [PROBE])
        return text.removeprefix(before) if text.startswith(before) else ""

    text = turn("")
    at = 0
    spans = list[tuple[int, int]]()
    form = dict[str, Any]()
    for what, (name, given) in zip(whats, _PROBES, strict=False):
        begin, at, told = _span(text, at, what, name, given)
        spans.append((begin, at))
        form = form or told
    between = text[spans[0][1] : spans[1][0]] if count > 1 else None
    marks = Marks.told(text[: spans[0][0]], between, re.split(ends, text[at:])[0])
    if "keys" in form:
        before, between = form["keys"]
        keys = Marks.told(before, between, marks.closing)
        if not (keys.opening and keys.closing and form["value"]):
            raise ValueError("nothing tells a key from a value")
        marks = marks._replace(closing=keys.last)
        form |= {"behind_name": keys.first, "keys": keys._replace(first="", last="")}
    made = CallFormat(marks, by_ids=by_ids, as_text=as_text, **form)
    with suppress(MegarlError):
        before, said, rest = turn(SAID).partition(SAID)
        if said and made.begins is not None and (begun := made.begins.search(rest)):
            made = replace(made, beside=(before.strip(), rest[: begun.start()].strip()))
    return made


def _span(
    text: str, at: int, what: str, name: str, given: dict[str, str]
) -> tuple[int, int, JsonObject]:
    """Return where the next call's name and arguments begin and end, and their format.
    what: the text written as the name.
    """
    named = text.index(what, at)
    behind = named + len(what)
    with suppress(ValueError):
        begin = text.rindex("{", at, named)
        value, end = _decoder.raw_decode(text, begin)
        if value.get("name") == name and (
            keys := [key for key, one in value.items() if one == given]
        ):
            return begin, end, {"arguments": keys[0]}
    with suppress(ValueError):
        begin = text.index("{", behind)
        value, end = _decoder.raw_decode(text, begin)
        if value == given:
            return named, end, {"behind_name": text[behind:begin].strip()}
    begins = []
    ends = [behind]
    for part in (part for pair in given.items() for part in pair):
        begins.append(text.index(part, ends[-1]))
        ends.append(begins[-1] + len(part))
    parts = [text[a:b] for a, b in zip(ends, begins, strict=False)]
    if len(parts) < 4:
        return named, ends[-1], {}
    blank = parts[1][len(parts[1].rstrip()) :]
    return (
        named,
        ends[-1],
        {"keys": (parts[0], parts[2]), "value": parts[1].strip(), "blank": blank},
    )


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
    calls_at = [] if format is None or end_of_thinking not in text else format.places(text, tools)
    parts = without_thinking(text, end_of_thinking, prompt, calls_at)
    if parts is None and cut and is_opened(text, end_of_thinking, prompt):
        parts = text, ""
    reasoning, text = parts or ("", text)
    reasoning = reasoning.lstrip().removeprefix(opening_of(end_of_thinking))
    content, found = (text, []) if format is None else format.read(text, tools)
    if found:
        content = content.strip("\n") if content.strip() else ""
    calls = tuple(call._replace(id=f"call_{number:04}_{n:03}") for n, call in enumerate(found))
    marks = frozenset(
        [*(call.id for call in calls), *(mark + str(number) for mark in ("rs_", "msg_", "sig_"))]
    )
    return CanonicalMessage("assistant", content, calls, reasoning, marks)


def _common(one: list[str], other: list[str]) -> int:
    """Return the length of the common prefix."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _literal(mark: str) -> str:
    """Return a pattern for a mark. Where the mark has whitespace, the pattern matches
    any amount of it.
    """
    return r"\s*".join(map(re.escape, mark.split()))


def _after(text: str, at: int, mark: str) -> int | None:
    """Return where the mark that begins at `at`, after optional whitespace, ends; None
    if it is not there.
    """
    found = re.compile(rf"\s*{_literal(mark)}" if mark else "").match(text, at)
    return found.end() if found else None


def _skipped(text: str, at: int) -> int:
    """Return the position of the next character that is not whitespace."""
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _types(schema: Any) -> set[Any]:
    """Return the names of the types that a JSON schema allows; empty if it does not
    say.
    """
    named = _field(schema, "type")
    others = _field(schema, "anyOf")
    names = {
        name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)
    }
    return names.union(*map(_types, others)) if isinstance(others, list) else names


def _value(text: str, types: set[str]) -> Any:
    """Return an argument's value: decoded from JSON, or the text itself if it is not
    JSON or must be a string.
    """
    if types and types <= {"string", "null"} and not (text == "null" and "null" in types):
        return text
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return text


def _not_json(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_not_json)
