"""Rows from files of every kind, written by `datasets` itself, and hub names taken
apart.
"""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.core.base.errors import MegarlError
from megarl.tasks.data import sources
from megarl.tasks.data.rows import UnfitError
from megarl.tasks.data.sources import Unreadable, stream

ROWS = [{"problem": f"What is {n}?", "nested": {"answer": str(n)}} for n in range(5)]


def test_every_kind_of_file_has_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.json", "a.parquet", "saved/*.arrow"):
        source = str(tmp_path / name)
        assert sources.is_source(source)
        assert sources.problem(source) is None
        assert list(stream(source)) == list(enumerate(ROWS, 1)), name


def test_several_files_of_a_pattern_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, rows in (("b", ROWS[3:]), ("a", ROWS[:3])):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    assert [row for _, row in stream(str(tmp_path / "*.parquet"))] == ROWS


def test_lines_of_jsonl_keep_their_numbers_and_bad_ones_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n\n[1]\n{"a"\n\xff\n{"a": "1"}')
    found = list(stream(str(file)))
    assert [number for number, _ in found] == [1, 3, 4, 5, 6]
    assert [isinstance(row, Unreadable) for _, row in found] == [False, True, True, True, False]
    assert found[1][1] == Unreadable("list, not an object")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("none.jsonl", "'none.jsonl' is not a file"),
        ("none-*.parquet", "is not a file"),
        ("hub:", "is not hub:ORG/NAME"),
        ("hub:a/b:c:d:e", "is not hub:ORG/NAME"),
        ("hub:a/b:", "is not hub:ORG/NAME"),
    ],
)
def test_what_cannot_be_read_is_said_before_anything_is(source: str, words: str) -> None:
    with pytest.raises(MegarlError, match=words):
        next(iter(stream(source)))


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf://datasets/a/b", ("a/b", None, "train")),
        ("hf://a/b", ("a/b", None, "train")),
        ("https://huggingface.co/datasets/a/b", ("a/b", None, "train")),
        ("https://huggingface.co/datasets/a/b/tree/main", ("a/b", None, "train")),
        ("https://huggingface.co/datasets/a/b/viewer/main/test?row=3", ("a/b", "main", "test")),
    ],
)
def test_addresses_of_the_hub_are_read_as_its_sets(
    monkeypatch: pytest.MonkeyPatch, source: str, asked: Any
) -> None:
    called = []

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        called.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sources.is_source(source)
    assert [row for _, row in stream(source)] == ROWS
    assert called == [asked]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("openai/gsm8k", "the set of this name on the Hugging Face hub is hub:openai/gsm8k$"),
        ("datasets/openai/gsm8k", "hub is hub:openai/gsm8k$"),
        ("data/math.jsonl", "'data/math.jsonl' is not a file$"),
        (
            "hf://datasets/a/b/data/x.parquet",
            r"part of a set; write hub:a/b.*hf download a/b --repo-type dataset",
        ),
        ("hf://datasets/a/b@main/x.parquet", r"write hub:a/b\["),
        (
            "https://huggingface.co/datasets/a/b/resolve/main/x.parquet",
            r"part of a set; write hub:a/b",
        ),
        ("https://example.org/x.jsonl", "not a file of this machine; download it"),
        ("s3://bucket/x.jsonl", "not a file of this machine; download it"),
        ("hub:https://huggingface.co/datasets/a/b", "is not hub:ORG/NAME"),
    ],
)
def test_other_addresses_are_told_what_to_write(source: str, words: str) -> None:
    assert re.search(words, sources.problem(source) or "")


def test_pictures_of_a_hub_set_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_list([{"a": "1", "picture": {"bytes": b"none", "path": None}}])
    made = rows.cast_column("picture", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    row: Any
    ((_, row),) = stream("hub:a/b")
    assert row["a"] == "1"
    assert list(row) == ["a", "picture"]


def test_a_value_that_cannot_be_converted_is_only_that_rows(tmp_path: Path) -> None:
    days = pa.array([0, 1 << 62], pa.timestamp("us"))
    pq.write_table(pa.table({"day": days}), tmp_path / "a.parquet")
    first: Any
    second: Any
    first, second = (row for _, row in stream(str(tmp_path / "a.parquet")))
    assert first["day"].year == 1970
    with pytest.raises(UnfitError, match="the column 'day' cannot be read"):
        second["day"]


def test_a_file_of_another_kind_and_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_text("a,b\n")
    assert "ends in none of .jsonl" in (sources.problem(str(tmp_path / "a.xlsx")) or "")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(MegarlError, match=r"a\.parquet: cannot be read"):
        list(stream(str(tmp_path / "a.parquet")))


def test_json_keeps_each_value_as_it_is(tmp_path: Path) -> None:
    """`datasets` reads these two columns as quoted texts and numbers, as rounded
    numbers, and as dates.
    """
    file = tmp_path / "a.json"
    rows = [
        {"a": r"\frac{1}{2}", "n": 9007199254740993, "day": "2024-01-01"},
        {"a": 2, "n": None, "day": "2024-01-02"},
    ]
    for text in (json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        file.write_text(text)
        assert [row for _, row in stream(str(file))] == rows
        assert [row for _, row in stream(str(tmp_path / "*.json"))] == rows
    file.write_text('[{"a": 1}, 2, {"b"}]')
    with pytest.raises(MegarlError, match=r"a\.json: cannot be read: JSON is malformed"):
        list(stream(str(file)))
    file.write_text('[{"a": 1}, 2]')
    assert [row for _, row in stream(str(file))] == [{"a": 1}, Unreadable("int, not an object")]


def test_why_a_set_could_not_be_generated_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself says only that an error occurred, and keeps the reason as its
    cause.
    """

    def fails(*_: Any, **__: Any) -> Any:
        try:
            raise ValueError("Couldn't cast array of type string to null")
        except ValueError as error:
            raise datasets.exceptions.DatasetGenerationError(
                "An error occurred while generating the dataset"
            ) from error

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(
        MegarlError, match="hub:a/b: cannot be read: Couldn't cast array of type string to null"
    ):
        list(stream("hub:a/b"))


def test_a_hub_name_is_asked_of_datasets_and_its_failure_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        if name == "away/set":
            raise ConnectionError("Couldn't reach 'away/set' on the Hub")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("hub:openai/gsm8k:main:train", "hub:a/b:test", "hub:a/b"):
        assert list(stream(source)) == list(enumerate(ROWS, 1))
    assert asked == [
        ("openai/gsm8k", "main", "train"),
        ("a/b", None, "test"),
        ("a/b", None, "train"),
    ]
    with pytest.raises(
        MegarlError,
        match=(
            r"hub:away/set: cannot be read: Couldn't reach.*download its files .*without a network,"
            r" elsewhere"
        ),
    ):
        list(stream("hub:away/set"))
