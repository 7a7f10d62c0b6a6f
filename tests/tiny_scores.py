"""transformers' log-probs, as the tests' side of a probe."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


@torch.no_grad()
def scores(model: Any, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Log-prob of each token of each sequence but its first. [len - 1] float32 each"""
    out = []
    for ids in sequences:
        tokens = torch.from_numpy(np.asarray(ids, np.int64))
        logits = model(tokens[None]).logits[0].float()
        out.append(torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0].numpy())
    return out
