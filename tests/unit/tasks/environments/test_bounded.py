"""Environments that hang, fail, end their process or answer nonsense: the rollout is
void, within a limit that is named, and the others go on.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megarl.core.base.contracts import EnvironmentDown, GraderDown, Observation, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Prompt, int32
from megarl.core.recipe import from_tree
from megarl.tasks.environments import host, registry, worker
from megarl.tasks.environments.registry import Bounded, TaskEnvironments
from tests.processes import ended_before_it_is_asked
from tests.unit.tasks.environments.scripted import Near
from tests.unit.tasks.environments.texts import byte_tokenizer

pytestmark = pytest.mark.processes

LIMIT = 20
VOCABULARY = 260


@pytest.fixture(autouse=True)
def limit_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REPLY_LIMIT_S", 1.0)


def environments(
    tmp_path: Path, name: str, kind: str = "Faulty", limit_s: float = 30.0
) -> TaskEnvironments:
    task = {
        "train": "",
        "heldout": "",
        "environment": f"tests.unit.tasks.environments.scripted:{kind}",
        "reply_tokens": LIMIT,
    }
    registry.REPLY_LIMIT_S = limit_s
    return TaskEnvironments(from_tree({"data": {"tasks": {name: task}}}), tokenizer_of(tmp_path))


def tokenizer_of(tmp_path: Path) -> Tokenizer:
    byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return load_tokenizer(tmp_path)


def prompt_of(task: str, program: str = "") -> Prompt:
    return Prompt(id="", tokens=int32([1]), answer=program, task=task)


def run(found: TaskEnvironments, *episodes: Any) -> list[Any]:
    """What comes of the coroutines, in a loop as the controller's;
    errors are results.
    """

    async def all_of_them() -> list[Any]:
        try:
            return await asyncio.gather(*episodes, return_exceptions=True)
        finally:
            found.close()

    return uvloop.run(all_of_them())


async def play(
    bounded: Bounded | None, prompt: Prompt, turns: int = 1
) -> tuple[list[Observation], Verdict | None]:
    assert bounded is not None
    async with bounded.played(prompt):
        return [
            await bounded.step(int32([turn + 1])) for turn in range(turns)
        ], await bounded.reward()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hang", r"data\.tasks\.hang: environment .*Faulty: step took longer than 1 s"),
        ("step", r"step failed: KeyError: 'x'"),
        ("reset", "reset failed: OSError: no such game"),
        ("nothing", "step failed: TypeError: it answered None, not an Observation"),
        ("long", "replied 99 tokens, more than reply_tokens=20"),
    ],
)
def test_it_is_down_as_a_grader_is(tmp_path: Path, where: str, words: str) -> None:
    found = environments(tmp_path, where, limit_s=1.0 if where == "hang" else 30.0)
    (error,) = run(found, play(found.of(where), prompt_of(where)))
    with pytest.raises(EnvironmentDown, match=words):
        raise error
    assert isinstance(error, GraderDown)


def test_methods_that_are_not_async(tmp_path: Path) -> None:
    found = environments(tmp_path, "t", "Plain")
    (((reply,), verdict),) = run(found, play(found.of("t"), prompt_of("t")))
    assert (reply.tokens.tolist(), verdict) == ([3], Verdict(0.5))


def test_one_that_does_not_close_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = environments(tmp_path, "close")
    (((reply,), verdict),) = run(found, play(found.of("close"), prompt_of("close")))
    assert (reply.done, verdict) == (True, None)
    assert "close failed: RuntimeError: it will not go" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("made", r"data\.tasks\.made\.environment: .* cannot be made: RuntimeError: no licence"),
        ("exit", r"data\.tasks\.exit\.environment: .* cannot be made: SystemExit: no more"),
    ],
)
def test_one_that_cannot_be_made(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(MegarlError, match=words):
        environments(tmp_path, name)


TURN = "async def turn(tokens):\n    "
HOSTILE = {
    "raise asyncio.CancelledError": "step failed: CancelledError",
    "sys.exit(3)": "step failed: SystemExit: 3",
    "raise KeyboardInterrupt": "step failed: KeyboardInterrupt",
    "asyncio.current_task().cancel(); await asyncio.sleep(9)": "step failed: CancelledError",
    "await asyncio.sleep(99)": r"step took longer than 2 s",
    "os._exit(7)": r"ended its process \(status 7\)",
    "os.kill(os.getpid(), 11)": r"ended its process \(signal 11\)",
    "time.sleep(99)": r"blocked its process for more than 2 s",
    "scrawl()": r"damaged its process's output \(a reply of [0-9,]+ bytes\)",
    "while True: pass": "blocked its process",
    "return Observation([1, 260])": "replied token 260, which is not in the vocabulary of 260",
    "return Observation([1, -1])": (
        "step failed: ValueError: it answered .*, which are not token ids"
    ),
    "return Observation([1 << 40])": (
        "step failed: ValueError: it answered .*, which are not token ids"
    ),
    "return Observation([1.5])": "step failed: TypeError: it answered .*, which are not token ids",
    "return Observation('no')": "step failed: TypeError: it answered 'no', which are not token ids",
    "return Observation([1] * 21)": "replied 21 tokens, more than reply_tokens=20",
    "return 'no'": "step failed: TypeError: it answered 'no', not an Observation",
    "kept = bytearray(1 << 42)": "step failed: MemoryError",
    "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})": "step failed: E",
}
WORTHLESS = {
    "float('nan')": "gave the reward nan",
    "float('inf')": "gave the reward inf",
    "'x'": "reward failed: ValueError",
}


def test_whatever_one_episode_does_the_others_are_played_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one process, which some of them end: two others, one of them in the middle
    of it all, see nothing of that.
    """
    monkeypatch.setattr(host, "MARGIN_S", 1.5)
    monkeypatch.setattr("megarl.tasks.environments.registry.LIVES", 99)
    found = environments(
        tmp_path, "game", "Hostile", limit_s=2.0
    )  # for the others, too, on a busy machine
    programs = {TURN + line: words for line, words in HOSTILE.items()}
    programs |= {f"score = {score}": words for score, words in WORTHLESS.items()}
    *good, _ = results = run(
        found,
        *(play(found.of("game"), prompt_of("game"), turns=60) for _ in range(2)),
        *(play(found.of("game"), prompt_of("game", program)) for program in programs),
    )
    for episode in good[:2]:
        assert not isinstance(episode, BaseException), episode
        replies, verdict = episode
        assert [reply.tokens.tolist() for reply in replies] == [[turn + 1] for turn in range(60)]
        assert verdict == Verdict(0.5)
    for (program, words), error in zip(programs.items(), results[2:], strict=True):
        with pytest.raises(
            EnvironmentDown, match=rf"^data\.tasks\.game: environment .*Hostile:? {words}"
        ):
            raise (
                error if isinstance(error, BaseException) else AssertionError(f"{program}: {error}")
            )


