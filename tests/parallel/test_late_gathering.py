"""Weights that the next forward pass gathers are those that the update would have
gathered.
"""

from pathlib import Path

import pytest

from megarl.core.base.types import encode
from tests.parallel.test_learner_layouts import VOCABULARY, make_batch
from tests.parallel.worlds import run_world
from tests.tiny import tiny_llama, tiny_qwen3_moe


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_same_weights(tmp_path: Path, ranks: int) -> None:
    models = {"llama": tiny_llama, "moe": tiny_qwen3_moe} if ranks == 4 else {"llama": tiny_llama}
    for name, make in models.items():
        make(tmp_path / name, vocab_size=VOCABULARY)
        tmp_path.joinpath(f"{name}.msgpack").write_bytes(encode(make_batch()))
    print(run_world(ranks, "tests.parallel.late_gathering_world", str(tmp_path)))
