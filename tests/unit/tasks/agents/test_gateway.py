"""The gateway on the wire: what OpenAI's client gets, what is refused, and what an
attacker with or without a key can do.
"""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.types import int32, paths_of
from megarl.tasks.agents import bounds
from megarl.tasks.agents import gateway as module
from megarl.tasks.agents.wire import with_whole_characters
from tests.unit.tasks.agents.serving import ADD, USER, Served, called, gateway, run
from tests.unit.tasks.agents.templates import FAMILIES

TOOLS: Any = [ADD]
WORDS = "<think>Hm.\n</think>\n\nLet me look." + called(a=1, b=2) + called(a=3)


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=served.session.key, max_retries=0
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; `run` has the limit."""
    while not condition():
        await asyncio.sleep(0.01)


def waiting(served: Served) -> int:
    """Return how many clients wait for an answer."""
    turns = itertools.chain(*served.session._turns.values())
    return sum(is_open() for turn in turns if not turn.done.done() for is_open in turn.clients)


async def left(served: Served, client: asyncio.Task[Any], asked: int) -> None:
    """End the client once the policy has been asked so many times, as the client gives
    up, and wait until that is known.
    """
    await until(lambda: len(served.asked) == asked)
    client.cancel()
    await until(lambda: waiting(served) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_two_turns_with_openais_client_are_one_path(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with gateway(tmp_path, WORDS, "Three.") as served, client(served) as api:
            messages: list[Any] = [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
            ]
            if stream:
                async with api.chat.completions.stream(
                    model="policy", messages=messages, tools=TOOLS
                ) as events:
                    async for _ in events:
                        pass
                    message: Any = (await events.get_final_completion()).choices[0].message
            else:
                completion = await api.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS
                )
                message = completion.choices[0].message
                assert completion.choices[0].finish_reason == "tool_calls"
                assert completion.usage is not None
                assert completion.usage.prompt_tokens == len(served.asked[0])
            assert message.content == "\n\nLet me look.".strip("\n")
            assert message.tool_calls is not None
            calls = [json.loads(c.function.arguments) for c in message.tool_calls]
            assert calls == [{"a": 1, "b": 2}, {"a": 3}]
            results: list[Any] = [
                {"role": "tool", "tool_call_id": c.id, "content": "3"} for c in message.tool_calls
            ]
            said: Any = message.model_dump(exclude_none=True, exclude={"parsed"})
            answer = await api.chat.completions.create(
                model="policy", messages=[*messages, said, *results], tools=TOOLS
            )
            assert answer.choices[0].message.content == "Three."
            assert served.sent().count("Let me look.") == 1
            segments, paths, _ = served.session.tree.paths()
            (path,) = paths_of(segments, paths, int32(()))
            assert len(paths) == 1
            text = served.tokenizer.decode(path.tokens)
            assert WORDS + "<|im_end|>\n<|im_start|>user\n<tool_response>\n3" in text, (
                "as sampled, thinking and blanks too"
            )
            assert (
                served.tokenizer.decode(path.tokens[path.trained])
                == WORDS + "<|im_end|>Three.<|im_end|>"
            )

    run(test)


GLM = "\n<think>Hm.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
OSS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
OSS_CALL = (
    OSS + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("GLM-4.5", (GLM, "\n<think></think>\nThree.<|user|>", "Bye.<|endoftext|>")),
        (
            "gpt-oss",
            (OSS_CALL, OSS + "<|channel|>final<|message|>Three.<|return|>", "Bye.<|return|>"),
        ),
    ],
)
def test_models_that_end_a_turn_in_several_ways_write_one_path(
    family: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    async def test() -> None:
        async with gateway(tmp_path, *said, family=family) as served:
            messages: list[Any] = [{"role": "user", "content": "u"}]
            for role in ("tool", "user", ""):
                _, reply = await served.chat(messages, tools=TOOLS)
                message = reply["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": 1}] * (
                    role == "tool"
                )
                messages += [
                    message,
                    {"role": role, "content": "3", "tool_call_id": calls[0]["id"] if calls else ""},
                ]
            segments, paths, _ = served.session.tree.paths()
            (path,) = paths_of(segments, paths, int32(()))
            assert served.tokenizer.decode(path.tokens[path.trained]) == "".join(said)

    run(test)


REFUSED = {
    "n": 2,
    "response_format": {"type": "json_object"},
    "logit_bias": {"1": 1},
    "presence_penalty": 0.5,
    "logprobs": True,
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "max_tokens": 0,
    "tools": [{"type": "web_search"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
}
IGNORED = {
    "temperature": 0.2,
    "top_p": 0.5,
    "tool_choice": "required",
    "parallel_tool_calls": True,
    "user": "x",
    "seed": 1,
    "store": True,
    "metadata": {"a": "b"},
    "reasoning_effort": "high",
    "n": 1,
    "presence_penalty": 0,
    "brand_new": [1],
    "response_format": {"type": "text"},
}


def test_fields_are_honoured_ignored_or_refused_by_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "a", "b", "stop here, not there") as served:
            for field, value in REFUSED.items():
                status, body = await served.chat(
                    **{"tools": TOOLS, "messages": USER} | {field: value}
                )
                assert status == 400, field
                assert field.removesuffix("s") in body["error"]["message"]
                assert body["error"]["type"] == "invalid_request_error"
            assert not served.asked
            assert (await served.chat(**IGNORED))[0] == 200
            assert (await served.chat(max_tokens=7))[0] == 200
            assert served.limits == [2000, 7]
            _, body = await served.chat(stop=["nowhere", ", not"])
            assert body["choices"][0]["message"]["content"] == "stop here"
            assert body["choices"][0]["finish_reason"] == "stop"
            text = served.tokenizer.decode(served.session.tree.nodes[-1].sampled)
            assert text == "stop here, not", "up to the token that completes the stop text"
            assert served.session.rollout().text == "stop here", (
                "what is graded is what the agent got"
            )
            for messages in (
                [],
                [*USER, {"role": "assistant", "content": "so"}],
                [{"role": "cat", "content": "?"}],
                "?",
            ):
                assert (await served.chat(messages))[0] == 400
            status, body = await served.post("chat/completions", b"{")
            assert (status, "not JSON" in body["error"]["message"]) == (400, True)
            assert (await served.post("chat/completions", b"[" * 100_000))[0] == 400
            assert (await served.chat(model="gpt-5"))[0] == 404

    run(test)


DROPPED: list[tuple[dict[str, Any], int]] = [
    ({"content": None}, 1),
    ({"content": "", "reasoning_content": None}, 1),
    ({"content": " \n"}, 1),
    ({"content": "Edited."}, 3),
    ({"content": None, "tool_calls": "other ids"}, 3),
    ({"content": None, "tool_calls": "edited"}, 3),
    ({"content": None, "tool_calls": "one of two"}, 3),
    ({"tool_calls": "other ids"}, 1),
]


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize(("changed", "paths"), DROPPED)
def test_calls_with_our_ids_name_an_answer_whose_text_was_dropped(
    changed: dict[str, Any], paths: int, history: str, tmp_path: Path
) -> None:
    """Three turns, so that the dropped text is in the middle of the
    conversation, too.
    """

    async def test() -> None:
        said = "Let me look." + called(a=1, b=2) + called(a=3)
        said = said.replace(":  ", ": ")  # as the template writes it
        async with gateway(tmp_path, said, said, "Three.", history=history) as served:
            messages: list[Any] = [*USER]
            for _ in range(3):
                message = (await served.chat(messages, tools=TOOLS))[1]["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                results = [
                    {"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in calls
                ]
                returned = message | changed
                if changed.get("tool_calls") == "other ids":
                    returned["tool_calls"] = [call | {"id": f"x{call['id']}"} for call in calls]
                    results = [
                        result | {"tool_call_id": f"x{result['tool_call_id']}"}
                        for result in results
                    ]
                elif changed.get("tool_calls") == "edited":
                    function = {"name": "add", "arguments": '{"a": 9}'}
                    returned["tool_calls"] = [call | {"function": function} for call in calls]
                elif changed.get("tool_calls") == "one of two":
                    returned["tool_calls"] = calls[:1]
                    results = results[:1]
                messages += [returned, *results]
            assert len(served.session.tree.paths()[1]) == paths
            assert served.sent().count("Let me look.") == (2 if paths == 1 else 0), (
                "the policy sees an edit"
            )

    run(test)


NO_REWARDS = {
    '{"reward": NaN}': "got nan",
    '{"reward": Infinity}': "got inf",
    '{"reward": -Infinity}': "got -inf",
    '{"reward": 1e400}': "got inf",
    '{"reward": 1%s}' % ("0" * 400): "got 1000",
    '{"reward": 1%s}' % ("0" * 5000): "not JSON",
    '{"reward": "1.0"}': "got '1.0'",
    '{"reward": null}': "got None",
    "{}": "got None",
    '{"reward": {"reward": 1}}': "got {",
    '{"reward": [1]}': "got [1]",
    "[1]": "got None",
    "1.0": "got None",
    "": "not JSON",
    '{"reward": 1': "not JSON",
    "[" * 50_000: "not JSON",
}


def test_what_is_no_reward_is_refused_and_noted_until_one_comes(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path) as served:
            for text, named in NO_REWARDS.items():
                served.session.refused = ""
                status, body = await served.post("reward", text.encode())
                assert status == 400, text[:40]
                assert body["error"]["message"].startswith("reward: ")
                assert named in body["error"]["message"]
                assert served.session.refused == body["error"]["message"]
            assert served.session.reward is None
            status, body = await served.post(
                "reward", b'{"reward": 1, "x": "%s"}' % (b"x" * (1 << 16))
            )
            assert (status, "longer than 65,536 bytes" in served.session.refused) == (413, True)
            for value, reward in ((False, -1.0), (True, 1.0), (3, 3.0), (-1e300, -1e300)):
                assert (await served.post("reward", {"reward": value})) == (200, {"reward": reward})
                assert (served.session.reward, served.session.refused) == (reward, "")
            assert (await served.post("reward", b'{"reward": NaN}'))[0] == 400
            assert served.session.refused, "the last one counts"

    run(test)


SURROGATES = [
    (r"cut \ud83d", "cut \ufffd"),
    (r"\uD83Dx", "\ufffdx"),
    (r"\ude00", "\ufffd"),
    (r"\ude00\ud83d", "\ufffd\ufffd"),
    (r"\ud83d\ude00", "\U0001f600"),
    (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    (r"\\ud83d", r"\ud83d"),
    (r"\n\u00e9", "\né"),
]


def test_half_a_character_is_replaced_as_no_tokenizer_knows_it(tmp_path: Path) -> None:
    for written, read in SURROGATES:
        body = (
            b'{"model": "policy", "messages": [{"role": "user", "content": "%s"}]}'
            % written.encode()
        )
        parsed = json.loads(with_whole_characters(body))
        assert parsed["messages"][0]["content"] == read, written

    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            body = rb'{"model": "policy", "messages": [{"role": "user", "content": "cut \ud83d"}]}'
            assert (await served.post("chat/completions", body))[0] == 200
            assert "cut \ufffd" in served.sent()

    run(test)


def test_what_is_wrong_with_a_request_is_named(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    called_with = {"id": "c", "function": {"name": "add", "arguments": deep}}
    nested = [*USER, {"role": "assistant", "tool_calls": [called_with]}, *USER]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "function"}]}, "tools[0]: the function has no name"),
        (
            {"tools": [ADD, {"type": "function", "function": {"name": ""}}]},
            "tools[1]: the function has no name",
        ),
        (
            {"tools": [ADD, {"type": "web_search"}]},
            "tools[1]: web_search: no provider here can run it",
        ),
        ({"n": 2}, "n: a request has one answer; for several, send it several times at once"),
        ({"stream": "yes"}, "Expected `bool | null`, got `str` - at `$.stream`"),
    ]

    async def test() -> None:
        async with gateway(tmp_path, "a", roomy=True) as served:
            for fields, named in wrong:
                status, body = await served.chat(**{"messages": USER} | fields)
                assert (status, body["error"]["message"].startswith(named)) == (400, True), body
            for path in ("embeddings", "completions", "chat/completion"):
                status, body = await served.post(path, {})
                assert status == 404
                assert body["error"]["message"].startswith(
                    f"there is no POST /v1/{path} here; agents POST to /v1/chat"
                )
            assert (await served.chat(nested))[0] == 200, "what JSON can hold is read"
            tools = b'{"model": "policy", "messages": [], "tools": %s}' % (
                b"[" * 5000 + b"]" * 5000
            )
            assert "nested too deeply" in str(await served.post("chat/completions", tools))
            async with served.http.put(f"{served.url}/v1/messages") as reply:
                assert (reply.status, "there is no PUT" in await reply.text()) == (405, True)
            assert len(served.asked) == 1

    run(test)


def test_the_way_to_several_answers_that_the_error_names_trains_them_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path, *"abcd") as served:
            served.hold.clear()
            asked = [asyncio.create_task(served.chat()) for _ in range(3)]
            await until(lambda: len(served.asked) == 3)
            served.hold.set()
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
            assert len(served.session.tree.trained()) == 3
            assert (await served.chat())[0] == 200
            assert len(served.session.tree.trained()) == 1, "one after another: the last alone"

    run(test)


def test_thinking_that_a_limit_cut_is_no_answer_and_an_answer_without_words_is_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents take a call in it for one to make; those that strip what they get fail at
    null.
    """
    opens = FAMILIES["qwen"] + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
    monkeypatch.setitem(FAMILIES, "opens", opens)
    thought = "Hm. I may" + called(a=1)
    for family, said, thinks in (
        ("qwen", f"<think>{thought}…", True),
        ("opens", f"{thought}…", True),
        ("qwen", f"{thought}…", False),
        ("opens", thought, False),
    ):

        async def test(family: str = family, said: str = said, thinks: bool = thinks) -> None:
            async with gateway(tmp_path / family, said, "", family=family) as served:
                choice = (await served.chat(tools=TOOLS))[1]["choices"][0]
                message = choice["message"]
                if thinks:
                    assert (message["content"], choice["finish_reason"]) == ("", "length")
                    assert served.session.rollout().truncated
                    assert message["reasoning_content"] == thought
                assert ("tool_calls" in message) == (not thinks)
                assert (await served.chat(USER * 2))[1]["choices"][0]["message"]["content"] == ""

        run(test)


