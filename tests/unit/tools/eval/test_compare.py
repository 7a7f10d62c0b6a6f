"""Two evaluations compared: what is paired and refused, the interval against
simulations, the page against hostile text.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cli import main as cli
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.evaluation.answers import Answer, Result, SuiteDir
from megarl.core.evaluation.metrics import settings_of
from megarl.core.recipe import dump, load
from megarl.core.telemetry import pictures
from megarl.tools.eval.compare import (
    SHORTEST,
    Quantity,
    compare,
    main,
    paired_difference,
    read_side,
    shortened,
    write_comparison,
)
from megarl.tools.eval.subject import Subject, recipe_of
from tests.evaluation_sets import byte_llama
from tests.pages import Resources, asks_the_network

HOSTILE = (
    "</script><script>alert(1)</script><!-- <img src=http://x onerror=alert(2)> \u2028"
    " \U0001f600 & é"
)


def answer(name: str, correct: bool, sample: int = 0, **changes: Any) -> Answer:
    known: dict[str, Any] = {
        "suite": "math-500",
        "id": name,
        "sample": sample,
        "prompt": f"What is {name}?",
        "expected": name,
        "completion": "so",
        "answer": "so",
        "vote": name if correct else "0",
        "correct": correct,
        "truncated": False,
        "interrupted": False,
        "format_ok": True,
        "grader_timeout": False,
        "grader_error": False,
        "tokens": 10,
        "entropy": 0.5,
    }
    return Answer(**known | changes)


def write(
    out: Path, answers: list[Answer], model: str = "", settings: dict[str, Any] | None = None
) -> Path:
    """An evaluation's directory; without a model's name one that has not ended."""
    folder = SuiteDir(out, answers[0].suite)
    folder.path.mkdir(parents=True)
    for one in answers:
        folder.add(one)
    if model:
        folder.write_result(
            Result(
                suite=answers[0].suite,
                model=model,
                samples=1,
                settings=settings or {},
                metrics={},
                time=0.0,
                versions={},
            )
        )
    return out


def compared(a: Path, b: Path, suite: str = "math-500") -> Any:
    return compare(suite, read_side(a, suite), read_side(b, suite))


def quantity(comparison: Any, name: str) -> Quantity:
    (found,) = [one for one in comparison.quantities if one.name == name]
    return found


def test_only_prompts_of_both_count_and_that_is_said(tmp_path: Path) -> None:
    a = write(
        tmp_path / "a",
        [answer("1", True), answer("2", False), answer("10", True), answer("9", False)],
        "one",
    )
    b = write(
        tmp_path / "b",
        [answer("1", True), answer("10", False), answer("2", True), answer("8", True)],
    )
    found = compared(a, b)
    assert found.prompts == ["1", "2", "10"]
    right = quantity(found, "right")
    assert (right.a.mean, right.b.mean, right.difference.mean) == (2 / 3, 2 / 3, 0.0)
    assert "Left out: 1 prompt that only one has answers to." in found.notes
    assert any(note.startswith("b: the evaluation has not ended") for note in found.notes)


def test_what_differs_is_said(tmp_path: Path) -> None:
    a = write(
        tmp_path / "a",
        [answer("1", True)],
        "one",
        {"model": "x", "length": {"answer_tokens": 5}, "dtype": "bf16"},
    )
    b = write(
        tmp_path / "b",
        [
            answer("1", True, prompt="Else?"),
            answer("1", False, sample=1, void="no server would have it"),
        ],
        "one",
        {"model": "y", "length": {"answer_tokens": 7}, "dtype": "bf16"},
    )
    notes = " ".join(compared(a, b).notes)
    assert f"length.answer_tokens: 5 of {tmp_path / 'a'}, 7 of {tmp_path / 'b'}." in notes
    assert f"Answers a prompt: 1 of {tmp_path / 'a'}, 2 of {tmp_path / 'b'}." in notes
    assert "Worded differently, or in another template, on the two sides: 1 of 1 prompts." in notes
    assert "could not be generated or judged and count as wrong: 1." in notes
    assert "dtype" not in notes
    assert "model:" not in notes


def test_several_answers_a_prompt(tmp_path: Path) -> None:
    rights = {
        "a": {"1": (1, 0, 0, 0), "2": (1, 1, 0, 0)},
        "b": {"1": (1, 1, 1, 0), "2": (0, 0, 0, 0)},
    }
    for side, prompts in rights.items():
        answers = [
            answer(name, bool(ok), n) for name, oks in prompts.items() for n, ok in enumerate(oks)
        ]
        write(tmp_path / side, answers, side)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert quantity(found, "mean@4").difference.mean == 0.0
    assert (quantity(found, "pass@4").a.mean, quantity(found, "pass@4").b.mean) == (1.0, 0.5)
    assert quantity(found, "maj@4").b.mean == 0.5


def test_both_verdicts_of_multiple_choice(tmp_path: Path) -> None:
    chosen = {"a": [(0, 1), (1, 1)], "b": [(1, 0), (0, 0)]}
    for side, of in chosen.items():
        answers = [
            answer(
                str(n),
                first == 0,
                expected="good",
                choices=("good", "bad"),
                loglikelihoods=(-1.0, -2.0),
                chosen=first,
                chosen_normalised=second,
            )
            for n, (first, second) in enumerate(of)
        ]
        write(tmp_path / side, answers, side)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert [one.name for one in found.quantities] == ["right", "by length", "truncated", "tokens"]
    assert (quantity(found, "by length").a.mean, quantity(found, "by length").b.mean) == (0.0, 1.0)


def test_what_is_not_of_one_set_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [answer("1", True), answer("2", True)], "a")
    with pytest.raises(
        MegarlError, match="'1' expects '1' in one and '7' in the other; the two sets differ"
    ):
        compared(a, write(tmp_path / "b", [answer("1", True, expected="7")], "b"))
    with pytest.raises(MegarlError, match="no prompt of math-500 in common"):
        compared(a, write(tmp_path / "c", [answer("3", True)], "c"))
    other = write(tmp_path / "d", [answer("1", True, suite="gsm8k")], "d")
    with pytest.raises(
        MegarlError, match=r"has answers to math-500, .* to gsm8k: nothing to compare"
    ):
        main(a, other, None, None)
    with pytest.raises(MegarlError, match="no answers to gsm8k in it; it has math-500"):
        main(a, other, "gsm8k", None)
    with pytest.raises(MegarlError, match="neither OUT of `megarl eval` nor RUN"):
        main(a, tmp_path / "nothing", None, None)


@pytest.mark.parametrize(("prompts", "k"), [(10, 1), (30, 1), (30, 16), (100, 4), (500, 1)])
@pytest.mark.parametrize("better", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(0.5, 0.5), (0.2, 4.0)], ids=["mixed", "hard"])
def test_the_interval_holds_the_truth_as_often_as_it_says(
    prompts: int, k: int, better: float, shape: tuple[float, float]
) -> None:
    """Each prompt has a chance of its own, of which B has a share more of what is
    missing. 94 of 100, for 600 draws.
    """
    generator = np.random.default_rng(0)
    hits = 0
    draws = 600
    truth = better * (1 - shape[0] / sum(shape))
    for _ in range(draws):
        chance = generator.beta(*shape, prompts)
        a = generator.binomial(k, chance) / k
        b = generator.binomial(k, chance + better * (1 - chance)) / k
        found = paired_difference(list(a), list(b), 1 / k)
        hits += found.low <= truth <= found.high
        assert found.low <= found.mean <= found.high
    assert hits / draws > 0.925


def test_the_interval_of_one_answer_a_prompt_is_that_of_bonett_and_price() -> None:
    """2012, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data", with 1.96 for the normal's quantile where ours is Student's:
    30 only B has right, 12 only A, of 200.
    """
    a = [0.0] * 30 + [1.0] * 12 + [1.0] * 100 + [0.0] * 58
    b = [1.0] * 30 + [0.0] * 12 + [1.0] * 100 + [0.0] * 58
    p12 = 13 / 202
    p21 = 31 / 202
    half = 1.96 * np.sqrt((p12 + p21 - (p21 - p12) ** 2) / 202)
    found = paired_difference(a, b, 1.0)
    assert found.mean == pytest.approx(18 / 200)
    np.testing.assert_allclose(
        (found.low, found.high), (p21 - p12 - half, p21 - p12 + half), atol=1e-3
    )


def test_two_shares_differ_by_one_at_most() -> None:
    """For one prompt, and where B always and A never is right, Student's interval
    reaches further; lengths may.
    """
    assert paired_difference([0.0], [0.0], 1.0) == (0.0, -1.0, 1.0)
    assert paired_difference([0.0] * 15, [1.0] * 15, 1.0).high == 1.0
    assert paired_difference([0.0, 1.0], [9.0, 99.0], 0.0).high > 99


def test_the_interval_of_lengths_is_students() -> None:
    """The textbook: mean ± t s/√n, with n - 1 under the squares; one prompt says
    nothing of how lengths vary.
    """
    found = paired_difference([0.0] * 3, [1.0, 2.0, 6.0], 0.0)
    np.testing.assert_allclose(
        (found.low, found.high), 3 + np.array([-1, 1]) * 4.302653 * np.sqrt(7 / 3), rtol=1e-6
    )
    assert paired_difference([0.0], [9.0], 0.0) == (9.0, -np.inf, np.inf)


def data_of(page: Resources) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The overview, and each prompt."""
    *prompts, script = page.scripts
    found = re.search(r"^const DATA = (.*);$", script, re.MULTILINE)
    assert found is not None
    return json.loads(found[1]), [json.loads(prompt) for prompt in prompts]


