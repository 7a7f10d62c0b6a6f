"""Finds roles that are alive but stuck, by the signs of life expected from each, and
how long these may be missing.

    a process of a role is stopped (SIGSTOP, a debugger)          STOPPED_S
    the node of a role has stopped reporting                      STOPPED_S
    the controller's status.json grows old                        SILENT_S
    the controller says a server is lost and its process lives    LOST_S
    the same, but it has not come up since it was started         Recipe.start_limit_s

A learner's silence proves nothing (a step may be long); its own collective timeouts end
it.
"""

from collections.abc import Mapping
from typing import Literal

from megarl.run.launcher import Stuck
from megarl.run.restart import Role
from megarl.run.state import Status

STOPPED_S = 30.0
SILENT_S = 120.0
LOST_S = 120.0
MISSED_S = 30.0
"""After this time the controller has noticed that a server died, except during a
publication to it.
"""
OLD_S = 10.0
"""Age at which status.json counts as old; it is written each second. The controller's
silence counts from when we first saw the file old, not from its time: after a machine's
sleep files are old, but no controller hangs.
"""

COMPLAINTS = {
    "stopped": "has been stopped",
    "unheard": "has not been heard from",
    "silent": "has not written its status",
    "lost": "has not answered the controller",
    "starting": "has not come up",
}
AWAY = ("lost", "starting")
"""States of a server that does not answer the controller."""


class Watch:
    """Remembers when each role began to look stuck."""

    def __init__(
        self,
        start_s: float,
        stopped_s: float = STOPPED_S,
        silent_s: float = SILENT_S,
        lost_s: float = LOST_S,
    ) -> None:
        self._limits = {"silent": silent_s, "lost": lost_s, "starting": start_s}
        self._limits |= dict.fromkeys(("stopped", "unheard"), stopped_s)
        self._since: dict[tuple[Role, str], float] = {}
        self._started: dict[Role, float] = {}
        self._presence: dict[Role, Literal["away", "there"]] = {}  # of servers since their start

    def hung(
        self,
        stuck: Mapping[Role, Stuck],
        status: Status | None,
        status_age: float,
        running: set[Role],
        at: float,
    ) -> dict[Role, str]:
        """Return the roles of `running` to kill at time `at` in seconds, and why.
        stuck: roles that are stuck by their launcher's judgement. status: the
        controller's, None before its first. status_age: in seconds.
        """
        complaints: set[tuple[Role, str]] = set(stuck.items())
        if status is not None and status_age > OLD_S:
            complaints.add((Role("controller"), "silent"))
        elif status is not None:
            for role in self._look(status, at):
                came_up = self._presence[role] == "there"
                complaints.add((role, "lost" if came_up else "starting"))
        complaints = {(role, kind) for role, kind in complaints if role in running}
        # a complaint not made this time is forgotten
        self._since = {complaint: self._since.get(complaint, at) for complaint in complaints}
        return {
            role: f"{COMPLAINTS[kind]} for {at - since:.0f} s"
            for (role, kind), since in self._since.items()
            if at - since >= self._limits[kind]
        }

    def forget(self, role: Role, at: float) -> None:
        """Forget complaints about a role that is started again."""
        self._since = {key: since for key, since in self._since.items() if key[0] != role}
        self._started[role] = at
        self._presence.pop(role, None)

    def _look(self, status: Status, at: float) -> list[Role]:
        """Return the servers that are away, and note of each whether it has come up
        since its start. The controller calls a restarted one clean until it notices the
        death: only after MISSED_S, or once it was away, does that count as up.
        """
        away = []
        for server in status.servers:
            role = Role("server", server.id)
            death_is_noticed = at - self._started.get(role, at) > MISSED_S
            if server.state.startswith(AWAY):
                away.append(role)
                self._presence.setdefault(role, "away")
            elif role in self._presence:
                self._presence[role] = "there"
            elif server.state.startswith("clean") and death_is_noticed:
                self._presence[role] = "there"
        return away
