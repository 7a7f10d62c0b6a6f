"""Text in one spelling: unicode signs become LaTeX commands, and what only lays text
out goes.

√2 · x² ≤ ½     ─►   sqrt 2 \\cdot x^{2} \\leq \\frac{1}{2}
$\\left(1,2\\right)$   ─►   (1,2), after the tokens have dropped \\left and \\right
"""

import re
import unicodedata

SIGNS = {
    "π": r"\pi",
    "∞": r"\infty",
    "≤": r"\leq",
    "≥": r"\geq",
    "⩽": r"\leq",
    "⩾": r"\geq",
    "≠": r"\neq",
    "±": r"\pm",
    "∓": r"\mp",
    "×": r"\times",
    "·": r"\cdot",
    "⋅": r"\cdot",
    "∙": r"\cdot",
    "•": r"\cdot",
    "÷": r"\div",
    "∪": r"\cup",
    "∩": r"\cap",
    "∈": r"\in",
    "∉": r"\notin",
    "∅": r"\emptyset",
    "∖": r"\setminus",
    "→": r"\to",
    "⇒": r"\implies",
    "≡": r"\equiv",
    "≈": r"\approx",
    "°": r"\degree",
    "º": r"\degree",
    "⟨": r"\langle",
    "⟩": r"\rangle",
    "〈": r"\langle",
    "〉": r"\rangle",
    "⌊": r"\lfloor",
    "⌋": r"\rfloor",
    "⌈": r"\lceil",
    "⌉": r"\rceil",
    "‖": r"\|",
    "∣": "|",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "∑": r"\sum",
    "∏": r"\prod",
    "∫": r"\int",
    "…": r"\ldots",
    "⋯": r"\ldots",
    "∠": r"\angle",
    "△": r"\triangle",
    "⊂": r"\subset",
    "⊆": r"\subseteq",
    "∧": r"\land",
    "∨": r"\lor",
    "∀": r"\forall",
    "′": "'",
    "’": "'",
    "√": "sqrt",
    "∛": "cbrt",
    "⊥": r"\perp",
    "∥": r"\parallel",
    "¬": r"\neg",
    "∂": r"\partial",
    "∇": r"\nabla",
    "ℓ": r"\ell",
    "↦": r"\mapsto",
    "↔": r"\leftrightarrow",
    "⇔": r"\iff",
    "∘": r"\degree",
}
GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "varepsilon",
    "ϵ": "epsilon",
    "ζ": "zeta",
    "η": "eta",
    "θ": "theta",
    "ι": "iota",
    "κ": "kappa",
    "λ": "lambda",
    "μ": "mu",
    "µ": "mu",
    "ν": "nu",
    "ξ": "xi",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "φ": "varphi",
    "ϕ": "phi",
    "χ": "chi",
    "ψ": "psi",
    "ω": "omega",
    "Γ": "Gamma",
    "Δ": "Delta",
    "∆": "Delta",
    "Θ": "Theta",
    "Λ": "Lambda",
    "Ξ": "Xi",
    "Π": "Pi",
    "Σ": "Sigma",
    "Φ": "Phi",
    "Ψ": "Psi",
    "Ω": "Omega",
}
CHARACTERS = {
    **{sign: f" {command} " for sign, command in SIGNS.items()},
    **{letter: f" \\{name} " for letter, name in GREEK.items()},
    **dict.fromkeys("−–—‒―﹣", "-"),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("、", ","),
    **dict.fromkeys("。", "."),
    **dict.fromkeys("“”„", '"'),
    **dict.fromkeys(
        "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "
    ),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062\u2063", ""),
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
}
UNICODE = str.maketrans(CHARACTERS)
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵏᵐᵃᵇ", "0123456789+-=()nixykmab", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢₓₖₘₐⱼ", "0123456789+-=()nixkmaj", strict=True))
RAISED_RUN = re.compile(f"[{''.join(RAISED)}]+")
LOWERED_RUN = re.compile(f"[{''.join(LOWERED)}]+")
VULGAR = re.compile("[¼-¾⅐-⅞↉]")

