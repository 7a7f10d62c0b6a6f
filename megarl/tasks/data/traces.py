"""Traces for a supervised warm start: a prompt and the completion to learn, in one of
these formats, told apart by their keys.

    {"prompt": "27+58=", "completion": "<think>7+8=15;2+5+1=8</think>85"} {"prompt":
    "12*34=", "completion": ["<think>[12*34]", "408", "</think>408"]} {"messages":
    [{"role": "user", "content": "27+58=?"}, {"role": "assistant", "content":
    "<think>…</think>85"}]} {"conversations": [{"from": "human", "value": "27+58=?"},
    {"from": "gpt", "value": "<think>…</think>85"}]}

The first form is exactly what the model sees; a list of completion texts alternates
between model and tool, and the tool's are not learnt, just as in RL. Of messages each
of the assistant's is learnt; of {"prompt": messages, "completion": messages} those of
the completion, and none with `"weight": 0`. What precedes a turn goes through the
model's chat template, with the row's `tools`. So the prompt equals that of a task with
`template: chat`, and a template that strips thinking from earlier turns does not strip
it from what is learnt: where the prompt of a turn does not continue the turn before, it
begins a trace of its own.

    user, assistant, user, assistant ──► one trace:  prompt | turn | between | turn
                                     └─► two traces: prompt | turn, prompt | turn

A `<think>` with which the prompt ends is not learnt again. The end token is added here,
unless the completion ends with one: of messages the one with which the template ends
the turn, else the eos_token.

    source ──► survey of the user's text ──► template ──► token ids, up to a limit

Malformed and empty traces are an error; those of a hub set, which the user cannot
correct, are left out. Left out, too, are traces whose user text matches an evaluation
set, and those that are too long. All are counted and reported. Repeated traces are
counted but kept, since that is how sets weight their parts.

Schemas: messages as in TRL and on the hub (HuggingFaceH4/ultrachat_200k); conversations
as in ShareGPT (open-thoughts/OpenThoughts-114k: system separate from user and
assistant).
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import JsonObject, int32
from megarl.tasks.data.chat import SAMPLE_REPLY, ChatTemplate, load_chat
from megarl.tasks.data.contamination import overlap_with
from megarl.tasks.data.conversations import CALLS, messages_of, user_text
from megarl.tasks.data.prompts import BATCH_CHARACTERS, endless, in_parts
from megarl.tasks.data.rows import (
    Message,
    PromptRow,
    UnfitError,
    abbreviated,
    fingerprint,
    identity,
)
from megarl.tasks.data.sources import Unreadable, is_hub, stream
from megarl.tasks.data.survey import UNFIT, Survey, chosen, survey_of

log = logging.getLogger(__name__)

MAX_TOKENS = 12_288
"""Most tokens in a trace, as in ScaleRL (arXiv 2510.13786). Memory must hold one such
trace, and RL teaches longer thinking.
"""
OF_RESULTS = ("name", "tool_call_id")
"""Fields of a tool's message that some templates write."""
EMPTY = "the prompt or the completion is empty"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message beside its content, as chat APIs give them. Without them the rest
would be another message.
"""


class CompletionRow(PromptRow, frozen=True):
    """A trace as a row. answer: all that is learnt; parts: the completion's texts, the
    model's (first and last) and others by turns. further: prompt and parts of other
    traces of the same row.
    """

    parts: tuple[str, ...] = ()
    further: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Trace(NamedTuple):
    """A tokenized trace. tokens [n] int32: prompt, completion, end token. learnt [n]
    bool: not in prompt and tool texts.
    """

    tokens: np.ndarray
    prompt_tokens: int
    learnt: np.ndarray


class _Texts(NamedTuple):
    """A trace as the model sees it. completion: the model's texts (first and last) and
    a tool's by turns.
    """

    prompt: str
    completion: list[str]


class _TraceMessages(NamedTuple):
    """A trace of messages. turns: the indices of those that are learnt, ascending;
    tools: those that the model may call.
    """

    messages: list[Message]
    turns: list[int]
    tools: list[JsonObject]


def load_traces(
    path: Path | str,
    tokenizer: Tokenizer,
    decontaminate: Sequence[str] = (),
    longest: int = MAX_TOKENS,
) -> list[Trace]:
    """Load a source's traces of at most `longest` tokens, in order. decontaminate: the
    evaluation sets to compare with.
    """
    source = str(path)
    surveyed = survey_of(
        source,
        read_untemplated,
        evaluation=overlap_with(decontaminate),
        refuse=frozenset() if is_hub(source) else UNFIT,
        repeats=True,
    )
    traces: list[Trace] = []
    total = 0
    rows = chosen(templated(surveyed, tokenizer))
    for part in in_parts((trace for trace, _ in each_trace(rows)), _characters):
        if total == 0:
            tokenizer.warn_of_beginning(source, part[0].prompt[:BATCH_CHARACTERS])
        total += len(part)
        short = [row for row in part if tokenizer.least_tokens(_characters(row)) <= longest]
        traces += [trace for trace in _encode(short, tokenizer) if len(trace.tokens) <= longest]
    if not traces:
        raise MegarlError(
            f"{source}: all {total} traces are longer than {longest} tokens; shorten them"
        )
    log.info(
        "%s: %d traces, %d left out (longer than %d tokens)",
        source,
        len(traces),
        total - len(traces),
        longest,
    )
    return traces


def each_trace(
    rows: Iterable[tuple[PromptRow, bool]],
) -> Iterator[tuple[CompletionRow, bool]]:
    """Yield the traces of rows of a survey whose reader makes traces, with what comes
    with each row. `answer` is the whole completion.
    """
    for row, held_out in rows:
        assert isinstance(row, CompletionRow)  # `chosen` only says PromptRow
        for prompt, parts in ((row.prompt, row.parts), *row.further):
            answer = "".join(parts)
            yield replace(row, prompt=prompt, answer=answer, parts=parts, further=()), held_out


def _characters(row: CompletionRow) -> int:
    """Return the characters of a trace, prompt and completion."""
    return len(row.prompt) + sum(map(len, row.parts))


def _encode(rows: Sequence[CompletionRow], tokenizer: Tokenizer) -> Iterator[Trace]:
    """Yield the rows as traces of tokens; all their texts are encoded at once."""
    texts: list[str] = []
    for row in rows:
        texts.append(row.prompt)
        texts += row.parts
    encoded = iter(tokenizer.encode_all(texts))
    for row in rows:
        prompt = next(encoded)
        parts = [next(encoded) for _ in row.parts]
        yield _trace(prompt, parts, tokenizer)


def _trace(prompt: np.ndarray, parts: list[np.ndarray], tokenizer: Tokenizer) -> Trace:
    """Assemble a trace of the tokens of its prompt and of its parts, with an end token
    unless it has one. Parts 1, 3, … are a tool's; the others must be learnt.
    """
    last = parts[-1]
    if not len(last) or int(last[-1]) not in tokenizer.ends:
        last = np.append(last, int32([tokenizer.end]))
    parts = [*parts[:-1], last]
    learnt = [np.zeros(len(prompt), bool)]
    for turn, part in enumerate(parts):
        is_of_model = turn % 2 == 0
        learnt.append(np.full(len(part), is_of_model))
    return Trace(np.concatenate([prompt, *parts]), len(prompt), np.concatenate(learnt))


def are_traces(source: str) -> bool:
    """Return whether a source holds traces rather than RL prompts, judging by its first
    row: whether that has a completion, or a conversation that the assistant ends.
    """
    _, raw = next(stream(source), (0, {}))  # of an empty source a row without columns
    if isinstance(raw, Unreadable):
        return False
    has_answer = "answer" in raw
    for key in ("messages", "conversations"):
        if key in raw:
            return not has_answer or _last_role(raw[key]) in ("assistant", "gpt")
    return "completion" in raw and not has_answer


def _last_role(messages: Any) -> Any:
    """Return who says the last message; None if this is no list of messages."""
    if not isinstance(messages, list) or not messages:
        return None
    last = messages[-1]
    if not isinstance(last, Mapping):
        return None
    return last.get("role") or last.get("from")


def read_untemplated(raw: Mapping[str, Any]) -> CompletionRow:
    """Read a trace as user text and what is learnt, without a template. Its id is a
    hash of all its texts, up to whitespace.
    """
    return _without_template(_content_of(raw))


def _without_template(content: _Texts | _TraceMessages) -> CompletionRow:
    """Return a trace with its texts as they are. Of a conversation, its prompt has only
    what the user says.
    """
    if isinstance(content, _Texts):
        prompt, completion = content
        name = "\0".join([prompt, *completion])
        answer = "".join(completion)
    else:
        messages, turns, tools = content
        prompt = user_text(messages)
        completion = [messages[turn]["content"] for turn in turns]
        name = identity(json.dumps(tools) if tools else "", messages) + f"\0{turns}"
        answer = "\n".join(completion)
    return CompletionRow(f"{fingerprint(name):016x}", prompt, answer, parts=tuple(completion))


def templated(source: Survey, tokenizer: Tokenizer) -> Survey:
    """Return the same survey with a reader whose prompts and completions are exactly
    what the model sees.
    """
    return source._replace(read=_TemplatedReader(source.source, tokenizer))


class _TemplatedReader:
    """Reads a row as exactly what the model sees. The model's template is loaded for
    the first row of messages.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._is_checked = False
        self._takes_tools = False
        # The token that ends a turn, by the role of the message after it.
        self._end_before: dict[str, str] = {}

    @cached_property
    def _chat(self) -> ChatTemplate:
        return load_chat(self._tokenizer.path)

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        tokenizer = self._tokenizer
        return tuple(tokenizer.decode(int32([end])) for end in tokenizer.ends)

    def __call__(self, raw: Mapping[str, Any]) -> CompletionRow:
        """Read a row. UnfitError if it is no trace; MegarlError if the template cannot
        render its messages.
        """
        content = _content_of(raw)
        row = _without_template(content)
        if isinstance(content, _Texts):
            return row
        try:
            traces = self._traces(content)
        except MegarlError as error:
            raise MegarlError(f"{self._source}: {error}") from None
        first, *further = [(prompt, tuple(parts)) for prompt, parts in traces]
        return replace(row, prompt=first[0], parts=first[1], further=tuple(further))

    def _traces(self, conversation: _TraceMessages) -> list[tuple[str, list[str]]]:
        """Return prompt and parts of each trace of a conversation: one, unless the
        prompt of a turn does not continue the turn before.
        """
        messages, turns, tools = conversation
        self._check_tools(messages[: turns[0]], tools)
        prompts = [self._chat.render(messages[:turn], tools) for turn in turns]
        self._chat.check_all(messages[: turns[-1]], prompts[-1], tools)
        traces: list[tuple[str, list[str]]] = []
        rendered = ""  # prompt and parts of the latest trace
        for turn, prompt in zip(turns, prompts, strict=True):
            reply = messages[turn]["content"]
            self._check_first(messages[:turn], reply)
            next_role = messages[turn + 1]["role"] if turn + 1 < len(messages) else "user"
            learnt = self._ended(_without_opening(reply, prompt), next_role)
            if rendered and prompt.startswith(rendered):
                traces[-1][1].extend([prompt.removeprefix(rendered), learnt])
            else:
                traces.append((prompt, [learnt]))
            # Without an end token it gets one later, at the end of its trace.
            rendered = prompt + learnt if learnt.endswith(self._ends) else ""
        return traces

    def _ended(self, reply: str, next_role: str) -> str:
        """Return the reply with the token that ends it before a message of this role;
        as it is if it ends with one, or the template has none.
        """
        if next_role not in self._end_before:
            roles = (next_role, "user")
            ends = [_end_of_turn(self._chat, self._tokenizer, role) for role in roles]
            self._end_before[next_role] = ends[0] or ends[1]
        if reply.endswith(self._ends):
            return reply
        return reply + self._end_before[next_role]

    def _check_tools(self, context: Sequence[Message], tools: Sequence[JsonObject]) -> None:
        """Raise MegarlError if the template leaves out the first row's tools."""
        if not tools or self._takes_tools:
            return
        if self._chat.render(context, tools) == self._chat.render(context):
            raise MegarlError(
                f"{self._chat.path}: the chat template leaves out a row's tools; write them into"
                " its system message, and remove the column tools"
            )
        self._takes_tools = True

    def _check_first(self, context: Sequence[Message], reply: str) -> None:
        """Log what the user should know of the first row's reply."""
        if self._is_checked:
            return
        self._is_checked = True
        for remark in _remarks(self._chat, self._tokenizer, context, reply):
            log.warning("%s: %s", self._source, remark)


