"""Traces of a supervised warm start: a prompt and the completion to learn after it, in one of three forms, told by their keys.

    {"prompt": "27+58=", "completion": "<think>7+8=15;2+5+1=8</think>85"}
    {"prompt": "12*34=", "completion": ["<think>[12*34]", "408", "</think>408"]}
    {"messages": [{"role": "user", "content": "27+58=?"}, {"role": "assistant", "content": "<think>…</think>85"}]}
    {"conversations": [{"from": "human", "value": "27+58=?"}, {"from": "gpt", "value": "<think>…</think>85"}]}

The first is exactly what the model sees; a list of completion texts is the model's and a tool's in turn, and a tool's are not
learnt, as its tokens are not in RL. Of messages the last one is learnt, the assistant's, after the model's chat template
of those before it: so the prompt is that of a task with `template: chat`, and a template that strips the thinking of earlier
turns does not strip it from what is learnt. The end token is added here. A trace that is too long is left out and counted.

Schemas: messages as in TRL and on the hub (HuggingFaceH4/ultrachat_200k); conversations as ShareGPT has them
(open-thoughts/OpenThoughts-114k: system apart, from user and assistant).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import batched, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megarl.data.chat import ChatTemplate, Message, load_chat
from megarl.data.faults import listed
from megarl.data.mappings import UnfitError
from megarl.data.sources import Raw, Unreadable, stream
from megarl.data.survey import LeftOut
from megarl.data.tokenizer import Tokenizer
from megarl.errors import MegarlError
from megarl.types import int32

log = logging.getLogger(__name__)

BATCH = 1024
"""Traces encoded at once."""
ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of them."""


class Row(NamedTuple):
    """Exactly as the model sees them. completion: texts of the model and of a tool in turn, the model's first."""

    prompt: str
    completion: Sequence[str]


class Trace(NamedTuple):
    """tokens [n] int32: prompt, completion, end token. learnt [n] bool: not the first `prompt_tokens`, nor a tool's."""

    tokens: np.ndarray
    prompt_tokens: int
    learnt: np.ndarray


def load_traces(path: Path | str, tokenizer: Tokenizer, max_length: int) -> list[Trace]:
    """The traces of a source that are at most `max_length` tokens long, in its order; the others are counted."""
    traces: list[Trace] = []
    end, rows = int32([tokenizer.end]), 0
    for part in batched(_rows(str(path), tokenizer), BATCH):
        rows += len(part)
        pieces = iter(tokenizer.encode_all([text for row in part for text in (row.prompt, *row.completion)]))
        made = (_trace(next(pieces), [*islice(pieces, len(row.completion)), end]) for row in part)
        traces += [trace for trace in made if len(trace.tokens) <= max_length]
    if not traces:
        raise MegarlError(f"{path}: all {rows} traces are longer than {max_length} tokens; raise sft.max_length")
    log.info("%s: %d traces, %d left out (longer than %d tokens)", path, len(traces), rows - len(traces), max_length)
    return traces


def _trace(prompt: np.ndarray, pieces: Sequence[np.ndarray]) -> Trace:
    """Every second piece is a tool's; the last is the end token, which the model has to learn."""
    last = len(pieces) - 1
    learnt = [np.full(len(piece), n % 2 == 0 or n == last) for n, piece in enumerate(pieces)]
    return Trace(np.concatenate([prompt, *pieces]), len(prompt), np.concatenate([np.zeros(len(prompt), bool), *learnt]))


def _rows(source: str, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows, one at a time; at their end MegarlError if any had a fault, or there were none."""

    @cache
    def chat() -> ChatTemplate:
        return load_chat(tokenizer.path)

    faults, rows = LeftOut(), 0
    for number, raw in stream(source):
        rows += 1
        try:
            yield trace_of(raw, chat)
        except UnfitError as error:
            faults.add("fault", number, str(error))
    count = faults.counts.total()
    if count:
        head = f"{source}: {count} fault{'s' * (count > 1)}:"
        raise MegarlError(listed(head, [f"{source}:{line}" for line in faults.named()], count))
    if not rows:
        raise MegarlError(f"{source}: no rows in it")


def trace_of(raw: Raw, chat: Callable[[], ChatTemplate]) -> Row:
    """A row of any of the three forms; UnfitError if it is of none."""
    if isinstance(raw, Unreadable):
        raise UnfitError(f"not a row: {raw.why}")
    for key in ("messages", "conversations"):
        if key in raw:
            messages = _messages(raw[key], raw.get("system"))
            row = Row(chat().prompt(messages[:-1]), [messages[-1]["content"]])
            break
    else:
        parts = raw.get("completion")
        texts: list[Any] = parts if isinstance(parts, list) else [parts]
        if not isinstance(raw.get("prompt"), str) or not all(isinstance(text, str) for text in texts):
            raise UnfitError("not a row of prompt and completion, of messages, or of conversations")
        if len(texts) % 2 == 0:
            raise UnfitError(
                "the completion's texts are not the model's and a tool's in turn, the model's first and last"
            )
        row = Row(raw["prompt"], texts)
    if not row.prompt or not all(row.completion):
        raise UnfitError("the prompt or the completion is empty")
    return row


def _messages(value: Any, system: Any) -> list[Message]:
    """Messages in the one form; the last is the assistant's and something stands before it."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise UnfitError("the messages are no list of role and content")
    pairs = [(one.get("role", one.get("from")), one.get("content", one.get("value"))) for one in value]
    if not all(isinstance(role, str) and isinstance(content, str) for role, content in pairs):
        raise UnfitError("a message has no role or no content")
    messages: list[Message] = [{"role": ROLES.get(role, role), "content": content} for role, content in pairs]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UnfitError("the last message is not the assistant's, with the user's before it")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages
