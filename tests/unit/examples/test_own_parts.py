"""The examples of what one writes oneself: questions, a recipe, an environment, an
agent, a reward service. Each does what its docstring says, with the other side real.

my_loss.py is tried as every loss is, in tests/unit/core/algorithm/test_losses.py.
"""

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import cli
from megarl.core.algorithm.losses.own import load_loss
from megarl.core.base.process import imported
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt
from megarl.core.recipe import Loss, load
from megarl.environments import Environment, Setting
from megarl.tasks.agents import terminal
from megarl.tasks.data.arithmetic_models import LLAMA, save_model
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.environments.framing import Framing
from megarl.tasks.environments.python import LIMITS
from megarl.tasks.graders.functions import check_importable
from megarl.tasks.graders.sandbox import Sandbox
from tests.harnesses.environments import python_of
from tests.unit.tasks.agents.serving import gateway, run
from tests.unit.tasks.environments.texts import byte_tokenizer

REPLY_TOKENS = 100


def test_a_recipe_may_name_the_loss(examples: Path) -> None:
    load_loss(Loss(kind="my_loss:tapered", cap=1.0))


@pytest.fixture
def folder(examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the examples to work in."""
    for file in examples.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_takes_the_questions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("sums").main(Path("questions.jsonl"))
    assert cli.main(["data", "prepare", "questions.jsonl", "mine", "--heldout", "120"]) == 0
    # A token of this tokenizer is a byte, so that questions are longer.
    recipe = load("my_recipe.yaml", ["length.prompt_tokens=200"])
    training, heldout = load_tasks(recipe, byte_tokenizer(folder / "model"))["sums"]
    assert (len(training), len(heldout)) == (490, 120)
    check_importable("data.tasks.sums.grader:", recipe.data.tasks["sums"].grader)


async def searched(game: Environment, tokenizer: Tokenizer, answer: int) -> tuple[int, float]:
    """Search by halves, from 1 to 50; return guesses and score."""
    await game.reset(Prompt(id="0", tokens=tokenizer.ids("?"), answer=str(answer)))
    lowest = 1
    highest = 50
    guesses = 0
    while True:
        guess = (lowest + highest) // 2
        guesses += 1
        reply = await game.step(tokenizer.ids(f"<think>not 99</think>{guess}"))
        if reply.done:
            break
        hint = tokenizer.decode(reply.tokens)
        assert len(reply.tokens) <= REPLY_TOKENS
        if "It is higher." in hint:
            lowest = guess + 1
        else:
            assert "It is lower." in hint
            highest = guess - 1
    verdict = await game.reward()
    assert verdict is not None
    return guesses, verdict.score


def test_the_environment_is_a_game(examples: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    framing = Framing(tokenizer, "raw", REPLY_TOKENS)
    sandbox = Sandbox("rlimits", 1, LIMITS)
    setting = Setting("search", tokenizer, framing, sandbox, "</think>", REPLY_TOKENS)
    game = imported("my_environment:Search")
    assert asyncio.run(searched(game(setting), tokenizer, 25)) == (1, 1.0)
    guesses, score = asyncio.run(searched(game(setting), tokenizer, 37))
    assert score == pytest.approx(1.1 - guesses / 10)

    async def without_a_number() -> None:
        search = game(setting)
        await search.reset(Prompt(id="0", tokens=tokenizer.ids("?"), answer="3"))
        reply = await search.step(tokenizer.ids("no"))
        assert reply.error
        assert not reply.done
        assert (await search.reward()).score == -1

    asyncio.run(without_a_number())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("second", "verdict"), [("It is 19.", "right"), ("18", "wrong"), ("I am sure.", "wrong")]
)
def test_the_agent_speaks_with_the_policy(
    examples: Path, tmp_path: Path, second: str, verdict: str
) -> None:
    """As a program of its own, with megarl's gateway; one conversation is trained."""

    async def play() -> None:
        async with gateway(tmp_path, "It is 18.", second) as served:
            program = await asyncio.create_subprocess_exec(
                sys.executable,
                str(examples / "my_agent.py"),
                "What is 17 + 2?",
                "19",
                env=os.environ
                | {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.session.key},
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _ = await program.communicate()
            assert printed.decode().strip() == verdict
            assert "It is 18." in served.sent()
            assert "Check your answer" in served.sent()

    run(play)


@pytest.mark.processes
def test_the_terminals_tasks_can_be_solved_and_its_traces_are_sessions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace is what the chat template of tiny_model.py makes of such a session."""
    tasks = importlib.import_module("terminal_tasks")
    for name, size in (("TRAIN", 3), ("HELDOUT", 3), ("TRACES", 60)):
        monkeypatch.setattr(tasks, name, size)
    tasks.main(Path("terminal"))
    for part in ("train", "heldout"):
        terminal.main([f"terminal/{part}", f"terminal/{part}.jsonl"])
    tokenizer = importlib.import_module("tiny_model").tokenizer()
    traces = [json.loads(line) for line in Path("terminal/sft.jsonl").read_text().splitlines()]
    assert {len(trace["completion"]) for trace in traces} == {3, 5}
    for trace in traces:
        messages = [("system", terminal.SYSTEM), ("user", trace["prompt"].rstrip())]
        for n, text in enumerate(trace["completion"][:-1]):
            role = "user" if n % 2 else "assistant"
            messages.append((role, text.rstrip().removesuffix(tasks.END)))
        rendered = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in messages], tokenize=False
        )
        assert rendered == trace["prompt"] + "".join(trace["completion"][:-1])
        assert len(tokenizer(rendered)["input_ids"]) < 60
    recipe = load("terminal.yaml", [])
    training, heldout = load_tasks(recipe, byte_tokenizer(folder / "model"))["terminal"]
    assert (len(training), len(heldout)) == (3, 3)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("said", "reward"), [("645", 1.2), ("It is 645.", 1.0)])
def test_a_task_of_the_hub_is_rewarded_by_its_rubric(
    examples: Path, tmp_path: Path, said: str, reward: float
) -> None:
    """hub_taskset.py by hub_agent.py, in verifiers' own environment."""
    python = str(python_of("verifiers"))

    async def play() -> None:
        async with gateway(tmp_path, said) as served:
            program = await asyncio.create_subprocess_exec(
                *(python, str(examples / "hub_agent.py"), "hub_taskset"),
                env=os.environ
                | {
                    "OPENAI_BASE_URL": f"{served.url}/v1",
                    "OPENAI_API_KEY": served.session.key,
                    "OPENAI_MODEL": "policy",
                    "PYTHONPATH": str(examples),
                },
                stdin=asyncio.subprocess.PIPE,
            )
            task = {"prompt": "1", "reward_key": served.session.reward_key}
            await program.communicate(json.dumps(task).encode())
            assert program.returncode == 0
            assert served.session.reward == pytest.approx(reward)
            assert len(served.session.rollout().paths) == 1

    run(play, limit_s=300)


@pytest.fixture
def reward_service(examples: Path) -> Iterator[str]:
    command = [sys.executable, "examples/reward_server.py", "--port", "0"]
    environment = os.environ | {"REWARD_KEY": "secret"}
    with subprocess.Popen(
        command, cwd=examples.parent, env=environment, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        yield service.stdout.readline().split()[-1]
        service.terminate()


@pytest.mark.processes
def test_the_reward_service_compares_texts(reward_service: str) -> None:
    items = [{"answer": "4", "expected": " 4"}, {"answer": "5", "expected": "4"}]
    body = json.dumps({"items": items}).encode()

    def post(key: str) -> bytes:
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(reward_service, body, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            content: bytes = reply.read()
        return content

    assert json.loads(post("secret")) == {"rewards": [1.0, -1.0]}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        post("wrong")


def test_a_model_is_asked(
    examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model", LLAMA, seed=0)
    importlib.import_module("ask").main(str(tmp_path / "model"), "12+7=")
    assert capsys.readouterr().out.startswith("12+7= ")
