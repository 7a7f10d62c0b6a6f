"""Laws of the math grader over generated answers of each kind.

The same text is right; another writing of it is right; one changed number, sign, bound
or letter is wrong; and so is a number taken out of it.
"""

import itertools
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.tasks.graders.math import is_equal, readable

EXAMPLES = settings(max_examples=25)
small = st.integers(2, 40)
signed = st.integers(-40, 40).filter(bool)
letters = st.sampled_from("abcnpqxyz")
SQUARE_FREE = st.sampled_from([2, 3, 5, 6, 7, 10, 11, 13, 14, 15])


def boxed(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


def check(gold: str, equal: list[str], different: list[str]) -> None:
    """The gold equals itself and each of `equal`, and none of `different`; it is read,
    not just compared as text.
    """
    assert readable(gold), gold
    for answer in (gold, *equal):
        assert is_equal(boxed(answer), gold), (answer, gold)
        assert is_equal(boxed(gold), answer), (gold, answer)
    for answer in different:
        assert not is_equal(boxed(answer), gold), (answer, gold)
        assert not is_equal(boxed(gold), answer), (gold, answer)


@EXAMPLES
@given(st.integers(-(10**6), 10**6), st.integers(2, 999))
def test_fractions(above: int, below: int) -> None:
    value = Fraction(above, below)
    assume(value.denominator > 1)
    reduced = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    equal = [f"{above}/{below}", rf"\dfrac{{{3 * above}}}{{{3 * below}}}", rf"x = {reduced}"]
    different = [
        str(above),
        rf"\frac{{{above + below}}}{{{below}}}",
        rf"\frac{{{-above}}}{{{below}}}",
        f"{float(value):.3f}1",
    ]
    check(rf"\frac{{{above}}}{{{below}}}", equal, different)


@EXAMPLES
@given(signed, small, SQUARE_FREE)
def test_roots(a: int, b: int, root: int) -> None:
    equal = [
        rf"{a}+\sqrt{{{b * b * root}}}",
        f"{b}√{root} + {a}".replace("+ -", "- "),
        rf"{b}\sqrt{root} - {-a}" if root < 10 else f"{a}+{b}√{root}",
    ]
    different = [
        str(a),
        str(b),
        rf"{b}\sqrt{{{root}}}",
        rf"{a}-{b}\sqrt{{{root}}}",
        rf"{a}+{b}\sqrt{{{root + 1}}}",
        rf"{-a}+{b}\sqrt{{{root}}}",
    ]
    check(rf"{a}+{b}\sqrt{{{root}}}", equal, [answer for answer in different if "--" not in answer])


@EXAMPLES
@given(signed, signed, letters)
def test_polynomials(a: int, b: int, x: str) -> None:
    factors = f"({x}-{a})({x}-{b})".replace("--", "+")
    middle = -(a + b)
    last = a * b
    expanded = f"{x}^2{middle:+d}{x}{last:+d}"
    other = "w" if x != "w" else "v"
    different = [
        f"{x}^2{middle:+d}{x}{last + 1:+d}",
        f"{x}^2{middle + 1:+d}{x}{last:+d}",
        expanded.replace(x, other),
        str(last),
        f"{x}^3{middle:+d}{x}{last:+d}",
    ]
    check(
        expanded,
        [factors, f"{last}{middle:+d}{x}+{x}^{{2}}", f"{x}²{middle:+d}·{x}{last:+d}"],
        different,
    )


@EXAMPLES
@given(st.lists(signed, min_size=2, max_size=4, unique=True))
def test_tuples_and_sets(numbers: list[int]) -> None:
    words = [str(number) for number in numbers]
    changed = [str(numbers[0] + 100), *words[1:]]
    joined = ", ".join(words)
    backwards = ", ".join(reversed(words))
    check(
        f"({joined})",
        [f"({','.join(words)})"],
        [f"({backwards})", f"({', '.join(changed)})", words[0], rf"\{{{joined}\}}"],
    )
    check(
        rf"\{{{joined}\}}",
        [backwards, rf"\{{{backwards}\}}"],
        [f"({joined})", ", ".join(changed), joined + ", 99", words[-1]],
    )


@EXAMPLES
@given(st.integers(-30, 30), st.integers(1, 30), st.sampled_from(["()", "[]", "(]", "[)"]), letters)
def test_intervals(low: int, width: int, brackets: str, x: str) -> None:
    high = low + width
    signs = {"(": "<", "[": r"\le", ")": "<", "]": r"\leq"}
    gold = f"{brackets[0]}{low}, {high}{brackets[1]}"
    chain = f"{low} {signs[brackets[0]]} {x} {signs[brackets[1]]} {high}"
    others = [f"{b[0]}{low}, {high}{b[1]}" for b in ("()", "[]", "(]", "[)") if b != brackets]
    check(
        gold,
        [chain, rf"{x} \in {gold}"],
        [*others, f"{brackets[0]}{low}, {high + 1}{brackets[1]}", str(high)],
    )


@EXAMPLES
@given(st.integers(-30, 30), st.integers(1, 30), letters)
def test_unions(low: int, width: int, x: str) -> None:
    high = low + width
    gold = rf"(-\infty, {low}) \cup [{high}, \infty)"
    equal = [
        rf"[{high}, ∞) ∪ (−∞, {low})",
        rf"{x} < {low} \text{{ or }} {x} \ge {high}",
        rf"\mathbb{{R}} \setminus [{low}, {high})",
    ]
    different = [
        rf"(-\infty, {low}] \cup [{high}, \infty)",
        rf"(-\infty, {low - 1}) \cup [{high}, \infty)",
        f"[{low}, {high})",
        rf"(-\infty, {low})",
    ]
    check(gold, equal, different)


@EXAMPLES
@given(signed, signed, st.sampled_from(["pmatrix", "bmatrix"]))
def test_matrices(a: int, b: int, kind: str) -> None:
    assume(a != b)
    gold = f"\\begin{{{kind}}}\n{a} & {b} \\\\\n0 & 1\n\\end{{{kind}}}"
    equal = [
        rf"\begin{{bmatrix}}{a}&{b}\\[4pt]0&1\end{{bmatrix}}",
        rf"\left(\begin{{array}}{{cc}}{a}&{b}\\0&1\end{{array}}\right)",
    ]
    different = [
        rf"\begin{{pmatrix}}{b}&{a}\\0&1\end{{pmatrix}}",
        rf"\begin{{pmatrix}}{a}&{b}\\1&1\end{{pmatrix}}",
        str(a),
        "1",
        f"({a}, {b}, 0, 1)",
    ]
    check(gold, equal, different)


@EXAMPLES
@given(signed, signed)
def test_named_values(a: int, b: int) -> None:
    assume(a != b)
    gold = f"x={a}, y={b}"
    equal = [
        f"y = {b}, x = {a}",
        f"(x, y) = ({a}, {b})",
        rf"x = {a} \text{{ and }} y = {b}",
        f"({a}, {b})",
    ]
    check(
        gold,
        equal,
        [f"x={b}, y={a}", f"({b}, {a})", f"x={a}", str(a), f"x={a}, z={b}", f"{a}, {b}"],
    )


@EXAMPLES
@given(signed, st.integers(2, 40), signed)
def test_the_question_s_equation_is_no_answer(root: int, factor: int, term: int) -> None:
    equation = f"{factor}x{term:+d}={factor * root + term}"
    prompt = f"Solve ${equation}$."
    for answer in (str(root), f"x={root}"):
        assert is_equal(boxed(answer), f"x={root}", prompt)
    for answer in (equation, f"{factor}x={factor * root}", f"x{-root:+d}=0", f"x={root + 1}"):
        assert not is_equal(boxed(answer), f"x={root}", prompt), answer


@EXAMPLES
@given(small, small)
def test_a_sum_that_is_asked_for_has_to_be_computed(a: int, b: int) -> None:
    prompt = f"What is {a} + {b}?"
    gold = str(a + b)
    for answer in (gold, f"{a}+{b}={gold}"):
        assert is_equal(boxed(answer), gold, prompt)
    for answer in (f"{a}+{b}", f"{b}+{a}", f"{a + 1}+{b - 1}", f"{2 * (a + b)}/2", str(a + b + 1)):
        assert not is_equal(boxed(answer), gold, prompt), answer


@EXAMPLES
@given(small, SQUARE_FREE, st.integers(1, 4))
def test_roundings(a: int, root: int, decimals: int) -> None:
    exact = rf"{a}\sqrt{{{root}}}"
    value = a * root**0.5
    rounded = f"{value:.{decimals}f}"
    far = f"{value + 3 * 10**-decimals:.{decimals}f}"
    assert is_equal(boxed(rf"{exact} \approx {rounded}"), exact)
    assert not is_equal(boxed(rf"{exact} \approx {far}"), exact)
    assert not is_equal(boxed(rf"{exact} \approx {far}"), far)
    assert not is_equal(boxed(rf"{a} \approx {a + root}"), str(a))


@EXAMPLES
@given(
    small,
    st.sampled_from(
        [
            r"2\cdot#",
            r"#\sqrt{3}",
            "#^2",
            "-#",
            r"\frac{#}{2}",
            "3+#",
            "#!",
            "#x",
            "x>#",
            "1#",
            "#0",
        ]
    ),
)
def test_a_box_is_read_with_its_formula(number: int, around: str) -> None:
    box = rf"\boxed{{{number}}}"
    assert is_equal(f"$x = {box}$", str(number))
    assert not is_equal(f"${around.replace('#', box)}$", str(number))


@EXAMPLES
@given(small, small, st.sampled_from(["<", r"\le", r"\ge", ">"]))
def test_inequalities(a: int, b: int, sign: str) -> None:
    turned = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[sign]
    gold = rf"x {sign} \frac{{{a}}}{{{b}}}"
    equal = [rf"\frac{{{a}}}{{{b}}} {turned} x"]
    different = [
        rf"x {turned} \frac{{{a}}}{{{b}}}",
        rf"y {sign} \frac{{{a}}}{{{b}}}",
        rf"x {sign} \frac{{{a + 1}}}{{{b}}}",
        rf"x = \frac{{{a}}}{{{b}}}",
        str(a),
    ]
    check(gold, equal, different)
    assert not is_equal(boxed(f"{b}x {sign} {a}"), gold)


@EXAMPLES
@given(signed, signed, letters)
def test_equations(a: int, b: int, x: str) -> None:
    assume(a != b and x != "y")
    gold = f"y = {a}{x}{b:+d}"
    check(
        gold,
        [f"{a}{x}{b:+d} = y", f"2y = {2 * a}{x}{2 * b:+d}"],
        [f"y = {b}{x}{a:+d}", f"y = {a}{x}{b + 1:+d}", str(b), f"z = {a}{x}{b:+d}", str(a)],
    )


@EXAMPLES
@given(small, st.sampled_from(["cm", "kg", "miles", "hours", "dollars", "degrees"]))
def test_units(a: int, unit: str) -> None:
    other = "minutes" if unit != "minutes" else "hours"
    gold = rf"{a} \text{{ {unit}}}"
    check(
        gold,
        [str(a), f"{a} {unit}", rf"{a}\,\mathrm{{{unit}}}"],
        [rf"{a + 1} \text{{ {unit}}}", rf"{a} \text{{ {other}}}", f"{a}x"],
    )


@EXAMPLES
@given(small, st.sampled_from("cdghlmost"))
def test_letters_are_no_units_in_products(a: int, letter: str) -> None:
    check(
        f"{a}{letter}",
        [rf"{letter} \cdot {a}"],
        [str(a), f"{a + 1}{letter}", f"{a}{letter}^2", letter],
    )
    check(f"w+{a}{letter}", [f"{a}{letter} + w"], [f"w+{a}", "w", f"w-{a}{letter}"])


@EXAMPLES
@given(signed, small)
def test_complex_numbers(a: int, b: int) -> None:
    check(
        f"{a}+{b}i",
        [f"{b}i{a:+d}", rf"{a}+{b}\mathrm{{i}}"],
        [f"{a}-{b}i", f"{a}+{b}", str(a), f"{b}i", f"{a}+{b + 1}i"],
    )


@EXAMPLES
@given(st.integers(1, 9), st.integers(-30, 30))
def test_powers_of_ten(a: int, exponent: int) -> None:
    gold = f"{a}e{exponent}"
    number = str(a * 10**exponent) if exponent >= 0 else f"0.{'0' * (-exponent - 1)}{a}"
    check(
        gold,
        [rf"{a} \times 10^{{{exponent}}}", number],
        [f"{a}e{exponent + 1}", f"{a + 1}e{exponent}", f"{a}e", rf"{a} \times 10"][
            : 3 if exponent == 1 else 4
        ],
    )


@EXAMPLES
@given(st.sampled_from("ABCDE"), small)
def test_labels(letter: str, a: int) -> None:
    other = "A" if letter != "A" else "B"
    gold = rf"\textbf{{({letter})}}\ {a}"
    check(
        gold,
        [letter, str(a), f"({letter})", rf"\text{{({letter})}} {a}"],
        [other, str(a + 1), rf"\textbf{{({other})}}\ {a}"],
    )


@EXAMPLES
@given(
    st.lists(st.integers(1, 99), min_size=2, max_size=2, unique=True),
    st.sampled_from(["+", "-", r"\times", r"\cdot", "*"]),
)
def test_what_has_still_to_be_computed_is_no_answer_in_prose(numbers: list[int], sign: str) -> None:
    a, b = numbers
    value = {"+": a + b, "-": a - b}.get(sign, a * b)
    prose = [
        f"To find {a} {sign} {b}, we need",
        f"{a} {sign} {b} is indeed equal to",
        f"We must compute ${a} {sign} {b}$ first.",
    ]
    assert not any(is_equal(answer, str(value)) for answer in prose)
    question = f"What is {a} {sign} {b}?"
    restated = [f"{a} {sign} {b}", boxed(f"{a} {sign} {b}"), f"The answer is {a} {sign} {b}."]
    assert not any(is_equal(answer, str(value), question) for answer in restated)
    assert all(
        is_equal(answer, str(value), question)
        for answer in (str(value), f"{a} {sign} {b} = {value}")
    )


@settings(max_examples=100)
@given(
    st.text(alphabet="0123456789xyi+-*/^_=<>()[]{}|\\.,;:!%$ \nπ√²½∞", max_size=40),
    st.sampled_from(["7", "x", "(1, 2)"]),
)
def test_any_text_gets_a_verdict(text: str, gold: str) -> None:
    """And an expected text that cannot be read equals itself, whatever it is."""
    assert is_equal(boxed(text), gold) in (True, False)
    assert is_equal(text, gold) in (True, False)
    assert readable(text) in (True, False)


NESTED = [
    ("(", ")"),
    (r"\sqrt{", "}"),
    (r"\frac{1}{", "}"),
    ("x^{", "}"),
    ("|", "|"),
    (r"\{", r"\}"),
    (r"\boxed{", "}"),
    ("-", ""),
]


def test_deep_and_long_answers_are_bounded() -> None:
    for (opening, closing), depth in itertools.product(NESTED, (10, 100, 3000)):
        answer = opening * depth + "8" + closing * depth
        assert is_equal(boxed(answer), "7") is False
        assert is_equal(boxed("7"), answer) is False
