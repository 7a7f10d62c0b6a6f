"""Metrics and votes of answers, how answers are stored,
and the curves made from them.
"""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Segment, float32, int32
from megarl.core.evaluation.answers import Answer, SuiteDir, read_answers, suites_in
from megarl.core.evaluation.metrics import Outcome, maj_at_k, pass_at_k, summarise
from megarl.core.evaluation.score import _entropy
from megarl.core.evaluation.votes import Votes, extracted
from megarl.core.recipe import from_tree
from megarl.core.sampling.sampler import Completion
from megarl.tasks.graders.grader import TaskGraders
from megarl.tools.eval import curve


def answer(id: str, sample: int, vote: str, correct: bool, **more: Any) -> Answer:
    fields = {
        "suite": "s",
        "prompt": "p",
        "expected": "1",
        "completion": "c",
        "answer": vote,
        "truncated": False,
        "interrupted": False,
        "format_ok": bool(vote),
        "grader_timeout": False,
        "grader_error": False,
        "tokens": 10,
        "entropy": 0.5,
    }
    return Answer(
        **{**fields, "id": id, "sample": sample, "vote": vote, "correct": correct, **more}
    )


VOTES = {"a": "1123", "b": "2221", "c": "31 1", "d": "2345"}


def answers(**more: Any) -> list[Answer]:
    """Four prompts, four answers each; 1 is right, a blank is no answer."""
    return [
        answer(id, n, vote.strip(), vote == "1", tokens=10 * (n + 1), **more)
        for id, votes in VOTES.items()
        for n, vote in enumerate(votes)
    ]


def test_a_summary_against_its_definitions() -> None:
    found = summarise([Outcome.of(a) for a in answers()])
    right = {id: votes.count("1") for id, votes in VOTES.items()}
    assert found["pass_rate"] == sum(right.values()) / 16 == found["pass@1"]
    for k in (2, 4):
        assert found[f"pass@{k}"] == pytest.approx(
            np.mean([pass_at_k(c, 4, k) for c in right.values()])
        )
        by_vote = [
            maj_at_k([v.strip() for v in votes], [v == "1" for v in votes], k)
            for votes in VOTES.values()
        ]
        assert found[f"maj@{k}"] == pytest.approx(np.mean(by_vote))
        assert found[f"maj@{k}_low"] <= found[f"maj@{k}"] <= found[f"maj@{k}_high"]
    assert found["maj@4"] == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert (found["n_prompts"], found["format_error_rate"], found["entropy"]) == (4, 1 / 16, 0.5)
    lengths = (
        found["completion_tokens_mean"],
        found["completion_tokens_p50"],
        found["completion_tokens_p95"],
    )
    assert lengths == (25, 20, 40)
    assert "best@2" not in found


def test_no_majority_where_answers_do_not_vote() -> None:
    programs = [Outcome.of(a)._replace(vote="") for a in answers()]
    assert not any(name.startswith("maj") for name in summarise(programs))


def test_a_void_answer_has_no_vote_and_the_others_have_their_majority() -> None:
    outcomes = [Outcome.of(a) for a in answers()]
    void = outcomes[0]._replace(vote="", correct=False, void="lost", format_ok=True)
    assert summarise([void, *outcomes[1:]])["maj@4"] == pytest.approx((1 / 3 + 0 + 1 + 0) / 4)


def test_the_best_by_a_reward_and_by_its_opposite() -> None:
    """A reward that knows the answer is an oracle; its opposite finds a right one only
    where all are right.
    """
    for sign in (1.0, -1.0):
        found = summarise([Outcome.of(a)._replace(reward=sign * a.correct) for a in answers()])
        assert found["best@4"] == (found["pass@4"] if sign > 0 else 0.0)
        assert found["best@1"] == pytest.approx(found["pass_rate"])


def test_a_void_answer_counts_as_wrong_and_is_replaced(tmp_path: Path) -> None:
    suite = SuiteDir(tmp_path, "s")
    suite.path.mkdir()
    suite.add(answer("a", 0, "", False, void="lost", entropy=None))
    suite.add(answer("a", 1, "1", True))
    assert summarise([Outcome.of(a) for a in suite.read_answers()])["void_rate"] == 0.5
    suite.add(answer("a", 0, "1", True))
    again = suite.read_answers()
    assert [(a.sample, a.correct) for a in again] == [(0, True), (1, True)]
    assert suites_in(tmp_path) == ["s"]


