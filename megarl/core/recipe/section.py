"""What all sections of a recipe share."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megarl.core.base.api_key import check_key_place

type RecipeTree = dict[str, Any]
"""The contents of a recipe file, or a part of them, not checked yet."""


class Section(BaseModel):
    """A part of the recipe: strict types, finite numbers, no unknown keys, no changes
    after loading.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with this section alone, as `key: what is wrong, what to
        do`.
        """
        yield from ()


KeyPlace = Annotated[str, AfterValidator(check_key_place)]
"""Where a key is: env:VARIABLE or file:PATH."""
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""The name of a task or reward; it becomes part of metric names."""

OF_USERS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""The name of a user's own function or class: package.module:name."""


def unknown_name(
    key: str,
    name: str,
    thing: str,
    built_in: Sequence[str],
    users: str = "package.module:function",
) -> Iterator[str]:
    """Yield a problem if a name is neither known nor that of a user's own function or
    class.
    """
    if name not in built_in and not OF_USERS.fullmatch(name):
        yield f"{key}: unknown {thing} {name!r}; {suggestion(name, built_in)}, and {users}"


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return a text that suggests the name that was meant, and lists all of them."""
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}known: {', '.join(names)}"
