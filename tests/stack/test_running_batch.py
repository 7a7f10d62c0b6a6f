"""What parity, evaluations and a distillation ask of a server costs rollouts nothing
once it has been answered.

The server writes, at each step of decoding, how many requests it decodes and what
SGLang thinks that they need.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import RunDir
from tests.processes import SERVERS, Forked, command_line
from tests.stack import conftest
from tests.stack.conftest import ROOT, Stack, running, under_way

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.timeout(600)]

PROMPT = np.arange(5, 25, dtype=np.int32)
PLAIN = {
    "is_all_greedy": False,
    "is_any_greedy": False,
    "need_top_k_sampling": False,
    "need_top_p_sampling": False,
    "need_min_p_sampling": False,
    "max_top_k": None,
    "logit_bias": None,
    "sampling_mask_batch_indices": None,
}
"""What rollouts need: their next token comes from softmax and one draw."""


def serve_and_tell(arguments: list[str], told: str) -> int:
    """`megarl serve` whose scheduler appends to the file `told`."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    prepare = ScheduleBatch.prepare_for_decode

    def prepare_and_tell(self: ScheduleBatch) -> None:
        prepare(self)
        needs = {name: getattr(self.sampling_info, name) for name in PLAIN}
        with Path(told).open("a") as file:
            file.write(json.dumps({"requests": len(self.reqs)} | needs, default=str) + "\n")

    ScheduleBatch.prepare_for_decode = prepare_and_tell
    return command_line(arguments)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told") / "steps.jsonl"


@pytest.fixture(scope="module")
def stack(
    models: tuple[Path, dict[str, Any]], told: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    def serve(
        rundir: RunDir, address: ServerAddress, log: Path, *_: object
    ) -> subprocess.Popen[bytes] | Forked:
        arguments = [
            "serve",
            str(rundir.recipe),
            "--index",
            "0",
            "--port",
            address.url.rpartition(":")[2],
        ]
        return SERVERS.start(serve_and_tell, [arguments, str(told)], ROOT, os.environ, log)

    runs = {"dir": str(tmp_path_factory.mktemp("runs"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "serve", serve)
        with running(*models, run=runs) as served:
            yield served


async def test_rollouts_are_sampled_as_if_nobody_else_had_asked(stack: Stack, told: Path) -> None:
    sequences = [np.tile(PROMPT, 3), PROMPT]
    told.write_text("")
    async with stack.client() as client:
        rollout = await under_way(client, PROMPT, 400)
        await asyncio.gather(
            client.score(sequences, [1, 5], "parity"),
            client.score(sequences, [20, 10], "teacher", against=7),
            client.generate(PROMPT, 8, temperature=0.0),
            client.generate(PROMPT, 12, temperature=0.7, top_p=0.8),
            client.generate(PROMPT, 16, temperature=2.0, stop_token_ids=[3]),
        )
        assert not rollout.done(), "the rollout ended before the others; give it more tokens"
        await rollout
    steps = [json.loads(line) for line in told.read_text().splitlines()]
    together = [step for step in steps if step["requests"] > 1]
    for need in (
        "is_any_greedy",
        "need_top_k_sampling",
        "need_top_p_sampling",
        "sampling_mask_batch_indices",
    ):
        assert any(step[need] for step in together), (
            f"{need}: no other request was decoded beside the rollout"
        )
    last = max(n for n, step in enumerate(steps) if step["requests"] > 1)
    after = steps[last + 1 :]
    assert len(after) > 10
    assert all(step == PLAIN | {"requests": 1} for step in after), after[0]


async def test_a_score_is_not_greedy(stack: Stack, told: Path) -> None:
    """It comes into the running batch before SGLang knows that it has ended."""
    async with stack.client() as client:
        rollout = await under_way(client, PROMPT, 200)
        told.write_text("")
        for n in range(3):
            await client.score([np.tile(PROMPT, 3)], [1], f"parity {n}")
        await rollout
    steps = [json.loads(line) for line in told.read_text().splitlines()]
    assert len(steps) > 10
    assert not any(step["need_top_k_sampling"] for step in steps)
