"""The number of a file's schema: each kind of file that a later command reads carries
its own, and a file with another number is refused.
"""

from pathlib import Path

from megarl.core.base.errors import MegarlError


def check_schema(path: Path | str, number: object, reads: int) -> None:
    """Raise MegarlError if the file at `path` has another schema than `reads`."""
    if number == reads:
        return
    raise MegarlError(
        f"{path}: written in schema version {number}, this version of megarl reads {reads}; use"
        " the version that wrote it"
    )
