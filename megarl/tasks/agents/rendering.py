"""Turns requests into tokens: all of the messages, or only the tail, i.e. the messages
after the policy's last one.

    user, A, tool result ─► template of [user "?", a placeholder answer with A's calls, tool result]
                                               └ cut here, after the calls ─► the tail, tokenised, without its first token

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
from typing import Any, Literal

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import JsonObject, int32
from megarl.tasks.agents.calls import KEY, NAME, PROBE, SAID, VALUE, call_format
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


class Rendering:
    """Renders requests with a model's chat template. calls: the template's format of
    tool calls; None if it is unknown.
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
        self._special = sorted(
            (token.content for token in added if token.special), key=len, reverse=True
        )
        self._literal = tokenizer.literal()
        self._guard, self._said = (
            f"literal-{secrets.token_hex(8)}-",
            f"{SAID}-{secrets.token_hex(8)}",
        )
        names = sorted({*self._special, *self.ends}, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, names)))
        self._closes = self._closed()

    def whole(self, request: AgentRequest, limit: int = UNLIMITED) -> np.ndarray:
        """Return the tokens of all messages and the start of the next. WireError if the
        template rejects the messages, ContextFull if they are much longer than `limit`,
        the longest prompt.
        """
        return self._tokens(self._render(request), limit)

    def tail(
        self, node: TreeNode, request: AgentRequest, limit: int = UNLIMITED
    ) -> np.ndarray | None:
        """Return the tokens to append to the node's; None if the request has to be
        rendered whole. ContextFull as in `whole`.
        """
        sampled = node.sampled
        ended = len(sampled) > 0 and int(sampled[-1]) in self._tokenizer.ends
        known = (*node.history, node.served)
        ours = {
            theirs.id: call.id
            for sent, had in zip(request.messages, known, strict=False)
            for theirs, call in zip(sent.calls, had.calls, strict=False)
        }  # the agent may have given the calls other ids
        tail = [
            replace(m, answers=ours.get(m.answers, m.answers))
            for m in request.messages[len(known) :]
        ]
        if (
            self._history == "template"
        ):  # the messages as they were served; the agent may send back less of them
            served = replace(request, messages=(*known, *tail))
            text = self._behind(node.tokens[:-1] if ended else node.tokens, served)
        else:
            text = self.tail_text(node.served, tail, request.tools, known=known)
        if text is None:
            return None
        tokens = self._tokens(text, limit, len(node.tokens))
        if not ended:
            return tokens
        return tokens[1:] if self._closes or tokens[0] == sampled[-1] else None

    def tail_text(
        self,
        served: CanonicalMessage,
        tail: Sequence[CanonicalMessage],
        tools: Sequence[JsonObject],
        before: Sequence[CanonicalMessage] = (CanonicalMessage("user", "?"),),
        known: Iterable[CanonicalMessage] = (),
    ) -> str | None:
        """Return the text of `tail` after an answer, and the start of the next message;
        None if it cannot be determined. The text begins with a special token: the one
        that ends the answer, or that begins the message after it.

        before: messages before the answer; known: earlier messages, whose calls the
        tail may answer. The arguments of calls are left out: they come before the cut,
        and could contain the end of a turn.
        """
        calls = tuple(call._replace(arguments={}) for call in served.calls)
        said = replace(served, text=self._said, reasoning="", calls=calls)
        named = self._named((*known, served))
        begin = [self._wire(message, named) for message in (*before, said)]
        try:
            text = self._chat.render([*begin, *(self._wire(m, named) for m in tail)], tools)
            begun = self._chat.render(begin, tools, reply=False)
        except MegarlError:
            return None
        if (
            text.count(self._said) == begun.count(self._said) == 1
        ):  # a template may drop text that accompanies calls
            text, begun = (one.partition(self._said)[2] for one in (text, begun))
        if self._closes:
            ends = [mark.start() for mark in self._mark.finditer(begun) if mark[0] in self.ends]
            if not ends:
                return None
            begun = begun[: ends[-1]]
        behind = text.removeprefix(begun)
        # A template may put what the system says at the beginning of the conversation,
        # or leave it out.
        said_there = all(
            self._guarded(m.text).strip() in behind for m in tail if m.role == "system"
        )
        return self._tail(behind) if text.startswith(begun) and said_there else None

    def _closed(self) -> bool | None:
        """Return how the template ends an answer: True: with a token at which
        generation stops; False: with no special token; None: with another one, or it
        renders no answer.
        """
        messages = [
            {"role": "user", "content": UNKNOWN},
            {"role": "assistant", "content": self._said},
        ]
        try:
            text = self._chat.render(messages, reply=False)
        except MegarlError:
            return None
        marks = self._mark.findall(text.rpartition(self._said)[2])
        return (marks[-1] in self.ends or None) if marks else False

    def _tail(self, text: str) -> str | None:
        """Return the text if it begins with a special token that a sampled end token
        can equal or stand in for, else None.
        """
        begins = None if self._closes is None else self._mark.match(text)
        return text if begins and (self._closes or begins[0] in self.ends) else None

    def _behind(self, tokens: np.ndarray, request: AgentRequest) -> str | None:
        """Return the rest of the whole request's rendered text after the text of these
        tokens; None if it differs from theirs. WireError if the template rejects the
        messages.
        """
        text = self._render(request)
        said = self._tokenizer.decode(tokens)
        cut = passed = 0
        for literal, part in self._parts(text):
            if passed + len(part) <= len(said):
                passed += len(part)
                cut += len(self._guard) + 4 if literal else len(part)
            elif literal:
                return None
            else:
                cut += len(said) - passed
                break
        plain = "".join(part for _, part in self._parts(text[:cut]))
        return self._tail(text[cut:]) if plain == said else None

    def _render(self, request: AgentRequest) -> str:
        named = self._named(request.messages)
        try:
            return self._chat.render(
                [self._wire(m, named) for m in request.messages], request.tools
            )
        except MegarlError as error:
            raise WireError(400, f"messages: {error}") from None

    def _named(self, messages: Iterable[CanonicalMessage]) -> dict[str, tuple[str, str]]:
        """Map the id of each call in a conversation to the id that the template is
        given and to the call's name.
        """
        calls = [call for message in messages if message.calls for call in message.calls]
        given = (lambda call, _: call.id) if self.calls is None else self.calls.template_id
        return {call.id: (given(call, n), call.name) for n, call in enumerate(calls)}

    def _wire(self, message: CanonicalMessage, named: Mapping[str, tuple[str, str]]) -> JsonObject:
        """Return the message in the form that templates expect. named: from `_named`."""
        made: JsonObject = {"role": message.role, "content": self._guarded(message.text)}
        if message.calls:
            as_text = self.calls is not None and self.calls.as_text
            made["tool_calls"] = [
                {
                    "id": named.get(c.id, (c.id,))[0],
                    "type": "function",
                    "function": {
                        "name": c.name,
                        "arguments": self._guarded(c.json if as_text else c.arguments),
                    },
                }
                for c in message.calls
            ]
        if message.reasoning:
            made["reasoning_content"] = self._guarded(message.reasoning)
        if message.role == "tool":
            id, name = named.get(message.answers, (message.answers, UNKNOWN))
            made |= {"tool_call_id": id, "name": name}
        return made

    def _guarded(self, value: Any) -> Any:
        """Return the value with the names of special tokens replaced by placeholders
        that templates leave alone.
        """
        match value:
            case str():
                for n, name in enumerate(self._special):
                    value = value.replace(name, f"{self._guard}{n:04}")
                return value
            case dict():
                return {self._guarded(key): self._guarded(one) for key, one in value.items()}
            case list():
                return [self._guarded(one) for one in value]
        return value

    def _parts(self, text: str) -> list[tuple[bool, str]]:
        """Return the parts of a rendered text, each with whether it is the name of a
        special token written in a message.
        """
        first, *rest = text.split(self._guard)
        parts = [(False, first)]
        for part in rest:
            parts += [(True, self._special[int(part[:4])]), (False, part[4:])]
        return parts

    def _tokens(self, text: str, limit: int, before: int = 0) -> np.ndarray:
        """Return the tokens of a rendered text. ContextFull if they and the `before`
        tokens that precede them are far beyond `limit`.
        """
        parts = [
            (self._literal if literal else self._tokenizer, part)
            for literal, part in self._parts(text)
            if part
        ]
        if len(text) > CHARACTERS * (limit - before):
            _check_length(parts, limit, before)
        return np.concatenate([int32(()), *(tokenizer.ids(part) for tokenizer, part in parts)])


