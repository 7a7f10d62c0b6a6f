"""The seconds of a step add up, and a publication's columns are those of its step."""

import pytest

from megarl.core.base.messages import Published, ServerResult
from megarl.core.learner.clock import StepClock


def test_parts_and_idle_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 4.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    clock = StepClock()
    with clock.spent("wait", 0):
        pass
    with clock.spent("train", 0):
        pass
    first = clock.next_step(0)
    assert (first["wait_seconds"], first["train_seconds"], first["publish_seconds"]) == (
        3.0,
        5.0,
        0.0,
    )
    assert first["step_seconds"] == 10.0
    assert first["learner_idle_share"] == pytest.approx(0.3)
    assert clock.next_step(1)["wait_seconds"] == 0.0


def test_a_publication_is_in_the_row_of_its_step_alone() -> None:
    clock = StepClock()
    assert "transfer_seconds" not in clock.next_step(0)
    results = (ServerResult(id=0), ServerResult(id=1, error="lost"))
    clock.published(
        Published(
            incarnation="a",
            version=1,
            results=results,
            pause_seconds=0.1,
            transfer_seconds=0.2,
            resume_seconds=0.3,
            bytes_sent=5,
        )
    )
    row = clock.next_step(0)
    assert row["publish_bytes"] == 5
    assert row["transfer_seconds"] == 0.2
    assert (
        not {"publish_bytes", "pause_seconds", "transfer_seconds", "resume_seconds"}
        & clock.next_step(1).keys()
    )
