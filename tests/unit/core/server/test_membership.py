"""Servers' states under random events: who may be sent requests, and what may never happen."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megarl.core.base.messages import ServerAddress
from megarl.core.server.membership import Membership

SERVERS = st.integers(0, 2)


def membership(count: int = 3) -> Membership:
    return Membership([ServerAddress(id=n, url=f"http://127.0.0.1:{n}") for n in range(count)])


def ids(addresses: tuple[ServerAddress, ...]) -> list[int]:
    return [a.id for a in addresses]


class Life(RuleBasedStateMachine):
    """Servers come, die and return, learners publish and are replaced, evaluations hold a server.

    `real` is what each server truly holds: None after a (re)start or half a publication, until one is complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members = membership()
        self.alive = dict.fromkeys(range(3), False)
        self.real: dict[int, int | None] = dict.fromkeys(range(3))
        self.learner, self.version = 0, 0
        self.publishing: tuple[str, int, list[int]] | None = None
        self.pinned: dict[int, int | None] = {}

    @property
    def name(self) -> str:
        return f"learner{self.learner}"

    @rule(server=SERVERS)
    def start(self, server: int) -> None:
        if not self.alive[server]:
            self.alive[server], self.real[server] = True, None

    @rule(server=SERVERS)
    def notice_up(self, server: int) -> None:
        if self.alive[server]:
            self.members.seen(server)

    @rule(server=SERVERS)
    def die_and_be_noticed(self, server: int) -> None:
        self.alive[server], self.real[server] = False, None
        self.pinned.pop(server, None)
        self.members.lost(server)

    @precondition(lambda self: self.publishing is None)
    @rule()
    def ask_to_publish(self) -> None:
        wanting = ids(self.members.wanting(self.version, self.name))
        assert not set(wanting) & set(self.pinned), "a held server would be published to"
        if wanting:
            self.members.publish(wanting, self.version, self.name)
            self.publishing = self.name, self.version, wanting
            for server in wanting:
                self.real[server] = None  # half of the buckets are there

    @precondition(lambda self: self.publishing is not None)
    @rule(failing=st.sets(SERVERS))
    def end_publication(self, failing: set[int]) -> None:
        assert self.publishing
        name, version, servers = self.publishing
        self.publishing = None
        for server in servers:
            works = self.alive[server] and server not in failing
            self.real[server] = version if works and self.members.members[server].state == "publishing" else None
            became_clean = self.members.published(server, version, name, "" if works else "broken pipe")
            assert became_clean <= works

    @precondition(lambda self: self.publishing is None)
    @rule()
    def train_a_step(self) -> None:
        self.version += 1

    @rule()
    def replace_learner(self) -> None:
        self.learner, self.publishing = self.learner + 1, None
        self.members.new_learner()

    @rule(server=SERVERS)
    def pin(self, server: int) -> None:
        if server in self.members.clean():
            self.members.pin(server)
            self.pinned[server] = self.real[server]

    @rule(server=SERVERS)
    def unpin(self, server: int) -> None:
        self.members.unpin(server)
        self.pinned.pop(server, None)

    @invariant()
    def clean_servers_hold_what_is_believed(self) -> None:
        for server, version in self.members.clean().items():
            assert self.alive[server]
            assert self.real[server] == version

    @invariant()
    def held_servers_keep_their_version(self) -> None:
        for server, version in self.pinned.items():
            assert self.members.clean()[server] == version

    @invariant()
    def nobody_is_ahead_of_the_learner(self) -> None:
        assert (self.members.newest() or 0) <= self.version


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_server_is_published_to_before_it_is_used() -> None:
    m = membership(1)
    assert ids(m.wanting(0, "a")) == []
    m.seen(0)
    assert ids(m.wanting(0, "a")) == [0]
    assert m.clean() == {}
    m.publish([0], 0, "a")
    assert m.clean() == {}
    assert m.published(0, 0, "a", "")
    assert m.clean() == {0: 0}
    assert ids(m.wanting(0, "a")) == []
    assert ids(m.wanting(1, "a")) == [0]


def test_a_new_learner_publishes_to_all_and_old_results_count_for_nothing() -> None:
    m = membership(2)
    for server in (0, 1):
        m.seen(server)
    m.publish([0, 1], 0, "a")
    m.published(0, 0, "a", "")
    assert m.new_learner() == [1]
    assert m.clean() == {0: 0}, "what works goes on"
    assert ids(m.wanting(0, "b")) == [0, 1]
    assert not m.published(1, 0, "a", "")


def test_a_server_that_fails_waits_for_the_next_version_while_another_works() -> None:
    m = membership(2)
    m.seen(0)
    m.seen(1)
    m.publish([0, 1], 0, "a")
    m.published(1, 0, "a", "")
    m.published(0, 0, "a", "timed out")
    assert ids(m.wanting(0, "a")) == []
    assert ids(m.wanting(1, "a")) == [0, 1]
    m.lost(1)
    assert ids(m.wanting(0, "a")) == [0], "nobody else is there"


def test_a_version_never_falls() -> None:
    m = membership(1)
    m.seen(0)
    m.publish([0], 5, "a")
    m.published(0, 5, "a", "")
    with pytest.raises(ValueError, match="step back"):
        m.publish([0], 4, "a")
