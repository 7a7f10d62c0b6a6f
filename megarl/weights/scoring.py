"""How a server is asked for the log-probs of given tokens: what both its clients send and read.

    [request] sequences of ids, the first position to score of each ──► POST /generate ──► [scored] a log-prob a token

What stands before the first position to score may come from cached prefixes of the same salt, what is scored never does:
SGLang matches a prefix only up to `logprob_start_len`. The one token that a request must sample is passed over.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def request(sequences: Sequence[np.ndarray], firsts: Sequence[int], salts: Sequence[str]) -> dict[str, Any]:
    """The body. sequences: ids [n] each; firsts: the first position to score of each, at least 1; salts: of each, sequences
    with the same one share cached prefixes."""
    return {
        "input_ids": [s.tolist() for s in sequences],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": [first - 1 for first in firsts],
        "cache_salt": list(salts),
    }


def scored(replies: Any) -> list[np.ndarray]:
    """Of the reply's JSON: log-probs from the first position on, [n - first] float32 each; nan for null, which stands for a
    number that is not finite. The entry before the first position has none: nothing that was computed stands before it."""
    return [np.array([e[0] for e in reply["meta_info"]["input_token_logprobs"][1:]], np.float32) for reply in replies]
