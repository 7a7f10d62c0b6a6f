"""The warm start: every trace once an epoch, batches within the budget, weights that
add up to one; its environment.
"""

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import load
from megarl.run import devices
from megarl.tasks.data.traces import Trace
from megarl.tools import sft
from megarl.tools.sft import batches

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


def test_symbols_are_bound_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a learner, which is started without LD_BIND_NOW."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["megarl", "sft", "quickstart"])
    monkeypatch.setenv("LD_BIND_NOW", "1")
    sft.bind_symbols_when_used()
    assert "LD_BIND_NOW" not in os.environ
    sft.bind_symbols_when_used()
    assert started == [[sys.executable, "-m", "megarl", "sft", "quickstart"]]


def test_a_warm_start_does_not_go_on_with_other_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first checkpoint it may; and one that was begun before traces were
    noted goes on.
    """
    monkeypatch.setattr(sft.dist, "get_rank", lambda: 0)
    sft.check_same(TRACES, tmp_path, 4)
    sft.check_same(TRACES, tmp_path, 4)
    for other in (
        TRACES[:-1],
        TRACES[::-1],
        [*TRACES[:-1], TRACES[-1]._replace(learnt=np.ones(LENGTHS[-1], bool))],
    ):
        with pytest.raises(
            MegarlError, match=r"a warm start with other traces \(sft.data\) was begun there"
        ):
            sft.check_same(other, tmp_path, 4)
    sft.check_same(TRACES[::-1], tmp_path, 0)
    with pytest.raises(MegarlError, match="a warm start with other traces"):
        sft.check_same(TRACES, tmp_path, 4)


def test_its_ranks_have_the_environment_of_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs: in another order of kernels, tensor parallelism computes or sends; and
    kernels are kept on the node.
    """
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0,1"})
    monkeypatch.setattr(sft, "become_torchrun", lambda ranks, _port: sys.exit(ranks))
    words = ["resources.learner_ranks=2", "model.tensor_parallel=2", f"model.path={tmp_path}/made"]
    with pytest.raises(SystemExit, match=r"^2$"):
        sft.main(load("quickstart", words))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert set(devices.CACHES) <= os.environ.keys()
