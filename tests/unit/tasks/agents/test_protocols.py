"""Anthropic's messages and OpenAI's responses on the wire: what their clients get, what
is refused, errors in their words.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from megarl.tasks.agents import bounds
from megarl.tasks.agents.anthropic_messages import AnthropicMessages
from megarl.tasks.agents.bounds import RequestBounds
from megarl.tasks.agents.errors import WireError
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, ToolCall
from tests.unit.tasks.agents.serving import ADD, USER, Served, called, gateway, run

SAID = "<think>Hm.\n</think>\n\nLook." + called(a=1)
BOUNDS = RequestBounds(prompt_tokens=4000)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CHAT = "chat/completions"
TOOLS: dict[str, list[Any]] = {
    "messages": [{"name": "add", "input_schema": SCHEMA}],
    "responses": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    CHAT: [ADD],
}
ASKED: dict[str, dict[str, Any]] = {
    "messages": {"messages": USER, "max_tokens": 500},
    "responses": {"input": USER},
    CHAT: {"messages": USER},
}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named as its type."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def ask(served: Served, protocol: str, **more: Any) -> tuple[int, Any]:
    return await served.post(
        protocol, {"model": "policy", **ASKED[protocol], "tools": TOOLS[protocol], **more}
    )


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_gets_blocks_and_its_results_go_on(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with gateway(tmp_path, SAID, "Three.") as served:
            key = served.session.key
            async with anthropic.AsyncAnthropic(
                base_url=f"{served.url}/s/{key}", api_key="none", max_retries=0
            ) as api:
                messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "u"}]}]
                asked: dict[str, Any] = {
                    "model": "policy",
                    "max_tokens": 500,
                    "tools": TOOLS["messages"],
                    "system": "s",
                }
                counted = await api.messages.count_tokens(
                    model="policy", messages=messages, system="s", tools=asked["tools"]
                )
                for _ in range(2):
                    if stream:
                        async with api.messages.stream(messages=messages, **asked) as events:
                            said = await events.get_final_message()
                    else:
                        said = await api.messages.create(messages=messages, **asked)
                    messages.append({"role": "assistant", "content": said.content})
                    results = [
                        {
                            "type": "tool_result",
                            "tool_use_id": b.id,
                            "content": [{"type": "text", "text": "3"}],
                        }
                        for b in said.content
                        if b.type == "tool_use"
                    ]
                    messages.append(
                        {"role": "user", "content": [*results, {"type": "text", "text": "well?"}]}
                    )
                    if len(served.asked) == 1:
                        assert [b.type for b in said.content] == ["thinking", "text", "tool_use"]
                        assert said.content[2].input == {"a": 1}  # type: ignore[union-attr]
                        assert said.stop_reason == "tool_use"
                        assert (
                            said.usage.input_tokens == counted.input_tokens == len(served.asked[0])
                        )
            assert said.content[0].text == "Three."  # type: ignore[union-attr]
            assert said.stop_reason == "end_turn"
            assert len(served.session.tree.paths()[1]) == 1
            assert "<tool_response>\n3\n</tool_response>" in served.sent()
            assert "user\nwell?" in served.sent()

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_gets_items_and_their_results_go_on(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with gateway(tmp_path, SAID, "Three.") as served:
            base = f"{served.url}/v1"
            key = served.session.key
            async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as api:
                items: list[Any] = [
                    {"role": "user", "content": [{"type": "input_text", "text": "u"}]}
                ]
                asked: dict[str, Any] = {
                    "model": "policy",
                    "instructions": "s",
                    "tools": TOOLS["responses"],
                }
                for _ in range(2):
                    if stream:
                        async with api.responses.stream(input=items, **asked) as events:
                            async for _event in events:
                                pass
                            said = await events.get_final_response()
                    else:
                        said = await api.responses.create(input=items, **asked)
                    items += said.output
                    for item in said.output:
                        if item.type == "function_call":
                            assert json.loads(item.arguments) == {"a": 1}
                            items.append(
                                {
                                    "type": "function_call_output",
                                    "call_id": item.call_id,
                                    "output": "3",
                                }
                            )
                    if len(served.asked) == 1:
                        assert [item.type for item in said.output] == [
                            "reasoning",
                            "message",
                            "function_call",
                        ]
                        assert said.usage is not None
                        assert said.usage.input_tokens == len(served.asked[0])
            assert (said.output_text, said.status) == ("Three.", "completed")
            assert len(served.session.tree.paths()[1]) == 1

    run(test)


def test_items_that_are_named_by_their_ids_are_this_sessions_answers(tmp_path: Path) -> None:
    """As clients name them that think the provider has stored them."""

    async def test() -> None:
        async with (
            gateway(tmp_path, SAID, "Three.", "other") as served,
            served.another() as foreign,
        ):
            _, first = await ask(served, "responses")
            assert [item["type"] for item in first["output"]] == [
                "reasoning",
                "message",
                "function_call",
            ]
            named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
            result = {
                "type": "function_call_output",
                "call_id": first["output"][2]["call_id"],
                "output": "3",
            }
            assert (await ask(served, "responses", input=[*USER, *named, result]))[0] == 200
            assert len(served.session.tree.paths()[1]) == 1
            body = {"model": "policy", "input": [*USER, *named, result]}
            status, told = await served.post("responses", body, foreign.key)
            assert (status, told["error"]["message"][:36]) == (
                400,
                "input[1]: no answer of this session ",
            )

    run(test)


def test_the_order_of_events(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path, SAID, SAID, "cut…") as served:
            _, text = await ask(served, "messages", stream=True)
            kinds = [event["type"] for event in events_of(text)]
            block = ["content_block_start", "content_block_delta", "content_block_stop"]
            thinking = [block[0], block[1], block[1], block[2]]
            assert kinds == [
                "message_start",
                *thinking,
                *block,
                *block,
                "message_delta",
                "message_stop",
            ]
            _, text = await ask(served, "responses", stream=True)
            events = events_of(text)
            item = [
                "output_item.added",
                "content_part.added",
                "{}.delta",
                "{}.done",
                "content_part.done",
                "output_item.done",
            ]
            call = [kind for kind in item if not kind.startswith("content_part")]
            expected = [kind.format("reasoning_text") for kind in item] + [
                kind.format("output_text") for kind in item
            ]
            expected += [kind.format("function_call_arguments") for kind in call]
            kinds = [event["type"].removeprefix("response.") for event in events]
            assert kinds == ["created", "in_progress", *expected, "completed"]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            _, cut = await ask(served, "responses")
            assert (cut["status"], cut["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )

    run(test)


@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_a_stream_whose_session_ends_ends_with_an_error_event(
    protocol: str, tmp_path: Path
) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            served.hold.clear()
            asked = asyncio.create_task(ask(served, protocol, stream=True))
            while not served.asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            served.session.end("its time is up", limited=True)
            status, text = await asked
            (event,) = events_of(text)
            assert (status, event["type"]) == (200, "error")
            assert (event.get("error") or event)["message"] == "the session is over: its time is up"

    run(test)


REFUSED: dict[str, dict[str, Any]] = {
    "messages": {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "add"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "output_format": {"type": "json_schema"},
        "mcp_servers": [{"url": "x"}],
        "max_tokens": 0,
        "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}],
    },
    "responses": {
        "previous_response_id": "resp_1",
        "conversation": "c",
        "background": True,
        "text": {"format": {"type": "json_object"}},
        "tools": [{"type": "file_search"}],
        "tool_choice": {"type": "function", "name": "add"},
        "top_logprobs": 2,
        "input": [*USER, {"type": "item_reference", "id": "msg_0"}],
    },
}
IGNORED: dict[str, dict[str, Any]] = {
    "messages": {
        "temperature": 0.2,
        "top_k": 5,
        "tool_choice": {"type": "any"},
        "metadata": {},
        "thinking": {"type": "adaptive"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "context_management": {"edits": []},
    },
    "responses": {
        "temperature": 0.2,
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high"},
        "truncation": "auto",
        "text": {"verbosity": "low"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
    },
}


@pytest.mark.parametrize("protocol", REFUSED)
def test_fields_are_ignored_or_refused_by_name(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            for field, value in REFUSED[protocol].items():
                status, body = await ask(served, protocol, **{field: value})
                assert status == 400, field
                assert body["error"]["message"].startswith(field), body
                assert body["error"]["type"] == "invalid_request_error"
            assert not served.asked
            assert (await ask(served, protocol, **IGNORED[protocol]))[0] == 200

    run(test)


IN_WORDS = f"Answer with JSON that has this schema and nothing else:\n{json.dumps(SCHEMA)}"
CALL = "Call the tool add."
OBJECT = "Answer with a JSON object and nothing else."
FORMS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_object"}}, OBJECT),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        IN_WORDS,
    ),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, CALL),
    ("responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, IN_WORDS),
    ("responses", {"tool_choice": {"type": "function", "name": "add"}}, CALL),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        IN_WORDS,
    ),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, CALL),
]


@pytest.mark.parametrize(("protocol", "demand", "words"), FORMS)
def test_a_form_may_be_asked_for_in_words(
    protocol: str, demand: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """What is sampled stays what the policy says; without `ask`, the demand is
    refused.
    """

    async def test() -> None:
        async with gateway(tmp_path, "so", forms="ask") as served:
            status, _ = await ask(served, protocol, **demand)
            assert status == 200
            assert f"{words}<|im_end|>" in served.sent()
            assert served.session.rollout().text == "so"
        async with gateway(tmp_path) as served:
            status, body = await ask(served, protocol, **demand)
            assert status == 400
            assert "set agent.forms=ask" in body["error"]["message"]

    run(test)


def test_errors_are_in_each_providers_words(tmp_path: Path) -> None:
    """Agents summarise when they read these."""

    async def test() -> None:
        async with gateway(tmp_path, "a") as served:
            long = [{"role": "user", "content": "x" * 5000}]
            status, body = await ask(served, "messages", messages=long)
            assert (status, body["type"], body["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            )
            assert body["error"]["message"].startswith("prompt is too long: 5")
            assert body["error"]["message"].endswith("tokens > 3992 maximum")
            status, body = await ask(served, "responses", input=long)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert "exceeds the context window of this model" in body["error"]["message"]
            for kind, model, key in (
                ("authentication_error", "policy", "foreign"),
                ("not_found_error", "opus", None),
            ):
                asked = {"model": model, **ASKED["messages"]}
                status, body = await served.post("messages", asked, key)
                assert body["error"]["type"] == kind
            assert (
                await served.post(
                    "messages/count_tokens", {"model": "policy", "messages": USER}, "foreign"
                )
            )[0] == 401

    run(test)


def test_what_stops_an_answer_of_anthropics(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(tmp_path, "one, two; three", "cut…") as served:
            _, body = await ask(
                served, "messages", stop_sequences=["nowhere", ";", "; three", ", two;"]
            )
            assert body["content"] == [{"type": "text", "text": "one"}]
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", ", two;")
            _, body = await ask(served, "messages", max_tokens=3)
            assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)

    run(test)


def test_results_calls_and_words_of_one_message_are_told_apart(tmp_path: Path) -> None:
    """System blocks of Claude Code change with each request; parts of a message are
    joined.
    """

    async def test() -> None:
        async with gateway(tmp_path, "a", "b", "c") as served:
            texts = ["x-anthropic-billing-header: cc_version=1; cch=", "One.", "Two."]
            for n in range(2):
                system = [
                    {"type": "text", "text": f"{text}{n}" if "cch" in text else text}
                    for text in texts
                ]
                said = [
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
                    {"role": "user", "content": "on"},
                ]
                assert (await ask(served, "messages", system=system, messages=USER + said * n))[
                    0
                ] == 200
            assert "One.\n\nTwo." in served.sent()
            assert "billing" not in served.sent()
            assert len(served.session.tree.paths()[1]) == 1, (
                "the billing block is no part of the conversation"
            )

    run(test)


def asked_anthropics(known: ReadMessages, *messages: str) -> AgentRequest:
    """Read a request whose messages are these texts of JSON."""
    protocol = AnthropicMessages()
    body = f'{{"model": "policy", "max_tokens": 9, "messages": [{", ".join(messages)}]}}'
    return protocol.request(protocol.parse(body.encode()), known)[1]


def called_with(value: str) -> str:
    block = f'{{"type": "tool_use", "id": "c", "name": "add", "input": {{"a": {value}}}}}'
    return f'{{"role": "assistant", "content": [{block}]}}'


def test_a_message_is_read_once_a_session_and_told_apart_by_its_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user = '{"role": "user", "content": "u"}'
    calls = [called_with(value) for value in ("1", "1.0", "true")]
    known = ReadMessages(BOUNDS)
    read = [asked_anthropics(known, user, call, user).messages for call in (*calls, *calls)]
    assert all(before[1] is after[1] for before, after in zip(read[:3], read[3:], strict=True))
    assert all(each[0] is each[2] is read[0][0] for each in read)
    one, real, true = (each[1].key for each in read[:3])
    assert one == real != true
    assert read[:3] == [
        asked_anthropics(ReadMessages(BOUNDS), user, call, user).messages for call in calls
    ]
    monkeypatch.setattr(bounds, "SMALLEST_LIMIT", 600)
    small = ReadMessages(RequestBounds(prompt_tokens=9))
    numbers = [str(n % 5) for n in range(9)]
    long = [f'{{"role": "user", "content": "{n}"}}' for n in numbers]
    assert [m.text for m in asked_anthropics(small, *long).messages] == numbers
    assert len(small._messages) < 5, "forgotten, and read again"


NUMBERS = [
    ("1.0", "1", True),
    ("1e3", "1000", True),
    ("-0.0", "0", True),
    ("1E+2", "100.0", True),
    ("0.10", "1e-1", True),
    ("9007199254740993", "9007199254740992", True),
    ("12345678901234567890123", "1.2345678901234568e22", True),
    (r'"caf\u00e9"', '"café"', True),
    ('{"b": 1.0, "a": [2]}', '{"a": [2.0], "b": 1}', True),
    (r'"\/"', '"/"', True),
    ("1", "2", False),
    ("1", "true", False),
    ("0", "false", False),
    ("0", "null", False),
    ("1", '"1"', False),
    ("1", "[1]", False),
    ("1.5", "1", False),
    ("0.1", "0.10000000000000002", False),
    ("1" + "0" * 307, "1" + "0" * 308, False),
    ("[1, 2]", "[2, 1]", False),
    ("[]", "{}", False),
    ('""', "null", False),
]


@pytest.mark.parametrize(("one", "other", "same"), NUMBERS)
def test_arguments_are_compared_as_javascript_reads_them(one: str, other: str, same: bool) -> None:
    """It has one kind of numbers, doubles, and writes 1.0 as 1."""
    known = ReadMessages(BOUNDS)
    keys = [
        asked_anthropics(known, called_with(value), '{"role": "user", "content": "u"}')
        .messages[0]
        .key
        for value in (one, other)
    ]
    assert (keys[0] == keys[1]) == same


def test_numbers_that_no_double_can_hold_equal_themselves() -> None:
    values = ["1" + "0" * 400, "1" + "0" * 401, "1" + "0" * 400]
    one, other, again = (
        CanonicalMessage("assistant", calls=(ToolCall("", "f", {"a": int(v)}),)).key for v in values
    )
    assert one == again != other


def test_a_message_of_another_type_is_named_by_its_place() -> None:
    known = ReadMessages(BOUNDS)
    for _ in range(2):  # what was refused is not known
        with pytest.raises(
            WireError, match=r"Expected `str`, got `int` - at `\$\.messages\[1\]\.role`"
        ):
            asked_anthropics(
                known, '{"role": "user", "content": "u"}', '{"role": 3, "content": "u"}'
            )
        with pytest.raises(WireError, match=r"messages\[1\]\.role: 'cat' is not one of"):
            asked_anthropics(
                known, '{"role": "user", "content": "u"}', '{"role": "cat", "content": "u"}'
            )
