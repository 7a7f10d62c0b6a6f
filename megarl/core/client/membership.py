"""The servers of a run: which weights each has, and which may be sent requests. Pure:
no clock, no I/O.

              answered            publish               published
    starting ─────────► unknown ─────────► publishing ────────────► clean(v) ──► …
                           ▲  ▲                │ error, or a new learner
       lost ───────────────┘  └────────────────┘
        ▲  answered (it may have restarted: its weights are unknown)
        └──────── lose, from any state

Clean servers get requests, and so do publishing ones whose new weights are staged: they
serve the old ones until the swap. A pinned server (kept at its version by an
evaluation) is not published to. A clean server whose weights came from an earlier
learner stays in use until the new learner publishes to it. The run's own servers are
members for ever. Others join and leave:

    join ──► starting ─► … ─► leave, from any state ──► leaving ──► forgotten
                 └ it does not answer, and sends no sign of life for FORGET_S ─► leaving

A leaving server is forgotten once it has no requests and gets no weights.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarl.core.base.messages import ServerAddress

DIRECT = 32
"""The largest number of servers that are called without a relay."""
RELAYED = 64
"""Servers per relay. Larger groups take less of the caller's time but make each call
slower: a gate needs 0.3 ms per server.
"""
FORGET_S = 30.0
"""A joined server that does not answer is forgotten after this time without its sign of
life, sent every two seconds.
"""
MOST_PROCESS_GROUPS = 4
"""Most process groups that a server joins, unless there are more pipeline stages: a
communicator takes memory on each of its GPUs.
"""
ServerState = Literal["starting", "unknown", "publishing", "clean", "lost", "leaving"]


def in_a_row(servers: int) -> int:
    """Return how many calls are made one after the other to reach `servers` servers:
    the caller's, and a relay's.
    """
    if servers <= DIRECT:
        return servers
    relays = -(-servers // RELAYED)  # rounded up
    return relays + RELAYED


def sending_copies(copies: int, stages: int, links: int) -> int:
    """Return how many data-parallel copies of the learner send at once, each some
    layers of every pipeline stage. Each copy's stage has a process group, so that a
    server joins copies x stages of them. links: a server's GPUs.
    """
    most_groups = min(links, MOST_PROCESS_GROUPS)
    return max(1, min(copies, most_groups // stages))


def listed(servers: Collection[int]) -> str:
    """Return ids as `servers 0-15, 40`, or `server 3`."""
    ids = set(servers)
    starts = sorted(i for i in ids if i - 1 not in ids)
    ends = sorted(i for i in ids if i + 1 not in ids)
    ranges = []
    for start, end in zip(starts, ends, strict=True):
        ranges.append(f"{start}-{end}" if start < end else f"{start}")
    noun = "servers" if len(ids) > 1 else "server"
    return f"{noun} {', '.join(ranges)}"


class ServerLoad(NamedTuple):
    """The load of a server. usage: share of the KV memory in use. waiting: requests
    that are not begun, or retracted.
    """

    usage: float
    waiting: int


@dataclass
class Member:
    """One server.

    version: that of a clean server's weights, or the target of a publishing one.
    incarnation: the learner that published, or is publishing. failures: publications
    that failed in a row; failed_version: the version of the last failed one. life:
    names the process of a joined server; empty: one of the run's own. heard: time in
    seconds of that process's last sign of life. away_since: time since when the server
    has been away. receives: it is leaving while the learner still sends it weights.
    keeps: the version that a publishing server serves until its swap, if weights are
    staged.
    """

    address: ServerAddress
    state: ServerState = "starting"
    version: int = -1
    incarnation: str = ""
    pinned: bool = False
    failures: int = 0
    failed_version: int = -1
    life: str = ""
    heard: float = 0.0
    away_since: float = 0.0
    receives: bool = False
    keeps: int | None = None

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

    def answered(self, server: int) -> None:
        """Note that the server answers. If it was silent, its weights are unknown."""
        member = self.members[server]
        if member.away:
            member.state = "unknown"
            member.failures = 0

    def lose(self, server: int) -> None:
        """Note that the server does not answer: its weights and requests are lost."""
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
            if member.state != "publishing":  # else it still serves what it kept
                member.keeps = None
                if self._staged and member.state == "clean":
                    member.keeps = member.version
            member.state = "publishing"
            member.version = version
            member.incarnation = incarnation

    def published(self, server: int, version: int, incarnation: str, error: str) -> bool:
        """Note the result of a publication, unless it is no longer expected, and return
        whether the server is now clean.
        """
        member = self.members.get(server)
        if member is None:
            return False
        if member.state == "leaving":
            member.receives = False
        if member.state != "publishing":
            return False
        if (member.version, member.incarnation) != (version, incarnation):
            return False
        if error:
            member.state = "unknown"
            member.failures += 1
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
        """Keep a clean server at its version. ValueError if it is not clean."""
        if self.members[server].state != "clean":
            raise ValueError(
                f"server {server} is {self.describe(server)}: only a clean one can be pinned"
            )
        self.members[server].pinned = True

    def unpin(self, server: int) -> None:
        """Let the server be published to again."""
        self.members[server].pinned = False

    # Servers that the run did not start.

    def join(self, url: str, life: str, previous_id: int, tensor_parallel: int, at: float) -> int:
        """Note, at time `at` in seconds, a server's sign of life and return its id. A
        known address has its id, and a new life there is that server, restarted. A new
        address gets the id that the server had before (`previous_id`), if that is free.
        ValueError if the address belongs to one of the run's own servers, or to one
        that is still leaving.
        """
        # By the id first: a search of all servers for each sign of life would be slow.
        member = self.members.get(previous_id)
        if member is None or member.address.url != url:
            member = next((m for m in self.members.values() if m.address.url == url), None)
        if member is None:
            address = ServerAddress(
                id=self._free_id(previous_id), url=url, tensor_parallel=tensor_parallel
            )
            member = Member(address, life=life, away_since=at)
            self.members[address.id] = member
        server = member.address.id
        if not member.life:
            raise ValueError(f"server {server} at {url} is the run's own")
        if member.state == "leaving":
            raise ValueError(f"server {server} at {url} leaves")
        if member.life != life:
            self.lose(server)
            member.life = life
            member.away_since = at
        member.heard = at
        return server

    def _free_id(self, preferred: int) -> int:
        """Return an unused id above those of the run's own servers."""
        if preferred >= self._own and preferred not in self.members:
            return preferred
        free = self._own
        while free in self.members:
            free += 1
        return free

    def leave(self, server: int) -> None:
        """Note that a joined server is leaving: it gets no more requests or
        publications.
        """
        member = self.members[server]
        member.receives = member.receives or member.state == "publishing"
        member.state = "leaving"
        member.pinned = False

    def forget(self, server: int) -> None:
        """Remove a server that has left. ValueError if it has not."""
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
        members = self.joined_servers().items()
        return [s for s, m in members if m.away and at - m.heard > FORGET_S]

    def stuck(self, at: float, limit_s: float) -> list[int]:
        """Return the joined servers that have not answered for `limit_s`. Call this
        regularly: it records which ones answer.
        """
        stuck = []
        for server, member in self.joined_servers().items():
            if not member.away:
                member.away_since = at
            elif at - member.away_since > limit_s:
                stuck.append(server)
        return stuck

    def joined_servers(self) -> dict[int, Member]:
        """Return the servers that the run did not start."""
        return {s: m for s, m in self.members.items() if m.life}

    def leaves(self, server: int) -> bool:
        """Return whether the server is leaving."""
        return self.members[server].state == "leaving"

    # Conclusions.

    def clean(self) -> dict[int, int]:
        """Return the version of each clean server."""
        return {s: m.version for s, m in self.members.items() if m.state == "clean"}

    def serving(self) -> dict[int, int]:
        """Return the version of each server that may be sent requests."""
        versions = {}
        for server, member in self.members.items():
            version = member.serves
            if version is not None:
                versions[server] = version
        return versions

    def serving_version(self, server: int | None) -> int | None:
        """Return this server's version if it may be sent requests, else None. Fast, as
        every request calls this.
        """
        if server is None:
            return None
        member = self.members.get(server)
        return None if member is None else member.serves

    def healthy(self) -> list[int]:
        """Return the servers that answer and are not leaving."""
        return [s for s, m in self.members.items() if not m.away and m.state != "leaving"]

    def wanting(self, version: int, incarnation: str) -> tuple[ServerAddress, ...]:
        """Return the servers to which the learner `incarnation`, which is not
        publishing now, should publish `version`. One that failed at this version is
        skipped until the next, unless there is no other server.
        """
        others = bool(self.clean())

        def wants(member: Member) -> bool:
            """Return whether the learner should publish to this server."""
            if member.pinned:
                return False
            if member.state == "unknown":
                has_failed = member.failures > 0 and member.failed_version == version
                return not (others and has_failed)
            if member.state == "clean":
                return member.version < version or member.incarnation != incarnation
            # It is not publishing now, so such a publication has broken off.
            return member.state == "publishing"

        return tuple(member.address for member in self.members.values() if wants(member))

    def describe(self, server: int) -> str:
        """Return `clean(7)`, `publishing(8)`, `lost`, …, with `pinned` if it is."""
        member = self.members[server]
        text: str = member.state
        if member.state in ("clean", "publishing"):
            text += f"({member.version})"
        if member.pinned:
            text += " pinned"
        return text
