"""Traces for a supervised warm start: a prompt and the completion to learn, in one of
these formats, told apart by their keys.

    {"prompt": "27+58=", "completion": "<think>7+8=15;2+5+1=8</think>85"} {"prompt":
    "12*34=", "completion": ["<think>[12*34]", "408", "</think>408"]} {"messages":
    [{"role": "user", "content": "27+58=?"}, {"role": "assistant", "content":
    "<think>…</think>85"}]} {"conversations": [{"from": "human", "value": "27+58=?"},
    {"from": "gpt", "value": "<think>…</think>85"}]}

The first form is exactly what the model sees; a list of completion texts alternates
between model and tool, and the tool's are not learnt, just as in RL. Of messages only
the last, the assistant's, is learnt; those before it go through the model's chat
template. So the prompt equals that of a task with `template: chat`, and a template that
strips thinking from earlier turns does not strip it from what is learnt. A `<think>`
with which the prompt ends is not learnt again. The end token is added here, unless the
completion ends with one: of messages the one with which the template ends a turn, else
the eos_token.

    source ──► survey of the user's text ──► template ──► token ids, up to a limit

Malformed and empty traces are an error; those of a hub set, which the user cannot
correct, are left out. Left out, too, are traces whose user text matches an evaluation
set, and those that are too long. All are counted and reported. Repeated traces are
counted but kept, since that is how sets weight their parts.

Schemas: messages as in TRL and on the hub (HuggingFaceH4/ultrachat_200k); conversations
as in ShareGPT (open-thoughts/OpenThoughts-114k: system separate from user and
assistant).
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import int32
from megarl.tasks.data.chat import SAMPLE_REPLY, ChatTemplate, load_chat
from megarl.tasks.data.contamination import overlap_with
from megarl.tasks.data.conversations import CALLS, messages_of, user_text
from megarl.tasks.data.prompts import BATCH_CHARACTERS, endless, in_parts
from megarl.tasks.data.rows import Message, PromptRow, UnfitError, fingerprint, identity
from megarl.tasks.data.sources import Unreadable, is_hub, stream
from megarl.tasks.data.survey import UNFIT, Survey, chosen, survey_of

log = logging.getLogger(__name__)

MAX_TOKENS = 12_288
"""Most tokens in a trace, as in ScaleRL (arXiv 2510.13786). Memory must hold one such
trace, and RL teaches longer thinking.
"""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message beside its content, as chat APIs give them. Without them the rest
would be another message.
"""


class CompletionRow(PromptRow, frozen=True):
    """A row of a source of traces. answer: the whole completion; parts: the
    completion's texts, the model's (first and last) and a tool's by turns.
    """

    parts: tuple[str, ...] = ()


class Trace(NamedTuple):
    """A tokenized trace. tokens [n] int32: prompt, completion, end token. learnt [n]
    bool: not in prompt and tool texts.
    """

    tokens: np.ndarray
    prompt_tokens: int
    learnt: np.ndarray


class _Texts(NamedTuple):
    """A trace's texts. context: what precedes the completion, as text or messages.
    completion: the model's texts (first and last) and a tool's by turns.
    """

    context: str | list[Message]
    completion: list[str]


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
    rows = 0
    for part in in_parts(_trace_rows(templated(surveyed, tokenizer)), _characters):
        if rows == 0:
            tokenizer.warn_of_beginning(source, part[0].prompt[:BATCH_CHARACTERS])
        rows += len(part)
        short = [row for row in part if tokenizer.least_tokens(_characters(row)) <= longest]
        traces += [trace for trace in _encode(short, tokenizer) if len(trace.tokens) <= longest]
    if not traces:
        raise MegarlError(
            f"{source}: all {rows} traces are longer than {longest} tokens; shorten them"
        )
    log.info(
        "%s: %d traces, %d left out (longer than %d tokens)",
        source,
        len(traces),
        rows - len(traces),
        longest,
    )
    return traces