def test_a_process_that_ended_before_it_was_set_up_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = environments(tmp_path, "game")
    monkeypatch.setattr(host, "_COMMAND", ("/bin/false",))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", ended_before_it_is_asked)
    (error,) = run(found, play(found.of("game"), prompt_of("game")))
    with pytest.raises(EnvironmentDown, match="its process ended as it started"):
        raise error


def test_one_for_which_no_process_can_be_had_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = environments(tmp_path, "game")
    monkeypatch.setattr(host, "_COMMAND", ("/nowhere/python",))
    (error,) = run(found, play(found.of("game"), prompt_of("game")))
    with pytest.raises(
        EnvironmentDown, match=r"^data\.tasks\.game\.environment: .*Faulty: .*No such file"
    ):
        raise error


def test_an_error_that_nobody_foresaw_costs_that_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    found = environments(tmp_path, "game")
    monkeypatch.setattr(host, "_started", fails)
    (error,) = run(found, play(found.of("game"), prompt_of("game")))
    with pytest.raises(EnvironmentDown, match=r"Faulty: RuntimeError: can't start new thread"):
        raise error


def test_an_answer_longer_than_a_frame(tmp_path: Path) -> None:
    found = environments(tmp_path, "game", "Hostile", limit_s=60)
    program = (
        f"{TURN}return Observation(__import__('numpy').ones({worker.BESIDES_TOKENS}, 'int32'))"
    )
    (error,) = run(found, play(found.of("game"), prompt_of("game", program)))
    with pytest.raises(EnvironmentDown, match=r"Hostile:? answered 262,.* bytes, 65,616 at most"):
        raise error


