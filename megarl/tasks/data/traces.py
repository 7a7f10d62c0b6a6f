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
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import int32
from megarl.tasks.data.chat import ChatTemplate, load_chat
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


class Taught(PromptRow, frozen=True):
    """A trace as a row. answer: the whole completion; parts: its texts, by turns the
    model's (first and last) and a tool's.
    """

    parts: tuple[str, ...] = ()


class Trace(NamedTuple):
    """A tokenized trace. tokens [n] int32: prompt, completion, end token. learnt [n]
    bool: not in prompt and tool texts.
    """

    tokens: np.ndarray
    prompt_tokens: int
    learnt: np.ndarray


def load_traces(
    path: Path | str,
    tokenizer: Tokenizer,
    decontaminate: Sequence[str] = (),
    longest: int = MAX_TOKENS,
) -> list[Trace]:
    """Load a source's traces of at most `longest` tokens, in order. decontaminate: the
    evaluation sets to compare with.
    """
    refused = frozenset[str]() if is_hub(str(path)) else UNFIT
    surveyed = survey_of(
        str(path), spoken, evaluation=overlap_with(decontaminate), refuse=refused, repeats=True
    )
    traces: list[Trace] = []
    rows = 0
    for part in in_parts(_trace_rows(templated(surveyed, tokenizer)), _characters):
        if not rows:
            tokenizer.warn_of_beginning(str(path), part[0].prompt[:BATCH_CHARACTERS])
        rows += len(part)
        short = [row for row in part if tokenizer.least_tokens(_characters(row)) <= longest]
        traces += [trace for trace in _encode(short, tokenizer) if len(trace.tokens) <= longest]
    if not traces:
        raise MegarlError(
            f"{path}: all {rows} traces are longer than {longest} tokens; shorten them"
        )
    log.info(
        "%s: %d traces, %d left out (longer than %d tokens)",
        path,
        len(traces),
        rows - len(traces),
        longest,
    )
    return traces


def _trace_rows(surveyed: Survey) -> Iterator[Taught]:
    return (row for row, _ in chosen(surveyed) if isinstance(row, Taught))


def _characters(row: Taught) -> int:
    return len(row.prompt) + sum(map(len, row.parts))


def _encode(rows: Sequence[Taught], tokenizer: Tokenizer) -> Iterator[Trace]:
    texts = [text for row in rows for text in (row.prompt, *row.parts)]
    pieces = iter(tokenizer.encode_all(texts))
    for row in rows:
        yield _trace(next(pieces), [*islice(pieces, len(row.parts))], tokenizer)


def _trace(prompt: np.ndarray, pieces: Sequence[np.ndarray], tokenizer: Tokenizer) -> Trace:
    """Assemble a trace, with an end token unless it has one. Every second piece is a
    tool's; the others must be learnt.
    """
    if not set(pieces[-1][-1:].tolist()) & set(tokenizer.ends):
        pieces = [*pieces[:-1], np.append(pieces[-1], int32([tokenizer.end]))]
    learnt = [np.full(len(piece), n % 2 == 0) for n, piece in enumerate(pieces)]
    return Trace(
        np.concatenate([prompt, *pieces]),
        len(prompt),
        np.concatenate([np.zeros(len(prompt), bool), *learnt]),
    )


def are_traces(source: str) -> bool:
    """Return whether a source holds traces rather than RL prompts, judging by its first
    row.
    """
    _, raw = next(stream(source), (0, {}))
    if isinstance(raw, Unreadable):
        return False
    has_answer = "answer" in raw
    for key in ("messages", "conversations"):
        if key in raw:
            return not has_answer or _last_role(raw[key]) in ("assistant", "gpt")
    return "completion" in raw and not has_answer


def _last_role(messages: Any) -> Any:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None


def spoken(raw: Mapping[str, Any]) -> Taught:
    """Read a trace as user text and completion, without a template. Its id is a hash of
    all its texts, up to whitespace.
    """
    before, parts = _parts(raw)
    if isinstance(before, str):
        whole = said = before
    else:
        whole = identity("", before)
        said = user_text(before)
    name = fingerprint("\0".join([whole, *parts]))
    return Taught(f"{name:016x}", said, "".join(parts), parts=tuple(parts))


def templated(source: Survey, tokenizer: Tokenizer) -> Survey:
    """Return the same survey with a reader whose prompts and completions are exactly
    what the model sees.
    """

    chat = cache(partial(load_chat, tokenizer.path))
    is_first = iter([True])
    end = cache(lambda: _end_of_turn(chat(), tokenizer))

    def read(raw: Mapping[str, Any]) -> Taught:
        before, (first, *rest) = _parts(raw)
        if isinstance(before, str):
            return replace(spoken(raw), prompt=before)
        try:
            prompt = chat().render_all(before)
        except MegarlError as error:
            raise MegarlError(f"{source.source}: {error}") from None
        for remark in _remarks(chat(), tokenizer, before, first) if next(is_first, False) else ():
            log.warning("%s: %s", source.source, remark)
        learnt = f"{_behind(prompt, first).removesuffix(end())}{end()}"
        return replace(spoken(raw), prompt=prompt, parts=(learnt, *rest))

    return source._replace(read=read)


