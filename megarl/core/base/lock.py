"""One process at a time in a directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import writing


@contextmanager
def lock(folder: Path, command: str, key: str) -> Iterator[None]:
    """Be the only `command` that works there; the kernel lets go of it when we die. key: what names another folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise MegarlError(f"{key}: cannot write in {folder}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 100).decode()
            raise MegarlError(
                f"{folder}: another `{command}` (process {owner}) works there; end it, or give another {key}"
            ) from None
        except OSError as error:
            raise MegarlError(
                f"{folder}: cannot be locked: {error.strerror}; the file system has to have flock (Lustre: mount -o flock)"
            ) from None
        with writing(folder / ".lock"):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)
