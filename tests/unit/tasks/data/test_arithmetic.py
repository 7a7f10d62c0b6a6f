"""The quickstart's data against integer arithmetic done here, by Python's operators."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.utils.logging import enable_progress_bar

from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.recipe import load
from megarl.tasks.data import arithmetic, arithmetic_models
from megarl.tasks.data.arithmetic import columns, trace
from megarl.tasks.data.arithmetic_models import Exercise
from megarl.tasks.data.mappings import read_own
from megarl.tasks.data.prompts import check_disjoint, load_set
from megarl.tasks.data.survey import survey_of

EQUATION = re.compile(r"(\d+)([+-])(\d)([+-]1)?=(\d+)")
NUMBERS = st.integers(0, 9999)
RNG = st.integers(0, 2**32).map(random.Random)


@st.composite
def problems(draw: st.DrawFn) -> Exercise:
    one = draw(NUMBERS)
    other = draw(NUMBERS)
    sign = draw(st.sampled_from("+-"))
    return (
        Exercise(max(one, other), sign, min(one, other))
        if sign == "-"
        else Exercise(one, sign, other)
    )


def matched(equation: str) -> re.Match[str]:
    match = EQUATION.fullmatch(equation)
    assert match is not None, equation
    return match


def false_columns(work: str) -> int:
    """How many of a scratchpad's equations do not hold."""
    found = [matched(equation) for equation in work.split(";")]
    return sum(eval(m[0].split("=")[0]) != int(m[5]) for m in found)


def split(completion: str) -> tuple[str, str]:
    """Scratchpad and answer of a well-formed completion."""
    work, answer = completion.removeprefix("<think>").split("</think>")
    return work, answer


@given(problems(), RNG)
def test_a_right_trace_is_right_column_by_column(problem: Exercise, rng: random.Random) -> None:
    work, answer = split(trace(problem, "right", rng))
    assert int(answer) == eval(problem.prompt.rstrip("="))
    assert str(int(answer)) == answer  # written one way: `exact` compares text
    assert false_columns(work) == 0
    assert len(work.split(";")) == max(len(str(problem.first)), len(str(problem.second)))


@given(problems())
def test_columns_hold_the_digits_of_the_problem_and_of_the_answer(problem: Exercise) -> None:
    equations, answer = columns(problem)
    assert answer == eval(problem.prompt.rstrip("="))
    for place, equation in enumerate(equations):
        left, _, right, _, result = matched(equation).groups()
        assert int(left) % 10 == problem.first // 10**place % 10
        assert int(right) == problem.second // 10**place % 10
        assert int(result) % 10 == answer // 10**place % 10


@given(problems(), RNG)
def test_a_wrong_trace_has_one_false_column_and_a_false_answer(
    problem: Exercise, rng: random.Random
) -> None:
    work, answer = split(trace(problem, "wrong", rng))
    assert false_columns(work) == 1
    assert int(answer) != eval(problem.prompt.rstrip("="))


@given(problems(), RNG)
def test_malformed_traces_break_the_rule_they_are_named_after(
    problem: Exercise, rng: random.Random
) -> None:
    length = load("quickstart").length
    assert "</think>" not in trace(problem, "unclosed", rng)
    work, answer = split(trace(problem, "overlong", rng))
    assert len(work) > length.thinking_tokens[1]
    assert int(answer) == eval(problem.prompt.rstrip("="))
    _, answer = split(trace(problem, "rambling", rng))
    assert len(answer) > length.answer_tokens
    work, answer = split(trace(problem, "interrupted", rng))
    assert work.endswith("...")
    assert int(answer) == eval(problem.prompt.rstrip("="))


