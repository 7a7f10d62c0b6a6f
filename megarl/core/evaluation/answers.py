"""The files of an evaluation: every answer, and the metrics of all. `megarl eval` and runs write the same.

    OUT/SUITE/answers.jsonl     one Answer a line, in order of arrival              OUT: of `megarl eval`,
    OUT/SUITE/settings.json     what they were made with; written first                  or RUN/evaluations/step-0000020,
    OUT/SUITE/result.json       Result: metrics of all answers; written last             where SUITE may also be a task

`id` and `sample` identify an answer. A void one (nothing could be generated) counts until a later row of the same id and
sample.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import append_jsonl, write_atomically
from megarl.core.base.types import JsonObject

SCHEMA_VERSION = 1
"""Version of all three files; a reader refuses any other."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt. Texts are as the model saw and wrote them, with special tokens.

    entropy: mean of -log p of the completion's sampled tokens under the distribution they were sampled from (nats), an
    unbiased estimate of its mean entropy per token, without the interruption phrase; with top_p < 1 within what top_p leaves,
    with temperature 0 the surprise of the greedy tokens at temperature 1. None: nothing was sampled.
    """

    schema_version: int = SCHEMA_VERSION
    suite: str
    id: str
    sample: int
    prompt: str  # with its template
    expected: str  # of the data set; of a long one (tests of a program) the beginning
    completion: str
    answer: str  # after the thinking trace, "" if there is none
    vote: str  # what maj@k counts, the same text for equal answers (votes.py); "": no vote
    correct: bool
    truncated: bool
    interrupted: bool
    format_ok: bool
    grader_timeout: bool
    grader_error: bool
    tokens: int  # of the completion, with the interruption phrase
    entropy: float | None
    void: str = ""  # why nothing could be generated; it then counts as wrong
    reward: float | UnsetType = UNSET  # of suites with `rewards`: what best@k chooses by
    scores: dict[str, float] | UnsetType = UNSET  # of several graders by name (`answer`: the first), and `total`
    difficulty: int | UnsetType = UNSET  # as the data set has it
    choices: tuple[str, ...] | UnsetType = UNSET  # of multiple choice: the texts that were scored
    loglikelihoods: tuple[float, ...] | UnsetType = UNSET  # nats, of each
    chosen: int | UnsetType = UNSET  # index of the likeliest
    chosen_normalised: int | UnsetType = UNSET  # of the likeliest by length


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """metrics: metrics.py, with `NAME_low` and `NAME_high` (95 %). model: as the user named it. time: Unix seconds.

    proxy_and_trusted: with a trusted grader, mean reward and mean trusted score of each prompt's answers, by its id.
    """

    schema_version: int = SCHEMA_VERSION
    suite: str
    model: str
    samples: int
    settings: JsonObject
    metrics: dict[str, float]
    time: float
    versions: dict[str, str]
    proxy_and_trusted: dict[str, tuple[float, float]] | UnsetType = UNSET


class SuiteDir:
    """The files of one suite's answers."""

    def __init__(self, out: Path, suite: str) -> None:
        self.path = out / suite
        self.answers = self.path / "answers.jsonl"
        self.settings = self.path / "settings.json"
        self.result = self.path / "result.json"

    def add(self, answer: Answer) -> None:
        """Append one line; a line that a crash cut off is lost alone. MegarlError if the disk is full."""
        append_jsonl(self.answers, msgspec.to_builtins(answer))

    def read_answers(self) -> list[Answer]:
        """Return the newest answer of each id and sample; MegarlError names a line that is no answer."""
        latest = {(answer.id, answer.sample): answer for answer in read_answers(self.answers)}
        return [latest[key] for key in sorted(latest)]

    def write_result(self, result: Result) -> None:
        write_atomically(self.result, json.dumps(msgspec.to_builtins(result), indent=2).encode() + b"\n")

    def read_result(self) -> Result:
        return _checked(self.result, 1, self.result.read_bytes(), Result)


def read_answers(path: Path) -> Iterable[Answer]:
    """Yield answers in the order in which they were written; a last line that a crash cut short is skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and _whole(line):
                yield _checked(path, number, line, Answer)


def suites_in(out: Path) -> list[str]:
    """Return the names of the suites that have answers in `out`."""
    return sorted(path.parent.name for path in out.glob("*/answers.jsonl"))


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _checked[T: (Answer, Result)](path: Path, number: int, data: bytes, kind: type[T]) -> T:
    try:
        result = msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise MegarlError(f"{path}:{number}: not of an evaluation: {error}") from None
    if result.schema_version != SCHEMA_VERSION:
        version = result.schema_version
        raise MegarlError(f"{path}:{number}: written in schema version {version}, this megarl reads {SCHEMA_VERSION}")
    return result