def test_true_and_false_are_right_and_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.tasks.environments.registry.Host", Near)
    monkeypatch.setattr(Near, "tokenizer", tokenizer_of(tmp_path))
    found = environments(tmp_path, "game", "Hostile", limit_s=20)
    scores = {"True": 1.0, "False": -1.0, "__import__('numpy').bool_(False)": -1.0, "0": 0.0}
    episodes = run(
        found, *(play(found.of("game"), prompt_of("game", f"score = {score}")) for score in scores)
    )
    assert [verdict for _, verdict in episodes] == [Verdict(score) for score in scores.values()]


def test_one_that_answers_differently_when_it_is_begun_anew(tmp_path: Path) -> None:
    """Nobody's fault is known here: code that runs beside all episodes ends the
    process.
    """
    found = environments(tmp_path, "game", "Hostile", limit_s=20)
    chance = TURN + "return Observation([os.getpid() % 250])"
    later = (
        "import threading\n"
        + TURN
        + "threading.Timer(0.3, os._exit, [0]).start(); return Observation([1])"
    )

    async def two_turns(program: str) -> list[int]:
        bounded = found.of("game")
        assert bounded is not None
        async with bounded.played(prompt_of("game", program)):
            first = await bounded.step(int32([1]))
            await asyncio.sleep(1.5)
            second = await bounded.step(int32([2]))
        return [*first.tokens.tolist(), *second.tokens.tolist()]

    echo, different, _ = run(found, two_turns(""), two_turns(chance), two_turns(later))
    assert echo == [1, 2]
    with pytest.raises(
        EnvironmentDown,
        match="was replayed, because its process had ended, and answered the same turns diff",
    ):
        raise different


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.binary(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)
TOKENS = st.one_of(
    st.lists(st.integers(0, VOCABULARY - 1), max_size=LIMIT + 1),
    st.lists(st.integers(-1, VOCABULARY), max_size=3),
)


class Said:
    reply: Any = None
    verdict: Any = None
    stops: Any = ()


PROFILE: Any = settings.default
BAD_TOKENS: Any = []


@settings(
    max_examples=max(300, PROFILE.max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    reply=st.one_of(
        ANYTHING,
        st.builds(
            Observation, st.one_of(TOKENS, TOKENS.map(np.array), ANYTHING), ANYTHING, ANYTHING
        ),
    ),
    verdict=st.one_of(
        ANYTHING, st.builds(Verdict, st.one_of(st.floats(), ANYTHING), ANYTHING, ANYTHING)
    ),
    stops=st.one_of(st.just(()), TOKENS.map(tuple), ANYTHING),
)
@example(reply=Observation(int32([1])), verdict=Verdict(1.0), stops=())
@example(
    reply=Observation(BAD_TOKENS), verdict=Verdict(1.0, error="\ud800"), stops=(-(1 << 63) - 1,)
)
@example(reply="\ud800", verdict=Verdict(1.0, error="\ud800"), stops=())
def test_any_reply_is_a_good_one_or_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: Any, verdict: Any, stops: Any
) -> None:
    monkeypatch.setattr("megarl.tasks.environments.registry.Host", Near)
    monkeypatch.setattr(Near, "tokenizer", tokenizer_of(tmp_path))
    monkeypatch.setattr(Said, "reply", reply)
    monkeypatch.setattr(Said, "verdict", verdict)
    monkeypatch.setattr("tests.unit.tasks.environments.scripted.SAID", Said)
    Said.stops = stops
    found = environments(tmp_path, "game", "Fuzzed", limit_s=5)
    bounded = found.of("game")
    try:
        (answer,), judged = asyncio.run(play(bounded, prompt_of("game")))
    except EnvironmentDown as down:
        if not str(down).startswith(
            "data.tasks.game: environment tests.unit.tasks.environments.scripted:Fuzzed"
        ):
            raise
        return
    assert answer.tokens.dtype == np.int32
    assert answer.done or len(answer.tokens) <= LIMIT
    assert answer.done or all(0 <= token < VOCABULARY for token in answer.tokens.tolist())
    assert judged is None or np.isfinite(judged.score)
    assert bounded is not None
    assert all(0 <= token < VOCABULARY for token in bounded.stop_tokens)
