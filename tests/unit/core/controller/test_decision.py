"""What the learner is told, case by case."""

from typing import Any

import pytest

from megarl.core.base.messages import Next, Publish, Refused, ServerAddress, Stop, Wait
from megarl.core.client.membership import Membership
from megarl.core.controller.decision import ControllerView, TrainStep, decide, is_due
from megarl.core.recipe import Evaluation

ADDRESSES = [ServerAddress(id=n, url=f"http://127.0.0.1:{n}") for n in range(5)]


def servers(*versions: int | None) -> Membership:
    """Clean ones at these versions by learner "a"; None: up, of unknown weights."""
    members = Membership(ADDRESSES[: len(versions)])
    for server, version in enumerate(versions):
        members.answered(server)
        if version is not None:
            members.publish([server], version, "a")
            members.published(server, version, "a", "")
    return members


def told(
    step: int,
    members: Membership,
    *,
    incarnation: str = "a",
    version: int | None = None,
    **standing: Any,
) -> object:
    usual: dict[str, Any] = {
        "batches": 8,
        "published_version": 5,
        "final_step": 10,
        "score_due": False,
    }
    now = ControllerView(**(usual | standing), membership=members)
    return decide(
        Next(incarnation=incarnation, step=step, version=step if version is None else version), now
    )


def test_a_step_trained_before_is_replayed_and_nothing_published() -> None:
    assert told(3, servers(None, 5), incarnation="b") == TrainStep(3, replay=True)


def test_servers_behind_are_published_to_before_training_goes_on() -> None:
    reply = told(5, servers(4, 5))
    assert isinstance(reply, Publish)
    assert [a.id for a in reply.servers] == [0]
    assert reply.version == 5


def test_a_new_learner_confirms_all_servers() -> None:
    reply = told(5, servers(5, 5), incarnation="b")
    assert isinstance(reply, Publish)
    assert [a.id for a in reply.servers] == [0, 1]


def test_a_complete_batch_is_trained() -> None:
    assert told(5, servers(5)) == TrainStep(5)


def test_a_batch_that_is_not_complete_is_waited_for() -> None:
    members = servers(5, 5, 5, 5, 5)
    members.pin(1)
    members.lose(4)
    reply = told(5, members, batches=5, waiting_for="3 of 8 tickets")
    assert isinstance(reply, Wait)
    assert (
        reply.reason
        == "batch 5: 3 of 8 tickets; servers 0, 2-3 clean(5), server 1 clean(5) pinned, server 4"
        " lost"
    )


def test_training_goes_on_while_an_evaluation_holds_the_only_server() -> None:
    members = servers(5)
    members.pin(0)
    assert told(6, members) == TrainStep(6)


def test_a_version_to_be_scored_is_not_trained_over() -> None:
    members = servers(5)
    members.pin(0)
    assert isinstance(told(6, members, score_due=True), Wait)
    assert told(6, servers(6), score_due=True) == TrainStep(6), "scored already, or being scored"


def test_a_phase_is_waited_for_with_the_weights_that_generate_it() -> None:
    phases: dict[str, Any] = {"phase_steps": 4, "published_version": 4, "final_step": 12}
    assert isinstance(told(4, servers(0), batches=4, **phases), Publish)
    assert isinstance(told(4, servers(4), batches=7, **phases), Wait)
    assert told(4, servers(4), batches=8, **phases) == TrainStep(4)


def test_nothing_is_published_or_scored_within_a_phase() -> None:
    phases: dict[str, Any] = {
        "phase_steps": 4,
        "published_version": 4,
        "final_step": 12,
        "batches": 8,
    }
    assert told(6, servers(4), **phases) == TrainStep(6)
    assert told(6, servers(4, None), incarnation="b", score_due=True, **phases) == TrainStep(6)
    reply = told(8, servers(4), **phases)
    assert isinstance(reply, Publish)
    assert reply.version == 8


def test_a_run_that_ends_within_a_phase_publishes_its_last_version() -> None:
    phases: dict[str, Any] = {"phase_steps": 4, "published_version": 8, "final_step": 10}
    assert isinstance(told(8, servers(8), batches=9, **phases), Wait)
    assert told(8, servers(8), batches=10, **phases) == TrainStep(8)
    assert isinstance(told(10, servers(8), batches=10, **phases), Publish)
    assert isinstance(told(10, servers(10), batches=10, **phases), Stop)


def test_a_run_made_longer_goes_on_within_the_phase() -> None:
    phases: dict[str, Any] = {"phase_steps": 4, "published_version": 10, "final_step": 20}
    assert isinstance(told(10, servers(None), batches=10, **phases), Publish)
    assert told(10, servers(10), batches=12, **phases) == TrainStep(10)


def test_the_end_comes_after_the_last_evaluation() -> None:
    assert isinstance(told(10, servers(9), batches=10), Publish)
    assert isinstance(told(10, servers(10), batches=10, score_due=True), Wait)
    reply = told(10, servers(10), batches=10)
    assert isinstance(reply, Stop)
    assert not reply.error


def test_stop_and_failure_come_first() -> None:
    reply = told(3, servers(5), stop="asked")
    assert isinstance(reply, Stop)
    assert not reply.error
    reply = told(3, servers(5), stop="x", failure="no server")
    assert isinstance(reply, Stop)
    assert (reply.reason, reply.error) == ("no server", True)


@pytest.mark.parametrize(("step", "version"), [(5, 4), (9, 9)])
def test_a_learner_that_is_not_of_this_run_is_refused(step: int, version: int) -> None:
    refused = told(step, servers(5), version=version)
    assert isinstance(refused, Refused)
    assert ("a backup?" in refused.error) == (step == version)


@pytest.mark.parametrize(
    ("version", "last_scored", "due"),
    [
        (0, None, True),
        (7, None, True),
        (1, 0, False),
        (10, 0, True),
        (11, 0, True),
        (11, 10, False),
        (19, 11, False),
        (20, 11, True),
        (35, 30, True),
        (35, 35, False),
        (30, 35, False),
    ],
)
def test_versions_that_are_scored(version: int, last_scored: int | None, due: bool) -> None:
    assert is_due(version, last_scored, Evaluation(every=10), final_version=35) is due


@pytest.mark.parametrize(
    ("version", "last_scored", "due"),
    [
        (0, None, True),
        (9, 0, False),
        (10, 0, True),
        (19, 10, False),
        (20, 10, True),
        (29, 20, False),
        (30, 20, True),
        (44, 30, False),
        (45, 30, True),
        (60, 45, False),
        (65, 45, True),
        (65, 65, False),
    ],
)
def test_versions_that_are_scored_with_growing_distances(
    version: int, last_scored: int | None, due: bool
) -> None:
    assert is_due(version, last_scored, Evaluation(every=10, growth=1.5), final_version=65) is due
