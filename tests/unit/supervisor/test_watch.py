"""Complaints about roles that live and do not move."""

import pytest

from megarl.supervisor.observe import ServerStatus, Status
from megarl.supervisor.restart import Role
from megarl.supervisor.watch import Watch

CONTROLLER, SERVER = Role("controller"), Role("server", 0)
ALL = {CONTROLLER, SERVER, Role("learner")}


def status(state: str) -> Status:
    return Status(time=0.0, servers=[ServerStatus(id=0, state=state)])


@pytest.fixture
def watch() -> Watch:
    return Watch(stopped_s=30, silent_s=120, lost_s=100)


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


def test_lost_server_that_lives(watch: Watch) -> None:
    watch.hung({}, status("lost"), 0.5, ALL, 0.0)
    assert set(watch.hung({}, status("lost"), 0.5, ALL, 100.0)) == {SERVER}
    assert watch.hung({}, status("lost"), 0.5, ALL - {SERVER}, 105.0) == {}


def test_started_anew_is_forgotten(watch: Watch) -> None:
    watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 0.0)
    watch.forget(SERVER)
    assert watch.hung({SERVER: "stopped"}, None, 0.0, ALL, 31.0) == {}


def test_unheard_for_long(watch: Watch) -> None:
    assert watch.hung({SERVER: "unheard"}, None, 0.0, ALL, 0.0) == {}
    assert "not been heard of for 30 s" in watch.hung({SERVER: "unheard"}, None, 0.0, ALL, 30.0)[SERVER]
