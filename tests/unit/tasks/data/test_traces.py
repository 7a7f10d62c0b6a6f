"""Traces of a warm start: what is left out, what may come again, how they are looked
at.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl.cli import main
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.tasks.data.arithmetic_models import character_tokenizer
from megarl.tasks.data.chat import load_chat
from megarl.tasks.data.traces import are_traces, load_traces, read_untemplated
from tests import make
from tests.unit.tasks.agents.templates import PUBLISHED, published, tokenizer_of

QUESTION = (
    "What is the sum of the digits of the smallest number that is divisible by nine and eleven?"
)
TURNS = [
    {"role": "user", "content": "12+1="},
    {"role": "assistant", "content": "<think>2+1=3</think>13"},
]
MESSAGES = {"messages": TURNS}
PAIR = {"prompt": "12+1=", "completion": "<think>2+1=3</think>13"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    return make.write_rows(path, rows)


def tokenizer() -> Tokenizer:
    made = character_tokenizer()
    return Tokenizer(made.backend_tokenizer, made.eos_token_id, Path())


def test_those_that_come_again_are_learnt_again_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = PAIR | {"completion": "13"}
    file = write(tmp_path / "s.jsonl", PAIR, other, PAIR, PAIR)
    with caplog.at_level(logging.INFO):
        found = load_traces(file, tokenizer())
    assert len(found) == 4
    assert "s.jsonl: 2 rows repeat an earlier one" in caplog.text


def test_what_an_evaluation_set_asks_is_not_learnt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages without their template, and a short text as the whole of what the user
    says.
    """
    test = write(tmp_path / "test.jsonl", {"question": QUESTION}, {"question": "7-1="})
    asked = {
        "messages": [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": f"Now: {QUESTION}"},
            TURNS[1],
        ]
    }
    short = {
        "messages": [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": "7-1="},
            TURNS[1],
        ]
    }
    with caplog.at_level(logging.INFO):
        (only,) = load_traces(
            write(tmp_path / "p.jsonl", {"prompt": "7-1=", "completion": "6"}, PAIR),
            tokenizer(),
            [str(test)],
        )
    assert only.prompt_tokens == 5
    assert "p.jsonl: 1 rows left out (of an evaluation set)" in caplog.text
    assert "p.jsonl:1: " in caplog.text
    file = tmp_path / "s.jsonl"
    with pytest.raises(MegarlError, match="none of its 2 rows can be used"):
        load_traces(write(file, asked, short), tokenizer(), [str(test)])


def test_what_the_user_says() -> None:
    turns = [
        {"from": "human", "value": "1"},
        {"from": "gpt", "value": "2"},
        {"from": "human", "value": "3"},
        {"from": "gpt", "value": "4"},
    ]
    row = read_untemplated({"system": "9", "conversations": turns})
    assert (row.prompt, row.answer) == ("1\n3", "2\n4")
    assert read_untemplated({"prompt": turns[:3], "completion": turns[3:]}).answer == "4"
    assert read_untemplated({"conversations": turns}).id != row.id, "it is another trace"
    assert read_untemplated(MESSAGES).prompt == read_untemplated(PAIR).prompt


ASKED = {"role": "user", "content": "12+1="}
ANSWERED = {"role": "assistant", "content": "13"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("messages", "lost"),
    [
        (
            [ASKED, ANSWERED | {"reasoning_content": "2+1=3"}],
            "the reasoning is in reasoning_content",
        ),
        ([ASKED, ANSWERED | {"thinking": "2+1=3"}], "the reasoning is in thinking"),
        ([ASKED, CALLED, {"role": "tool", "content": "13"}, ANSWERED], "a message has tool_calls"),
        (
            [ASKED, ANSWERED | {"reasoning": "2+1=3"}, ASKED, ANSWERED],
            "the reasoning is in reasoning",
        ),
    ],
)
def test_what_stands_beside_the_content_is_not_dropped_in_silence(
    tmp_path: Path, messages: list[dict[str, Any]], lost: str
) -> None:
    """Learnt without it, an answer would come without its thinking, or after a turn
    that says nothing.
    """
    with pytest.raises(MegarlError, match=f"{lost}, which would be lost"):
        load_traces(write(tmp_path / "s.jsonl", MESSAGES, {"messages": messages}), tokenizer())


