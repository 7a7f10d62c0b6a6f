"""How busy the servers are: since the last step for the metrics, in the last second for the live view."""

import time
from dataclasses import dataclass

from megarl.core.sampling.places import Places


@dataclass
class _Mark:
    """Totals at a moment."""

    time: float
    tokens: dict[int, int]
    busy: dict[int, float]
    places: dict[int, float]


class Meter:
    """Differences between marks of the totals in `places`."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._step = self._second = self._mark()

    def step(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        now, then = self._mark(), self._step
        self._step = now
        seconds = max(now.time - then.time, 1e-9)
        servers = len(now.tokens)
        return {
            "rollout_tokens_per_second": (sum(now.tokens.values()) - sum(then.tokens.values())) / seconds,
            "server_busy_share": (sum(now.busy.values()) - sum(then.busy.values())) / seconds / servers,
            "server_running_mean": (sum(now.places.values()) - sum(then.places.values())) / seconds / servers,
        }

    def totals(self) -> dict[int, dict[str, float]]:
        """Of each server, since the controller's start."""
        now = self._mark()
        return {s: {"tokens": now.tokens[s], "busy_seconds": now.busy[s]} for s in now.tokens}

    def second(self) -> dict[int, dict[str, float]]:
        """Of each server, in the time since the last call."""
        now, then = self._mark(), self._second
        self._second = now
        seconds = max(now.time - then.time, 1e-9)
        return {
            server: {
                "running": self._places.use[server].running,
                "tokens_per_second": (now.tokens[server] - then.tokens[server]) / seconds,
                "busy_share": (now.busy[server] - then.busy[server]) / seconds,
            }
            for server in now.tokens
        }

    def _mark(self) -> _Mark:
        uses = self._places.use
        for use in uses.values():
            use.change(0)  # brings the seconds up to now
        return _Mark(
            time.monotonic(),
            {s: u.tokens for s, u in uses.items()},
            {s: u.busy_seconds for s, u in uses.items()},
            {s: u.place_seconds for s, u in uses.items()},
        )