def test_the_page_shows_hostile_text_and_asks_no_network(tmp_path: Path) -> None:
    """Each text of an answer tries to leave its script; all come back as they were, and
    the page has no tag more.
    """
    calm = {"id": "1", "prompt": "p", "expected": "e", "completion": "c", "answer": "a"}
    tags = []
    for name, texts in {
        "calm": calm,
        "hostile": {key: HOSTILE + key for key in calm} | {"expected": HOSTILE},
    }.items():
        others: dict[str, Any] = {k: v for k, v in texts.items() if k != "id"}
        one = answer(texts["id"], False, **others)
        a, b = (
            write(
                tmp_path / f"{name}-{side}",
                [one],
                f"{side} {HOSTILE}" if name == "hostile" else side,
            )
            for side in "ab"
        )
        target = tmp_path / f"{name}.html"
        assert write_comparison(compared(a, b), target) is None
        text = target.read_text()
        page = Resources(text)
        tags.append(page.tags)
        assert page.found == []
        overview, (prompt,) = data_of(page)
        assert overview["prompts"][0][0] == texts["id"]
        assert [
            prompt["prompts"][0],
            prompt["expected"],
            prompt["a"][0]["text"],
            prompt["b"][0]["answer"],
        ] == [[texts[key]] for key in ("prompt", "expected", "completion", "answer")]
    assert tags[0] == tags[1]
    assert not asks_the_network((tmp_path / "calm.html").read_text())
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(",
        (tmp_path / "calm.html").read_text(),
    )


