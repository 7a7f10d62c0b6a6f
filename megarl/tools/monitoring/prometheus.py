"""A role's GET /metrics for Prometheus: its latest metrics or status, for everyone who
has the key.

Rows of metrics and the controller's status become families of Prometheus metrics. Their
names are `megarl_` and the name in metrics.jsonl; the task in `pass_rate_train/math`
becomes a label. A value that only grows is a counter; it starts at 0 when its process
does, which Prometheus' rate() handles.
"""

import hmac
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints
from megarl.core.telemetry.names import NAMES

Families = Callable[[], Iterable[Metric]]
StatusJson = Mapping[str, Any]  # as in RUN/status.json; empty before the first status
Totals = Mapping[int, Mapping[str, float]]  # totals by server: tokens, busy_seconds


def serve(address: str, key: str, families: Families) -> Callable[[], None]:
    """Serve `address` (host:port) from a thread; return a function that ends that. If
    the address is empty, nothing is served. key: that a scraper must send; families:
    called at each scrape. MegarlError if the address cannot be used.
    """
    if not address:
        return lambda: None
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    app = make_wsgi_app(registry)
    expected = f"Bearer {key}".encode()

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        """Answer GET /metrics with the right key; 404 for all else, 401 without the
        key.
        """
        authorization = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if (environ["REQUEST_METHOD"], environ.get("PATH_INFO")) != ("GET", "/metrics"):
            status = "404 Not Found"
        elif not hmac.compare_digest(authorization, expected):
            status = "401 Unauthorized"
        else:
            return app(environ, start_response)
        start_response(status, [("Content-Type", "text/plain")])
        return [status.encode()]

    host, _, port = address.rpartition(":")
    try:
        server = make_server(host, int(port), guarded, ThreadingWSGIServer, _Handler)
    except OSError as error:
        raise MegarlError(
            f"monitor.prometheus: cannot listen on {address}: {error.strerror}"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def close() -> None:
        server.shutdown()
        server.server_close()

    return close


def serve_controller(
    endpoints: Endpoints, latest: Callable[[], tuple[StatusJson, Totals]]
) -> Callable[[], None]:
    """Serve the controller's metrics, if the run exports any; return a function to end
    that. latest: called at each scrape.
    """
    return serve(
        endpoints.controller_metrics, endpoints.metrics_key, lambda: controller_families(*latest())
    )


class _Handler(WSGIRequestHandler):
    """A handler that logs no requests, and waits at most `timeout` seconds for one."""

    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None: ...


class _Collected(Collector):
    """What a registry of Prometheus asks for metrics at each scrape."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


PARTS = ("wait", "train", "publish", "checkpoint")  # of a step's time


class LearnerMetrics:
    """The metrics of the latest row, and totals over all rows that this process has
    written.
    """

    def __init__(self) -> None:
        self._row: Mapping[str, Any] = {}
        self._steps = 0
        self._skipped = 0
        self._tokens = 0.0
        self._trained = 0.0
        self._seconds = dict.fromkeys((*PARTS, "other"), 0.0)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a step's row."""
        self._steps += 1
        if row.get("skipped"):
            self._skipped += 1
        self._tokens += row.get("generated_tokens", 0.0)
        self._trained += row.get("tokens_trained", 0.0)
        parts = {part: row.get(f"{part}_seconds", 0.0) for part in PARTS}
        remaining = row.get("step_seconds", 0.0) - sum(parts.values())
        parts["other"] = max(0.0, remaining)
        # A new dictionary, as a scrape may be reading the old one.
        self._seconds = {part: self._seconds[part] + seconds for part, seconds in parts.items()}
        self._row = row

    def families(self) -> Iterator[Metric]:
        """Yield the metrics as Prometheus reads them."""
        yield CounterMetricFamily(
            "megarl_steps", "steps of this process, replayed ones included", self._steps
        )
        yield CounterMetricFamily(
            "megarl_skipped_steps", "those whose loss or gradient was not finite", self._skipped
        )
        yield CounterMetricFamily(
            "megarl_generated_tokens", "tokens the policy sampled for the steps", self._tokens
        )
        yield CounterMetricFamily("megarl_trained_tokens", "tokens in the loss", self._trained)
        seconds = CounterMetricFamily(
            "megarl_step_seconds", "wall time of the steps, by part", labels=["part"]
        )
        yield _filled(seconds, (([part], value) for part, value in self._seconds.items()))
        yield from gauges(
            "megarl_", self._row, {"generated_tokens", "step_seconds", "skipped_steps", "time"}
        )


def gauges(prefix: str, row: Mapping[str, Any], without: set[str]) -> Iterator[Metric]:
    """Yield a gauge for each number in the row. The part of its name after a slash (a
    task, suite or reward) becomes the label `name`. without: names that get none.
    """
    by_name: dict[str, GaugeMetricFamily] = {}
    for key, value in row.items():
        name, _, label = key.partition("/")
        if name in without or not _is_number(value):
            continue
        if name not in by_name:
            clean = prefix + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))
            about = NAMES.get(name, ("", "of the latest row"))[1]
            by_name[name] = GaugeMetricFamily(clean, about, labels=["name"])
        by_name[name].add_metric([label], value)
    yield from by_name.values()


