"""Traces of a supervised warm start: JSONL rows of a prompt and the completion to learn after it.

    {"prompt": "27+58=", "completion": "<think>7+8=15;2+5+1=8</think>85"}

Both are exactly what the model sees; the end token is added here. A trace that is too long is left out and counted.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from megarl.data.jsonl import read_rows
from megarl.data.tokenizer import Tokenizer
from megarl.errors import MegarlError
from megarl.types import int32

log = logging.getLogger(__name__)


class Row(msgspec.Struct, frozen=True):
    """A line of the file."""

    prompt: str
    completion: str


class Trace(NamedTuple):
    """tokens [n] int32: prompt, completion, end token; the first `prompt_tokens` of them are not learnt."""

    tokens: np.ndarray
    prompt_tokens: int


def load_traces(path: Path | str, tokenizer: Tokenizer, max_length: int) -> list[Trace]:
    """The traces of a JSONL file that are at most `max_length` tokens long, in file order; the others are counted."""
    path = Path(path)
    rows = read_rows(path, Row, _faults)
    prompts = tokenizer.encode_all([row.prompt for row in rows])
    completions = tokenizer.encode_all([row.completion for row in rows])
    end = int32([tokenizer.end])
    traces = [
        Trace(np.concatenate([prompt, completion, end]), len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
        if len(prompt) + len(completion) + 1 <= max_length
    ]
    if not traces:
        raise MegarlError(f"{path}: all {len(rows)} traces are longer than {max_length} tokens; raise sft.max_length")
    left_out = len(rows) - len(traces)
    log.info("%s: %d traces, %d left out (longer than %d tokens)", path, len(traces), left_out, max_length)
    return traces


def _faults(row: Row, line: int) -> Iterator[str]:
    if not row.prompt or not row.completion:
        yield "the prompt or the completion is empty"
