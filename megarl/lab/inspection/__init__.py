"""Shows data: rollouts.py shows a run's journal (`megarl rollouts show`), data.py rows of a data set."""

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Return the text with control characters spelled out: a policy or a stranger wrote it, and a terminal would obey them."""
    return text.translate(CONTROLS)
