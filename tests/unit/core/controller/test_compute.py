"""What compute was spent on, by a clock that the test sets, over two lives of a
supervisor and a controller that died.
"""

import os
import time
from pathlib import Path

import pytest

from megarl.core.base.messages import ServerAddress
from megarl.core.client.membership import Membership
from megarl.core.controller.metrics import ComputeClock, Meter, Spent
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import PublishedVersion, Session, clock
from megarl.core.recipe import Resources
from megarl.core.sampling.places import Places


class Life:
    """A controller with 10 GPUs, six of them in three servers, whose clocks say what
    they are told.
    """

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, session: Session, now: float) -> None:
        self._patch = patch
        self.at(now)
        self._journal = Journal.open(path, 1, 0)
        self._journal.append(session)
        self.clock = ComputeClock(
            self._journal.state, Resources(servers=3, server_tensor_parallel=2)
        )

    def at(self, hour: float) -> None:
        self._patch.setattr(time, "time", lambda: 3600 * hour)
        self._patch.setattr(time, "monotonic", lambda: 3600 * hour + 5)
        self._patch.setattr(clock, "offset", -5.0)

    def publish(self, version: int, hour: float) -> Spent:
        self.at(hour)
        spent = self.clock.spent()
        startup = spent.startup
        evaluation = spent.evaluation
        self._journal.append(
            PublishedVersion(
                version=version,
                time=3600 * hour,
                compute_hours=spent.total,
                servers=(),
                startup_hours=startup,
                evaluation_hours=evaluation,
                joined_hours=self.clock.joined_hours(),
            )
        )
        return spent

    def die(self) -> None:
        self._journal.close()


def test_startup_and_evaluations_are_told_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(session="one", time=0.0, devices=10, compute_unit="gpu")
    life = Life(tmp_path, monkeypatch, session, 0.25)
    assert life.clock.spent() == Spent(2.5, 2.5, 0.0), "all of it, until weights are out"
    assert life.publish(0, 0.5).row() == {
        "startup_hours": 5.0,
        "evaluation_hours": 0.0,
        "training_hours": 0.0,
    }
    life.clock.hold(
        2
    )  # servers of two GPUs each, for an hour, of which the second half is one server's alone
    life.at(1.0)
    life.clock.hold(1)
    life.at(1.5)
    life.clock.hold(0)
    assert life.publish(1, 2.5) == Spent(25.0, 5.0, 3.0)
    life.clock.hold(1)
    assert life.publish(2, 3.0) == Spent(30.0, 5.0, 4.0), (
        "one that is under way counts as far as it is"
    )
    life.die()
    again = Life(
        tmp_path, monkeypatch, session, 3.5
    )  # the controller alone: the run has started long ago
    assert again.clock.spent() == Spent(35.0, 5.0, 4.0)
    again.die()
    new = Life(
        tmp_path,
        monkeypatch,
        Session(session="two", time=36e3, devices=10, compute_unit="gpu"),
        10.0,
    )
    assert new.publish(3, 10.25) == Spent(32.5, 7.5, 4.0), (
        "the second start took a quarter of an hour"
    )
    new.die()


def test_a_life_without_a_record_counts_by_the_status_that_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died in its start, which is a start-up like others."""
    one = Session(session="one", time=0.0, devices=10, compute_unit="gpu")
    life = Life(tmp_path, monkeypatch, one, 0.0)
    assert life.publish(0, 1.0) == Spent(10.0, 10.0, 0.0)
    life.die()
    two = Session(session="two", time=36e3, devices=10, compute_unit="gpu", spent=12.0)
    life = Life(tmp_path, monkeypatch, two, 10.5)
    assert life.clock.spent() == Spent(17.0, 15.0, 0.0), (
        "the first one's last minutes were training"
    )
    life.die()
    three = Session(session="three", time=72e3, devices=10, compute_unit="gpu", spent=17.0)
    life = Life(tmp_path, monkeypatch, three, 20.5)
    assert life.publish(1, 20.5) == Spent(22.0, 20.0, 0.0)
    life.die()


def test_a_server_on_cores_has_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    journal = Journal.open(tmp_path, 1, 0)
    journal.append(Session(session="s", time=0.0, devices=4, compute_unit="core"))
    clock = ComputeClock(journal.state, Resources(servers=1, threads=3))
    clock.hold(1)
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0)
    assert clock.spent().evaluation == 3.0
    journal.close()


def test_servers_that_have_joined_are_counted_over_both_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(session="one", time=0.0, devices=10, compute_unit="gpu")
    life = Life(tmp_path, monkeypatch, session, 0.0)
    assert life.publish(0, 1.0) == Spent(10.0, 10.0, 0.0)
    life.clock.join(2)  # of two GPUs each
    assert life.clock.devices == 14
    assert life.publish(1, 2.0) == Spent(24.0, 10.0, 0.0)
    life.clock.join(1)
    assert life.publish(2, 3.0) == Spent(36.0, 10.0, 0.0)
    life.die()
    again = Life(tmp_path, monkeypatch, session, 4.0)  # the controller alone; servers join it again
    assert again.clock.hours() == 46.0
    again.die()
    new = Life(
        tmp_path,
        monkeypatch,
        Session(session="two", time=36e3, devices=10, compute_unit="gpu"),
        10.0,
    )
    assert new.publish(3, 11.0) == Spent(46.0, 20.0, 0.0), (
        "what was lost with the first supervisor is its last hour"
    )
    new.die()


def test_how_busy_servers_are_while_one_joins_and_another_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that the test sets: server 0 is busy all the time, server 1 from its
    third second on.
    """
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    places = Places(Membership([ServerAddress(id=0, url="http://own")]), 4)
    meter = Meter(places)
    places.use[0].change(+1)
    now[0] = 2.0
    places.membership.join("http://other", "life", -1, 1, at=2.0)
    places.add(1)
    places.use[1].change(+2)
    places.use[0].tokens, places.use[1].tokens = 40, 20
    now[0] = 4.0
    row = meter.step()
    assert (
        row["rollout_tokens_per_second"],
        row["server_busy_share"],
        row["server_running_mean"],
    ) == (15.0, 0.75, 1.0)
    assert (row["servers"], row["servers_joined"]) == (0.0, 0.0), "none has weights"
    places.forget(1)
    now[0] = 6.0
    assert meter.step()["server_busy_share"] == 1.0
    places.add(1)  # the number again, with less than it had
    now[0] = 8.0
    assert meter.second()[1] == {"running": 0, "tokens_per_second": 0.0, "busy_share": 0.0}


def test_a_clock_that_is_wrong_or_set_changes_no_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session began at 1 by the clock of the file system, and now it is 2 there;
    the node's own says something else.
    """
    hour = [0.0]
    written = tmp_path / "lock"
    written.touch()
    os.utime(written, (2 * 3600, 2 * 3600))
    monkeypatch.setattr(clock, "offset", clock.offset)
    monkeypatch.setattr(time, "monotonic", lambda: 3600 * hour[0])
    for wrong in (0.0, 1e9):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        hour[0] = 7.0
        clock.start(written)
        hour[0] = 9.0
        assert clock.read() == 4 * 3600
        journal = Journal.open(tmp_path / str(wrong), 1, 0)
        journal.append(Session(session="one", time=3600.0, devices=10, compute_unit="gpu"))
        assert ComputeClock(journal.state, Resources()).hours() == 30.0
        journal.append(
            PublishedVersion(version=0, time=clock.read(), compute_hours=30.0, servers=())
        )
        journal.append(Session(session="two", time=36e3, devices=10, compute_unit="gpu"))
        assert journal.state.earlier_hours == 30.0
        journal.close()
