"""Every shipped suite on rows in its set's published schema, as prompts, graded by its
own grader; suites of the user's.
"""

import asyncio
import base64
import io
import json
import pickle
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from megarl.core.base.contracts import Grade
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Prompt, int32
from megarl.core.evaluation.answers import Answer, Result
from megarl.core.evaluation.metrics import Outcome
from megarl.core.evaluation.score import Sampled
from megarl.core.recipe import Recipe, Suite, dump, from_tree, load, load_suite, shipped_suites
from megarl.core.sampling.sampler import Sampler
from megarl.tasks.data import programs
from megarl.tasks.data.arithmetic_models import character_tokenizer
from megarl.tasks.data.mappings import MAPPINGS
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.data.rows import PromptRow
from megarl.tasks.graders.grader import TaskGraders
from megarl.tasks.suites import suites
from megarl.tools.eval.main import counted, earlier_settings, never_thinks, void_answers
from megarl.tools.eval.subject import Subject, _suite
from megarl.tools.eval.subject import recipe_of as asked_with
from tests import make
from tests.evaluation_sets import SETS, byte_llama

FENCED = "Here it is:\n```python\n{}\n```"
RIGHT = {
    "aime24": ["So \\boxed{2}.", "The answer is $25$."],
    "aime25": ["\\boxed{002}", "25"],
    "math-500": ["It is $\\frac{6}{4}$"],
    "gsm8k": ["\\boxed{7}", "She pays $12$.", "There are \\boxed{1,000} left."],
    "livecodebench": [
        FENCED.format("a, b = map(int, input().split())\nprint(a + b)"),
        FENCED.format(
            "class Solution:\n    def total(self, xs, more):\n        return sum(xs) + more"
        ),
    ],
    "humaneval": [
        FENCED.format("def largest(xs):\n    return max(xs)"),
        FENCED.format("def double(x):\n    return x + x"),
    ],
    "mbpp": [
        FENCED.format("def add(a, b):\n    return a + b"),
        FENCED.format("def root(x):\n    return x ** 0.5"),
    ],
}
WRONG = {
    "humaneval": FENCED.format(
        "def largest(xs):\n    return xs[0]\ndef double(x):\n    return x * x"
    ),
    "mbpp": FENCED.format("def add(a, b):\n    return a - b\ndef root(x):\n    return x"),
    "livecodebench": FENCED.format(
        "print(3)\nclass Solution:\n    def total(self, xs, more):\n        return 7"
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    byte_llama(folder)
    return load_tokenizer(folder)


def recipe_of(name: str, data: Path, **keys: object) -> Recipe:
    suite = {"data": str(data), **keys}
    return from_tree({"evaluation": {"suites": {name: suite}}, "data": {"sandbox": "bubblewrap"}})


def grades(recipe: Recipe, name: str, tokenizer: Tokenizer, answers: list[str]) -> list[Grade]:
    """Grade these answers to the suite's prompts, in the order of the file."""
    loaded = suites.load(name, recipe.evaluation.suites[name], tokenizer, 2000)
    mapping = MAPPINGS[recipe.evaluation.suites[name].mapping]
    in_file = [mapping(row).id for row in SETS[name]]
    asked: Any = loaded.questions.prompts
    in_order = sorted(asked, key=lambda p: in_file.index(p.id))
    assert len(in_order) == len(answers) == loaded.rows
    assert not loaded.left_out

    async def run() -> list[Grade]:
        graders = TaskGraders(recipe, tokenizer.decode)
        try:
            found = await asyncio.gather(
                *(
                    graders[name].grade_answer(f"hm</think>{a}", p)
                    for a, p in zip(answers, in_order, strict=True)
                )
            )
        finally:
            graders.close()
            await asyncio.sleep(0.1)
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", SETS)
def test_right_and_wrong_answers(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = recipe_of(name, make.write_rows(tmp_path / "rows.jsonl", SETS[name]))
    assert [g.correct for g in grades(recipe, name, tokenizer, RIGHT[name])] == [True] * len(
        SETS[name]
    )
    wrong = [WRONG.get(name, "\\boxed{-1}")] * len(SETS[name])
    assert [g.correct for g in grades(recipe, name, tokenizer, wrong)] == [False] * len(SETS[name])


def test_all_shipped_suites_are_tested_here() -> None:
    """But for tasks of lm-eval: test_harness.py."""
    assert set(shipped_suites()) == {*SETS, "arc-easy", "arc-challenge", "hellaswag"}


def test_what_the_model_sees(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = recipe_of("gsm8k", make.write_rows(tmp_path / "rows.jsonl", SETS["gsm8k"][:1]))
    prompt: Any
    (prompt,) = suites.load(
        "gsm8k", recipe.evaluation.suites["gsm8k"], tokenizer, 2000
    ).questions.prompts
    assert (
        tokenizer.decode(prompt.tokens) == "Ann has 3 apples and buys 4 more. How many has she?\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    assert (prompt.answer, prompt.task) == ("7", "gsm8k")


def test_a_suites_prompt_surrounds_what_the_user_says_last() -> None:
    turns = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "1"))]
    row = PromptRow("a", "1", "2", messages=tuple(turns))
    asked = suites.with_question(row, "Solve {prompt}!")
    assert [turn["content"] for turn in asked.messages] == ["s", "Solve 1!"]
    assert suites.with_question(PromptRow("a", "1", "2"), "Solve {prompt}!").prompt == "Solve 1!"


def test_rows_that_are_not_asked_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        *SETS["gsm8k"],
        {"question": "No hashes?", "answer": "7"},
        {"question": "long " * 400, "answer": "#### 1"},
    ]
    recipe = recipe_of("gsm8k", make.write_rows(tmp_path / "rows.jsonl", rows))
    loaded = suites.load("gsm8k", recipe.evaluation.suites["gsm8k"], tokenizer, 1000)
    assert loaded.left_out == {"not of the schema": 1, "longer than 1000 tokens": 1}
    assert (len(loaded.questions.prompts), loaded.rows) == (3, 5)


def test_fewer_prompts_are_the_first_of_more_and_the_set_is_the_same(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = make.write_rows(tmp_path / "rows.jsonl", SETS["gsm8k"])
    loaded = {
        n: suites.load(
            "gsm8k", recipe_of("gsm8k", data, prompts=n).evaluation.suites["gsm8k"], tokenizer, 2000
        )
        for n in (2, None)
    }
    assert [p.id for p in loaded[2].questions.prompts] == [
        p.id for p in loaded[None].questions.prompts
    ][:2]
    assert loaded[2].digest == loaded[None].digest
    make.write_rows(data, SETS["gsm8k"][1:])
    changed = suites.load(
        "gsm8k", recipe_of("gsm8k", data).evaluation.suites["gsm8k"], tokenizer, 2000
    )
    assert changed.digest != loaded[None].digest


def test_tests_of_any_size_are_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Training data leaves such rows out; suites keep them."""
    big = {"input": "1 " * 600_000, "output": "3\n", "testtype": "stdin"}
    row = SETS["livecodebench"][0] | {"public_test_cases": json.dumps([big])}
    recipe = recipe_of("livecodebench", make.write_rows(tmp_path / "rows.jsonl", [row]))
    prompt: Any
    (prompt,) = suites.load(
        "livecodebench", recipe.evaluation.suites["livecodebench"], tokenizer, 2000
    ).questions.prompts
    assert len(prompt.answer) > 1 << 20


def test_the_held_out_rows_of_a_task_are_those_of_training(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [
        {"id": f"p{n}", "prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)
    ]
    train = make.write_rows(tmp_path / "train.jsonl", rows)
    banned = make.write_rows(
        tmp_path / "banned.jsonl", rows[:20]
    )  # what is held out is chosen from the others
    tree = {
        "run": {"dir": str(tmp_path), "name": "run"},
        "data": {
            "tasks": {"sums": {"train": str(train), "heldout": 7}},
            "decontaminate": [str(banned)],
        },
    }
    recipe = from_tree(tree)
    heldout = {p.id for p in load_tasks(recipe, tokenizer)["sums"].heldout}
    rundir = RunDir(recipe.run.path)
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    for word, base in (("sums", recipe), (f"{rundir.path}:sums", from_tree({}))):
        name, keys, owner = _suite(word, base)
        suite = from_tree({"evaluation": {"suites": {name: keys}}}).evaluation.suites[name]
        loaded = suites.load(name, suite, tokenizer, 2048, owner.data.decontaminate)
        assert ({p.id for p in loaded.questions.prompts}, loaded.rows, dict(loaded.left_out)) == (
            heldout,
            7,
            {},
        )
    model = Subject("model", tokenizer.path, tokenizer.path)
    asked = asked_with(model, [f"{rundir.path}:sums"], [], [], tmp_path / "out")[0]
    assert asked.data.decontaminate == (str(banned),)
    with pytest.raises(MegarlError, match="has no task 'sum'; it has sums"):
        _suite(f"{rundir.path}:sum", recipe)


def test_where_nothing_is_interrupted_the_tokenizer_need_not_know_the_phrase() -> None:
    made = character_tokenizer()
    tokenizer = Tokenizer(made.backend_tokenizer, made.eos_token_id, Path())
    recipe = from_tree({"length": {"interruption": "Ünknown </think>"}})
    with pytest.raises(MegarlError, match="cannot encode 'Ünknown"):
        Sampler(recipe, tokenizer, None, None)  # type: ignore[arg-type]
    length = recipe.length.model_copy(update={"control": "none"})
    Sampler(recipe.model_copy(update={"length": length}), tokenizer, None, None)  # type: ignore[arg-type]


def test_a_suite_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: mine.jsonl\ngrader: exact\nsamples: 3\nprompt: 'Q: {prompt}'\n")
    assert load_suite(file) == {
        "data": "mine.jsonl",
        "grader": "exact",
        "samples": 3,
        "prompt": "Q: {prompt}",
    }
    for text, said in {
        "grader: exact\n": "mine.yaml:1: evaluation.suites.mine.data: field required",
        "data: x\ngrader: exakt\n": (
            "mine.yaml:2: evaluation.suites.mine.grader: unknown grader 'exakt'; did you mean"
            " exact?"
        ),
        "data: x\nprompt: hello\n": (
            "mine.yaml:2: evaluation.suites.mine.prompt: 'hello' has no {prompt}"
        ),
        "data: x\nsample: 2\n": (
            "mine.yaml:2: evaluation.suites.mine.sample: unknown key; did you mean samples?"
        ),
        "data: [x\n": "not YAML",
    }.items():
        file.write_text(text)
        with pytest.raises(MegarlError) as error:
            load_suite(file)
        assert said in str(error.value)


def test_two_suites_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second would be asked in place of the first."""
    (tmp_path / "gsm8k.yaml").write_text("data: mine.jsonl\ngrader: exact\n")
    (tmp_path / "recipe.yaml").write_text(dump(load("quickstart", [])))
    subject = Subject("run@1", tmp_path, tmp_path, RunDir(tmp_path))
    with pytest.raises(MegarlError, match=r"--suite: two of gsm8k, .*gsm8k\.yaml have one name"):
        asked_with(subject, ["gsm8k", str(tmp_path / "gsm8k.yaml")], [], [], tmp_path / "out")
    assert asked_with(subject, ["gsm8k", "gsm8k"], [], [], tmp_path / "out")[1] == ["gsm8k"]


def test_as_many_servers_as_the_gpus_allow_are_as_wide_as_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    (tmp_path / "recipe.yaml").write_text(dump(load("scalerl-17bx16", [])))
    subject = Subject("run@1", tmp_path, tmp_path, RunDir(tmp_path))

    def servers(*overrides: str) -> tuple[int, int]:
        resources = asked_with(subject, ["gsm8k"], [], overrides, tmp_path / "out")[0].resources
        return resources.servers, resources.server_tensor_parallel

    assert servers() == (2, 4)
    assert servers("resources.server_tensor_parallel=8") == (1, 8)


def test_a_task_of_another_run_is_graded_by_that_runs_services(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    services = {"judge": {"url": "http://judge/grade"}}
    tree = {
        "data": {
            "tasks": {"essays": {"train": "x", "heldout": "y", "grader": "judge"}},
            "services": services,
        }
    }
    RunDir(tmp_path).recipe.write_text(dump(from_tree(tree)))
    model = Subject("model", tokenizer.path, tokenizer.path)
    recipe, _ = asked_with(model, [f"{tmp_path}:essays"], [], [], tmp_path / "out")
    assert recipe.data.services["judge"].url == "http://judge/grade"


@pytest.mark.parametrize("name", ["quickstart-tasks", "scalerl-1gpu"])
def test_a_run_with_a_forecast_or_on_one_gpu_is_asked_on_as_many_as_there_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its tasks nor its learner are there: what names them would be refused."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "recipe.yaml").write_text(dump(load(name, [])))
    subject = Subject("run@1", tmp_path, tmp_path, RunDir(tmp_path))
    recipe, names = asked_with(subject, ["gsm8k"], [], [], tmp_path / "out")
    assert (recipe.resources.servers, names) == (2, ["gsm8k"])


def test_a_pickle_that_is_no_text_is_not_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It would make a file."""

    class Harmful:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return Path.touch, (tmp_path / "touched",)

    private = base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode()
    rows = [SETS["livecodebench"][0] | {"private_test_cases": private}, SETS["livecodebench"][1]]
    recipe = recipe_of("livecodebench", make.write_rows(tmp_path / "rows.jsonl", rows))
    loaded = suites.load(
        "livecodebench", recipe.evaluation.suites["livecodebench"], tokenizer, 2000
    )
    assert loaded.left_out == {"not of the schema": 1}
    assert not (tmp_path / "touched").exists()


def test_tests_that_become_too_long_are_left_out(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "LARGEST_TESTS", 1 << 20)
    bomb = base64.b64encode(zlib.compress(pickle.dumps(f"[{' ' * (1 << 21)}]"))).decode()
    rows = [SETS["livecodebench"][0] | {"private_test_cases": bomb}, SETS["livecodebench"][1]]
    recipe = recipe_of("livecodebench", make.write_rows(tmp_path / "rows.jsonl", rows))
    loaded = suites.load(
        "livecodebench", recipe.evaluation.suites["livecodebench"], tokenizer, 2000
    )
    assert loaded.left_out == {"not of the schema": 1}


def test_the_share_shown_is_of_what_is_asked_now() -> None:
    """An earlier command had asked more prompts, and more answers to each."""
    made = [
        Answer(
            suite="s",
            id=id,
            sample=n,
            prompt="",
            expected="",
            completion="",
            answer="",
            vote="",
            correct=True,
            truncated=False,
            interrupted=False,
            format_ok=True,
            grader_timeout=False,
            grader_error=False,
            tokens=1,
            entropy=None,
        )
        for id in "abc"
        for n in range(2)
    ]
    prompts = [Prompt(id=id, tokens=int32([1]), answer="", task="s") for id in "ad"]
    asked = Sampled("s", prompts, 1, [Outcome.of(one) for one in made], rows=Suite(data="x"))
    screen = io.StringIO()
    with counted([asked], Console(file=screen, force_terminal=True, width=160)) as count:
        count(msgspec.structs.replace(made[0], id="d", correct=False))
    assert "50.0% right" in screen.getvalue()


def test_a_misspelt_suite_is_told_from_one_of_the_users() -> None:
    with pytest.raises(
        MegarlError,
        match=(
            r"evaluation\.suites\.gsm9k\.data: field required; did you mean"
            r" evaluation\.suites\.gsm8k"
        ),
    ):
        load("quickstart", ["evaluation.suites.gsm9k={}"])
    with pytest.raises(MegarlError, match=r"evaluation\.suites\.arithmetic: a task has this name"):
        load("quickstart", ["evaluation.suites.arithmetic={data: x.jsonl}"])
    assert load(
        "quickstart", ["evaluation.suites={gsm8k: {samples: 4}, aime24: null}"]
    ).evaluation.suites.keys() == {"gsm8k"}


def test_a_model_that_never_thinks_is_told_from_one_that_is_cut_off() -> None:
    """Qwen3's instruct models have </think> in their vocabulary and never write it:
    each answer would count as wrong.
    """

    def result(format_errors: float, truncated: float) -> Result:
        metrics = {"format_error_rate": format_errors, "truncation_rate": truncated}
        return Result(
            suite="gsm8k", model="m", samples=1, settings={}, metrics=metrics, time=0.0, versions={}
        )

    good = result(0.02, 0.02)
    assert "\"length.end_of_thinking=''\" and another --out" in never_thinks(
        [good, result(1.0, 0.1)], "</think>"
    )
    assert never_thinks([good, result(0.95, 0.9)], "</think>") == ""
    assert never_thinks([result(1.0, 0.1)], "") == ""


def test_void_answers_are_told_with_their_reason() -> None:
    said = void_answers(Counter({"the tokenizer failed": 1200, "no grader could judge it": 3}))
    assert said.startswith("1,203 answers could not be generated or judged and count as wrong")
    assert said.endswith("The reason of 1,200: the tokenizer failed")


def test_a_suite_is_asked_in_the_tasks_chat_template_unless_it_names_one() -> None:
    """As `megarl eval` asks a checkpoint of the run."""
    suites = (
        "evaluation.suites={gsm8k: {}, aime24: {template: raw}, mine: {data: x.jsonl, agent:"
        " 'a:solve'}}"
    )
    found = load("qwen3-8b-2nodes", [suites]).evaluation.suites
    task = load("qwen3-8b-2nodes").data.tasks["dapo"]
    assert {name: (suite.template, suite.system) for name, suite in found.items()} == {
        "gsm8k": ("chat", task.system),
        "aime24": ("raw", ""),
        "mine": ("raw", ""),
    }
    other = load("qwen3-8b-2nodes", [suites, "data.tasks.dapo.system=Think."]).evaluation.suites
    assert {suite.template for suite in other.values()} == {"raw"}
    beside = load(
        "qwen3-8b-2nodes", [suites, "data.tasks.of_agent={train: x, heldout: y, agent: 'a:solve'}"]
    )
    assert beside.evaluation.suites == found, "an agent's prompts are raw, whatever the template is"


def test_the_answer_of_gpt_oss_is_its_last_channel(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Without it, all it thought would be graded with the answer."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer.path, folder)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        file.write_text(file.read_text().replace("</think>", "<|end|>"))

    def end_of_thinking() -> str:
        return asked_with(Subject("m", folder, folder), ["gsm8k"], [], [], tmp_path / "out")[
            0
        ].length.end_of_thinking

    assert end_of_thinking() == ""
    (folder / "chat_template.jinja").write_text(
        "{{- '<|start|>assistant<|channel|>final<|message|>' }}"
    )
    assert end_of_thinking() == "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "why"), [(b"\xff{{ messages }}", "utf-8"), (b"{% for %}", "cannot be read")]
)
def test_a_chat_template_that_cannot_be_read_is_not_left_out(
    tokenizer: Tokenizer, tmp_path: Path, template: bytes, why: str
) -> None:
    """Without it the model would be asked in another way, and get another score."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer.path, folder)
    subject = Subject("m", folder, folder)
    assert (
        asked_with(subject, ["gsm8k"], [], [], tmp_path / "out")[0]
        .evaluation.suites["gsm8k"]
        .template
        == "raw"
    )
    (folder / "chat_template.jinja").write_bytes(template)
    with pytest.raises(MegarlError, match=f"chat template .*{why}"):
        asked_with(subject, ["gsm8k"], [], [], tmp_path / "out")


def test_an_agents_suite_is_asked_raw_also_of_a_model_with_a_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("data: x.jsonl\nagent: 'a:solve'\n")
    (tmp_path / "other.yaml").write_text("data: x.jsonl\n")
    RunDir(tmp_path).recipe.write_text(dump(load("qwen3-8b-2nodes")))
    subject = Subject("run@1", tmp_path, tmp_path, RunDir(tmp_path))
    names = ("mine", "other")
    recipe, _ = asked_with(
        subject, [str(tmp_path / f"{name}.yaml") for name in names], [], [], tmp_path / "out"
    )
    assert [recipe.evaluation.suites[name].template for name in names] == ["raw", "chat"]


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_damaged_settings_of_earlier_answers_are_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(
        MegarlError, match=r"settings\.json: damaged: .*give another --out, or remove"
    ):
        earlier_settings(file)
    file.write_text('{"length": 3}')
    assert earlier_settings(file) == {"length": 3}
