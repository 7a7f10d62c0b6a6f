"""Traces of a supervised warm start: a prompt and the completion to learn after it, in one of three forms, told by their keys.

    {"prompt": "27+58=", "completion": "<think>7+8=15;2+5+1=8</think>85"}
    {"messages": [{"role": "user", "content": "27+58=?"}, {"role": "assistant", "content": "<think>…</think>85"}]}
    {"conversations": [{"from": "human", "value": "27+58=?"}, {"from": "gpt", "value": "<think>…</think>85"}]}

The first is exactly what the model sees. Of messages the last one is learnt, the assistant's, after the model's chat template
of those before it: so the prompt is that of a task with `template: chat`, and a template that strips the thinking of earlier
turns does not strip it from what is learnt. The end token is added here. A trace that is too long is left out and counted.

Schemas: messages as in TRL and on the hub (HuggingFaceH4/ultrachat_200k); conversations as ShareGPT has them
(open-thoughts/OpenThoughts-114k: system apart, from user and assistant).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megarl.data.chat import ChatTemplate, Message, load_chat
from megarl.data.faults import listed
from megarl.data.rows import UnfitError
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
    """Both exactly as the model sees them."""

    prompt: str
    completion: str


class Trace(NamedTuple):
    """tokens [n] int32: prompt, completion, end token; the first `prompt_tokens` of them are not learnt."""

    tokens: np.ndarray
    prompt_tokens: int


def load_traces(path: Path | str, tokenizer: Tokenizer, max_length: int) -> list[Trace]:
    """The traces of a source that are at most `max_length` tokens long, in its order; the others are counted."""
    traces: list[Trace] = []
    end, rows = int32([tokenizer.end]), 0
    for part in batched(_rows(str(path), tokenizer), BATCH):
        rows += len(part)
        prompts = tokenizer.encode_all([row.prompt for row in part])
        completions = tokenizer.encode_all([row.completion for row in part])
        traces += [
            Trace(np.concatenate([prompt, completion, end]), len(prompt))
            for prompt, completion in zip(prompts, completions, strict=True)
            if len(prompt) + len(completion) + 1 <= max_length
        ]
    if not traces:
        raise MegarlError(f"{path}: all {rows} traces are longer than {max_length} tokens; raise sft.max_length")
    log.info("%s: %d traces, %d left out (longer than %d tokens)", path, len(traces), rows - len(traces), max_length)
    return traces


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
            row = Row(chat().prompt(messages[:-1]), messages[-1]["content"])
            break
    else:
        if not isinstance(raw.get("prompt"), str) or not isinstance(raw.get("completion"), str):
            raise UnfitError("not a row of prompt and completion, of messages, or of conversations")
        row = Row(raw["prompt"], raw["completion"])
    if not row.prompt or not row.completion:
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
