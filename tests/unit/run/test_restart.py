"""The restart policy over random histories of deaths."""

from hypothesis import given
from hypothesis import strategies as st

from megarl.run.restart import (
    LONGEST_DELAY_S,
    MESSAGE_STATUS,
    Done,
    Drop,
    Elsewhere,
    GiveUp,
    Nothing,
    Restart,
    RestartPolicy,
    Role,
)

ROLES = [Role("server", 0), Role("server", 1), Role("controller"), Role("learner")]
roles = st.sampled_from(ROLES)
crashes = st.sampled_from([-9, -11, 1, 134])
gaps = st.floats(0, 400)


def test_orderly_ends() -> None:
    policy = RestartPolicy(2)
    assert policy.died(Role("learner"), 0, 0.0, 10) == Done()
    assert policy.died(Role("controller"), 0, 0.0, 10) == Nothing()
    assert isinstance(
        policy.died(Role("server"), 0, 0.0, 10), Restart
    )  # a server has no reason to leave


def test_the_last_server_is_dropped_only_while_others_have_joined() -> None:
    for joined in (0, 1):
        policy = RestartPolicy(1, most_deaths=2)
        server = Role("server", 0)
        assert isinstance(policy.died(server, -9, 0.0, 10, guests=joined), Restart)
        assert isinstance(policy.died(server, -9, 1.0, 10, guests=joined), Restart)
        assert isinstance(
            policy.died(server, -9, 2.0, 10, guests=joined), Drop if joined else GiveUp
        )
        policy = RestartPolicy(1)
        assert isinstance(
            policy.died(server, -9, 0.0, 10, "down", guests=joined), Drop if joined else Elsewhere
        )
        policy = RestartPolicy(1)
        assert isinstance(policy.died(server, MESSAGE_STATUS, 0.0, 10, guests=joined), Restart)
        assert isinstance(
            policy.died(server, MESSAGE_STATUS, 1.0, 10, guests=joined), Drop if joined else GiveUp
        )


@given(st.lists(st.tuples(roles, crashes, gaps), max_size=60))
def test_gives_up_exactly_when_one_role_dies_too_often(
    deaths: list[tuple[Role, int, float]],
) -> None:
    """One of two servers that dies too often is left out, for steps are made all the
    time.
    """
    policy = RestartPolicy(2, most_deaths=3, window_s=600)
    now = 0.0
    history: list[tuple[Role, float]] = []
    dropped: list[Role] = []
    for role, status, gap in deaths:
        if role in dropped:
            continue
        now += gap
        history.append((role, now))
        recent = sum(other == role and now - then < 600 for other, then in history)
        decision = policy.died(role, status, now, steps=len(history))
        if recent > 3 and role.kind == "server" and not dropped:
            assert decision == Drop(role, "it keeps dying")
            dropped.append(role)
            continue
        if recent > 3:
            assert isinstance(decision, GiveUp)
            assert decision.role == role
            assert role.name in decision.reason
            return
        assert isinstance(decision, Restart)
        assert decision.role == role
        assert 0 <= decision.delay_s <= LONGEST_DELAY_S
        assert (decision.delay_s == 0) == (recent == 1)


def test_a_server_that_dies_too_often_is_dropped_once_a_step_was_made() -> None:
    """Before that, the fault may be everybody's. A step may take longer than six
    deaths.
    """
    for steps, last in ((0, GiveUp), (7, Drop)):
        policy = RestartPolicy(64, most_deaths=2)
        decisions = [policy.died(Role("server", 5), -11, 10.0 * n, steps) for n in range(3)]
        assert [type(decision) for decision in decisions] == [Restart, Restart, last]


