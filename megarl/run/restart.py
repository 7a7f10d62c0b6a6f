"""What to do when a role dies. Pure: no clock, no processes.

    server died ──► restart that server
        the controller finds it lost, the learner publishes to it again
    controller died ──► restart the controller
        it rebuilds its state from the journal; the learner asks again
    learner died ──► restart all its ranks
        it loads its checkpoint and replays the steps after it
    learner left (0) ──► the run ends
    learner or controller left RUN/failure (train.py) ──► the run ends as failed
    too many deaths ──► the run ends as failed
        too many within minutes, or without a step between them; a server is dropped
        instead while there are others, once a step was made or if servers have joined
    a message ──► before the first step the run fails; later, at the second message
        for servers: once all have sent one; but while there are other servers, that
        server is dropped instead
    node is down ──► its servers are dropped, and the run goes on with the others
        without its last server, the learner or the controller it cannot go on: the run
        ends, to be started again on other nodes

A role's exit statuses: 0 for an orderly exit; 2 for one error message to the user
(`MegarlError`); anything else is a crash. A second try after a message is worthwhile
only if the run has made a step since the role's last message: a timeout may not occur
again, but bad input stays bad. A message from one of several servers may be its node's
fault (a port, a file, a full GPU).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

MESSAGE_STATUS = 2
"""Exit status of a role that ended with a `MegarlError`."""
MOST_DEATHS = 5
WINDOW_S = 900.0
"""Time window for counting deaths of one role. More than `MOST_DEATHS` end the run,
since it would not recover. Deaths since the run's last step count, however far apart
they are: a large model may run for minutes before each death.
"""
LONGEST_DELAY_S = 30.0

NodeState = Literal["up", "silent", "down"]
"""State of a dead role's node. silent: the role was started there and nothing was heard
from it.
"""
RoleKind = Literal["server", "controller", "learner"]


@dataclass(frozen=True, order=True)
class Role:
    """A supervised process. The learner counts as one: torchrun ends all its ranks when
    one dies.
    """

    kind: RoleKind
    index: int = 0

    @property
    def name(self) -> str:
        """Such as server-3."""
        return f"{self.kind}-{self.index}"

    @property
    def serves(self) -> bool:
        """Whether it is an SGLang server."""
        return self.kind == "server"


@dataclass(frozen=True)
class Restart:
    """Start `role` again after `delay_s` seconds."""

    role: Role
    delay_s: float


@dataclass(frozen=True)
class Ending:
    """The role is not started again, for `reason`."""

    role: Role
    reason: str


class GiveUp(Ending):
    """End the run as failed; `reason` names the role and what it did."""


class Drop(Ending):
    """Go on without this server; `reason` does not include its name."""


class Elsewhere(Ending):
    """End the run, keeping its checkpoint: it resumes when started on other nodes."""


@dataclass(frozen=True)
class Done:
    """The learner has saved and exited: end the run."""


@dataclass(frozen=True)
class Nothing:
    """The controller has nothing more to do; the learner exits next."""


Reaction = Restart | GiveUp | Drop | Elsewhere | Done | Nothing


class RoleDeath(NamedTuple):
    """A role's end. at: in seconds; steps: of the run, made by then."""

    at: float
    steps: int


class RestartPolicy:
    """Tracks deaths by role and the number of servers left, and decides how to react to
    each death.
    """

    def __init__(
        self, servers: int, most_deaths: int = MOST_DEATHS, window_s: float = WINDOW_S
    ) -> None:
        self.servers = servers
        self.most_deaths = most_deaths
        self.window_s = window_s
        self._deaths: dict[Role, list[RoleDeath]] = {}
        self._steps_at_message: dict[Role, int] = {}
        self._unable: set[Role] = set()  # servers that sent a message before the first step
        self._guests = 0

    def died(
        self,
        role: Role,
        status: int,
        at: float,
        steps: int,
        node: NodeState = "up",
        guests: int = 0,
    ) -> Reaction:
        """Decide after `role` ended with `status` (negative: a signal) at `at` seconds,
        `steps` steps after the start. guests: number of working servers that this run
        did not start.
        """
        self._guests = guests
        if status == 0 and role.kind == "learner":
            return Done()
        if status == 0 and role.kind == "controller":
            return Nothing()
        if node == "down":
            return self._without_node(role)
        if status == MESSAGE_STATUS:
            decision = self._message(role, steps)
            if decision is not None:
                return decision
        deaths = [
            death
            for death in self._deaths.get(role, [])
            if at - death.at < self.window_s or death.steps == steps
        ]
        deaths.append(RoleDeath(at, steps))
        self._deaths[role] = deaths
        count = len(deaths)
        if count == 1:
            return Restart(role, 0.0)
        if count <= self.most_deaths:
            return Restart(role, min(2.0 ** (count - 1), LONGEST_DELAY_S))
        if node == "silent":
            return self._without_node(role)
        if (steps or guests) and self._drop_if_possible(role):
            return Drop(role, "it keeps dying")
        minutes = (at - deaths[0].at) / 60
        return GiveUp(role, f"{role.name} died {count} times within {minutes:.0f} minutes")

    def _message(self, role: Role, steps: int) -> Reaction | None:
        """Decide after an exit with an error message. Return None if a second try is
        worthwhile: at a role's first message, or if the run has made a step since.
        """
        is_first_or_after_step = self._steps_at_message.get(role) != steps
        self._steps_at_message[role] = steps
        if role.kind == "server" and not steps:
            self._unable.add(role)
        all_servers_failed = len(self._unable) == self.servers
        if not steps and (role.kind != "server" or all_servers_failed):
            return GiveUp(role, f"{role.name} could not start")
        if is_first_or_after_step:
            return None
        if self._drop_if_possible(role):
            return Drop(role, "could not go on" if steps else "could not start")
        return GiveUp(role, f"{role.name} could not go on")

    def _drop_if_possible(self, role: Role) -> bool:
        """Count this role as dropped if it is a server, and not the last one. Return
        whether it was.
        """
        if role.kind != "server" or self.servers + self._guests == 1:
            return False
        self.servers -= 1
        self._unable.discard(role)
        return True

    def _without_node(self, role: Role) -> Drop | Elsewhere:
        """Decide what to do with a role whose node can no longer be used."""
        if self._drop_if_possible(role):
            return Drop(role, "its node is lost")
        return Elsewhere(role, f"the node of {role.name} is lost")
