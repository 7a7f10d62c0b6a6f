"""Turns requests into tokens: all of the messages, or only what came after the policy's last one.

    user, A, tool result ─► template of [user "?", an assistant's sentinel with A's calls, tool result]
                                               └ cut here, behind the token that ends a turn ─► the tail, tokenised

So what was sampled is never tokenised again, and a template that would drop A's thinking (`agent.history: sampled`) or write
its calls otherwise cannot change it. Names of special tokens in messages are tokenised as plain text.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import int32
from megarl.tasks.agents.calls import KEY, NAME, PROBE, SAID, VALUE, call_format
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ToolCall, WireError
from megarl.tasks.agents.tree import TreeNode
from megarl.tasks.data.chat import ChatTemplate

UNKNOWN = "?"


class Rendering:
    """Renders requests with a model's chat template. calls: how it writes tool calls; None: in no form that is
    read. end: the text that ends a turn."""

    def __init__(self, chat: ChatTemplate, tokenizer: Tokenizer, history: Literal["sampled", "template"]) -> None:
        self._chat, self._tokenizer, self._history = chat, tokenizer, history
        self.end = tokenizer.decode(int32([tokenizer.end]))
        self.calls = call_format(chat, [self.end])
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._literal = tokenizer.literal()
        self._guard, self._said = f"literal-{secrets.token_hex(8)}-", f"{SAID}-{secrets.token_hex(8)}"

    def whole(self, request: AgentRequest) -> np.ndarray:
        """Return the tokens of all messages and the beginning of the next. WireError if the template refuses them."""
        return self._tokens(self._render(request))

    def tail(self, node: TreeNode, request: AgentRequest) -> np.ndarray | None:
        """Return what is put in behind the node's tokens; None if the request has to be rendered whole."""
        sampled = node.sampled
        ended = len(sampled) and int(sampled[-1]) == self._tokenizer.end
        if self._history == "template":
            text = self._behind(node, request, "" if ended else self.end)
        else:
            known = (*node.history, node.served)
            text = self.tail_text(node.served, request.messages[len(known) :], request.tools, known=known)
        if text is None:
            return None
        return np.concatenate([int32([] if ended else [self._tokenizer.end]), self._tokens(text)])

    def tail_text(
        self,
        served: CanonicalMessage,
        tail: Sequence[CanonicalMessage],
        tools: Sequence[Mapping[str, Any]],
        before: Sequence[CanonicalMessage] = (CanonicalMessage("user", "?"),),
        known: Iterable[CanonicalMessage] = (),
    ) -> str | None:
        """Return the text of these messages behind an answer, and the beginning of the next; None if it cannot be told.

        before: what stands before the answer; known: earlier messages, whose calls the tail may answer. Arguments of
        calls are left out: their text is before the cut, and could have the end of a turn in it.
        """
        said = replace(
            served, text=self._said, reasoning="", calls=tuple(c._replace(arguments={}) for c in served.calls)
        )
        named = self._named((*known, served))
        begin = [self._wire(message, named) for message in (*before, said)]
        try:
            text = self._chat.render([*begin, *(self._wire(m, named) for m in tail)], tools)
            if text.count(self._said) == 1:
                _, ended, behind = text.partition(self._said)[2].partition(self.end)
                return behind if ended else None
            begun = self._chat.render(begin, tools, reply=False)  # it leaves out text beside calls
        except MegarlError:
            return None
        cut = begun.rfind(self.end) + len(self.end)
        return text[cut:] if cut >= len(self.end) and text.startswith(begun[:cut]) else None

    def _behind(self, node: TreeNode, request: AgentRequest, end: str) -> str | None:
        """Return the template's text of the whole request behind the node's, if it begins with that."""
        text, said = self._render(request), self._tokenizer.decode(node.tokens) + end
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
        return text[cut:] if self._plain(text[:cut]) == said else None

    def _render(self, request: AgentRequest) -> str:
        named = self._named(request.messages)
        try:
            return self._chat.render([self._wire(m, named) for m in request.messages], request.tools)
        except MegarlError as error:
            raise WireError(400, f"messages: {error}") from None

    def _named(self, messages: Iterable[CanonicalMessage]) -> dict[str, tuple[str, str]]:
        """Return of each call in a conversation, by its id, the id that the template is given, and its name."""
        calls = [call for message in messages for call in message.calls]
        given = (lambda call, _: call.id) if self.calls is None else self.calls.template_id
        return {call.id: (given(call, n), call.name) for n, call in enumerate(calls)}

    def _wire(self, message: CanonicalMessage, named: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """Return the message as templates take it. named: as `_named` returns it."""
        made: dict[str, Any] = {"role": message.role, "content": self._guarded(message.text)}
        if message.calls:
            as_text = self.calls is not None and self.calls.as_text
            made["tool_calls"] = [
                {"id": named.get(c.id, (c.id,))[0], "type": "function",
                 "function": {"name": c.name, "arguments": self._guarded(c.json if as_text else c.arguments)}}
                for c in message.calls
            ]  # fmt: skip
        if message.reasoning:
            made["reasoning_content"] = self._guarded(message.reasoning)
        if message.role == "tool":
            id, name = named.get(message.answers, (message.answers, UNKNOWN))
            made |= {"tool_call_id": id, "name": name}
        return made

    def _guarded(self, value: Any) -> Any:
        """Return the value with names of special tokens replaced by marks that templates leave alone."""
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
        """Return the rendered text in parts, and of each whether it is the name of a special token in a message."""
        first, *rest = text.split(self._guard)
        parts = [(False, first)]
        for part in rest:
            parts += [(True, self._special[int(part[:4])]), (False, part[4:])]
        return parts

    def _plain(self, text: str) -> str:
        return "".join(part for _, part in self._parts(text))

    def _tokens(self, text: str) -> np.ndarray:
        parts = [
            (self._literal if literal else self._tokenizer).ids(part) for literal, part in self._parts(text) if part
        ]
        return np.concatenate([int32(()), *parts])


def tail_problem(chat: ChatTemplate, rendering: Rendering) -> str:
    """Return how a tail of this template differs from that in the whole conversation, or that none can be told; "" if neither.

    Asked: results of two parallel calls, of one call after that, and a user's words behind an answer. A request whose tail
    cannot be told is rendered whole; that is a problem if all are.
    """
    calls = [ToolCall(f"call0000{n}", NAME, {KEY: VALUE}) for n in range(3)]
    answers = [CanonicalMessage("assistant", SAID, made) for made in (tuple(calls[:2]), tuple(calls[2:]), ())]
    results = [CanonicalMessage("tool", f"result {n}", answers=call.id) for n, call in enumerate(calls)]
    tails = [results[:2], results[2:], [CanonicalMessage("user", "go on")]]
    said = [CanonicalMessage("system", "be brief"), CanonicalMessage("user", "begin")]
    tools, told = [PROBE] if rendering.calls else [], False
    for answer, tail in list(zip(answers, tails, strict=True))[0 if rendering.calls else 2 :]:
        if (alone := rendering.tail_text(answer, tail, tools)) is None:
            continue
        told, whole = True, rendering.tail_text(answer, tail, tools, before=said)
        if alone != whole:
            what = "a user's words" if tail[0].role == "user" else f"the results of {len(tail)} calls"
            written = f"{what} are written {alone!r} behind an answer, and {whole!r} in a whole conversation"
            return f"{chat.path}: {written}; the policy will see the first"
        said = [*said, replace(answer, text="An answer."), *tail]
    if told:
        return ""
    return (
        f"{chat.path}: the chat template does not end an answer with {rendering.end!r}, the eos_token of "
        "tokenizer_config.json; each request of an agent is rendered whole, and begins a path"
    )
