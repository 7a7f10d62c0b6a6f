"""How to read a row from the columns of another schema.

A dot reaches into a nested column: `reward_model.ground_truth`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from megarl.tasks.data.conversations import prompt_of
from megarl.tasks.data.rows import (
    LARGEST_DIFFICULTY,
    PromptRow,
    Raw,
    UnfitError,
    abbreviated,
    hashed_id,
    identity,
)

MOST_ANSWERS = 100
"""Most accepted answers of a row: the grader compares with one after the other."""

type Getter = Callable[[Raw], Any]


def nothing(raw: Raw) -> None:
    """Read a column that a schema does not have."""


@dataclass(frozen=True)
class Columns:
    """How to read a row of another schema. Without an id a prompt's is a hash of its
    text.
    """

    prompt: Getter
    answer: Getter
    difficulty: Getter = nothing
    id: Getter = nothing

    def __call__(self, raw: Raw) -> PromptRow:
        """Read a row. UnfitError if it does not fit."""
        prompt, messages = prompt_of(self.prompt(raw))
        answer, *alternatives = answers_of(self.answer(raw))
        name = self.id(raw)
        if name is None or name == "":
            name = hashed_id(identity(prompt, messages))
        return PromptRow(
            id=str(name),
            prompt=prompt,
            answer=answer,
            difficulty=whole_of(self.difficulty(raw)),
            alternatives=tuple(alternatives),
            messages=messages,
        )


def column(path: str) -> Getter:
    """Return a getter for the value at a dotted path."""

    def get(raw: Raw) -> Any:
        """Return a row's value. UnfitError if the row has none there."""
        value: object = raw
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise UnfitError(f"no column {path!r}; the row has {', '.join(map(str, raw))}")
            value = value[key]
        return value

    return get


def optional(name: str) -> Getter:
    """Return a getter for a column that rows may lack."""
    return lambda raw: raw.get(name)


def alternatives(path: str) -> Getter:
    """Return a getter for a column with a list of accepted answers, or with its JSON
    text.
    """
    get = column(path)

    def read(raw: Raw) -> Any:
        """Return the texts in a JSON list of texts, and any other value as it is."""
        value = get(raw)
        if not isinstance(value, str) or not value.lstrip().startswith("["):
            return value
        try:
            answers = json.loads(value)
        except (ValueError, RecursionError):  # such as an interval
            return value
        if all(isinstance(answer, str) for answer in answers):
            return answers
        return value

    return read


def text_of(value: Any) -> str:
    """Return a text, given as such or as a list of one user message."""
    text, messages = prompt_of(value)
    if messages:
        raise UnfitError("the prompt has several messages, and this mapping reads one text")
    return text


def answers_of(value: object) -> tuple[str, ...]:
    """Return the accepted answers: of a list each text in it, once; at least one, maybe
    empty.
    """
    if not isinstance(value, list):
        return (answer_of(value),)
    if len(value) > MOST_ANSWERS:
        raise UnfitError(f"the answer is a list of {len(value)} answers, more than {MOST_ANSWERS}")
    distinct = dict.fromkeys(map(answer_of, value))
    return tuple(answer for answer in distinct if answer.strip()) or ("",)


def _is_missing(value: object) -> bool:
    """Return whether a value stands for none: None, or NaN in a column of numbers."""
    return value is None or value != value


def answer_of(value: object) -> str:
    """Return an answer as text: numbers in decimals, without an exponent; "" if it is
    missing. UnfitError for what is neither text nor a finite number.
    """
    if _is_missing(value):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise UnfitError(
            f"the answer is neither text nor a number nor a list: {abbreviated(value)}"
        )
    if not math.isfinite(value):
        raise UnfitError(f"the answer is not a finite number: {value}")
    if value == int(value):
        return str(int(value))
    return format(Decimal(str(value)).normalize(), "f")


def whole_of(value: Any) -> int:
    """Return a difficulty: a whole number, or the first one in a text such as `Level
    5`; 0 if it is missing. UnfitError for anything else.
    """
    if _is_missing(value) or value == "":
        return 0
    number = value
    if isinstance(value, str):
        digits = re.search(r"-?\d{1,18}", value)
        if digits:
            number = int(digits.group())
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise UnfitError(f"the difficulty is not a whole number: {abbreviated(value)}")
    if abs(number) > LARGEST_DIFFICULTY:
        raise UnfitError(f"the difficulty is not between -2^31 and 2^31: {abbreviated(value)}")
    return number
