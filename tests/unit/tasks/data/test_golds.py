"""Expected answers that the grader of mathematics cannot read: counted, kept, left out
or refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.checks import inputs
from megarl.cli import main
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, from_tree
from megarl.tasks.data import golds
from megarl.tasks.data.prompts import load_tasks
from tests import make
from tests.unit.tasks.environments.texts import byte_tokenizer

ROWS = [("a", "x=1"), ("b", "?1"), ("c", "3"), ("d", ["?2", "4"]), ("e", ["?3", "?4"]), ("f", "?1")]


@pytest.fixture(autouse=True, scope="module")
def stand_in() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golds, "READER", "tests.unit.tasks.data.readers:reads")
        patch.setattr(golds, "LIMIT_S", 0.3)
        patch.setattr(golds, "readability", {})
        yield


def recipe(folder: Path, unreadable: str, **task: Any) -> Recipe:
    for name in ("train", "heldout"):
        rows = [
            {"prompt": f"{name} {prompt}", "answer": answer, "id": prompt}
            for prompt, answer in ROWS
        ]
        make.write_rows(folder / f"{name}.jsonl", rows)
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
    return from_tree({"data": {"tasks": {"t": {**files, **task}}, "unreadable": unreadable}})


@pytest.mark.parametrize(("policy", "train"), [("text", "abcdef"), ("drop", "acd"), ("refuse", "")])
def test_they_are_counted_and_kept_left_out_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, train: str
) -> None:
    """Held-out prompts stay: without them the score would be another one."""
    made = recipe(tmp_path, policy)
    tasks = load_tasks(made, byte_tokenizer(tmp_path / "model"))
    if policy == "refuse":
        told = (
            r"t\.train: .* cannot read 3 of 6 answers .* such as 'b: \?1', 'e: \?3 or \?4', 'f:"
            r" \?1'; correct them"
        )
        with pytest.raises(MegarlError, match=told):
            inputs.check_answers(made, tasks, {})
        return
    inputs.check_answers(made, tasks, {})
    assert [prompt.id for prompt in tasks["t"].train] == list(train)
    assert [prompt.id for prompt in tasks["t"].heldout] == list("abcdef")
    assert "t.train: `grader: math` cannot read 3 of 6 answers" in caplog.text
    assert "t.heldout: `grader: math` cannot read 3 of 6 answers" in caplog.text


@pytest.mark.parametrize("policy", ["drop", "refuse"])
def test_other_graders_read_any_answer(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = recipe(tmp_path, policy, grader="exact")
    tasks = load_tasks(made, byte_tokenizer(tmp_path / "model"))
    inputs.check_answers(made, tasks, {})
    assert len(tasks["t"].train) == len(ROWS)
    assert "cannot read" not in caplog.text


def test_a_hostile_answer_ends_or_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("hangs",), ("dies",), ("memory",), ("x^2",), ("1/2",), ("x?",)]
    assert golds.unreadable(rows) == {("hangs",), ("dies",), ("memory",), ("x?",)}
    monkeypatch.setattr(golds, "MOST_HOSTILE", 0)
    with pytest.raises(
        MegarlError, match=r"more than 0 answers .* take over 0\.3 s; correct them:\n'dies 2'$"
    ):
        golds.unreadable([("dies 2",)])


def test_processes_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golds, "READER", "tests.unit.tasks.data.readers:none")
    with pytest.raises(
        MegarlError, match=r"answers cannot be read: processes of the grader .* failed 2 times"
    ):
        golds.unreadable([("y^2",)])


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("12", True),
        ("-3.5", True),
        ("1/2", True),
        (r"\frac{3}{4}", True),
        ("1/0", False),
        (r"\frac{3}{4", False),
        ("2x", False),
    ],
)
def test_plain_numbers_are_not_asked_for(answer: str, plain: bool) -> None:
    assert golds.is_plain((answer,)) is plain


def test_inspect_says_how_many_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    recipe(tmp_path, "text")
    assert main(["data", "inspect", str(tmp_path / "train.jsonl")]) == 0
    assert (
        "`grader: math` cannot read 3 of 6 answers as a whole, such as '?1', '?3 or ?4'"
        in capsys.readouterr().out
    )
