"""What pages and pictures share: single-file HTML pages that open offline, and the colours of all pictures.

A page is a template beside the module that fills it, with its data in a script. Templates are `string.Template`'s: `$name` is
filled in, and a dollar sign in a script would be `$$` (there are none). This module imports no matplotlib, to stay cheap.
"""

import json
import string
from pathlib import Path
from typing import Any

from megarl.core.base.rundir import write_atomically


def embedded(data: Any) -> str:
    """Encode JSON for a <script>: nothing in it can close the script or open a comment, whatever a model wrote."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def write_page(template: Path, target: Path, **parts: str) -> None:
    """Write a complete page or none. Parts are inserted as they are: what is not `embedded` must have been escaped."""
    page = string.Template(template.read_text()).substitute(parts)
    write_atomically(target, page.encode(errors="replace"))  # half a surrogate pair, which JSON can hold, is not UTF-8


BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#d1701f", "#2e8b57", "#b8323f", "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, RED, "#7a4fa3", "#128a9b", "#a07d1c", "#c2528b")
"""Colours of several runs in one picture, in order."""
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
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
}
