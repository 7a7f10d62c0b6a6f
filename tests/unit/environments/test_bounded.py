"""Environments that hang, fail, or answer nonsense: the rollout is void, within a limit that is named."""

import asyncio
from pathlib import Path

import pytest

from megarl.environments import EnvironmentDown, Environments
from megarl.errors import MegarlError
from megarl.grading import GraderDown
from megarl.recipe import from_tree
from megarl.types import Prompt, int32
from tests.unit.environments.texts import byte_tokenizer


def environments(tmp_path: Path, name: str) -> Environments:
    task = {
        "train": "", "heldout": "", "environment": "tests.unit.environments.scripted:Faulty", "reply_timeout_s": 0.05,
        "reply_tokens": 20,
    }  # fmt: skip
    return Environments(from_tree({"data": {"tasks": {name: task}}}), byte_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hang", r"data\.tasks\.hang: environment .*Faulty: step took longer than 0\.05 s \(reply_timeout_s\)"),
        ("step", r"step failed: KeyError: 'x'"),
        ("reset", "reset failed: OSError: no such game"),
        ("nothing", "step failed: TypeError: it answered None, not an Observation"),
        ("long", "replied 99 tokens, more than reply_tokens=20"),
    ],
)
def test_it_is_down_as_a_grader_is(tmp_path: Path, where: str, words: str) -> None:
    bounded = environments(tmp_path, where).of(where)

    async def play() -> None:
        assert bounded is not None
        async with bounded.played(Prompt(id="", tokens=int32([1]), answer="")):
            await bounded.step(int32([1]))

    with pytest.raises(EnvironmentDown, match=words) as raised:
        asyncio.run(play())
    assert isinstance(raised.value, GraderDown)


def test_one_that_does_not_close_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bounded = environments(tmp_path, "close").of("close")

    async def play() -> bool:
        assert bounded is not None
        async with bounded.played(Prompt(id="", tokens=int32([1]), answer="")):
            return (await bounded.step(int32([1]))).done

    assert asyncio.run(play())
    assert "close failed: RuntimeError: it will not go" in caplog.text


def test_one_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(
        MegarlError, match=r"data\.tasks\.made\.environment: .* cannot be made: RuntimeError: no licence"
    ):
        environments(tmp_path, "made")
