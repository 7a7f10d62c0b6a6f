"""The only kind of error that users see. Its text says what is wrong, where, and what
to do.

The CLI prints the text and exits with status 2.
"""

from collections.abc import Sequence


class MegarlError(Exception):
    """Bad input, or a wait that timed out. Its text is complete, so no traceback is
    shown.
    """


class Interrupted(Exception):
    """This process has to stop what it does or waits for; the text says why."""


SHOWN = 10
"""Faults listed in an error; the rest are counted."""


def listed(head: str, items: list[str], count: int | None = None) -> str:
    """Format the head and the first items, one per line. count: the number of all
    items, if `items` has only the first.
    """
    total = len(items) if count is None else count
    lines = [head, *items[:SHOWN]]
    if total > SHOWN:
        lines.append(f"… and {total - SHOWN} more")
    return "\n".join(lines)


def few(names: Sequence[str], limit: int) -> str:
    """Join at most `limit` names for a message, and count the rest."""
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in nested exception groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


CONTROL_CODES = (*range(32), *range(127, 160))
CONTROLS = {code: f"\\x{code:02x}" for code in CONTROL_CODES if chr(code) not in "\t\n"}
REORDERING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that have a terminal, or a reader, take the text around them in another
order.
"""
SURROGATES = range(0xD800, 0xE000)
"""Halves of characters, which JSON can hold and no terminal's encoding can."""
SPELLED_OUT = CONTROLS | {code: f"\\u{code:04x}" for code in (*REORDERING, *SURROGATES)}


def printable(text: str) -> str:
    """Return the text with control characters spelled out: a policy or a stranger wrote
    it, and a terminal would obey them.
    """
    return text.translate(SPELLED_OUT)
