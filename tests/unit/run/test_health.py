"""The judgement of a run. Rows are those of real clean runs (benchmarks/results/corpus)
with one column disturbed: for each signal a disturbance that it must report and one
that it must let pass.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpus import CorpusRun, read
from megarl.core.telemetry.names import NAMES
from megarl.run.health import FEWEST, GAP, MEMORY, QUIET, RELEARN, SIGNALS, Health
from megarl.run.scores import overoptimised

ROOT = Path(__file__).parents[3]
Row = dict[str, Any]
BEGIN = 90
"""The step at which a column is disturbed."""


@pytest.fixture(scope="module")
def clean() -> list[CorpusRun]:
    """The records that may be looked at."""
    known = [
        read(path)
        for path in sorted((ROOT / "benchmarks" / "results" / "corpus").glob("*.jsonl.gz"))
    ]
    return [run for run in known if not run.held_out]


def test_clean_runs_raise_no_alarm(clean: list[CorpusRun]) -> None:
    assert sum(len(run.steps) for run in clean) >= 1650
    assert {run.name: Health(run.steps).history for run in clean} == {run.name: [] for run in clean}


def times(name: str, factor: float) -> Callable[[Row], Row]:
    return lambda row: {name: row[name] * factor} if name in row else {}


def plus(name: str, more: float) -> Callable[[Row], Row]:
    return lambda row: {name: row[name] + more} if name in row else {}


def now(**values: float) -> Callable[[Row], Row]:
    return lambda row: values


def each(name: str, every: int) -> Callable[[Row], Row]:
    return lambda row: {name: float(row["step"] % every == 0)}


def backwards(share: float) -> Callable[[Row], Row]:
    """So much of each movement goes the other way. On average .5 goes the right one."""
    return lambda row: {"progress": row["progress"] - share * row["trained_logprob_diff"]}


DENSE = "quickstart-0.8m-bf16-seed0"
EXPERTS = "quickstart-moe-0.3m-fp32-seed0"
CLIPPED = "grpo-tiny-0.8m-fp32-seed0"
CASES: dict[str, tuple[str, Callable[[Row], Row], Callable[[Row], Row]]] = {
    # signal: (run, what it must report, what it must let pass)
    "truncation": (DENSE, plus("truncation_rate", 0.12), plus("truncation_rate", 0.05)),
    "sample_size": (DENSE, now(effective_sample_size=0.05), now(effective_sample_size=0.3)),
    "malformed": (DENSE, plus("format_error_rate", 0.55), plus("format_error_rate", 0.4)),
    "cut_tokens": (CLIPPED, plus("clipped_share", 0.8), plus("clipped_share", 0.6)),
    "grader_errors": (DENSE, now(grader_error_rate=0.1), now(grader_error_rate=0.02)),
    "grader_timeouts": (DENSE, now(grader_timeout_rate=0.5), now(grader_timeout_rate=0.15)),
    "void": (DENSE, now(void_groups=6.0), now(void_groups=1.0)),
    "no_variance": (DENSE, now(zero_variance_share=1.0), now(zero_variance_share=0.9)),
    "not_finite": (DENSE, each("skipped", 50), now(skipped=0.0)),
    "reward_sign": (DENSE, now(reward_gap=-2.0), now(reward_gap=0.1)),
    "advantages": (DENSE, now(advantage_fit=-0.2), now(advantage_fit=0.4)),
    "progress": (DENSE, backwards(1.0), backwards(0.4)),
    "parity": (DENSE, each("warning_parity", 2), each("warning_parity", 6)),
    "replay": (EXPERTS, now(routing_replayed=0.0), now(routing_replayed=0.9)),
    "learning_rate": (DENSE, lambda row: {"lr": row["lr"] * 30}, lambda row: {"lr": row["lr"] * 2}),
    "sampled_hot": (DENSE, times("surprise", 2.0), times("surprise", 1.2)),
    "sampled_cold": (DENSE, times("surprise", 0.5), times("surprise", 0.83)),
    "kernels": (DENSE, times("parity_logit/kernels", 2.5), times("parity_logit/kernels", 1.25)),
    "kernels_median": (EXPERTS, plus("parity_p50/kernels", 1e-4), plus("parity_p50/kernels", 1e-6)),
    "decode": (DENSE, times("parity_logit/decode", 10.0), times("parity_logit/decode", 1.5)),
    "routing": (EXPERTS, plus("parity_routing", 0.03), plus("parity_routing", 0.001)),
    "imbalance": (
        EXPERTS,
        times("expert_imbalance_layer_1", 1.8),
        times("expert_imbalance_layer_1", 1.1),
    ),
    "unused_experts": (EXPERTS, now(expert_unused_share=0.25), now(expert_unused_share=0.0833)),
    "drift": (DENSE, times("trained_logprob_diff", 10.0), times("trained_logprob_diff", 1.5)),
    "grad_norm": (DENSE, times("grad_norm", 30.0), times("grad_norm", 1.3)),
    "entropy_rise": (DENSE, times("entropy", 4.0), times("entropy", 1.2)),
    "entropy_fall": (DENSE, times("entropy", 0.05), times("entropy", 0.7)),
    "pass_rate_fall": (DENSE, times("pass_rate_train", 0.5), times("pass_rate_train", 0.95)),
    "pass_rate_jump": (DENSE, now(pass_rate_train=1.0), plus("pass_rate_train", 0.05)),
    "length_rise": (
        DENSE,
        times("completion_tokens_mean", 1.5),
        times("completion_tokens_mean", 1.05),
    ),
    "length_fall": (
        DENSE,
        times("completion_tokens_mean", 0.6),
        times("completion_tokens_mean", 0.95),
    ),
}


def rows_of(run: CorpusRun) -> Iterator[Row]:
    """The run's rows, with what records of that time lack: as a clean run has it."""
    rng = random.Random(run.name)
    for row in run.steps:
        yield row | {
            "surprise": row["entropy"] * math.exp(rng.gauss(0, 0.05)),
            "reward_gap": 2.0,
            "advantage_fit": 1.0,
            "progress": rng.gauss(0.5, 0.35) * row["trained_logprob_diff"],
            "routing_replayed": 0.96,
            "expert_unused_share": 0.0,
            "parity_logit/kernels": 0.01 * math.exp(rng.gauss(0, 0.2)),
            "parity_logit/decode": 0.01 * math.exp(rng.gauss(0, 0.4)),
        }


