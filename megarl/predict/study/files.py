"""A study file: a recipe's variants, each a few keys that differ.

    common:   {KEY: VALUE, …}    of all variants and the recipe itself; may be missing
    variants: {NAME: {KEY: VALUE, …}, …}

    variants_of("kl", "scalerl-8b", ["run.steps=500"])
      ──►  {scalerl-8b: Recipe, kl-0.01: Recipe, …}

The recipe itself comes first, under its own name, or as `base` if common keys change
it. Of one key, a variant's value wins over the command line's, and this over the common
one.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load, read_mapping, shipped_studies

type Keys = Mapping[str, Any]
"""Values by dotted keys of the recipe."""


@dataclass(frozen=True)
class StudyFile:
    """The contents of a study file."""

    path: Path
    common: Keys
    variants: Mapping[str, Keys]


def variants_of(study: str, recipe: str, overrides: Sequence[str]) -> dict[str, Recipe]:
    """Return the recipe with the study's common keys, and its variants, by name.

    study: the name of a shipped study, or a path. A variant that would train like an
    earlier one is left out. MegarlError for a file or a key that is none.
    """
    file = opened(study)
    common = [*_overrides(file.common), *overrides]
    base = load(recipe, common)
    is_unchanged = base == load(recipe, overrides)  # by common keys
    own_name = Path(recipe).stem if is_unchanged else "base"
    variants = {own_name: base}
    distinct = [_comparable(base)]
    for name, keys in file.variants.items():
        if name == own_name:
            raise MegarlError(
                f"{file.path}: variants.{name}: the recipe itself has this name; choose another"
            )
        try:
            variant = load(recipe, [*common, *_overrides(keys)])
        except MegarlError as error:
            raise MegarlError(f"{file.path}: variants.{name}: {error}") from None
        if _comparable(variant) not in distinct:
            distinct.append(_comparable(variant))
            variants[name] = variant
    return variants


def _comparable(recipe: Recipe) -> Recipe:
    """Return the recipe for a comparison of what would be trained: if the whole model
    is in FP32, without the choice of a head in FP32, which then changes nothing.
    """
    if recipe.model.dtype != "fp32":
        return recipe
    model = recipe.model.model_copy(update={"fp32_head": "both"})
    return recipe.model_copy(update={"model": model})


def opened(study: str) -> StudyFile:
    """Read the shipped study of this name, or a file. MegarlError if there is neither,
    or if it is no study.
    """
    shipped = shipped_studies()
    path = shipped.get(study, Path(study))
    if study not in shipped and not os.path.isfile(path):
        close = difflib.get_close_matches(study, shipped, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise MegarlError(
            f"no study {study!r}: neither a file nor a shipped one ({', '.join(shipped)}){hint}"
        )
    tree = read_mapping(path)
    if unknown := sorted(map(str, tree.keys() - {"common", "variants"})):
        raise MegarlError(
            f"{path}: {unknown[0]}: unknown key; a study file has common and variants"
        )
    variants = _mapping(path, "variants", tree.get("variants"))
    if not variants:
        raise MegarlError(f"{path}: variants: name at least one, with the keys in which it differs")
    keys_of = {name: _mapping(path, f"variants.{name}", keys) for name, keys in variants.items()}
    return StudyFile(path, _mapping(path, "common", tree.get("common", {})), keys_of)


def _mapping(path: Path, key: str, value: Any) -> Keys:
    """Return the value of a key of a study file. MegarlError if it is no mapping."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise MegarlError(f"{path}: {key}: should be a mapping, got {value!r}")
    return value


def _overrides(keys: Keys) -> list[str]:
    """Return the keys as overrides of the command line; JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]
