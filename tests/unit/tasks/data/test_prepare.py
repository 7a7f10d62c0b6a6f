"""`megarl data prepare` and `inspect` from the command line: files that load again,
reports that add up.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl import cli
from megarl.tasks.data import arithmetic_models
from megarl.tasks.data.mappings import read_own
from megarl.tasks.data.prepare import FORMATS
from megarl.tasks.data.sources import stream
from megarl.tasks.data.survey import chosen, survey
from megarl.tools.inspection import data as data_inspection
from megarl.tools.inspection.data import kind_of_answer
from tests import make

EVALUATION = (
    "Find the sum of all integer bases b greater than nine for which seventeen divides ninety seven"
)
ROWS = [
    *(
        {"problem": f"How much is {n} and {n}?", "answer": str(2 * n), "difficulty": f"{n % 8}/8"}
        for n in range(20)
    ),
    {"problem": "How much is 3 and 3?", "answer": "6", "difficulty": "1/8"},
    {"problem": "How much is 4 and 4?", "answer": "9", "difficulty": "1/8"},
    {"problem": "And this?", "answer": "", "difficulty": "1/8"},
    {"problem": f"{EVALUATION}.", "answer": "70", "difficulty": "1/8"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "polaris.parquet")
    (tmp_path / "aime.jsonl").write_text(json.dumps({"problem": EVALUATION}))
    return tmp_path


def prepare(source: Path, *more: str) -> Any:
    out = source / "out"
    words = [
        "data",
        "prepare",
        str(source / "polaris.parquet"),
        str(out),
        "--mapping",
        "polaris",
        "--heldout",
        "5",
    ]
    return cli.main([*words, "--against", str(source / "aime.jsonl"), *more]), out


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_prepared_is_whole_clean_split_and_reported(
    source: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = prepare(source, "--format", form)
    assert status == 0
    sides: list[list[Any]] = [
        [row for _, row in stream(str(out / f"{side}.{form}"))] for side in ("train", "heldout")
    ]
    assert [len(side) for side in sides] == [15, 5]
    assert {row["prompt"] for side in sides for row in side} == {
        row["problem"] for row in ROWS[:20]
    }
    again = [survey(str(out / f"{side}.{form}"), read_own) for side in ("train", "heldout")]
    assert [sum(1 for _ in chosen(one)) for one in again] == [15, 5]
    assert not any(one.left_out.counts for one in again)
    assert {row["difficulty"] for side in sides for row in side} == set(range(1, 9))
    report = json.loads((out / "report.json").read_text())
    assert report["left_out"] == {
        "repeated prompt": 1,
        "repeated prompt with another answer": 1,
        "empty answer": 1,
        "of an evaluation set": 1,
    }
    assert (
        report["train"] + report["heldout"] + sum(report["left_out"].values())
        == report["rows"]
        == len(ROWS)
    )
    (removed,) = [json.loads(line) for line in (out / "removed.jsonl").read_text().splitlines()]
    assert removed["evaluation"] == f"{source / 'aime.jsonl'}:1"
    assert removed["shared"] in EVALUATION.lower()
    assert "15 to train on, 5 held out, of 24 rows" in capsys.readouterr().out


@pytest.mark.parametrize("form", FORMATS)
def test_conversations_and_lists_of_answers_are_written_as_they_are_read(
    tmp_path: Path, form: str
) -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "2?"}
    rows: list[dict[str, Any]] = [
        {"prompt": "1?", "answer": "1", "id": "a"},
        {"prompt": [system, user], "answer": ["2", "2.0"], "id": "b"},
    ]
    make.write_rows(tmp_path / "x.jsonl", rows)
    out = tmp_path / "out"
    assert cli.main(["data", "prepare", str(tmp_path / "x.jsonl"), str(out), "--format", form]) == 0
    first, again = (
        [row for row, _ in chosen(survey(str(source), read_own))]
        for source in (tmp_path / "x.jsonl", out / f"train.{form}")
    )
    assert first == again
    assert (first[1].prompt, first[1].messages, first[1].answers) == (
        "2?",
        (system, user),
        ("2", "2.0"),
    )


def test_inspect_tells_lists_from_their_json_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows: list[dict[str, Any]] = [
        {"prompt": "1?", "answer": ["1", "2"]},
        {"prompt": "2?", "answer": '["1", "2"]'},
    ]
    make.write_rows(tmp_path / "x.jsonl", rows)
    monkeypatch.setattr(data_inspection, "unreadable", lambda answers: frozenset())
    assert cli.main(["data", "inspect", str(tmp_path / "x.jsonl")]) == 0
    shown = capsys.readouterr().out
    for words in ("several accepted", "JSON text of a list: each is one answer", "→ 1 or 2"):
        assert words in shown


def test_it_is_the_same_again_and_leaves_nothing_of_another_format(source: Path) -> None:
    _, out = prepare(source)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    prepare(source, "--format", "arrow")
    assert sorted(path.name for path in out.iterdir()) == [
        "heldout.arrow",
        "removed.jsonl",
        "report.json",
        "train.arrow",
    ]
    prepare(source)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--mapping", "gsm9k"], "--mapping: 'gsm9k' is not one of polaris"),
        (["--column", "promt=x"], "--column: write FIELD=COLUMN, with a field of prompt, answer"),
        (["--heldout", "20"], "20 rows to hold out of 20 that can be used leave none"),
        (["--heldout", "-1"], "'--heldout': Input should be greater than or equal to 0"),
        (["--against", "none.jsonl"], "'none.jsonl' is not a file"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_leaves_no_files(
    source: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    status, out = prepare(source, *more)
    assert status == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_source_is_not_written_over(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = prepare(source)
    for name in ("train.jsonl", "removed.jsonl"):
        before = (out / name).read_text()
        assert cli.main(["data", "prepare", str(out / name), str(out)]) == 2
        assert "would be overwritten" in capsys.readouterr().err
        assert (out / name).read_text() == before


def test_a_source_is_shown(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            [
                "data",
                "inspect",
                str(source / "polaris.parquet"),
                "--mapping",
                "polaris",
                "--samples",
                "2",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    for words in (
        "24 rows, 3 left out",
        "repeated prompt with another answer",
        "21 rows",
        "whole number",
        "difficulty",
        "→",
    ):
        assert words in shown


def test_a_terminal_does_not_obey_a_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is a name in brackets taken for rich's markup."""
    evil = {"id": "\x1b[2J", "prompt": "\x9b2J", "answer": "\x1b]0;x\x07"}
    bad = {"id": "2", "prompt": "[/b]"}
    make.write_rows(tmp_path / "part[a].jsonl", (evil, bad))
    assert cli.main(["data", "inspect", str(tmp_path / "part[a].jsonl")]) == 0
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}
    for words in ("part[a].jsonl: 2 rows, 1 left out", r"\x1b[2J", r"\x9b2J", r"→ \x1b]0;x\x07"):
        assert words in shown.replace("\n", "")


