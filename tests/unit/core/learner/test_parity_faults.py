"""benchmarks/parity/learner_faults.py: each fault changes a learner's scores while it
lasts.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.parity.learner_faults import LEARNER_FAULTS
from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import unrewarded
from megarl.core.learner.network import Network, loaded_chunks
from tests.tiny import tiny_llama

TOKENS = np.arange(48, dtype=np.int32)
DOSES = {
    "head": 1.0,
    "dtype": 2.0,
    "rope-theta": 3.0,
    "rope-positions": 1.06,
    "temperature-logits": 1.2,
}


@pytest.fixture
def network(one_rank: None, tmp_path: Path) -> Network:
    tiny_llama(tmp_path, dtype=torch.bfloat16)
    recipe = recipes.from_tree({"model": {"path": str(tmp_path), "dtype": "bf16"}})
    return Network(*loaded_chunks(recipe, tmp_path), recipe)


def scores(network: Network) -> np.ndarray:
    (found,) = network.ask([unrewarded(0, TOKENS, 1)], network.scoring_head(3), shape=(2,))
    return found[1:, 0]


def test_each_changes_the_scores_and_leaves_nothing_behind(network: Network) -> None:
    assert set(DOSES) == set(LEARNER_FAULTS)
    clean = scores(network)
    fault: Any
    for name, fault in LEARNER_FAULTS.items():
        with fault(network, DOSES[name]):
            changed = scores(network)
        assert np.abs(changed - clean).max() > 1e-4, name
        np.testing.assert_array_equal(scores(network), clean, err_msg=name)
