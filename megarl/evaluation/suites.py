"""The questions of a suite: rows of its source, mapped, in its prompt's words and template, as token ids; or multiple choice.

A row that cannot be asked changes the score of all: it is left out, counted and told. No answer is too large here, for the
tests of a programming problem are what it is graded by.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from megarl.data.mappings import mapping_of
from megarl.data.prompts import load_set, of_programs, renderer
from megarl.data.survey import survey
from megarl.data.tokenizer import Tokenizer
from megarl.evaluation.multiple_choice import Choices, load_questions
from megarl.evaluation.score import Questions, Sampled, choose
from megarl.recipe import Suite


class Loaded(NamedTuple):
    """questions: those that are asked, of `rows`. left_out: why, and how many. digest: of all that could be asked."""

    questions: Questions[Any]
    rows: int
    left_out: Mapping[str, int]
    digest: str


def load(name: str, suite: Suite, tokenizer: Tokenizer, max_tokens: int) -> Loaded:
    """MegarlError if the source cannot be read, or none can be asked."""
    return _choices(name, suite) if suite.choices else _sampled(name, suite, tokenizer, max_tokens)


def _choices(name: str, suite: Suite) -> Loaded:
    """Multiple choice has one answer a question, whatever `samples` says."""
    found = load_questions(suite.data, suite.choices)
    asked = Choices(name, choose(found.questions, suite.prompts), 1, rows=suite)
    rows = len(found.questions) + found.left_out.total()
    return Loaded(asked, rows, found.left_out, _digest([q.id, q.context, q.choices, q.gold] for q in found.questions))


def _sampled(name: str, suite: Suite, tokenizer: Tokenizer, max_tokens: int) -> Loaded:
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
    asked = Sampled(name, choose(prompts, suite.prompts), suite.samples, rows=suite, rewards=suite.rewards)
    return Loaded(asked, len(found.kept), left_out, _digest([p.id, p.tokens.tolist(), p.answer] for p in prompts))


def _digest(asked: Iterable[list[Any]]) -> str:
    """The same for the same questions, each an id and what else it is, in any order."""
    found = hashlib.blake2b(digest_size=16)
    for one in sorted(asked, key=itemgetter(0)):
        found.update(msgspec.msgpack.encode(one))
    return found.hexdigest()
