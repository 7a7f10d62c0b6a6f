"""`megarl plan --allocate`: against a law that is known, and against brute force over
it.
"""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.allocation import ROLLOUTS, SHORT, judge
from megarl import cli
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import dump, load
from megarl.predict.planning import allocate
from megarl.predict.planning.allocate import choose, main, measured, read_run
from megarl.predict.scaling.cells import CellLaw, CellRun
from megarl.predict.scaling.points import Curve
from tests import make

CORNERS = ((8, 4), (32, 16), (16, 8), (8, 16), (32, 4))
GRID = tuple(product((8, 16, 32), (4, 8, 16)))
R0 = 0.42
A = 0.9
B = 1.15
ANSWERS = 2048


def law(rollouts: Any, prompts: float, generations: float, powers: tuple[float, float]) -> Any:
    middle = 4000 * (prompts / 16) ** powers[0] * (generations / 8) ** powers[1]
    return R0 + (A - R0) / (1 + (middle / rollouts) ** B)


def hours(prompts: int, generations: int) -> float:
    return (0.4 + 0.01 * prompts * generations) / 3600


def short(
    cell: tuple[int, int], powers: tuple[float, float], seed: int, most: float = 3300
) -> CellRun:
    rollouts = most * np.array([0.3, 0.6, 1.0])
    scores = (
        np.random.default_rng((seed, *cell)).binomial(ANSWERS, law(rollouts, *cell, powers))
        / ANSWERS
    )
    return CellRun(
        *cell, Curve(f"{cell}", rollouts, scores, R0, "core", answers=ANSWERS), hours(*cell)
    )


@pytest.mark.parametrize("powers", [(0.7, 0.6), (0.05, 0.3), (0.9, 0.0)])
def test_choice_is_near_the_best_of_the_grid(powers: tuple[float, float]) -> None:
    """Its gain is within 5 % of the best cell's, by the law itself; where the batch
    matters the worst is not.
    """
    runs = [short(cell, powers, seed=3) for cell in CORNERS]
    ranked, _ = choose(CellLaw(runs), measured(runs, GRID), budget := 0.1)

    def gain(cell: tuple[int, int]) -> float:
        rollouts = cell[0] * cell[1] * int(budget / hours(*cell))
        return float(law(rollouts, *cell, powers)) - R0

    gains = {cell: gain(cell) for cell in GRID}
    assert gains[ranked[0].batch] > 0.95 * max(gains.values())
    inside = [c.interval[0] < gain(c.batch) + R0 < c.interval[1] for c in ranked]
    assert sum(inside) >= 8, ranked
    if powers[0] != 0.05:
        assert min(gains.values()) < 0.9 * max(gains.values())