def judged(
    clean: list[CorpusRun], name: str, change: Callable[[Row], Row], end: int = 150
) -> Health:
    (run,) = (run for run in clean if run.name == name)
    return Health(row | (change(row) if BEGIN <= row["step"] < end else {}) for row in rows_of(run))


def test_each_signal_has_its_cases() -> None:
    """`all_wrong`, which is about a run's first steps, has tests of its own."""
    assert set(CASES) == {signal.name for signal in SIGNALS} - {"all_wrong"}
    assert len(CASES) == len(SIGNALS) - 1


@pytest.mark.parametrize("signal", CASES)
def test_a_signal_reports_what_it_must_and_lets_the_rest_pass(
    clean: list[CorpusRun], signal: str
) -> None:
    run, caught, passes = CASES[signal]
    assert signal not in {alarm.name for alarm in judged(clean, run, passes).history}
    found = next(alarm for alarm in judged(clean, run, caught).history if alarm.name == signal)
    assert BEGIN <= found.raised <= BEGIN + 12
    assert BEGIN - 1 <= found.since <= found.raised
    assert found.text.startswith(f"{signal.replace('_', ' ')} (")


def wrong(steps: int, **more: float) -> list[Row]:
    """The first steps of a run in which every answer is wrong."""
    return [
        {"step": step, "pass_rate_train": 0.0, "zero_variance_share": 1.0} | more
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        ({"truncation_rate": 0.97}, "the template: 97% are cut off before they end"),
        ({"format_error_rate": 1.0}, "the end of thinking: 100% have no length.end_of_thinking"),
        (
            {"grader_error_rate": 0.4},
            "the grader, which fails or cannot read the data's answers in 40%",
        ),
        (
            {"truncation_rate": 0.1, "format_error_rate": 0.1},
            "the grader, or the data's answers: most answers do end",
        ),
    ],
)
def test_only_wrong_answers_name_template_end_of_thinking_or_grader(
    measured: dict[str, float], named: str
) -> None:
    """It comes first of all alarms, though others were raised as early, and ends with
    the first right answer.
    """
    rows = wrong(40, **measured)
    health = Health(rows)
    assert health.alarms[0].name == "all_wrong"
    assert (health.alarms[0].since, health.alarms[0].raised) == (0, 2)
    assert f"likely {named}" in health.alarms[0].text
    assert [alarm.name for alarm in health.alarms[1:]][-1] == "no_variance"
    health.add({"step": 40, "pass_rate_train": 0.01, "zero_variance_share": 0.9} | measured)
    assert "all_wrong" not in {alarm.name for alarm in health.alarms}


