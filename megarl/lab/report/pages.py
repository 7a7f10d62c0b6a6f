"""HTML pages of one file, which open without a network: a template beside the module that fills it, data in its script.

A template is `string.Template`'s: `$name` is filled, and a dollar sign of its script would be `$$` (there are none).
"""

import json
import string
from pathlib import Path
from typing import Any

from megarl.core.base.rundir import write_atomically


def embedded(data: Any) -> str:
    """JSON to stand in a <script>: nothing in it can close the script or open a comment, whatever a model wrote."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def write_page(template: Path, target: Path, **parts: str) -> None:
    """Whole or not at all. The parts are put in as they are: what is not `embedded` must have been escaped."""
    page = string.Template(template.read_text()).substitute(parts)
    write_atomically(target, page.encode(errors="replace"))  # half a surrogate pair, which JSON can hold, is no UTF-8
