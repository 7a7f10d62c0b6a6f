"""Multiple choice by log-likelihood: ARC and HellaSwag, asked and scored as in
lm-evaluation-harness 0.4.13.

    rows of a suite ─[load_questions]─► Question: context, choices, gold ─► Choices, asked by score.py
                    ─[ask]─► a server gives log p(" " + choice | context) for each choice ─[answered]─► Answer

Context and choice are tokenized as in the harness (`TemplateLM._encode_pair`), so that
our numbers equal its numbers. They are encoded as one text, with the tokenizer's usual
special tokens (Llama 3 puts <|begin_of_text|> in front); whitespace at the end of the
context belongs to the continuation; and if the context alone has n tokens, the
continuation is all after the first n.

There are two verdicts: `chosen` is the choice with the largest log-likelihood (the
harness's acc), `chosen_normalised` the one with the largest log-likelihood per
character (not byte) of the choice (acc_norm). Nothing is sampled, so a question has one
answer.

The harness itself is not used, because it returns answers only at the end of a whole
task, so no evaluation could resume.
"""

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from megarl.core.base.errors import MegarlError, listed
from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.score import Asker, Questions
from megarl.core.sampling.places import Order
from megarl.core.sampling.sampler import MAX_RETRIES
from megarl.core.server.client import ServerClient, ServerLost
from megarl.tasks.data.columns import column
from megarl.tasks.data.rows import Raw, UnfitError, fingerprint
from megarl.tasks.data.sources import Unreadable, stream

log = logging.getLogger(__name__)
DELIMITER = " "  # separates context and choice


class Continuation(NamedTuple):
    """A tokenized choice. tokens [n] int32: context and choice, scored from `first` on;
    cut: the context's start is missing.
    """

    tokens: np.ndarray
    first: int
    cut: bool

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def joined(
    tokenizer: Tokenizer, context: str, continuations: Sequence[str], longest: int
) -> list[Continuation]:
    """Append each continuation to the context. As in the harness, only the last
    `longest` tokens of a longer text are kept. MegarlError if a continuation has no
    tokens of its own, or is too long by itself.
    """
    if other := next(
        (text for text in continuations if tokenizer.least_tokens(len(text)) > longest), None
    ):
        raise MegarlError(
            f"{other[:60]!r} cannot be scored: it is longer than the {longest} tokens that fit"
        )
    context = context[
        -(longest + 1) * tokenizer.longest_token :
    ]  # what precedes would be dropped below
    kept = context.rstrip()
    blanks = context[len(kept) :]
    alone, *wholes = tokenizer.encode_all(
        [kept, *(kept + blanks + text for text in continuations)], framed=True
    )
    continued = []
    for text, whole in zip(continuations, wholes, strict=True):
        over = max(0, len(whole) - longest)
        first = len(alone) - over
        if not 1 <= first < len(whole) - over:
            fits = (
                f"{len(whole) - len(alone)} tokens of its own, after at least one other, where"
                f" {longest} fit"
            )
            raise MegarlError(f"{text!r} cannot be scored after {context[-60:]!r}: {fits}")
        continued.append(Continuation(whole[over:], first, over > 0))
    return continued


class Question(NamedTuple):
    """A question. context: the text before the choice; gold: the index of the right
    choice.
    """

    id: str
    context: str
    choices: tuple[str, ...]
    gold: int


def arc(raw: Raw) -> Question:
    """Read huggingface.co/datasets/allenai/ai2_arc (arXiv 1803.05457), whose labels are
    A … E or 1 … 5.
    """
    labels = column("choices.label")(raw)
    choices = column("choices.text")(raw)
    key = column("answerKey")(raw)
    if key not in labels:
        raise UnfitError(
            f"the answerKey {key!r} is not one of the labels {', '.join(map(str, labels))}"
        )
    return _question(
        raw.get("id"), f"Question: {column('question')(raw)}\nAnswer:", choices, labels.index(key)
    )


def hellaswag(raw: Raw) -> Question:
    """Read huggingface.co/datasets/Rowan/hellaswag (arXiv 1905.07830); its test split
    has no labels. `ctx`, which is ctx_a and ctx_b joined, is not read: the harness
    joins them itself, with a capital letter.
    """
    label = str(column("label")(raw))
    endings = column("endings")(raw)
    if not label.isdecimal() or int(label) >= len(endings):
        raise UnfitError(
            f"the label {label!r} is not an index of its {len(endings)} endings; the test split has"
            " none"
        )
    begin = (
        f"{column('activity_label')(raw)}: {column('ctx_a')(raw)}"
        f" {column('ctx_b')(raw).capitalize()}"
    )
    return _question(
        raw.get("ind"),
        _without_brackets(begin),
        [_without_brackets(e) for e in endings],
        int(label),
    )


def _without_brackets(text: str) -> str:
    """Remove marks such as [title] of HellaSwag's WikiHow part, as the harness and the
    authors' release do.
    """
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _question(name: object, context: str, choices: Sequence[str], gold: int) -> Question:
    if len(choices) < 2 or not all(choices):
        raise UnfitError(f"fewer than two choices, or an empty one: {list(choices)}")
    return Question(
        str(name) if name is not None else f"{fingerprint(context):016x}",
        context,
        tuple(choices),
        gold,
    )