def test_fields_that_say_nothing_and_reasoning_that_is_not_learnt_do_no_harm() -> None:
    """Templates drop what was thought before the last question."""
    earlier = ANSWERED | {"reasoning_content": "2+1=3"}
    last = TURNS[1] | {"tool_calls": None, "reasoning_content": ""}
    row = read_untemplated({"prompt": [ASKED, earlier, ASKED], "completion": [last]})
    assert row.answer == "<think>2+1=3</think>13"
    row = read_untemplated(
        {"messages": [ASKED, earlier | {"weight": 0}, ASKED, last | {"weight": 1}]}
    )
    assert row.answer == "<think>2+1=3</think>13"


@pytest.mark.parametrize(
    ("row", "traces"),
    [
        (PAIR, True),
        (MESSAGES, True),
        ({"conversations": []}, True),
        (MESSAGES | {"answer": "13"}, True),
        ({"messages": TURNS[:1], "answer": "13"}, False),
        ({"id": "a", "prompt": "1", "answer": "2"}, False),
        ({"prompt": "1", "completion": "2", "answer": "3"}, False),
        ({"problem": "1", "answer": "3"}, False),
    ],
)
def test_traces_are_told_from_prompts(tmp_path: Path, row: dict[str, Any], traces: bool) -> None:
    assert are_traces(str(write(tmp_path / "s.jsonl", row))) is traces


