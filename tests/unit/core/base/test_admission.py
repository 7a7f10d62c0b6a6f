"""The law of the pipeline under random schedules: admissions, removals, publications,
held servers and crashes.
"""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megarl.core.base.admission import Admission


def apply(admission: Admission, record: tuple[str, int]) -> None:
    kind, ticket = record
    if kind == "admit":
        assert admission.admit() == ticket
    else:
        {"finish": admission.finish, "remove": admission.remove}[kind](ticket)


def due_by_definition(records: list[tuple[str, int]], ticket: int, prompts_per_batch: int) -> int:
    """D(g) = floor(i(g) / B), counted out."""
    removed = {t for kind, t in records if kind == "remove"}
    return sum(1 for t in range(ticket) if t not in removed) // prompts_per_batch


def test_batches_are_the_oldest_tickets_that_were_not_removed() -> None:
    admission = Admission(prompts_per_batch=2, max_lag=1)
    assert [admission.admit() for _ in range(4)] == [0, 1, 2, 3]
    assert not admission.can_admit(0)  # D(4) = 2 > 0 + 1
    assert admission.can_admit(1)
    for ticket in (3, 2, 0):
        admission.finish(ticket)
    assert admission.batch(0) is None
    assert (
        admission.batch(1) is None
    )  # finished, but ticket 1 may still be removed and move them up
    admission.remove(1)
    assert admission.batch(0) == (0, 2)
    assert admission.batch(1) is None  # one is missing
    assert admission.step_of(3) == 1
    admission.finish(admission.admit())
    assert admission.batch(1) == (3, 4)
    assert admission.unfinished() == []


def test_a_ticket_may_go_only_to_servers_within_the_lag() -> None:
    admission = Admission(prompts_per_batch=1, max_lag=2)
    tickets = [admission.admit() for _ in range(3)]
    assert [admission.eligible(t, 0) for t in tickets] == [True, True, True]
    admission.admit()
    assert not admission.eligible(3, 0)
    assert admission.eligible(3, 1)
    admission.remove(0)
    assert admission.eligible(3, 0)


@pytest.mark.parametrize("again", ["finish", "remove"])
@pytest.mark.parametrize("first", ["finish", "remove"])
def test_a_ticket_is_settled_once(first: str, again: str) -> None:
    admission = Admission(1, 0)
    admission.admit()
    getattr(admission, first)(0)
    with pytest.raises(ValueError, match="ticket 0 is not unfinished"):
        getattr(admission, again)(0)
    with pytest.raises(ValueError, match="ticket 5"):
        getattr(admission, again)(5)


def test_a_removed_ticket_is_due_nowhere() -> None:
    admission = Admission(1, 0)
    admission.admit()
    admission.remove(0)
    with pytest.raises(ValueError, match="ticket 0 is not in the queue"):
        admission.step_of(0)


def test_forgetting_changes_nothing_that_is_still_asked_for() -> None:
    admission = Admission(2, 3)
    whole = Admission(2, 3)
    for a in (admission, whole):
        for _ in range(9):
            a.admit()
        a.remove(2)
        for ticket in (0, 1, 3, 4):
            a.finish(ticket)
    with pytest.raises(ValueError, match="batch 2 is not settled"):
        admission.forget(3)
    admission.forget(1)
    assert admission.forgotten == 2
    assert [admission.step_of(t) for t in range(3, 9)] == [whole.step_of(t) for t in range(3, 9)]
    assert admission.batch(1) == whole.batch(1) == (3, 4)
    assert admission.first_ticket(1) == whole.first_ticket(1) == 3
    assert admission.can_admit(1) == whole.can_admit(1)
    with pytest.raises(ValueError, match="batch 0 is forgotten"):
        admission.batch(0)