def test_what_is_not_only_wrong() -> None:
    """Two steps may be chance; rewards that differ teach something; later steps without
    a right answer are another thing.
    """
    assert Health(wrong(2)).alarms == []
    assert Health(wrong(40, zero_variance_share=0.9)).alarms == []
    rows = wrong(40)
    rows[0] |= {"pass_rate_train": 0.02, "zero_variance_share": 0.9}
    assert "all_wrong" not in {alarm.name for alarm in Health(rows).history}


def test_of_several_tasks_the_one_with_only_wrong_answers_is_named() -> None:
    of_tasks = {
        "pass_rate_train/math": 0.0,
        "zero_variance_share/math": 1.0,
        "truncation_rate/math": 0.9,
    }
    of_tasks |= {"pass_rate_train/code": 0.4, "zero_variance_share/code": 0.3}
    (alarm,) = Health({"step": step} | of_tasks for step in range(5)).alarms
    assert alarm.name == "all_wrong/math"
    assert "the template: 90% are cut off" in alarm.text


def stopping(step: int, learnt: float) -> Row:
    """A step of a run whose answers become short and certain at step 19, as a real
    model's did that learnt to stop.
    """
    scatter = random.Random(step)
    after = step >= 19
    return {
        "step": step,
        "completion_tokens_mean": (4.0 if after else 11.0) + scatter.gauss(0, 0.1),
        "entropy": (0.05 if after else 0.6) * math.exp(scatter.gauss(0, 0.1)),
        "pass_rate_train": 0.3 + learnt * after + scatter.gauss(0, 0.02),
    }


def test_a_run_that_learns_to_stop_is_not_accused() -> None:
    accused = {"length_fall", "entropy_fall"}
    assert {
        alarm.name for alarm in Health(stopping(step, 0.0) for step in range(40)).history
    } == accused
    learnt = {alarm.name for alarm in Health(stopping(step, 0.3) for step in range(40)).history}
    assert learnt.isdisjoint(accused)
    ends = (
        stopping(step, 0.0) | {"truncation_rate": 0.05 if step >= 19 else 0.6} for step in range(40)
    )
    assert accused.isdisjoint({alarm.name for alarm in Health(ends).history}), (
        "as many are right, and more end in time"
    )
    worse = {alarm.name for alarm in Health(stopping(step, -0.2) for step in range(40)).history}
    assert accused <= worse, "its score falls as well"


def test_two_outliers_are_let_pass_three_are_not(clean: list[CorpusRun]) -> None:
    spike = times("grad_norm", 1e4)
    assert judged(clean, DENSE, spike, end=BEGIN + 2).history == []
    (alarm,) = judged(clean, DENSE, spike, end=BEGIN + 3).history
    assert (alarm.name, alarm.since, alarm.raised) == ("grad_norm", BEGIN, BEGIN + 2)
    assert alarm.until is not None
    assert alarm.until < BEGIN + 20


