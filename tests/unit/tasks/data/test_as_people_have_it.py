"""Data as people have it: each case is read, or one message says what is wrong and what
to do.
"""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.recipe import from_tree
from megarl.tasks.data.prompts import load_tasks
from tests.unit.tasks.environments.texts import byte_tokenizer

A = {"prompt": "one?", "answer": "1"}
B = {"prompt": "two?", "answer": "2"}
BOTH = {"one?": ("1",), "two?": ("2",)}
OTHER = {"prompt": "held out?", "answer": "0"}
VERL = {"mapping": "verl", "template": "chat"}
CHAT = {"template": "chat"}
USER = {"role": "user", "content": "one?"}
SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]

type Write = Callable[[Path], object]
type Prompts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """A source in a folder, and what becomes of it: prompts with their answers, or
    words.

    words: each is in the error, or in the log if there are prompts too.
    """

    name: str
    files: Mapping[str, Write]
    source: str = "a.jsonl"
    prompts: Prompts | None = None
    words: Sequence[str] = ()
    task: Mapping[str, Any] = field(default_factory=dict)


def lines(*rows: Any) -> bytes:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def written(data: bytes) -> Write:
    return lambda path: path.write_bytes(data)


def parquet(
    rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None, group: int = 1024
) -> Write:
    return lambda path: pq.write_table(
        pa.Table.from_pylist(list(rows), schema), path, row_group_size=group
    )


def arrow(rows: Sequence[Mapping[str, Any]]) -> Write:
    def write(path: Path) -> None:
        table = pa.Table.from_pylist(list(rows))
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)

    return write


def of_parts(
    name: str, first: list[dict[str, Any]], second: list[dict[str, Any]], **more: Any
) -> Case:
    files = {"a-1.parquet": parquet(first), "a-2.parquet": parquet(second)}
    return Case(f"parts: {name}", files, "a-*.parquet", BOTH, **more)


def of_lines(name: str, *rows: Any, **more: Any) -> Case:
    return Case(name, {"a.jsonl": written(lines(*rows))}, **more)


def of_messages(name: str, messages: Any, **more: Any) -> Case:
    more = {"task": CHAT, **more}
    return of_lines(f"messages: {name}", {"prompt": messages, "answer": "1"}, B, **more)


def shown(*messages: Mapping[str, str]) -> str:
    """What the byte tokenizer's template makes of messages, without its last line."""
    return "".join(f"<|start|>{one['role']}\n{one['content']}<|end|>\n" for one in messages)


def asked(text: str) -> str:
    return shown({"role": "user", "content": text})


TWO = asked("two?")
DAYS = pa.schema([("prompt", pa.string()), ("answer", pa.string()), ("day", pa.timestamp("us"))])
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}

PARTS = [
    of_parts("a column more", [A], [B | {"more": 1}]),
    of_parts("null in the first, text in the second", [A | {"more": None}], [B | {"more": "x"}]),
    of_parts("numbers in one, texts in the other", [A | {"more": 1}], [B | {"more": "x"}]),
    of_parts("another order", [A], [dict(reversed(B.items()))]),
    of_parts("nested in one", [A | {"more": {"a": [1]}}], [B | {"more": [{"b": "c"}]}]),
    of_parts("answers as numbers in one", [A | {"answer": 1}], [B]),
    Case(
        "parts: JSON lines of other keys",
        {"a-1.jsonl": written(lines(A | {"x": 1})), "a-2.jsonl": written(lines(B | {"y": "z"}))},
        "a-*.jsonl",
        BOTH,
    ),
    Case(
        "parts: Arrow of other columns",
        {"a-1.arrow": arrow([A]), "a-2.arrow": arrow([B | {"more": "x"}])},
        "a-*.arrow",
        BOTH,
    ),
    Case(
        "a day that Python cannot hold, in a column nobody reads",
        {"a.parquet": parquet([A | {"day": 1}, B | {"day": 1 << 62}], DAYS)},
        "a.parquet",
        BOTH,
    ),
    Case("many groups of rows", {"a.parquet": parquet([A, B], group=1)}, "a.parquet", BOTH),
    Case(
        "decimal numbers as answers",
        {"a.parquet": parquet([A | {"answer": Decimal("0.0000001")}])},
        "a.parquet",
        {"one?": ("0.0000001",)},
    ),
    of_lines(
        "a small number as an answer",
        A | {"answer": 1e-7},
        prompts={"one?": ("0.0000001",)},
        task={"columns": {"prompt": "prompt", "answer": "answer"}},
    ),
]