def test_half_a_surrogate_pair_does_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "template.html").write_text("<script>$data</script>")
    pictures.write_page(
        tmp_path / "template.html", tmp_path / "page.html", data=pictures.embedded("a\ud800b")
    )
    assert (tmp_path / "page.html").read_text() == '<script>"a?b"</script>'


def test_too_much_text_is_cut_in_the_middle_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.tools.eval.compare.LARGEST", 10_000)
    long = "begin" + "x" * 9000 + "end"
    a, b = (
        write(tmp_path / side, [answer("1", True, completion=long), answer("2", True)], side)
        for side in "ab"
    )
    assert write_comparison(compared(a, b), tmp_path / "page.html") == 10_000 // 4
    overview, (cut, whole) = data_of(Resources((tmp_path / "page.html").read_text()))
    begin, left_out, end = cut["a"][0]["text"]
    assert (begin[:5], end[-3:], len(begin) + left_out + len(end)) == ("begin", "end", len(long))
    assert len(begin) + len(end) == 10_000 // 4
    assert whole["a"][0]["text"] == ["so"]
    assert any("Completions of more than 2,500 characters" in note for note in overview["notes"])


def test_a_completion_keeps_some_characters_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.tools.eval.compare.LARGEST", 10)
    a, b = (
        write(tmp_path / side, [answer("1", True, completion="x" * 5000)], side) for side in "ab"
    )
    assert write_comparison(compared(a, b), tmp_path / "page.html") == SHORTEST


