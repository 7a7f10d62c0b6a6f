"""A resolved recipe as YAML, to be read back or to be read; and any tree, flat."""

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from megarl.core.recipe.tree import Recipe


def dump(recipe: Recipe) -> str:
    """YAML of the whole resolved tree."""
    # Only ASCII: PyYAML does not read back every other character that it writes as it is (U+0085).
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def describe(recipe: Recipe) -> str:
    """YAML of the whole resolved tree with each key's meaning and limits beside it."""
    return "\n".join(_described(recipe, 0)) + "\n"


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The values in a tree of mappings, by the keys that lead to them, joined by dots. before: what keys begin with."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def _described(section: BaseModel, depth: int) -> list[str]:
    found: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found += [f"{'  ' * depth}{name}:", *_described(value, depth + 1)]
        elif isinstance(value, dict) and value:  # of sections
            found.append(_line(f"{'  ' * depth}{name}:", field.description))
            for key, part in value.items():
                found += [f"{'  ' * (depth + 1)}{key}:", *_described(part, depth + 2)]
        else:
            shown = yaml.safe_dump(
                section.model_dump(mode="json")[name], default_flow_style=True, sort_keys=False, width=10_000
            )
            found.append(
                _line(f"{'  ' * depth}{name}: {shown.removesuffix('...' + chr(10)).rstrip()}", field.description)
            )
    return found


def _line(text: str, description: str | None) -> str:
    return f"{text:<44}  # {description}" if description else text


def differences(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every value that differs."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    return [(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]
