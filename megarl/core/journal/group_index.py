"""Where the groups of one file of the journal lie.

A controller keeps this of all groups that may be asked for again, hundreds of thousands in a long run: 16 bytes each, in
two arrays that are sorted by ticket. Tickets finish about in the order of their numbers, so a new one goes in near the end.
"""

from array import array
from bisect import bisect_left


class GroupIndex:
    """The offset of each group's record, by ticket."""

    def __init__(self) -> None:
        self._tickets, self._offsets = array("q"), array("q")

    def add(self, ticket: int, offset: int) -> None:
        """A group that was not there before."""
        at = bisect_left(self._tickets, ticket)
        self._tickets.insert(at, ticket)
        self._offsets.insert(at, offset)

    def offset(self, ticket: int) -> int | None:
        """Of its record in the file; None if its group is not there."""
        at = bisect_left(self._tickets, ticket)
        if at == len(self._tickets) or self._tickets[at] != ticket:
            return None
        return self._offsets[at]

    def newest(self) -> int:
        """The largest ticket; -1 if there is none."""
        return self._tickets[-1] if self._tickets else -1

    def as_written(self) -> list[int]:
        """All tickets, in the order in which their groups were finished."""
        return [ticket for _, ticket in sorted(zip(self._offsets, self._tickets, strict=True))]
