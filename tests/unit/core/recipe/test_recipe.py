"""Recipes: every error names key, file and line; what is dumped loads again."""

import gzip
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, describe, dump, from_tree, load, shipped

Tree = dict[str, Any]


def refused(path: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    path.write_text(text)
    with pytest.raises(MegarlError) as error:
        load(str(path), overrides)
    return str(error.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run:\n  sede: 1\n", "mine.yaml:2: run.sede: unknown key; did you mean seed?"),
        ("pipelin:\n  k: 1\n", "mine.yaml:1: pipelin: unknown key; did you mean pipeline?"),
        (
            "run:\n  name: a\n  learning: 1\n",
            "mine.yaml:3: run.learning: unknown key; known: name, dir, seed, steps, resume",
        ),
        (
            "model:\n  lr: 1\n",
            "mine.yaml:2: model.lr: unknown key; did you mean learner.optimizer.lr?",
        ),
        (
            "model:\n  lora_rank: 8\n",
            "mine.yaml:2: model.lora_rank: LoRA is not supported: a run trains all weights",
        ),
        ("steps: 3\n", "mine.yaml:1: steps: unknown key; did you mean run.steps?"),
        ("run:\n  grad_clip: 1\n", "mine.yaml:2: run.grad_clip: unknown key"),
        (
            "sampling:\n  bucket_mb: 1\n",
            "mine.yaml:2: sampling.bucket_mb: unknown key; did you mean weights.bucket_mb?",
        ),
        (
            "pipeline:\n\n  k: -1\n",
            "mine.yaml:3: pipeline.k: input should be greater than or equal to 0, got -1",
        ),
        (
            "pipeline:\n  k: two\n",
            "mine.yaml:2: pipeline.k: input should be a valid integer, got 'two'",
        ),
        (
            "run:\n  steps: true\n",
            "mine.yaml:2: run.steps: input should be a valid integer, got True",
        ),
        (
            "run:\n  steps: 1.5\n",
            "mine.yaml:2: run.steps: input should be a valid integer, got 1.5",
        ),
        (
            "model:\n  fp32_head: true\n",
            "mine.yaml:2: model.fp32_head: input should be 'both', 'learner', 'server' or 'none'",
        ),
        (
            "model:\n  dtype: fp8\n",
            "mine.yaml:2: model.dtype: input should be 'bf16', 'fp16' or 'fp32', got 'fp8'",
        ),
        ("run:\n  name: a/b\n", "mine.yaml:2: run.name: string should match pattern"),
        (
            "length:\n  thinking_tokens:\n    - 1\n    - x\n",
            "mine.yaml:2: length.thinking_tokens: input should be a valid integer",
        ),
        (
            "length:\n  thinking_tokens: [1]\n",
            "mine.yaml:2: length.thinking_tokens: field required (smallest and",
        ),
        (
            "run: 5\n",
            "mine.yaml:1: run: input should be a valid dictionary or instance of Run, got 5",
        ),
        (
            "data:\n  train: x\n",
            "mine.yaml:2: data.train: unknown key; did you mean data.tasks.NAME.train?",
        ),
        (
            "data:\n  tasks:\n    math:\n      train: x\n      heldot: y\n",
            "mine.yaml:5: data.tasks.math.heldot: unknown key; did you mean heldout?",
        ),
        (
            "data:\n  tasks:\n    math: {train: x, heldout: 0}\n",
            (
                "mine.yaml:3: data.tasks.math.heldout: should be a file or hub:… of prompts, or how"
                " many rows of train to hold out"
            ),
        ),
        (
            "data:\n  tasks:\n    math: {train: x, heldout: 5, mapping: gsm9k}\n",
            "mine.yaml:3: data.tasks.math.mapping: input should be '', 'verl', 'polaris'",
        ),
        (
            "data:\n  tasks:\n    math: {train: x, heldout: 5, columns: {promt: y}}\n",
            (
                "mine.yaml:3: data.tasks.math.columns.promt: input should be 'prompt', 'answer',"
                " 'difficulty' or 'id', got 'promt'"
            ),
        ),
        (
            "data:\n  tasks:\n    math: {train: x, heldout: 5, system: y}\n",
            "mine.yaml:3: data.tasks.math.system: a system message needs template: chat",
        ),
        (
            "data:\n  tasks:\n    math:\n      train: x\n",
            "mine.yaml:3: data.tasks.math.heldout: field required (prompts never",
        ),
        ("run:\n  fork: runs/mine\n", "got 'runs/mine' (RUN@STEP: start with that run's weights"),
        (
            "data:\n  tasks:\n    math: {train: x, heldout: y, weight: 0}\n",
            "mine.yaml:3: data.tasks.math.weight: input should be greater than 0, got 0",
        ),
        (
            "data:\n  tasks:\n    a b: {train: x, heldout: y}\n",
            "mine.yaml:3: data.tasks.a b: string should match",
        ),
        ("data:\n  tasks: [x]\n", "mine.yaml:2: data.tasks: input should be a valid dictionary"),
        (
            "length:\n  stages:\n    - until_step: 0\n      thinking_tokens: [1, 2]\n",
            (
                "mine.yaml:2: length.stages.0.until_step: input should be greater than or equal to"
                " 1, got 0"
            ),
        ),
        (
            "length:\n  stages: [{until_steps: 1, thinking_tokens: [1, 2]}]\n",
            "mine.yaml:2: length.stages.0.until_steps: unknown key; did you mean until_step?",
        ),
        ("- a\n", "mine.yaml:1: a recipe is a mapping of sections; this is a list"),
        ("run: [1\n", "mine.yaml:2: not YAML"),
        ("run:\n  seed: 1\n  seed: 2\n", "mine.yaml:3: run.seed is given twice"),
        ("run:\n  seed: 1\nrun:\n  steps: 2\n", "mine.yaml:3: run is given twice"),
    ],
)
def test_errors_name_key_and_line(file: Path, text: str, said: str) -> None:
    assert said in refused(file, text)


