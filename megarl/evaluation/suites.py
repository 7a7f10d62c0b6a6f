"""The prompts of a suite: rows of its source, mapped, in its prompt's words and template, as token ids.

A row that cannot be asked changes the score of all: it is left out, counted and told. No answer is too large here, for the
tests of a programming problem are what it is graded by.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from megarl.data.mappings import mapping_of
from megarl.data.prompts import load_set, of_programs, renderer
from megarl.data.survey import survey
from megarl.data.tokenizer import Tokenizer
from megarl.evaluation.score import choose
from megarl.recipe import Suite
from megarl.types import Prompt


class Loaded(NamedTuple):
    """prompts: those that are asked, of `rows`. left_out: why, and how many. digest: of all that could be asked."""

    prompts: list[Prompt]
    rows: int
    left_out: dict[str, int]
    digest: str


def load(name: str, suite: Suite, tokenizer: Tokenizer, max_tokens: int) -> Loaded:
    """MegarlError if the source cannot be read, or none can be asked."""
    read = mapping_of(suite.mapping, suite.columns.model_dump())
    if "code" in suite.graders:
        read = of_programs(read)
    within = renderer(suite, tokenizer)
    found = survey(suite.data, read, largest=math.inf)
    prompts = load_set(
        found, lambda text: within(suite.prompt.replace("{prompt}", text)), tokenizer, max_tokens, name, suite.data
    )[0].prompts
    too_long = int(found.kept.sum()) - len(prompts)
    left_out = dict(found.left_out.counts) | ({f"longer than {max_tokens} tokens": too_long} if too_long else {})
    return Loaded(choose(prompts, suite.prompts), len(found.kept), left_out, _digest(prompts))


def _digest(prompts: Iterable[Prompt]) -> str:
    """The same for the same prompts and answers, in any order."""
    found = hashlib.blake2b(digest_size=16)
    for prompt in sorted(prompts, key=lambda p: p.id):
        found.update(msgspec.msgpack.encode([prompt.id, prompt.tokens.tolist(), prompt.answer]))
    return found.hexdigest()
