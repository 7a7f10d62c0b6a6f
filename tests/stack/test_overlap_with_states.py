"""A server of delta networks that prepares a step while another one runs, as on a GPU.
On a CPU SGLang then has no prefix cache, so megarl does not start it so.
"""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import RunDir
from tests.overlapping_server import serve_with_overlap
from tests.processes import SERVERS, Forked
from tests.stack import conftest
from tests.stack.conftest import ROOT, Stack, running, two_models, under_way
from tests.stack.test_publication import PROMPT, kept_cache_scores
from tests.stack.test_server_families import CASES, ENDLESS, assert_serves

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("overlap")
    case = CASES["qwen3_5_moe"]

    def serve(
        rundir: RunDir, address: ServerAddress, log: Any, *_: object
    ) -> subprocess.Popen[bytes] | Forked:
        port = address.url.rpartition(":")[2]
        arguments = ["serve", str(rundir.recipe), "--index", "0", "--port", port]
        return SERVERS.start(serve_with_overlap, [arguments], ROOT, os.environ, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "serve", serve)
        models = two_models(directory, case.make, **ENDLESS, **case.overrides)
        with running(directory, models, model={"path": str(directory / "a"), "dtype": "fp32"}) as s:
            yield s


async def test_states_and_labels_are_right_over_a_change_of_weights(served: Stack) -> None:
    await assert_serves(served, "a")
    async with served.client() as client:
        await client.load(str(served.directory / "a"), 1)
        tasks = await asyncio.gather(*(under_way(client, PROMPT, 700, str(n)) for n in range(4)))
        await client.pause("in_place")
        await client.load(str(served.directory / "b"), 2)
        await client.resume()
        done = await asyncio.gather(*tasks)
    for generation in done:
        old, new = generation.spans
        assert (old.version, new.version) == (1, 2)
        expected = kept_cache_scores(
            served.models["a"], served.models["b"], PROMPT, generation.tokens, new.start
        )
        np.testing.assert_allclose(generation.logprobs, expected, atol=2e-5)
    await assert_serves(served, "b")
