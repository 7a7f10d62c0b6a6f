"""Servers for a Sampler in a test: clients and places, and no process."""

from typing import Any


class Pool:
    """What a sampler asks of its servers. lossless: none may be lost."""

    def __init__(self, clients: dict[int, Any], places: Any, lossless: bool = False) -> None:
        self.clients = clients
        self.places = places
        self._lossless = lossless

    def life(self, server: int) -> int:
        return 0

    def server_lost(self, server: int, life: int, reason: str) -> None:
        assert not self._lossless, reason
