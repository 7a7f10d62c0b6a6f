"""Ports of this machine: free ones, and whether one can be listened on."""

import random
import socket
from contextlib import suppress
from pathlib import Path

from megarl.core.base.errors import MegarlError

LOWEST_PORT, PORTS_WANTED = 10_000, 5_000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """That many different ports of `host`, an address of this machine, that nobody listens on now.

    They lie below those that the kernel gives to outgoing connections, so that none takes one before it is used, and are
    drawn at random, so that runs which look at the same moment find others.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = first_outgoing if first_outgoing > LOWEST_PORT + PORTS_WANTED else 65_536
    found: list[int] = []
    for port in random.SystemRandom().sample(range(LOWEST_PORT, last), last - LOWEST_PORT):
        if len(found) == count:
            return found
        with socket.socket() as s, suppress(OSError):
            s.bind((host, port))
            found.append(port)
    raise MegarlError(f"{host}: of the ports {LOWEST_PORT} to {last} only {len(found)} are free; {count} are needed")


def check_free(key: str, host: str, port: int) -> None:
    """MegarlError if `host`, an address of this machine, cannot be listened on at `port`. key: where the user chose it."""
    with socket.socket() as s:
        # Connections of the last life in TIME_WAIT do not matter.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise MegarlError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another") from None
