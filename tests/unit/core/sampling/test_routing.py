"""Chosen experts from a server's reply to the record of a rollout, also when a server
is lost on the way.
"""

import asyncio
import base64
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.base.architecture import CONFIGS, in_directory, read
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import Prompt, Routing, decode, encode
from megarl.core.client.client import Generation, ServerLost, VersionSpan
from megarl.core.client.membership import Membership
from megarl.core.recipe import from_tree
from megarl.core.sampling.sampler import Job, Sampler, routed_model
from megarl.tasks.environments.registry import TaskEnvironments
from tests.server_pool import Pool
from tests.tiny import tiny_qwen3_moe

EVERY_SECOND = replace(
    read("qwen3-30b-a3b"), layers=4, expert_layers=(1, 3), experts=32, experts_per_token=1
)
MANY = replace(EVERY_SECOND, layers=3, expert_layers=(0, 1, 2), experts=300, experts_per_token=2)


def reply(table: np.ndarray, kind: str = "u1") -> str:
    return base64.b64encode(table.astype(kind).tobytes()).decode()


def test_layers_without_experts_are_left_out() -> None:
    table = np.arange(2 * 4).reshape(2, 4, 1)
    decoded = EVERY_SECOND.routed_experts(reply(table))
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, [[[1], [3]], [[5], [7]]])


@pytest.mark.parametrize("wrong", [-1, 32])
def test_an_expert_that_the_model_lacks_is_refused(wrong: int) -> None:
    """As one byte, -1 would be another expert. What is reported of layers without
    experts does not count.
    """
    table = np.zeros((2, 4, 1), int)
    table[:, 0] = wrong
    assert EVERY_SECOND.routed_experts(reply(table)).max() == 0
    table[1, 3] = wrong
    with pytest.raises(MegarlError, match="of 32: is its SGLang"):
        EVERY_SECOND.routed_experts(reply(table))


@pytest.mark.parametrize(
    ("experts", "bits"), [(2, 1), (3, 2), (4, 2), (16, 4), (17, 8), (256, 8), (257, 16), (300, 16)]
)
@pytest.mark.parametrize("rows", [3, 5])
def test_choices_come_back_as_they_were(experts: int, bits: int, rows: int) -> None:
    """Packed, through msgpack, and joined again with an outline."""
    model = replace(MANY, experts=experts)
    table = np.random.default_rng(rows).integers(0, experts, (rows, 3, 2))
    sent_as = "u1" if experts < 256 else "<i2"
    parts = [model.routed_experts(reply(part, sent_as)) for part in (table[:2], table[2:])]
    routing = model.routing(parts)
    assert (routing.bits, routing.size) == (bits, len(routing.packed))
    assert routing.size == -(-rows * 3 * 2 * bits // 8)
    outline: Routing = decode(encode(routing.outline), Routing)
    assert outline.is_outline == (rows > 0)
    assert outline.size == routing.size
    for again in (decode(encode(routing), Routing), outline.with_choices(bytes(routing.packed))):
        assert again.table.dtype == (np.uint8 if experts <= 256 else np.int16)
        np.testing.assert_array_equal(again.table, table)


def test_those_of_a_model(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, decoder_sparse_step=2)
    model = in_directory(tmp_path)
    assert (model.layers, model.expert_layers, model.experts, model.experts_per_token) == (
        4,
        (1, 3),
        4,
        2,
    )
    recipe = from_tree({"model": {"path": str(tmp_path), "moe": {"routing_replay": True}}})
    assert routed_model(recipe) == model
    assert routed_model(from_tree({"model": {"path": str(tmp_path)}})) is None


def test_asked_for_of_a_model_or_server_that_has_none(tmp_path: Path) -> None:
    shutil.copyfile(CONFIGS / "llama-3.1-8b.json", tmp_path / "config.json")
    recipe = from_tree({"model": {"path": str(tmp_path), "moe": {"routing_replay": True}}})
    with pytest.raises(MegarlError, match=r"model\.moe\.routing_replay: .* has no experts"):
        routed_model(recipe)
    with pytest.raises(MegarlError, match="did not say which experts"):
        MANY.routed_experts("")


class OneExpertATime:
    """A server whose router sends token t to expert t; the first request, or it alone,
    is lost after two tokens.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.alone = False

    async def generate(
        self, ids: np.ndarray, limit: int, *, routing_from: int, **_: Any
    ) -> Generation:
        self.asked.append((len(ids), routing_from))
        tokens = np.full(limit, 7, np.int32)
        logprobs = np.zeros(limit, np.float32)
        if len(self.asked) == 1:
            raise ServerLost("gone", tokens[:2], logprobs[:2], self.alone)
        rows = np.arange(routing_from, len(ids) + limit - 1)
        table = np.repeat(rows, 4).reshape(-1, 4, 1)
        return Generation(tokens, logprobs, (VersionSpan(0, 0, limit),), "length", reply(table))


class Words:
    end = 1
    ends = (1,)

    def ids(self, text: str) -> np.ndarray:
        return np.array([3, 4, 5], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return ""

    continued = decode


class OnePlace:
    def __init__(self) -> None:
        self.use = {0: type("Use", (), {"tokens": 0})()}
        self.membership = Membership([ServerAddress(id=0, url="")])

    async def take(self, order: Any, may_use: Any) -> tuple[int, int]:
        return 0, 0

    def give_back(self, server: int) -> None:
        pass


@pytest.mark.parametrize("alone", [False, True])
def test_every_token_but_the_last_has_a_row_over_losses_and_legs(alone: bool) -> None:
    """A server that ends one request alone is not taken for lost."""
    server = OneExpertATime()
    places = OnePlace()
    lost = list[int]()
    server.alone = alone
    recipe = from_tree({"length": {"answer_tokens": 4}})
    pool = Pool({0: server}, places)
    pool.server_lost = lambda server, life, reason: lost.append(server)
    sampler = Sampler(recipe, Words(), pool, TaskEnvironments(recipe, Words()))  # type: ignore[arg-type]
    prompt = Prompt(id="", tokens=np.arange(6, dtype=np.int32), answer="")
    job = Job(
        prompt,
        (0, 0, 0),
        partial(places.take, (0, 0, 0), lambda *_: True),
        "",
        5,
        1.0,
        1.0,
        routed=EVERY_SECOND,
    )
    done = asyncio.run(sampler.complete(job))
    assert lost == ([] if alone else [0])
    # Lost after 2 of 5, 3 more, the phrase of 3, the answer of 4; the row of the last
    # token of a request comes with the next.
    assert server.asked == [(6, 0), (8, 0), (14, 10)]
    assert len(done.tokens) == 12
    np.testing.assert_array_equal(
        EVERY_SECOND.routing(done.routing).table[:, 0, 0], np.arange(6 + 12 - 1)
    )