def test_a_row_is_what_was_said_and_has_no_keys_of_other_kinds(tmp_path: Path) -> None:
    suite = SuiteDir(tmp_path, "s")
    suite.path.mkdir()
    suite.add(answer("a", 0, "é\u2028\n", True))
    row = json.loads(suite.answers.read_text())
    assert list(row) == [
        "schema_version",
        "suite",
        "id",
        "sample",
        "prompt",
        "expected",
        "completion",
        "answer",
        "vote",
        "correct",
        "truncated",
        "interrupted",
        "format_ok",
        "grader_timeout",
        "grader_error",
        "tokens",
        "entropy",
        "void",
    ]
    assert suite.read_answers()[0].answer == "é\u2028\n"
    suite.close()
    with suite.answers.open("a") as file:
        file.write('{"suite": "s", "id"')  # a kill
    assert len(suite.read_answers()) == 1
    suite.add(answer("a", 1, "1", True))
    assert len(suite.read_answers()) == 2
    suite.answers.write_text(json.dumps(row | {"schema_version": 99}) + "\n")
    with pytest.raises(
        MegarlError,
        match=r"answers\.jsonl:1: written in schema version 99, this version of megarl reads 1",
    ):
        suite.read_answers()
    suite.answers.write_text(json.dumps(row | {"tokens": "many"}) + "\n")
    with pytest.raises(
        MegarlError, match=r"answers\.jsonl:1: not written by an evaluation: .*tokens"
    ):
        suite.read_answers()


def test_entropy_is_of_the_sampled_tokens() -> None:
    sampled = Segment(tokens=int32([1, 2]), logprobs=float32([-1.0, -3.0]), weight_version=0)
    phrase = Segment(tokens=int32([7]), logprobs=float32([0.0]), weight_version=0, trained=False)
    assert _entropy(Completion(segments=[sampled, phrase])) == 2.0
    assert _entropy(Completion()) is None


def test_entropy_estimates_that_of_the_distribution() -> None:
    """Tokens drawn from a known one: the mean of -log p is its entropy."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    drawn = np.random.default_rng(0).choice(4, 100_000, p=p)
    segment = Segment(
        tokens=int32(drawn), logprobs=np.log(p[drawn]).astype(np.float32), weight_version=0
    )
    assert _entropy(Completion(segments=[segment])) == pytest.approx(
        -(p * np.log(p)).sum(), abs=0.01
    )


def test_what_an_answer_says() -> None:
    assert extracted("First $1$, then \\boxed{\\frac{1}{2}}. $3$") == "\\frac{1}{2}"
    assert extracted("So $x=4$ or $y = 5$.") == "y = 5"
    assert extracted("She has 1,200 stamps, not 7 of 12.") == "12"
    assert extracted("none of them") == "none of them"
    assert extracted("$$a\nb$$ or \\(c\\) or \\[ d \\] or \\(e") == "d"
    assert extracted("$1$, $$2$") == "$2"


@pytest.mark.parametrize("mark", ["\\(", "\\["])
def test_formulas_that_are_never_closed_take_no_longer_than_others(mark: str) -> None:
    """Minutes, if each searched all the text for its end."""
    assert extracted("\\) \\] $3$ " + mark * 100_000) == "3"


@pytest.fixture
def graders() -> Any:
    tasks = {
        name: {"train": "", "heldout": "", "grader": name} for name in ("math", "exact", "format")
    }
    recipe = from_tree({"data": {"tasks": tasks}})
    return lambda: TaskGraders(recipe, lambda tokens: "", 1)


def test_equal_answers_have_one_vote(graders: Any, caplog: pytest.LogCaptureFixture) -> None:
    said = [
        ("\\boxed{\\frac{1}{2}}", False),
        ("It is 0.5", False),
        ("$\\frac{2}{4}$", False),
        ("\\boxed{7}", True),
        ("so 7", True),
        ("3", False),
        ("3.0", False),
        ("\\boxed{x+1}", False),
        ("$1+x$", False),
        ("", False),
        ("$", False),
        ("\\boxed{x-1}", False),
    ]

    async def run() -> list[str]:
        made = graders()
        votes = Votes("math", made["math"])
        found = [await votes.of("p", text, "7", ok) for text, ok in said]
        other = await votes.of("q", "0.5", "7", False)
        known = [
            Outcome.of(answer("p", n, vote, ok))
            for n, (vote, (_, ok)) in enumerate(zip(found, said, strict=True))
        ]
        resumed = await Votes("math", made["math"], known).of("p", "\\boxed{1/2}", "7", False)
        made.close()
        await asyncio.sleep(0.1)
        return [*found, other, resumed]

    *found, other, resumed = asyncio.run(run())
    half = "\\frac{1}{2}"
    assert found == [half, half, half, "7", "7", "3", "3", "x+1", "x+1", "", "$", "x-1"]
    assert not [told for told in caplog.messages if "the grader math failed" in told], (
        "$ cannot be read, and need not be"
    )
    assert other == "0.5", "another prompt has votes of its own"
    assert resumed == half


def test_text_votes_as_it_is_and_programs_do_not(graders: Any) -> None:
    async def run() -> list[str]:
        made = graders()
        found = [
            await Votes(name, made["exact"]).of("p", "0.50", "0.50", True)
            for name in ("exact", "code", "format")
        ]
        made.close()
        return found

    assert asyncio.run(run()) == ["0.50", "", ""]


def test_the_table_of_a_runs_steps_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (0, 1200):
        suite = SuiteDir(tmp_path / "run" / "evaluations" / f"step-{step:07}", "s")
        suite.path.mkdir(parents=True)
        for one in answers(reward=1.0):
            suite.add(one)
        suite.result.touch()
    under_way = SuiteDir(tmp_path / "run" / "evaluations" / "step-0001300", "s")
    under_way.path.mkdir(parents=True)
    under_way.add(
        answer("a", 0, "1", True)
    )  # or cut off by a crash: the others are not drawn over its prompts
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert curve.main([Path("run")], None, None) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in rows if line.startswith("step")] == ["0", "1200"]
    assert "…" not in "".join(rows)
    assert sum(line.count("[") for line in rows) == 2 * 3 * 3
    assert max(map(len, rows)) <= 80


def test_curves_of_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("weak", {}), ("strong", {"reward": 1.0})):
        suite = SuiteDir(tmp_path / name, "s")
        suite.path.mkdir(parents=True)
        for one in answers(**more):
            suite.add(one)
    assert curve.main([tmp_path / "weak", tmp_path / "strong"], None, None) == 0
    shown = capsys.readouterr().out
    assert "(pass@n)" in shown
    assert (tmp_path / "weak" / "curve-s.png").read_bytes().startswith(b"\x89PNG")
    found = {
        c.kind: c.points for c in curve.curves("m", [Outcome.of(a) for a in answers(reward=1.0)])
    }
    assert set(found) == {"pass", "maj", "best"}
    assert [(p.n, p.tokens) for p in found["pass"]] == [(1, 25), (2, 50), (4, 100)]
    assert [p.score.mean for p in found["best"]] == pytest.approx(
        [found["pass"][0].score.mean] * 3
    ), "it knows nothing"
    for at in range(3):
        assert found["pass"][at].score.mean >= found["maj"][at].score.mean - 1e-12


def test_curves_are_of_the_same_prompts_and_have_different_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs, both with a step 40; the second was scored on the half of the prompts
    that is hard.
    """
    outs = [tmp_path / run / "evaluations" / "step-0000040" for run in ("one", "two")]
    for out, prompts in zip(outs, ("abcd", "cd"), strict=True):
        suite = SuiteDir(out, "s")
        suite.path.mkdir(parents=True)
        for each in answers():
            if each.id in prompts:
                suite.add(each)
        suite.close()
    assert curve.main(outs, None, tmp_path / "both.png") == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert shown.count("0.250 [") == 4, (
        "two of eight answers are right, by oracle and by majority, in both"
    )
    assert "Over the 2 prompts that all have answers to; one has 4." in shown
    assert curve.main(outs[:1], None, tmp_path / "one.png") == 0
    assert "Over the" not in capsys.readouterr().out