def test_judge_of_the_grid() -> None:
    """benchmarks/allocation.py: cells that follow a law are chosen from and lie inside;
    of those that turn back, none does.
    """
    cells: list[dict[str, Any]] = []
    for p, g in dict.fromkeys([*CORNERS, *GRID]):
        steps = np.array([n * (ROLLOUTS // (p * g)) // 10 for n in (1, 2, 3, 6, 10)])
        scores = (
            np.random.default_rng((p, g)).binomial(ANSWERS, law(steps * p * g, p, g, (0.7, 0.6)))
            / ANSWERS
        )
        points = [
            {"step": int(n), "pass_rate": r}
            for n, r in zip([0, *steps], [R0, *scores], strict=True)
        ]
        cells.append(
            {
                "prompts": p,
                "generations": g,
                "seconds": hours(p, g) * 1800,
                "answers": ANSWERS,
                "points": points,
            }
        )
    for fixed in (False, True):
        judged = judge(cells, list(CORNERS), SHORT, fixed)
        assert judged.share > 0.93
        assert judged.inside == len(cells)
    for cell in cells:
        cell["points"][-1]["pass_rate"] = R0
    assert judge(cells, list(CORNERS), SHORT, False).inside == 0


def test_price_has_a_part_for_the_step() -> None:
    prices = measured([short(cell, (0.5, 0.5), 0) for cell in CORNERS], GRID)
    assert prices[16, 16] == pytest.approx(hours(16, 16), rel=1e-6)
    same = measured([short((8, 16), (0.5, 0.5), 0), short((16, 8), (0.5, 0.5), 0)], GRID)
    assert same[16, 16] == pytest.approx(
        2 * hours(8, 16), rel=1e-6
    )  # in proportion, as the caveat says


def write(path: Path, cell: tuple[int, int], device: str = "core") -> Path:
    """Write what `read_run` reads of a run."""
    path.mkdir()
    overrides = [
        f"batch.prompts={cell[0]}",
        f"sampling.generations={cell[1]}",
        f"run.dir={path.parent}",
    ]
    (path / "recipe.yaml").write_text(dump(load("quickstart", overrides)))
    run = short(cell, (0.6, 0.6), seed=1)
    rollouts = cell[0] * cell[1]
    steps = int(3300 / rollouts) + 1
    metrics = [{"step": n, "training_hours": hours(*cell) * n, "epoch": 0} for n in range(steps)]
    make.write_rows(path / "metrics.jsonl", metrics)
    scores = [
        (0, R0),
        *((c / rollouts, r) for c, r in zip(run.curve.hours, run.curve.pass_rate, strict=True)),
    ]
    base = {
        "compute_hours": 1.0,
        "n_prompts": 512,
        "samples": 4,
        "compute_unit": device,
        "seconds": 20.0,
        "servers": 1,
    }
    of_n = [
        {"step": round(s), "pass_rate": r, "pass@1": r, "pass@4": 1 - (1 - r) ** 2, "maj@4": r**0.5}
        for s, r in scores
    ]
    (path / "eval.jsonl").write_text("".join(json.dumps(base | row) + "\n" for row in of_n))
    return path


def test_a_fork_is_refused(tmp_path: Path) -> None:
    """Its steps would be counted with its own batch, and those of the parent had
    another.
    """
    path = write(tmp_path / "fork", (8, 4))
    (path / "recipe.yaml").write_text(
        dump(load(str(path / "recipe.yaml"), ["run.fork=runs/quickstart@40"]))
    )
    with pytest.raises(MegarlError, match="fork: a fork, whose first steps its parent made"):
        read_run(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / f"r{n}", cell) for n, cell in enumerate(CORNERS)]
    assert read_run(paths[0]).device_hours == pytest.approx(hours(8, 4))
    recipe = load("quickstart", [])
    main(recipe, 0.1, paths, 500, None, as_json=True)
    record = json.loads(capsys.readouterr().out)
    one, four = record["splits"]
    # 500 answers take 500/2048 x 20 s of one core of two: less training for more
    # answers, and the oracle's line is exact.
    assert four["n"] == 4
    assert one["chosen"]["score"] > four["chosen"]["score"]
    assert four["oracle"] == pytest.approx(1 - (1 - four["chosen"]["score"]) ** 2, abs=0.01)
    assert four["majority"] == pytest.approx(four["chosen"]["score"] ** 0.5, abs=0.01)
    best = record["choices"][0]
    assert best["steps"] == int(0.1 / best["hours"])
    main(recipe, 0.1, paths, 500, None, as_json=False)
    shown = capsys.readouterr().out
    assert "as written" in shown
    assert "by an" in shown
    assert "differ in more" not in shown
    assert "longest run" not in shown
    main(load("quickstart", ["learner.optimizer.lr=1e-3"]), 10, paths, None, None, as_json=False)
    notes = capsys.readouterr().out
    assert "differ in more than the batch: learner.optimizer.lr" in notes
    assert "times the rollouts of the longest run" in notes


def test_price_of_an_answer_counts_those_to_suites(tmp_path: Path) -> None:
    """They are given in the same seconds as those to the held-out prompts, here nine
    times as many.
    """
    paths = [write(tmp_path / f"r{n}", cell) for n, cell in enumerate(CORNERS)]
    runs = [read_run(path) for path in paths]
    law = CellLaw(runs)
    prices = measured(runs, GRID)
    alone = allocate.splits(law, prices, 0.1, 500, paths)
    for path in paths:
        recipe = load(
            str(path / "recipe.yaml"), ["evaluation.suites.gsm8k={}", "evaluation.suites.aime24={}"]
        )
        (path / "recipe.yaml").write_text(dump(recipe))
        rows = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
        more = {
            "seconds": 200.0,
            "n_prompts/gsm8k": 1152,
            "samples/gsm8k": 16,
            "samples/aime24": 16,
        }
        (path / "eval.jsonl").write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    assert allocate.splits(law, prices, 0.1, 500, paths) == alone


def test_answers_of_another_task_say_nothing_of_a_suite(tmp_path: Path) -> None:
    """The suite that is forecast has one answer a prompt; pass@4 and maj@4 are of the
    held-out prompts.
    """
    paths = [write(tmp_path / f"r{n}", cell) for n, cell in enumerate(CORNERS)]
    for path in paths:
        keys = ["evaluation.suites.arc-easy={}", "evaluation.forecast=arc-easy"]
        (path / "recipe.yaml").write_text(dump(load(str(path / "recipe.yaml"), keys)))
        rows = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
        for row in rows:
            row |= {"n_prompts/arc-easy": 1000, "samples/arc-easy": 1}
            row |= dict.fromkeys(("pass_rate/arc-easy", "pass@1/arc-easy"), row["pass_rate"])
        make.write_rows(path / "eval.jsonl", rows)
    runs = [read_run(path) for path in paths]
    (split,) = allocate.splits(CellLaw(runs), measured(runs, GRID), 0.1, 500, paths)
    assert split.n == 1


def rescored(path: Path, rates: list[float], without: tuple[str, ...] = ()) -> None:
    """Give the evaluations of a run these scores, and leave out columns."""
    rows = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
    rows = [row | {"pass_rate": rate} for row, rate in zip(rows, rates, strict=True)]
    kept = [{key: value for key, value in row.items() if key not in without} for row in rows]
    make.write_rows(path / "eval.jsonl", kept)


@pytest.mark.filterwarnings("error")
def test_runs_that_tell_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose scores fall, are all right, or have no seconds; numpy has nothing to say of
    them.
    """
    paths = [write(tmp_path / f"r{n}", cell) for n, cell in enumerate(CORNERS[:2])]
    for path, rates in zip(paths, ([0.5, 0.4, 0.3, 0.2], [0.5, 0.6, 0.6, 0.8]), strict=True):
        rescored(path, rates)
    main(load("quickstart", []), 0.1, paths, None, None, as_json=False)
    said = capsys.readouterr().out
    assert "r0 ends at 0.200, not clearly above 0.500: the law can only rise" in said
    assert "r1 ends at" not in said
    for path in paths:
        rescored(path, [0.99, 1.0, 1.0, 1.0])
    main(load("quickstart", []), 0.1, paths, None, None, as_json=True)
    assert json.loads(capsys.readouterr().out)["choices"][0]["interval"][0] > 0.9
    for path in paths:
        rescored(path, [0.5, 0.6, 0.6, 0.8], without=("seconds",))
    with pytest.raises(MegarlError, match="no evaluation tells the cost; nothing is left"):
        main(load("quickstart", []), 0.1, paths, 100, None, as_json=False)


def test_bad_input(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"r{n}", cell) for n, cell in enumerate(CORNERS)]
    recipe = load("quickstart", [])
    for budget, runs, answers, message in (
        (0.1, paths[:1], None, "1 run of one batch"),
        (1e-6, paths, None, "do not pay for one step"),
        (-1.0, paths, None, "above 0"),
        (math.inf, paths, None, "below 1e12"),
        (1e300, paths, None, "below 1e12"),
        (0.1, paths, 10**6, "nothing is left"),
        (0.1, [*paths, write(tmp_path / "gpu", (8, 8), "gpu")], None, "hours of CPU cores"),
        (0.1, [*paths, paths[0]], None, "named twice"),
        (0.1, [tmp_path], None, "not a run directory"),
    ):
        with pytest.raises(MegarlError, match=message):
            main(recipe, budget, runs, answers, None, as_json=False)
    with pytest.raises(MegarlError, match="needs 6 or more"):
        CellLaw([replace_points(short(cell, (0.5, 0.5), 0), 2) for cell in CORNERS[:2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--allocate", "1"], "needs --curves"),
        (["--allocate", "1", "--curves", "a", "--simulate"], "neither --simulate"),
        (["--allocate", "1", "--curves", "a", "--gpus", "8"], "both --gpus"),
        (["--curves", "a", "--gpus", "8", "--gpu", "h100"], "needs --allocate"),
        ([], "both --gpus"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "scalerl-8b", "--model-config", "llama-3.1-8b", *options]) == 2
    assert message in capsys.readouterr().err


def replace_points(run: CellRun, count: int) -> CellRun:
    curve = run.curve
    return run._replace(
        curve=Curve(
            curve.name, curve.hours[:count], curve.pass_rate[:count], R0, "core", answers=ANSWERS
        )
    )


def test_planner_prices_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a search of the recipe with that batch does."""
    from megarl.predict.planning.command import problem, work
    from megarl.predict.planning.layouts import search

    def posed(*overrides: str) -> allocate.PlanningProblem:
        recipe = load("scalerl-8b", list(overrides))
        return problem(recipe, 16, "h100", "llama-3.1-8b", work(recipe, 4000))

    prices = allocate.planned(posed(), [(96, 16), (48, 16)])
    best = search(posed("batch.prompts=96")).plans[0]
    assert prices[96, 16] == pytest.approx(16 * best.step_seconds / 3600, rel=0.1)
    assert prices[96, 16] < 2 * prices[48, 16]  # publication and bubbles are paid once
    runs = [write(tmp_path / f"r{n}", cell, "gpu") for n, cell in enumerate(CORNERS)]
    main(posed().recipe, 50, runs, None, posed(), as_json=False)
    assert "times what is planned for them" in capsys.readouterr().out
