"""What goes to a terminal: a policy, a stranger or a crash wrote much of it, and the terminal must not obey it.

say(…)     like print, with control characters spelled out
console()  rich's Console that does the same (console.py): tables, panels, the live view
"""

import re
from typing import IO, TYPE_CHECKING

from megarl.core.base.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def say(*values: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None, flush: bool = False) -> None:
    """Print values as `print` does, with control characters spelled out."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def uncoloured(text: str) -> str:
    """Return a line of a log without its colours, which programs write even into files."""
    return COLOUR.sub("", text)


def console(*, stderr: bool = False, width: int | None = None, quiet: bool = False) -> "Console":
    """Return a console for texts of any origin. Styles are given as such, not as markup."""
    from megarl.core.base.console import PlainConsole  # rich takes longer than most commands' start

    return PlainConsole(stderr=stderr, width=width, quiet=quiet, markup=False, emoji=False, highlight=False)