def test_curves_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no answers there"):
        curve.main([tmp_path], None, None)
    (tmp_path / "run" / "evaluations" / "step-000010").mkdir(parents=True)
    with pytest.raises(MegarlError, match="no answers there"):
        curve.main([tmp_path / "run"], None, None)
    for name in ("a", "b"):
        suite = SuiteDir(tmp_path / name, name)
        suite.path.mkdir(parents=True)
        suite.add(answer("p", 0, "1", True))
    with pytest.raises(MegarlError, match="no suite has answers in all of them"):
        curve.main([tmp_path / "a", tmp_path / "b"], None, None)
    with pytest.raises(MegarlError, match="'c' is not in all of them; what all have: a"):
        curve.main([tmp_path / "a"], "c", None)
    with pytest.raises(MegarlError, match=r"nowhere/x\.png: cannot be written: No such file"):
        curve.main([tmp_path / "a"], None, tmp_path / "nowhere" / "x.png")
    with pytest.raises(MegarlError, match=r"--picture: x\.html: it is drawn as PNG or SVG"):
        curve.main([tmp_path / "a"], None, Path("x.html"))
    assert not math.isnan(summarise([Outcome.of(answer("p", 0, "1", True))])["pass_rate_low"])


def test_the_file_of_answers_is_opened_once(tmp_path: Path) -> None:
    """For each of 16,000 answers, that would hold the controller for a minute where the
    run directory is on NFS.
    """
    suite = SuiteDir(tmp_path, "s")
    suite.path.mkdir()
    suite.add(answer("a", 0, "1", True))
    moved = suite.answers.rename(tmp_path / "moved.jsonl")
    suite.add(answer("a", 1, "2", False))
    assert [a.sample for a in read_answers(moved)] == [0, 1]
    suite.close()
    suite.add(answer("a", 2, "3", False))
    suite.close()
    assert [a.sample for a in suite.read_answers()] == [2]


def test_a_full_disk_is_said() -> None:
    suite = SuiteDir(Path("/"), "dev")
    suite.answers = Path("/dev/full")
    with pytest.raises(MegarlError, match=r"/dev/full: cannot be written: No space left on device"):
        suite.add(answer("a", 0, "1", True))