def _trace_rows(surveyed: Survey) -> Iterator[CompletionRow]:
    """Yield the kept rows of a survey whose reader makes traces."""
    for row, _ in chosen(surveyed):
        assert isinstance(row, CompletionRow)  # `chosen` only says PromptRow
        yield row


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
    """Read a trace as user text and completion, without a template. Its id is a hash of
    all its texts, up to whitespace.
    """
    return _without_template(_texts_of(raw))


def _without_template(texts: _Texts) -> CompletionRow:
    """Return a trace with these texts as they are. Of a context of messages, its prompt
    has only what the user says.
    """
    context, completion = texts
    if isinstance(context, str):
        context_identity = context
        prompt = context
    else:
        context_identity = identity("", context)
        prompt = user_text(context)
    name = fingerprint("\0".join([context_identity, *completion]))
    return CompletionRow(f"{name:016x}", prompt, "".join(completion), parts=tuple(completion))


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

    @cached_property
    def _chat(self) -> ChatTemplate:
        return load_chat(self._tokenizer.path)

    @cached_property
    def _end(self) -> str:
        return _end_of_turn(self._chat, self._tokenizer)

    def __call__(self, raw: Mapping[str, Any]) -> CompletionRow:
        """Read a row. UnfitError if it is no trace; MegarlError if the template cannot
        render its messages.
        """
        texts = _texts_of(raw)
        row = _without_template(texts)
        if isinstance(texts.context, str):
            return row
        try:
            prompt = self._chat.render_all(texts.context)
        except MegarlError as error:
            raise MegarlError(f"{self._source}: {error}") from None
        reply = texts.completion[0]
        self._check_first(texts.context, reply)
        learnt = _without_opening(reply, prompt).removesuffix(self._end) + self._end
        return replace(row, prompt=prompt, parts=(learnt, *texts.completion[1:]))

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


def _end_of_turn(chat: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return the token with which the template ends an answer or, as GLM-4.5's, begins
    the user's next message, if it can end a completion; else an empty text: the
    eos_token of tokenizer_config.json is learnt.
    """
    question = {"role": "user", "content": "?"}
    reply = {"role": "assistant", "content": SAMPLE_REPLY}
    try:
        text = chat.render([question, reply, question], reply=False)
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


def _texts_of(raw: Mapping[str, Any]) -> _Texts:
    """Return a row's texts. UnfitError if it has none of the forms that the module
    names, or one of its texts is empty.
    """
    conversation = _conversation(raw)
    if conversation:
        texts = _texts_of_messages(_messages(conversation, raw.get("system")))
    else:
        texts = _texts_of_completion(raw)
    if not texts.context or not all(texts.completion):
        raise UnfitError("the prompt or the completion is empty")
    return texts


def _texts_of_messages(messages: list[Message]) -> _Texts:
    return _Texts(messages[:-1], [messages[-1]["content"]])


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
    return _Texts(prompt, parts)


def _conversation(raw: Mapping[str, Any]) -> Any:
    """Return the messages of a row that has some, in one column or as prompt and
    completion; None if it has none.
    """
    for key in ("messages", "conversations"):
        if key in raw:
            return raw[key] or [None]  # of an empty column a message that is none: an error
    prompt = raw.get("prompt")
    completion = raw.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return None


def _messages(value: Any, system: Any) -> list[Message]:
    """Convert messages to our format, with the row's system message, if it has one
    (system), before them. UnfitError unless the last is the assistant's and another one
    precedes it.
    """
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        _check_fields(value)
    messages = messages_of(value)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UnfitError("the last message is not the assistant's, with the user's before it")
    if isinstance(system, str) and system:
        return [{"role": "system", "content": system}, *messages]
    return messages


def _check_fields(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnfitError if a message has calls, or the last one reasoning, beside its
    content.
    """
    for field in CALLS:
        if any(message.get(field) for message in messages):
            raise UnfitError(
                f"a message has {field}, which would be lost; write the calls into a row of prompt"
                " and completion"
            )
    for field in REASONING:
        if messages and messages[-1].get(field):
            raise UnfitError(
                f"the reasoning is in {field}, which would be lost; write it into the content,"
                " with its tags"
            )
