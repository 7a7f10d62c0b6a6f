"""The files of an evaluation: every answer, and metrics over all of them. `megarl eval`
and runs write the same files.

    OUT/SUITE/answers.jsonl   one Answer per line, in order of arrival
    OUT/SUITE/settings.json   the settings of the answers; written first
    OUT/SUITE/result.json     Result: metrics of all answers; written last

OUT: of `megarl eval`, or RUN/evaluations/step-0000020, where SUITE may also be a task.
`id` and `sample` identify an answer. A later row replaces an earlier one of the same id
and sample, such as a void one (nothing could be generated).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import UNSET, UnsetType

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents, lines_of
from megarl.core.base.rundir import line_of, opened_jsonl, write_atomically, writing
from megarl.core.base.schema import check_schema
from megarl.core.base.types import JsonObject

SCHEMA_VERSION = 1
"""Version of all three files; readers refuse any other."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt. Texts are as the model saw and wrote them, with special
    tokens. entropy: mean of -log p over the sampled tokens, under the distribution that
    they were sampled from (nats), an unbiased estimate of its mean entropy per token.
    With temperature 0 it is the surprise of the greedy tokens at temperature 1. None:
    nothing was sampled.
    """

    schema_version: int = SCHEMA_VERSION
    suite: str
    id: str
    sample: int
    prompt: str  # with its template
    expected: str  # from the data set; if it is long (tests of a program), only the beginning
    completion: str
    answer: str  # after the thinking trace, "" if there is none
    vote: str  # counted by maj@k: the same text for equal answers (votes.py); "": no vote
    correct: bool
    truncated: bool
    interrupted: bool
    format_ok: bool
    grader_timeout: bool
    grader_error: bool
    tokens: int  # of the completion, with the interruption phrase
    entropy: float | None
    void: str = ""  # why nothing could be generated; it then counts as wrong
    reward: float | UnsetType = UNSET  # in suites with `rewards`: best@k chooses by this
    # Of several graders by name (`answer`: the first), and `total`.
    scores: dict[str, float] | UnsetType = UNSET
    difficulty: int | UnsetType = UNSET  # from the data set
    choices: tuple[str, ...] | UnsetType = UNSET  # in multiple choice: the texts that were scored
    loglikelihoods: tuple[float, ...] | UnsetType = UNSET  # of each choice, in nats
    chosen: int | UnsetType = UNSET  # index of the likeliest choice
    # Index of the choice that is likeliest relative to its length.
    chosen_normalised: int | UnsetType = UNSET

    @property
    def by_length(self) -> bool | None:
        """Whether the choice that is likeliest relative to its length is right; None
        without scored choices.
        """
        if self.choices is UNSET or self.chosen_normalised is UNSET:
            return None
        return self.choices[self.chosen_normalised] == self.expected


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a suite. pass_rates: each prompt's share of right answers, by id;
    results of earlier versions lack it. proxy_and_trusted: each prompt's mean reward
    and mean trusted score.
    """

    schema_version: int = SCHEMA_VERSION
    suite: str
    model: str  # as the user named it
    samples: int
    settings: JsonObject
    metrics: dict[str, float]  # see metrics.py, with `NAME_low` and `NAME_high` (95 %)
    time: float  # Unix seconds
    versions: dict[str, str]
    pass_rates: dict[str, float] | UnsetType = UNSET
    # By prompt id, with a trusted grader: means.
    proxy_and_trusted: dict[str, tuple[float, float]] | UnsetType = UNSET


class SuiteDir:
    """The files of one suite's answers. `add` keeps its file open until `close`: to
    open and close it for each answer takes milliseconds on a network's file system, for
    which the whole controller would wait.
    """

    def __init__(self, folder: Path, suite: str) -> None:
        self.path = folder / suite
        self.answers = self.path / "answers.jsonl"
        self.settings = self.path / "settings.json"
        self.result = self.path / "result.json"
        self._added: BinaryIO | None = None

    def add(self, answer: Answer) -> None:
        """Append one line. A line that a crash left incomplete is lost, but no other.
        MegarlError if the disk is full.
        """
        with writing(self.answers):
            self._added = self._added or opened_jsonl(self.answers)
            self._added.write(line_of(msgspec.to_builtins(answer)))
            self._added.flush()

    def close(self) -> None:
        """Close the file of answers. Some file systems report only now that the disk is
        full.
        """
        added = self._added
        self._added = None
        if added is not None:
            with writing(self.answers):
                added.close()

    def read_answers(self) -> list[Answer]:
        """Return the newest answer of each id and sample. MegarlError, naming the line,
        if a line is not an answer.
        """
        latest = {(answer.id, answer.sample): answer for answer in read_answers(self.answers)}
        return [latest[key] for key in sorted(latest)]

    def write_result(self, result: Result) -> None:
        """Write the result, complete or not at all."""
        text = json.dumps(msgspec.to_builtins(result), indent=2) + "\n"
        write_atomically(self.result, text.encode())

    def read_result(self) -> Result:
        """Return the result. MegarlError if the file is not one."""
        result = _decoded(self.result, 1, contents(self.result), Result)
        if result is None:
            raise MegarlError(f"{self.result}: not the result of an evaluation: it is not JSON")
        return result


def read_answers(path: Path) -> Iterable[Answer]:
    """Yield answers in the order in which they were written. Lines that are not JSON,
    left by a crash, are skipped.
    """
    if not path.is_file():
        return
    for number, line in enumerate(lines_of(path), 1):
        answer = _decoded(path, number, line, Answer)
        if answer is not None:
            yield answer


def suites_in(folder: Path) -> list[str]:
    """Return the names of the suites with answers in `folder`."""
    return sorted(path.parent.name for path in folder.glob("*/answers.jsonl"))


def _decoded[T: (Answer, Result)](path: Path, number: int, data: bytes, kind: type[T]) -> T | None:
    """Return the record in a line of a file; None if it is not JSON. MegarlError if it
    is something else.
    """
    try:
        result = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise MegarlError(f"{path}:{number}: not written by an evaluation: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    check_schema(f"{path}:{number}", result.schema_version, SCHEMA_VERSION)
    return result
