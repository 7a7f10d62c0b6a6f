"""What parts say, and how a part ended."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """A measured figure, and what it is compared with, measured (or computed, if `reference` says so) in the same run."""

    what: str
    figure: float
    unit: str
    sizes: str
    reference: str = ""
    reference_figure: float | None = None

    @property
    def ratio(self) -> float | None:
        """Return the figure divided by its reference."""
        return self.figure / self.reference_figure if self.reference_figure else None


Said = Row | str | dict[str, Any]
"""What a part yields: a row, a remark, or figures for the JSON alone, from which rows were made."""


class Absent(Exception):
    """What a part measures is not on this machine."""


Ending = Literal["measured", "failed", "killed", "over its limit", "absent", "not run"]


@dataclass
class Outcome:
    """How a part ended, why if not well, and the rows measured until then. log: the end of its output, if it went wrong."""

    part: str
    ending: Ending
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