BREAK_WITH_SPACE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]")
"""A line break with a distance, `\\\\[4pt]`."""
DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
DEGREE = re.compile(
    r"\^\s*(?:\{\s*(?:\\circ|\\degree)\s*\}|\\circ(?![A-Za-z])|\\degree(?![A-Za-z]))"
)
PRIME = re.compile(r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|\\prime(?![A-Za-z]))")
WITH_ARGUMENT = re.compile(
    r"\\(?:hspace|vspace|phantom|hphantom|vphantom|label|tag|color|hskip|kern)\*?\s*\{[^{}]*\}"
    r"|\\(?:hskip|kern)\s*-?[\d.]+\s*[a-z]{2}"
)
COLOURED = re.compile(r"\\textcolor\s*\{[^{}]*\}")
ARRAY = re.compile(r"\\begin\s*\{(array|tabular)\}\s*\{[^{}]*\}")
TIMES = re.compile(r"(?<=\d) x (?=\d)")
"""A multiplication sign in plain text."""
CURRENCY_MARK = re.compile(r"\$(?=\s*\.?\d)")


def plain(text: str) -> str:
    """Return the text with unicode signs as LaTeX, and without what only lays it
    out.
    """
    if not text.isascii():
        text = _without_unicode(text)
    text = TIMES.sub(r" \\times ", text.replace("{:}", ":"))
    text = BREAK_WITH_SPACE.sub(r"\\\\ ", text)
    text = DELIMITERS.sub(" ", text)
    text = _without_dollars(text)
    if "^" in text:
        text = DEGREE.sub(r"\\degree ", text)
        text = PRIME.sub("'", text)
    text = WITH_ARGUMENT.sub(" ", text)
    text = COLOURED.sub(" ", text)
    text = ARRAY.sub(r"\\begin{\1}", text)
    return without_emphasis(text)


def without_emphasis(text: str) -> str:
    """Return the text without white space and Markdown's marks around it."""
    stripped = text.strip()
    for mark in ("***", "**", "__", "`", "*", "_"):
        if len(stripped) > 2 * len(mark) and stripped.startswith(mark):
            content = stripped[len(mark) :].rstrip(" .")
            if content.endswith(mark):
                stripped = content[: -len(mark)].strip()
    return stripped


def _without_unicode(text: str) -> str:
    """Return the text with raised and lowered digits, fractions such as ½ and other
    signs in LaTeX; letters of other scripts stay.
    """
    text = RAISED_RUN.sub(lambda run: _script("^", run[0], RAISED), text)
    text = LOWERED_RUN.sub(lambda run: _script("_", run[0], LOWERED), text)
    text = VULGAR.sub(_fraction, text)
    text = text.translate(UNICODE)
    return unicodedata.normalize("NFC", text)


def _script(mark: str, run: str, characters: dict[str, str]) -> str:
    """Return a run of raised or lowered characters behind their mark: ² as `^{2}`."""
    inside = "".join(characters[character] for character in run)
    return f"{mark}{{{inside}}}"


def _fraction(sign: re.Match[str]) -> str:
    """Return ½ as `\\frac{1}{2}`. Its normal form has U+2044 for a bar."""
    above, _, below = unicodedata.normalize("NFKC", sign[0]).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _without_dollars(text: str) -> str:
    """Return the text without dollar signs around formulas. If their number is odd, one
    before a number is a currency, and stays as `\\$`.
    """
    marks = text.replace(r"\$", "").count("$")
    if not marks:
        return text
    if marks % 2 == 0:
        return re.sub(r"(?<!\\)\$", " ", text)
    only_currency = re.sub(r"(?<!\\)\$(?!\s*\.?\d)", " ", text)
    return CURRENCY_MARK.sub(r"\\$", only_currency)
