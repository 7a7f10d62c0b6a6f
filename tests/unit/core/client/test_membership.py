"""Servers' states under random events: who may be sent requests, and what may never
happen.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megarl.core.base.messages import ServerAddress
from megarl.core.client.membership import FORGET_S, Membership

OWN = st.integers(0, 2)
SERVERS = st.integers(0, 5)
PORTS = st.integers(0, 6)
"""Ports of joined servers; those below 3 are of the run's own."""
START_S = 100.0


def membership(count: int = 3, staged: bool = False) -> Membership:
    return Membership(
        [ServerAddress(id=n, url=f"http://127.0.0.1:{n}") for n in range(count)], staged
    )


def ids(addresses: tuple[ServerAddress, ...]) -> list[int]:
    return [a.id for a in addresses]


class Life(RuleBasedStateMachine):
    """Servers come, die and return, learners publish and are replaced, evaluations hold
    a server, other servers join and leave.

    `real` is what each server truly holds: None after a (re)start or half a
    publication, until one is complete; if weights are staged, what it held before,
    until then. `spoke`: when the process of a joined server said last that it is there.
    """

    staged = False

    def __init__(self) -> None:
        super().__init__()
        self.members = membership(staged=self.staged)
        self.alive = dict.fromkeys(range(3), False)
        self.real: dict[int, int | None] = dict.fromkeys(range(3))
        self.learner = 0
        self.version = 0
        self.publishing: tuple[str, int, list[int]] | None = None
        self.pinned: dict[int, int | None] = {}
        self.spoke = dict[int, float]()
        self.now = 0.0
        self.lives = 0

    @property
    def name(self) -> str:
        return f"learner{self.learner}"

    @rule(server=OWN)
    def start(self, server: int) -> None:
        if not self.alive[server]:
            self.alive[server] = True
            self.real[server] = None

    @rule(server=SERVERS)
    def notice_up(self, server: int) -> None:
        if self.alive.get(server):
            self.members.answered(server)

    @rule(server=SERVERS)
    def die_and_be_noticed(self, server: int) -> None:
        if server not in self.members.members:
            return
        self.alive[server] = False
        self.real[server] = None
        self.pinned.pop(server, None)
        self.members.lose(server)

    @precondition(lambda self: self.publishing is None)
    @rule()
    def ask_to_publish(self) -> None:
        wanting = ids(self.members.wanting(self.version, self.name))
        assert not set(wanting) & set(self.pinned), "a held server would be published to"
        if wanting:
            self.members.publish(wanting, self.version, self.name)
            self.publishing = self.name, self.version, wanting
            for server in wanting if not self.staged else ():
                self.real[server] = None  # half of the buckets are there

    @precondition(lambda self: self.publishing is not None)
    @rule(failing=st.sets(SERVERS))
    def end_publication(self, failing: set[int]) -> None:
        assert self.publishing
        name, version, servers = self.publishing
        self.publishing = None
        for server in servers:
            works = bool(self.alive.get(server)) and server not in failing
            member = self.members.members.get(server)
            self.real[server] = (
                version if works and member and member.state == "publishing" else None
            )
            became_clean = self.members.published(
                server, version, name, "" if works else "broken pipe"
            )
            assert became_clean <= works

    @precondition(lambda self: self.publishing is None)
    @rule()
    def train_a_step(self) -> None:
        self.version += 1

    @rule()
    def replace_learner(self) -> None:
        self.learner = self.learner + 1
        self.publishing = None
        self.members.new_learner()

    @rule(server=SERVERS)
    def pin(self, server: int) -> None:
        if server in self.members.clean():
            self.members.pin(server)
            self.pinned[server] = self.real[server]

    @rule(server=SERVERS)
    def unpin(self, server: int) -> None:
        if server in self.pinned:
            self.members.unpin(server)
            del self.pinned[server]

    @rule(port=PORTS, wanted=st.integers(-1, 5), again=st.booleans())
    def join(self, port: int, wanted: int, again: bool) -> None:
        """A server at this port starts, anew if there is one, or (again) says once more
        that it is there.
        """
        url = f"http://127.0.0.1:{port}"
        known = next((s for s, m in self.members.members.items() if m.address.url == url), None)
        if known is not None and (known < 3 or self.members.leaves(known)):
            with pytest.raises(ValueError, match=r"is the run's own|leaves"):
                self.members.join(url, "other", wanted, 1, self.now)
            return
        self.lives += 1
        life = (
            self.members.members[known].life if again and known is not None else f"life{self.lives}"
        )
        before = set(self.members.members)
        server = self.members.join(url, life, wanted, 1, self.now)
        if known is not None:
            assert server == known, "the same id"
        elif wanted >= 3 and wanted not in before:
            assert server == wanted, "the id it had before"
        else:
            assert server >= 3
            assert server not in before
        if not (again and known is not None):
            self.alive[server] = True
            self.real[server] = None
            self.pinned.pop(server, None)
        self.spoke[server] = self.now

    @rule(server=SERVERS)
    def leave(self, server: int) -> None:
        if server in self.members.joined_servers():
            self.members.leave(server)
            self.pinned.pop(server, None)

    @rule(seconds=st.sampled_from([1.0, FORGET_S, FORGET_S + 1, START_S]))
    def forget(self, seconds: float) -> None:
        """Time passes. The silent and the stuck are sent away; who has left is
        forgotten, unless it is being published to.
        """
        self.now += seconds
        silent = self.members.silent(self.now)
        stuck = self.members.stuck(self.now, START_S)
        for server in {*silent, *stuck}:
            assert self.members.members[server].away, "one that answers stays"
        for server in silent:
            assert self.now - self.spoke[server] > FORGET_S, "one that speaks stays"
            self.members.leave(server)
        for server in {s for s in self.members.joined_servers() if self.members.leaves(s)}:
            under_way = self.publishing is not None and server in self.publishing[2]
            if self.members.members[server].receives:
                assert under_way, "nothing else keeps it"
                with pytest.raises(ValueError, match="only one that has left"):
                    self.members.forget(server)
            else:
                self.members.forget(server)
                self.alive.pop(server), self.real.pop(server), self.spoke.pop(server)
        assert set(self.members.members) >= {0, 1, 2}, "the run's own stay, whatever they do"

    @invariant()
    def clean_servers_hold_what_is_believed(self) -> None:
        for server, version in self.members.clean().items():
            assert self.alive[server]
            assert not self.members.leaves(server)
            assert self.real[server] == version

    @invariant()
    def requests_meet_the_version_that_is_believed(self) -> None:
        serving = self.members.serving()
        for server, version in serving.items():
            assert self.alive[server]
            assert self.real[server] == version == self.members.serving_version(server)
        assert serving.items() >= self.members.clean().items()

    @invariant()
    def held_servers_keep_their_version(self) -> None:
        for server, version in self.pinned.items():
            assert self.members.clean()[server] == version

    @invariant()
    def nobody_is_ahead_of_the_learner(self) -> None:
        assert max(self.members.serving().values(), default=0) <= self.version


