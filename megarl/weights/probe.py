"""Fixed sequences that servers and learner both score after a publication: do the two sides hold the same model?

The difference in log-probs is rounding (about 1e-6 in fp32) if weights, model code and precision agree.
"""

from collections.abc import Sequence

import numpy as np

PROBE_TOKENS = 64


def probe_sequences(count: int, vocabulary: int, longest: int, seed: int) -> list[np.ndarray]:
    """`count` sequences of random ids, [at most PROBE_TOKENS] int32, the same in every process."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, min(PROBE_TOKENS, longest), dtype=np.int32) for _ in range(count)]


def largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Largest |log-prob difference| over all tokens; infinite if the sides scored different tokens or one is not finite."""
    if [len(a) for a in ours] != [len(b) for b in theirs]:
        return float("inf")
    worst = float(np.max(np.abs(np.concatenate(ours) - np.concatenate(theirs))))
    return worst if np.isfinite(worst) else float("inf")
