"""Laws of parts of a run, from files of answers whose laws are known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl import cli
from megarl.core.base.rundir import RunDir, append_jsonl, step_folder
from megarl.core.evaluation.answers import Answer, SuiteDir
from megarl.core.recipe import dump, from_tree
from megarl.predict.scaling import slices as module
from megarl.predict.scaling.slices import Slice, slices
from tests.unit.predict.scaling.curves import law

STEPS = np.array([0, *np.geomspace(20, 1000, 14).astype(int)])
HOURS_A_STEP = 10.0
CHANCE = Callable[[float, int], float]  # of a right answer, by hours and prompt


def by(a: float, b: float, c_mid: float, r0: float) -> Callable[[float], float]:
    return lambda hours: float(law(np.array([hours]), a, b, c_mid, r0)[0]) if hours else r0


def written(
    path: Path, tasks: dict[str, dict[str, Any]], prompts: int = 120, samples: int = 8
) -> Path:
    """A run with answers. Of each task: `chance`, and if wanted `difficulty` and
    `score` by prompt, and its `keys`.
    """
    run = RunDir(path / "made")
    run.create()
    keys = {
        name: {"train": "", "heldout": ""} | task.get("keys", {}) for name, task in tasks.items()
    }
    recipe = from_tree({"data": {"tasks": keys}, "run": {"name": "made", "dir": str(path)}})
    run.recipe.write_text(dump(recipe))
    rng = np.random.default_rng(0)
    for step in STEPS.tolist():
        hours = step * HOURS_A_STEP
        for name, task in tasks.items():
            place = SuiteDir(step_folder(run.evaluations, step), name)
            place.path.mkdir(parents=True)
            lines = []
            for n in range(prompts):
                for sample in range(samples):
                    right = bool(rng.random() < task["chance"](hours, n))
                    more = {"difficulty": task["difficulty"](n)} if "difficulty" in task else {}
                    more |= (
                        {"scores": task["scores"](hours, right, rng)} if "scores" in task else {}
                    )
                    lines.append(json.dumps(answer(name, f"p{n}", sample, right) | more))
            place.answers.write_text("\n".join(lines) + "\n")
        row = {"step": step, "pass_rate": 0.5, "n_prompts": prompts, "samples": samples}
        append_jsonl(run.eval, row | {"compute_hours": hours, "compute_unit": "gpu"})
    return run.path


def answer(suite: str, id: str, sample: int, right: bool) -> dict[str, Any]:
    made = Answer(
        suite=suite,
        id=id,
        sample=sample,
        prompt="",
        expected="",
        completion="",
        answer="",
        vote="",
        correct=right,
        truncated=False,
        interrupted=False,
        format_ok=True,
        grader_timeout=False,
        grader_error=False,
        tokens=1,
        entropy=None,
    )
    known = {name: getattr(made, name) for name in Answer.__struct_fields__}
    return {
        name: value for name, value in known.items() if isinstance(value, str | bool | int | None)
    }


def found(run: Path) -> dict[str, Slice]:
    return {f"{part.task}: {part.name}": part for part in slices(run)}


def inside(part: Slice, a: float) -> bool:
    assert part.fit, part.problem
    return part.fit.A_interval[0] <= a <= part.fit.A_interval[1]


def test_each_part_has_its_own_law(tmp_path: Path) -> None:
    """Three tasks; of one, two levels of difficulty with laws of their own, and a
    component with another unit.
    """
    easy = by(0.9, 1.3, 1200, 0.5)
    hard = by(0.45, 1.4, 1300, 0.1)
    flat = by(0.3, 1, 1000, 0.3)

    def scores(hours: float, right: bool, rng: np.random.Generator) -> dict[str, float]:
        form = 10.0 if rng.random() < by(0.8, 1.2, 1500, 0.2)(hours) else -10.0
        return {"answer": 2.0 * right - 1, "form": form, "total": 2.0 * right - 1 + 0.1 * form}

    tasks: dict[str, dict[str, Any]] = {
        "math": {
            "chance": lambda hours, n: (hard if n % 2 else easy)(hours),
            "difficulty": lambda n: 1 + n % 2,
            "scores": scores,
        },
        "code": {"chance": lambda hours, n: flat(hours)},
        "worse": {"chance": lambda hours, n: 1 - easy(hours)},
    }
    made = found(written(tmp_path, tasks))
    assert {name.partition(": ")[2] for name in made if name.startswith("math")} == {
        "all",
        "difficulty 1",
        "difficulty 2",
        "answer",
        "form",
        "total",
        "pass@2",
        "pass@4",
    }
    assert inside(made["math: difficulty 1"], 0.9)
    assert inside(made["math: difficulty 2"], 0.45)
    assert not inside(made["math: difficulty 2"], 0.9), "the interval says something"
    assert inside(made["math: all"], 0.675)
    assert inside(made["math: pass@2"], (1 - 0.1**2 + 1 - 0.55**2) / 2)
    assert inside(made["math: pass@4"], (1 - 0.1**4 + 1 - 0.55**4) / 2)
    assert inside(made["math: form"], 0.8), "a share of its range"
    low, high = made["math: form"].record()["law"]["A_interval"]  # type: ignore[index]
    assert (made["math: form"].unit, low < 6 < high) == ((-10.0, 10.0), True), "0.8 tens less 0.2"
    assert made["code: all"].problem.startswith("it does not rise (")
    assert made["worse: all"].problem.startswith("it falls (-0.")


def test_bins_are_not_chosen_by_the_answers_that_are_scored(tmp_path: Path) -> None:
    """All prompts are alike and nothing improves: whatever the bins, every score is 0.5
    but for noise.
    """
    made = found(written(tmp_path, {"math": {"chance": lambda hours, n: 0.5}}))
    bins = [part for name, part in made.items() if part.kind == "difficulty"]
    assert len(bins) == 3
    assert "1 point in the window" in module.slices(tmp_path / "made", start=9_900.0)[0].problem
    for part in bins:
        error = 0.5 / np.sqrt(4 * part.values.shape[1])  # of four odd answers a prompt
        assert abs(part.values[0].mean() - 0.5) < 3.5 * error, part.name
    chosen_on_all = np.sort(made["math: all"].values[0])
    assert chosen_on_all[:40].mean() < 0.4, "the same answers would have shown a hard bin"


def test_many_levels_of_difficulty_are_three_bins(tmp_path: Path) -> None:
    tasks = {"math": {"chance": lambda hours, n: 1 - n % 9 / 10, "difficulty": lambda n: n % 9}}
    made = found(written(tmp_path, tasks, prompts=45, samples=2))
    bins = {part.name: part.values for part in made.values() if part.kind == "difficulty"}
    assert list(bins) == ["difficulty 0 to 2", "difficulty 3 to 5", "difficulty 6 to 8"]
    assert [len(values[0]) for values in bins.values()] == [15, 15, 15]
    assert np.diff([values.mean() for values in bins.values()]).max() < 0, "the harder, the lower"


def test_noise_is_of_the_number_of_answers_and_for_pass_at_n_over_prompts(tmp_path: Path) -> None:
    made = found(
        written(tmp_path, {"math": {"chance": lambda hours, n: [0.05, 0.95][n % 2]}}, prompts=50)
    )
    for name, error in (("all", None), ("pass@4", "prompts")):
        part = made[f"math: {name}"]
        assert part.curve is not None
        assert part.curve.noise is not None
        rate = part.values.mean(1)[1:]
        expected = (
            np.sqrt(rate * (1 - rate) / 400)
            if error is None
            else part.values.std(1, ddof=1)[1:] / np.sqrt(50)
        )
        np.testing.assert_allclose(part.curve.noise, expected, rtol=1e-12)
    assert max(int(name.partition("@")[2]) for name in made if "@" in name) == 4, "half of eight"


def test_what_has_no_law_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    rewards = {"rewards": {"form": {"grader": "format", "weight": 0.5}}}
    run = written(
        tmp_path, {"math": {"chance": lambda hours, n: 1.0, "keys": rewards}}, prompts=5, samples=1
    )
    assert cli.main(["scaling", "slices", str(run)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("no law: all 14", "constant", "no column of", "trusted_grader"):
        assert part in text
    assert cli.main(["scaling", "slices", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["law"]) for row in rows] == [
        ("task", None),
        ("difficulty", None),
        ("objective", None),
    ]
    assert all(row["problem"] for row in rows)
    for path in (run / "evaluations").glob("*/*/answers.jsonl"):
        path.unlink()
    assert cli.main(["scaling", "slices", str(run)]) == 2
    assert "slices are made from answers" in capsys.readouterr().err
    assert cli.main(["scaling", "slices", str(tmp_path)]) == 2


def test_picture(tmp_path: Path) -> None:
    chance = by(0.8, 1.2, 1500, 0.2)
    run = written(
        tmp_path, {"math": {"chance": lambda hours, n: chance(hours)}}, prompts=20, samples=4
    )
    assert (
        cli.main(["scaling", "slices", str(run), "-o", str(tmp_path / "pictures" / "parts")]) == 0
    )
    text = (tmp_path / "pictures" / "parts.svg").read_text()
    for shown in (
        "math, by task",
        "math, by difficulty",
        "math, by pass@n",
        "compute, GPU-hours",
        "pass@2",
    ):
        assert shown in text
    assert (tmp_path / "pictures" / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_an_answer_that_was_void_takes_no_objective_away(tmp_path: Path) -> None:
    tasks = {
        "math": {
            "chance": lambda hours, n: 0.5,
            "scores": lambda hours, right, rng: {"form": 1.0, "total": 2.0 * right},
        }
    }
    run = written(tmp_path, tasks, prompts=10, samples=2)
    path = sorted((run / "evaluations").iterdir())[3] / "math" / "answers.jsonl"
    first, second, *rest = path.read_text().splitlines()
    void = [
        {k: v for k, v in json.loads(line).items() if k != "scores"} for line in (first, second)
    ]
    path.write_text("\n".join([json.dumps(void[0]), second, *rest]) + "\n")
    assert found(run)["math: total"].values.shape[1] == 10
    path.write_text("\n".join([*map(json.dumps, void), *rest]) + "\n")
    assert found(run)["math: total"].values.shape[1] == 9, "of one prompt nothing was graded"
    assert found(run)["math: form"].problem.startswith("all 14 scores are 1; a constant"), (
        "in the reward's own unit"
    )


def test_an_evaluation_without_an_answer_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = written(tmp_path, {"math": {"chance": lambda hours, n: 0.5}}, prompts=5, samples=2)
    *before, last = sorted((run / "evaluations").glob("*/math/answers.jsonl"))
    for path in (before[3], last):
        path.write_text("")
    assert found(run)["math: all"].values.shape == (len(before) - 1, 5)
    assert (
        f"math: evaluations without an answer are left out: step {STEPS[3]}, {STEPS[-1]}"
        in caplog.text
    )
    before[1].unlink()
    assert found(run)["math: all"].values.shape == (len(before) - 2, 5)
    assert (
        f"answers are gone (evaluation.keep, a fork) are left out: step {STEPS[1]}" in caplog.text
    )
    for path in before:
        path.write_text("")
    (part,) = module.slices(run)
    assert part.problem == "no prompt is in every evaluation"


def test_prompts_of_only_some_evaluations_do_not_count(tmp_path: Path) -> None:
    chance = by(0.8, 1.2, 1500, 0.2)
    run = written(
        tmp_path, {"math": {"chance": lambda hours, n: chance(hours)}}, prompts=20, samples=4
    )
    path = sorted((run / "evaluations").iterdir())[3] / "math" / "answers.jsonl"
    path.write_text(
        "".join(line + "\n" for line in path.read_text().splitlines() if '"p7"' not in line)
    )
    assert {part.values.shape[1] for part in module.slices(run) if part.kind == "task"} == {19}
