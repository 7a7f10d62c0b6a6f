"""Turns requests into tokens: all of the messages, or only the tail, i.e. the messages
after the policy's last one.

    user, A, tool result
      ─► template of [user "?", a placeholder answer with A's calls, tool result]
                                                                   └ cut here
      ─► the tail: what is after the calls, tokenised, without its first token

The first token is dropped because A's turn ended with it or its equivalent: gpt-oss's
template ends an answer with <|end|> once something follows, where the policy wrote
<|return|>. GLM-4.5's template ends no turn; the policy stops by sampling the start of
the next turn. If a different turn follows, the model was trained on no such tail, and
the request is rendered whole.

So sampled tokens are never tokenised again, and a template that would drop A's thinking
(`agent.history: sampled`) or rewrite its calls cannot change them. Names of special
tokens in messages are tokenised as plain text.
"""

import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import JsonObject, int32
from megarl.tasks.agents.calls import ANSWER_TEXT, KEY, NAME, PROBE, VALUE, call_format
from megarl.tasks.agents.errors import ContextFull, WireError
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ToolCall
from megarl.tasks.agents.tree import TreeNode
from megarl.tasks.data.chat import ChatTemplate

UNKNOWN = "?"
UNLIMITED = sys.maxsize
CHARACTERS = 5
"""Characters per token, with which a text may still fit. Longer texts are first counted
piece by piece, up to the limit.
"""
PIECE = 1 << 16
"""Characters that are tokenised at a time to count them: a token takes about 400 bytes
until its text has been tokenised.
"""
NUMBER_DIGITS = 4
"""Digits of a special token's number in a placeholder for its name."""


class TemplateCall(NamedTuple):
    """What the template is told of a call: its id, and its name."""

    id: str
    name: str


class RenderedPart(NamedTuple):
    """A part of a rendered text. is_literal: it is the name of a special token, written
    in a message.
    """

    is_literal: bool
    text: str


