"""How many rollouts a teacher gets at once."""

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.core.base.rundir import Endpoints, LinkKeys
from megarl.core.base.types import Segment
from megarl.core.controller.teacher import TeacherServers
from megarl.core.recipe import from_tree
from megarl.run.process import free_ports


@pytest.mark.parametrize(("thinking", "most"), [(126_000, 2), (1_000, 8)])
def test_long_rollouts_do_not_wait_in_a_teachers_queue_until_their_time_is_up(
    thinking: int, most: int
) -> None:
    """256 of 128k tokens, as many as it may run, are half an hour's work. Each would
    end after its limit of 300 s, unscored.
    """
    at_once = 0
    seen = list[int]()

    async def score(request: web.Request) -> web.Response:
        nonlocal at_once
        at_once += 1
        seen.append(at_once)
        (tokens,) = (await request.json())["input_ids"]
        await asyncio.sleep(0.2)
        at_once -= 1
        scores = [[-1.0, token, None] for token in tokens[1:]]
        meta = {
            "finish_reason": {"type": "length"},
            "input_token_logprobs": scores,
            "weight_version": "-1",
        }
        return web.json_response([{"meta_info": meta}])

    async def run() -> list[np.ndarray]:
        app = web.Application()
        app.router.add_post("/generate", score)
        runner = web.AppRunner(app)
        (port,) = free_ports(1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        length: dict[str, Any] = {
            "prompt_tokens": 1000,
            "thinking_tokens": [1, thinking],
            "answer_tokens": 1000,
        }
        endpoints = Endpoints(
            session="",
            controller="",
            servers=(),
            api_key="user",
            admin_key="admin",
            link=LinkKeys.new(),
            rendezvous_port=0,
            teachers=(f"http://127.0.0.1:{port}",),
        )
        teachers = TeacherServers(from_tree({"length": length}), endpoints)
        segment = Segment(
            tokens=np.array([5, 6], np.int32), logprobs=np.zeros(2, np.float32), weight_version=0
        )
        try:
            prompt = np.array([3, 4], np.int32)
            return await asyncio.gather(
                *(teachers.logprobs(n, prompt, [segment]) for n in range(8))
            )
        finally:
            await teachers.close()
            await runner.cleanup()

    assert [each.tolist() for each in asyncio.run(run())] == [[-1.0, -1.0]] * 8
    assert max(seen) == most