@given(roles, st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_a_message_is_tried_again_only_after_progress(role: Role, made: list[int]) -> None:
    policy = RestartPolicy(1, most_deaths=100)
    steps = 0
    for i, more in enumerate(made):
        steps += more
        decision = policy.died(role, MESSAGE_STATUS, 1000.0 * i, steps)
        assert isinstance(decision, GiveUp if more == 0 else Restart)
        if more == 0:
            return


def test_messages_of_two_roles_are_not_one_role_twice() -> None:
    policy = RestartPolicy(2)
    for role in (Role("server", 0), Role("server", 1), Role("learner")):
        assert isinstance(policy.died(role, MESSAGE_STATUS, 5.0, 7), Restart)
    assert policy.died(Role("learner"), MESSAGE_STATUS, 9.0, 7) == GiveUp(
        Role("learner"), "learner-0 could not go on"
    )


def test_a_server_that_cannot_go_on_is_dropped_while_there_are_others() -> None:
    policy = RestartPolicy(2)
    (one, other) = (Role("server", 0), Role("server", 1))
    assert isinstance(policy.died(one, MESSAGE_STATUS, 5.0, 7), Restart)
    assert policy.died(one, MESSAGE_STATUS, 9.0, 7) == Drop(one, "could not go on")
    assert isinstance(policy.died(other, MESSAGE_STATUS, 9.0, 7), Restart)
    assert isinstance(policy.died(other, MESSAGE_STATUS, 12.0, 7), GiveUp)


def test_bad_input_of_all_servers_ends_the_run_when_the_last_has_told_it() -> None:
    policy = RestartPolicy(3)
    servers = [Role("server", i) for i in range(3)]
    assert all(isinstance(policy.died(s, MESSAGE_STATUS, 5.0, 0), Restart) for s in servers[:2])
    assert policy.died(servers[2], MESSAGE_STATUS, 5.0, 0) == GiveUp(
        servers[2], "server-2 could not start"
    )


def test_a_server_that_cannot_start_is_dropped_while_others_can() -> None:
    policy = RestartPolicy(3)
    servers = [Role("server", i) for i in range(3)]
    for server in servers[:2]:
        assert isinstance(policy.died(server, MESSAGE_STATUS, 5.0, 0), Restart)
        assert policy.died(server, MESSAGE_STATUS, 9.0, 0) == Drop(server, "could not start")
    assert policy.died(servers[2], MESSAGE_STATUS, 9.0, 0) == GiveUp(
        servers[2], "server-2 could not start"
    )


def test_a_role_that_takes_long_to_die_is_given_up_when_nothing_is_made_meanwhile() -> None:
    policy = RestartPolicy(2, most_deaths=3, window_s=600)
    role = Role("learner")
    for n in range(10):
        assert isinstance(policy.died(role, 1, 1000.0 * n, steps=n), Restart)
    for n in range(10, 12):
        assert isinstance(policy.died(role, 1, 1000.0 * n, steps=9), Restart)
    assert policy.died(role, 1, 12_000.0, steps=9) == GiveUp(
        role, "learner-0 died 4 times within 50 minutes"
    )


def test_bad_input_is_not_tried_twice() -> None:
    decision = RestartPolicy(2).died(Role("learner"), MESSAGE_STATUS, 5.0, steps=0)
    assert decision == GiveUp(Role("learner"), "learner-0 could not start")


def test_a_lost_node_costs_its_servers_while_there_are_others() -> None:
    policy = RestartPolicy(2)
    assert policy.died(Role("server", 1), -9, 5.0, 1, "down") == Drop(
        Role("server", 1), "its node is lost"
    )
    assert policy.died(Role("server", 0), -9, 6.0, 1, "down") == Elsewhere(
        Role("server", 0), "the node of server-0 is lost"
    )
    assert isinstance(policy.died(Role("learner"), 1, 7.0, 1, "down"), Elsewhere)


def test_a_silent_node_is_tried_before_it_is_given_up() -> None:
    policy = RestartPolicy(2, most_deaths=3)
    role = Role("server", 1)
    decisions = [policy.died(role, 1, 10.0 * n, 1, "silent") for n in range(4)]
    assert [type(decision) for decision in decisions] == [Restart, Restart, Restart, Drop]
