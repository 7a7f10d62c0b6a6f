"""Prompt sets: JSONL rows to Prompt records, checked once, before anything is started on them.

    {"id": "a17", "prompt": "27+58=", "answer": "85", "task": "arithmetic", "difficulty": 2}

The prompt is exactly what the model sees: markers of a chat template belong in the text. `task` and `difficulty` may be
left out, other keys are ignored. A prompt that is too long is left out and counted, never cut.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megarl.data.tokenizer import encode_all
from megarl.errors import MegarlError
from megarl.types import Prompt

log = logging.getLogger(__name__)
SHOWN = 10
"""Faults listed in an error; the rest are counted."""


class Row(msgspec.Struct, frozen=True):
    """A line of the file."""

    id: str
    prompt: str
    answer: str
    task: str = "math"
    difficulty: int = 0


def load_prompts(path: Path | str, tokenizer: Any, max_tokens: int) -> list[Prompt]:
    """The prompts of a JSONL file that are at most `max_tokens` long, in file order.

    One MegarlError names every faulty line: not a row, an id or a prompt text that was there before, an empty prompt or answer.
    """
    path = Path(path)
    rows = _rows(path)
    encoded = encode_all(tokenizer, [row.prompt for row in rows])
    prompts = [
        Prompt(id=row.id, tokens=tokens, answer=row.answer, task=row.task, difficulty=row.difficulty)
        for row, tokens in zip(rows, encoded, strict=True)
        if len(tokens) <= max_tokens
    ]
    if not prompts:
        raise MegarlError(
            f"{path}: no prompt is left: all {len(rows)} are longer than {max_tokens} tokens; raise length.prompt_tokens"
        )
    left_out = len(rows) - len(prompts)
    log.info("%s: %d prompts, %d left out (longer than %d tokens)", path, len(prompts), left_out, max_tokens)
    return prompts


def check_disjoint(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """MegarlError if a held-out prompt is also trained on: the same tokens are the same text, whatever its id."""
    trained = {prompt.tokens.tobytes(): prompt.id for prompt in train}
    shared = [(h.id, trained[h.tokens.tobytes()]) for h in heldout if h.tokens.tobytes() in trained]
    if shared:
        pairs = [f"held-out {ours!r} is training prompt {theirs!r}" for ours, theirs in shared]
        raise MegarlError(_listed(f"data.heldout and data.train share {len(shared)} prompts:", pairs))


def _rows(path: Path) -> list[Row]:
    """Rows of the file; MegarlError with every fault and its line."""
    if not path.is_file():
        raise MegarlError(
            f"{path}: no such file; prompts are JSONL rows of id, prompt and answer (data.train, data.heldout)"
        )
    decoder = msgspec.json.Decoder(Row)
    rows, faults = [], []
    id_lines: dict[str, int] = {}
    prompt_lines: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            faults.append(f"{path}:{number}: not a prompt: {error}")
            continue
        faults += [f"{path}:{number}: {fault}" for fault in _faults(row, id_lines, prompt_lines)]
        id_lines.setdefault(row.id, number)
        prompt_lines.setdefault(row.prompt, number)
        rows.append(row)
    if faults:
        raise MegarlError(_listed(f"{path}: {len(faults)} faults:", faults))
    if not rows:
        raise MegarlError(f"{path}: no prompts in it")
    return rows


def _faults(row: Row, id_lines: dict[str, int], prompt_lines: dict[str, int]) -> Iterable[str]:
    """What is wrong with a row, given the lines on which each id and text was first seen."""
    if row.id in id_lines:
        yield f"id {row.id!r} was on line {id_lines[row.id]}; ids must differ"
    if row.prompt in prompt_lines:
        yield f"the prompt of {row.id!r} was on line {prompt_lines[row.prompt]}; leave one out"
    if not row.prompt:
        yield f"the prompt of {row.id!r} is empty"
    if not row.answer.strip():
        yield f"the answer of {row.id!r} is empty"


def _listed(head: str, items: list[str]) -> str:
    more = [f"… and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return "\n".join([head, *items[:SHOWN], *more])
