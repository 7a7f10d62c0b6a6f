"""Learners of two ranks publish what a learner of one rank does, bit for bit, over gloo
and over the stand-in for NCCL.
"""

import itertools
from typing import Any

import pytest

from megarl.core.base.messages import Publish
from megarl.core.sync.publisher import Publisher
from tests.pessimistic_nccl import NAME as PESSIMISTIC_NCCL
from tests.stack.conftest import Stack
from tests.stack.publish_world import publish_from
from tests.tiny_scores import difference

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

LAYOUTS = [
    ["model.tensor_parallel=2"],
    ["model.pipeline_parallel=2"],
    [],  # two data-parallel copies
]


def test_two_ranks_publish_what_one_does(stack: Stack, learner: Any) -> None:
    one = {}
    for version, name in ((100, "a"), (101, "b")):
        chunks, family = learner(name)
        publisher = Publisher(stack.recipe, stack.endpoints, chunks, family)
        command = Publish(version=version, servers=(stack.server.address,))
        published = publisher.publish(command, "test")
        assert published is not None
        assert published.results[0].error == ""
        one[name] = (published.results[0].checksum, published.bytes_sent)
    assert one["a"] != one["b"]
    every = itertools.product(["gloo", PESSIMISTIC_NCCL], LAYOUTS)
    models = itertools.cycle("ab")  # each is another than the server has
    publications = [
        (name, layout, backend) for (backend, layout), name in zip(every, models, strict=False)
    ]
    found = publish_from(stack, 2, 102, publications)
    for (name, *_), (error, checksum, size) in zip(publications, found, strict=True):
        assert (error, (checksum, size)) == ("", one[name])
    assert (
        difference(stack.server.address.url, stack.endpoints, stack.models[publications[-1][0]])
        < 1e-4
    )
