"""What to do when a role dies. Pure: no clock, no processes.

    server died      ──► that server again          the controller finds it lost, the learner brings it up to date
    controller died  ──► the controller again       it folds its journal; the learner asks again
    learner died     ──► all its ranks again        it loads its checkpoint and replays what came after
    learner left (0) ──► the run ends
    learner or controller left RUN/failure (train.py) ──► the run ends as failed
    too often        ──► the run ends as failed     within some minutes, or without a step made between the deaths
    a message        ──► as failed before the first step, of servers if all of them have one; later the second time; a server
                         is dropped then while there are others
    node is down     ──► its servers are dropped, and the run goes on with the others; the last server, the learner and the
                         controller cannot be spared: the run ends, to be started again on other nodes

A role's exit statuses: 0 it left in order; 2 one error message for the user (`MegarlError`); anything else is a crash.
A role's message is worth a second try only when the run has made a step since its last one: a wait that ran out may not run
out again, but bad input stays bad. What one server of several says may be its node's fault (a port, a file, a full GPU).
"""

from dataclasses import dataclass
from typing import Literal

MESSAGE_STATUS = 2
"""Exit status of a role that ended with a `MegarlError`."""
MOST_DEATHS = 5
WINDOW_S = 900.0
"""More than `MOST_DEATHS` deaths of one role within this time, or however far apart since the last step that the run has made
(a large model takes minutes to die in), end the run: it would not get better."""
LONGEST_DELAY_S = 30.0

NodeState = Literal["up", "silent", "down"]
"""Of the node of a role that died. silent: the role was started there and nothing was heard of it."""
Kind = Literal["server", "controller", "learner"]


@dataclass(frozen=True, order=True)
class Role:
    """One process that is watched. The learner is one: torchrun ends all its ranks when one dies."""

    kind: Kind
    index: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True)
class Restart:
    """Start `role` again after `delay_s` seconds."""

    role: Role
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed; `reason` names the role and what it did."""

    role: Role
    reason: str


@dataclass(frozen=True)
class Drop:
    """Go on without this server; `reason` says why, without its name."""

    role: Role
    reason: str


@dataclass(frozen=True)
class Elsewhere:
    """End the run, whose checkpoint stands: it goes on when it is started on other nodes."""

    role: Role
    reason: str


@dataclass(frozen=True)
class Done:
    """The learner has saved and left: end the run."""


@dataclass(frozen=True)
class Nothing:
    """The controller has nothing more to do; the learner leaves next."""


Decision = Restart | GiveUp | Drop | Elsewhere | Done | Nothing


class RestartPolicy:
    """Deaths so far, by role, and how many servers there still are."""

    def __init__(self, servers: int, most_deaths: int = MOST_DEATHS, window_s: float = WINDOW_S) -> None:
        self.servers = servers
        self.most_deaths = most_deaths
        self.window_s = window_s
        self._deaths: dict[Role, list[tuple[float, int]]] = {}  # when, and after how many steps
        self._steps_at_message: dict[Role, int] = {}
        self._unable: set[Role] = set()  # servers that gave a message before the first step

    def died(self, role: Role, status: int, at: float, steps: int, node: NodeState = "up") -> Decision:
        """`role` ended with `status` (negative: by that signal) at `at` seconds, after `steps` steps since the start."""
        if status == 0 and role.kind == "learner":
            return Done()
        if status == 0 and role.kind == "controller":
            return Nothing()
        if node == "down":
            return self._without_node(role)
        if status == MESSAGE_STATUS and (decision := self._message(role, steps)):
            return decision
        earlier = [(t, s) for t, s in self._deaths.get(role, []) if at - t < self.window_s or s == steps]
        self._deaths[role] = [*earlier, (at, steps)]
        count = len(earlier) + 1
        if count > self.most_deaths and node == "silent":
            return self._without_node(role)
        if count > self.most_deaths:
            return GiveUp(role, f"{role.name} died {count} times within {(at - earlier[0][0]) / 60:.0f} minutes")
        return Restart(role, 0.0 if count == 1 else min(2.0 ** (count - 1), LONGEST_DELAY_S))

    def _message(self, role: Role, steps: int) -> Decision | None:
        """None if it is worth a second try."""
        again = self._steps_at_message.get(role) == steps
        self._steps_at_message[role] = steps
        if role.kind == "server" and not steps:
            self._unable.add(role)
        if not steps and (role.kind != "server" or len(self._unable) == self.servers):
            return GiveUp(role, f"{role.name} could not start")
        if not again:
            return None
        if self._can_drop(role):
            return Drop(role, "could not go on" if steps else "could not start")
        return GiveUp(role, f"{role.name} could not go on")

    def _can_drop(self, role: Role) -> bool:
        """And counts it as dropped, if so."""
        if role.kind != "server" or self.servers == 1:
            return False
        self.servers -= 1
        self._unable.discard(role)
        return True

    def _without_node(self, role: Role) -> Drop | Elsewhere:
        """Its node is of no use any more."""
        if self._can_drop(role):
            return Drop(role, "its node is lost")
        return Elsewhere(role, f"the node of {role.name} is lost")