def test_a_slow_course_is_followed_and_a_new_one_learnt() -> None:
    """Entropy that halves every 40 steps is no alarm; lengths that stay at another
    level are one for RELEARN values.
    """
    slow = Health({"step": step, "entropy": 0.5 ** (step / 40)} for step in range(400))
    assert slow.history == []
    level = Health(
        {"step": step, "completion_tokens_mean": 100.0 if step < 50 else 200.0}
        for step in range(300)
    )
    (alarm,) = level.history
    assert (alarm.name, alarm.raised) == ("length_rise", 52)
    assert alarm.until == alarm.raised + RELEARN - 1
    back = Health(
        {"step": step, "completion_tokens_mean": 100.0 if step < 50 else 200.0}
        for step in range(90)
    )
    assert back.metrics() == {"health": 0.0, "alarm/length_rise": 1.0}
    assert level.metrics() == {"health": 1.0}


def test_scattered_values_do_not_become_the_norm_before_they_have_proved_harmless(
    clean: list[CorpusRun],
) -> None:
    """A step's movement scatters: among the earlier values, the first fourfold ones
    would hide the others.
    """
    moved = times("trained_logprob_diff", 4.0)
    found = [
        Health(row | (moved(row) if row["step"] >= BEGIN else {}) for row in run.steps)
        for run in clean
    ]
    assert (
        sum("drift" in {alarm.name for alarm in health.history} for health in found)
        > len(clean) / 2
    )


def test_nothing_is_judged_before_the_norm_is_known() -> None:
    for quiet, raised in ((FEWEST + GAP - 1, False), (FEWEST + GAP, True)):
        rows = [
            {"step": step, "grad_norm": 1.0 if step < quiet else 1e3} for step in range(quiet + 3)
        ]
        assert bool(Health(rows).history) is raised, quiet


def test_a_new_epoch_brings_other_prompts() -> None:
    def rows(epochs: bool) -> Iterator[Row]:
        rng = random.Random(0)
        for step in range(120):
            rate = 0.8 if step < 60 else 0.4
            yield {
                "step": step,
                "epoch": float(epochs and step >= 60),
                "pass_rate_train": rate + rng.gauss(0, 0.02),
            }

    assert Health(rows(epochs=True)).history == []
    assert [alarm.name for alarm in Health(rows(epochs=False)).history] == ["pass_rate_fall"]


def test_each_task_is_judged() -> None:
    def rows(turned: str) -> Iterator[Row]:
        rng = random.Random(0)
        for step in range(80):
            gap = {
                f"reward_gap/{task}": -2.0 if task == turned and step >= 60 else 2.0
                for task in ("math", "code")
            }
            rates = {
                f"pass_rate_train/{task}": 0.6 + rng.gauss(0, 0.05) for task in ("math", "code")
            }
            yield {"step": step, "reward_gap": 1.0, **gap, **rates}

    assert Health(rows("")).history == []
    (alarm,) = Health(rows("code")).history
    assert alarm.name == "reward_sign/code"
    assert alarm.text.startswith("reward sign/code (")


@pytest.mark.parametrize(
    ("signs", "cause"),
    [
        ({"parity_same_bits": 0.9, "parity_line": 0.9, "parity_growth": 1.0}, "stale server"),
        ({"parity_same_bits": 0.1, "parity_line": 0.6, "parity_growth": 1.0}, "temperature"),
        ({"parity_same_bits": 0.1, "parity_line": 0.1, "parity_growth": 4.0}, "RoPE"),
        ({"parity_same_bits": 0.1, "parity_line": 0.1, "parity_growth": 1.0}, "dtype"),
        (
            {
                "parity_same_bits": 0.1,
                "parity_line": 0.1,
                "parity_growth": 1.0,
                "parity_grid/server": 0.9,
            },
            "one-sided head",
        ),
    ],
)
def test_an_alarm_of_parity_names_the_cause(
    clean: list[CorpusRun], signs: dict[str, float], cause: str
) -> None:
    health = judged(clean, DENSE, lambda row: times("parity_logit/kernels", 20.0)(row) | signs)
    assert f"likely cause: {cause}" in health.history[0].text


