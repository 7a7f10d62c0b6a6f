"""Learners of two ranks publish what a learner of one rank does, bit for bit."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.messages import Publish
from megarl.rundir import RunDir
from megarl.weights.publisher import Publisher
from tests.parallel.worlds import run_world
from tests.stack.conftest import Stack
from tests.tiny_scores import scores

pytestmark = pytest.mark.stack


def test_two_ranks_publish_what_one_does(stack: Stack, learner: Any) -> None:
    chunks, family = learner("b")
    publisher = Publisher(stack.recipe, stack.endpoints, chunks, family)
    command = Publish(version=100, servers=(stack.server.address,))
    asked: list[np.ndarray] = []

    def score(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        asked.extend(scores(stack.models["b"], sequences))
        return asked

    one = publisher.publish(command, "test", score)
    assert one is not None
    assert one.results[0].error == ""
    known = stack.directory / "scores.npz"
    np.savez(known, *asked)
    recipe = RunDir.of(stack.recipe).recipe
    paths = (str(stack.directory / "b"), str(known))
    output = run_world(2, "tests.stack.publish_world", str(recipe), stack.server.address.url, "101", *paths)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert len(lines) == 3
    for error, checksum, difference, size in lines:
        assert (error, checksum, size) == ("", one.results[0].checksum, one.bytes_sent)
        assert difference < 1e-4
