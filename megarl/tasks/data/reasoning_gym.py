"""Problems of the package reasoning-gym as a source of prompts: families of puzzles,
made as they are read.

    reasoning-gym:chain_sum                               1,000 problems, seed 0
    reasoning-gym:chain_sum:size=5000:seed=7:max_terms=4  options of the family; values
                                                          in YAML

    stream ─► a process of its own ─► rows {"prompt", "answer"}, one JSON object a line

answer: a GymProblem as JSON, which the grader `reasoning-gym` reads.

In that process Python's hash seed is fixed. Without that, some families would make
other problems after a restart. reasoning-gym's problem n of the seed s is problem 0 of
the seed s + n, so seeds of two sources must differ by more than their sizes; shared
prompts of a training and a held-out set are refused in any case.
"""

import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any

import msgspec
import yaml

from megarl.core.base.errors import MegarlError
from megarl.core.base.process import die_with_parent
from megarl.core.base.types import JsonObject
from megarl.tasks.data.rows import PromptRow, UnfitError, fingerprint

PREFIX = "reasoning-gym:"
PACKAGE = "reasoning-gym"
VERSION = "0.1.25"
"""The only version that is taken: the grader knows which scorers of it would evaluate
an answer as Python.
"""
DEFAULTS: dict[str, Any] = {"size": 1000, "seed": 0}
LARGEST_SEED = 2**32
PROBLEM_LIMIT_S = 60
"""Time for one problem, and for the import before it."""
NONSENSE = "No answer at all."
RIGHT_FROM = 0.999
"""The least score of a right answer. Most scorers give a little, such as 0.01, for any
text.
"""
WITHOUT_SOURCE = ("composite",)
"""Families that mix others, for which a recipe has tasks."""
SOLVER = "pycosat"
"""What one family solves its puzzles with. It needs a C compiler, so the pinned stack
is without it.
"""
SOLVED_FAMILY = "zebra_puzzles"


class GymProblem(msgspec.Struct, frozen=True):
    """What a family's scorer needs to judge an answer. answer: one right answer, None
    where the scorer has none.
    """

    answer: str | None
    family: str
    options: dict[str, Any]
    metadata: dict[str, Any]

    def score(self, answer: str) -> float:
        """Return the family's score of an answer, from 0 to 1; 0 if its scorer fails on
        this answer.
        """
        dataset = _dataset(self.family, json.dumps(self.options))
        metadata = self.metadata
        if self.family in ("arc_agi", "rearc"):
            metadata = _with_tuples(metadata)  # their scorers compare them with ==
        entry = {"answer": self.answer, "metadata": metadata}
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception:  # such as prime_factorization's on an answer that is no number
            return 0.0


@dataclasses.dataclass(frozen=True)
class GymSource:
    """A source's name in its parts. options: without size and seed."""

    family: str
    size: int
    seed: int
    options: dict[str, Any]


def is_gym(source: str) -> bool:
    """Return whether a source is of reasoning-gym."""
    return source.startswith(PREFIX)


def parsed(source: str) -> GymSource:
    """Return a source's name in its parts; MegarlError if it is malformed."""
    family, *pairs = source.removeprefix(PREFIX).split(":")
    options = dict(DEFAULTS)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (equals and key.isidentifier()):
            raise MegarlError(f"{source!r}: write {PREFIX}FAMILY:KEY=VALUE:KEY=VALUE")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise MegarlError(f"{source!r}: {value!r} is not a value in YAML") from None
    size = options.pop("size")
    seed = options.pop("seed")
    if type(size) is not int or size < 1:
        raise MegarlError(f"{source!r}: size must be a whole number above 0")
    if type(seed) is not int or not 0 <= seed < LARGEST_SEED:
        raise MegarlError(f"{source!r}: seed must be a whole number from 0 to {LARGEST_SEED - 1}")
    return GymSource(family, size, seed, options)


@lru_cache(maxsize=64)
def problem(source: str) -> str | None:
    """Return why no problems of this source can be made; else None."""
    try:
        parsed(source)
        check_package()
        for _ in _lines(source, "1"):
            pass
    except MegarlError as error:
        return str(error)
    return None


def check_package() -> None:
    """Raise MegarlError if the package is missing, or another version of it is
    installed.
    """
    command = f"pip install {PACKAGE}=={VERSION}"
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise MegarlError(f"the package {PACKAGE} is missing: {command}") from None
    if version != VERSION:
        raise MegarlError(f"{PACKAGE} is {version}, but {VERSION} is needed: {command}")


def import_package() -> None:
    """Import reasoning-gym. It imports its solver, too, but calls it for one family
    only; if the solver is missing, an empty module takes its place.
    """
    if SOLVER not in sys.modules and importlib.util.find_spec(SOLVER) is None:
        sys.modules[SOLVER] = ModuleType(SOLVER)
    importlib.import_module("reasoning_gym")


def rows(source: str) -> Iterator[JsonObject]:
    """Yield the rows of a source, the same each time; MegarlError if it has none.
    Repeated prompts are left out.
    """
    parsed(source)
    check_package()
    for line in _lines(source):
        yield msgspec.json.decode(line)


