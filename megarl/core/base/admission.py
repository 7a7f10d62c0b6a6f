"""The law of the pipeline as a pure state machine: which step trains a ticket, and
which servers may work on it.

    admit() ─► ticket g ─┬─ finish(g) ─► batch(D(g)), once all ahead of it is settled
                         └─ remove(g) ─► every ticket behind moves up by one

Let i(g) be the number of tickets admitted before g and not removed, and B the number of
prompts in a batch:

    D(g) = floor(i(g) / B)          the step that trains g
    P(g) = D(g) - D(g) mod p        the first step of g's phase; a phase has p steps, so
                                    P = D if p = 1
    P(g) - v <= k                   a request of g may go to a server with weights of
                                    version v; k is max_lag

D never rises, since removals lower i and new tickets go to the end. A server's version
never falls while a request is running, so for every token, the step that trains it is s
= D(g) <= P(g) + p - 1 <= v + k + p - 1. A ticket is drawn only if it would be eligible
on the newest version, hence at most (k + p) B tickets are ahead of the learner.

    PipelineRL-k        p = 1, max_lag = k: weights are published after every step,
                        while generation goes on
    PPO-off-policy-p    p steps, max_lag = 0: weights are published when a phase begins
                        (controller/decision.py), so every token of the phase has the
                        version P(g) and a lag of at most p - 1

No clock, no I/O: the state is a function of the sequence of admit, finish and remove,
and so of the journal.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable


class Admission:
    """The tickets of a run. The optional arguments restore a saved state; the
    attributes of the same names hold it.

    next_ticket: the number that the next admission assigns. forgotten: the number of
    tickets that were trained and will not be replayed (`forget`); only i(g) still
    counts them. queue: all other tickets not removed, in order. Kept for replay: 8
    bytes each, 3 MB in the longest runs.
    """

    def __init__(
        self,
        prompts_per_batch: int,
        max_lag: int,
        phase_steps: int = 1,
        *,
        next_ticket: int = 0,
        forgotten: int = 0,
        queue: Iterable[int] = (),
        unfinished: Iterable[int] = (),
    ) -> None:
        self.prompts_per_batch = prompts_per_batch
        self.max_lag = max_lag
        self.phase_steps = phase_steps
        self.next_ticket = next_ticket
        self.forgotten = forgotten
        self.queue = array("q", queue)
        # An ordered set: tickets are admitted in ascending order.
        self._unfinished = dict.fromkeys(unfinished)

    def can_admit(self, newest_version: int) -> bool:
        """Return whether the next ticket would be eligible on the newest version; if
        not, the window is full.
        """
        return self.phase_start(self.next_due()) - newest_version <= self.max_lag

    def next_due(self) -> int:
        """Return D(g) of the ticket that would be admitted next."""
        return (self.forgotten + len(self.queue)) // self.prompts_per_batch

    def admit(self) -> int:
        """Admit the next ticket and return it."""
        ticket = self.next_ticket
        self.next_ticket += 1
        self.queue.append(ticket)
        self._unfinished[ticket] = None
        return ticket

    def step_of(self, ticket: int) -> int:
        """Return D(g). ValueError for a ticket that was removed, forgotten or never
        admitted.
        """
        return (self.forgotten + self._index(ticket)) // self.prompts_per_batch

    def eligible(self, ticket: int, server_version: int) -> bool:
        """Return whether a request of this ticket may go to a server with these
        weights. ValueError as in `step_of`.
        """
        return self.phase_start(self.step_of(ticket)) - server_version <= self.max_lag

    def phase_start(self, step: int) -> int:
        """Return the first step of the phase that contains `step`."""
        return step - step % self.phase_steps

    def finish(self, ticket: int) -> None:
        """Mark the ticket's group as complete or void; the ticket keeps its slot.
        ValueError unless it is unfinished.
        """
        if ticket not in self._unfinished:
            raise ValueError(
                f"ticket {ticket} is not unfinished: never admitted, or finished or removed already"
            )
        del self._unfinished[ticket]

    def remove(self, ticket: int) -> None:
        """Take the ticket out of its slot. ValueError unless it is unfinished: a
        finished ticket may already be in a batch.
        """
        self.finish(ticket)
        del self.queue[self._index(ticket)]

    def batch(self, step: int) -> tuple[int, ...] | None:
        """Return the tickets that `step` trains, in order, or None while any of them or
        of those ahead is unfinished. Never changes once it is not None, since nothing
        ahead can be removed any more. ValueError for a forgotten step.
        """
        first = step * self.prompts_per_batch - self.forgotten
        if first < 0:
            oldest = self.forgotten // self.prompts_per_batch
            raise ValueError(f"batch {step} is forgotten; the oldest kept is {oldest}")
        tickets = tuple(self.queue[first : first + self.prompts_per_batch])
        if len(tickets) < self.prompts_per_batch:
            return None
        oldest_unfinished = next(iter(self._unfinished), self.next_ticket)
        is_settled = tickets[-1] < oldest_unfinished
        return tickets if is_settled else None

    def unfinished(self) -> list[int]:
        """Return the tickets that are neither finished nor removed, oldest first."""
        return list(self._unfinished)

    def first_ticket(self, step: int) -> int:
        """Return the oldest ticket that `step` or a later step trains; all smaller
        tickets belong to earlier steps.
        """
        first = step * self.prompts_per_batch - self.forgotten
        if first >= len(self.queue):
            return self.next_ticket
        return self.queue[max(first, 0)]

    def forget(self, step: int) -> None:
        """Drop the batches before `step`, which are never asked for again. ValueError
        if one of them is not settled.
        """
        first = step * self.prompts_per_batch - self.forgotten
        if first <= 0:
            return
        if self.batch(step - 1) is None:
            raise ValueError(f"batch {step - 1} is not settled yet")
        del self.queue[:first]
        self.forgotten += first

    def _index(self, ticket: int) -> int:
        """Return a ticket's place in the queue. ValueError if it is not there."""
        index = bisect_left(self.queue, ticket)
        if index == len(self.queue) or self.queue[index] != ticket:
            raise ValueError(
                f"ticket {ticket} is not in the queue: removed, forgotten or never admitted"
            )
        return index
