"""Publication of changes only, with `weights.full_every` above 1.

    exported tensor ──┬─ whole ─────────────────────────► (name, tensor)
                      └─ compared to the last one sent ─► (name + SUFFIX, code) [bytes]

The code is that of sync/delta.py. Both go into buckets, by any transport.

Servers get deltas only if the checksum of each one's parameters, taken before the
pause, is still that with which the last version arrived. If one was restarted, joined
late, was pinned or failed, all get all weights. No delta is sent twice, because it is
unknown how much of it was already added.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.core.sync.delta import DTYPES, SUFFIX, encode

MOST = 1 / 16
"""A tensor is sent whole if its delta has at least this share of its bytes: decoding
would take more memory than the tensor.
"""


class _SentState(NamedTuple):
    """A server that has the last version sent: its parameters' checksum, and the number
    of deltas since it got all weights.
    """

    checksum: str
    deltas: int


class LastSent:
    """A copy of what this rank sent last, in the host's memory. With cuda_ipc it is the
    whole model, on each rank that has a server; with others, what the rank sends of a
    pipeline stage. sends_all: whether all weights are sent now.
    """

    sends_all = True

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._values: dict[str, Tensor] = {}
        self._version = 0
        self._servers: dict[int, _SentState] = {}

    @property
    def base(self) -> int | None:
        """The version that deltas are added to; None if all weights are sent."""
        return None if self.sends_all else self._version

    def expected(self, ids: Iterable[int]) -> dict[int, str] | None:
        """Return the checksums that these servers must have to get deltas; None if one
        of them must get all weights.
        """
        checksums = {}
        for i in ids:
            state = self._servers.get(i)
            if state is None or state.deltas + 1 >= self._full_every:
                return None
            checksums[i] = state.checksum
        return checksums

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors or deltas to send for these tensors, and keep copies of the
        tensors.
        """
        if self._full_every == 1:
            yield from tensors
            return
        for name, tensor in tensors:
            if name not in self._values:
                self._values[name] = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda
                )
            last = self._values[name]
            code = None
            if not self.sends_all and tensor.dtype in DTYPES:
                code = encode(last, tensor)
            last.copy_(tensor)
            if code is not None and len(code) < MOST * tensor.nbytes:
                yield name + SUFFIX, code.to(tensor.device)
            else:
                yield name, tensor

    def arrived(self, version: int, checksums: Mapping[int, str]) -> None:
        """Note that `version` was sent last and that the servers with these checksums
        have it.
        """
        servers = {}
        for i, checksum in checksums.items():
            deltas = 0 if self.sends_all else self._servers[i].deltas + 1
            servers[i] = _SentState(checksum, deltas)
        if version == self._version:
            self._servers |= servers
        else:
            self._servers = servers
        self._version = version
