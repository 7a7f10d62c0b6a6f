"""Recomputation, and reduction during the backward pass, change no bit of a step."""

from pathlib import Path

import pytest

from megarl.core.base.types import encode
from tests.parallel.test_learner_layouts import VOCABULARY, make_batch
from tests.parallel.test_routing_replay import with_routing
from tests.parallel.worlds import run_world
from tests.tiny import tiny_llama, tiny_llama4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    for name, make, batch in (
        ("llama", tiny_llama, make_batch()),
        ("llama4", tiny_llama4, with_routing(make_batch(), 3, 1)),
    ):
        make(path / name, vocab_size=VOCABULARY)
        path.joinpath(f"{name}.msgpack").write_bytes(encode(batch))
    return path


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 4]
)
def test_the_same_bits(directory: Path, ranks: int) -> None:
    print(run_world(ranks, "tests.parallel.memory_world", str(directory)))