def test_a_full_context_and_a_session_that_is_over_are_400(tmp_path: Path) -> None:
    """So that agents summarise on the one, and give up on the other: clients repeat 429
    and 5xx.
    """

    async def test() -> None:
        async with gateway(tmp_path, "a", "b", "c", requests=5) as served:
            status, body = await served.chat([{"role": "user", "content": "x" * 5000}])
            assert status == 400
            assert body["error"]["code"] == "context_length_exceeded"
            assert "maximum context length is 3992 tokens" in body["error"]["message"]
            assert (await served.chat([{"role": "user", "content": "x" * 3900}]))[0] == 200
            assert served.limits[-1] == 4000 - len(served.asked[-1]), (
                "no answer grows beyond the context"
            )
            fits = "x" * (3900 + 4000 - KEPT_FROM_INPUT - 1 - len(served.asked[-1]))
            status, body = await served.chat([{"role": "user", "content": f"{fits}x"}])
            assert (status, body["error"]["code"]) == (
                400,
                "context_length_exceeded",
            ), "servers refuse such an input"
            assert (
                "3992 tokens. However, your messages resulted in 3993 tokens"
                in body["error"]["message"]
            )
            for text in ("0", fits):
                assert (await served.chat([{"role": "user", "content": text}]))[0] == 200
            assert served.limits[-1] == KEPT_FROM_INPUT + 1
            status, body = await served.chat([{"role": "user", "content": "2"}])
            assert (status, body["error"]["code"]) == (400, "session_over")
            assert "agent.requests=5" in body["error"]["message"]
            made = served.session.rollout()
            assert (made.finish, made.text, made.verdict) == (
                "length",
                "c",
                None,
            ), "what there is will be graded"
            assert not made.truncated, "a limit ended the session, but not its last message"

    run(test)


