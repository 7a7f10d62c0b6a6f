"""One line for each thing that is wrong in a recipe: where it stands, which key, what to do."""

import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from megarl.core.recipe.loading import shipped_suites
from megarl.core.recipe.tree import Recipe

SUITES = ("evaluation", "suites")
Origin = dict[tuple[str, ...], str]
"""`file:line`, or the override, of each key."""


def kind_of(kind: Any, key: object) -> Any:
    """The type of the value at this key of a section, a mapping or a list of type `kind`; Any if there is no such key."""
    if typing.get_origin(kind) in (dict, tuple):
        return typing.get_args(kind)[1 if typing.get_origin(kind) is dict else 0]
    known = kind.model_fields if _is_section(kind) else {}
    return known[key].annotation if key in known else Any


LONGEST = 400
"""Characters of a line in an error, beyond which its middle is left out."""


def shortened(line: str) -> str:
    """What was written stays recognisable, however long it is."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def explain(error: ErrorDetails, origin: Origin, source: str) -> str:
    """`file:line: key: what is wrong`."""
    where = tuple(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ")
    if not where and ": " in message:  # a combination: its text begins with the key
        key, message = message.split(": ", 1)
        where = tuple(key.split("."))
    if error["type"] == "extra_forbidden":
        message = _unknown(where)
    elif error["type"] == "missing":
        message = f"field required{_near_sibling(where[:-1], origin)}"
    elif error["type"] not in ("value_error",):
        message = f"{message[0].lower()}{message[1:]}, got {error['input']!r}"
    while where and where not in origin and where[:-1] in origin and where[-1].isdigit():
        where = where[:-1]  # an element of a list
    return f"{_place(where, origin) or source}: {'.'.join(where)}: {message}"


def _place(where: tuple[str, ...], origin: Origin) -> str:
    """Of the key, or of the nearest section around it; of a section that only overrides made, its first key's."""
    for n in range(len(where), 0, -1):
        found = origin.get(where[:n]) or next((place for key, place in origin.items() if key[:n] == where[:n]), "")
        if found:
            return found
    return ""


def _kind_at(where: tuple[str, ...]) -> Any:
    kind: Any = Recipe
    for part in where:
        kind = kind_of(kind, part)
    return kind


def _unknown(where: tuple[str, ...]) -> str:
    section = _kind_at(where[:-1])
    close = difflib.get_close_matches(where[-1], section.model_fields, 1, cutoff=0.5) or _elsewhere(where[-1])
    return "unknown key" + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(section.model_fields)}")


def _near_sibling(section: tuple[str, ...], origin: Origin) -> str:
    """A section of a mapping lacks a key: perhaps its name was misspelt, and another one was meant."""
    if typing.get_origin(_kind_at(section[:-1])) is not dict:
        return ""
    others = [key[-1] for key in origin if key[:-1] == section[:-1] and key != section]
    others += shipped_suites() if section[:-1] == SUITES else ()
    close = difflib.get_close_matches(section[-1], others, 1)
    return f"; did you mean {'.'.join((*section[:-1], close[0]))}?" if close else ""


def _elsewhere(name: str) -> list[str]:
    """The same or a near name in another section, dotted."""
    known = dict(_keys(Recipe))
    return [known[n] for n in difflib.get_close_matches(name, known, 1, cutoff=0.8)]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and dotted name of every key that is no section; of a name in two sections the first comes last and counts."""
    for name, field in reversed(model.model_fields.items()):
        kind = field.annotation
        if _is_section(kind):
            yield from _keys(kind, f"{prefix}{name}.")
        elif typing.get_origin(kind) is dict:
            yield from _keys(kind_of(kind, ""), f"{prefix}{name}.NAME.")
        else:
            yield name, f"{prefix}{name}"


def _is_section(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