SETS: Mapping[str, Callable[[Raw], Question]] = {"arc": arc, "hellaswag": hellaswag}
"""The reader for each `mapping` of a suite. Both parts of ARC have the same schema."""


def load_questions(source: str, mapping: str) -> tuple[list[Question], Counter[str]]:
    """Load the questions of a source, in order. mapping: a key of SETS. MegarlError if
    there are none. Rows that do not fit the schema, or repeat an id, are left out,
    counted by reason and reported; published sets have some.
    """
    questions: dict[str, Question] = {}
    left_out = Counter[str]()
    faults = []
    for number, raw in stream(source):
        try:
            if isinstance(raw, Unreadable):
                raise UnfitError(raw.problem)
            question = SETS[mapping](raw)
            if question.id not in questions:
                questions[question.id] = question
                continue
            reason = "the id of an earlier one"
            fault = f"the id {question.id!r} again"
        except UnfitError as error:
            reason = "not of the schema"
            fault = str(error)
        left_out[reason] += 1
        faults.append(f"{source}:{number}: {fault}")
    if not questions:
        raise MegarlError(listed(f"{source}: no row fits the schema {mapping!r}", faults))
    if faults:
        log.warning("%s", listed(f"{source}: {len(faults)} rows left out:", faults))
    return list(questions.values()), left_out


@dataclass(frozen=True)
class Choices(Questions[Question]):
    """Questions whose choices are scored. If one is too long, the start of its context
    is cut, and its answer `truncated`.
    """

    def answerer(self, asker: Asker) -> Callable[[Question, int, Order], Awaitable[Answer]]:
        return partial(self._answer, asker)

    async def _answer(self, asker: Asker, asked: Question, sample: int, order: Order) -> Answer:
        """Return the answer; void if its requests are lost more than MAX_RETRIES times,
        or if it cannot be asked.
        """
        longest = asker.recipe.length.context_tokens - KEPT_FROM_INPUT
        servers = asker.sampler.servers
        why = ""
        for tries in range(1, MAX_RETRIES + 2):
            server, _ = await servers.places.take(order, asker.may_use)
            life = servers.life(server)
            try:
                return await ask(
                    servers.clients[server], asker.tokenizer, asked, self.name, longest, asker.salt
                )
            except ServerLost as lost:
                if not lost.alone:
                    servers.server_lost(server, life, str(lost))
                why = f"{tries} requests were lost, the last: {lost}"
            except MegarlError as error:
                return _void(asked, self.name, str(error))
            finally:
                servers.places.give_back(server)
        return _void(asked, self.name, why)


async def ask(
    client: ServerClient,
    tokenizer: Tokenizer,
    question: Question,
    suite: str,
    longest: int,
    salt: str,
) -> Answer:
    """Return the answer of the model that `client` serves. longest: tokens that fit in
    the context window. salt: unique to an evaluation and a version of the weights.
    Raises ServerLost or ServerRefused; MegarlError as in `joined`, and if the model's
    log-probs are not finite.
    """
    continuations = joined(
        tokenizer, question.context, [DELIMITER + choice for choice in question.choices], longest
    )
    tokens, first, _ = zip(*continuations, strict=True)
    scores = await client.score(tokens, first, f"{salt}/{question.id}")
    sums = [float(np.sum(s.logprobs, dtype=np.float64)) for s in scores]
    if not np.isfinite(sums).all():
        raise MegarlError("the model's log-likelihood of a choice is not finite")
    return answered(question, suite, sums, continuations)


def answered(
    question: Question, suite: str, scores: Sequence[float], continuations: Sequence[Continuation]
) -> Answer:
    """Make the answer from the choices' log-likelihoods, `scores`, in nats."""
    chosen = int(np.argmax(scores))
    text = question.choices[chosen]
    return msgspec.structs.replace(
        _void(question, suite, ""),
        completion=DELIMITER + text,
        answer=text,
        vote=text,
        correct=chosen == question.gold,
        truncated=any(continuation.cut for continuation in continuations),
        tokens=continuations[chosen].scored,
        loglikelihoods=tuple(scores),
        chosen=chosen,
        chosen_normalised=int(
            np.argmax(np.divide(scores, [len(choice) for choice in question.choices]))
        ),
    )


def _void(question: Question, suite: str, why: str) -> Answer:
    """Return an answer without scores. why: the reason why it is void, "" if it is not.
    A void answer is not malformed: its model wrote nothing.
    """
    return Answer(
        suite=suite,
        id=question.id,
        sample=0,
        prompt=question.context,
        expected=question.choices[question.gold],
        completion="",
        answer="",
        vote="",
        correct=False,
        truncated=False,
        interrupted=False,
        format_ok=True,
        grader_timeout=False,
        grader_error=False,
        tokens=0,
        entropy=None,
        void=why,
        choices=question.choices,
    )
