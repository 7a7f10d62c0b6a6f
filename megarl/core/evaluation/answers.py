"""What an evaluation leaves on disk: every answer, and what all of them come to. The same for `megarl eval` and for runs.

    OUT/SUITE/answers.jsonl     one Answer a line, in the order in which they came     OUT: of `megarl eval`,
    OUT/SUITE/settings.json     what they were made with; written first                     or RUN/evaluations/step-0000020,
    OUT/SUITE/result.json       Result: metrics of all answers; written last                where SUITE may also be a task

An answer is known by `id` and `sample`. A void one (nothing could be generated) stays in the file until it is replaced: a later
row of the same id and sample counts.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import append_jsonl, write_atomically

SCHEMA_VERSION = 1
"""Of all three files; a reader refuses another one."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt. All texts as the model saw and wrote them, special tokens included.

    prompt: with its template. expected: of the data set, of a long one (tests of a program) the beginning. completion: all of
    it; answer: what stands after the thinking trace, "" if nothing does. vote: what maj@k counts, the same text for answers
    that are equal (votes.py); "": it does not vote. tokens: of the completion, the interruption phrase included.

    entropy: mean of -log p of the completion's sampled tokens under the distribution they were sampled from (nats): an
    unbiased estimate of that distribution's mean entropy per token, the interruption phrase left out; with top_p < 1 of what
    top_p leaves, with temperature 0 of the surprise of the greedy tokens at temperature 1. None: nothing was sampled.
    """

    schema_version: int = SCHEMA_VERSION
    suite: str
    id: str
    sample: int
    prompt: str
    expected: str
    completion: str
    answer: str
    vote: str
    correct: bool
    truncated: bool
    interrupted: bool
    format_ok: bool
    grader_timeout: bool
    grader_error: bool
    tokens: int
    entropy: float | None
    void: str = ""  # why nothing could be generated; it then counts as wrong
    reward: float | UnsetType = UNSET  # of suites with `rewards`: what best@k chooses by
    choices: tuple[str, ...] | UnsetType = UNSET  # of multiple choice: the texts that were scored
    loglikelihoods: tuple[float, ...] | UnsetType = UNSET  # nats, of each
    chosen: int | UnsetType = UNSET  # index of the likeliest
    chosen_normalised: int | UnsetType = UNSET  # of the likeliest by length


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """metrics: metrics.py, with `NAME_low` and `NAME_high` (95 %). model: as the user named it. time: Unix seconds."""

    schema_version: int = SCHEMA_VERSION
    suite: str
    model: str
    samples: int
    settings: dict[str, Any]
    metrics: dict[str, float]
    time: float
    versions: dict[str, str]


class SuiteDir:
    """Where the answers to a suite lie, and safe ways to read and write them."""

    def __init__(self, out: Path, suite: str) -> None:
        self.path = out / suite
        self.answers = self.path / "answers.jsonl"
        self.settings = self.path / "settings.json"
        self.result = self.path / "result.json"

    def add(self, answer: Answer) -> None:
        """One whole line; a line that a crash left unfinished spoils only itself. MegarlError if the disk is full."""
        with _room(self.answers):
            append_jsonl(self.answers, msgspec.to_builtins(answer))

    def read_answers(self) -> list[Answer]:
        """The newest of each id and sample, by id and sample; MegarlError names a line that is no answer."""
        return newest(read_answers(self.answers))

    def write_result(self, result: Result) -> None:
        with _room(self.result):
            write_atomically(self.result, json.dumps(msgspec.to_builtins(result), indent=2).encode() + b"\n")

    def read_result(self) -> Result:
        return _checked(self.result, 1, self.result.read_bytes(), Result)


def read_answers(path: Path) -> Iterable[Answer]:
    """In the order in which they were written; a last line that a crash cut short is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and _whole(line):
                yield _checked(path, number, line, Answer)


def newest(answers: Iterable[Answer]) -> list[Answer]:
    """Of each id and sample the last one, by id and sample."""
    found = {(answer.id, answer.sample): answer for answer in answers}
    return [found[key] for key in sorted(found)]


def suites_in(out: Path) -> list[str]:
    """Names of the suites that have answers in `out`."""
    return sorted(path.parent.name for path in out.glob("*/answers.jsonl"))


@contextmanager
def _room(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MegarlError(f"{path}: cannot be written: {error.strerror}; what is there is whole") from None


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _checked[T: (Answer, Result)](path: Path, number: int, data: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise MegarlError(f"{path}:{number}: not of an evaluation: {error}") from None
    if found.schema_version != SCHEMA_VERSION:
        raise MegarlError(
            f"{path}:{number}: written in schema version {found.schema_version}, this megarl reads {SCHEMA_VERSION}"
        )
    return found