def test_all_errors_are_said_at_once(file: Path) -> None:
    said = refused(file, "run:\n  sede: 1\npipeline:\n  k: -1\n")
    assert "mine.yaml:2: run.sede" in said
    assert "mine.yaml:4: pipeline.k" in said


def test_impossible_combination_names_the_line(file: Path) -> None:
    text = "resources:\n  learner_ranks: 2\nbatch:\n  advantage: group\n  prompts: 7\n"
    assert "mine.yaml:5: batch.prompts: 7 is not divisible" in refused(file, text)
    assert "override 'batch.prompts=9': batch.prompts: 9 is not divisible" in refused(
        file, text, ("batch.prompts=9",)
    )


def test_overrides(file: Path) -> None:
    file.write_text("run:\n  seed: 1\n")
    overrides = [
        "run.seed=3",
        "learner.optimizer.lr=1e-4",
        "length.thinking_tokens=[4, 9]",
        "batch.positive_threshold=null",
    ]
    recipe = load(str(file), overrides)
    assert recipe.run.seed == 3
    assert recipe.learner.optimizer.lr == 1e-4
    assert recipe.length.thinking_tokens == (4, 9)
    assert recipe.batch.positive_threshold is None


def test_nothing_behind_the_equals_sign_is_an_empty_text_where_one_may_stand(file: Path) -> None:
    file.write_text(MATH)
    recipe = load(
        str(file),
        [
            "length.end_of_thinking=",
            "length.control=none",
            "data.tasks.math.mapping=",
            "batch.positive_threshold=",
        ],
    )
    assert (recipe.length.end_of_thinking, recipe.data.tasks["math"].mapping) == ("", "")
    assert recipe.batch.positive_threshold is None
    assert "run.seed: input should be a valid integer, got None" in refused(
        file, MATH, ("run.seed=",)
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.seed", "override 'run.seed': write key=value"),
        ("=3", "override '=3': write key=value"),
        ("run.seed.x=3", "override 'run.seed.x=3': seed is a value, not a section"),
        ("run.seed=[", "override 'run.seed=[': the value is not YAML"),
        ("run.sed=3", "override 'run.sed=3': run.sed: unknown key; did you mean seed?"),
        ("run.seed=x", "override 'run.seed=x': run.seed: input should be a valid integer, got 'x'"),
    ],
)
def test_bad_overrides(file: Path, override: str, said: str) -> None:
    assert said in refused(file, "run:\n  seed: 1\n", (override,))


MATH = "data:\n  tasks:\n    math: {train: a, heldout: b}\n"