def verl(messages: Any, truth: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0},
    }


CONVERSATIONS = [
    of_messages("only the user's", [USER], prompts={asked("one?"): ("1",), TWO: ("2",)}),
    of_messages(
        "a system message", [SYSTEM, USER], prompts={shown(SYSTEM, USER): ("1",), TWO: ("2",)}
    ),
    of_messages(
        "the row's system message wins",
        [SYSTEM, USER],
        prompts={
            shown(SYSTEM, USER): ("1",),
            shown({"role": "system", "content": "Box."}) + TWO: ("2",),
        },
        words=["system messages of their own"],
        task=CHAT | {"system": "Box."},
    ),
    of_messages(
        "earlier turns", [*EARLIER, USER], prompts={shown(*EARLIER, USER): ("1",), TWO: ("2",)}
    ),
    of_messages(
        "content in parts",
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "e?"}],
            }
        ],
        prompts={asked("one?"): ("1",), TWO: ("2",)},
    ),
    of_messages(
        "OpenAI's developer",
        [SYSTEM | {"role": "developer"}, USER],
        prompts={shown(SYSTEM, USER): ("1",), TWO: ("2",)},
    ),
    of_messages(
        "ShareGPT's names",
        [{"from": "human", "value": "one?"}],
        prompts={asked("one?"): ("1",), TWO: ("2",)},
    ),
    of_messages(
        "their JSON text",
        json.dumps([SYSTEM, USER]),
        prompts={shown(SYSTEM, USER): ("1",), TWO: ("2",)},
    ),
    of_messages("their text in Python", str([USER]), words=["a.jsonl:1: .*Python's notation"]),
    of_messages(
        "with template: raw",
        [SYSTEM, USER],
        task={},
        words=["conversation .system, user.*template: chat"],
    ),
    of_messages(
        "an image",
        [{"role": "user", "content": [{"type": "text", "text": "?"}, PICTURE]}],
        words=["'image_url'; only texts"],
    ),
    of_messages(
        "a tool's message",
        [USER, {"role": "tool", "content": "1"}],
        words=["calls a tool or is a tool's"],
    ),
    of_messages(
        "a call",
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, USER],
        words=["calls a tool"],
    ),
    of_messages(
        "the assistant last", [USER, EARLIER[1]], words=["the last message is the assistant's"]
    ),
    of_messages(
        "a system message later",
        [*EARLIER, SYSTEM, USER],
        words=["system message is not the first"],
    ),
    of_messages("none", [], words=["neither text nor a list of messages"]),
    of_messages(
        "another role", [{"role": "critic", "content": "x"}, USER], words=["the role 'critic', not"]
    ),
    of_lines(
        "OpenAI's column",
        {"messages": [SYSTEM, USER], "answer": "1"},
        prompts={shown(SYSTEM, USER): ("1",)},
        task=CHAT | {"columns": {"prompt": "messages", "answer": "answer"}},
    ),
    of_lines("verl", verl([SYSTEM, USER], "1"), prompts={shown(SYSTEM, USER): ("1",)}, task=VERL),
    Case(
        "verl in Parquet",
        {"a.parquet": parquet([verl([SYSTEM, USER], "1")])},
        "a.parquet",
        {shown(SYSTEM, USER): ("1",)},
        task=VERL,
    ),
    of_lines(
        "dapo-math-17k with a system message",
        verl([SYSTEM, USER], "1"),
        prompts={shown(SYSTEM, USER): ("1",)},
        task=CHAT | {"mapping": "dapo-math-17k"},
    ),
]

