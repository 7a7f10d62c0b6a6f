"""The servers of a run: which weights each holds, and which may be sent requests. Pure: no clock, no I/O.

                 seen                 publish                 published
    starting ───────────► unknown ───────────► publishing ──────────────► clean(v) ──► publishing …
                             ▲  ▲                   │ error, or a new learner
       lost ─────────────────┘  └───────────────────┘
        ▲  seen (it may have restarted: its weights are unknown)
        └──────── lost, from any state

Clean servers get requests, and publishing ones whose weights are staged: they serve the old ones until their swap. A pinned
server (held at its version by an evaluation) is not published to. A clean server whose weights came from an earlier learner
stays in use until the new learner publishes to it.

The run's own servers are members for ever. Others join and leave:

    join ──► starting ─► … ─► leave, from any state ──► leaving ──► forgotten, when nobody sends it anything any more
                 └ it does not answer, and is silent for FORGET_S ─► leaving
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarl.core.base.messages import ServerAddress

DIRECT = 32
"""Most servers that are asked without a relay."""
GROUP = 64
"""Servers behind a relay. More cost the caller less, and each call then takes longer: a gate needs 0.3 ms for each."""
ServerState = Literal["starting", "unknown", "publishing", "clean", "lost", "leaving"]
FORGET_S = 30.0
"""How long a joined server that does not answer may be silent before it is forgotten. It speaks every two seconds."""


def in_a_row(servers: int) -> int:
    """Return how many calls follow each other until all of so many servers are called: the caller's, and a relay's."""
    return servers if servers <= DIRECT else -(-servers // GROUP) + GROUP


class ServerLoad(NamedTuple):
    """usage: share of the KV that requests hold. waiting: requests that the server has not begun, or put back."""

    usage: float
    waiting: int


@dataclass
class Member:
    """One server. `version`: the weights of a clean server, or the target of a publishing one."""

    address: ServerAddress
    state: ServerState = "starting"
    version: int = -1
    incarnation: str = ""  # the learner that published, or is publishing
    pinned: bool = False
    failures: int = 0  # publications that failed one after the other
    failed_version: int = -1  # of the last of them
    life: str = ""  # names the process of a server that has joined; empty: one of the run's own
    heard: float = 0.0  # seconds, when that process spoke last
    away_since: float = 0.0  # and since when the server has been away
    receives: bool = False  # it leaves while the learner still sends it weights
    keeps: int = -1  # the version that a publishing server serves until its swap; -1: none

    @property
    def away(self) -> bool:
        """Return whether it does not answer, not yet or no longer."""
        return self.state in ("starting", "lost")

    @property
    def serves(self) -> int | None:
        """Return the version that a request would meet, or a newer one; None: it may be sent none."""
        if self.state == "publishing":
            return self.keeps if self.keeps >= 0 else None
        return self.version if self.state == "clean" else None


class Membership:
    """The states of all servers of a run, by id. staged: new weights are brought to them beside the old ones, which they serve
    meanwhile."""

    def __init__(self, addresses: Sequence[ServerAddress], staged: bool = False) -> None:
        self._staged = staged
        self.members = {address.id: Member(address) for address in addresses}
        self._own = len(self.members)

    # What happens to servers.

    def seen(self, server: int) -> None:
        """Note that the server answered a health check."""
        member = self.members[server]
        if member.away:
            member.state, member.failures = "unknown", 0

    def lost(self, server: int) -> None:
        """Note that the server does not answer: whatever it held is gone."""
        member = self.members[server]
        if member.state not in ("starting", "leaving"):
            member.state, member.pinned, member.incarnation = "lost", False, ""

    def publish(self, servers: Iterable[int], version: int, incarnation: str) -> None:
        """Note that the learner brings them to `version`. A version never falls while a server lives."""
        for server in servers:
            member = self.members[server]
            if member.state not in ("unknown", "publishing", "clean") or member.pinned:
                raise ValueError(f"server {server} is {self.describe(server)}: it cannot be published to")
            if member.state == "clean" and version < member.version:
                raise ValueError(f"server {server} holds version {member.version}: {version} would be a step back")
            if member.state != "publishing":
                member.keeps = member.version if self._staged and member.state == "clean" else -1
            member.state, member.version, member.incarnation = "publishing", version, incarnation

    def published(self, server: int, version: int, incarnation: str, error: str) -> bool:
        """Note the learner's result, unless it is no longer awaited, and return whether it has made the server clean."""
        member = self.members.get(server)
        if member is not None and member.state == "leaving":
            member.receives = False
        if member is None or (member.state, member.version, member.incarnation) != ("publishing", version, incarnation):
            return False
        if error:
            member.state, member.failures, member.failed_version = "unknown", member.failures + 1, version
            return False
        member.state, member.failures = "clean", 0
        return True

    def new_learner(self) -> list[int]:
        """End the publications of the previous learner, and return their servers, whose requests must be aborted."""
        broken = [s for s, m in self.members.items() if m.state == "publishing"]
        for server in broken:
            self.members[server].state = "unknown"
        for member in self.members.values():
            member.receives = False
        return broken

    def pin(self, server: int) -> None:
        """Hold a clean server at its version."""
        if self.members[server].state != "clean":
            raise ValueError(f"server {server} is {self.describe(server)}: only a clean one can be pinned")
        self.members[server].pinned = True

    def unpin(self, server: int) -> None:
        self.members[server].pinned = False

    # Servers that the run has not started.

    def join(self, url: str, life: str, wanted: int, tensor_parallel: int, at: float) -> int:
        """Note at `at` seconds that a server has said it is there, and return its id: the one it had before, if it is free.

        Another life at a known address is that server, started again. ValueError if the address is of one of the run's own, or
        of one that still leaves.
        """
        before = self.members.get(wanted)  # so that a sign of life costs no look at all servers
        same = before is not None and before.address.url == url
        server = wanted if same else next((s for s, m in self.members.items() if m.address.url == url), None)
        if server is None:
            free = (s for s in (wanted, *range(self._own, self._own + len(self.members) + 1)) if s not in self.members)
            server = next(s for s in free if s >= self._own)
            address = ServerAddress(id=server, url=url, tensor_parallel=tensor_parallel)
            self.members[server] = Member(address, life=life, away_since=at)
        member = self.members[server]
        if not member.life or member.state == "leaving":
            whose = "leaves" if member.life else "is the run's own"
            raise ValueError(f"server {server} at {url} {whose}")
        if member.life != life:
            self.lost(server)
            member.life, member.away_since = life, at
        member.heard = at
        return server

    def leave(self, server: int) -> None:
        """Note that a joined server goes: no requests and no more publications."""
        member = self.members[server]
        member.receives = member.receives or member.state == "publishing"
        member.state, member.pinned = "leaving", False

    def forget(self, server: int) -> None:
        """Remove a server that has left."""
        member = self.members[server]
        if member.state != "leaving" or member.receives:
            raise ValueError(f"server {server} is {self.describe(server)}: only one that has left is forgotten")
        del self.members[server]

    def silent(self, at: float) -> list[int]:
        """Return the joined servers that neither answer nor have spoken for FORGET_S."""
        return [s for s, m in self.joined().items() if m.away and at - m.heard > FORGET_S]

    def stuck(self, at: float, limit_s: float) -> list[int]:
        """Return the joined servers that have not answered for `limit_s`. Call this now and then: it notes which do."""
        for member in self.joined().values():
            member.away_since = member.away_since if member.away else at
        return [s for s, m in self.joined().items() if m.away and at - m.away_since > limit_s]

    def joined(self) -> dict[int, Member]:
        return {s: m for s, m in self.members.items() if m.life}

    def leaves(self, server: int) -> bool:
        return self.members[server].state == "leaving"

    # What follows.

    def clean(self) -> dict[int, int]:
        """Return the version of each server that has its weights and gets no others now."""
        return {s: m.version for s, m in self.members.items() if m.state == "clean"}

    def serving(self) -> dict[int, int]:
        """Return the version of each server that may be sent requests."""
        return {s: version for s, m in self.members.items() if (version := m.serves) is not None}

    def serving_version(self, server: int | None) -> int | None:
        """Return this server's version if it may be sent requests. No look at the others: every request asks this."""
        member = self.members.get(server) if server is not None else None
        return None if member is None else member.serves

    def newest(self) -> int | None:
        """Return the newest version that requests can be sent to."""
        return max(self.serving().values(), default=None)

    def healthy(self) -> list[int]:
        return [s for s, m in self.members.items() if not m.away and m.state != "leaving"]

    def wanting(self, version: int, incarnation: str) -> tuple[ServerAddress, ...]:
        """Return servers that the learner `incarnation`, which asks and so is not publishing, should bring to `version`.

        One that failed at this version is left alone while another server works; it is tried again with the next version, or
        at once if there is no other.
        """
        others = bool(self.clean())
        return tuple(
            m.address
            for m in self.members.values()
            if not m.pinned
            and (
                m.state == "publishing"
                or (m.state == "unknown" and not (others and m.failures and m.failed_version == version))
                or (m.state == "clean" and (m.version < version or m.incarnation != incarnation))
            )
        )

    def describe(self, server: int) -> str:
        """Return `clean(7)`, `publishing(8)`, `lost`, …, with `pinned` if it is."""
        member = self.members[server]
        text = f"{member.state}({member.version})" if member.state in ("clean", "publishing") else member.state
        return f"{text} pinned" if member.pinned else text