def test_a_recipe_is_shown_as_its_run_would_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    rows = [{"q": f"{n}+1=", "a": n + 1} for n in range(12)]
    made = arithmetic_models.character_tokenizer()
    made.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    made.save_pretrained(model)
    make.write_rows(tmp_path / "sums.jsonl", rows)
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "3+1="}))
    task = {
        "train": str(tmp_path / "sums.jsonl"),
        "heldout": 4,
        "template": "chat",
        "columns": {"prompt": "q", "answer": "a"},
    }
    recipe = {
        "model": {"path": str(model)},
        "data": {"tasks": {"s": task}, "decontaminate": [str(tmp_path / "test.jsonl")]},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(recipe))
    words = [
        "data",
        "inspect",
        str(tmp_path / "mine.yaml"),
        "--samples",
        "9",
        "length.prompt_tokens=6",
    ]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "7 rows · s.train" in shown
    assert "4 rows · s.heldout" in shown
    assert "of an evaluation set" in shown
    assert sum(f"<{n}+1=>" in shown for n in range(12)) == 11
    assert "longer than length.prompt_tokens=6: left out" in shown


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("-12", "whole number"),
        ("$3.5$", "decimal"),
        ("1/2", "fraction"),
        (r"\frac{3}{4}", "fraction"),
        ("(B)", "choice"),
        (r"\sqrt{2}", "expression"),
        ("x^2+1", "expression"),
        ("[1, 2)", "list or interval"),
        ("1, 2", "list or interval"),
        ("Paris", "word"),
        ("two words here", "text"),
        ('{"tests": [{"input": "", "output": "1"}]}', "unit tests"),
        ("{broken", "expression"),
    ],
)
def test_kinds_of_answers(answer: str, kind: str) -> None:
    assert kind_of_answer(answer) == kind
