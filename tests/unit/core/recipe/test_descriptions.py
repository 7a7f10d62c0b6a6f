"""`megarl recipes show` says of each key what it is."""

import typing
from collections.abc import Iterator

from megarl.core.recipe import Recipe
from megarl.core.recipe.section import Section


def undescribed(section: type[Section], path: str = "") -> Iterator[str]:
    """Yield the dotted keys below a section that have no description."""
    for name, field in section.model_fields.items():
        inner = [
            kind
            for kind in (field.annotation, *typing.get_args(field.annotation))
            if is_section(kind)
        ]
        for kind in inner:
            yield from undescribed(kind, f"{path}{name}.")
        if not inner and not field.description:
            yield f"{path}{name}"


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def test_each_key_is_described() -> None:
    assert list(undescribed(Recipe)) == []
