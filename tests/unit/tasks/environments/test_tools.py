"""The calculator against Python's own arithmetic, the Python tool in its real sandbox,
a game that a binary search wins.
"""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.contracts import Environment, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt, int32
from megarl.core.recipe import from_tree
from megarl.tasks.data.arithmetic_models import character_tokenizer
from megarl.tasks.environments.calculator import LONGEST, Calculator, calculated
from megarl.tasks.environments.framing import Framing, Setting
from megarl.tasks.environments.guessing import Guessing
from megarl.tasks.environments.python import FENCE, LIMITS, Python, last_call
from megarl.tasks.environments.registry import TaskEnvironments
from megarl.tasks.graders.sandbox import Sandbox
from tests.unit.tasks.environments.texts import byte_tokenizer

MADE = character_tokenizer()
CHARACTERS = Tokenizer(MADE.backend_tokenizer, MADE.eos_token_id, Path())


@pytest.fixture(scope="module")
def bytes_of(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("model"))


def setting(tokenizer: Tokenizer, limit: int = 200) -> Setting:
    framing = Framing(tokenizer, "raw", limit)
    return Setting("t", tokenizer, framing, Sandbox("bubblewrap", 2, LIMITS), "</think>", limit)


def test_the_example_of_the_docs_works_with_the_quickstarts_tokenizer() -> None:
    page = Path(__file__).parents[4] / "docs/how-to/tools.md"
    (code,) = re.findall(r"```python\n(.*?class Echo.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    echo = names["Echo"](setting(CHARACTERS, limit=3))
    assert isinstance(echo, Environment)
    asked = np.append(CHARACTERS.ids("12+34="), CHARACTERS.end).astype(np.int32)
    assert CHARACTERS.decode(asyncio.run(echo.step(asked)).tokens) == "12+"
    assert asyncio.run(echo.step(CHARACTERS.ids("46"))).done


EXPRESSIONS = st.recursive(
    st.integers(0, 9999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_the_calculator_is_right_wherever_the_result_is_whole(expression: str) -> None:
    try:
        exact = eval(expression, {}, {})
        whole = int(eval(expression.replace("/", "//"), {}, {}))
    except ZeroDivisionError:
        assert calculated(expression) is None
        return
    found = calculated(expression)
    if isinstance(exact, int):
        assert found == exact
    elif found is not None:  # every division left no rest, so `//` does the same
        assert found == whole


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "1+",
        "2**9",
        "9" * LONGEST + "9",
        "x",
        "1.5*2",
        "True",
        "7/2",
        "1//2",
        "f(1)",
        "(" * 150,
        "007",
        "\0",
    ],
)
def test_what_cannot_be_calculated(nonsense: str) -> None:
    assert calculated(nonsense) is None


def test_a_call_of_the_calculator_is_the_last_bracket() -> None:
    tool = Calculator(setting(CHARACTERS, 8))
    assert [CHARACTERS.decode(int32([t])) for t in tool.stop_tokens] == ["]"]

    def step(text: str) -> tuple[str, bool, bool]:
        found = asyncio.run(tool.step(CHARACTERS.ids(text)))
        return CHARACTERS.decode(found.tokens), found.done, found.error

    assert step("<think>1+1;[123*456]") == ("56088", False, False)
    assert step("[[2*3]") == ("6", False, False)
    assert step("12]") == ("?", False, True), "no call was opened in this turn"
    assert step("[12*]") == ("?", False, True)
    assert step("[99999*99999]") == ("?", False, True), "more than reply_tokens"
    assert step("</think>6<eos>") == ("", True, False)


def step(environment: Environment, tokenizer: Tokenizer, text: str) -> tuple[str, bool, bool]:
    found = asyncio.run(environment.step(tokenizer.ids(text)))
    return tokenizer.decode(found.tokens), found.done, found.error


RAW = "\n```output\n{}\n```\n"


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("```python\nprint(6 * 7)\n```", "42"),
        (
            (
                "first ```python\nprint(1)\n``` then\n```python\nimport math\nprint(math.comb(9,"
                " 4))\n```<|end|>"
            ),
            "126",
        ),
        (
            (
                '<tool_call>\n{"name": "python", "arguments": {"code": "print(2 **'
                ' 10)"}}\n</tool_call>'
            ),
            "1024",
        ),
        ("```python\nx = 1\n```", "(nothing was printed)"),
        ("<think>```python\nprint(1)\n```</think>```python\nprint('é')\n```", "é"),
        ("Not ```python print(1)``` but\n```python\nprint(2)\n```", "2"),
        ("<tool_call>, as it is called:\n```python\nprint(3)\n```", "3"),
    ],
)
def test_the_last_program_of_a_turn_is_run(bytes_of: Tokenizer, turn: str, reply: str) -> None:
    assert step(Python(setting(bytes_of)), bytes_of, turn) == (RAW.format(reply), False, False)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (
            "```python\nprint(1)\n1 / 0\n```",
            ["1\nTraceback", 'File "program.py", line 2', "ZeroDivisionError: division by zero"],
        ),
        ("```python\ndef f(:\n```", ["SyntaxError"]),
        ("```python\nimport sys; sys.exit(3)\n```", ["ended with status 3"]),
        ("```python\nopen('/nowhere')\n```", ["FileNotFoundError"]),
        ("<tool_call>print(1)</tool_call>", ['a call is {"name": "python"']),
        (
            '<tool_call>{"name": "web", "arguments": {"code": "x"}}</tool_call>',
            ["there is no tool 'web'"],
        ),
        (f"<tool_call>{'[' * 200_000}</tool_call>", ['a call is {"name": "python"']),
    ],
)
def test_a_call_that_fails_is_told_and_counted(
    bytes_of: Tokenizer, turn: str, words: list[str]
) -> None:
    text, done, error = step(Python(setting(bytes_of, 2000)), bytes_of, turn)
    assert (done, error) == (False, True)
    assert all(word in text for word in words), text


