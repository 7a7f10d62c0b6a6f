"""Shared n-grams, against a search by brute force, and the limits that the module
states.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.tasks.data.contamination import COMMON, NGRAM, SHORTEST, Hit, Overlap, overlap_with
from megarl.tasks.data.rows import words

LETTERS = st.lists(st.sampled_from("abc"), max_size=30)


@given(
    evaluation=st.lists(st.sampled_from("ab"), min_size=SHORTEST, max_size=20),
    text=st.lists(st.sampled_from("ab"), max_size=40),
)
def test_a_text_is_found_exactly_if_it_shares_a_run_of_words(
    evaluation: list[str], text: list[str]
) -> None:
    length = min(len(evaluation), NGRAM)
    runs = {tuple(evaluation[n : n + length]) for n in range(len(evaluation) - length + 1)}
    shares = any(tuple(text[n : n + length]) in runs for n in range(len(text)))
    hit = Overlap([("it", " ".join(evaluation))]).find(", ".join(text).upper())
    assert (hit is not None) == shares
    if hit:
        assert tuple(hit.shared.split()) in runs


def test_punctuation_and_case_do_not_hide_a_prompt() -> None:
    question = (
        r"Let $ABCD$ be a tetrahedron with $AB=CD=\sqrt{41}$, $AC=BD=\sqrt{80}$, and"
        r" $BC=AD=\sqrt{89}$. Find it."
    )
    hit = Overlap([("aime", question)]).find(
        f"Problem 7.  {question.upper().replace('$', ' $ ')} Give an integer."
    )
    assert hit is not None
    assert hit.evaluation == "aime"


def test_short_texts_count_only_whole_and_with_their_signs() -> None:
    index = Overlap([("sum", "27 + 58 =")])
    assert index.find(" 27 + 58  =") == Hit("sum", "27 + 58 =")
    assert index.find("27 - 58 =") is None
    assert index.find("What is 27 + 58 = ?") is None


def test_an_instruction_that_all_evaluation_texts_have_is_not_looked_for() -> None:
    instruction = (
        "Solve the following math problem step by step and put the answer on a line of its own"
    )
    bodies = [" ".join(f"w{i}x{n}" for n in range(NGRAM)) for i in range(COMMON + 1)]
    index = Overlap((f"e{i}", f"{instruction} {body}") for i, body in enumerate(bodies))
    assert index.find(f"{instruction} and another problem") is None
    hit = index.find(bodies[3])
    assert hit is not None
    assert hit.evaluation == "e3"
    few = Overlap((f"e{i}", f"{instruction} {body}") for i, body in enumerate(bodies[:COMMON]))
    assert few.find(f"{instruction} and another problem") is not None


def test_an_evaluation_set_that_repeats_its_problems_is_still_looked_for() -> None:
    problem = (
        "Find the number of ordered pairs of positive integers below one hundred whose product is a"
        " perfect square"
    )
    copies = [("e0", problem), *((f"e{n}", f"{problem.upper()}.") for n in range(1, 3 * COMMON))]
    hit = Overlap(copies).find(f"Now: {problem}")
    assert hit is not None
    assert hit.evaluation == "e0"
    assert len(Overlap(copies)) == 3 * COMMON


def test_chinese_has_a_word_a_character() -> None:
    assert words("若x_1=2，求值") == ["若", "x", "1", "2", "求", "值"]


def test_evaluation_files_are_read_by_the_columns_of_their_schemas(tmp_path: Path) -> None:
    text = "one two three four five six seven eight"
    rows = {
        "prompt": [{"role": "user", "content": text}],
        "problem": text,
        "question": text,
        "question_content": text,
        "text": text,
    }
    for name, value in rows.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({name: value}))
        index = overlap_with([str(file)])
        assert index is not None
        assert len(index) == 1
        assert index.find(f"so {text} nine") == Hit(f"{file}:1", text)
    file.write_text('{"q": 1}')
    with pytest.raises(
        MegarlError,
        match=r"text\.jsonl:1: no text to decontaminate against in a column prompt, problem",
    ):
        overlap_with([str(file)])
    file.write_text("")
    with pytest.raises(MegarlError, match="no rows in it"):
        overlap_with([str(file)])
    assert overlap_with([]) is None