def test_a_long_run_stays_quick() -> None:
    """150,000 tickets, each asked for its step many times; a run takes seconds only if
    no call walks over them.
    """
    admission = Admission(prompts_per_batch=50, max_lag=8)
    for step in range(3000):
        while admission.can_admit(step):
            admission.admit()
        for ticket in admission.unfinished()[:50]:
            for version in (step, step - 8):
                assert admission.eligible(ticket, version)
            admission.finish(ticket)
        assert admission.batch(step) == tuple(range(step * 50, step * 50 + 50))


RANDOM = st.integers(0, 2**32 - 1).map(Random)


class Schedule(RuleBasedStateMachine):
    """A run: servers with versions, requests in flight whose tokens take the server's
    version as it rises, a learner.

    What the controller knows is `admission` and `records` alone; all else here is the
    world outside it.
    """

    @initialize(prompts=st.integers(1, 3), lag=st.integers(0, 2), servers=st.integers(1, 3))
    def start(self, prompts: int, lag: int, servers: int) -> None:
        self.prompts = prompts
        self.lag = lag
        self.admission = Admission(prompts, lag)
        self.records: list[tuple[str, int]] = []
        self.step = 0  # the learner's next one; its weights have this version
        self.published = 0  # the highest version any server has had
        self.server_versions: list[int | None] = [
            0
        ] * servers  # None: lost, or not yet published to
        self.held: set[int] = set()  # by an evaluation: no publication
        self.in_flight: dict[int, int] = {}  # ticket -> server
        self.token_versions: dict[int, set[int]] = {}
        self.trained: dict[int, tuple[int, ...]] = {}  # step -> tickets
        self.last_due: dict[int, int] = {}
        self.offered: dict[
            int, tuple[int, ...]
        ] = {}  # batches that were complete at some time, trained or not

    # The controller. Few rules with much chance in each: hypothesis leaves rules out at
    # random, a run needs them all.

    @rule(random=RANDOM, share=st.sampled_from([0.3, 1.0]), removed=st.sampled_from([0.0, 0.3]))
    def generate(self, random: Random, share: float, removed: float) -> None:
        """Admit what may be; a share of the waiting tickets starts, or goes on; a share
        of the requests ends.

        They end in any order, so fast ones overtake slow ones, and are finished, or
        taken out (refill).
        """
        while self.admission.can_admit(self.published):
            self.record("admit", self.admission.next_ticket)
        for ticket in self.admission.unfinished():
            servers = self.eligible(ticket)
            if ticket not in self.in_flight and servers and random.random() < share:
                self.in_flight[ticket] = random.choice(servers)
        for ticket in sorted(self.in_flight, key=lambda _: random.random()):
            self.sample(ticket)
            if random.random() < share:
                del self.in_flight[ticket]
                self.record("remove" if random.random() < removed else "finish", ticket)

    def record(self, kind: str, ticket: int) -> None:
        apply(self.admission, (kind, ticket))
        self.records.append((kind, ticket))

    def eligible(self, ticket: int) -> list[int]:
        """Servers that may work on it."""
        return [
            s
            for s, v in enumerate(self.server_versions)
            if v is not None and self.admission.eligible(ticket, v)
        ]

    def sample(self, ticket: int) -> None:
        """One more token, of the weights its server has by now."""
        version = self.server_versions[self.in_flight[ticket]]
        assert version is not None
        self.token_versions.setdefault(ticket, set()).add(version)

    # the learner

    @rule(random=RANDOM)
    def learn(self, random: Random) -> None:
        """Train if the batch is complete; publish to some servers, whose requests go on
        with the new weights.
        """
        tickets = self.admission.batch(self.step)
        if tickets is not None:
            for ticket in tickets:
                for version in self.token_versions.get(ticket, ()):
                    assert 0 <= self.step - version <= self.lag
            self.trained[self.step] = tickets
            self.step += 1
        for server in range(len(self.server_versions)):
            if server not in self.held and random.random() < 0.6:
                self.server_versions[server] = self.step
                self.published = self.step

    # what goes wrong, or is in the way

    @rule(
        random=RANDOM,
        what=st.sampled_from(["evaluation", "void", "controller", "server", "learner"]),
    )
    def disturb(self, random: Random, what: str) -> None:
        server = random.randrange(len(self.server_versions))
        if what == "evaluation":  # a server is held at its version, or let go
            self.held = set() if self.held else {server}
        elif what == "server":  # its requests go on elsewhere, from the tokens they have
            self.server_versions[server] = None
            self.held.discard(server)
            self.in_flight = {t: s for t, s in self.in_flight.items() if s != server}
        elif what == "void":
            self.a_ticket_fails(random)
        elif what == "controller":
            self.controller_crashes()
        else:  # the learner replays from an earlier step, without publication: the same batches
            for step in range(random.randint(0, self.step), self.step):
                assert self.admission.batch(step) == self.trained[step]

    def a_ticket_fails(self, random: Random) -> None:
        """Too often: it fills its slot with nothing."""
        if unfinished := self.admission.unfinished():
            ticket = random.choice(unfinished)
            self.in_flight.pop(ticket, None)
            self.token_versions.pop(ticket, None)
            self.record("finish", ticket)

    def controller_crashes(self) -> None:
        """Rebuilt from the journal; requests are gone, so unfinished tickets are
        generated anew.
        """
        before = self.admission
        self.admission = Admission(self.prompts, self.lag)
        for record in self.records:
            apply(self.admission, record)
        assert self.admission.queue == before.queue
        assert self.admission.unfinished() == before.unfinished()
        assert self.admission.next_ticket == before.next_ticket
        self.in_flight.clear()
        for ticket in self.admission.unfinished():
            self.token_versions.pop(ticket, None)

    # what always holds

    @invariant()
    def each_ticket_is_trained_once(self) -> None:
        trained = [t for tickets in self.trained.values() for t in tickets]
        assert len(trained) == len(set(trained))
        assert trained == sorted(trained)
        assert all(len(tickets) == self.prompts for tickets in self.trained.values())

    @invariant()
    def a_complete_batch_never_changes(self) -> None:
        for step in range(self.step + self.lag + 2):
            batch = self.admission.batch(step)
            if step in self.offered:
                assert batch == self.offered[step]
            elif batch is not None:
                self.offered[step] = batch

    @invariant()
    def due_is_as_defined_and_never_rises(self) -> None:
        due = {t: self.admission.step_of(t) for t in self.admission.queue}
        for ticket, step in due.items():
            assert step == due_by_definition(self.records, ticket, self.prompts)
            assert step <= self.last_due.get(ticket, step)
        assert all(a <= b for a, b in pairwise(due.values()))
        self.last_due = due

    @invariant()
    def window_is_full_only_when_it_must_be(self) -> None:
        window = (self.published + self.lag + 1) * self.prompts
        assert len(self.admission.queue) <= window
        assert self.admission.can_admit(self.published) == (len(self.admission.queue) < window)

    def teardown(self) -> None:
        """From wherever this ended, with servers and a learner that work the run goes
        on: no deadlock.
        """
        if not hasattr(self, "admission"):
            return
        target = self.step + self.lag + 3
        self.held.clear()
        for _ in self.rounds(target):
            self.published = self.step
            while self.admission.can_admit(self.published):
                self.record("admit", self.admission.next_ticket)
            for ticket in self.admission.unfinished():
                assert self.admission.eligible(ticket, self.step)  # newest weights may do any
                self.token_versions.setdefault(ticket, set()).add(self.step)
                self.record("finish", ticket)
            self.learn(Random(0))
        self.each_ticket_is_trained_once()

    def rounds(self, target: int) -> Iterator[None]:
        """Until the learner reaches `target`; every round must bring it forward."""
        while self.step < target:
            before = self.step
            yield
            assert self.step > before


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