def test_shortened() -> None:
    assert shortened("abcdefghij", None) == shortened("abcdefghij", 10) == ["abcdefghij"]
    assert shortened("abcdefghij", 8) == ["ab", 2, "efghij"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", [answer("1", True), answer("2", False)], "runs/x@20")
    b = write(tmp_path / "b", [answer("1", True), answer("2", True)], "runs/x@40")
    assert cli(["answers", "compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    for said in (
        "math-500: 2 prompts. A is runs/x@20, B is runs/x@40.",
        "0.500 [",
        "+0.500 [",
        "compare-math-500.html",
    ):
        assert said in out
    assert (b / "compare-math-500.html").is_file()
    assert (
        cli(["answers", "compare", str(a), str(b), "-o", str(tmp_path / "no" / "page.html")]) == 2
    )
    assert "no such directory" in capsys.readouterr().err


def test_the_screen_shows_what_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts about which the sides differ come first, and what a template adds to all
    of them is left out.
    """
    asked = {name: f"<|user|>What is {name}?<|end|>" for name in "1234567"}
    equal = [answer(name, True, prompt=asked[name], completion="same") for name in "12345"]
    before = answer("6", False, prompt=asked["6"], completion="I am\nnot sure")
    after = answer("6", True, prompt=asked["6"], completion="It is 6.")
    a = write(tmp_path / "a", [*equal, before], "A")
    b = write(tmp_path / "b", [*equal, after], "B")
    assert cli(["answers", "compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("prompt"))
    assert lines[start + 1].split("  ")[0] == "6"
    assert "wrong: I am not sure" in lines[start + 1]
    assert "right: It is 6." in lines[start + 1]
    assert [line.split("  ")[0] for line in lines[start + 2 : start + 6]] == ["1", "2", "3", "4"]
    assert not any(line.startswith("5") for line in lines), "five prompts are shown"


def test_a_run_and_a_directory_are_asked_with_equal_lengths_about_the_runs_task(
    tmp_path: Path,
) -> None:
    """Room for the answer decides the score:
    a directory alone has its whole context.
    """
    model = tmp_path / "model"
    byte_llama(model)
    made = [tmp_path / name for name in ("run", "other")]
    for folder, tokens in zip(made, (8, 9), strict=True):
        folder.mkdir()
        recipe = load("quickstart", [f"length.answer_tokens={tokens}"])
        RunDir(folder).recipe.write_text(dump(recipe))
    subject = Subject("model", model, model)
    asked, _ = recipe_of(subject, [f"{made[0]}:arithmetic"], [], [], tmp_path)
    assert asked.length == load("quickstart").length
    alone, _ = recipe_of(subject, ["gsm8k"], [], [], tmp_path)
    assert alone.length.context_tokens > 1000
    with pytest.raises(MegarlError, match=r"other have different keys under length"):
        recipe_of(subject, [f"{folder}:arithmetic" for folder in made], [], [], tmp_path)


def test_a_runs_own_evaluation_and_megarl_evals_of_its_held_out_prompts_have_the_same_settings(
    tmp_path: Path,
) -> None:
    """The one is of a task, the other of a suite made from it."""
    run = load("quickstart")
    made = tmp_path / "run"
    made.mkdir()
    RunDir(made).recipe.write_text(dump(run))
    asked, (name,) = recipe_of(
        Subject("run@1", made, made, RunDir(made)), ["arithmetic"], [], [], tmp_path
    )
    settings = {"model": {}, "prompts": "a digest"} | settings_of(
        asked, asked.evaluation.suites[name]
    )
    a = write(tmp_path / "a", [answer("x", True)], "A", settings_of(run, run.data.tasks[name]))
    b = write(tmp_path / "b", [answer("x", True)], "B", settings)
    assert list(compared(a, b).notes) == []
    c = write(tmp_path / "c", [answer("x", True)], "C", settings | {"prompts": "another"})
    assert compared(b, c).notes == ["prompts: a digest of B, another of C."]


def test_the_best_by_reward_is_compared_only_where_both_have_rewards(tmp_path: Path) -> None:
    rewarded = [answer("x", n > 0, n, reward=float(n)) for n in range(2)]
    a = write(tmp_path / "a", rewarded)
    b = write(tmp_path / "b", rewarded)
    c = write(tmp_path / "c", [answer("x", n > 0, n) for n in range(2)])
    assert {"pass@2", "maj@2", "best@2"} <= {one.name for one in compared(a, b).quantities}
    names = {one.name for one in compared(a, c).quantities}
    assert {"pass@2", "maj@2"} <= names
    assert "best@2" not in names, "without rewards none can be chosen"
