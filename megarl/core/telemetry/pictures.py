"""Shared by pages and figures: single-file HTML pages that open offline, and the style
of all figures.

A page's template lies beside the module that fills it, and the page has its data in a
script. Templates are `string.Template`s: `$name` is replaced, and a literal dollar sign
would be `$$` (there is none). Whatever stands in a page is `Markup`, made by
`Markup("<b>{}</b>").format(text)`, which escapes the text: models and strangers wrote
it. The first figure imports matplotlib, which takes no text for mathematics.
"""

import io
import json
import math
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from megarl.core.base.errors import printable
from megarl.core.base.rundir import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def embedded(data: object) -> Markup:
    """Encode JSON for a <script>. Whatever a model wrote, nothing in it can close the
    script or open a comment.
    """
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def write_page(template: Path, target: Path, **parts: str | Markup) -> None:
    """Write a page, completely or not at all. Parts that are not Markup are escaped."""
    escaped = {name: escape(part) for name, part in parts.items()}
    page = string.Template(template.read_text()).substitute(escaped)
    # JSON can hold half a surrogate pair, which is not UTF-8.
    write_atomically(target, page.encode(errors="replace"))


BLUE = "#2563a8"
ORANGE = "#d1701f"
GREEN = "#2e8b57"
RED = "#b8323f"
GREY = "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, RED, "#7a4fa3", "#128a9b", "#a07d1c", "#c2528b")
"""The colours for several runs in one figure, in order."""
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e4e6ea",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": "#444",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
}


@contextmanager
def drawing(
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    *,
    title: str = "",
    sharex: bool = False,
    sharey: bool = False,
) -> Iterator[tuple["Figure", list["Axes"]]]:
    """Yield a new figure of `size` inches, and its axes in reading order. The style
    applies only inside the block.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        if title:
            figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        panels = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
        yield figure, list(panels.flat)


FEW_DECADES = 2.0
"""Powers of ten of an axis up to which 2 and 5 times each are labelled, too."""


def logarithmic(axes: "Axes") -> None:
    """Make the x axis logarithmic, with plain numbers as labels. Call it when the data
    is drawn.

    Matplotlib's own labels are formulas, which are off (STYLE).
    """
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    labelled: tuple[float, ...] = (1.0,)
    if math.log10(high / low) <= FEW_DECADES:
        labelled = (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=labelled))
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.12g}")
    axes.xaxis.set_minor_formatter(lambda _value, _position: "")


def _spell_out(figure: "Figure") -> None:
    """Spell out control characters in all texts of a figure: no font draws them, and no
    SVG may have them.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(printable(text.get_text()))


def rendered(figure: "Figure", kind: str, dpi: int = 130) -> bytes:
    """Return the figure as a PNG or an SVG file. The SVG has no date, so that the same
    figure gives the same file.
    """
    _spell_out(figure)
    data = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(data, format=kind, dpi=dpi, metadata=metadata)
    return data.getvalue()


def save(figure: "Figure", path_without_suffix: Path, dpi: int = 130) -> list[Path]:
    """Write the figure as PNG and SVG; return the two paths."""
    _spell_out(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not again for each format
    written = []
    for kind in ("png", "svg"):
        path = path_without_suffix.with_name(f"{path_without_suffix.name}.{kind}")
        write_atomically(path, rendered(figure, kind, dpi))
        written.append(path)
    return written
