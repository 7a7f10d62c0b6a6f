"""What is left out, kept and held out of a source, against sets of plain Python."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.tasks.data import survey as under_test
from megarl.tasks.data.contamination import Overlap
from megarl.tasks.data.mappings import mapping_of, read_own
from megarl.tasks.data.survey import chosen, survey

READ = mapping_of("", {"prompt": "q", "answer": "a"})


def write(path: Path, rows: Sequence[dict[str, Any] | str]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def test_reasons_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any] | str] = [
        {"q": "one", "a": "1"},
        {"q": " one ", "a": "1"},
        {"q": "one", "a": "2"},
        {"q": "two", "a": " "},
        {"q": " ", "a": "1"},
        "{",
        {"a": "1"},
        {"q": "big", "a": "x" * (under_test.LARGEST_ANSWER + 1)},
        {"q": "three", "a": 3},
    ]
    found = survey(write(tmp_path / "a.jsonl", rows), READ)
    assert found.left_out.counts == {
        under_test.REPEATED: 1,
        under_test.CONTRADICTED: 1,
        under_test.EMPTY_ANSWER: 1,
        under_test.EMPTY_PROMPT: 1,
        under_test.MALFORMED: 2,
        under_test.LARGE_ANSWER: 1,
    }
    assert [row.prompt for row, _ in chosen(found)] == ["one", "three"]
    assert found.left_out.named()[0] == "2: its prompt was on line 1; leave one out (the same in 3)"


def test_latex_that_json_has_eaten_is_left_out(tmp_path: Path) -> None:
    """`"\\frac"` is a form feed and `rac`, `"\\boxed"` a backspace and `oxed`: valid
    texts, and answers that nobody gives.
    """
    rows = [
        r'{"q": "half", "a": "\frac{1}{2}"}',
        r'{"q": "\boxed{}", "a": "1"}',
        r'{"q": "two\f", "a": "\\frac{4}{2}"}',
    ]
    found = survey(write(tmp_path / "a.jsonl", rows), READ)
    assert [row.answer for row, _ in chosen(found)] == [r"\frac{4}{2}"]
    assert [said.partition(" has ")[2] for said in found.left_out.named()] == [
        r"'\x0crac'; in JSON a command of LaTeX has two backslashes",
        r"'\x08oxed'; in JSON a command of LaTeX has two backslashes",
    ]


def test_what_is_wrong_with_several_rows_is_said_once_and_how_to_say_it(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": n} for n in range(12)] + [{"prompt": "", "answer": 1}]
    with pytest.raises(MegarlError, match="--column prompt=question") as said:
        list(chosen(survey(write(tmp_path / "a.jsonl", rows), read_own)))
    _, first, second = str(said.value).splitlines()
    assert first.endswith("(the same in 2, 3, 4, 5, 6, 7, 8, 9, 10)")
    assert "in a recipe columns: {prompt: question}" in first
    assert "a.jsonl:13: the prompt of" in second


def test_of_a_thousand_repeats_ten_are_named(tmp_path: Path) -> None:
    found = survey(write(tmp_path / "a.jsonl", [{"q": "one", "a": "1"}] * 1001), READ)
    assert found.left_out.counts == {under_test.REPEATED: 1000}
    assert len(found.left_out.first[under_test.REPEATED]) == 10


@given(
    prompts=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    heldout=st.integers(1, 10),
    shuffled=st.randoms(use_true_random=False),
)
def test_splits_are_disjoint_complete_and_do_not_depend_on_the_order(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[int], heldout: int, shuffled: Any
) -> None:
    folder = tmp_path_factory.mktemp("split")
    rows = [{"q": f"prompt {n}", "a": "1"} for n in prompts]
    different = {row["q"] for row in rows}
    source = write(folder / "a.jsonl", rows)
    if heldout >= len(different):
        with pytest.raises(MegarlError, match="leave none to train on"):
            survey(source, READ, heldout)
        return
    split = [
        {row.prompt for row, held in chosen(survey(source, READ, heldout)) if held is side}
        for side in (True, False)
    ]
    assert len(split[0]) == heldout
    assert split[0] | split[1] == different
    assert not split[0] & split[1]
    shuffled.shuffle(rows)
    again = survey(write(folder / "b.jsonl", rows), READ, heldout)
    assert {row.prompt for row, held in chosen(again) if held} == split[0]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=30))
def test_the_first_of_each_prompt_and_id_is_kept(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]
) -> None:
    """Against a plain loop: rows go whose prompt was there, then of those left the ones
    whose id was.
    """
    rows = [{"id": f"i{i}", "prompt": f"p{p}", "answer": "1"} for i, p in pairs]
    by_prompt: dict[str, dict[str, str]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], row)
    by_id: dict[str, dict[str, str]] = {}
    for row in by_prompt.values():
        by_id.setdefault(row["id"], row)
    found = survey(write(tmp_path_factory.mktemp("ids") / "a.jsonl", rows), read_own)
    assert [row.prompt for row, _ in chosen(found)] == [row["prompt"] for row in by_id.values()]
    assert found.left_out.counts.total() == len(rows) - len(by_id)


def test_rows_of_an_evaluation_set_go_and_are_reported(tmp_path: Path) -> None:
    text = "alpha beta gamma delta epsilon zeta eta theta"
    rows = [
        {"q": f"Given {text}, what follows?", "a": "1"},
        {"q": "Something else entirely", "a": "1"},
    ]
    reported = []
    found = survey(
        write(tmp_path / "a.jsonl", rows),
        READ,
        evaluation=Overlap([("eval:3", text)]),
        removed=lambda row, number, hit: reported.append((row.prompt, number, hit)),
    )
    assert [row.prompt for row, _ in chosen(found)] == ["Something else entirely"]
    assert found.left_out.counts == Counter({under_test.CONTAMINATED: 1})
    assert reported == [(rows[0]["q"], 1, ("eval:3", text))]


def test_a_source_of_which_nothing_can_be_used_and_one_that_grows(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"q": "", "a": "1"}, {"a": "2"}])
    for heldout in (0, 1):
        with pytest.raises(
            MegarlError,
            match=(
                r"none of its 2 rows can be used:\n.*a\.jsonl:1: the prompt of .* is empty\n.*no"
                r" column"
            ),
        ):
            list(chosen(survey(source, READ, heldout)))
    found = survey(write(tmp_path / "a.jsonl", [{"q": "one", "a": "1"}]), READ)
    write(tmp_path / "a.jsonl", [{"q": "one", "a": "1"}, {"q": "two", "a": "1"}])
    with pytest.raises(MegarlError, match="grew while it was read"):
        list(chosen(found))


def test_what_the_user_says_is_compared_with_evaluation_sets_and_all_messages_with_each_other(
    tmp_path: Path,
) -> None:
    question = (
        "Find the sum of all integer bases b greater than nine for which seventeen divides ninety"
        " seven"
    )
    system = {"role": "system", "content": "Translate."}
    rows = [
        [system, {"role": "user", "content": f"{question}?"}],
        [system, {"role": "user", "content": "hello"}],
        [{**system, "content": "Repeat."}, {"role": "user", "content": "hello"}],
        [system, {"role": "user", "content": " hello "}],
        "hello",
    ]
    source = write(tmp_path / "a.jsonl", [{"prompt": row, "answer": "1"} for row in rows])
    found = survey(source, read_own, evaluation=Overlap([("test", question)]))
    assert found.left_out.counts == {under_test.CONTAMINATED: 1, under_test.REPEATED: 1}
    assert len({row.id for row, _ in chosen(found)}) == 3
