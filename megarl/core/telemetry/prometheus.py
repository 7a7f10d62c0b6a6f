"""GET /metrics of a role, for Prometheus: what its latest metrics or status say (families.py), to whoever has the key."""

import hmac
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megarl.core.base.errors import MegarlError

Families = Callable[[], Iterable[Metric]]


class Exporter:
    """Answers on `address` (host:port) until closed, from a thread of its own. `families` is asked at each scrape."""

    def __init__(self, address: str, key: str, families: Families) -> None:
        registry = CollectorRegistry()
        registry.register(_Collected(families))
        host, _, port = address.rpartition(":")
        try:
            self._server = make_server(
                host, int(port), _Guarded(make_wsgi_app(registry), key), ThreadingWSGIServer, _Handler
            )
        except OSError as error:
            raise MegarlError(
                f"monitor.prometheus: cannot listen on {address}: {error.strerror}; choose another monitor.prometheus_port"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    """Says nothing about requests, and waits for none for ever."""

    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None: ...


class _Collected(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> list[Metric]:
        """Nothing is known before the first row."""
        return []


class _Guarded:
    """GET /metrics with the key, and nothing else."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._wanted = app, f"Bearer {key}"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if (environ["REQUEST_METHOD"], environ.get("PATH_INFO")) != ("GET", "/metrics"):
            return _said("404 Not Found", start_response)
        given = environ.get("HTTP_AUTHORIZATION", "")
        if not hmac.compare_digest(given.encode("latin-1"), self._wanted.encode()):
            return _said("401 Unauthorized", start_response)
        return self._app(environ, start_response)


def _said(status: str, start_response: Any) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain")])
    return [status.encode()]
