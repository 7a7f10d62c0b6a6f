"""Keys of services that a recipe names: the recipe says where a key is, never the key
itself.
"""

import os
import re
from pathlib import Path

from megarl.core.base.errors import MegarlError


def check_key_place(api_key: str) -> str:
    """Return the value of a recipe's `api_key`. ValueError if it is not a place."""
    if api_key and not re.fullmatch(r"(env|file):.+", api_key):
        raise ValueError(
            "should be env:VARIABLE or file:PATH, which hold the key, not the key itself"
        )
    return api_key


def read_api_key(name: str, api_key: str) -> str:
    """Return the key at `api_key`, env:VARIABLE or file:PATH; empty if that is empty.

    name: the recipe's key, for errors. MegarlError if the key is unavailable.
    """
    (kind, _, place) = api_key.partition(":")
    key = ""
    if kind == "env":
        key = os.environ.get(place, "").strip()
        if not key:
            raise MegarlError(f"{name}: {place} is not set; export it")
    elif kind == "file":
        try:
            key = Path(place).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise MegarlError(f"{name}: {place}: {error}") from None
        if not key:
            raise MegarlError(f"{name}: {place} is empty")
    if len(key.split()) > 1:
        raise MegarlError(f"{name}: {place} has white space in it; give it the key alone")
    return key
