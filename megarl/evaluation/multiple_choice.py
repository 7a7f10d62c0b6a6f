"""Multiple choice by log-likelihood: ARC and HellaSwag, asked and counted as lm-evaluation-harness 0.4.13 does.

    rows of a suite ─[load_questions]─► Question: context, choices, gold
                    ─[ask]─► log p(" " + choice | context) of each, by a server ─[answered]─► Answer

Two verdicts: `chosen` is the choice of the largest log-likelihood (the harness's acc), `chosen_normalised` that of the largest
per character of the choice (acc_norm), for which a long choice is not worse off. The harness divides by characters, not by
bytes as some papers say; its acc_bytes is another number. Nothing is sampled: a question has one answer.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.data.faults import listed
from megarl.data.rows import Raw, UnfitError, column
from megarl.data.sources import Unreadable, stream
from megarl.data.text import fingerprint
from megarl.data.tokenizer import Tokenizer
from megarl.errors import MegarlError
from megarl.evaluation.answers import Answer
from megarl.evaluation.loglikelihood import joined, loglikelihoods
from megarl.rollout.client import ServerClient

log = logging.getLogger(__name__)

DELIMITER = " "
"""Between context and choice."""


class Question(NamedTuple):
    """context: what stands before the choice. gold: the index of the right choice."""

    id: str
    context: str
    choices: tuple[str, ...]
    gold: int


def arc(raw: Raw) -> Question:
    """huggingface.co/datasets/allenai/ai2_arc (arXiv 1803.05457): id, question, choices {text, label}, answerKey. Labels are
    A … E or 1 … 5."""
    labels, choices = column("choices.label")(raw), column("choices.text")(raw)
    key = column("answerKey")(raw)
    if key not in labels:
        raise UnfitError(f"the answerKey {key!r} is none of the labels {', '.join(map(str, labels))}")
    return _question(raw.get("id"), f"Question: {column('question')(raw)}\nAnswer:", choices, labels.index(key))


def hellaswag(raw: Raw) -> Question:
    """huggingface.co/datasets/Rowan/hellaswag (arXiv 1905.07830): ind, activity_label, ctx_a, ctx_b, endings, label. `ctx` is
    not read: it is ctx_a and ctx_b joined, and the harness joins them itself, with a capital letter. The test split has no
    labels."""
    label, endings = str(column("label")(raw)), column("endings")(raw)
    if not label.isdecimal() or int(label) >= len(endings):
        raise UnfitError(f"the label {label!r} is no index of its {len(endings)} endings; the test split has none")
    begin = f"{column('activity_label')(raw)}: {column('ctx_a')(raw)} {column('ctx_b')(raw).capitalize()}"
    return _question(raw.get("ind"), _without_brackets(begin), [_without_brackets(e) for e in endings], int(label))


def _without_brackets(text: str) -> str:
    """The part of HellaSwag from WikiHow has marks such as [title], [header], [step]: preprocessing of the harness, which is
    that of its authors' release."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _question(name: Any, context: str, choices: Sequence[str], gold: int) -> Question:
    if len(choices) < 2 or not all(choices):
        raise UnfitError(f"fewer than two choices, or an empty one: {list(choices)}")
    return Question(str(name) if name is not None else f"{fingerprint(context):016x}", context, tuple(choices), gold)


SETS: Mapping[str, Callable[[Raw], Question]] = {"arc": arc, "hellaswag": hellaswag}
"""By the `mapping` of a suite; both parts of ARC have one schema."""


def load_questions(source: str, mapping: str) -> list[Question]:
    """The questions of a source, in its order. Rows that are not of the schema, or have the id of an earlier one, are left
    out, counted and named, as no published set is without; MegarlError if none is left."""
    read = SETS[mapping]
    found: dict[str, Question] = {}
    faults = []
    for number, raw in stream(source):
        try:
            if isinstance(raw, Unreadable):
                raise UnfitError(raw.why)
            question = read(raw)
            if question.id in found:
                raise UnfitError(f"the id {question.id!r} again")
            found[question.id] = question
        except UnfitError as error:
            faults.append(f"{source}:{number}: {error}")
    if not found:
        raise MegarlError(listed(f"{source}: no question of the schema {mapping!r} in it", faults))
    if faults:
        log.warning("%s", listed(f"{source}: {len(faults)} rows left out:", faults))
    return list(found.values())


async def ask(
    client: ServerClient, tokenizer: Tokenizer, question: Question, suite: str, longest: int, salt: str
) -> Answer:
    """The answer of the model that `client` serves.

    longest: tokens that fit in a context; of a longer question the begin is left out, as the harness does, and the answer says
    `truncated`. salt: of the evaluation; a fresh one for each version of the weights. Raises ServerLost or ServerRefused.
    """
    continuations = joined(tokenizer, question.context, [DELIMITER + choice for choice in question.choices], longest)
    found = await loglikelihoods(client, continuations, f"{salt}/{question.id}")
    scored = sum(continuation.scored for continuation in continuations)
    return answered(question, suite, found, scored, any(continuation.cut for continuation in continuations))


def answered(question: Question, suite: str, found: Sequence[float], scored: int, cut: bool) -> Answer:
    """The answer of these log-likelihoods, nats. scored: tokens of all choices; cut: begins of contexts were left out."""
    lengths = [len(choice) for choice in question.choices]
    chosen, normalised = int(np.argmax(found)), int(np.argmax(np.divide(found, lengths)))
    return Answer(
        suite=suite,
        id=question.id,
        sample=0,
        prompt=question.context,
        expected=question.choices[question.gold],
        completion=DELIMITER + question.choices[chosen],
        answer=question.choices[chosen],
        vote=question.choices[chosen],
        correct=chosen == question.gold,
        truncated=cut,
        interrupted=False,
        format_ok=True,
        grader_timeout=False,
        grader_error=False,
        tokens=scored,
        entropy=None,
        choices=question.choices,
        loglikelihoods=tuple(found),
        chosen=chosen,
        chosen_normalised=normalised,
    )