@given(problems())
def test_a_right_trace_fits_every_budget(problem: Exercise) -> None:
    length = load("quickstart").length
    work, answer = split(trace(problem, "right", random.Random(0)))
    assert len(problem.prompt) <= length.prompt_tokens
    assert len(work) + len(["<think>", "</think>"]) <= length.thinking_tokens[0]
    assert len(answer) + len(["<eos>"]) <= length.answer_tokens


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write(folder, seed=3)
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_right_different_and_disjoint(written: Path) -> None:
    train = rows(written / "train.jsonl")
    heldout = rows(written / "heldout.jsonl")
    assert (len(train), len(heldout)) == (arithmetic.TRAIN_PROMPTS, arithmetic.HELDOUT_PROMPTS)
    for name, whole in (("train", train), ("heldout", heldout)):
        parts = {t: rows(written / f"{name}-{t}.jsonl") for t in ("addition", "subtraction")}
        assert sorted(r["id"] for part in parts.values() for r in part) == sorted(
            r["id"] for r in whole
        )
        assert all("+" in r["prompt"] for r in parts["addition"])
        assert all("-" in r["prompt"] for r in parts["subtraction"])
    texts = [row["prompt"] for row in train + heldout]
    assert len(set(texts)) == len(texts)
    for row in train + heldout:
        assert eval(row["prompt"].rstrip("=")) == int(row["answer"]) >= 0
        assert row["difficulty"] == max(len(n) for n in re.findall(r"\d+", row["prompt"]))
    assert {row["difficulty"] for row in heldout} == set(arithmetic.DIGITS)
    assert {row["prompt"] for row in rows(written / "sft.jsonl")}.isdisjoint(
        row["prompt"] for row in heldout
    )
    tokenizer = load_tokenizer(written / "init")
    sets = [
        load_set(
            survey_of(str(written / name), read_own),
            lambda row: row.prompt,
            tokenizer,
            16,
            "sums",
            name,
        )[0]
        for name in ("train.jsonl", "heldout.jsonl")
    ]
    assert [len(one.prompts) for one in sets] == [
        arithmetic.TRAIN_PROMPTS,
        arithmetic.HELDOUT_PROMPTS,
    ]
    check_disjoint(*sets)


def test_the_teacher_is_right_as_often_as_it_says(written: Path) -> None:
    traces = rows(written / "sft.jsonl")
    right = sum(
        false_columns(split(t["completion"])[0]) == 0
        for t in traces
        if re.fullmatch(r"<think>[^.]{1,35}</think>\d+", t["completion"])
    )
    assert right / len(traces) == pytest.approx(arithmetic.TRACES["right"], abs=0.01)


def test_the_same_seed_writes_the_same_bytes_and_another_one_does_not(
    written: Path, tmp_path: Path
) -> None:
    arithmetic.write(tmp_path / "same", seed=3)
    arithmetic.write(tmp_path / "other", seed=4)
    files = [file.relative_to(written) for file in written.rglob("*") if file.is_file()]
    assert all(
        (tmp_path / "same" / file).read_bytes() == (written / file).read_bytes() for file in files
    )
    for name in ("train.jsonl", "heldout.jsonl", "sft.jsonl", "init/model.safetensors"):
        assert (tmp_path / "other" / name).read_bytes() != (written / name).read_bytes()


def test_writing_again_replaces_and_leaves_nothing_else(written: Path) -> None:
    before = sorted(written.rglob("*"))
    arithmetic.write(written, seed=3)
    assert sorted(written.rglob("*")) == before


def test_every_text_of_the_task_comes_back_from_its_tokens(written: Path) -> None:
    tokenizer = load_tokenizer(written / "init")
    for row in rows(written / "sft.jsonl")[:2000]:
        text = row["prompt"] + row["completion"] + "<eos>"
        assert tokenizer.decode(tokenizer.ids(text)) == text


def test_the_special_texts_are_one_token_each(written: Path) -> None:
    tokenizer = load_tokenizer(written / "init")
    assert all(len(tokenizer.ids(text)) == 1 for text in arithmetic_models.SPECIAL)
    assert tokenizer.ids("<eos>").tolist() == [tokenizer.end]
    interruption = load("quickstart").length.interruption
    assert len(tokenizer.ids(interruption)) == 4
    assert interruption == arithmetic_models.INTERRUPTION


def test_the_model_is_a_million_parameters_and_takes_every_token(written: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(written / "init")
    assert model.dtype == torch.float32
    assert 0.5e6 < model.num_parameters() < 1.5e6
    assert model.config.vocab_size == load_tokenizer(written / "init").backend.get_vocab_size()
    assert model.config.max_position_embeddings >= 2 * load("quickstart").length.context_tokens
    assert not model.config.tie_word_embeddings


def test_a_model_is_written_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers draws a bar of its own, which fills as it appears."""
    enable_progress_bar()
    arithmetic_models.save_model(
        tmp_path / "init", arithmetic_models.LLAMA | {"num_hidden_layers": 1}, 0
    )
    assert (tmp_path / "init" / "model.safetensors").is_file()
    assert capfd.readouterr() == ("", "")
