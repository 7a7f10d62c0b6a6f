"""Writes that fail as on a full disk."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """In this process: writing more bytes to a file fails with OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