PIECES = ["```python", "```", "\n", "<tool_call>", "</tool_call>", "x", "`"]
CALLS = re.compile(r"```python[^\n`]*\n(.*?)```|<tool_call>(.*?)</tool_call>", re.DOTALL)
"""What is a call, in words that take quadratic time."""


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_the_last_call_is_the_last_match(text: str) -> None:
    matches = [(match[1] is not None, match[1] or match[2] or "") for match in CALLS.finditer(text)]
    found = last_call(text)
    assert (found and (found[0] == FENCE, found[1])) == (matches[-1] if matches else None)


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "```python", "```python\n", "`", "<tool_call>```python\n", "```python x\n`"],
)
def test_a_call_is_looked_for_in_linear_time(piece: str) -> None:
    began = time.process_time()
    last_call(piece * 100_000)
    assert time.process_time() - began < 2, "for some pieces a backtracking pattern takes minutes"


def test_no_program_is_the_last_turn(bytes_of: Tokenizer) -> None:
    for turn in ("It is 42.", "<think>```python\nprint(1)\n```</think>42", "```\nprint(1)\n```"):
        assert step(Python(setting(bytes_of)), bytes_of, turn) == ("", True, False)


def test_a_program_without_end_and_one_that_prints_without_end(bytes_of: Tokenizer) -> None:
    limits = LIMITS.__class__(seconds=1, output=LIMITS.output)
    framing = Framing(bytes_of, "raw", 120)
    short = Python(
        Setting("t", bytes_of, framing, Sandbox("bubblewrap", 2, limits), "</think>", 120)
    )
    text, _, error = step(short, bytes_of, "```python\nwhile True: pass\n```")
    assert error
    assert "error: it took too long and was ended" in text
    text, _, error = step(
        Python(setting(bytes_of, 120)), bytes_of, "```python\nwhile True: print('y' * 99)\n```"
    )
    assert error
    assert "error: it printed too much and was ended" in text
    assert len(bytes_of.ids(text)) == 120


def test_the_game_is_won_by_halves(bytes_of: Tokenizer) -> None:
    for secret in (0, 1, 37, 99):
        assert asyncio.run(played(bytes_of, secret, 7)) == Verdict(1.0)
    assert asyncio.run(played(bytes_of, 99, 3)) == Verdict(-1.0)


async def played(tokenizer: Tokenizer, secret: int, turns: int) -> Verdict | None:
    game = Guessing(setting(tokenizer))
    await game.reset(Prompt(id="", tokens=np.zeros(0, np.int32), answer=str(secret)))
    low = 0
    high = 100
    for _ in range(turns):
        guess = (low + high) // 2
        reply = await game.step(
            tokenizer.ids(f"<think>99 or 3</think>not {low - 1}, I say {guess}.<|end|>")
        )
        if reply.done:
            break
        answer = tokenizer.decode(reply.tokens)
        assert answer in (RAW.format("higher"), RAW.format("lower"))
        low, high = (guess + 1, high) if "higher" in answer else (low, guess)
    return await game.reward()


def test_a_turn_without_a_number(bytes_of: Tokenizer) -> None:
    assert step(Guessing(setting(bytes_of)), bytes_of, "hm") == (
        RAW.format("no number"),
        False,
        True,
    )


def environments(tokenizer: Tokenizer, environment: str, **keys: object) -> TaskEnvironments:
    task = {"train": "", "heldout": "", "grader": "exact", "environment": environment} | keys
    return TaskEnvironments(from_tree({"data": {"tasks": {"t": task}}}), tokenizer)


def test_what_cannot_be_had_is_said_when_the_run_starts(
    bytes_of: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environments(bytes_of, "python").of("t") is not None
    assert environments(bytes_of, "python").of("other") is None
    for name, words in {
        "no_such_module:Class": "no_such_module:Class cannot be used: ModuleNotFoundError",
        "megarl.tasks.environments:Class": "cannot be used: AttributeError",
        "os.path:join": "os.path:join cannot be made: TypeError",
        "builtins:str": "builtins:str is not an Environment; derive it from",
    }.items():
        with pytest.raises(MegarlError, match=words):
            environments(bytes_of, name)
    suite = {
        "evaluation": {
            "suites": {"s": {"data": "x", "grader": "exact", "environment": "calculator"}}
        }
    }
    with pytest.raises(
        MegarlError, match=r"^evaluation\.suites\.s\.environment: calculator needs ']' as one token"
    ):
        TaskEnvironments(from_tree(suite), byte_pair(bytes_of))
    with pytest.raises(
        MegarlError, match=r"^data\.tasks\.t\.environment: reply_tokens=10 leaves no room"
    ):
        environments(bytes_of, "python", reply_tokens=10)
    with pytest.raises(MegarlError, match="cannot encode"):
        environments(CHARACTERS, "guessing")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MegarlError, match="bubblewrap is not installed"):
        environments(bytes_of, "python")


def byte_pair(tokenizer: Tokenizer) -> Tokenizer:
    """One in which every text is two tokens."""

    class Pairs(Tokenizer):
        def ids(self, text: str) -> np.ndarray:
            return int32([0, 1])

    return Pairs(tokenizer.backend, tokenizer.end, tokenizer.path)
