"""Batches of the warm start: every trace once an epoch, tokens within the budget, weights that add up to one."""

import itertools

import numpy as np

from megarl.lab.sft import batches
from megarl.tasks.data.traces import Trace

LENGTHS = [5, 9, 7, 4, 30, 6, 8]
TRACES = [Trace(np.full(n, i, np.int32), 2, np.arange(n) >= 2) for i, n in enumerate(LENGTHS)]


def test_each_epoch_has_every_trace_once_in_its_own_order() -> None:
    stream = itertools.chain.from_iterable(batches(TRACES, 20, seed=1))
    epochs = [[int(s.tokens[0]) for s in itertools.islice(stream, len(TRACES))] for _ in range(3)]
    assert all(sorted(e) == list(range(len(TRACES))) for e in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_batches_keep_to_the_budget_but_for_one_long_trace() -> None:
    for batch in itertools.islice(batches(TRACES, 20, seed=1), 20):
        assert sum(map(len, batch)) <= 20 or len(batch) == 1
        weights = np.concatenate([s.loss_weight for s in batch])
        assert np.isclose(weights.sum(), 1.0)
        assert len(set(weights[weights > 0].tolist())) == 1
        assert all(s.loss_weight[:2].sum() == 0 for s in batch)
