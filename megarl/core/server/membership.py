"""The servers of a run: which weights each has, and which may be sent requests. Pure:
no clock, no I/O.

                 seen                 publish                 published
    starting ───────────► unknown ───────────► publishing ──────────────► clean(v) ──► publishing …
                             ▲  ▲                   │ error, or a new learner
       lost ─────────────────┘  └───────────────────┘
        ▲  seen (it may have restarted: its weights are unknown)
        └──────── lost, from any state

Clean servers get requests, and so do publishing ones whose new weights are staged: they
serve the old ones until the swap. A pinned server (kept at its version by an
evaluation) is not published to. A clean server whose weights came from an earlier
learner stays in use until the new learner publishes to it. The run's own servers are
members for ever. Others join and leave:

    join ──► starting ─► … ─► leave, from any state ──► leaving ──► forgotten, once it has no requests and gets no weights
                 └ it does not answer, and sends no sign of life for FORGET_S ─► leaving
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Literal, NamedTuple

from megarl.core.base.messages import ServerAddress

DIRECT = 32
"""The largest number of servers that are called without a relay."""
GROUP = 64
"""Servers per relay. Larger groups take less of the caller's time but make each call
slower: a gate needs 0.3 ms per server.
"""
FORGET_S = 30.0
"""A joined server that does not answer is forgotten after this time without its sign of
life, sent every two seconds.
"""
MOST_GROUPS = 4
"""Most groups that a server joins, unless there are more pipeline stages: a
communicator takes memory on each of its GPUs.
"""
ServerState = Literal["starting", "unknown", "publishing", "clean", "lost", "leaving"]


def in_a_row(servers: int) -> int:
    """Return how many calls are made one after the other to reach `servers` servers:
    the caller's, and a relay's.
    """
    return servers if servers <= DIRECT else -(-servers // GROUP) + GROUP


def sending_copies(copies: int, stages: int, links: int) -> int:
    """Return how many copies of the learner send at once, each some layers of every
    stage. links: a server's GPUs.
    """
    return max(1, min(copies, min(links, MOST_GROUPS) // stages))


def listed(servers: Collection[int]) -> str:
    """Return ids as `servers 0-15, 40`, or `server 3`."""
    ids = set(servers)
    first = sorted(s for s in ids if s - 1 not in ids)
    last = sorted(s for s in ids if s + 1 not in ids)
    runs = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True))
    return f"server{'s' * (len(ids) > 1)} {runs}"


class ServerLoad(NamedTuple):
    """The load of a server. usage: share of the KV memory in use. waiting: requests
    that are not begun, or retracted.
    """

    usage: float
    waiting: int


@dataclass
class Member:
    """One server. version: that of a clean server's weights, or the target of a
    publishing one.
    """

    address: ServerAddress
    state: ServerState = "starting"
    version: int = -1
    incarnation: str = ""  # the learner that published, or is publishing
    pinned: bool = False
    failures: int = 0  # publications that failed in a row
    failed_version: int = -1  # the version of the last failed one
    life: str = ""  # names the process of a joined server; empty: one of the run's own
    heard: float = 0.0  # time in seconds of that process's last sign of life
    away_since: float = 0.0  # time since when the server has been away
    receives: bool = False  # it is leaving while the learner still sends it weights
    keeps: int | None = (
        None  # the version that a publishing server serves until its swap, if weights are staged
    )

    @property
    def away(self) -> bool:
        """Whether the server does not answer: not yet, or no longer."""
        return self.state in ("starting", "lost")

    @property
    def serves(self) -> int | None:
        """The version for a request sent now, though it may be replaced by a newer one;
        None: send no requests.
        """
        if self.state == "publishing":
            return self.keeps
        return self.version if self.state == "clean" else None


class Membership:
    """The states of all servers of a run, by id. staged: servers receive new weights
    while they still serve the old ones.
    """

    def __init__(self, addresses: Sequence[ServerAddress], staged: bool = False) -> None:
        self._staged = staged
        self.members = {address.id: Member(address) for address in addresses}
        self._own = len(self.members)

    # Events.

    def seen(self, server: int) -> None:
        member = self.members[server]
        if member.away:
            member.state = "unknown"
            member.failures = 0

    def lost(self, server: int) -> None:
        """Note that the server does not answer: its weights and requests count as lost."""
        member = self.members[server]
        if member.state not in ("starting", "leaving"):
            member.state = "lost"
            member.pinned = False

    def publish(self, servers: Iterable[int], version: int, incarnation: str) -> None:
        """Note that the learner publishes `version` to these servers. A server's
        version never falls while it lives.
        """
        for server in servers:
            member = self.members[server]
            if member.state not in ("unknown", "publishing", "clean") or member.pinned:
                raise ValueError(
                    f"server {server} is {self.describe(server)}: it cannot be published to"
                )
            if member.state == "clean" and version < member.version:
                raise ValueError(
                    f"server {server} holds version {member.version}: {version} would be a step"
                    " back"
                )
            if member.state != "publishing":
                member.keeps = member.version if self._staged and member.state == "clean" else None
            member.state = "publishing"
            member.version = version
            member.incarnation = incarnation

    def published(self, server: int, version: int, incarnation: str, error: str) -> bool:
        """Note the result of a publication, unless it is no longer expected, and return
        whether the server is now clean.
        """
        member = self.members.get(server)
        if member is not None and member.state == "leaving":
            member.receives = False
        if member is None or (member.state, member.version, member.incarnation) != (
            "publishing",
            version,
            incarnation,
        ):
            return False
        if error:
            member.state = "unknown"
            member.failures = member.failures + 1
            member.failed_version = version
            return False
        member.state = "clean"
        member.failures = 0
        return True

    def new_learner(self) -> list[int]:
        """End the publications of the previous learner, and return their servers, whose
        requests must be aborted.
        """
        broken = [s for s, m in self.members.items() if m.state == "publishing"]
        for server in broken:
            self.members[server].state = "unknown"
        for member in self.members.values():
            member.receives = False
        return broken

    def pin(self, server: int) -> None:
        if self.members[server].state != "clean":
            raise ValueError(
                f"server {server} is {self.describe(server)}: only a clean one can be pinned"
            )
        self.members[server].pinned = True

    def unpin(self, server: int) -> None:
        self.members[server].pinned = False

    # Servers that the run did not start.

    def join(self, url: str, life: str, wanted: int, tensor_parallel: int, at: float) -> int:
        """Note, at time `at` in seconds, a server's sign of life and return its id: the
        one it had before (`wanted`) if free. A new life at a known address is that
        server, restarted. ValueError if the address belongs to one of the run's own
        servers, or to one that is still leaving.
        """
        member = self.members.get(wanted)  # avoids a search of all servers for each sign of life
        if member is None or member.address.url != url:
            member = next((m for m in self.members.values() if m.address.url == url), None)
        if member is None:
            free = next(
                s
                for s in chain([wanted], count(self._own))
                if s >= self._own and s not in self.members
            )
            member = Member(
                ServerAddress(id=free, url=url, tensor_parallel=tensor_parallel),
                life=life,
                away_since=at,
            )
            self.members[free] = member
        server = member.address.id
        if not member.life or member.state == "leaving":
            whose = "leaves" if member.life else "is the run's own"
            raise ValueError(f"server {server} at {url} {whose}")
        if member.life != life:
            self.lost(server)
            member.life = life
            member.away_since = at
        member.heard = at
        return server

    def leave(self, server: int) -> None:
        """Note that a joined server is leaving: it gets no more requests or
        publications.
        """
        member = self.members[server]
        member.receives = member.receives or member.state == "publishing"
        member.state = "leaving"
        member.pinned = False

    def forget(self, server: int) -> None:
        member = self.members[server]
        if member.state != "leaving" or member.receives:
            raise ValueError(
                f"server {server} is {self.describe(server)}: only one that has left is forgotten"
            )
        del self.members[server]

    def silent(self, at: float) -> list[int]:
        """Return the joined servers that do not answer and have sent no sign of life
        for FORGET_S.
        """
        return [s for s, m in self.joined().items() if m.away and at - m.heard > FORGET_S]

    def stuck(self, at: float, limit_s: float) -> list[int]:
        """Return the joined servers that have not answered for `limit_s`. Call this
        regularly: it records which ones answer.
        """
        for member in self.joined().values():
            member.away_since = member.away_since if member.away else at
        return [s for s, m in self.joined().items() if m.away and at - m.away_since > limit_s]

    def joined(self) -> dict[int, Member]:
        return {s: m for s, m in self.members.items() if m.life}

    def leaves(self, server: int) -> bool:
        return self.members[server].state == "leaving"

    # Conclusions.

    def clean(self) -> dict[int, int]:
        return {s: m.version for s, m in self.members.items() if m.state == "clean"}

    def serving(self) -> dict[int, int]:
        """Return the version of each server that may be sent requests."""
        return {s: version for s, m in self.members.items() if (version := m.serves) is not None}

    def serving_version(self, server: int | None) -> int | None:
        """Return this server's version if it may be sent requests, else None. Fast, as
        every request calls this.
        """
        member = self.members.get(server) if server is not None else None
        return None if member is None else member.serves

    def healthy(self) -> list[int]:
        return [s for s, m in self.members.items() if not m.away and m.state != "leaving"]

    def wanting(self, version: int, incarnation: str) -> tuple[ServerAddress, ...]:
        """Return the servers to which the learner `incarnation`, which is not
        publishing now, should publish `version`. One that failed at this version is
        skipped until the next, unless there is no other server.
        """
        others = bool(self.clean())
        return tuple(
            m.address
            for m in self.members.values()
            if not m.pinned
            and (
                m.state == "publishing"
                or (
                    m.state == "unknown"
                    and not (others and m.failures and m.failed_version == version)
                )
                or (m.state == "clean" and (m.version < version or m.incarnation != incarnation))
            )
        )

    def describe(self, server: int) -> str:
        """Return `clean(7)`, `publishing(8)`, `lost`, …, with `pinned` if it is."""
        member = self.members[server]
        version = f"({member.version})" if member.state in ("clean", "publishing") else ""
        return member.state + version + " pinned" * member.pinned