def test_tasks_by_name(file: Path, tmp_path: Path) -> None:
    file.write_text(MATH)
    changed = load(
        str(file),
        [
            "data.tasks.math.train=x",
            "data.tasks.math.weight=2",
            "data.tasks.code={train: c, heldout: d}",
        ],
    )
    assert {name: task.train for name, task in changed.data.tasks.items()} == {
        "math": "x",
        "code": "c",
    }
    assert changed.data.shares == {"math": Fraction(2, 3), "code": Fraction(1, 3)}
    above = tmp_path / "above.yaml"
    above.write_text(
        f"base: {file}\ndata: {{tasks: {{math: null, code: {{train: c, heldout: d, weight:"
        " 1e-1}}}\n"
    )
    assert {name: task.weight for name, task in load(str(above)).data.tasks.items()} == {
        "code": 0.1
    }
    assert load(str(file), ["data.tasks.math=null"]).data.tasks == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "data.tasks.maths.train=x",
            (
                "override 'data.tasks.maths.train=x': data.tasks.maths.heldout: field required; did"
                " you mean data.tasks.math?"
            ),
        ),
        (
            "data.tasks.math.tran=x",
            (
                "override 'data.tasks.math.tran=x': data.tasks.math.tran: unknown key; did you mean"
                " train?"
            ),
        ),
        (
            "data.grader=math",
            (
                "override 'data.grader=math': data.grader: unknown key; did you mean"
                " data.tasks.NAME.grader?"
            ),
        ),
        (
            "data.tasks.math.grader=maths",
            "data.tasks.math.grader: unknown grader 'maths'; did you mean math? known: math, exact",
        ),
        (
            "data.tasks.math.environment=pythn",
            (
                "data.tasks.math.environment: unknown environment 'pythn'; did you mean python?"
                " known: python, calculator, guessing, and package.module:Class"
            ),
        ),
    ],
)
def test_bad_overrides_of_tasks(file: Path, override: str, said: str) -> None:
    assert said in refused(file, MATH, (override,))


def test_budgets_of_stages() -> None:
    length = from_tree(
        {
            "length": {
                "stages": [
                    {"until_step": 3, "thinking_tokens": [1, 4]},
                    {"until_step": 5, "thinking_tokens": [2, 6]},
                ],
                "thinking_tokens": [7, 9],
            }
        }
    ).length
    assert [length.at(step).thinking_tokens for step in range(7)] == [(1, 4)] * 3 + [(2, 6)] * 2 + [
        (7, 9)
    ] * 2
    assert length.completion_tokens == 9 + length.answer_tokens, (
        "checks, evaluation and constant aggregation: the full one"
    )
    assert length.at(0).completion_tokens == 4 + length.answer_tokens, (
        "the overlong penalty: that of the stage"
    )
    assert Recipe().length.at(0) == Recipe().length


def test_unknown_name() -> None:
    with pytest.raises(
        MegarlError,
        match=(
            r"no recipe 'scalerl8b': neither a file nor a shipped recipe; did you mean scalerl-8b\?"
            r" `meg"
        ),
    ):
        load("scalerl8b")
    for file in ("mine.yaml", "recipes/mine"):
        with pytest.raises(MegarlError, match=f"no recipe '{file}': there is no such file") as said:
            load(file)
        assert "quickstart" not in str(said.value)


def test_a_model_that_does_not_think_needs_no_budget_for_it() -> None:
    plain = ["length.control=none", "length.end_of_thinking=''", "length.thinking_tokens=[0,0]"]
    assert (
        load("quickstart", plain).length.completion_tokens
        == load("quickstart").length.answer_tokens
    )
    with pytest.raises(
        MegarlError, match=r"length\.thinking_tokens: give \[shortest, longest\], 1 or more"
    ):
        load("quickstart", ["length.thinking_tokens=[0,0]"])


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipes(name: str) -> None:
    recipe = load(name)
    assert recipe.run.name == name


