"""What the learner's report of a publication means: servers are clean, or have failed; a record of the journal."""

import logging
import time
from collections.abc import Callable

from megarl.core.base.messages import Published, ServerResult
from megarl.core.controller.compute import ComputeClock, Spent
from megarl.core.controller.servers import Servers
from megarl.core.journal.ledger import Ledger
from megarl.core.journal.records import PublishedVersion
from megarl.core.journal.state import State

log = logging.getLogger(__name__)

PUBLISH_TRIES = 3
"""Publications in a row that may fail on a server while no other works."""


class Publications:
    """Of a run. `version`: the highest ever published; `fail` is told what ends the run."""

    def __init__(
        self,
        state: State,
        servers: Servers,
        ledger: Ledger,
        compute: ComputeClock,
        fail: Callable[[str], None],
    ) -> None:
        self._servers, self._ledger, self._compute, self._fail = servers, ledger, compute, fail
        self._spent: dict[int, Spent] = {}  # at the first publication of each version in this life
        self.version = state.published_version

    def spent(self, version: int) -> Spent:
        """Compute when this version was first published in this life."""
        return self._spent[version]

    def over(self, result: Published) -> bool:
        """New weights on the servers that worked; whether there are any."""
        clean = [r for r in result.results if self._is_clean(r, result)]
        if clean:
            self.version = max(self.version, result.version)
            self._compute.published()
            spent = self._spent.setdefault(result.version, self._compute.spent())
            self._ledger.write(
                PublishedVersion(
                    version=result.version,
                    time=time.time(),
                    compute_hours=spent.total,
                    startup_hours=spent.startup,
                    evaluation_hours=spent.evaluation,
                    servers=tuple(self._servers.clients[r.id].url for r in clean),
                    pause_seconds=result.pause_seconds,
                    transfer_seconds=result.transfer_seconds,
                    resume_seconds=result.resume_seconds,
                )
            )
        self._give_up_if_none_works(result)
        return bool(clean)

    def _is_clean(self, r: ServerResult, result: Published) -> bool:
        clean = self._servers.membership.published(r.id, result.version, result.incarnation, r.error)
        if r.error:
            log.warning("version %d did not reach server %d: %s", result.version, r.id, r.error)
        return clean

    def _give_up_if_none_works(self, result: Published) -> None:
        """End the run when no server is clean and one of these has failed too often."""
        membership = self._servers.membership
        for r in result.results:
            if r.error and not membership.clean() and membership.members[r.id].failures >= PUBLISH_TRIES:
                self._fail(f"weights did not reach server {r.id} {PUBLISH_TRIES} times in a row: {r.error}")
