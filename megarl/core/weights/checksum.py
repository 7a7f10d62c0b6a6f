"""What SGLang's `/weights_checker` must answer, computed from the tensors as they are sent.

On a CPU it hashes each of the server's parameters with SHA-256. Some of those are several Hugging Face tensors one after the
other (server/served.py): a running hash over the tensors in that order is the hash of the joined one. A tensor that comes
before its turn (experts come as the ranks have them) waits for it. On a GPU SGLang uses another hash, made there; then the
servers are only compared with each other, and parity (parity.py) compares what they compute with the learner.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megarl.core.server.served import as_held, is_padded_inside, place


class SentChecksums:
    """Hashes of the tensors that went through `watch`."""

    def __init__(self, rotary_head_dim: int | None = None) -> None:
        """See served.as_held."""
        self._rotary_head_dim = rotary_head_dim
        self._hashes: dict[str, _Running] = {}
        self._unknown: set[str] = set()

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on, hashed if they are in the CPU's memory."""
        for name, tensor in tensors:
            if tensor.device.type == "cpu":
                self._add(name, tensor)
            yield name, tensor

    def _add(self, name: str, tensor: Tensor) -> None:
        served, position = place(name)
        held = as_held(name, tensor, self._rotary_head_dim)
        if is_padded_inside(name, held):
            self._unknown.add(served)
        else:
            self._hashes.setdefault(served, _Running()).add(position, held)

    def expected(self) -> dict[str, str]:
        """Return the checksums by the server's parameter, as /weights_checker writes them."""
        return {name: hashed.hexdigest() for name, hashed in self._hashes.items() if name not in self._unknown}


class _Running:
    """SHA-256 of tensors one after the other, which may come in any order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._next = 0
        self._waiting: dict[int, Tensor] = {}

    def add(self, position: int, tensor: Tensor) -> None:
        self._waiting[position] = tensor
        while self._next in self._waiting:
            flat = self._waiting.pop(self._next).detach().contiguous().view(-1)
            self._digest.update(memoryview(flat.view(torch.uint8).numpy()))
            self._next += 1

    def hexdigest(self) -> str:
        assert not self._waiting, "a tensor in between was never sent"
        return self._digest.hexdigest()[:16]


def differing(expected: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """Return the parameters whose checksums differ. One that only one side has (a tied head) says nothing."""
    return sorted(name for name, value in expected.items() if served.get(name, value) != value)