@pytest.mark.parametrize(
    ("limit", "said"),
    [({"paths": 2}, "agent.paths=2"), ({"trained_tokens": 6}, "agent.trained_tokens=6")],
)
def test_limits_on_paths_and_tokens(tmp_path: Path, limit: dict[str, Any], said: str) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "abc", "abc", "abc", **limit) as served:
            replies = [await served.chat([{"role": "user", "content": f"{n}"}]) for n in range(3)]
            assert [status for status, _ in replies] == [200, 200, 400]
            assert said in replies[2][1]["error"]["message"]
            assert len(served.session.tree.paths()[1]) == 2
            assert sum(len(n.sampled) for n in served.session.tree.nodes) <= limit.get(
                "trained_tokens", 100
            )

    run(test)


def test_retries_attach_and_only_what_was_delivered_is_trained(tmp_path: Path) -> None:
    """A client that leaves and comes back gets the same generation; one that does not
    leaves it untrained.
    """

    async def test() -> None:
        async with gateway(tmp_path, "first", "second", "third") as served:
            served.hold.clear()
            await left(served, asyncio.create_task(served.chat()), asked=1)
            again = asyncio.create_task(served.chat())
            await until(lambda: waiting(served) == 1)
            both = asyncio.create_task(
                served.chat()
            )  # the first one waits: a sub-agent of the same words
            await until(lambda: waiting(served) == 2 and len(served.asked) == 2)
            served.hold.set()
            assert (await again)[1]["choices"][0]["message"]["content"] == "first"
            assert (await both)[1]["choices"][0]["message"]["content"] == "second"
            assert len(served.session.tree.paths()[1]) == 2
            body = {"model": "policy", "messages": USER}
            _, marked = await served.post(
                "chat/completions", body, **{"x-stainless-retry-count": "1"}
            )
            assert marked["choices"][0]["message"]["content"] == "second", (
                "marked as a retry, after a whole delivery"
            )
            served.hold.clear()
            stream = asyncio.create_task(
                served.chat([{"role": "user", "content": "v"}], stream=True)
            )
            await left(served, stream, asked=3)
            served.hold.set()
            await until(lambda: served.session.tree.untrained_tokens() > 0)
            await asyncio.sleep(0.1)
            assert len(served.session.tree.nodes) == 3
            assert len(served.session.tree.paths()[1]) == 2, "an abandoned stream is not trained"
            assert served.session.tree.untrained_tokens() == len("third") + 1

    run(test)


