"""What SGLang's `/weights_checker` must answer, computed from the tensors as they are sent.

On a CPU it hashes each of the server's parameters with SHA-256. Some of those are several Hugging Face tensors joined along
rows (`q_proj`, `k_proj`, `v_proj` are `qkv_proj`), whose bytes follow one another: a running hash over the tensors in that
order is the hash of the joined one, and no tensor is kept. On a GPU the hash is another one, made there; then the servers are
only compared with each other, and the probe compares them with the learner.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

VOCABULARY_MULTIPLE = 64
"""The server pads its vocabulary to it, with zero rows."""
PADDED = ("embed_tokens.weight", "lm_head.weight")
JOINED = (
    (re.compile(r"\.(q|k|v)_proj\.(weight|bias)$"), r".qkv_proj.\2"),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), r".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), r".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\.weight$"), r".gate_up_proj.weight"),
)


def served_name(name: str) -> str:
    """The server's parameter that a Hugging Face tensor is a part of."""
    for pattern, joined in JOINED:
        if pattern.search(name):
            return pattern.sub(joined, name)
    return name


class SentChecksums:
    """Hashes of the tensors that went through `watch`."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, hashed on their way if they are in the CPU's memory."""
        for name, tensor in tensors:
            if tensor.device.type == "cpu":
                digest = self._hashes.setdefault(served_name(name), hashlib.sha256())
                digest.update(_bytes(tensor))
                missing = -len(tensor) % VOCABULARY_MULTIPLE if name.endswith(PADDED) else 0
                if missing:
                    digest.update(bytes(missing * tensor[0].nbytes))
            yield name, tensor

    def expected(self) -> dict[str, str]:
        """The server's parameter -> its checksum, as /weights_checker writes them."""
        return {name: digest.hexdigest()[:16] for name, digest in self._hashes.items()}


def differing(expected: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """Parameters that both know but with different checksums. Parameters only one side has (a tied head) say nothing."""
    return sorted(name for name, value in expected.items() if served.get(name, value) != value)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