ANSWERS = [
    of_lines("a list of answers", A | {"answer": ["1", "1.0"]}, prompts={"one?": ("1", "1.0")}),
    of_lines("a list of one", A | {"answer": ["1"]}, prompts={"one?": ("1",)}),
    of_lines("a list of numbers", A | {"answer": [1, 1.5]}, prompts={"one?": ("1", "1.5")}),
    of_lines("a list with nothing", A | {"answer": []}, words=["the answer of .* is empty"]),
    of_lines("a list of lists", A | {"answer": [["1"]]}, words=["neither text nor a number"]),
    of_lines(
        "verl: a list", verl("one?", ["1", "2"]), prompts={asked("one?"): ("1", "2")}, task=VERL
    ),
    of_lines(
        "verl: JSON text of a list",
        verl("one?", '["1", "2"]'),
        prompts={asked("one?"): ("1", "2")},
        task=VERL,
    ),
    of_lines(
        "verl: an interval", verl("one?", "[1, 2]"), prompts={asked("one?"): ("[1, 2]",)}, task=VERL
    ),
    of_lines(
        "JSON text of a list elsewhere",
        A | {"answer": '["1", "2"]'},
        prompts={"one?": ('["1", "2"]',)},
    ),
    of_lines(
        "a list of tests",
        A | {"answer": ["{}", "[]"]},
        words=["list of tests"],
        task={"grader": "code"},
    ),
    of_lines(
        "NuminaMath's proof",
        A | {"answer": "proof"},
        B,
        prompts={"two?": ("2",)},
        words=["1 rows left out .no answer"],
    ),
    of_lines(
        "NuminaMath's notfound",
        A | {"answer": "notfound"},
        B,
        prompts={"two?": ("2",)},
        words=["1 rows left out .no answer"],
    ),
    of_lines(
        "a proof that is an answer", A | {"answer": "by proof"}, prompts={"one?": ("by proof",)}
    ),
]

TABLE = b"prompt,answer\none?,1\ntwo?,2\n"
TEXT = lines(A, B)
ACCENTS = '{"prompt": "un élan?", "answer": "1"}\n'

