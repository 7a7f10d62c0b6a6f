"""Wait until a server answers."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable

from megarl.core.base.errors import MegarlError

POLL_S = 0.1



def is_healthy(url: str) -> bool:
    """Whether the server at `url` says within HEALTH_LIMIT_S that it takes requests. Needs no key."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_LIMIT_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_ready(url: str, limit_s: float, exit_code: Callable[[], int | None] = lambda: None) -> float:
    """Wait for the server at `url`; seconds waited. `exit_code` tells whether its process has ended (None: it runs).

    MegarlError when it ended or when `limit_s` (serving.start_timeout_s) ran out.
    """
    start = time.monotonic()
    while not is_healthy(url):
        code = exit_code()
        if code is not None:
            raise MegarlError(f"the server for {url} ended with status {code} before it was ready; its log says why")
        if time.monotonic() - start > limit_s:
            raise MegarlError(f"the server at {url} was not ready within {limit_s:g} s (serving.start_timeout_s)")
        time.sleep(POLL_S)
    return time.monotonic() - start
