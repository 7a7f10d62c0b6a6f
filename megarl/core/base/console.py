"""rich's Console for texts of any origin; terminal.py says how to get one."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megarl.core.base.errors import printable


class PlainConsole(Console):
    """A console that spells out control characters wherever they stand: in cells, titles, panels."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable. Those that rich itself makes to move the cursor stay."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
