"""Publication of what changed: `weights.full_every` above 1.

    exported tensor ──kept? whole?──┬─ whole ───────────────► (name, tensor)                    ─► buckets, by any transport
                                    └─ against the last one ─► (name + SUFFIX, code) [bytes]       (base/delta.py)

A server gets a delta only if the checksum of its parameters, taken before the pause, is still the one they had when the
learner's last version arrived. So a server that was restarted, joined late, was held back or failed gets all weights, and so do
all servers that take part in the same publication. Checksums are compared after a delta, as always: those of a server of one
rank with what its parameters must now be. No delta is sent twice, because nothing shows how much of it was already added.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.core.base.delta import DTYPES, SUFFIX, encode

MOST = 1 / 16
"""A tensor whose delta has a larger share of its bytes is sent itself: to decode that would take more memory than it has."""


class _Held(NamedTuple):
    """What a server holds: a version, the checksum of all its parameters then, and the deltas since it was sent everything."""

    version: int
    checksum: str
    deltas: int


class LastSent:
    """What this rank sent last: in the host's memory, as many bytes as it sends. For cuda_ipc that is the model on each rank
    that has a server, for the others a pipeline stage on its source.

    whole: whether everything is sent now.
    """

    whole = True

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._values: dict[str, Tensor] = {}
        self._version = 0
        self._held: dict[int, _Held] = {}

    @property
    def base(self) -> int | None:
        """The version that deltas are of; None if everything is sent."""
        return None if self.whole else self._version

    def expected(self, ids: Iterable[int]) -> dict[int, str] | None:
        """Return the checksums with which these servers can be given deltas; None if one of them must get everything."""
        held = {i: self._held.get(i, _Held(-1, "", 0)) for i in ids}
        if any(h.version != self._version or h.deltas + 1 >= self._full_every for h in held.values()):
            return None
        return {i: h.checksum for i, h in held.items()}

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what is to be sent of these tensors, and keep them."""
        if self._full_every == 1:
            yield from tensors
            return
        for name, tensor in tensors:
            if name not in self._values:
                self._values[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            last = self._values[name]
            code = None if self.whole or tensor.dtype not in DTYPES else encode(last, tensor)
            last.copy_(tensor)
            if code is not None and len(code) < MOST * tensor.nbytes:
                yield name + SUFFIX, code.to(tensor.device)
            else:
                yield name, tensor

    def arrived(self, version: int, checksums: Mapping[int, str]) -> None:
        """Note that what was sent last is `version`, and that of the servers it was sent to these have it."""
        deltas = {i: 0 if self.whole else self._held[i].deltas + 1 for i in checksums}
        others = {i: held for i, held in self._held.items() if held.version == version}
        self._version, self._held = version, others | {i: _Held(version, c, deltas[i]) for i, c in checksums.items()}