def _is_number(value: object) -> bool:
    """Return whether this is a number, infinite or finite; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isnan(value)


def controller_families(status: StatusJson, totals: Totals) -> Iterator[Metric]:
    """Yield the controller's metrics, none before its first status. totals: by
    server.
    """
    if not status:
        return
    yield GaugeMetricFamily("megarl_controller_step", "the next step to train", status["step"])
    yield GaugeMetricFamily(
        "megarl_published_version", "the newest published weights", status["version"]
    )
    yield CounterMetricFamily(
        "megarl_compute_seconds",
        "devices held x wall time of all lives",
        3600 * status["compute_hours"],
    )
    yield from _server_families(status["servers"], totals)
    yield from _ticket_families(status["tickets"])
    for name, about in (
        ("malformed_requests", "messages with the right key that could not be decoded"),
        ("refused_connections", "connections without the learner's key"),
    ):
        yield CounterMetricFamily(f"megarl_{name}", about, max(0, status[name]))
    yield from gauges("megarl_eval_", status["eval"] or {}, {"time"})


def _server_families(servers: Iterable[Mapping[str, Any]], totals: Totals) -> Iterator[Metric]:
    """Yield the metrics of each server. servers: as in the controller's status."""
    for name, about, key in (
        ("weight_version", "version of its weights, -1 before the first", "version"),
        ("running_requests", "requests on it now", "running"),
    ):
        gauge = GaugeMetricFamily(f"megarl_server_{name}", about, labels=["server"])
        values = [([str(server["id"])], server[key]) for server in servers]
        yield _filled(gauge, values)
    for name, about in (
        ("tokens", "tokens it has sampled"),
        ("busy_seconds", "time with any request running"),
    ):
        counter = CounterMetricFamily(f"megarl_server_{name}", about, labels=["server"])
        rows = []
        for server in servers:
            number = server["id"]
            rows.append(([str(number)], totals[number][name]))
        yield _filled(counter, rows)
    state = GaugeMetricFamily(
        "megarl_server_state", "1 for the state it is in", labels=["server", "state"]
    )
    states = [([str(server["id"]), server["state"]], 1) for server in servers]
    yield _filled(state, states)


def _ticket_families(tickets: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of tickets. tickets: as in the controller's status."""
    current = GaugeMetricFamily("megarl_tickets", "tickets now, by state", labels=["state"])
    yield _filled(current, (([name], tickets[name]) for name in ("running", "waiting")))
    completed = CounterMetricFamily(
        "megarl_tickets_done", "tickets of all lives, by result", labels=["result"]
    )
    yield _filled(completed, (([name], tickets[name]) for name in ("finished", "void", "removed")))
    yield GaugeMetricFamily(
        "megarl_tickets_limit", "limit on tickets drawn and not trained", tickets["window_limit"]
    )


def _filled[Family: (CounterMetricFamily, GaugeMetricFamily)](
    family: Family, rows: Iterable[tuple[list[str], float]]
) -> Family:
    """Return the family with these rows added: its labels' values, and a number."""
    for labels, value in rows:
        family.add_metric(labels, value)
    return family
