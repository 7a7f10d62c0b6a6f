"""Finds texts that a careless conversion has damaged, so that nobody could answer them.

In JSON and in most languages `"\\frac"` with a single backslash is a form feed and
`rac`, `"\\times"` a tab and `imes`, `"\\nabla"` a line break and `abla`. Backspaces and
the like never belong in a text. Tabs and line breaks do, so what follows must be the
rest of a command and no word or name; the rests that may be one count only within a
formula.
"""

import re

NO_ANSWERS = frozenset({"proof", "notfound"})
"""What NuminaMath writes in place of an answer. A policy that writes it too would be
right.
"""

CONTROL = re.compile(r"[\x07\x08\x0b][a-z]+|\x0c(?:rac|orall|lat|rown|ootnote|box\{)[a-z]*")
"""What is left of \\alpha, \\boxed, \\beta, \\vec, \\frac, \\forall, …"""

RESTS = {
    "\t": (
        *("imes", "heta", "riangle", "riangleq", "herefore", "anh", "hinspace"),
        *("binom{", "frac{", "ilde{", "ext{", "extbf{", "extit{", "extrm{", "extsf{", "exttt{"),
    ),
    "\n": (
        *("abla", "otin", "onumber", "oindent", "ewcommand", "ewline", "earrow", "warrow"),
        *("subseteq", "eq\\"),
    ),
    "\r": (
        *("ho", "ight", "ightarrow", "brack", "brace", "vert"),
        *("angle\\", "floor\\", "ceil\\"),
    ),
}
"""The rests of commands, by what became of the backslash and the first letter."""

IN_FORMULAS = {
    "\t": ("o", "an", "au", "op"),
    "\n": (
        "eq",
        "e",
        "u",
        "ot",
        "eg",
        "i",
        "mid",
        "leq",
        "geq",
        "cong",
        "sim",
        "exists",
        "parallel",
    ),
    "\r": ("angle", "floor", "ceil", "m"),
}
"""Rests that are words or names elsewhere."""

LONGEST_FORMULA = 400
"""Most characters on each side of a damaged command in a formula."""


def _pattern(rests: dict[str, tuple[str, ...]]) -> re.Pattern[str]:
    """Return a pattern for any of these rests. A rest of letters must not go on."""
    alternatives = []
    for control, endings in rests.items():
        for ending in endings:
            alternative = control + re.escape(ending)
            if ending[-1].isalpha():
                alternative += r"(?![A-Za-z])"
            alternatives.append(alternative)
    return re.compile("|".join(alternatives))


SUSPECT = re.compile(r"[\x07-\x0d][a-z]")
"""What each damaged command begins with; few texts have it."""
ALWAYS = _pattern(RESTS)
WITHIN = _pattern(IN_FORMULAS)
DOLLAR = re.compile(r"(?<!\\)\$")
FORMULA = re.compile(r"[\\=<>+\-*/^_{}()\d]")
NAMED = re.compile(r"\s*[=:(]")
"""What follows a name at the beginning of a line, such as u = 3."""
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def eaten_command(text: str) -> str | None:
    """Return what is left of the first damaged command of LaTeX in a text, or None.
    What may be a word or name counts only within dollars or a subscript.
    """
    if not SUSPECT.search(text):
        return None
    damaged = CONTROL.search(text) or ALWAYS.search(text)
    if damaged:
        return damaged[0]
    dollars = 0  # before the match; if their number is odd, it is within two
    counted_to = 0
    for match in WITHIN.finditer(text):
        dollars += len(DOLLAR.findall(text, counted_to, match.start()))
        counted_to = match.start()
        within_dollars = dollars % 2 == 1 and _in_dollars(text, match)
        if within_dollars or _in_subscript(text, match):
            return match[0]
    return None


def eaten_in_answer(answer: str) -> str | None:
    """Return what is left of the first damaged command in an answer, or None. A short
    answer without words may be a formula as a whole, in which names count too.
    """
    damaged = eaten_command(answer)
    if damaged:
        return damaged
    match = WITHIN.search(answer)
    if match is None or len(answer) > LONGEST_FORMULA:
        return None
    suffix = answer[match.end() :]
    context = f"{answer[: match.start()]} {suffix}"
    is_formula = FORMULA.search(context) and not WORD.search(context)
    begins_line = NAMED.match(suffix) is not None  # `u = 3` behind a line break
    return match[0] if is_formula and not begins_line else None


def _prefix_of(text: str, match: re.Match[str]) -> str:
    """Return what precedes a match, as far as a formula may reach."""
    return text[max(0, match.start() - LONGEST_FORMULA) : match.start()]


def _in_dollars(text: str, match: re.Match[str]) -> bool:
    """Return whether dollars enclose a match, on its two lines."""
    prefix = _prefix_of(text, match)
    suffix = text[match.end() : match.end() + LONGEST_FORMULA]
    return "$" in prefix.rpartition("\n")[2] and "$" in suffix.partition("\n")[0]


def _in_subscript(text: str, match: re.Match[str]) -> bool:
    """Return whether a match is within braces below a sign, such as the limit's."""
    _, brace, within = _prefix_of(text, match).rpartition("_{")
    return bool(brace) and not any(sign in within for sign in "{}\n")
