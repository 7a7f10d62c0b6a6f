"""`megarl recipes show` says of each key what it is."""

import typing
from collections.abc import Iterator

from megarl.core.recipe import Recipe
from megarl.core.recipe.section import Section

MID_SENTENCE = ("of ", "or ", "as ", "the same", "instead of ")


def undescribed(section: type[Section], path: str = "") -> Iterator[str]:
    """Yield the dotted keys below a section that have no description, or one that
    begins mid-sentence.
    """
    for name, field in section.model_fields.items():
        inner = [
            kind
            for kind in (field.annotation, *typing.get_args(field.annotation))
            if is_section(kind)
        ]
        for kind in inner:
            yield from undescribed(kind, f"{path}{name}.")
        if (not inner and not field.description) or (field.description or "").startswith(
            MID_SENTENCE
        ):
            yield f"{path}{name}: {field.description}"


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def test_each_key_has_a_sentence() -> None:
    assert list(undescribed(Recipe)) == []