FILES = [
    Case("a byte-order mark", {"a.jsonl": written(b"\xef\xbb\xbf" + TEXT)}, prompts=BOTH),
    Case(
        "a byte-order mark in JSON",
        {"a.json": written(b"\xef\xbb\xbf" + json.dumps([A, B]).encode())},
        "a.json",
        BOTH,
    ),
    Case("a byte-order mark in CSV", {"a.csv": written(b"\xef\xbb\xbf" + TABLE)}, "a.csv", BOTH),
    Case(".jsonl.gz", {"a.jsonl.gz": written(gzip.compress(TEXT))}, "a.jsonl.gz", BOTH),
    Case(".jsonl.bz2", {"a.jsonl.bz2": written(bz2.compress(TEXT))}, "a.jsonl.bz2", BOTH),
    Case(".jsonl.xz", {"a.jsonl.xz": written(lzma.compress(TEXT))}, "a.jsonl.xz", BOTH),
    Case(".jsonl.zst", {"a.jsonl.zst": written(zstandard.compress(TEXT))}, "a.jsonl.zst", BOTH),
    Case(
        ".json.gz",
        {"a.json.gz": written(gzip.compress(json.dumps([A, B]).encode()))},
        "a.json.gz",
        BOTH,
    ),
    Case(".csv", {"a.csv": written(TABLE)}, "a.csv", BOTH),
    Case(".csv.gz", {"a.csv.gz": written(gzip.compress(TABLE))}, "a.csv.gz", BOTH),
    Case(".tsv", {"a.tsv": written(TABLE.replace(b",", b"\t"))}, "a.tsv", BOTH),
    Case(
        ".csv with line breaks",
        {"a.csv": written(b'prompt,answer\r\n"one\ntwo, ""three""?",1\r\n')},
        "a.csv",
        {'one\ntwo, "three"?': ("1",)},
    ),
    Case(
        ".csv of ragged rows",
        {"a.csv": written(TABLE + b"three?\n")},
        "a.csv",
        words=["a.csv:4: .*1 values, where the first line names 2"],
    ),
    Case(
        ".csv with semicolons",
        {"a.csv": written(TABLE.replace(b",", b";"))},
        "a.csv",
        words=["no column prompt or answer; the row has prompt;answer"],
    ),
    Case(
        ".csv in Latin-1",
        {"a.csv": written("prompt,answer\nélan,1\n".encode("latin-1"))},
        "a.csv",
        words=["0xe9 is not UTF-8; save"],
    ),
    Case(".ndjson", {"a.ndjson": written(TEXT)}, "a.ndjson", BOTH),
    Case(
        "an empty Parquet",
        {"a.parquet": parquet([], pa.schema([("prompt", pa.string())]))},
        "a.parquet",
        words=["a.parquet: no rows in it"],
    ),
    Case(
        "a Parquet without a byte", {"a.parquet": written(b"")}, "a.parquet", words=["it is empty"]
    ),
    Case("an empty CSV", {"a.csv": written(b"")}, "a.csv", words=["no rows in it"]),
    Case(
        "a pattern of JSON lines",
        {"a-1.jsonl": written(lines(A)), "a-2.jsonl": written(lines(B))},
        "a-*.jsonl",
        BOTH,
    ),
    Case(
        "a pattern of packed files",
        {"a-1.jsonl.gz": written(gzip.compress(TEXT))},
        "a-*.jsonl.gz",
        BOTH,
    ),
    Case(
        "a pattern of folders",
        {"x/y/a.jsonl": written(lines(A)), "x/b.jsonl": written(lines(B))},
        "x/**/*.jsonl",
        BOTH,
    ),
    Case(
        "a folder",
        {
            "x/a.jsonl": written(lines(A)),
            "x/b.jsonl": written(lines(B)),
            "x/README.md": written(b""),
        },
        "x",
        BOTH,
    ),
    Case(
        "a folder of several splits",
        {"x/train-0.jsonl": written(TEXT), "x/test-0.jsonl": written(TEXT)},
        "x",
        words=["is a folder with test-0.jsonl, train-0.jsonl; name one"],
    ),
    Case(
        "a folder of save_to_disk",
        {"x": lambda path: datasets.Dataset.from_list([A, B]).save_to_disk(path)},
        "x",
        BOTH,
    ),
    Case(
        "a folder of folders",
        {"x/y/a.jsonl": written(TEXT)},
        "x",
        words=[r"a folder without files that can be read; .*\*\*/\*"],
    ),
    Case("a name with brackets", {"a[1].parquet": parquet([A, B])}, "a[1].parquet", BOTH),
    Case(
        "packed, but not named so",
        {"a.jsonl": written(gzip.compress(TEXT))},
        words=["packed by gzip; end its name in .gz"],
    ),
    Case(
        "cut off while packed",
        {"a.jsonl.gz": written(gzip.compress(TEXT * 50)[:60])},
        "a.jsonl.gz",
        words=["a.jsonl.gz: cannot be read: Compressed file ended"],
    ),
    Case(
        "a packed Parquet",
        {"a.parquet.gz": written(b"")},
        "a.parquet.gz",
        words=["a.parquet.gz' ends in none of .*unpack it"],
    ),
    Case(
        "a zip archive", {"a.zip": written(b"PK")}, "a.zip", words=["ends in none of .*unpack it"]
    ),
    Case(
        "UTF-16",
        {"a.jsonl": written(TEXT.decode().encode("utf-16"))},
        words=["UTF-16 text; save it as UTF-8"],
    ),
    Case(
        "Latin-1",
        {"a.jsonl": written(ACCENTS.encode("latin-1"))},
        words=["a.jsonl:1: .*0xe9 is not UTF-8; save"],
    ),
    Case(
        "a trailing comma",
        {"a.jsonl": written(b'{"prompt": "one?", "answer": "1",}\n')},
        words=["a.jsonl:1: .*trailing comma"],
    ),
    Case(
        "NaN",
        {"a.jsonl": written(b'{"prompt": "one?", "answer": "1", "difficulty": NaN}\n')},
        prompts={"one?": ("1",)},
    ),
    Case(
        "NaN in an array",
        {"a.json": written(b'[{"prompt": "one?", "answer": "1", "x": NaN}]')},
        "a.json",
        {"one?": ("1",)},
    ),
    Case(
        "an object of columns",
        {"a.json": written(json.dumps({"prompt": ["one?"], "answer": ["1"]}).encode())},
        "a.json",
        words=["one JSON object with the keys prompt, answer, not rows; write"],
    ),
    Case(
        "an object of an array",
        {"a.json": written(json.dumps({"version": 1, "data": [A, B]}).encode())},
        "a.json",
        words=["one JSON object with the keys version, data"],
    ),
    Case(
        "objects over several lines",
        {"a.json": written(f"{json.dumps(A, indent=1)}\n{json.dumps(B, indent=1)}".encode())},
        "a.json",
        words=["extend over several lines.*jq -c"],
    ),
    Case(
        "Python's notation",
        {"a.jsonl": written(f"{A}\n".encode())},
        words=["Python's notation, not JSON"],
    ),
    Case(
        "a Git LFS pointer",
        {"a.parquet": written(b"version https://git-lfs.github.com/spec/v1\noid")},
        "a.parquet",
        words=["Git LFS pointer"],
    ),
    Case(
        "a web page",
        {"a.jsonl": written(b"<!DOCTYPE html>\n<html>")},
        words=["a web page, not the file"],
    ),
]


