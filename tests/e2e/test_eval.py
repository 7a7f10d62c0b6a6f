"""`megarl eval` as a user runs it: a tiny model on a real server, rows of published
schemas; then a run's checkpoint.
"""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.cli import main
from megarl.core.base.rundir import complete, latest_rows, step_of
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.evaluation.answers import Answer, SuiteDir
from tests import make
from tests.e2e.runs import LiveRun, megarl, quiet
from tests.evaluation_sets import SETS, byte_llama

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

LENGTHS = ("length.thinking_tokens=[24, 24]", "length.answer_tokens=8")
GREEDY = ("evaluation.temperature=0", *LENGTHS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a model and rows of sets, and the model."""
    folder = tmp_path_factory.mktemp("eval")
    model = byte_llama(folder / "model")
    for name in ("gsm8k", "humaneval"):
        make.write_rows(folder / f"{name}.jsonl", SETS[name])
    return folder, model


def evaluate(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    data = [f"evaluation.suites.{name}.data={name}.jsonl" for name in ("gsm8k", "humaneval")]
    return megarl(
        "eval", "--model", "model", "--suite", "gsm8k,humaneval", *more, *data, cwd=folder
    )


def greedy(model: Any, folder: Path, answer: Answer) -> str:
    """What transformers writes after the same prompt, up to the end token."""
    tokenizer = load_tokenizer(folder / "model")
    prompt = torch.tensor([tokenizer.ids(answer.prompt).tolist()])
    with torch.no_grad():
        out = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)[
            0, prompt.shape[1] :
        ].numpy()
    ended = (out == tokenizer.end).nonzero()[0]
    return tokenizer.decode(out[: ended[0]] if len(ended) else out)


def test_greedy_answers_are_those_of_transformers_and_a_second_command_asks_what_is_missing(
    place: tuple[Path, Any],
) -> None:
    folder, model = place
    first = evaluate(folder, "--limit", "1", "--samples", "1", "--out", "greedy", *GREEDY)
    assert first.returncode == 0, first.stderr
    assert [
        line for line in first.stderr.splitlines() if "functools.cache" not in line
    ] == []  # Python 3.12.1 is warned of
    before = {
        name: (folder / "greedy" / name / "answers.jsonl").read_bytes()
        for name in ("gsm8k", "humaneval")
    }
    second = evaluate(folder, "--samples", "2", "--out", "greedy", *GREEDY)
    assert second.returncode == 0, second.stderr
    for row in ("prompts × answers", "3 × 2", "mean@k", "pass@2", "truncated", "entropy"):
        assert row in second.stdout
    for name, rows in before.items():
        suite = SuiteDir(folder / "greedy", name)
        assert suite.answers.read_bytes().startswith(rows), "what was there stays"
        answers = suite.read_answers()
        assert len(answers) == len(suite.answers.read_text().splitlines()) == 2 * len(SETS[name]), (
            "nothing asked twice"
        )
        for answer in answers:
            assert answer.completion == greedy(model, folder, answer)
            assert not answer.correct
            assert answer.entropy is not None
            assert answer.tokens <= 32
        result = suite.read_result()
        assert (result.suite, result.model, result.samples) == (name, "model", 2)
        assert (result.metrics["n_prompts"], result.metrics["pass_rate"]) == (len(SETS[name]), 0.0)
        assert result.metrics["truncation_rate"] == sum(a.truncated for a in answers) / len(answers)
    assert not list((folder / "greedy").glob(".servers/endpoints.json")), (
        "keys of servers that are gone"
    )


def test_nothing_is_started_where_nothing_is_to_be_asked_or_it_would_be_mixed(
    place: tuple[Path, Any],
) -> None:
    """After the test above: all is answered; then other settings."""
    folder, _ = place
    (logs,) = (folder / "greedy" / ".servers" / "logs" / "server").iterdir()
    written = logs.read_bytes()
    again = evaluate(folder, "--samples", "2", "--out", "greedy", *GREEDY)
    assert again.returncode == 0, again.stderr
    assert "3 × 2" in again.stdout
    other = evaluate(folder, "--samples", "2", "--out", "greedy", *GREEDY, "length.answer_tokens=9")
    assert other.returncode == 2
    assert "has answers that were made with other settings: length changed" in other.stderr
    assert logs.read_bytes() == written, "no server was started"


def command_of(out: str, samples: int) -> list[str]:
    """An evaluation of 3 prompts, four requests at a time."""
    command = [
        sys.executable,
        "-m",
        "megarl",
        "eval",
        "--model",
        "model",
        "--suite",
        "gsm8k",
        "--samples",
        str(samples),
    ]
    return [
        *command,
        "--data",
        "gsm8k.jsonl",
        "--out",
        out,
        *LENGTHS,
        "serving.max_running_requests=4",
    ]


def interrupted(
    folder: Path, out: str, samples: int, sent: signal.Signals
) -> tuple[int, bytes, bytes]:
    """Send it a signal after 20 answers: exit status, standard error and answers. None
    of its processes is left.
    """
    process = subprocess.Popen(
        command_of(out, samples),
        cwd=folder,
        env=quiet(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    answers = folder / out / "gsm8k" / "answers.jsonl"
    until = time.monotonic() + 240
    while not answers.exists() or answers.read_bytes().count(b"\n") < 20:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < until
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sent)
    _, said = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert not (folder / out / "gsm8k" / "result.json").exists()
    return process.returncode, said, answers.read_bytes()


@pytest.mark.slow
def test_ctrl_c_leaves_whole_rows_and_no_process(place: tuple[Path, Any]) -> None:
    folder, _ = place
    status, said, written = interrupted(folder, "stopped", 400, signal.SIGINT)
    assert status == 130
    assert b"Traceback" not in said
    rows = [json.loads(line) for line in written.splitlines()]
    assert 20 <= len(rows) < 1200


@pytest.mark.slow
@pytest.mark.faults
def test_the_same_command_goes_on_after_kill_9(place: tuple[Path, Any]) -> None:
    """What was answered stays and is not asked again; a row that was cut short is."""
    folder, _ = place
    status, _, written = interrupted(folder, "killed", 40, signal.SIGKILL)
    assert status == -signal.SIGKILL
    suite = SuiteDir(folder / "killed", "gsm8k")
    whole = written[: written.rindex(b"\n") + 1]
    with suite.answers.open("ab") as file:  # as if it had died within the next row
        file.write(whole[: whole.index(b"\n") // 2])
    begun = len(suite.answers.read_bytes())
    done = subprocess.run(
        command_of("killed", 40),
        cwd=folder,
        env=quiet(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert suite.answers.read_bytes().startswith(whole)
    assert len(suite.answers.read_bytes()) > begun
    answers = suite.read_answers()
    assert len({(answer.id, answer.sample) for answer in answers}) == len(answers) == 3 * 40
    assert suite.read_result().metrics["n_prompts"] == 3


def test_a_runs_checkpoint_on_its_own_task(finished: LiveRun, scored: str) -> None:
    """The score that the run itself wrote for this version is near; a run's own
    evaluations have the same files.
    """
    step = finished.recipe.run.steps
    run = finished.rundir.path
    assert f"@{step}" in scored
    out = finished.cwd / "runs" / "scored"
    result = SuiteDir(out, "arithmetic").read_result()
    in_run = {row["step"]: row for row in latest_rows(finished.rundir.eval)}[step]
    both = (result.metrics, in_run)
    widths = [
        (scores["pass_rate_high"] - scores["pass_rate_low"]) / 2 for scores in both
    ]  # two standard errors
    assert abs(result.metrics["pass_rate"] - in_run["pass_rate"]) <= 2 * math.hypot(*widths)
    assert not (out / ".servers" / "model").exists(), "the exported weights"

    kept = sorted(path.name for path in finished.rundir.evaluations.iterdir())
    assert kept == [f"step-{row['step']:07}" for row in latest_rows(finished.rundir.eval)]
    own = SuiteDir(finished.rundir.evaluations / f"step-{step:07}", "arithmetic")
    assert len(own.read_answers()) == in_run["n_prompts"] * in_run["samples"]
    assert own.read_result().metrics["pass_rate"] == in_run["pass_rate"]
    assert own.read_result().metrics["maj@2"] == in_run["maj@2"]

    missing = megarl("eval", "--model", f"{run}@7", "--suite", "arithmetic", cwd=finished.cwd)
    assert missing.returncode == 2
    there = ", ".join(str(step_of(path)) for path in complete(finished.rundir.checkpoints))
    assert f"has no checkpoint of step 7; there are those of {there}" in missing.stderr

    curve = megarl("answers", "curve", str(run), str(out), cwd=finished.cwd)
    assert curve.returncode == 0, curve.stderr
    assert (run / "curve-arithmetic.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nowhere", "--suite", "gsm8k"), "neither a Hugging Face directory"),
        (("--model", "model", "--suite", "gsm9k"), "'gsm9k' is not one of"),
        (("--model", "model", "--suite", "mine.yaml"), "'mine.yaml' is not a file"),
        (
            ("--model", "model", "--suite", "gsm8k", "--data", "none.jsonl"),
            "'none.jsonl' is not a file",
        ),
        (
            ("--model", "model", "--suite", "gsm8k", "--samples", "0"),
            "samples: input should be greater",
        ),
        (
            ("--model", "model", "--suite", "gsm8k,mbpp", "--data", "gsm8k.jsonl"),
            "--data: is for one suite",
        ),
        (
            (
                "--model",
                "model",
                "--suite",
                "gsm8k",
                "--data",
                "gsm8k.jsonl",
                "--out",
                "gsm8k.jsonl",
            ),
            "--out: cannot write",
        ),
    ],
)
def test_one_clear_error(
    place: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(place[0])
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("megarl: ")
