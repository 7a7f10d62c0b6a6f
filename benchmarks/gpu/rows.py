"""What parts yield, and how a part ended."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """A measured figure with its reference, which is measured (or computed, if
    `reference` says so) in the same run.
    """

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
"""What a part yields: a row, a remark, or raw figures for the JSON only, from which
rows were computed.
"""


class Absent(Exception):
    """This machine lacks what a part measures."""


Ending = Literal["measured", "failed", "killed", "over its limit", "absent", "not run"]


@dataclass
class Outcome:
    """How a part ended, the reason if it failed, and the rows until then. log: the end
    of its output if it failed.
    """

    part: str
    ending: Ending
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
