"""Where a turn's thinking ends, and where it does not although the mark is there."""

from pathlib import Path

import pytest

from megarl.tasks.agents.calls import read_turn
from megarl.tasks.environments.framing import Framing, Setting
from megarl.tasks.environments.python import last_call
from megarl.tasks.graders.sandbox import Sandbox
from megarl.tasks.thinking import without_thinking
from tests.unit.tasks.agents.test_calls import FORMATS, TOOLS
from tests.unit.tasks.environments.texts import byte_tokenizer

END = "</think>"
FENCED = "```python\nprint('</think>')\n```"
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "</think>"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "prompt", "thinking", "rest"),
    [
        ("<think>hm</think>7", "", "<think>hm", "7"),
        ("hm</think>7", "<think>\n", "hm", "7"),
        ("hm</think>7", "", "hm", "7"),
        ("hm</think>7</think>8", "", "hm", "7</think>8"),
        (f"hm</think>{FENCED}", "", "hm", FENCED),
        (f"hm {FENCED} so</think>7", "", f"hm {FENCED} so", "7"),
        (f"hm {CALL} so</think>7", "", f"hm {CALL} so", "7"),
        (f"{FENCED}{CALL}{FENCED}</think>{FENCED}", "", f"{FENCED}{CALL}{FENCED}", FENCED),
        (f"<think>hm {FENCED}", "", "<think>hm ```python\nprint('", "')\n```"),
        ("hm ```python\nopen</think>7", "", "hm ```python\nopen", "7"),
        ("hm <tool_call> open</think>7", "", "hm <tool_call> open", "7"),
        ("[1] hm</think>7", "", "[1] hm", "7"),
        ("<think>a</think>b", "<think>\n\n</think>\n\n", "<think>a", "b"),
    ],
)
def test_thinking_that_ends(text: str, prompt: str, thinking: str, rest: str) -> None:
    assert without_thinking(text, END, prompt) == (thinking, rest)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("7", ""),
        (FENCED, ""),
        (FENCED.replace("```", "~~~"), ""),
        (f"See:\n{FENCED}\nand {CALL}{CALL}", ""),
        ('{"note": "</think>", "n": [1]}', ""),
        ('["</think>"]', ""),
        ("the mark is </think>", "<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_that_does_not_end(text: str, prompt: str) -> None:
    assert without_thinking(text, END, prompt) is None
    assert without_thinking(text, "", prompt) is None


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("form", ["qwen", "llama", "instruct", "tags"])
def test_an_agents_call_may_write_of_the_mark(form: str, calls: int) -> None:
    """A policy that did not think lost the call, and both if it made two."""
    written = {
        "qwen": CALL,
        "llama": '{"name": "f", "parameters": {"s": "</think>"}}',
        "instruct": '[CALL]{"name": "f", "arguments": {"s": "</think>"}}[/CALL]',
        "tags": "<call>f<k>s</k><v></think></v></call>",
    }[form]
    count = 1 if form == "llama" else calls  # of whose calls a message has one
    said = read_turn(written * count, FORMATS[form], END, 0, TOOLS)
    assert [call.arguments for call in said.calls] == [{"s": END}] * count
    assert (said.text, said.reasoning) == ("", "")
    thought = read_turn(f"<think>hm</think>{written * count}", FORMATS[form], END, 0, TOOLS)
    assert [call.arguments for call in thought.calls] == [{"s": END}] * count
    assert (thought.text, thought.reasoning) == ("", "hm")
    if form != "llama":
        unopened = read_turn(
            f"hm {written} so</think>{written * count}", FORMATS[form], END, 0, TOOLS
        )
        assert (len(unopened.calls), unopened.reasoning) == (count, f"hm {written} so")


@pytest.mark.parametrize(
    ("text", "program"), [(FENCED, "print('</think>')\n"), (f"hm</think>{FENCED}", FENCED[10:-3])]
)
def test_an_environments_call_may_write_of_the_mark(
    tmp_path: Path, text: str, program: str
) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    setting = Setting(
        "t", tokenizer, Framing(tokenizer, "raw", 200), Sandbox("bubblewrap", 1), END, 200
    )
    called = last_call(setting.answer_text(tokenizer.ids(text)))
    assert called is not None
    assert called[1] == program