class Rendering:
    """Renders requests with a model's chat template. calls: the template's format of
    tool calls; None if it is unknown. ends: the texts at which generation stops.
    """

    def __init__(
        self, chat: ChatTemplate, tokenizer: Tokenizer, history: Literal["sampled", "template"]
    ) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._history = history
        self.ends = tuple(tokenizer.decode(int32([end])) for end in tokenizer.ends)
        self.calls = call_format(chat, self.ends)
        added = tokenizer.backend.get_added_tokens_decoder().values()
        # The names of special tokens, the longest first: one may begin like another.
        self._special = sorted(
            (token.content for token in added if token.special), key=len, reverse=True
        )
        self._literal = tokenizer.literal()
        # Both are random, so that no message can have them.
        self._guard = f"literal-{secrets.token_hex(8)}-"
        self._answer_text = f"{ANSWER_TEXT}-{secrets.token_hex(8)}"
        names = sorted({*self._special, *self.ends}, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, names)))
        self._closes = self._closed()

    def full_prompt(self, request: AgentRequest, limit: int = UNLIMITED) -> np.ndarray:
        """Return the tokens of all messages and the start of the next. WireError if the
        template rejects the messages, ContextFull if they are much longer than `limit`,
        the longest prompt.
        """
        return self._tokens(self._render(request), limit)

    def tail(
        self, node: TreeNode, request: AgentRequest, limit: int = UNLIMITED
    ) -> np.ndarray | None:
        """Return the tokens to append to the node's for a request that continues it;
        None if the request has to be rendered whole. limit, ContextFull: as in
        `full_prompt`.
        """
        sampled = node.sampled
        ended = len(sampled) > 0 and int(sampled[-1]) in self._tokenizer.ends
        tail = _tail_messages(node, request)
        if self._history == "template":
            # the messages as they were served; the agent may send back less of them
            conversation = replace(request, messages=(*node.conversation, *tail))
            tokens_before = node.tokens[:-1] if ended else node.tokens
            text = self._text_after(tokens_before, conversation)
        else:
            text = self.tail_text(node.answer, tail, request.tools, history=node.history)
        if text is None:
            return None
        tokens = self._tokens(text, limit, len(node.tokens))
        if not ended:
            return tokens
        # The text begins with the end token that was sampled, or one in its place.
        if self._closes or tokens[0] == sampled[-1]:
            return tokens[1:]
        return None

    def tail_text(
        self,
        answer: CanonicalMessage,
        tail: Sequence[CanonicalMessage],
        tools: Sequence[JsonObject],
        opening: Sequence[CanonicalMessage] = (CanonicalMessage("user", UNKNOWN),),
        history: Iterable[CanonicalMessage] = (),
    ) -> str | None:
        """Return the text of `tail` after an answer, and the start of the next message;
        None if it cannot be determined. The text begins with a special token: the one
        that ends the answer, or that begins the message after it.

        opening: the messages rendered before the answer; history: earlier messages,
        whose calls the tail may answer. The arguments of calls are left out: they come
        before the cut, and could contain the end of a turn.
        """
        calls = tuple(call._replace(arguments={}) for call in answer.calls)
        placeholder = replace(answer, text=self._answer_text, reasoning="", calls=calls)
        template_calls = self._template_calls((*history, answer))
        start = [self._wire(message, template_calls) for message in (*opening, placeholder)]
        messages = start + [self._wire(message, template_calls) for message in tail]
        try:
            text = self._chat.render(messages, tools)
            start_text = self._chat.render(start, tools, reply=False)
        except MegarlError:
            return None
        # A template may drop text that accompanies calls; if it does not, only what
        # follows the text counts.
        if text.count(self._answer_text) == start_text.count(self._answer_text) == 1:
            text = text.partition(self._answer_text)[2]
            start_text = start_text.partition(self._answer_text)[2]
        if self._closes:  # the tail begins with the token that ends the answer
            marks = self._mark.finditer(start_text)
            ends = [mark.start() for mark in marks if mark[0] in self.ends]
            if not ends:
                return None
            start_text = start_text[: ends[-1]]
        if not text.startswith(start_text):
            return None
        tail_text = text.removeprefix(start_text)
        if not self._has_system_texts(tail_text, tail):
            return None
        return self._beginning_with_mark(tail_text)

    def _has_system_texts(self, text: str, messages: Iterable[CanonicalMessage]) -> bool:
        """Return whether the text has all that the system says in the messages; it
        lacks that if a template puts it at the beginning of the conversation, or leaves
        it out.
        """
        return all(
            self._guarded(message.text).strip() in text
            for message in messages
            if message.role == "system"
        )

    def _closed(self) -> bool | None:
        """Return how the template ends an answer: True: with a token at which
        generation stops; False: with no special token; None: with another one, or it
        renders no answer.
        """
        messages = [
            {"role": "user", "content": UNKNOWN},
            {"role": "assistant", "content": self._answer_text},
        ]
        try:
            text = self._chat.render(messages, reply=False)
        except MegarlError:
            return None
        marks = self._mark.findall(text.rpartition(self._answer_text)[2])
        if not marks:
            return False
        if marks[-1] in self.ends:
            return True
        return None

    def _beginning_with_mark(self, text: str) -> str | None:
        """Return the text if it begins with a special token that a sampled end token
        can equal or stand in for, else None.
        """
        if self._closes is None:
            return None
        mark = self._mark.match(text)
        if mark and (self._closes or mark[0] in self.ends):
            return text
        return None

    def _text_after(self, tokens: np.ndarray, request: AgentRequest) -> str | None:
        """Return the rest of the whole request's rendered text after the text of these
        tokens; None if it differs from theirs. WireError if the template rejects the
        messages.
        """
        text = self._render(request)
        start = self._tokenizer.decode(tokens)
        cut = 0  # in the rendered text, which has placeholders
        passed = 0  # the same place in the text without them
        for part in self._parts(text):
            if passed + len(part.text) <= len(start):
                passed += len(part.text)
                placeholder_length = len(self._guard) + NUMBER_DIGITS
                cut += placeholder_length if part.is_literal else len(part.text)
            elif part.is_literal:  # the tokens end within the name
                return None
            else:
                cut += len(start) - passed
                break
        if "".join(part.text for part in self._parts(text[:cut])) != start:
            return None
        return self._beginning_with_mark(text[cut:])

    def _render(self, request: AgentRequest) -> str:
        """Return the text of all messages, with placeholders for the names of special
        tokens in them. WireError if the template rejects the messages.
        """
        template_calls = self._template_calls(request.messages)
        messages = [self._wire(message, template_calls) for message in request.messages]
        try:
            return self._chat.render(messages, request.tools)
        except MegarlError as error:
            raise WireError(400, f"messages: {error}") from None

    def _template_calls(self, messages: Iterable[CanonicalMessage]) -> dict[str, TemplateCall]:
        """Map the id of each call in a conversation to the id that the template is
        given and to the call's name.
        """
        template_calls: dict[str, TemplateCall] = {}
        number = 0
        for message in messages:
            for call in message.calls:
                id = call.id if self.calls is None else self.calls.template_id(call, number)
                template_calls[call.id] = TemplateCall(id, call.name)
                number += 1
        return template_calls

    def _wire(
        self, message: CanonicalMessage, template_calls: Mapping[str, TemplateCall]
    ) -> JsonObject:
        """Return the message in the form that templates expect. template_calls: from
        `_template_calls`.
        """
        fields: JsonObject = {"role": message.role, "content": self._guarded(message.text)}
        if message.calls:
            fields["tool_calls"] = [self._wire_call(call, template_calls) for call in message.calls]
        if message.reasoning:
            fields["reasoning_content"] = self._guarded(message.reasoning)
        if message.role == "tool":
            unknown = TemplateCall(message.answers, UNKNOWN)
            answered = template_calls.get(message.answers, unknown)
            fields["tool_call_id"] = answered.id
            fields["name"] = answered.name
        return fields

    def _wire_call(self, call: ToolCall, template_calls: Mapping[str, TemplateCall]) -> JsonObject:
        """Return a call in the form that templates expect."""
        as_text = self.calls is not None and self.calls.as_text
        arguments = self._guarded(call.json if as_text else call.arguments)
        template_call = template_calls.get(call.id, TemplateCall(call.id, call.name))
        return {
            "id": template_call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _guarded(self, value: Any) -> Any:
        """Return the value with the names of special tokens replaced by placeholders
        that templates leave alone.
        """
        match value:
            case str():
                for number, name in enumerate(self._special):
                    value = value.replace(name, f"{self._guard}{number:0{NUMBER_DIGITS}}")
                return value
            case dict():
                return {self._guarded(key): self._guarded(item) for key, item in value.items()}
            case list():
                return [self._guarded(item) for item in value]
        return value

    def _parts(self, text: str) -> list[RenderedPart]:
        """Return the parts of a rendered text, with the names of special tokens in
        place of their placeholders.
        """
        first, *guarded = text.split(self._guard)
        parts = [RenderedPart(False, first)]
        for part in guarded:
            name = self._special[int(part[:NUMBER_DIGITS])]
            parts += [RenderedPart(True, name), RenderedPart(False, part[NUMBER_DIGITS:])]
        return parts

    def _tokens(self, text: str, limit: int, preceding: int = 0) -> np.ndarray:
        """Return the tokens of a rendered text. ContextFull if they and the
        `preceding` ones are far beyond `limit`.
        """
        parts = [part for part in self._parts(text) if part.text]
        # A text that may be far too long is first counted in pieces.
        if len(text) > CHARACTERS * (limit - preceding):
            self._check_length(parts, limit, preceding)
        ids = [self._tokenizer_of(part).ids(part.text) for part in parts]
        return np.concatenate([int32(()), *ids])

    def _check_length(self, parts: Iterable[RenderedPart], limit: int, preceding: int) -> None:
        """Raise ContextFull as soon as the pieces of the parts have an eighth more
        tokens than `limit`. Cut into pieces, a text has a few tokens more than it has
        as a whole, so the rest is left to whoever counts the whole.
        """
        count = preceding
        for part in parts:
            tokenizer = self._tokenizer_of(part)
            for start in range(0, len(part.text), PIECE):
                count += len(tokenizer.ids(part.text[start : start + PIECE]))
                if count > limit + limit // 8:
                    raise ContextFull(count, limit, at_least=True)

    def _tokenizer_of(self, part: RenderedPart) -> Tokenizer:
        return self._literal if part.is_literal else self._tokenizer


def _tail_messages(node: TreeNode, request: AgentRequest) -> list[CanonicalMessage]:
    """Return the request's messages after the node's. The agent may have given the
    calls other ids; these answer ours.
    """
    our_ids: dict[str, str] = {}
    for theirs, ours in zip(request.messages, node.conversation, strict=False):
        for their_call, our_call in zip(theirs.calls, ours.calls, strict=False):
            our_ids[their_call.id] = our_call.id
    tail = request.messages[len(node.conversation) :]
    return [
        replace(message, answers=our_ids.get(message.answers, message.answers)) for message in tail
    ]


def tail_problem(chat: ChatTemplate, rendering: Rendering) -> str:
    """Return how a tail rendered alone differs from the one in a whole conversation, or
    that no tail can be rendered alone; "" if all is well. Tried: the results of two
    parallel calls, the result of one more call, and a user's message after an answer. A
    request whose tail cannot be determined is rendered whole, which is a problem only
    if it is so for all of them.
    """
    conversation = [CanonicalMessage("system", "be brief"), CanonicalMessage("user", "begin")]
    tools = [PROBE] if rendering.calls else []
    is_rendered = False  # whether any tail could be
    for answer, tail in _probes(with_calls=bool(rendering.calls)):
        tail_text = rendering.tail_text(answer, tail, tools)
        if tail_text is None:
            continue
        is_rendered = True
        in_conversation = rendering.tail_text(answer, tail, tools, opening=conversation)
        if tail_text != in_conversation:
            subject = f"the results of {len(tail)} calls"
            if tail[0].role == "user":
                subject = "a user's words"
            return (
                f"{chat.path}: {subject} are written {tail_text!r} after an answer, and"
                f" {in_conversation!r} in a whole conversation; the policy will see the first"
            )
        conversation += [replace(answer, text="An answer."), *tail]
    if is_rendered:
        return ""
    ends = " or ".join(map(repr, rendering.ends))
    return (
        f"{chat.path}: the chat template neither ends an answer nor begins the next message with"
        f" {ends}, the eos_token of tokenizer_config.json and others of generation_config.json;"
        " each request of an agent is rendered whole, as a new path"
    )


def _probes(with_calls: bool) -> list[tuple[CanonicalMessage, list[CanonicalMessage]]]:
    """Return answers of a made-up conversation, each with the messages after it."""
    calls = [ToolCall(f"call0000{n}", NAME, {KEY: VALUE}) for n in range(3)]
    results = [
        CanonicalMessage("tool", f"result {n}", answers=call.id) for n, call in enumerate(calls)
    ]
    two_calls = CanonicalMessage("assistant", ANSWER_TEXT, tuple(calls[:2]))
    one_call = CanonicalMessage("assistant", ANSWER_TEXT, tuple(calls[2:]))
    no_call = CanonicalMessage("assistant", ANSWER_TEXT)
    probes = [(no_call, [CanonicalMessage("user", "go on")])]
    if with_calls:
        return [(two_calls, results[:2]), (one_call, results[2:]), *probes]
    return probes