def test_scalerl_is_the_papers() -> None:
    """arXiv 2510.13786, section "ScaleRL" and appendix: the numbers that are stated."""
    r = load("scalerl-8b")
    assert r.pipeline.k == 8
    assert (r.batch.prompts, r.sampling.generations) == (48, 16)
    assert (r.batch.aggregation, r.batch.advantage, r.batch.zero_variance) == (
        "prompt",
        "batch",
        "drop",
    )
    assert r.batch.positive_threshold == 0.9
    assert (r.length.prompt_tokens, r.length.thinking_tokens[0], r.length.answer_tokens) == (
        2048,
        10_000,
        2048,
    )
    optimizer = r.learner.optimizer
    assert (optimizer.lr, optimizer.warmup_steps) == (5e-7, 100)
    assert (r.evaluation.every, r.evaluation.prompts, r.evaluation.samples) == (100, 1000, 16)
    assert r.model.fp32_head == "both"
    gpus = r.resources.servers * r.resources.server_tensor_parallel
    assert gpus + r.resources.learner_ranks == 64 + 16


@given(
    k=st.integers(0, 20),
    prompts=st.integers(1, 100),
    lr=st.floats(1e-12, 1.0),
    phrase=st.text(max_size=30),
    threshold=st.none() | st.floats(0.01, 1.0),
)
@example(k=0, prompts=1, lr=1.0, phrase="\x85", threshold=None)
def test_dump_and_describe_load_to_the_same(
    k: int, prompts: int, lr: float, phrase: str, threshold: float | None
) -> None:
    import tempfile

    recipe = from_tree(
        {
            "pipeline": {"k": k},
            "batch": {"prompts": prompts, "positive_threshold": threshold},
            "learner": {"optimizer": {"lr": lr}},
            "length": {
                "interruption": phrase + "</think>",
                "stages": [{"until_step": k + 1, "thinking_tokens": [1, prompts]}],
            },
            "data": {
                "tasks": {
                    "a": {"train": phrase, "heldout": "b", "weight": lr},
                    "b-1": {
                        "train": "",
                        "heldout": k + 1,
                        "template": "chat",
                        "system": phrase,
                        "columns": {"id": phrase},
                    },
                },
                "decontaminate": [phrase],
            },
        }
    )
    for text in (dump(recipe), describe(recipe)):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            assert load(file.name) == recipe


def test_a_recipe_over_another(tmp_path: Path) -> None:
    below = tmp_path / "below.yaml"
    above = tmp_path / "above.yaml"
    below.write_text(
        "model: {path: here, tensor_parallel: 2}\nresources: {learner_ranks: 2}\nrun: {steps: 5}\n"
    )
    above.write_text(f"base: {below}\nmodel:\n  path: there\n")
    recipe = load(str(above), ["run.steps=6"])
    assert (recipe.model.path, recipe.model.tensor_parallel, recipe.run.steps) == ("there", 2, 6)
    above.write_text(f"base: {below}\nmodel:\n  tensor_parallel: 3\n")
    with pytest.raises(
        MegarlError, match=r"below\.yaml:2: resources\.learner_ranks: 2 ranks do not divide"
    ):
        load(str(above))


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("nothing", r"above\.yaml:1: base: no recipe 'nothing'"),
        ("above.yaml", r"above\.yaml:1: base: .* is itself derived from this"),
    ],
)
def test_bad_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("above.yaml").write_text(f"base: {base}\n")
    with pytest.raises(MegarlError, match=said):
        load("above.yaml")


