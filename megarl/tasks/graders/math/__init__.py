"""The grader `math`: whether an answer in prose or LaTeX equals the expected one."""

import re

from megarl.core.base.contracts import last_box
from megarl.tasks.graders.functions import is_equal, normal

__all__ = ["has_complete_answer", "is_equal", "readable"]
LINE = re.compile(r"(?i)(?:answer(?: is)?\s*:?|####)[^\n]*\S[^\n]*\n")


def readable(expected: str) -> bool:
    """Return whether the grader can read this expected answer as mathematics or words.

    If not, an answer is right only if it is the same text.
    """
    from math_verify import parse

    return bool(parse(f"${normal(expected)}$", parsing_timeout=None))


def has_complete_answer(text: str) -> bool:
    """Return whether a text that was cut off states its answer completely.

    It does in a closed box, in `<answer>…</answer>`, or in an answer line that has ended.
    """
    if "<answer>" in text:
        return "</answer>" in text.rpartition("<answer>")[2]
    return last_box(text) is not None or LINE.search(text) is not None