def _remarks(
    chat: ChatTemplate, tokenizer: Tokenizer, context: Sequence[Message], reply: str
) -> Iterator[str]:
    """Yield what the user should know of a reply that is learnt with this template."""
    problem = endless(chat, tokenizer)
    if problem:
        yield problem
    opening = re.search(r"<(\w+)>\s*$", chat.render(context))
    if opening and f"</{opening[1]}>" not in reply:
        closing = f"</{opening[1]}>"
        yield (
            f"its template opens the thinking, but an answer like the first has no {closing!r};"
            " write it into the content"
        )
        return
    missing = _unwritten(chat, context, reply)
    if missing:
        yield (
            f"its template writes {missing!r} before an answer like the first, which lacks it;"
            " write it into the content"
        )


def _end_of_turn(chat: ChatTemplate, tokenizer: Tokenizer, next_role: str) -> str:
    """Return the token with which the template ends an answer or, as GLM-4.5's, begins
    the next message, of this role, if it can end a completion; else an empty text: the
    eos_token of tokenizer_config.json is learnt.
    """
    question = {"role": "user", "content": "?"}
    reply = {"role": "assistant", "content": SAMPLE_REPLY}
    following = {"role": next_role, "content": "!"}
    try:
        text = chat.render([question, reply, following], reply=False)
        _, _, after_reply = text.partition(SAMPLE_REPLY)
        first_token = tokenizer.ids(after_reply.lstrip())[:1]
    except MegarlError:  # a template or a closed vocabulary that does not take these texts
        return ""
    if not set(first_token.tolist()) & set(tokenizer.ends):
        return ""
    return tokenizer.decode(first_token)


