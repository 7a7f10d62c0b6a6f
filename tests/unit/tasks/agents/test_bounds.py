"""A request that is too long for the context costs little memory, whatever makes it
long, alone or with others.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.tokenizer import Tokenizer
from megarl.tasks.agents import bounds
from megarl.tasks.agents.bounds import MOST_STOPS, ByteBudget, RequestBounds
from megarl.tasks.agents.errors import ContextFull, WireError
from tests.unit.tasks.agents.serving import ADD, USER, gateway, run
from tests.unit.tasks.agents.templates import rendering_of

LIMIT = 32 * 3992
"""Bytes of a body for the context of tests/unit/tasks/agents/serving.py, without the
smallest limit.
"""
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "add", "arguments": json.dumps({"a": [[]] * 25_000})},
}
LONG: dict[str, Callable[[int], dict[str, Any]]] = {
    "one message": lambda size: {"messages": [{"role": "user", "content": "ab " * (size // 3)}]},
    "names of special tokens": lambda size: {
        "messages": [{"role": "user", "content": "<|im_end|>" * (size // 10)}]
    },
    "messages": lambda size: {"messages": [{"role": "user", "content": "u"}] * (size // 33)},
    "parts": lambda size: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}] * (size // 30)}]
    },
    "tools": lambda size: {"tools": [ADD] * (size // 115)},
    "a tool": lambda size: {
        "tools": [ADD | {"function": {"name": "f", "description": "ab " * (size // 3)}}]
    },
    "arguments": lambda _: {
        "messages": [
            *USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": ""},
        ]
    },
}


def resident_mib(field: str) -> float:
    """Return VmRSS, what is resident now, or VmHWM,
    the most since it was last reset.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


