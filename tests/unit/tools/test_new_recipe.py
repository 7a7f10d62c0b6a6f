"""Recipes for a model, questions and a machine of the user's own."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.recipe import Recipe, from_tree, load
from megarl.tools.inspection.data import kind_of_answer
from megarl.tools.new_recipe import (
    KnownData,
    KnownModel,
    Machine,
    NewRecipeOptions,
    another_machine,
    entries_of,
    grader_for,
    known_model,
    tree_of,
)
from tests.unit.conftest import Tree, write_jsonl

WRITES_EQUALS = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={%"
    " endif %}"
)
QUESTIONS = KnownData(1000, 120, (20, 30, 41), longest_question=20, longest_answer=3, grader="math")


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def model(tree: Tree) -> Path:
    """A model without a chat template."""
    return Path(tree["model"]["path"])


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    write_jsonl(
        tmp_path / "my sums.jsonl", [{"prompt": f"{n}+11", "answer": n + 11} for n in range(30)]
    )
    return tmp_path / "my sums.jsonl"


def chats(model: Path, template: str) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def written(model: Path, data: Path, *options: str) -> Recipe:
    out = model.parent / "mine.yaml"
    assert (
        cli.main(
            [
                "recipes",
                "new",
                "--model",
                str(model),
                "--data",
                str(data),
                "--out",
                str(out),
                *options,
            ]
        )
        == 0
    )
    return load(str(out))


def suited(parameters: float, machine: Machine, end_of_thinking: str = "", **data: Any) -> Recipe:
    known = KnownModel(Path("models/mine"), int(parameters), True, end_of_thinking)
    asked = NewRecipeOptions("mine.jsonl", "", "", "", "", ())
    seen = KnownData(**(vars(QUESTIONS) | data))
    return from_tree(tree_of(list(entries_of(known, seen, asked, machine))))


def test_what_is_written_can_start(
    model: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats(model, WRITES_EQUALS)
    monkeypatch.chdir(model.parent)
    recipe = written(model, questions)
    (task,) = recipe.data.tasks.values()
    assert list(recipe.data.tasks) == ["my-sums"]
    assert (task.template, task.grader, task.heldout) == ("chat", "math", 6)
    assert recipe.length.prompt_tokens == 8, "the longest, 29+11=, has 6"
    assert recipe.length.completion_tokens == recipe.length.answer_tokens == 16
    assert recipe.length.control == "none"
    assert recipe.resources.learner_ranks == recipe.resources.servers == 1
    capsys.readouterr()
    assert cli.main(["train", "mine.yaml", "--dry-run"]) == 0
    shown, said = capsys.readouterr()
    assert "my-sums: 24 to train on, 6 held out, grader math" in shown
    warnings = [line for line in said.splitlines() if line.startswith("warning")]
    assert [line for line in warnings if "the machine is busy" not in line] == []
    assert "end_of_thinking" not in said
    assert said.endswith("ready: 1 server, 1 rank, 0 GPUs\n")
    assert (
        cli.main(
            ["recipes", "new", "--model", "model", "--data", str(questions), "--out", "mine.yaml"]
        )
        == 2
    )
    assert "--out: mine.yaml exists already" in capsys.readouterr().err


def test_options_win(model: Path, tmp_path: Path) -> None:
    chats(model, WRITES_EQUALS)
    write_jsonl(tmp_path / "train.jsonl", [{"q": f"{n}+1", "solution": n + 1} for n in range(9)])
    write_jsonl(tmp_path / "other.jsonl", [{"q": "9+9", "solution": 18}])
    columns = "--column", "prompt=q", "--column", "answer=solution"
    chosen = "--heldout", str(tmp_path / "other.jsonl"), "--grader", "exact", "--system", "1+1=2"
    recipe = written(model, tmp_path / "train.jsonl", *columns, *chosen)
    ((name, task),) = recipe.data.tasks.items()
    assert name == tmp_path.name, "`train` says nothing; the folder's name does"
    assert (task.grader, task.system, task.heldout) == (
        "exact",
        "1+1=2",
        str(tmp_path / "other.jsonl"),
    )
    assert task.columns == {"prompt": "q", "answer": "solution"}


def test_a_base_model_gets_its_prompts_as_they_are(
    model: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = written(model, questions)
    (task,) = recipe.data.tasks.values()
    assert task.template == "raw"
    assert recipe.length.end_of_thinking == recipe.length.interruption == "</think>"
    capsys.readouterr()
    assert cli.main(["train", str(model.parent / "mine.yaml"), "--dry-run"]) == 0
    words = ["recipes", "new", "--model", str(model), "--data", str(questions), "--system", "1"]
    assert cli.main(words) == 2
    assert "--system: " in capsys.readouterr().err


def test_the_template_says_how_thinking_ends_or_without_one_the_vocabulary(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert known_model(model, tokenizer).end_of_thinking == "</think>"
    assert known_model(model, tokenizer).interruption == "</think>", (
        "the vocabulary lacks the default's letters"
    )
    chats(model, WRITES_EQUALS)
    assert known_model(model, tokenizer).end_of_thinking == ""
    chats(model, WRITES_EQUALS + "{# <|channel|>final #}")
    known = known_model(model, tokenizer)
    assert known.end_of_thinking == "<|channel|>final<|message|>"
    assert known.interruption.endswith(known.end_of_thinking)
    assert suited(8e9, another_machine(8), "</think>").length.control == "interruption"
    assert suited(8e9, another_machine(8), "").length.control == "none"


@pytest.mark.parametrize(
    ("answers", "grader"),
    [
        (["yes", "no", "7"], "exact"),
        (["12", "3/4", "no"], "math"),
        (['{"tests": []}'], "code"),
        (["(B)", "(C)"], "exact"),
    ],
)
def test_most_answers_choose_the_grader(answers: list[str], grader: str) -> None:
    assert grader_for(Counter(map(kind_of_answer, answers))) == grader


def test_a_cpu_gets_what_it_can_do() -> None:
    """A small model in fp32 whatever the CPU; a larger one in bf16 where bf16 is not
    emulated.
    """
    fast = Machine(cores=8, gpus=0, gpu_bytes=0, memory=64e9, bf16="AMX")
    slow = Machine(cores=1, gpus=0, gpu_bytes=0, memory=64e9, bf16="")
    assert suited(135e6, fast).model.dtype == "bf16"
    assert suited(1e6, fast).model.dtype == suited(135e6, slow).model.dtype == "fp32"
    assert (suited(135e6, fast).resources.threads, suited(135e6, slow).resources.threads) == (4, 1)
    assert suited(135e6, slow).evaluation.prompts == QUESTIONS.held_out, (
        "all that are held out are asked"
    )
    assert suited(1e6, fast).learner.optimizer.lr > suited(135e6, fast).learner.optimizer.lr
    with pytest.raises(
        MegarlError, match=r"models/mine: the state of learner and server alone takes 176 GB"
    ):
        suited(8e9, fast)


def test_gpus_are_divided() -> None:
    one = suited(1.7e9, another_machine(1))
    assert one.resources.colocate
    sixteen = suited(8e9, another_machine(16))
    assert sixteen.model.tensor_parallel == 4, "8B x 18 bytes on 80 GB"
    assert (sixteen.resources.learner_ranks, sixteen.resources.servers) == (4, 12)
    for gpus in (1, 4):
        with pytest.raises(MegarlError, match="a smaller model or more GPUs"):
            suited(70e9, another_machine(gpus))


def test_prompts_that_are_far_too_long_are_left_out() -> None:
    machine = Machine(cores=2, gpus=0, gpu_bytes=0, memory=64e9, bf16="")
    assert suited(1e6, machine, prompts=(9, 90_000)).length.prompt_tokens == 512
    assert suited(1e6, machine, longest_answer=30).length.answer_tokens == 128
    with pytest.raises(
        MegarlError, match="all 2 prompts have more than 512 tokens, the shortest 513; shorten"
    ):
        suited(1e6, machine, prompts=(513, 90_000))


def test_what_cannot_be_read_is_one_message(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "a.gguf").touch()
    write_jsonl(tmp_path / "other.jsonl", [{"question": "1+1=", "answer": 2}] * 12)
    for of_model, data, said in (
        (tmp_path / "gguf", questions, "import-gguf"),
        (tmp_path, questions, "no Hugging Face model there"),
        (model, tmp_path / "none.jsonl", "is not a file"),
        (model, tmp_path / "other.jsonl", "--column prompt=question"),
    ):
        assert cli.main(["recipes", "new", "--model", str(of_model), "--data", str(data)]) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert not captured.out


def test_the_held_out_questions_of_another_set_are_looked_at(
    model: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = questions.with_name("other.jsonl")
    write_jsonl(other, [{"prompt": "+".join(["12"] * 9), "answer": 108}])
    recipe = written(model, questions, "--heldout", str(other))
    assert recipe.length.prompt_tokens == 32, (
        "the longest held-out question has 26, of the others 5"
    )
    write_jsonl(other, [{"question": "1+1", "answer": 2}])
    for heldout, said in (
        (other, "other.jsonl:1: no column prompt"),
        ("none.jsonl", "'none.jsonl' is not a file"),
        ("30", "--heldout: 30 of the 30 rows of .* cannot be held out; give a number from 1 to 29"),
        ("0", "--heldout: 0 of the 30 rows"),
        ("-1", "--heldout: -1 of the 30 rows"),
        ("²", "'²' is not a file"),
    ):
        assert re.search(said, refused(capsys, model, questions, "--heldout", str(heldout)))


def test_questions_that_a_run_would_refuse(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    row = {"prompt": "1+1", "answer": 2}
    write_jsonl(file, [row])
    assert "only one question; at least two are needed" in refused(capsys, model, file)
    write_jsonl(file, [row, row, {"prompt": "1+2", "answer": ""}])
    said = refused(capsys, model, file)
    assert "questions.jsonl:2: its prompt was on line 1" in said
    assert "questions.jsonl:3: the answer of " in said
    assert "'' names no file" in refused(capsys, model, "")
    assert f"--out: {tmp_path / 'none'}: no such directory" in refused(
        capsys, model, file, "--out", str(tmp_path / "none" / "mine.yaml")
    )


def refused(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path | str, *options: str
) -> str:
    """Return what is said of questions of which no recipe is written."""
    capsys.readouterr()
    assert cli.main(["recipes", "new", "--model", str(model), "--data", str(data), *options]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err