def test_a_task_that_is_nearly_solved_is_one_alarm_until_it_clearly_is_not() -> None:
    """In most steps 22 or 23 of 24 groups have equal rewards: the mean of five steps
    crosses .95 again and again.
    """
    rng = random.Random(0)
    shares = [
        sum(rng.random() < (0.945 if step < 1600 else 0.7) for _ in range(24)) / 24
        for step in range(1700)
    ]
    (alarm,) = Health(
        {"step": step, "zero_variance_share": share} for step, share in enumerate(shares)
    ).history
    assert alarm.name == "no_variance"
    assert alarm.raised < 50
    assert alarm.until is not None
    assert 1600 + QUIET / 2 < alarm.until < 1600 + 2 * QUIET


def test_what_was_not_measured_is_no_sign() -> None:
    assert (
        Health([]).metrics()
        == Health([{"step": 0}, {"step": 1, "entropy": math.nan, "grad_norm": math.inf}]).metrics()
    )
    wild = (
        {"step": step, **{name: (-1.0) ** step * 1e18 for name in NAMES if name != "step"}}
        for step in range(60)
    )
    assert Health(wild).step == 59
    zeros = {name: 0.0 for name in NAMES if name not in ("step", "epoch")}
    assert "not_finite" not in {
        alarm.name for alarm in Health({**zeros, "step": step} for step in range(60)).history
    }


def test_groups_of_one_reward_are_no_sign_with_a_teacher(clean: list[CorpusRun]) -> None:
    assert judged(clean, DENSE, now(zero_variance_share=1.0, kl_teacher=0.5)).history == []


def test_few_groups_are_no_sign_of_another_temperature(clean: list[CorpusRun]) -> None:
    """Those with variance have the unlikely mistakes: once a task is nearly solved, few
    others are left.
    """

    def at(groups: float) -> Callable[[Row], Row]:
        return lambda row: times("surprise", 2.0)(row) | {"groups_in_loss": groups}

    assert "sampled_hot" in {alarm.name for alarm in judged(clean, DENSE, at(24.0)).history}
    assert "sampled_hot" not in {alarm.name for alarm in judged(clean, DENSE, at(5.0)).history}


def test_the_documentation_has_all_signals() -> None:
    page = (ROOT / "docs/how-to/monitoring.md").read_text()
    section = page[page.index("## Health") :].partition("\n## ")[0]
    listed = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name.strip(" `") for cell in listed for name in cell.split(",")]
    assert names == [signal.name for signal in SIGNALS]


def test_over_optimisation_says_since_when_and_what_to_do() -> None:
    row = {
        "warning_overoptimisation": 1.0,
        "trusted_peak_step": 40,
        "trusted_fall": 0.12,
        "proxy_rise": 0.3,
    }
    (one,) = overoptimised(row)
    assert one.startswith(
        "held out: the trusted score has fallen by 0.120 since step 40 while the reward rose by"
        " 0.300: "
    )
    assert "keep the checkpoint nearest to that step" in one
    of_tasks = {f"{name}/{task}": value for task in ("math", "code") for name, value in row.items()}
    (math_,) = overoptimised(of_tasks | {"warning_overoptimisation/code": 0.0})
    assert math_.startswith("math: the trusted score has fallen by 0.120")
    assert overoptimised(row | {"warning_overoptimisation": 0.0}) == overoptimised({}) == []


def test_the_newest_rows_are_enough(clean: list[CorpusRun]) -> None:
    """A run of weeks that is resumed is not judged from its first step on: reading that
    takes minutes.
    """
    run = next(run for run in clean if run.name == DENSE)
    rows = [
        row | {"step": step} for step, row in enumerate(run.steps[-100:] * (MEMORY // 100 + 10))
    ]
    disturbed = [
        row | ({"truncation_rate": 0.3, "entropy": 9.0} if row["step"] > len(rows) - 50 else {})
        for row in rows
    ]
    for steps in (rows, disturbed):
        whole = Health(steps)
        newest = Health(steps[-MEMORY:])
        assert (newest.metrics(), newest.step) == (whole.metrics(), whole.step)
        assert [alarm.text for alarm in newest.alarms] == [alarm.text for alarm in whole.alarms]
    assert whole.metrics()["health"] == 0.0
