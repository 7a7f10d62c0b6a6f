"""Where the groups of a file lie, against a dictionary; and what it takes in memory."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from megarl.core.journal.file import GroupIndex


@given(st.lists(st.integers(0, 60), unique=True), st.integers(0, 60))
def test_as_a_dictionary(tickets: list[int], asked: int):
    index, known = GroupIndex(), {}
    for place, ticket in enumerate(tickets):
        index.add(ticket, 100 * place)
        known[ticket] = 100 * place
    assert index.offset(asked) == known.get(asked)
    assert [index.offset(ticket) for ticket in tickets] == list(known.values())
    assert index.newest() == max(tickets, default=-1)
    assert index.as_written() == tickets


def test_the_longest_of_runs_takes_megabytes():
    tracemalloc.start()
    index = GroupIndex()
    for ticket in range(100_000):
        index.add(ticket ^ 7, ticket << 12)  # not quite in order
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 24 * 100_000