def _remarks(
    chat: ChatTemplate, tokenizer: Tokenizer, before: Sequence[Message], text: str
) -> Iterator[str]:
    """Yield what the user should know of an answer that is learnt with this template."""
    if problem := endless(chat, tokenizer):
        yield problem
    opened = re.search(r"<(\w+)>\s*$", chat.render(before))
    if opened and (closing := f"</{opened[1]}>") not in text:
        yield (
            f"its template opens the thinking, but an answer like the first has no {closing!r};"
            " write it into the content"
        )
    elif lacks := _unwritten(chat, before, text):
        yield (
            f"its template writes {lacks!r} before an answer like the first, which lacks it; write"
            " it into the content"
        )


def _end_of_turn(chat: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return the token with which the template ends an answer or, as GLM-4.5's, begins
    the user's next message, if it can end a completion; else an empty text: the
    eos_token of tokenizer_config.json is learnt.
    """
    said = "said-by-the-assistant"
    asked = {"role": "user", "content": "?"}
    try:
        text = chat.render(
            [asked, {"role": "assistant", "content": said}, asked], reply=False
        ).partition(said)[2]
        first = tokenizer.ids(text.lstrip())[:1]
    except MegarlError:  # a template or a closed vocabulary that does not take these texts
        return ""
    return tokenizer.decode(first) if set(first.tolist()) & set(tokenizer.ends) else ""


def _unwritten(chat: ChatTemplate, before: Sequence[Message], text: str) -> str:
    """Return what the template writes between the start of the assistant's turn and
    this text, as gpt-oss's does a channel.
    """
    try:
        whole = chat.render([*before, {"role": "assistant", "content": text}], reply=False)
    except MegarlError:  # the text may have it, and the template not take that
        return ""
    between, found, _ = whole.removeprefix(prompt := chat.render(before)).partition(text.strip())
    return between.strip() if found and whole.startswith(prompt) else ""


def _behind(prompt: str, text: str) -> str:
    """Return the text without a tag that ends the prompt: templates of models that
    always think write <think> themselves.
    """
    tag = re.search(r"(<[^<>\s]+>)\s*$", prompt)
    if tag is None or not (said := text.lstrip()).startswith(tag[1]):
        return text
    return said.removeprefix(tag[0] if said.startswith(tag[0]) else tag[1])


def _parts(raw: Mapping[str, Any]) -> tuple[str | list[Message], list[str]]:
    """Return the text or messages before the completion, and the completion's texts."""
    before: str | list[Message]
    if conversation := _conversation(raw):
        *before, last = _messages(conversation, raw.get("system"))
        parts: list[Any] = [last["content"]]
    else:
        completion = raw.get("completion")
        parts = completion if isinstance(completion, list) else [completion]
        if not isinstance(raw.get("prompt"), str) or not all(
            isinstance(text, str) for text in parts
        ):
            raise UnfitError("not a row of prompt and completion, of messages, or of conversations")
        if len(parts) % 2 == 0:
            must = "alternate between model and tool, and begin and end with the model's"
            raise UnfitError(f"the completion's texts must {must}")
        before = raw["prompt"]
    if not before or not all(parts):
        raise UnfitError("the prompt or the completion is empty")
    return before, parts


def _conversation(raw: Mapping[str, Any]) -> Any:
    """Return the messages of a row that has some, in one column or as prompt and
    completion.
    """
    for key in ("messages", "conversations"):
        if key in raw:
            return raw[key] or [None]
    prompt = raw.get("prompt")
    completion = raw.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return None


def _messages(value: Any, system: Any) -> list[Message]:
    """Convert messages to our format. UnfitError unless the last is the assistant's and
    another one precedes it.
    """
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        _check_lost(value)
    messages = messages_of(value)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UnfitError("the last message is not the assistant's, with the user's before it")
    if isinstance(system, str) and system:
        return [{"role": "system", "content": system}, *messages]
    return messages


def _check_lost(value: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnfitError if a message has calls, or the last one reasoning, beside its
    content.
    """
    if lost := [field for field in CALLS for one in value if one.get(field)]:
        advice = "write the calls into a row of prompt and completion"
        raise UnfitError(f"a message has {lost[0]}, which would be lost; {advice}")
    if lost := [field for field in REASONING if value and value[-1].get(field)]:
        advice = "write it into the content, with its tags"
        raise UnfitError(f"the reasoning is in {lost[0]}, which would be lost; {advice}")