def of_problems(read: Any) -> Any:
    """Wrap a reader of rows, so that it also checks that each answer is a problem of
    reasoning-gym.
    """

    def row(raw: Any) -> PromptRow:
        """Return a row. UnfitError if it has no such answer."""
        result: PromptRow = read(raw)
        try:
            problem_of(result.answer)
        except ValueError as error:
            raise UnfitError(f"the answer of {result.id!r} {error}") from None
        return result

    return row


def problem_of(answer: str) -> GymProblem:
    """Return the problem in a prompt's answer; ValueError if it is none."""
    try:
        return msgspec.json.decode(answer, type=GymProblem)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise ValueError(
            f"is not a problem of {PACKAGE}, as its sources `{PREFIX}FAMILY` have them"
        ) from None


def _lines(source: str, count: str = "") -> Iterator[bytes]:
    """Yield the rows that another process makes and prints, one a line. count: how many
    at most, "" for all. MegarlError if a problem takes too long or none can be made.
    """
    command = [sys.executable, "-m", __name__, source, count]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout
        try:
            yield from process.stdout
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        problems = errors.read().decode(errors="replace").strip().splitlines()
    if status == -signal.SIGALRM:  # its own alarm has killed it
        raise MegarlError(
            f"{source}: a problem was not made within {PROBLEM_LIMIT_S} s; choose smaller ones"
        )
    if status:
        problem = problems[-1] if problems else f"its process ended with status {status}"
        raise MegarlError(f"{source}: {problem}")


@lru_cache(maxsize=64)
def _dataset(family: str, options: str, seed: int = 0, size: int = 1) -> Any:
    """Return reasoning-gym's data set. options: as JSON, because a cache's keys must be
    hashable. MegarlError if there is none with these options.
    """
    import_package()
    from reasoning_gym.factory import DATASETS, create_dataset

    families = sorted(DATASETS.keys() - {*WITHOUT_SOURCE})
    if family == SOLVED_FAMILY and not _has_solver():
        raise MegarlError(
            f"{family} needs a package that is compiled as it is installed: pip install {SOLVER}"
        )
    if family not in families:
        close = difflib.get_close_matches(family, families, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise MegarlError(
            f"{family!r} is not a family of {PACKAGE}; {hint}known: {', '.join(families)}"
        )
    values = json.loads(options)
    config_class = DATASETS[family][1]
    fields = {field.name for field in dataclasses.fields(config_class)} - DEFAULTS.keys()
    unknown = values.keys() - fields
    if unknown:
        raise MegarlError(
            f"{family} has no option {', '.join(sorted(unknown))}; it has"
            f" {', '.join(sorted(fields))}"
        )
    try:
        return create_dataset(family, **values, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:
        raise MegarlError(f"{family} takes no such options: {error}") from None


def _has_solver() -> bool:
    """Return whether the solver is imported, and not an empty module in its place."""
    return getattr(sys.modules.get(SOLVER), "solve", None) is not None


def _rows(source: GymSource, count: int) -> Iterator[JsonObject]:
    """Make at most `count` rows, without repeated prompts.

    MegarlError if there are none, or if the family's scorer takes any answer for right.
    """
    fingerprints = set[int]()  # of the prompts so far
    for question, problem in _problems(source):
        mark = fingerprint(question)
        if mark in fingerprints:
            continue
        is_first = not fingerprints
        if is_first and problem.score(NONSENSE) >= RIGHT_FROM:
            raise MegarlError(f"the scorer of {source.family} takes any text for right")
        fingerprints.add(mark)
        text = msgspec.json.encode(problem, enc_hook=_plain).decode()
        yield {"prompt": question, "answer": text}
        if len(fingerprints) == count:
            return


def _problems(source: GymSource) -> Iterator[tuple[str, GymProblem]]:
    """Make problems, with their questions; this process is killed if one takes longer
    than PROBLEM_LIMIT_S. Problems that cannot be made are passed over; MegarlError if
    none can.
    """
    dataset = _dataset(source.family, json.dumps(source.options), source.seed, source.size)
    entry = None
    reason = ""
    try:
        for number in range(source.size):
            signal.alarm(PROBLEM_LIMIT_S)
            try:
                entry = dataset[number]
            except Exception as error:  # some families cannot make each of their problems
                reason = f": {error}"
                continue
            problem = GymProblem(entry["answer"], source.family, source.options, entry["metadata"])
            yield entry["question"], problem
    finally:
        signal.alarm(0)
    if entry is None:
        raise MegarlError(f"no problem could be made{reason}")


def _with_tuples(value: Any) -> Any:
    """Return the value with tuples in place of lists, which JSON has made of them."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value


def _plain(value: Any) -> Any:
    """Return a value of NumPy's as Python's, for msgspec, which calls this for types
    that it does not know.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} in the metadata of a problem")


def main(source: str, count: str) -> int:
    """Print a source's rows as JSON lines: the first `count`, or all if it is "". The
    last line of stderr says why there are none.
    """
    die_with_parent()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some families print as they are imported
    signal.alarm(PROBLEM_LIMIT_S)  # kills this process if the import takes longer
    try:
        gym_source = parsed(source)
        for row in _rows(gym_source, int(count or gym_source.size)):
            print(json.dumps(row, ensure_ascii=False), file=output, flush=True)
    except MegarlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
