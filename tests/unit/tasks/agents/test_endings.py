"""Every request is answered, however its session ends, and nothing is trained that was
not.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from megarl.core.base.contracts import PolicyTurn, TurnRequest
from megarl.core.base.types import int32, paths_of
from megarl.core.recipe import from_tree
from megarl.tasks.agents import gateway as module
from megarl.tasks.agents.gateway import Gateway
from megarl.tasks.agents.session import AgentSession
from tests import make
from tests.unit.tasks.agents.serving import LENGTH, Served, gateway, run
from tests.unit.tasks.agents.templates import rendering_of

ANSWER_LIMIT_S = 20.0
REACHED: dict[str, tuple[dict[str, Any], str]] = {
    "paths": ({"paths": 2}, "agent.paths=2"),
    "requests": ({"requests": 3}, "agent.requests=3"),
    "trained_tokens": ({"trained_tokens": 9}, "agent.trained_tokens=9"),
}


def user(text: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(text)}]


@pytest.mark.parametrize("limit", REACHED)
def test_parallel_requests_that_meet_a_limit_get_400_and_those_in_flight_an_answer(
    limit: str, tmp_path: Path
) -> None:
    settings, named = REACHED[limit]

    async def test() -> None:
        async with gateway(tmp_path, *["abc"] * 9, **settings) as served:
            _, first = await served.chat(user(0))
            go_on = [*user(0), first["choices"][0]["message"]]
            served.hold.clear()
            asked = [asyncio.create_task(served.chat([*go_on, *user(n)])) for n in range(6)]
            while (
                not served.session.over and limit != "trained_tokens"
            ):  # which waits for those that sample
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            served.hold.set()
            replies = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_LIMIT_S)
            counts = Counter(status for status, _ in replies)
            assert counts == {200: 2, 400: 4}
            assert all(
                named in body["error"]["message"] for status, body in replies if status == 400
            )
            assert served.session.rollout().finish == "length"
            trained = sum(len(s.tokens) for s in served.session.tree.paths()[0] if s.trained)
            assert trained == sum(len(node.sampled) for node in served.session.tree.nodes) > 4
            assert (await served.chat(user(0)))[0] == 400

    run(test)


async def ended_by_time(served: Served) -> None:
    served.session.end("its time is up", limited=True)


async def ended_twice(served: Served) -> None:
    served.session.close("a limit")
    served.session.end("its time is up", limited=True)


async def gateway_closes(served: Served) -> None:
    await served.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [ended_by_time, ended_twice, gateway_closes])
@pytest.mark.parametrize("begun", [False, True], ids=["before its first step", "while it samples"])
def test_a_session_that_is_ended_answers_what_is_in_progress(
    stream: bool, begun: bool, end: Callable[[Served], Awaitable[None]], tmp_path: Path
) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "a", "b") as served:
            served.hold.clear()
            count = 2 if begun else 1  # a second one may find the door closed before it is heard
            asked = [asyncio.create_task(served.chat(user(n), stream=stream)) for n in range(count)]
            if begun:
                while len(served.asked) < count:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.02)  # streams have sent their heads
            else:
                while not served.session._requests:
                    await asyncio.sleep(0)
            await end(served)
            for status, body in await asyncio.wait_for(asyncio.gather(*asked), ANSWER_LIMIT_S):
                if stream and begun:
                    assert status == 200
                    assert body.startswith('data: {"error": {"message": "the session is over: ')
                else:
                    assert (status, body["error"]["code"]) == (400, "session_over")
            assert not served.session.tree.paths()[1]

    run(test)


class Crowd:
    """An agent whose requests come at once and in random order, which leaves some, and
    loses its session at a random moment.
    """

    def __init__(
        self, seed: int, session: AgentSession, url: str, http: aiohttp.ClientSession
    ) -> None:
        self.rng = random.Random(seed)
        self.session = session
        self.url = url
        self.http = http
        self.answers: list[str] = []
        self.statuses = Counter[int]()
        self.left = 0
        self.talks = [user("u")]

    async def ask(self, messages: list[dict[str, str]]) -> None:
        headers = {"Authorization": f"Bearer {self.session.key}"}
        body = {"model": "policy", "messages": messages}
        async with self.http.post(
            f"{self.url}/v1/chat/completions", headers=headers, json=body
        ) as reply:
            told = await reply.json()
        self.statuses[reply.status] += 1
        if reply.status == 200:
            text = told["choices"][0]["message"]["content"]
            self.answers.append(text)
            self.talks.append([*messages, {"role": "assistant", "content": text}, *user("on")])

    async def ask_and_leave(self, messages: list[dict[str, str]], after_s: float) -> None:
        try:
            await asyncio.wait_for(self.ask(messages), after_s)
        except (TimeoutError, aiohttp.ClientError):
            self.left += 1

    async def live(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            asked = []
            for _ in range(rng.randint(1, 6)):
                messages = rng.choice([*self.talks, user(rng.random())])
                leaves = rng.random() < 0.2
                asked.append(
                    self.ask_and_leave(messages, rng.random() / 50)
                    if leaves
                    else self.ask(messages)
                )
            await asyncio.gather(*asked)

    async def end_somewhen(self) -> None:
        await asyncio.sleep(self.rng.random() / 20)
        if self.rng.random() < 0.4:
            self.session.end("its time is up", limited=True)

    def check(self, written: set[str], text_of: Callable[[np.ndarray], str]) -> None:
        """Assert what must hold. written: what the policy has written."""
        assert self.statuses.keys() <= {200, 400}
        segments, branches, _ = self.session.tree.paths()
        trained = Counter(text_of(s.tokens) for s in segments if s.trained)
        assert trained.keys() <= written
        assert all(count == 1 for count in trained.values()), "each sampled token at most once"
        unread = trained.keys() - set(self.answers)
        assert len(unread) <= self.left, "nothing is trained that was not answered"
        total = sum(int(path.trained.sum()) for path in paths_of(segments, branches, int32(())))
        assert total == sum(len(s.tokens) for s in segments if s.trained)
        in_progress = [
            turn for turns in self.session._turns.values() for turn in turns if not turn.done.done()
        ]
        assert not in_progress or self.left, "no request is left"


def test_whatever_ends_a_session_each_request_is_answered(tmp_path: Path) -> None:
    tokenizer, rendering = rendering_of(tmp_path, "qwen")
    seen = Counter[str]()

    async def one(seed: int, server: Gateway, http: aiohttp.ClientSession) -> None:
        rng = random.Random(seed)
        limits = {
            "paths": rng.randint(1, 8),
            "requests": rng.randint(1, 12),
            "trained_tokens": rng.randint(9, 200),
        }
        written = set[str]()

        async def policy(request: TurnRequest) -> PolicyTurn:
            await asyncio.sleep(rng.random() / 50)
            ids = int32([*tokenizer.ids(f"{rng.randrange(10**8):08}"), tokenizer.end])[
                : request.limit
            ]
            written.add(tokenizer.decode(ids).removesuffix("<|im_end|>"))
            return PolicyTurn((make.segment(ids),), True)

        recipe = from_tree({"length": LENGTH, "agent": limits})
        async with server.session(recipe, tokenizer, rendering, policy) as session:
            crowd = Crowd(seed, session, server.url, http)
            await asyncio.wait_for(
                asyncio.gather(crowd.live(), crowd.end_somewhen()), ANSWER_LIMIT_S
            )
            crowd.check(written, lambda ids: tokenizer.decode(ids).removesuffix("<|im_end|>"))
        seen.update({str(status): count for status, count in crowd.statuses.items()})
        seen["left"] += crowd.left

    async def test() -> None:
        server = await Gateway("127.0.0.1").start()
        try:
            async with aiohttp.ClientSession() as http:
                for begin in range(0, 40, 10):
                    await asyncio.gather(
                        *(one(seed, server, http) for seed in range(begin, begin + 10))
                    )
        finally:
            await server.close()

    run(test, 120)
    assert min(seen["200"], seen["400"], seen["left"]) > 20, seen


MALFORMED = {
    "Content-Length: 1000": b"{",  # and then it hangs up
    "Transfer-Encoding: chunked": b"3\r\n{ }\r\nZZ\r\n",
    "Content-Encoding: gzip\r\nContent-Length: 5": b"plain",
}


def test_a_client_that_hangs_up_or_stammers_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.05)

    async def test() -> None:
        async with gateway(tmp_path, "a", "b", "c") as served:
            for number, stream in enumerate((False, True)):
                served.hold.clear()
                asked = asyncio.create_task(served.chat(user(stream), stream=stream))
                while len(served.asked) <= number:
                    await asyncio.sleep(0.01)
                asked.cancel()
                await asyncio.sleep(0.2)
                served.hold.set()
            host, port = served.url.removeprefix("http://").split(":")
            for headers, body in MALFORMED.items():
                _, writer = await asyncio.open_connection(host, int(port))
                head = f"Host: x\r\nx-api-key: {served.session.key}\r\n{headers}\r\n\r\n"
                writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + body)
                await asyncio.sleep(0.1)
                writer.close()
            assert (await served.chat(user("last")))[0] == 200
            assert len(served.session.tree.paths()[1]) == 1

    run(test)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert "Traceback" not in caplog.text
    assert caplog.text.count("an agent's request is malformed: ") == 2