def damaged(name: str, prompt: str, answer: str = "1", alarm: str = "") -> Case:
    """A row that must be left out with these words, or be read if there are none."""
    row = {"prompt": prompt, "answer": answer}
    words = [f"{alarm}.*two backslashes"] if alarm else []
    return of_lines(
        f"LaTeX: {name}", row, prompts=None if alarm else {prompt: (answer,)}, words=words
    )


DAMAGE = [
    damaged("times", "3 \times 4", alarm="imes"),
    damaged("theta", "\theta", alarm="heta"),
    damaged("nabla", "x \nabla f", alarm="abla"),
    damaged("rho", "x \rho", alarm="ho"),
    damaged("beta", "x \beta", alarm="eta"),
    damaged("frac", "\frac{1}{2}", alarm="rac"),
    damaged("text", "3 \text{cm}", alarm="ext"),
    damaged("right", "\\left(1\right)", alarm="ight"),
    damaged("neq in a formula", "if $x \neq 0$", alarm="eq"),
    damaged("nu in a formula", "the $\nu$ of", alarm="u"),
    damaged("to below a limit", "\\lim_{x\to 0}", alarm="o"),
    damaged("neq in an answer", "?", "x \neq 0", alarm="eq"),
    damaged("lines of words", "one\nabout\n\tand an apple\to go\r\nright"),
    damaged("names at the beginnings of lines", "x\nu = 3\neq = 4\n\tfrac = 1\n\treturn frac"),
    damaged("words between formulas", "Let $a$\ne $b$, costs $5\nu owe"),
    damaged("two lines in an answer", "?", "x=1\nu=2"),
]

CASES = [*PARTS, *CONVERSATIONS, *ANSWERS, *FILES, *DAMAGE]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("model"))


def load(folder: Path, case: Case, tokenizer: Tokenizer) -> Prompts:
    heldout = folder / "other.jsonl"
    task = {
        "train": str(folder / case.source),
        "heldout": str(heldout),
        "grader": "exact",
        **case.task,
    }
    rows = {
        **verl(OTHER["prompt"], "0"),
        "messages": [{"role": "user", "content": "held out?"}],
        **OTHER,
    }
    if task["grader"] == "code":
        rows["answer"] = '{"tests": [{"input": "", "output": ""}]}'
    heldout.write_bytes(lines(rows))
    found = load_tasks(from_tree({"data": {"tasks": {"t": task}}}), tokenizer)["t"].train
    texts = [
        tokenizer.decode(prompt.tokens).removesuffix("<|start|>assistant\n") for prompt in found
    ]
    return {text: prompt.answers for text, prompt in zip(texts, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_read_or_one_message_says_what_to_do(
    case: Case, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    for name, write_file in case.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(tmp_path / name)
    if case.prompts is not None:
        assert load(tmp_path, case, tokenizer) == case.prompts
        message = caplog.text
    else:
        with pytest.raises(MegarlError) as error:
            load(tmp_path, case, tokenizer)
        message = str(error.value)
    for words in case.words:
        assert re.search(words, message), message
