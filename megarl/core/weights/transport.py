"""What every transport is."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from megarl.core.base.errors import MegarlError
from megarl.core.server.admin import Fleet


class Sent(NamedTuple):
    """What came of sending: errors by server id, checksums of what was sent, bytes a server received."""

    errors: dict[int, str]
    checksums: dict[str, str]
    bytes: int


class Transport(Protocol):
    """Of one learner rank."""

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Bring the paused servers `ids` to this rank's weights. Every rank gets the same result. COLLECTIVE."""


def texts(errors: Mapping[int, MegarlError]) -> dict[int, str]:
    return {i: str(error) for i, error in errors.items()}
