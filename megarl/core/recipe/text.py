"""Writes a resolved recipe as YAML, for machines and for people; flattens any tree."""

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from megarl.core.recipe.tree import Recipe


def dump(recipe: Recipe) -> str:
    # Only ASCII: PyYAML cannot read back every other character that it writes literally (U+0085).
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def describe(recipe: Recipe) -> str:
    """Return the whole resolved tree as YAML with each key's meaning and limits beside it."""
    return "\n".join(_described(recipe)) + "\n"


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values in a tree of mappings by their dotted keys. before: prefix of the keys."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return values


def _described(section: BaseModel, indent: str = "") -> list[str]:
    lines: list[str] = []
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_described(value, indent + "  ")]
        elif isinstance(value, dict) and any(isinstance(part, BaseModel) for part in value.values()):
            lines.append(_line(f"{indent}{name}:", field.description))
            for key, part in value.items():
                lines += [f"{indent}  {key}:", *_described(part, indent + "    ")]
        else:
            shown = yaml.safe_dump(values[name], default_flow_style=True, sort_keys=False, width=10_000)
            lines.append(_line(f"{indent}{name}: {shown.removesuffix('...\n').rstrip()}", field.description))
    return lines


def _line(text: str, description: str | None) -> str:
    return f"{text:<44}  # {description}" if description else text


def differences(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old, new) of every value that differs."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    return [(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]
