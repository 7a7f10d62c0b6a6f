"""transformers' log-probs of given tokens, and how far a server's are from them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.client.client import ServerClient


@torch.no_grad()
def scores(model: Any, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Log-prob of each token of each sequence but its first. [len - 1] float32 each"""
    out = []
    for ids in sequences:
        tokens = torch.from_numpy(np.asarray(ids, np.int64))
        logits = model(tokens[None]).logits[0].float()
        out.append(torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0].numpy())
    return out


def difference(url: str, endpoints: Endpoints, model: Any) -> float:
    """Largest |server - transformers| log-prob over four sequences of random tokens."""
    generator = np.random.default_rng(0)
    sequences = [
        generator.integers(0, model.config.get_text_config().vocab_size, 64, dtype=np.int32)
        for _ in range(4)
    ]

    async def served() -> list[np.ndarray]:
        async with ServerClient(
            ServerAddress(id=0, url=url), endpoints.api_key, endpoints.admin_key, 60
        ) as client:
            # A salt of its own for each call: nothing of earlier weights is in the
            # cache under it.
            found = await client.score(
                sequences, [1] * len(sequences), f"difference {id(sequences)}"
            )
        return [each.logprobs for each in found]

    pairs = zip(asyncio.run(served()), scores(model, sequences), strict=True)
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