class StagedLife(Life):
    staged = True


TestLife = Life.TestCase
TestStagedLife = StagedLife.TestCase
TestLife.settings = TestStagedLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("staged", [False, True])
def test_a_server_serves_its_old_weights_while_new_ones_are_staged(staged: bool) -> None:
    m = membership(2, staged)
    m.answered(0)
    m.answered(1)
    m.publish([0], 7, "a")
    assert m.serving() == {}, "it holds nothing yet"
    m.published(0, 7, "a", "")
    m.publish([0, 1], 8, "a")
    m.publish([0, 1], 8, "a")  # the answer was lost
    assert m.serving() == ({0: 7} if staged else {})
    assert m.clean() == {}
    m.published(0, 8, "a", "checksum")
    m.published(1, 8, "a", "")
    assert m.serving() == m.clean() == {1: 8}, "what failed is not sent any"


def test_a_server_that_joins_is_published_to_alone_and_one_that_leaves_is_left_out() -> None:
    m = membership(1)
    m.answered(0)
    m.publish([0], 7, "a")
    m.published(0, 7, "a", "")
    assert m.join("http://127.0.0.1:9", "x", -1, 1, at=0.0) == 1
    assert ids(m.wanting(7, "a")) == [], "not awaited while it starts"
    m.answered(1)
    assert ids(m.wanting(7, "a")) == [1], "the other server is not paused for it"
    m.publish([1], 7, "a")
    m.leave(1)
    assert ids(m.wanting(8, "a")) == [0], "in the middle of a publication"
    assert not m.published(1, 7, "a", "")
    assert m.clean() == {0: 7}
    m.forget(1)
    assert list(m.members) == [0]


def test_a_silent_server_is_forgotten_and_a_speaking_one_after_the_limit_of_a_start() -> None:
    m = membership(1)
    m.join("http://127.0.0.1:9", "x", -1, 1, at=0.0)
    m.join("http://127.0.0.1:8", "y", -1, 1, at=0.0)
    for at in range(0, 400, 2):
        m.join("http://127.0.0.1:8", "y", 2, 1, at=float(at))
        assert m.silent(at) == ([1] if at > FORGET_S else [])
        assert m.stuck(at, 300.0) == ([1, 2] if at > 300 else [])
    m.answered(1)
    m.answered(2)
    assert m.silent(1000.0) == []
    assert m.stuck(1000.0, 300.0) == []
    m.lose(2)
    assert m.stuck(1299.0, 300.0) == []
    assert m.stuck(1301.0, 300.0) == [2]


def test_a_server_is_published_to_before_it_is_used() -> None:
    m = membership(1)
    assert ids(m.wanting(0, "a")) == []
    m.answered(0)
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
        m.answered(server)
    m.publish([0, 1], 0, "a")
    m.published(0, 0, "a", "")
    assert m.new_learner() == [1]
    assert m.clean() == {0: 0}, "what works goes on"
    assert ids(m.wanting(0, "b")) == [0, 1]
    assert not m.published(1, 0, "a", "")


def test_a_server_that_fails_waits_for_the_next_version_while_another_works() -> None:
    m = membership(2)
    m.answered(0)
    m.answered(1)
    m.publish([0, 1], 0, "a")
    m.published(1, 0, "a", "")
    m.published(0, 0, "a", "timed out")
    assert ids(m.wanting(0, "a")) == []
    assert ids(m.wanting(1, "a")) == [0, 1]
    m.lose(1)
    assert ids(m.wanting(0, "a")) == [0], "nobody else is there"


def test_a_version_never_falls() -> None:
    m = membership(1)
    m.answered(0)
    m.publish([0], 5, "a")
    m.published(0, 5, "a", "")
    with pytest.raises(ValueError, match="step back"):
        m.publish([0], 4, "a")