def test_inspect_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    bad = {"messages": [{"role": "user", "content": "1"}]}
    file = write(
        tmp_path / "s.jsonl", MESSAGES, MESSAGES, bad, {"prompt": "x" * 30, "completion": "y" * 50}
    )
    assert main(["data", "inspect", str(file), "--samples", "3"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "s.jsonl: 4 rows, 1 left out; 1 repeat an earlier one",
        "3: the last message is not the assistant's",
        "3 traces",
        "prompts, characters: shortest 5 · median 5",
        "longest 30",
        "completions, characters: shortest 22",
        "→ <think>2+1=3</think>13",
    ):
        assert words in shown


def test_of_a_hub_set_bad_rows_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its user cannot correct them, and few published sets have none."""
    rows = [PAIR | {"completion": ""}, {"text": "x"}, PAIR | {"completion": "\x0crac"}, PAIR]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    (only,) = load_traces("hub:a/b", tokenizer())
    assert only.prompt_tokens == 5
    assert "hub:a/b: 3 rows left out (not of the schema)" in caplog.text


@pytest.mark.parametrize("family", PUBLISHED)
def test_messages_end_with_the_token_at_which_the_model_ends_its_turns(
    tmp_path: Path, family: str
) -> None:
    """After GLM-4.5's eos_token, which no turn has, an agent's next request would begin
    a path of its own.
    """
    made, _ = published(tmp_path, family)
    (trace,) = load_traces(write(tmp_path / "s.jsonl", MESSAGES), made)
    end = "<|user|>" if family == "GLM-4.5" else PUBLISHED[family][1]
    assert made.decode(trace.tokens[trace.learnt]) == TURNS[1]["content"] + end


def test_an_eos_token_that_ends_no_turn_is_not_learnt_instead_of_the_one_that_does(
    tmp_path: Path,
) -> None:
    """Llama 3's first tokenizers named <|end_of_text|>, where turns end with
    <|eot_id|>.
    """
    template, end = PUBLISHED["Llama 3"]
    made = tokenizer_of(tmp_path, template, "<|end_of_text|>", end)
    ended = {"prompt": "?", "completion": f"!{end}"}
    traces = load_traces(write(tmp_path / "s.jsonl", MESSAGES, ended, PAIR), made)
    found = [made.decode(trace.tokens[trace.prompt_tokens :]) for trace in traces]
    said = TURNS[1]["content"]
    assert found == [f"{said}{end}", f"!{end}", f"{said}<|end_of_text|>"]


TOLD = {"role": "tool", "content": "13", "tool_call_id": "add:0"}
CALL = {"role": "assistant", "content": "add(12, 1)"}


@pytest.mark.parametrize("family", PUBLISHED)
def test_each_turn_of_the_assistant_is_learnt_as_it_will_be_sampled(
    tmp_path: Path, family: str
) -> None:
    """After the template's text of what came before, in one trace where that has the
    turn before word for word.
    """
    made, _ = published(tmp_path, family)
    messages = [ASKED, CALL, TOLD, ANSWERED, ASKED, TURNS[1]]
    traces = load_traces(write(tmp_path / "s.jsonl", {"messages": messages}), made)
    ends = ["<|observation|>", "<|user|>", "<|user|>"]
    if family != "GLM-4.5":
        ends = [PUBLISHED[family][1]] * 3
    replies = ["add(12, 1)", "13", TURNS[1]["content"]]
    learnt = "".join(made.decode(trace.tokens[trace.learnt]) for trace in traces)
    assert learnt == "".join(map(str.__add__, replies, ends))
    chat = load_chat(made.path)
    expected = [chat.render(messages[:turn]) + replies[turn // 2] for turn in (1, 3, 5)]
    rendered = [made.decode(trace.tokens[:-1]) for trace in traces]
    assert rendered == [text for text in expected if text in rendered]
    assert rendered[-1] == expected[-1]
    # Their templates write something before or after an earlier answer that was not
    # sampled.
    assert len(traces) == (3 if family in ("GLM-4.5", "gpt-oss") else 1)


def test_inspect_counts_each_trace_with_all_of_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give or take the end token, which a completion may lack."""
    monkeypatch.setenv("COLUMNS", "200")
    messages = {"messages": [ASKED, ANSWERED, ASKED, TURNS[1]]}
    for family, count in {"Qwen2.5": 1, "gpt-oss": 2}.items():
        made, _ = published(tmp_path / family, family)
        file = write(tmp_path / "s.jsonl", messages)
        traces = load_traces(file, made)
        command = ["data", "inspect", str(file), "--tokenizer", str(made.path)]
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert f"{count} traces" in shown
        longest = max(len(trace.tokens) - trace.prompt_tokens for trace in traces)
        counted = re.search(r"completions, tokens: .*longest (\d+)", shown)
        assert counted is not None
        assert int(counted[1]) in (longest - 1, longest)


def test_a_turn_of_weight_0_and_those_of_a_prompt_are_not_learnt(tmp_path: Path) -> None:
    made, _ = published(tmp_path, "Qwen2.5")
    messages = [ASKED, ANSWERED, ASKED, TURNS[1]]
    weighted = [ASKED, ANSWERED | {"weight": 0}, ASKED, TURNS[1] | {"weight": 1}]
    rows: list[dict[str, Any]] = [
        {"messages": weighted},
        {"prompt": messages[:3], "completion": messages[3:]},
    ]
    for trace in load_traces(write(tmp_path / "s.jsonl", *rows), made):
        assert made.decode(trace.tokens[trace.learnt]) == f"{TURNS[1]['content']}<|im_end|>"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_of_a_row_are_in_its_prompt(tmp_path: Path) -> None:
    made, _ = published(tmp_path, "Qwen2.5")
    rows = [MESSAGES | {"tools": tools} for tools in ([ADD], json.dumps([ADD]), None, [])]
    traces = load_traces(write(tmp_path / "s.jsonl", *rows), made)
    expected = [load_chat(made.path).render(TURNS[:1], tools) for tools in ([ADD], [ADD], [], [])]
    assert [made.decode(trace.tokens[: trace.prompt_tokens]) for trace in traces] == expected
    made, _ = published(tmp_path, "DeepSeek-V3")
    with pytest.raises(MegarlError, match="the chat template leaves out a row's tools"):
        load_traces(write(tmp_path / "s.jsonl", *rows), made)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PAIR | {"tools": [ADD]}, "tools beside a prompt of text would be lost"),
        (MESSAGES | {"tools": "add"}, "tools is no JSON: 'add'"),
        (MESSAGES | {"tools": ["add"]}, "tools is no list of JSON schemas"),
        ({"messages": [ASKED, ANSWERED | {"weight": 2}]}, "a message has the weight 2"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0}]}, "nothing of it is learnt"),
        (
            {"messages": [ASKED, ANSWERED | {"content": ""}, ASKED, ANSWERED]},
            "the prompt or the completion is empty",
        ),
    ],
)
def test_what_is_no_trace(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(MegarlError, match=said):
        load_traces(write(tmp_path / "s.jsonl", row), tokenizer())
