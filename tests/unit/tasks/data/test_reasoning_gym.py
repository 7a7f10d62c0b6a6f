"""Problems of reasoning-gym: their sources, their rows, and their scorers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import JsonObject
from megarl.core.recipe import from_tree
from megarl.tasks.data import arithmetic_models, sources
from megarl.tasks.data import reasoning_gym as gym
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.data.reasoning_gym import GymProblem, GymSource, parsed, problem_of
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.pool import Pool
from megarl.tasks.graders.reasoning_gym import final_answer, is_right, score

SUM = GymProblem("7", "chain_sum", {}, {"expression": "3 + 4"})


def test_names_of_sources() -> None:
    assert parsed("reasoning-gym:chain_sum") == GymSource("chain_sum", 1000, 0, {})
    name = "reasoning-gym:chain_sum:size=5:seed=7:max_terms=4:allow_negation=true"
    options = {"max_terms": 4, "allow_negation": True}
    assert parsed(name) == GymSource("chain_sum", 5, 7, options)
    assert sources.is_source(name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("reasoning-gym:chain_sum:5", "write reasoning-gym:FAMILY:KEY=VALUE"),
        ("reasoning-gym:chain_sum:size=0", "size must be a whole number above 0"),
        ("reasoning-gym:chain_sum:size=many", "size must be a whole number above 0"),
        ("reasoning-gym:chain_sum:seed=-1", "seed must be a whole number from 0"),
        ("reasoning-gym:chain_sum:max_terms=[", "is not a value in YAML"),
    ],
)
def test_names_that_are_malformed(source: str, words: str) -> None:
    assert words in str(gym.problem(source))
    with pytest.raises(MegarlError, match=words):
        parsed(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "reasoning-gym:zebra_puzzles",
            "zebra_puzzles needs a package that is compiled as it is installed",
        ),
        ("reasoning-gym:chain_sums", "is not a family of reasoning-gym; did you mean chain_sum?"),
        ("reasoning-gym:chain_sum:terms=3", "chain_sum has no option terms; it has allow_negation"),
        ("reasoning-gym:chain_sum:min_terms=9:max_terms=2", "chain_sum takes no such options"),
        ("reasoning-gym:game_of_life_halting", "takes any text for right"),
    ],
)
def test_sources_that_cannot_be_made(source: str, words: str) -> None:
    with pytest.raises(MegarlError) as caught:
        list(gym._rows(parsed(source), 1))
    assert words in str(caught.value)


@pytest.mark.processes
def test_the_last_line_of_the_process_says_why() -> None:
    with pytest.raises(MegarlError, match=r"^reasoning-gym:sums: 'sums' is not a family"):
        sources.stream("reasoning-gym:sums")


def test_the_package_may_be_missing_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "PACKAGE", "no-such-package")
    with pytest.raises(MegarlError, match="is missing: pip install"):
        gym.check_package()
    monkeypatch.setattr(gym, "PACKAGE", "pytest")
    with pytest.raises(MegarlError, match=r"pytest is .*, but 0\.1\.25 is needed"):
        gym.check_package()


@pytest.mark.processes
def test_repeated_prompts_are_left_out() -> None:
    name = "reasoning-gym:chain_sum:size=40:max_terms=2:max_digits=1"
    rows = list(gym.rows(name))
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert 30 < len(rows) < 40
    assert [problem_of(row["answer"]).score("0") for row in rows].count(1.0) < 10
    assert all(problem.score(str(problem.answer)) == 1 for problem in map(answered, rows))


def answered(row: JsonObject) -> GymProblem:
    return problem_of(row["answer"])


HASHED = (
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Families that make other problems with another hash seed of Python."""


@pytest.mark.slow
@pytest.mark.parametrize("family", HASHED)
def test_problems_are_the_same_each_time(family: str) -> None:
    name = f"reasoning-gym:{family}:size=3"
    assert list(gym.rows(name)) == list(gym.rows(name))


@pytest.mark.slow
def test_every_family_gives_its_own_answer_the_full_score() -> None:
    """Through JSON, as a run has it; five families have no answer of their own."""
    gym.import_package()
    from reasoning_gym.factory import DATASETS

    without_answer = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    skipped = {"composite", "game_of_life_halting", "zebra_puzzles"}
    wrong = {}
    for family in sorted(DATASETS.keys() - without_answer - skipped):
        for row in gym._rows(GymSource(family, 2, 5, {}), 2):
            answer = str(answered(row).answer)
            if not is_right(Submission(f"<answer>{answer}</answer>", row["answer"])):
                wrong[family] = answer
    assert [family for family, answer in wrong.items() if "Integral(" not in answer] == []


