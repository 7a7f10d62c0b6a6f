"""A real run of two tasks that are not arithmetic: programs that a sandbox runs, and
answers that a reward service judges, with further rewards beside both. The service
starts late, and is gone at the end.

The policy has random weights, and its vocabulary is made so that what it writes can be
graded: a token is a whole program (right, wrong, or one that sleeps), or a letter. So
every reward of the journal is checked against the tokens it was given for.
"""

import math
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Group, Rollout
from megarl.run.process import free_ports
from megarl.tasks.graders.sandbox import Sandbox
from tests.e2e import runs
from tests.e2e.runs import LiveRun, batches, check_nothing_left
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
KEY = "key-of-the-reward-service"
STEPS = 6
LATER = 40
SINGLE = ["<eos>", "</think>", *"abcdefghijklmnopqrstuvwyz!0123456789"]
XS = [" " * n + "x" for n in range(1, 41)]
RIGHT = [f"\n```\nprint(1){' ' * n}\n```\n" for n in range(24)]
WRONG = [f"\n```\nprint(2){' ' * n}\n```\n" for n in range(24)]
SLEEPERS = [f"\n```\nimport time; time.sleep(99){' ' * n}\n```\n" for n in range(3)]

BREVITY = '''
def brevity(submission):
    """A tenth for each token; it cannot judge what ends with an x."""
    if submission.completion.endswith("x"):
        raise ValueError("an x")
    return -len(submission.completion) / 100
'''


class Expected(NamedTuple):
    """What a rollout must have been given."""

    rewards: dict[str, float]
    reward: float
    timeout: bool
    error: bool


