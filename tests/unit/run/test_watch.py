"""Complaints about roles that live and do not move."""

import pytest

from megarl.run.restart import Role
from megarl.run.state import ServerStatus, Status
from megarl.run.watch import Watch

CONTROLLER = Role("controller")
SERVER = Role("server", 0)
ALL = {CONTROLLER, SERVER, Role("learner")}


def status(state: str) -> Status:
    return Status(time=0.0, servers=[ServerStatus(id=0, state=state)])


@pytest.fixture
def watch() -> Watch:
    return Watch(start_s=1000, stopped_s=30, silent_s=120, lost_s=100)


def test_nothing_wrong(watch: Watch) -> None:
    for at in range(0, 1000, 5):
        assert watch.hung({}, status("clean"), 0.5, ALL, at) == {}


def test_stopped_for_long(watch: Watch) -> None:
    assert watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 0.0) == {}
    assert watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 29.0) == {}
    assert "stopped for 31 s" in watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 31.0)[SERVER]


def test_a_moment_of_life_begins_anew(watch: Watch) -> None:
    watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 0.0)
    watch.hung({}, None, 0.0, ALL, 20.0)
    assert watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 40.0) == {}


def test_silent_controller(watch: Watch) -> None:
    found = [watch.hung({}, status("clean"), age, ALL, age) for age in range(0, 136, 5)]
    assert all(not hung for hung in found[:-1])
    assert set(found[-1]) == {CONTROLLER}


def test_old_file_after_a_sleep_of_the_machine_is_not_held_against_anyone(watch: Watch) -> None:
    assert watch.hung({}, status("clean"), 0.5, ALL, 100.0) == {}
    assert watch.hung({}, status("clean"), 50_000.0, ALL, 105.0) == {}
    assert watch.hung({}, status("clean"), 0.5, ALL, 110.0) == {}


def first_killed(watch: Watch, state: str, since: float) -> float:
    """How long a server may be in this state."""
    for at in range(0, 2000, 5):
        if watch.hung({}, status(state), 0.5, ALL, since + at):
            return at
    raise AssertionError(f"never killed as {state}")


@pytest.mark.parametrize("then", ["lost", "starting"])
def test_a_server_that_was_there_may_be_away_for_less_than_one_that_comes(
    watch: Watch, then: str
) -> None:
    """starting: as a new controller sees it."""
    watch.forget(SERVER, 0.0)
    watch.hung({}, status("starting"), 0.5, ALL, 10.0)
    watch.hung({}, status("unknown"), 0.5, ALL, 60.0)
    assert first_killed(watch, then, 65.0) == 100
    assert watch.hung({}, status(then), 0.5, ALL - {SERVER}, 500.0) == {}


@pytest.mark.parametrize("state", ["starting", "lost"])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_server_may_take_as_long_as_the_recipe_says_to_come_up(
    watch: Watch, state: str, noticed: bool
) -> None:
    """Also when it is started again: the controller may see it as it was for a moment,
    and then as lost.
    """
    watch.hung({}, status("starting"), 0.5, ALL, 0.0)
    watch.hung({}, status("clean"), 0.5, ALL, 5.0)
    watch.forget(SERVER, 100.0)
    if not noticed:
        watch.hung({}, status("clean"), 0.5, ALL, 101.0)
    assert first_killed(watch, state, 105.0) == 1000


def test_a_server_that_came_back_unnoticed_is_there(watch: Watch) -> None:
    watch.forget(SERVER, 0.0)
    for at in range(0, 60, 5):
        watch.hung({}, status("clean"), 0.5, ALL, at)
    assert first_killed(watch, "lost", 60.0) == 100


def test_started_anew_is_forgotten(watch: Watch) -> None:
    watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 0.0)
    watch.forget(SERVER, 5.0)
    assert watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 31.0) == {}


def test_unheard_for_long(watch: Watch) -> None:
    assert watch.hung({SERVER: "unheard"}, None, 0.0, ALL, 0.0) == {}
    assert (
        "not been heard from for 30 s"
        in watch.hung({SERVER: "unheard"}, None, 0.0, ALL, 30.0)[SERVER]
    )