def test_frozen() -> None:
    recipe = Recipe()
    with pytest.raises(ValueError, match="frozen"):
        recipe.run.seed = 1  # type: ignore[misc]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A thousand million values in nine lines."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "mine.yaml: the file is empty"),
        (b"# run:\n", "mine.yaml: the file is empty"),
        (b"run:\n  seed: 1\n  name: a\0b\n", "mine.yaml: not YAML: unacceptable character #x0000"),
        ("run:\n  seed: 1\n".encode("utf-16"), "mine.yaml:1: not UTF-8 text (byte 0xff)"),
        (gzip.compress(b"run:\n  seed: 1\n", mtime=0), "mine.yaml:1: not UTF-8 text (byte 0x8b)"),
        (
            b"run: &a\n  seed: *a\n",
            "mine.yaml:2: not YAML: the alias *a is not allowed; write its value out",
        ),
        (BOMB.encode(), "mine.yaml:2: not YAML: the alias *a"),
        (b"[" * 5_000, "mine.yaml:1: not YAML: mappings and lists are nested more than 32 deep"),
        (
            b"run: " + b"{a: " * 5_000,
            "mine.yaml:1: not YAML: mappings and lists are nested more than 32 deep",
        ),
        (
            b"x: [" + b"1, " * (1 << 19) + b"1]\n",
            "mine.yaml: larger than 1048576 bytes, too large for a recipe",
        ),
        (
            b"run: {seed: 2026-13-40}\n",
            "mine.yaml: not YAML: a value cannot be read: month must be in 1..12",
        ),
        (
            b"run: {seed: " + b"9" * 5_000 + b"}\n",
            "mine.yaml: not YAML: a value cannot be read: Exceeds the limit",
        ),
        (
            b"run: {name: " + b"n" * 300 + b"}\n",
            "mine.yaml:1: run.name: string should have at most 200 characters",
        ),
        (
            b"run: {seed: " + b"n" * 9_000 + b"}\n",
            "run.seed: input should be a valid integer, got 'nnnn",
        ),
        (b"run: {name: ..}\n", "mine.yaml:1: run.name: string should match pattern"),
        (b"run: {name: .}\n", "mine.yaml:1: run.name: string should match pattern"),
        (
            b"learner: {optimizer: {lr: .inf}}\n",
            "learner.optimizer.lr: input should be a finite number, got inf",
        ),
        (b"loss: {cap: .nan}\n", "loss.cap: input should be a finite number, got nan"),
    ],
)
def test_a_file_may_be_anything(file: Path, data: bytes, said: str) -> None:
    """One message of a few lines, within seconds."""
    file.write_bytes(data)
    with pytest.raises(MegarlError) as error:
        load(str(file))
    assert said in str(error.value)
    assert len(str(error.value)) < 1_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", ["*a", "[" * 5_000, "2026-13-40", "'\0'"])
def test_an_override_may_be_anything(file: Path, value: str) -> None:
    said = refused(file, "run: {seed: 1}\n", (f"run.seed={value}",))
    assert "the value is not YAML" in said
    assert len(said) < 1_000


@pytest.mark.parametrize("name", [".servers", "a.b", "-", "..a"])
def test_names_of_runs_may_have_dots(file: Path, name: str) -> None:
    file.write_text(f"run: {{name: {name!r}}}\n")
    assert load(str(file)).run.name == name


def test_most_of_many_errors_are_counted(file: Path) -> None:
    said = refused(file, "run:\n" + "".join(f"  key{n}: 1\n" for n in range(500)))
    assert "… and 489 more" in said
    assert said.count("\n") < 20


def test_overrides_leave_the_given_tree_as_it_is() -> None:
    tree: Tree = {"run": {"steps": 5}}
    assert from_tree(tree, ["run.seed=3"]).run.seed == 3
    assert tree == {"run": {"steps": 5}}


def test_the_recipe_of_a_run_has_the_number_of_its_schema(file: Path) -> None:
    file.write_text(dump(from_tree({"run": {"steps": 5}})))
    assert load(str(file)).run.steps == 5
    file.write_text(file.read_text().replace("schema: 1", "schema: 99"))
    with pytest.raises(
        MegarlError,
        match=r"mine.yaml:1: written in schema version 99, this version of megarl reads 1; use",
    ):
        load(str(file))


def test_a_base_on_the_command_line_brings_what_is_said_for_it(file: Path) -> None:
    file.write_text(
        "base: scalerl-8b\nbatch: {prompts: 24}\n"
        "with_base: {quickstart: {batch: {prompts: 9}, run: {seed: 4}}}\n"
    )
    assert (load(str(file)).batch.prompts, load(str(file)).run.seed) == (24, 0)
    small = load(str(file), ["base=quickstart", "run.steps=3"])
    assert (small.batch.prompts, small.run.seed, small.run.steps) == (9, 4, 3)
    assert small.model == load("quickstart").model
    assert load("quickstart", ["base=quickstart"]) == load("quickstart")


@pytest.mark.parametrize(
    ("text", "base", "said"),
    [
        ("run: {seed: 1}\n", "quickstart", "base=quickstart: .* has no base to be replaced"),
        ("base: quickstart\n", "quikstart", "no recipe 'quikstart'"),
        ("base: quickstart\nwith_base: {quikstart: {}}\n", "", "mine.yaml:2: with_base.quikstart:"),
        ("base: quickstart\nwith_base: 3\n", "", "mine.yaml:2: with_base: give sections"),
    ],
)
def test_bases_that_are_none(file: Path, text: str, base: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(MegarlError, match=said):
        load(str(file), [f"base={base}"] if base else [])
