"""How many rollouts a teacher gets at once, and which endpoints are none."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.controller.teacher import TeacherEndpoint, check_endpoint
from megarl.core.recipe import Recipe, from_tree
from megarl.run.process import free_ports
from megarl.tasks.data import arithmetic_models
from tests import make

KEY = "let-me-in"


def answer(tokens: list[int], texts: Callable[[int], str | None] = lambda token: None) -> Any:
    scores: list[Any] = [[-1.0, token, texts(token)] for token in tokens]
    scores[0][0] = None
    return {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": scores}}


@contextmanager
def endpoint(generate: Any, info: Any = None) -> Iterator[str]:
    """A server in a thread: `generate` answers /generate, and `info` is /model_info."""

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response(info or {})

    (port,) = free_ports(1)
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/model_info", model_info)
    runner = web.AppRunner(app)
    ready = threading.Event()

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


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
        body = await request.json()
        await asyncio.sleep(0.2)
        at_once -= 1
        return web.json_response(answer(body["input_ids"][body["logprob_start_len"] :]))

    async def run(url: str) -> list[np.ndarray]:
        length: dict[str, Any] = {
            "prompt_tokens": 1000,
            "thinking_tokens": [1, thinking],
            "answer_tokens": 1000,
        }
        teacher = TeacherEndpoint(from_tree({"length": length, "teacher": {"url": url}}))
        segment = make.segment([5, 6], logprob=0.0)
        prompt = np.array([3, 4], np.int32)
        try:
            return await asyncio.gather(*(teacher.logprobs(prompt, [segment]) for _ in range(8)))
        finally:
            await teacher.close()

    with endpoint(score) as url:
        assert [each.tolist() for each in asyncio.run(run(url))] == [[-1.0, -1.0]] * 8
    assert max(seen) == most


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("policy")
    arithmetic_models.character_tokenizer().save_pretrained(folder)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "model_type": "llama"}))
    return load_tokenizer(folder)


def recipe_of(policy: Tokenizer, url: str, **teacher: str) -> Recipe:
    return from_tree(
        {
            "model": {"path": str(policy.path)},
            "teacher": {"url": url, "weight": 1.0, **teacher},
            "batch": {"zero_variance": "keep"},
        }
    )


def replying(policy: Tokenizer, texts: Callable[[int], str | None]) -> Any:
    async def score(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({}, status=401)
        return web.json_response(answer((await request.json())["input_ids"], texts))

    return score


def text_of(policy: Tokenizer, token: int) -> str:
    return policy.decode(np.array([token], np.int32))


def test_an_endpoint_with_the_policys_tokens_is_a_teacher(
    policy: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    key = {"api_key": "env:TEACHER_KEY"}
    with endpoint(replying(policy, lambda token: text_of(policy, token))) as url:
        check_endpoint(recipe_of(policy, url, **key))
    info = {"tokenizer_path": str(policy.path)}
    with endpoint(replying(policy, lambda token: None), info) as url:
        check_endpoint(recipe_of(policy, url, **key))
        with pytest.raises(MegarlError, match=r"status 401; is teacher.api_key right"):
            check_endpoint(recipe_of(policy, url))


def test_an_endpoint_with_other_tokens_is_refused_by_the_first(
    policy: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    key = {"api_key": "env:TEACHER_KEY"}
    said = r"teacher.url: its tokens are not those of model.path: \d+ is .* for the policy"
    with (
        endpoint(replying(policy, lambda token: "other")) as url,
        pytest.raises(MegarlError, match=said),
    ):
        check_endpoint(recipe_of(policy, url, **key))
    for file in Path(policy.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"+"', '"@"'))
    with (
        endpoint(replying(policy, lambda token: None), {"model_path": str(tmp_path)}) as url,
        pytest.raises(MegarlError, match=r"is '.' for the (policy|teacher) .* such differences"),
    ):
        check_endpoint(recipe_of(policy, url, **key))


def test_what_is_no_sglang_server_is_refused(policy: Tokenizer) -> None:
    async def other(_: web.Request) -> web.Response:
        return web.json_response({"text": "hello"})

    with endpoint(other) as url, pytest.raises(MegarlError, match="does not return log-probs"):
        check_endpoint(recipe_of(policy, url))
    (port,) = free_ports(1)
    with pytest.raises(
        MegarlError, match=r"teacher.url: .* does not answer .*megarl serve --model"
    ):
        check_endpoint(recipe_of(policy, f"http://127.0.0.1:{port}"))