def _check_length(parts: Iterable[tuple[Tokenizer, str]], limit: int, before: int) -> None:
    """Raise ContextFull as soon as the pieces of the parts have an eighth more tokens
    than `limit`. Cut into pieces, a text has a few tokens more than it has as a whole,
    so the rest is left to whoever counts the whole.
    """
    count = before
    for tokenizer, part in parts:
        for begin in range(0, len(part), PIECE):
            count += len(tokenizer.ids(part[begin : begin + PIECE]))
            if count > limit + limit // 8:
                raise ContextFull(count, limit, at_least=True)


def tail_problem(chat: ChatTemplate, rendering: Rendering) -> str:
    """Return how a tail rendered alone differs from the one in a whole conversation, or
    that no tail can be rendered alone; "" if all is well. Tried: the results of two
    parallel calls, the result of one more call, and a user's message after an answer. A
    request whose tail cannot be determined is rendered whole, which is a problem only
    if it is so for all of them.
    """
    calls = [ToolCall(f"call0000{n}", NAME, {KEY: VALUE}) for n in range(3)]
    answers = [
        CanonicalMessage("assistant", SAID, made)
        for made in (tuple(calls[:2]), tuple(calls[2:]), ())
    ]
    results = [
        CanonicalMessage("tool", f"result {n}", answers=call.id) for n, call in enumerate(calls)
    ]
    tails = [results[:2], results[2:], [CanonicalMessage("user", "go on")]]
    said = [CanonicalMessage("system", "be brief"), CanonicalMessage("user", "begin")]
    tools = [PROBE] if rendering.calls else []
    told = False
    for answer, tail in list(zip(answers, tails, strict=True))[0 if rendering.calls else 2 :]:
        if (alone := rendering.tail_text(answer, tail, tools)) is None:
            continue
        told = True
        whole = rendering.tail_text(answer, tail, tools, before=said)
        if alone != whole:
            what = (
                "a user's words" if tail[0].role == "user" else f"the results of {len(tail)} calls"
            )
            written = (
                f"{what} are written {alone!r} after an answer, and {whole!r} in a whole"
                " conversation"
            )
            return f"{chat.path}: {written}; the policy will see the first"
        said = [*said, replace(answer, text="An answer."), *tail]
    if told:
        return ""
    ends = " or ".join(map(repr, rendering.ends))
    return (
        f"{chat.path}: the chat template neither ends an answer nor begins the next message with"
        f" {ends}, the eos_token of tokenizer_config.json and others of generation_config.json;"
        " each request of an agent is rendered whole, as a new path"
    )
