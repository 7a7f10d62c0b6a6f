"""Summary, charts and report from runs of every length, none included."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import FORECAST, RunDir, append_jsonl, latest_rows, latest_scores
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Group, Prompt, Rollout
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted, Finished
from megarl.core.recipe import Recipe, from_tree
from megarl.predict.scaling.extrapolate import forecast
from megarl.run import status, summary, view
from megarl.run.state import Observer
from megarl.tools.report import charts, report
from tests import make
from tests.summaries import WORDS, recomputed


def words(renderable: object) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_summary(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(60)
    append_jsonl(
        rundir.logs / "supervisor.jsonl", {"time": 1.0, "session": "s", "event": "restart"}
    )
    values = summary.summarise(recipe, rundir)
    assert (values["steps"], values["steps_planned"], values["restarts"]) == (60, 80, 1)
    assert (
        values["pass_rate_before"],
        values["pass_rate_after"],
        values["pass_rate_after_step"],
    ) == (0.384, 0.933, 60)
    assert 2 <= values["lag_max"] <= 5
    assert values["server_idle_share"] == pytest.approx(0.15)
    assert 0 < values["learner_idle_share"] < 0.5
    page = words(
        summary.render(values | {"outcome": "finished", "reason": "all steps done"}, rundir)
    )
    for part in (
        "finished: all steps done",
        "0.384 (step 0) → 0.933 (step 60)",
        "1 restarts",
        "largest",
    ):
        assert part in page, page


def test_summary_is_recomputed_from_the_files(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """A run with a step of minutes, steps without a publication, a replayed one, a step
    made twice, two lives.
    """
    rundir = write_run(30)
    for start in (0.0, 1.8e9 + 21):
        append_jsonl(
            rundir.logs / "supervisor.jsonl",
            {"session": "s", "event": "started", "role": "learner-0", "time": start},
        )
    append_jsonl(
        rundir.logs / "supervisor.jsonl",
        {"time": 1.0, "session": "s", "event": "restart", "role": "learner-0"},
    )
    rows = latest_rows(rundir.metrics)
    append_jsonl(
        rundir.metrics,
        rows[5] | {"step_seconds": 300.0, "server_busy_share": 0.1, "wait_seconds": 200.0},
    )
    append_jsonl(rundir.metrics, rows[7] | {"replay": 1, "step_seconds": 1000.0})
    for row in rows[12:20]:
        kept = {
            k: v
            for k, v in row.items()
            if k not in ("pause_seconds", "transfer_seconds", "resume_seconds")
        }
        append_jsonl(rundir.metrics, kept | {"publish_seconds": 0.0})
    values = summary.summarise(recipe, rundir)
    again = recomputed(rundir.path, recipe.pipeline.lag_limit)
    assert values.keys() == again.keys() | WORDS - {"outcome", "reason", "wall_seconds"}
    assert {name: values[name] for name in again} == pytest.approx(again)
    assert values["server_idle_share"] > 0.7, "by time most of it is the long step"
    assert values["publications"] == 30 - 2 - 8 - 1
    page = words(
        summary.render(values | {"outcome": "finished", "reason": "all steps done"}, rundir)
    )
    assert "s each of 19" in page


def test_summary_and_report_of_several_tasks(
    write_tasks_run: Callable[[int], tuple[Recipe, RunDir]],
) -> None:
    recipe, rundir = write_tasks_run(60)
    values = summary.summarise(recipe, rundir)
    code = values["tasks"]["code"]
    assert (code["pass_rate_before"], code["pass_rate_after"]) == (
        pytest.approx(0.184),
        pytest.approx(0.733),
    )
    assert code["pass_rate_train"] == pytest.approx(values["pass_rate_train"] - 0.2)
    page = words(summary.render(values | {"outcome": "finished", "reason": "x"}, rundir))
    assert "0.184 → 0.733 · training" in page
    report.write_report(rundir)
    page = rundir.report.read_text()
    for title in (
        "Pass rate, by task",
        "By task: completion length, tokens",
        "By task: answers cut off, share",
    ):
        assert title in page


def test_what_needs_attention_comes_first_and_the_best_score_is_named(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    """A score that has fallen since step 40."""
    rundir = write_run(61)
    fallen = {
        "pass_rate": 0.6,
        "warning_fall": 1.0,
        "fall": 0.263,
        "fall_error": 0.04,
        "fall_since": 40,
    }
    append_jsonl(rundir.eval, latest_scores(rundir.eval)[-1] | fallen)
    values = summary.summarise(recipe, rundir) | {"outcome": "finished", "reason": "x"}
    page = words(summary.render(values, rundir))
    assert page.index("has fallen by 0.263 ± 0.040 since step 40") < page.index(
        "pass rate, held out"
    )
    assert "→ best 0.863 (step 40) → 0.600 (step 60)" in page
    report.write_report(rundir)
    html = rundir.report.read_text()
    assert html.index("has fallen by 0.263") < html.index('<div class="tiles">')
    assert html.count("has fallen by 0.263") == 1
    assert "· 0.86 · 0.60" in html


def test_of_a_short_run_fewer_steps_are_averaged(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    values = summary.summarise(recipe, write_run(10)) | {"outcome": "finished", "reason": "x"}
    page = words(summary.render(values, RunDir(recipe.run.path)))
    assert page.count("(last 10 steps)") == 2
    assert "last 20 steps" not in page


def test_one_task_is_not_shown_apart(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(20)
    assert summary.summarise(recipe, rundir)["tasks"] == {}
    report.write_report(rundir)
    assert "y task" not in rundir.report.read_text()


def test_replayed_steps_do_not_count_as_speed(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(2)
    row = {
        "step": 2,
        "time": 0.0,
        "compute_hours": 1.0,
        "compute_unit": "core",
        "generated_tokens": 1e9,
        "step_seconds": 1.0,
        "replay": 1,
    }
    before = summary.summarise(recipe, rundir)["tokens_per_second"]
    append_jsonl(rundir.metrics, row)
    assert summary.summarise(recipe, rundir)["tokens_per_second"] == before


def test_first_step_of_a_life_is_no_measure(write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(6)
    for start in (0.0, 1.8e9 + 5, 1.9e9):  # before step 0, between steps 2 and 3, after the last
        append_jsonl(
            rundir.logs / "supervisor.jsonl",
            {"session": "s", "event": "started", "role": "learner-0", "time": start},
        )
    rows = latest_rows(rundir.metrics)
    assert [row["step"] for row in summary.steady(rows, rundir)] == [1, 2, 4, 5]


def test_a_run_of_malformed_answers_says_why(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(30)
    for row in latest_rows(rundir.metrics):
        append_jsonl(rundir.metrics, row | {"format_error_rate": 1.0})
    values = summary.summarise(recipe, rundir) | {"outcome": "finished", "reason": "all steps done"}
    assert "malformed (1 on average, limit 0.5): most answers are malformed" in words(
        summary.render(values, rundir)
    )
    report.write_report(rundir)
    page = rundir.report.read_text()
    assert "no length.end_of_thinking with an answer after it" in page
    assert "Signals off their course" in page


def test_a_run_on_its_course_has_no_picture_of_alarms(write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(50)
    report.write_report(rundir)
    assert "Signals off their course" not in rundir.report.read_text()


def test_an_exploited_reward_is_shown_wherever_warnings_are(
    recipe: Recipe, write_run: Callable[[int], RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = write_run(30)
    scores = {"proxy_score": 2.0, "trusted_score": 0.25, "warning_overoptimisation": 1.0}
    newest = scores | {"trusted_peak_step": 20, "trusted_fall": 0.5, "proxy_rise": 0.7}
    append_jsonl(rundir.eval, WHOLE | {"step": 30} | newest)
    report.write_report(rundir)
    observer = Observer(rundir)
    observer.look()
    values = summary.summarise(recipe, rundir) | {"outcome": "finished", "reason": "all steps done"}
    page = rundir.report.read_text()
    assert status.health(rundir.path) == 1
    for shown in (
        capsys.readouterr().out,
        words(view.render(view.ViewFrame(recipe, observer.state, 1.0))),
        words(summary.render(values, rundir)),
        page,
    ):
        assert "the trusted score has fallen by 0.500 since step 20" in " ".join(
            shown.replace("│", " ").split()
        )
    assert "Reward and trusted score of held-out prompts" in page
    append_jsonl(rundir.eval, WHOLE | {"step": 40} | scores | {"warning_overoptimisation": 0.0})
    assert not any(
        "trusted" in warning for warning in summary.summarise(recipe, rundir)["warnings"]
    )


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("steps", [0, 1, 2, 50])
def test_report_of_any_length(
    recipe: Recipe, write_run: Callable[[int], RunDir], steps: int
) -> None:
    rundir = write_run(steps)
    report.main(rundir.path)
    page = rundir.report.read_text()
    assert f"{steps} of 80 steps" in page
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", "")), (
        "the report fetches something"
    )
    assert "learning_rate" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) >= (2 if steps < 1 else 9)
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert rundir.picture.read_bytes().startswith(b"\x89PNG")


def test_run_without_any_files(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    rundir = write_run(0)
    rundir.eval.unlink()
    report.write_report(rundir)
    page = words(
        summary.render(
            summary.summarise(recipe, rundir) | {"outcome": "failed", "reason": "x"}, rundir
        )
    )
    assert "0 of 80" in page


WHOLE = {
    "step": 3,
    "pass_rate": 0.5,
    "n_prompts": 9,
    "samples": 2,
    "compute_hours": 1.0,
    "compute_unit": "core",
}
FIGURES = st.sampled_from(
    [
        *WHOLE,
        "time",
        "seconds",
        "pass_rate/math",
        "predicted_hours",
        "predicted_score",
        "enough",
        "entropy",
        "x",
    ]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.text(max_size=3),
    st.just([1]),
    st.just({}),
)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(wrong=st.dictionaries(FIGURES, VALUES, max_size=4), without=st.sets(FIGURES, max_size=2))
@example(wrong={}, without={"pass_rate"})
@example(wrong={"pass_rate": math.nan}, without=set())
@example(
    wrong={"step": 9, "predicted_score": "pass_rate/none"} | dict.fromkeys(FORECAST, 1.0),
    without=set(),
)
@example(wrong={"step": 9, "predicted_hours": 9.0, "predicted_final": 0.5}, without=set())
def test_every_reader_survives_any_row_of_eval_jsonl(
    recipe: Recipe, write_run: Callable[[int], RunDir], wrong: dict[str, Any], without: set[str]
) -> None:
    """Some rows of this kind are whole all the same."""
    rundir = write_run(5)
    row = {name: value for name, value in (WHOLE | wrong).items() if name not in without}
    with rundir.eval.open("a") as file:
        file.write(json.dumps(row) + "\n")
    values = summary.summarise(recipe, rundir)
    assert 0 <= values["pass_rate_after"] <= 1
    charts.reward_png(recipe, latest_rows(rundir.metrics), latest_scores(rundir.eval))
    observer = Observer(rundir)
    observer.look()
    shown = view.ViewFrame(recipe, observer.state, 1.0)
    assert "held-out" in view.line(shown)
    assert "pass rate, held out" in words(view.render(shown))


def test_what_is_no_score_is_passed_over(
    recipe: Recipe, write_run: Callable[[int], RunDir]
) -> None:
    rundir = write_run(5)
    before = latest_scores(rundir.eval)
    for name in WHOLE:
        append_jsonl(
            rundir.eval,
            {k: v for k, v in WHOLE.items() if k != name} | {"step": 4} if name != "step" else {},
        )
    assert latest_scores(rundir.eval) == before
    append_jsonl(rundir.eval, WHOLE | {"step": 4})
    assert [row["step"] for row in latest_scores(rundir.eval)] == [
        *(row["step"] for row in before),
        4,
    ]


def test_parity_by_cause(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """Each cause has a row, whose figures can be had from metrics.jsonl; 0 throughout
    is said as what it is.
    """
    rundir = write_run(21)
    append_jsonl(
        rundir.metrics, {"step": 21, "parity_rollouts": 0.0}
    )  # a publication of which nothing was compared
    report.write_report(rundir)
    table = re.findall(
        r"<tr>(.*?)</tr>",
        rundir.report.read_text().partition('class="parity"')[2].partition("</table>")[0],
    )
    head, *rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table]
    assert [row[0] for row in rows] == ["equal weights", "decode"]
    kernels, decode = (dict(zip(head, row, strict=True)) for row in rows)

    def column(name: str) -> np.ndarray:
        return np.array([row[f"parity_{name}/kernels"] for row in latest_rows(rundir.metrics)[:21]])

    tokens = column("tokens")
    assert kernels["mean"] == f"{column('mean') @ tokens / tokens.sum():.1e}"
    assert kernels["k3 KL, nats"] == f"{column('k3') @ tokens / tokens.sum():.1e}"
    assert kernels["above 0.1"] == f"{column('share') @ tokens / tokens.sum():.2%}" != "0.00%"
    assert kernels["largest mean"] == f"{column('mean').max():.1e}"
    assert kernels["largest"] == f"{column('max').max():.1e}"
    for name, shown in (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9")):
        assert kernels[shown] == f"{np.median(column(name)):.1e}"
    assert (kernels["tokens"], kernels["publications"]) == (f"{tokens.sum():,.0f}", "21")
    assert (decode["mean"], decode["largest"], decode["above 0.1"]) == ("same bits", "", "0.00%")


def test_report_says_same_bits(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """At the top, below the chart and in the summary, if no log-prob ever differed; not
    if one did.
    """
    rundir = write_run(6)
    report.write_report(rundir)
    tile = "<b>same bits</b><span>server − learner log-prob</span>"
    told = "same bits at 6 publications"
    page = rundir.report.read_text()
    assert "same bits: decode" in page
    assert tile not in page
    assert told not in page
    for row in latest_rows(rundir.metrics):
        append_jsonl(
            rundir.metrics,
            {k: 0.0 if k.endswith("/kernels") and "tokens" not in k else v for k, v in row.items()},
        )
    report.write_report(rundir)
    page = rundir.report.read_text()
    assert "same bits: equal weights, decode" in page
    assert tile in page
    assert told in page


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="not a run directory"):
        report.main(tmp_path)


def test_rollouts_are_shown(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl.tasks.data.arithmetic_models import LLAMA, save_model

    save_model(tmp_path / "init", LLAMA, 0)
    tokenizer = load_tokenizer(tmp_path / "init")
    tree = recipe.model_dump(mode="json")
    tree["model"]["path"] = str(tmp_path / "init")
    changed = from_tree(tree)
    rundir = RunDir(changed.run.path)
    rundir.create()

    def ids(text: str) -> np.ndarray:
        return tokenizer.ids(text)

    def rollout(sample: int, answer: str, correct: bool) -> Rollout:
        parts = [
            (ids("<think>1+"), 4, True),
            (ids("2"), 5, True),
            (ids("</think>"), 5, False),
            (ids(answer), 6, True),
        ]
        segments = [make.segment(t, v, logprob=0.0, trained=trained) for t, v, trained in parts]
        return make.rollout(*segments, reward=1.0 if correct else -1.0, sample=sample)

    prompt = Prompt(id="p", tokens=ids("1+2="), answer="3")
    group = Group(ticket=0, prompt=prompt, rollouts=(rollout(0, "3", True), rollout(1, "7", False)))
    journal = Journal.open(
        rundir.rollouts, changed.batch.prompts, changed.pipeline.k, rotate_bytes=1
    )

    def finish(ticket: int) -> None:
        record = Finished(group=replace(group, ticket=ticket), time=0.0)
        journal.append(
            Admitted(ticket=ticket, task="math", prompt_id="p", epoch=0, due_step=0), record
        )

    finish(0)
    shown = report._rollouts(changed, rundir)
    assert shown.count("<pre") == 2
    assert "weights 4–6" in shown
    assert (
        '<span class="v1">2</span><span class="phrase">&lt;/think&gt;</span><span'
        ' class="v0">3</span>' in shown
    )

    for ticket in range(1, 2 * report.SAMPLES + 1):
        finish(ticket)
    journal.close()
    (rundir.rollouts / "000001.journal").write_text("nobody has to read this one, and its records")
    shown = report._rollouts(changed, rundir)
    assert re.findall(r"ticket (\d+)", shown) == ["8", "8", "7", "7"]
    monkeypatch.setattr(report, "MOST_CHARACTERS", 1)
    assert '<span class="phrase">&lt;</span>' in report._rollouts(changed, rundir), (
        "not cut within &lt;"
    )


def test_binned_keeps_means() -> None:
    xs = np.arange(1003.0)
    bx, by = charts.binned(xs, 2 * xs, 100)
    assert len(bx) == 100
    assert np.allclose(by, 2 * bx)
    assert np.all(np.diff(bx) > 0)
    assert charts.binned(xs[:50], xs[:50], 100)[0] is not None


def test_smooth_does_not_shift() -> None:
    xs = np.arange(100.0)
    assert np.allclose(charts.smooth(xs)[5:-5], xs[5:-5])
    assert np.allclose(charts.smooth(np.ones(7)), 1)


@pytest.mark.parametrize(
    ("ends", "bars"), [({"pass_rate_low": 0.4, "pass_rate_high": 0.7}, 1), ({}, 0)]
)
def test_bars_are_the_intervals_of_the_rows(ends: dict[str, float], bars: int) -> None:
    """An evaluation of an earlier version has none."""
    axes = Figure().subplots()
    charts.pass_rate_against(axes, [], [WHOLE | ends], "step")
    (drawn,) = axes.containers
    found = [segment[:, 1].tolist() for lines in drawn[2] for segment in lines.get_segments()]
    assert found == [[0.4, 0.7]] * bars


@pytest.mark.parametrize(("rows", "curves"), [(0, 0), (4, 0), (5, 1)])
def test_tasks_are_drawn_before_their_first_evaluation(rows: int, curves: int) -> None:
    """Training batches alone make a picture, once there is a running mean."""
    axes = Figure().subplots()
    training = [{"step": n, "pass_rate_train/math": 0.5} for n in range(rows)]
    assert charts.by_task(axes, training, [], ["math"]) == bool(curves)
    assert sum(np.size(line.get_xdata()) > 0 for line in axes.lines) == curves


def test_report_with_a_fit(recipe: Recipe, write_run: Callable[[int], RunDir]) -> None:
    """The law's curve beside the points, as far as the run will go."""
    rundir = write_run(0)
    rows: list[dict[str, Any]] = [{"step": 0, "compute_hours": 0.0, "pass_rate": 0.2}]
    rows += [
        {"step": n, "compute_hours": n / 10, "pass_rate": 0.2 + 0.6 / (1 + (5 / n) ** 2)}
        for n in range(1, 21)
    ]
    rows = [row | {"compute_unit": "core", "n_prompts": 10_000, "samples": 4} for row in rows]
    found = forecast(rows, [], steps=40)
    rundir.eval.unlink()
    for row in [*rows[:-1], rows[-1] | found]:
        append_jsonl(rundir.eval, row)
    report.write_report(rundir)
    page = rundir.report.read_text()
    assert "fitted, with 95 % interval" in page
    assert "ceiling 0.80" in page
