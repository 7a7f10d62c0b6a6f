"""A reward service of our own: batches, keys, retries, and what is said when it is
down; the example server.
"""

import asyncio
import logging
import math
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from megarl.core.base.contracts import GraderDown, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Service
from megarl.tasks.graders import remote as module
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.remote import LONGEST_REPLY, Remote

KEY = "sk-do-not-tell-4711"
EXAMPLE = Path(__file__).parents[4] / "examples" / "reward_server.py"


class Stub:
    """Answers each request by the next of `answers`, the last again and again. A number
    of it is a status.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []
        self.headers = []  # type: ignore[var-annotated]

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text=f"{KEY} is wrong")
        return web.json_response(answer(self.requests[-1]) if callable(answer) else answer)


def asked(stub: Any, use: Callable[[Remote], Awaitable[Any]], **settings: Any) -> Any:
    """What `use` gives of a service at which `stub` answers."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/score", stub)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            url = f"http://127.0.0.1:{port}/score?token={KEY}"
            return await use(Remote("taste", Service.model_validate({"url": url, **settings})))
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "RETRIES", 2)


def one(remote: Remote) -> Awaitable[Verdict]:
    return remote.check(Submission("4", "5", "</think>4", "2+3=", "sums", truncated=True))


def lengths(request: Any) -> dict[str, Any]:
    return {"rewards": [float(len(item["answer"])) for item in request["items"]]}


def test_what_is_sent_and_what_comes_back() -> None:
    stub = Stub({"rewards": [0.25], "more": "is ignored"})
    assert asked(stub, one) == Verdict(0.25)
    assert stub.requests == [
        {
            "schema_version": 1,
            "items": [
                {
                    "answer": "4",
                    "expected": "5",
                    "completion": "</think>4",
                    "prompt": "2+3=",
                    "task": "sums",
                    "truncated": True,
                }
            ],
        }
    ]
    assert "Authorization" not in stub.headers[0]


def test_batches_are_full_and_verdicts_go_to_whom_they_belong() -> None:
    async def many(remote: Remote) -> list[Verdict]:
        return await asyncio.gather(*(remote.check(Submission("x" * n, "")) for n in range(70)))

    stub = Stub(lengths)
    assert asked(stub, many) == [Verdict(float(n)) for n in range(70)]
    assert sorted(len(request["items"]) for request in stub.requests) == [6, 32, 32]


def test_one_it_cannot_judge_has_no_verdict_and_the_others_are_judged() -> None:
    """NaN is no JSON, but services in Python write it."""

    async def four(remote: Remote) -> list[Verdict]:
        return await asyncio.gather(*(remote.check(Submission("4", "")) for _ in range(4)))

    *unknown, judged = asked(Stub({"rewards": [None, math.nan, -math.inf, 0.5]}), four)
    assert [(math.isnan(found.score), found.error) for found in unknown] == [
        (True, "the service could not judge it")
    ] * 3
    assert judged == Verdict(0.5)


def test_what_is_cancelled_does_not_harm_the_others() -> None:
    async def two(remote: Remote) -> Verdict:
        first = asyncio.create_task(remote.check(Submission("x", "")))
        second = asyncio.create_task(remote.check(Submission("xx", "")))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asked(Stub(lengths), two) == Verdict(2.0)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_service_is_asked_again(status: int) -> None:
    stub = Stub(status, status, {"rewards": [1.0]})
    assert asked(stub, one) == Verdict(1.0)
    assert len(stub.requests) == 3