def test_long_waits_are_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what OpenAI's client leaves out of the answer. Its time-out is for silence."""
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.05)
    send = module._send
    sent = list[bytes]()

    async def test() -> None:
        async with gateway(tmp_path, "a", "b") as served, client(served) as api:

            async def seen(request: Any, response: Any, data: bytes, last: bool = False) -> None:
                await send(request, response, data, last)
                sent.append(data)
                if len(sent) == 3:
                    served.hold.set()

            monkeypatch.setattr(module, "_send", seen)
            served.hold.clear()
            slow = await api.chat.completions.create(model="policy", messages=USER)
            assert slow.choices[0].message.content == "a"
            assert len(sent) > 3
            sent.clear()
            served.hold.clear()
            chunks: Any = await api.chat.completions.create(
                model="policy", messages=USER, stream=True
            )
            parts = [chunk async for chunk in chunks]
            assert "".join(c.choices[0].delta.content or "" for c in parts) == "b"
            assert len(sent) > 3

    run(test)


def test_a_key_opens_its_session_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            server = served.session
            for key in ("", "x", server.key[:-1], server.key.upper() + "0"):
                for path in (
                    "chat/completions",
                    "messages",
                    "messages/count_tokens",
                    "responses",
                    "reward",
                ):
                    status, body = await served.post(
                        path, {"model": "policy", "messages": USER, "reward": 1}, key
                    )
                    assert status == 401
                    assert (
                        body["error"].get("code") == "invalid_api_key"
                        or body["error"]["type"] == "authentication_error"
                    )
            async with served.http.get(f"{served.url}/v1/models") as reply:
                assert reply.status == 401
            async with served.http.get(f"{served.url}/s/{server.key}/v1/models") as reply:
                assert [m["id"] for m in (await reply.json())["data"]] == ["policy"]
            for path in (
                "/",
                "/v1/files",
                f"/s/{server.key}/../../etc/passwd",
                "/generate",
                "/metrics",
            ):
                async with served.http.get(served.url + path) as reply:
                    assert reply.status in (401, 404, 405)
            request = {"model": "policy", "messages": USER}
            assert (await served.post("chat/completions", request, server.reward_key))[0] == 401
            status, body = await served.post("reward", {"reward": 1}, server.key)
            assert (status, "`reward_key`" in body["error"]["message"]) == (
                401,
                True,
            ), "a program of the policy has this key"
            assert not server.rewards, "nobody else has set its reward"
            assert not served.asked

    run(test)


