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