def test_a_prompts_answer_is_checked_before_the_run(tmp_path: Path) -> None:
    made = arithmetic_models.character_tokenizer()
    tokenizer = Tokenizer(made.backend_tokenizer, made.eos_token_id, Path())
    train = tmp_path / "train.jsonl"
    heldout = tmp_path / "heldout.jsonl"
    answer = json.dumps(gym.msgspec.to_builtins(SUM))
    train.write_text(json.dumps({"prompt": "3+4=", "answer": answer}))
    heldout.write_text(json.dumps({"prompt": "4+4=", "answer": answer}))
    task = {"train": str(train), "heldout": str(heldout), "grader": "reasoning-gym"}
    recipe = from_tree({"data": {"tasks": {"sums": task}}})
    assert len(load_tasks(recipe, tokenizer)["sums"].train) == 1
    train.write_text(json.dumps({"prompt": "3+4=", "answer": "7"}))
    with pytest.raises(MegarlError, match=r"train.jsonl:1: .* is not a problem of reasoning-gym"):
        load_tasks(recipe, tokenizer)


@pytest.mark.parametrize("grader", ["math", "exact"])
def test_other_graders_cannot_judge_problems(grader: str) -> None:
    task = {"train": "reasoning-gym:chain_sum", "heldout": 10, "grader": grader}
    with pytest.raises(MegarlError, match="need grader: reasoning-gym"):
        from_tree({"data": {"tasks": {"sums": task}}})


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("7", "7"),
        (" 7\n", "7"),
        ("It is <answer> 7 </answer>.", "7"),
        ("<answer>6</answer> or <answer>7</answer>", "7"),
        (r"It is \boxed{7}.", "7"),
        (r"<answer>7</answer> \boxed{8}", "7"),
        ("<answer>7", "<answer>7"),
    ],
)
def test_what_the_scorer_is_given(answer: str, final: str) -> None:
    assert final_answer(answer) == final


def submission(problem: GymProblem, answer: str) -> Submission:
    return Submission(answer, gym.msgspec.json.encode(problem).decode())


COUNTDOWN = GymProblem("2*4 + 3", "countdown", {}, {"numbers": [2, 3, 4], "target": 11})
INTEGRAL = GymProblem("x**2 + C", "simple_integration", {}, {"variable": "x", "integrand": "2*x"})
INSERTION = GymProblem("AB", "string_insertion", {}, {})


@pytest.mark.parametrize(
    ("problem", "answer", "expected", "right"),
    [
        (SUM, "7", 1.0, True),
        (SUM, "<answer>7</answer>", 1.0, True),
        (SUM, "It is 7", 0.143, False),
        (SUM, "8", 0.0, False),
        (COUNTDOWN, "3 + 4*2", 1.0, True),
        (COUNTDOWN, "(2*4) + 3", 1.0, True),
        (COUNTDOWN, "11", 0.05, False),
        (COUNTDOWN, "banana", 0.0, False),
        (INTEGRAL, "x**2 + C", 1.0, True),
        (INTEGRAL, "x**2 + sin(2) + C", 1.0, True),
        (INTEGRAL, "x**3 + C", 0.0, False),
        (INTEGRAL, "Integral(2*x, x)", 0.0, False),
        (INSERTION, "AB", 1.0, True),
        (INSERTION, "['A', 'B']", 0.1, False),
    ],
)
def test_only_the_full_score_is_right(
    problem: GymProblem, answer: str, expected: float, right: bool
) -> None:
    found = score(submission(problem, answer))
    if expected in (0.0, 1.0):
        assert found == pytest.approx(expected, abs=0.06)
    else:
        assert found == pytest.approx(expected, abs=1e-3)
    assert is_right(submission(problem, answer)) is right


HOSTILE = [
    "__import__('pathlib').Path('{}').touch()",
    "[__import__('pathlib').Path('{}').touch()]",
    "open('{}', 'w')",
    "x.__class__.__init__(open('{}', 'w'))",
    'exec(\'open("{}", "w")\')',
    "[c for c in (open('{}', 'w'),)]",
    "2exec(open('{}', 'w'))",
    "x.func(open('{}', 'w'))",
]


@pytest.mark.parametrize("problem", [COUNTDOWN, INTEGRAL, INSERTION], ids=lambda p: p.family)
def test_answers_are_not_run(tmp_path: Path, problem: GymProblem) -> None:
    for answer in HOSTILE:
        assert score(submission(problem, answer.replace("{}", str(tmp_path / "it-was-run")))) == 0
    assert list(tmp_path.iterdir()) == []
    assert problem.score(HOSTILE[2].replace("{}", str(tmp_path / "it-was-run"))) < 1
    assert list(tmp_path.iterdir()) != [], "unprotected, the scorer runs it"


@pytest.mark.processes
def test_a_worker_process_grades() -> None:
    async def run() -> list[Any]:
        pool = Pool(1, limit_s=10.0, grader="reasoning-gym")
        try:
            asked = (submission(SUM, "7"), submission(SUM, "8"), Submission("7", "7"))
            return [await pool.check(one) for one in asked]
        finally:
            pool.close()

    right, wrong, no_problem = asyncio.run(asyncio.wait_for(run(), 120))
    assert (right.score, wrong.score) == (1.0, -1.0)
    assert "is not a problem of reasoning-gym" in no_problem.error