def _unwritten(chat: ChatTemplate, context: Sequence[Message], reply: str) -> str:
    """Return what the template writes between the start of the assistant's turn and
    this reply, as gpt-oss's writes a channel; "" if it writes nothing, changes the
    reply or the prompt, or refuses the reply.
    """
    try:
        text = chat.render([*context, {"role": "assistant", "content": reply}], reply=False)
    except MegarlError:  # gpt-oss's template refuses a reply that has a channel in it
        return ""
    prompt = chat.render(context)
    if not text.startswith(prompt):
        return ""
    between, reply_found, _ = text.removeprefix(prompt).partition(reply.strip())
    return between.strip() if reply_found else ""


def _without_opening(text: str, prompt: str) -> str:
    """Return a reply without the tag at its beginning with which the prompt ends:
    templates of models that always think write <think> themselves.
    """
    ending = re.search(r"(<[^<>\s]+>)\s*$", prompt)
    if ending is None:
        return text
    tag_with_space = ending[0]
    tag = ending[1]
    stripped = text.lstrip()
    if stripped.startswith(tag_with_space):
        return stripped.removeprefix(tag_with_space)
    if stripped.startswith(tag):
        return stripped.removeprefix(tag)
    return text


def _content_of(raw: Mapping[str, Any]) -> _Texts | _TraceMessages:
    """Return a row's texts or messages. UnfitError if it has none of the forms that the
    module names, or one of its texts is empty.
    """
    for key in ("messages", "conversations"):
        if key in raw:
            # of an empty column a message that is none: an error
            return _conversation(raw, raw[key] or [None], 0)
    prompt = raw.get("prompt")
    completion = raw.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(raw, [*prompt, *completion], len(prompt))
    texts = _texts_of_completion(raw)
    if not texts.prompt or not all(texts.completion):
        raise UnfitError(EMPTY)
    return texts


