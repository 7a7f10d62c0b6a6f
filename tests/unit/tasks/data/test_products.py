"""The products and their traces against integer arithmetic done here."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.recipe import load
from megarl.tasks.data import arithmetic_models, products
from megarl.tasks.data.arithmetic_models import Exercise
from megarl.tasks.data.products import trace
from megarl.tasks.data.traces import load_traces
from megarl.tasks.environments.calculator import calculated

MADE = arithmetic_models.character_tokenizer()
TOKENIZER = Tokenizer(MADE.backend_tokenizer, MADE.eos_token_id, Path())
LENGTH = load("quickstart-tools").length
TASK = load("quickstart-tools").data.tasks["products"]
PRODUCTS = st.builds(Exercise, st.integers(10, 999), st.just("*"), st.integers(10, 999))
RNG = st.integers(0, 2**32).map(random.Random)


def read(kind: str, of: Any, rng: random.Random) -> Any:
    parts = trace(of, kind, rng)
    match = re.fullmatch(r"<think>(.*?)(?:</think>(\d+))?", "".join(parts))
    assert match is not None
    return parts, match.groups()


@given(PRODUCTS, RNG)
def test_a_call_is_answered_as_the_calculator_does(of: Any, rng: random.Random) -> None:
    for kind, right in (("called", True), ("miscalled", False), ("miscopied", False)):
        (call, reply, rest), (_, answer) = read(kind, of, rng)
        expression = call.removeprefix("<think>[").removesuffix("]")
        assert int(reply) == calculated(expression) == eval(expression)
        assert (int(answer) == of.first * of.second) == right
        assert (reply == answer) == (kind != "miscopied")
        assert rest.startswith("</think>")


@given(PRODUCTS, RNG)
def test_work_by_hand(of: Any, rng: random.Random) -> None:
    for kind, false in (("worked", 0), ("slipped", 1), ("unclosed", 0)):
        (text,), (work, answer) = read(kind, of, rng)
        sides = [equation.split("=") for equation in work.split(";")]
        assert sum(eval(left) != int(right) for left, right in sides) == false
        assert (answer is None) == (kind == "unclosed")
        if kind == "worked":
            assert int(answer) == of.first * of.second
        if kind == "slipped":
            assert int(answer) == sum(int(right) for _, right in sides) != of.first * of.second
        assert len(TOKENIZER.ids(text)) <= LENGTH.thinking_tokens[0] + 8


@given(PRODUCTS, RNG)
def test_every_trace_comes_back_from_its_tokens_and_fits(of: Any, rng: random.Random) -> None:
    assert len(TOKENIZER.ids(of.prompt)) <= LENGTH.prompt_tokens
    assert len(str(of.answer)) + 1 <= LENGTH.answer_tokens
    assert len(str(of.answer)) <= TASK.reply_tokens
    for kind in products.TRACES:
        text = "".join(trace(of, kind, rng))
        assert TOKENIZER.decode(TOKENIZER.ids(text)) == text
    assert ("..." + "</think>") in "".join(trace(of, "interrupted", rng))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_are_disjoint_and_functions_of_the_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        (tmp_path / name).mkdir()
        products.write(tmp_path / name, seed)
    train, heldout, sft = (
        rows(tmp_path / "one" / f"products-{name}.jsonl") for name in ("train", "heldout", "sft")
    )
    assert (len(train), len(heldout), len(sft)) == (4096, 512, 40_000)
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in train + heldout)
    assert {row["difficulty"] for row in heldout} == {1, 2, 3}
    prompts = {row["prompt"] for row in heldout}
    assert prompts.isdisjoint(row["prompt"] for row in train)
    assert prompts.isdisjoint(row["prompt"] for row in sft)
    calls = sum(len(row["completion"]) == 3 for row in sft) / len(sft)
    assert calls == pytest.approx(
        sum(products.TRACES[kind] for kind in ("called", "miscalled", "miscopied")), abs=0.01
    )
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "same" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "other" / file.name).read_bytes()


def test_what_a_tool_said_is_not_learnt(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    parts = ["<think>[12*34]", "408", "</think>408"]
    file.write_text(
        "".join(
            json.dumps({"prompt": "12*34=", "completion": c}) + "\n"
            for c in (parts, "".join(parts))
        )
    )
    in_parts, whole = load_traces(file, TOKENIZER)
    np.testing.assert_array_equal(in_parts.tokens, whole.tokens)
    said = [TOKENIZER.decode(t.tokens[t.learnt]) for t in (in_parts, whole)]
    assert said == ["<think>[12*34]</think>408<eos>", "<think>[12*34]408</think>408<eos>"]
    assert TOKENIZER.decode(in_parts.tokens[~in_parts.learnt]) == "12*34=408"


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (["a", "b"], "must alternate between model and tool"),
        ([], "must alternate"),
        (["1", "", "2"], "is empty"),
        ([1], "not a row"),
    ],
)
def test_parts_that_are_none(tmp_path: Path, completion: list[str], words: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps({"prompt": "1", "completion": completion}))
    with pytest.raises(MegarlError, match=words):
        load_traces(file, TOKENIZER)