@pytest.mark.parametrize(
    ("answer", "words", "requests"),
    [
        (503, r"failed 3 times, the last time with status 503", 3),
        (401, r"answered with status 401; is its key right\?", 1),
        (404, r"answered with status 404$", 1),
        (302, r"answered with status 302$", 1),
        ({"rewards": []}, r"gave 0 rewards for 1 items", 1),
        ({"scores": [1.0]}, r'did not answer with \{"rewards"', 1),
        ({"rewards": ["high"]}, r"did not answer with", 1),
        ({"rewards": [1.0], "why": "x" * LONGEST_REPLY}, r"answered more than 1,048,576 bytes", 1),
    ],
)
def test_a_service_that_is_down(
    answer: Any,
    words: str,
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its key is told nobody."""
    monkeypatch.setenv("TASTE_KEY", KEY)
    stub = Stub(answer)
    with caplog.at_level(logging.DEBUG), pytest.raises(GraderDown, match=words) as error:
        asked(stub, one, api_key="env:TASTE_KEY")
    assert len(stub.requests) == requests
    assert {headers["Authorization"] for headers in stub.headers} == {f"Bearer {KEY}"}
    assert KEY not in str(error.value)
    assert KEY not in caplog.text.replace(
        f"POST /score?token={KEY}", ""
    )  # the stub's own log of what it was asked


def test_a_reply_may_be_long_within_the_limit() -> None:
    assert asked(Stub({"rewards": [1.0], "why": "x" * (LONGEST_REPLY - 100)}), one) == Verdict(1.0)


def test_an_error_that_nobody_foresaw_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(Remote, "_post", fails)
    with pytest.raises(GraderDown, match="failed: RecursionError"):
        asked(Stub(503), one)


def test_a_service_that_is_slow_or_away() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    with pytest.raises(GraderDown, match=r"failed 3 times, the last time with .*Timeout"):
        asked(slow, one, timeout_s=0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = Remote("taste", Service(url=f"http://127.0.0.1:{free.getsockname()[1]}"))
        with pytest.raises(
            GraderDown, match="failed 3 times, the last time with ClientConnectorError"
        ):
            asyncio.run(one(away))  # type: ignore[arg-type]


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    stub = Stub({"rewards": [1.0]})
    asked(stub, one, api_key=f"file:{tmp_path}/key")
    assert stub.headers[0]["Authorization"] == f"Bearer {KEY}"
    monkeypatch.delenv("TASTE_KEY", raising=False)
    with pytest.raises(MegarlError, match=r"^data.services.taste.api_key: TASTE_KEY is not set"):
        Remote("taste", Service(url="http://x", api_key="env:TASTE_KEY"))
    with pytest.raises(
        MegarlError, match=r"^data.services.taste.api_key: .*no-key: .*No such file"
    ):
        Remote("taste", Service(url="http://x", api_key=f"file:{tmp_path}/no-key"))
    (tmp_path / "key").write_text("\n")
    with pytest.raises(MegarlError, match=r"is empty"):
        Remote("taste", Service(url="http://x", api_key=f"file:{tmp_path}/key"))
    (tmp_path / "key").write_text(
        f"{KEY}\nanother\n"
    )  # with it, no request would be sent, nor fail
    with pytest.raises(
        MegarlError, match=r"^data.services.taste.api_key: .*key has white space in it"
    ):
        asked(stub, one, api_key=f"file:{tmp_path}/key")


def test_the_example_server_by_itself_and_before_a_reward_model() -> None:
    """The model is a stub that speaks as SGLang's /classify does: one `embedding` a
    text.
    """

    async def classify(request: web.Request) -> web.Response:
        texts = (await request.json())["text"]
        return web.json_response(
            [{"embedding": [float(len(text))], "meta_info": {}} for text in texts]
        )

    async def run() -> tuple[list[Verdict], list[Verdict], int]:
        app = web.Application()
        app.router.add_post("/classify", classify)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server
        model = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        plain = await started()
        with_model = await started("--classify", model)
        try:
            submissions = [
                Submission("4", "4", "</think>4", "2+2="),
                Submission("5", "4", "</think>5!", "2+2="),
            ]
            found = []
            for _, url in (plain, with_model):
                remote = Remote("example", Service(url=url, api_key="env:REWARD_KEY"))
                found.append(list(await asyncio.gather(*map(remote.check, submissions))))
            async with ClientSession() as session, session.post(plain[1], data=b"{}") as response:
                return found[0], found[1], response.status
        finally:
            for process, _ in (plain, with_model):
                process.terminate()
                await process.wait()
            await runner.cleanup()

    async def started(*words: str) -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLE),
            "--port",
            "0",
            *words,
            stdout=subprocess.PIPE,
            env={"REWARD_KEY": KEY},
        )
        assert process.stdout
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        return process, line.decode().split()[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWARD_KEY", KEY)
        alone, by_model, refused = asyncio.run(asyncio.wait_for(run(), 100))
    assert alone == [Verdict(1.0), Verdict(-1.0)]
    assert by_model == [Verdict(13.0), Verdict(14.0)]
    assert refused == 401