def _texts_of_completion(raw: Mapping[str, Any]) -> _Texts:
    """Return the texts of a row of prompt and completion. UnfitError if it is none."""
    prompt = raw.get("prompt")
    completion = raw.get("completion")
    parts: list[Any] = completion if isinstance(completion, list) else [completion]
    if not isinstance(prompt, str) or not all(isinstance(text, str) for text in parts):
        raise UnfitError("not a row of prompt and completion, of messages, or of conversations")
    if len(parts) % 2 == 0:
        raise UnfitError(
            "the completion's texts must alternate between model and tool, and begin and end with"
            " the model's"
        )
    if _tools_of(raw):
        raise UnfitError(
            "tools beside a prompt of text would be lost; write them into the prompt, or give"
            " messages"
        )
    return _Texts(prompt, parts)


def _conversation(raw: Mapping[str, Any], value: Any, first: int) -> _TraceMessages:
    """Convert a row's messages to our format, with its system message, if it has one in
    a column of its own, before them. first: the index of the first message that may be
    learnt. UnfitError unless the last message is the assistant's and another one
    precedes it.
    """
    messages = messages_of(value)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UnfitError("the last message is not the assistant's, with the user's before it")
    turns = []
    for turn, message in enumerate(messages):
        of_result = {key: value[turn][key] for key in OF_RESULTS if value[turn].get(key)}
        messages[turn] = {**message, **of_result}
        is_reply = turn == len(messages) - 1 or bool(user_text(messages[:turn]))
        may_be_learnt = turn >= first and is_reply and message["role"] == "assistant"
        if may_be_learnt and _weight(value[turn]):
            turns.append(turn)
    _check_fields(value, turns)
    if not turns:
        raise UnfitError("nothing of it is learnt: the assistant's messages have weight 0")
    if not all(messages[turn]["content"] for turn in turns):
        raise UnfitError(EMPTY)
    system = raw.get("system")
    if isinstance(system, str) and system:
        messages = [{"role": "system", "content": system}, *messages]
        turns = [turn + 1 for turn in turns]
    return _TraceMessages(messages, turns, _tools_of(raw))