def write_policy(folder: Path) -> None:
    texts = [*SINGLE, *XS, *RIGHT, *WRONG, *SLEEPERS]
    vocabulary = {
        text: n for n, text in enumerate([*texts, *(f"<{n}>" for n in range(128 - len(texts)))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", "</think>"])
    tiny_llama(folder, eos_token_id=0)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def write_prompts(path: Path, first: str, answer: str) -> None:
    rows = [
        f'{{"id": "{first}{second}", "prompt": "{first}{second}", "answer": {answer}}}'
        for second in "abcdefghijklmnop"
    ]
    path.write_text("\n".join(rows))


def overrides(port: int) -> tuple[str, ...]:
    form = "form: {grader: format, weight: 0.2}"
    short = "short: {grader: 'picky:brevity', weight: 0.5}"
    return (
        "run.name=rewards",
        f"run.steps={STEPS}",
        "model.path=policy",
        "data.tasks.arithmetic=null",
        (
            "data.tasks.programs={train: programs.jsonl, heldout: 4, grader: code, rewards:"
            f" {{{form}, {short}}}}}"
        ),
        (
            "data.tasks.letters={train: letters.jsonl, heldout: 4, grader: taste, rewards:"
            f" {{{form}}}}}"
        ),
        f"data.services.taste={{url: 'http://127.0.0.1:{port}/', api_key: 'env:REWARD_KEY'}}",
        "length.prompt_tokens=4",
        "length.thinking_tokens=[6, 8]",
        "length.answer_tokens=1",
        "length.interruption='!</think>'",
        "sampling.generations=4",
        "pipeline.k=1",
        "batch.prompts=4",
        "batch.zero_variance=keep",
        "batch.positive_threshold=null",
        "evaluation.every=100",
        "evaluation.prompts=2",
        "evaluation.samples=2",
    )


@contextmanager
def service(port: int) -> Iterator[None]:
    """examples/reward_server.py, as its docstring starts it."""
    process = subprocess.Popen(
        [sys.executable, "examples/reward_server.py", "--port", str(port)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def expected(rollout: Rollout, task: str, decode: Callable[[Sequence[int]], str]) -> Expected:
    """By the tokens alone."""
    tokens = rollout.tokens.tolist()
    stopped = tokens[:-1] if tokens[-1] == 0 else tokens
    texts = [decode([token]) for token in stopped]
    answer = texts[texts.index("</think>") + 1 :] if "</think>" in texts else []
    text = "".join(answer).strip()
    form = 1.0 if "".join(answer).strip() else -1.0
    if task == "letters":
        main = 1.0 if text == "x" else -1.0
        return Expected(
            {"answer": main, "form": form}, main + 0.2 * form, timeout=False, error=False
        )
    last = next((t for t in reversed(answer) if t.startswith("\n```")), "")
    main = 1.0 if last in RIGHT else -1.0
    error = "".join(texts).endswith("x")
    short = -1.0 if error else -len("".join(texts)) / 100
    given = {"answer": main, "form": form, "short": short}
    return Expected(given, main + 0.2 * form + 0.5 * short, last in SLEEPERS, error)


def check_rewards(run: LiveRun, steps: int) -> Counter[str]:
    """Every rollout's rewards, and the metrics of every step, are what the tokens say;
    what was seen.
    """
    tokenizer = load_tokenizer(run.cwd / "policy")
    seen = Counter[str]()

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.backend.decode(ids, skip_special_tokens=False)

    rows = runs.latest_rows(run.rundir.metrics)
    for row, groups in zip(rows, batches(run.rundir, run.recipe, steps), strict=False):
        for task in ("programs", "letters"):
            found = [
                (r, expected(r, task, decode))
                for g in groups
                if g.prompt.task == task
                for r in g.rollouts
            ]
            for rollout, wanted in found:
                assert rollout.rewards == pytest.approx(wanted.rewards)
                assert rollout.reward == pytest.approx(wanted.reward)
                assert rollout.correct is (wanted.rewards["answer"] > 0)
                assert (rollout.grader_timeout, rollout.grader_error) == (
                    wanted.timeout,
                    wanted.error,
                )
                seen[f"{task} {'right' if rollout.correct else 'wrong'}"] += 1
                seen["timeout"] += wanted.timeout
                seen["error"] += wanted.error
            if found:
                rates: dict[str, list[Any]] = {
                    f"grader_timeout_rate/{task}": [w.timeout for _, w in found],
                    f"grader_error_rate/{task}": [w.error for _, w in found],
                    f"reward_mean/{task}": [w.reward for _, w in found],
                }
                for name in found[0][1].rewards:
                    rates[f"reward/{name}/{task}"] = [w.rewards[name] for _, w in found]
                assert {name: row[name] for name in rates} == pytest.approx(
                    {name: math.fsum(values) / len(values) for name, values in rates.items()}
                )
    return seen


def voids(run: LiveRun) -> list[Group]:
    steps = run.steps()
    return [g for groups in batches(run.rundir, run.recipe, steps) for g in groups if g.void]


@pytest.mark.slow
def test_programs_and_a_service_that_comes_late_and_goes_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        Sandbox("bubblewrap", 1).check()
    except MegarlError as error:
        pytest.skip(str(error))
    (port,) = free_ports(1)
    write_policy(tmp_path / "policy")
    (tmp_path / "picky.py").write_text(BREVITY)
    write_prompts(
        tmp_path / "programs.jsonl", "a", r'"{\"tests\": [{\"input\": \"\", \"output\": \"1\"}]}"'
    )
    write_prompts(tmp_path / "letters.jsonl", "b", '"x"')
    refused = runs.megarl("train", "quickstart", *overrides(port), cwd=tmp_path)
    assert refused.returncode != 0
    assert "data.services.taste.api_key: REWARD_KEY is not set; export it" in refused.stderr
    assert not (tmp_path / "runs").exists(), "nothing was begun"
    monkeypatch.setenv("REWARD_KEY", KEY)

    run = runs.start(tmp_path, *overrides(port))
    try:
        log = run.rundir.log("controller", socket.gethostname().split(".")[0], 0)
        run.wait_for(
            lambda: log.exists() and "failed (attempt 1)" in log.read_text(),
            "request that nobody answered",
        )
        with service(port):
            run.wait_for(run.rundir.status.exists, "a status")
            family = run.family()
            ports = run.ports()
            assert run.finish() == 0, run.tail()
            check_nothing_left(family, ports)
        assert run.steps() == STEPS
        assert not voids(run), "no ticket was lost for a service that came within its retries"
        seen = check_rewards(run, STEPS)
        assert (
            min(
                seen[f"{task} {what}"]
                for task in ("programs", "letters")
                for what in ("right", "wrong")
            )
            > 0
        ), seen
        assert seen["error"] > 0
        assert [row["step"] for row in runs.latest_rows(run.rundir.eval)] == [0, STEPS]
    finally:
        run.kill()

    run = runs.start(tmp_path, *overrides(port), "run.resume=auto", f"run.steps={LATER}")
    try:
        run.wait_for(lambda: bool(voids(run)), "void ticket")
        run.rundir.stop_file.touch()
        assert run.finish() == 0, run.tail()
        lost = voids(run)
        assert {g.prompt.task for g in lost} == {"letters"}
        assert all(
            "the reward service taste at http://127.0.0.1" in g.void and "6 times" in g.void
            for g in lost
        )
        check_rewards(run, run.steps())
        rows = runs.latest_rows(run.rundir.metrics)
        assert sum(row["void_groups/letters"] for row in rows) == len(lost)
        assert sum(row["void_groups/programs"] for row in rows) == 0
    finally:
        run.kill()
    for file in run.rundir.path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), f"the key is in {file}"