@pytest.mark.parametrize("kind", LONG)
def test_a_body_that_is_too_long_is_refused_before_much_is_tokenised(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just below the limit on its bytes, where it is parsed, and twelve times above,
    where it is not.
    """
    monkeypatch.setattr(bounds, "SMALLEST_LIMIT", 0)
    monkeypatch.setattr("megarl.tasks.agents.rendering.PIECE", 2000)
    encode = Tokenizer.ids
    characters = 0

    def counted(tokenizer: Tokenizer, text: str) -> Any:
        nonlocal characters
        characters += len(text)
        return encode(tokenizer, text)

    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            for size in (LIMIT - 5000, 12 * LIMIT):
                body = json.dumps({"model": "policy", "messages": USER} | LONG[kind](size)).encode()
                Path("/proc/self/clear_refs").write_text("5")
                before = resident_mib("VmRSS")
                status, told = await served.post("chat/completions", body)
                assert (status, told["error"]["code"]) == (400, "context_length_exceeded"), told
                assert resident_mib("VmHWM") - before < 30, "MiB"
            assert characters < 5 * 3992 + 2000
            assert (await served.chat())[0] == 200

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "ids", counted)
        run(test)


def test_what_fits_is_served_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored fields, escapes, many stop texts and white space make a body long, but
    not a prompt.
    """
    monkeypatch.setattr(bounds, "SMALLEST_LIMIT", 0)
    long = {"metadata": {"a": "x" * 100_000}, "stop": [f"s{n}" for n in range(MOST_STOPS)]}
    escaped = [{"role": "user", "content": "é" * 900}]

    async def test() -> None:
        async with gateway(tmp_path, *"abcd") as served:
            assert (await served.chat(**long))[0] == 200
            body = json.dumps({"model": "policy", "messages": escaped}).encode()
            filled = body + b" " * (LIMIT - len(body))
            assert (await served.post("chat/completions", filled))[0] == 200, (
                "as long as a body may be"
            )
            status, told = await served.post("chat/completions", filled + b" ")
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
            status, told = await served.chat(stop=[f"s{n}" for n in range(MOST_STOPS + 1)])
            assert (status, told["error"]["message"]) == (
                400,
                "stop: there are 65 texts; at most 64 are looked for",
            )

    run(test)


def test_a_prompt_that_just_fits_is_never_refused_by_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut into pieces, a text has more tokens."""
    monkeypatch.setattr("megarl.tasks.agents.rendering.PIECE", 10)
    monkeypatch.setattr("megarl.tasks.agents.rendering.CHARACTERS", 0)
    tokenizer, rendering = rendering_of(tmp_path, "qwen")
    text = "the " * 500
    exact = len(tokenizer.ids(text))
    assert len(rendering._tokens(text, exact)) == exact
    with pytest.raises(
        ContextFull, match=rf"maximum context length is {exact // 2} tokens.* tokens or more"
    ):
        rendering._tokens(text, exact // 2)
    with pytest.raises(ContextFull):
        rendering._tokens(text, exact, preceding=exact // 2)


def test_a_long_tail_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.tasks.agents.rendering.PIECE", 1000)

    async def test() -> None:
        async with gateway(tmp_path, *"abc") as served:
            _, told = await served.chat()
            messages = [*USER, told["choices"][0]["message"]]
            status, told = await served.chat(
                [*messages, {"role": "user", "content": "x" * 100_000}]
            )
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
            assert "tokens or more" in told["error"]["message"]
            assert (await served.chat([*messages, {"role": "user", "content": "x" * 100}]))[
                0
            ] == 200
            assert len(served.session.tree.paths()[1]) == 1, "what was refused is no path"

    run(test)


@pytest.mark.parametrize(
    ("prompt_tokens", "body_bytes"), [(100, 1 << 20), (100_000, 3_200_000), (10_000_000, 32 << 20)]
)
def test_bytes_of_a_body_follow_the_context(prompt_tokens: int, body_bytes: int) -> None:
    limits = RequestBounds(prompt_tokens)
    assert limits.body_bytes == body_bytes
    limits.check_bytes(body_bytes)
    limits.check_count(prompt_tokens)
    with pytest.raises(WireError) as refused:
        limits.check_bytes(body_bytes + 1)
    assert refused.value.status == (413 if body_bytes == 32 << 20 else 400)
    with pytest.raises(ContextFull):
        limits.check_count(prompt_tokens + 1)


def test_requests_share_a_budget_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> list[str]:
        budget = ByteBudget(10)
        order: list[str] = []
        go = asyncio.Event()

        async def take(name: str, count: int) -> None:
            async with budget.lend(count):
                order.append(name)
                await go.wait()

        tasks = {
            name: asyncio.create_task(take(name, count))
            for name, count in (("a", 6), ("b", 5), ("c", 4), ("d", 99))
        }
        await asyncio.sleep(0.01)
        assert order == ["a"], "b does not fit, and c waits behind it"
        tasks["b"].cancel()
        await asyncio.sleep(0.01)
        assert order == ["a", "c"]
        monkeypatch.setattr(bounds, "WAIT_LIMIT_S", 0.01)
        with pytest.raises(
            WireError, match=r"other requests were being read and rendered for 0\.01 s"
        ) as late:
            await take("e", 1)
        assert late.value.status == 503
        go.set()
        await asyncio.wait(tasks.values())
        assert budget._free == 10
        return order

    assert run(test) == ["a", "c", "d"], "more than there is takes all of it"


def test_bodies_in_flight_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session may have two of the longest bodies at a time."""
    monkeypatch.setattr(bounds, "SMALLEST_LIMIT", 0)
    most = 0
    read = bounds.RequestBounds.check_bytes

    async def test() -> None:
        nonlocal most
        async with gateway(tmp_path, *"abcdef") as served:
            budget = served.session.budget

            def noted(self: RequestBounds, size: int) -> None:
                nonlocal most
                most = max(most, budget._size - budget._free)
                read(self, size)

            monkeypatch.setattr(RequestBounds, "check_bytes", noted)
            body = json.dumps({"model": "policy", "messages": USER}).encode()
            bodies = [body + b" " * (LIMIT - len(body) - n) for n in range(6)]
            replies = await asyncio.gather(
                *(served.post("chat/completions", each) for each in bodies)
            )
            assert [status for status, _ in replies] == [200] * 6
            assert LIMIT < most <= 2 * LIMIT
            assert budget._free == budget._size

    run(test)


def test_a_request_that_waits_for_tokens_does_not_keep_its_bytes(tmp_path: Path) -> None:
    """It may wait for an hour, until others have written theirs."""

    async def test() -> None:
        async with gateway(tmp_path, "abc", "abc", trained_tokens=5) as served:
            served.hold.clear()
            first = asyncio.create_task(served.chat())
            while not served.asked:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(served.chat([{"role": "user", "content": "second"}]))
            while (
                served.session._requests < 2
                or served.session.budget._free < served.session.budget._size
            ):
                await asyncio.sleep(0.01)
            assert len(served.asked) == 1
            served.hold.set()
            assert [(await each)[0] for each in (first, second)] == [200, 200]

    run(test)


def test_tokens_of_what_is_much_too_long_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path) as served:
            for count, least, most in ((10, 10, 100), (500_000, 3993, 100_000)):
                body = {"model": "policy", "messages": [{"role": "user", "content": "x" * count}]}
                status, told = await served.post("messages/count_tokens", body)
                assert status == 200
                assert least < told["input_tokens"] < most

    run(test)