def test_huge_and_slow_bodies_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LARGEST_BODY", 1 << 20)

    async def raw(served: Served, key: str, body: bytes, size: int) -> bytes:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"Host: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + body)
        said = await reader.read(300)
        writer.close()
        return said

    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            status, body = await served.post("chat/completions", b" " * (2 << 20))
            assert (status, body["error"]["code"]) == (413, "too_large")
            with monkeypatch.context() as patch:
                patch.setattr(module, "BODY_LIMIT_S", 0.3)
                assert b" 408 " in await raw(served, served.session.key, b"{", 1000), (
                    "a body that does not come"
                )
            assert b" 413 " in await raw(served, served.session.key, b"", 10**9), (
                "nothing of it is read"
            )
            assert b" 401 " in await raw(served, "foreign", b"", 10**9), (
                "without a key nothing of the body is read"
            )
            assert (await served.chat())[0] == 200

    run(test)


def test_no_session_sees_what_another_was_told(tmp_path: Path) -> None:
    """The same conversation, ids included, with the key of another session: it is
    rendered whole, and answered there alone.
    """

    async def test() -> None:
        async with (
            gateway(tmp_path, "secret", "again", "other") as served,
            served.another() as foreign,
        ):
            _, first = await served.chat()
            said = [*USER, first["choices"][0]["message"], *USER]
            _, mine = await served.chat(said)
            assert mine["choices"][0]["message"]["content"] == "again"
            _, theirs = await served.post(
                "chat/completions", {"model": "policy", "messages": said}, foreign.key
            )
            assert theirs["choices"][0]["message"]["content"] == "other"
            (node,) = foreign.tree.nodes
            assert node.parent is None
            assert len(served.session.tree.nodes) == 2
            body = {
                "model": "policy",
                "messages": USER,
            }  # what the first session has asked, marked as a retry
            marked = {"x-stainless-retry-count": "1"}
            assert (await served.post("chat/completions", body, foreign.key, **marked))[0] == 400, (
                "it has nothing to say"
            )
            assert (await served.post("reward", {"reward": 1}, foreign.reward_key))[0] == 200
            assert ([reward for _, reward in foreign.rewards], served.session.rewards) == (
                [1.0],
                [],
            )
            assert (await served.chat())[0] == 400, "its policy has nothing to say either"

    run(test)


