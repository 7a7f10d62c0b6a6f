"""Signs of a run about to go wrong (ScaleRL: 10 to 15 % of answers cut off destabilise)."""

import math

from megarl.run.warnings import flags, words


def said(truncated: float | None, sample_size: float | None, malformed: float | None, end: str) -> list[str]:
    means = {"truncation_rate": truncated, "effective_sample_size": sample_size, "format_error_rate": malformed}
    return words(means.get, end, {})


def test_a_row_says_what_it_shows() -> None:
    assert flags({"truncation_rate": 0.101, "effective_sample_size": 0.099}) == {
        "warning_truncation": 1.0,
        "warning_sample_size": 1.0,
    }
    assert flags({"truncation_rate": 0.1, "effective_sample_size": 0.1}) == {
        "warning_truncation": 0.0,
        "warning_sample_size": 0.0,
    }


def test_what_was_not_measured_is_no_sign() -> None:
    assert flags({}) == flags({"truncation_rate": math.nan}) == {}
    assert said(None, None, None, "</think>") == []


def test_words() -> None:
    assert said(0.05, 0.9, 0.5, "</think>") == []
    (cut,) = said(0.15, 0.9, 0.0, "</think>")
    assert cut.startswith("15% of the answers are cut off")
    (small,) = said(0.05, 0.05, 0.0, "</think>")
    assert small.startswith("the effective sample size is 5% of the batch")


def test_malformed_answers_have_a_cause() -> None:
    (most,) = said(0.0, 0.9, 0.51, "[done]")
    assert most.startswith(
        "51% of the answers are malformed and count as wrong: their completions have no [done] (length.end_"
    )
    (every,) = said(0.0, 0.9, 1.0, "")
    assert every == "all answers are malformed and count as wrong: their completions are empty"


def test_over_optimisation_says_since_when_and_what_to_do() -> None:
    row = {"warning_overoptimisation": 1.0, "trusted_peak_step": 40, "trusted_fall": 0.12, "proxy_rise": 0.3}
    (one,) = words({}.get, "", row)
    assert one.startswith(
        "held out: the trusted score has fallen by 0.120 since step 40 while the reward rose by 0.300: "
    )
    assert "keep the checkpoint nearest to that step" in one
    of_tasks = {f"{name}/{task}": value for task in ("math", "code") for name, value in row.items()}
    (math,) = words({}.get, "", of_tasks | {"warning_overoptimisation/code": 0.0})
    assert math.startswith("math: the trusted score has fallen by 0.120")
    assert words({}.get, "", row | {"warning_overoptimisation": 0.0}) == words({}.get, "", {}) == []
