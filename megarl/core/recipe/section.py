"""What every part of a recipe is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the recipe: strict types, finite numbers, no unknown keys, no changes after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
