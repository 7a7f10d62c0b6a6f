"""What goes to a terminal: a policy, a stranger or a crash wrote much of it, and the
terminal must not obey it.

say(…)     like print, with control characters spelled out
console()  rich's Console that does the same: tables, panels, the live view
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import IO, TYPE_CHECKING

from megarl.core.base.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def say(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: IO[str] | None = None,
    flush: bool = False,
) -> None:
    """Print values as `print` does, with control characters spelled out."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def uncoloured(text: str) -> str:
    """Return a line of a log without its colours, which programs write into files,
    too.
    """
    return COLOUR.sub("", text)


def console(*, stderr: bool = False, width: int | None = None, quiet: bool = False) -> "Console":
    """Return a console for texts of any origin. Styles are given as such, not as
    markup.
    """
    return _plain_console()(
        stderr=stderr, width=width, quiet=quiet, markup=False, emoji=False, highlight=False
    )


@cache
def _plain_console() -> type["Console"]:
    """Return the class of `console`. It is made when it is needed: rich takes longer
    than most commands' start.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        """A console that spells out control characters wherever they stand: in cells,
        titles, panels.
        """

        def render(
            self, renderable: "RenderableType", options: "ConsoleOptions | None" = None
        ) -> Iterable["Segment"]:
            """Yield the segments of a renderable. Those that rich itself makes to move
            the cursor stay.
            """
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return PlainConsole