def test_a_client_that_does_not_read_its_answer_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = module._send
    given_up = asyncio.Event()

    async def watched(*arguments: Any, **how: Any) -> None:
        monkeypatch.setattr(module, "BODY_LIMIT_S", 0.3)  # the question has been read
        try:
            await send(*arguments, **how)
        except ConnectionResetError:
            given_up.set()
            raise

    async def test() -> None:
        async with gateway(tmp_path, "x", "y") as served:
            monkeypatch.setattr(module, "_send", watched)
            monkeypatch.setattr(module, "_written", lambda *_: b"x" * (64 << 20))
            host, port = served.url.removeprefix("http://").split(":")
            body = json.dumps({"model": "policy", "messages": USER})
            head = (
                f"Host: x\r\nx-api-key: {served.session.key}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection(host, int(port), limit=1)
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{body}".encode())
            await given_up.wait()
            assert served.session.tree.nodes[0].delivered < 0
            assert not served.session.tree.paths()[1], "what is not taken is not trained"
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(65 << 20)
            writer.close()
            monkeypatch.undo()
            assert (await served.chat())[0] == 200

    run(test)


def test_a_lost_policy_ends_the_session(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path) as served:  # it has nothing to say: an error
            status, body = await served.chat()
            assert (status, body["error"]["code"]) == (400, "session_over")
            assert isinstance(served.session.failure, IndexError)
            assert (await served.chat())[0] == 400

    run(test)
