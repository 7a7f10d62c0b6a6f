"""Loads the questions of a suite: its source's rows, mapped, in its prompt and
template, as token ids; or a task of lm-eval.

A row that cannot be asked is left out, counted and reported. An answer may have any
size, as it may be a program's tests.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.evaluation.score import Sampled, choose
from megarl.core.recipe import Recipe, Suite
from megarl.core.recipe.data import LM_EVAL
from megarl.tasks.data.contamination import overlap_with
from megarl.tasks.data.mappings import mapping_of
from megarl.tasks.data.prompts import load_set, of_programs, renderer
from megarl.tasks.data.rows import PromptRow
from megarl.tasks.data.survey import survey
from megarl.tasks.suites.harness import Document, Documents, load_documents

log = logging.getLogger(__name__)
type SuiteQuestions = Sampled | Documents


class Loaded(NamedTuple):
    """A loaded suite. questions: those to ask; rows: how many there are; left_out:
    counts by reason; digest: of usable rows.
    """

    questions: SuiteQuestions
    rows: int
    left_out: Mapping[str, int]
    digest: str


def load(
    name: str,
    suite: Suite,
    tokenizer: Tokenizer,
    max_tokens: int,
    decontaminate: Sequence[str] = (),
) -> Loaded:
    """Load a suite. MegarlError if no row is usable. max_tokens: of a prompt; longer
    ones are left out. decontaminate: data.decontaminate, for rows held out of a
    training set, which have to be the same ones as in training.
    """
    if suite.data.startswith(LM_EVAL):
        return _load_harness(name, suite)
    read = mapping_of(suite.mapping, suite.columns)
    if "code" in suite.graders:
        read = of_programs(read)
    render = renderer(suite, tokenizer)
    if suite.heldout is None:
        surveyed = survey(suite.data, read, largest_answer=math.inf)
        rows = len(surveyed.is_kept)
        left_out = dict(surveyed.left_out.counts)
    else:
        surveyed = survey(suite.data, read, suite.heldout, overlap_with(decontaminate))
        rows = suite.heldout
        left_out = {}
    train, heldout = load_set(
        surveyed,
        lambda row: render(with_question(row, suite.prompt)),
        tokenizer,
        max_tokens,
        name,
        suite.data,
    )
    prompts = train.prompts if suite.heldout is None else heldout.prompts
    too_long = rows - sum(left_out.values()) - len(prompts)
    if too_long:
        left_out[f"longer than {max_tokens} tokens"] = too_long
    sampled = Sampled(
        name, choose(prompts, suite.prompts), suite.samples, rows=suite, rewards=suite.rewards
    )
    return Loaded(
        sampled, rows, left_out, _digest([p.id, p.tokens.tolist(), *p.answers] for p in prompts)
    )


def _load_harness(name: str, suite: Suite) -> Loaded:
    """Load a task of lm-eval. Each row has one answer, whatever `samples` says."""
    documents = load_documents(suite.data)
    questions = Documents(name, choose(documents, suite.prompts), 1, rows=suite)
    return Loaded(questions, len(documents), {}, _digest(map(_content, documents)))


def _content(document: Document) -> list[object]:
    """Return a row's id, what is asked, and what is expected."""
    arguments = [request.args for request in document.requests]
    return [document.id, arguments, document.expected]


def with_question(row: PromptRow, form: str) -> PromptRow:
    """Return the row with its prompt, or the last message of its conversation, put in
    place of {prompt} in `form`, the suite's `prompt`.
    """
    if not row.messages:
        return replace(row, prompt=form.replace("{prompt}", row.prompt))
    last = row.messages[-1]
    question = {**last, "content": form.replace("{prompt}", last["content"])}
    return replace(row, messages=(*row.messages[:-1], question))


def _digest(contents: Iterable[list[object]]) -> str:
    """Return a digest of the questions, each an id and its content, independent of
    their order.
    """
    return digest_of(map(msgspec.msgpack.encode, sorted(contents, key=itemgetter(0))))


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a digest of these parts, joined."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def questions_of(
    recipe: Recipe, prompts: Mapping[str, TaskPrompts], tokenizer: Tokenizer
) -> list[SuiteQuestions]:
    """Return the questions of each evaluation during a run: the tasks' held-out
    prompts, then suites.
    """
    chosen = recipe.evaluation
    questions: list[SuiteQuestions] = [
        Sampled(name, choose(prompts[name].heldout, chosen.prompts), chosen.samples, rows=task)
        for name, task in recipe.data.tasks.items()
    ]
    for name, suite in chosen.suites.items():
        loaded = load(
            name, suite, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate
        )
        for reason, count in loaded.left_out.items():
            log.warning("%s: %d of %d rows are not asked: %s", name, count, loaded.rows, reason)
        questions.append(loaded.questions)
    return questions