def _weight(message: Mapping[str, Any]) -> bool:
    """Return whether a message may be learnt, by its `weight` as in OpenAI's format;
    UnfitError if that is neither 0 nor 1.
    """
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise UnfitError(f"a message has the weight {abbreviated(weight)}; it is 0 or 1")
    return weight != 0


def _tools_of(raw: Mapping[str, Any]) -> list[JsonObject]:
    """Return the row's tools: a list of JSON schemas, or its JSON text. UnfitError if
    they are something else.
    """
    tools = raw.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise UnfitError(f"tools is no JSON: {abbreviated(tools)}") from None
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UnfitError(f"tools is no list of JSON schemas: {abbreviated(tools)}")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without keys whose value is null. In Arrow files all objects
    of a column have the keys of each.
    """
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _check_fields(messages: Sequence[Mapping[str, Any]], turns: Sequence[int]) -> None:
    """Raise UnfitError if a message has calls, or one that is learnt reasoning, beside
    its content.
    """
    for field in CALLS:
        if any(message.get(field) for message in messages):
            raise UnfitError(
                f"a message has {field}, which would be lost; write the calls into its content, as"
                " the model writes them"
            )
    for field in REASONING:
        if any(messages[turn].get(field) for turn in turns):
            raise UnfitError(
                f"the reasoning is in {field}, which would be lost; write it into the content,"
                " with its tags"
            )
