"""A run read from another terminal, and after its end: `megarl status` and `megarl
logs`.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.core.base import terminal
from megarl.core.base.rundir import META, RunDir, append_jsonl
from megarl.core.recipe import Recipe, dump
from megarl.run import state, summary
from megarl.run.closing import Death, causes
from megarl.run.logs import last_lines
from megarl.run.restart import Role

Write = Callable[[int], RunDir]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")


def note(rundir: RunDir, session: str, event: str, role: str, **more: object) -> None:
    row = {"time": time.time(), "session": session, "event": event, "role": role}
    append_jsonl(rundir.logs / "supervisor.jsonl", row | more)


def live(rundir: RunDir) -> None:
    """As its second life's supervisor has noted."""
    note(rundir, "a", "started", "server-7", nodes=["old"])
    for role, node in (
        ("server-0", "n1"),
        ("server-1", "n2"),
        ("controller-0", "n1"),
        ("learner-0", "n3"),
    ):
        note(rundir, "b", "started", role, nodes=[node])
    note(rundir, "b", "ended", "server-1", status=-9)
    note(rundir, "b", "dropped", "server-1", nodes=["n2"])
    note(rundir, "b", "ended", "server-0", status=-9)
    note(rundir, "b", "restart", "server-0", delay_s=0.0)
    note(rundir, "b", "started", "server-0", nodes=["n1"])


def test_roles(write_run: Write) -> None:
    rundir = write_run(3)
    live(rundir)
    roles = state.read(rundir).roles
    assert {role.name: view.state for role, view in roles.items()} == {
        "server-0": "running",
        "server-1": "dropped",
        "controller-0": "running",
        "learner-0": "running",
    }
    assert roles[Role("server", 0)].restarts == 1
    assert list(roles[Role("learner")].nodes) == ["n3"]


def test_of_a_live_run(
    recipe: Recipe, write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = write_run(41)
    live(rundir)
    milestones = recipe.checkpoint.model_copy(update={"milestones": (30, 50), "keep_best": True})
    rundir.recipe.write_text(dump(recipe.model_copy(update={"checkpoint": milestones})))
    (rundir.checkpoints / "step-0000040").mkdir()
    (rundir.checkpoints / "step-0000040" / META).write_text("{}")
    status = json.loads(rundir.status.read_text()) | {"time": time.time()}
    rundir.status.write_text(json.dumps(status))
    assert main(["status", str(rundir.path)]) == 0
    shown = capsys.readouterr().out
    assert "step 41/80" in shown
    assert "dropped" in shown
    assert "seems dead" not in shown
    assert "kept as the best by its held-out score" in shown
    assert f"{rundir.path}@best): {rundir.checkpoints / 'step-0000040'}" in shown
    assert re.findall("kept for good, as of (.*): .*/(step-.*)", shown) == [
        ("step 30", "step-0000040")
    ]
    rundir.status.write_text(json.dumps(status | {"time": time.time() - 7300}))
    assert main(["status", str(rundir.path)]) == 0
    assert "nothing written for 2:01:4" in capsys.readouterr().out


def test_the_last_problem_with_its_time(
    write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest of what roles warned of and what became of them, whatever else is in
    the logs.
    """
    rundir = write_run(41)
    live(rundir)
    logged(
        rundir,
        "controller",
        "n1",
        0,
        "2026-03-01 14:05:06,789 controller INFO megarl.core: well",
        "Traceback: old",
    )
    assert main(["status", str(rundir.path)]) == 0
    killed = next(line for line in capsys.readouterr().out.splitlines() if "last problem" in line)
    assert re.search(
        r"last problem: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d server-0 ended \(status -9\)", killed
    )
    last = (
        "2999-03-01 14:05:06,789 learner 3 WARNING megarl.core.learner.trainer: step 7 is skipped"
    )
    logged(
        rundir, "learner", "n3", 3, last, "2999-03-02 14:05:06,789 learner 3 WARNING torch: noise"
    )
    assert main(["status", str(rundir.path)]) == 0
    assert (
        "last problem: 2999-03-01 14:05:06 learner 3 step 7 is skipped" in capsys.readouterr().out
    )


def test_logs_older_than_the_last_problem_are_not_read(
    write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier lives, on other nodes, of which there may be thousands."""
    rundir = write_run(3)
    read = list[str]()
    for life in range(3):
        said = f"2026-03-0{life + 1} 14:05:06,789 learner 0 WARNING megarl.core: life {life}"
        logged(rundir, "learner", f"n{life}", 0, said)
        at = time.mktime((2026, 3, life + 1, 15, 0, 0, 0, 0, -1))
        os.utime(rundir.log("learner", f"n{life}", 0), (at, at))
    logged(
        rundir,
        "server",
        "n2",
        0,
        "2026-03-03 14:05:05,789 server 0 WARNING megarl.core: before that",
    )
    monkeypatch.setattr(
        state, "last_lines", lambda log, count: read.append(log.stem) or last_lines(log, count)
    )
    assert state.dated_problem(rundir) == "2026-03-03 14:05:06 learner 0 life 2"
    assert read == ["n2.0", "n2.0"]


def test_of_a_finished_run(
    recipe: Recipe,
    write_run: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a folder with a blank in its name:
    the commands that are shown can be copied.
    """
    rundir = write_run(41)
    values = summary.summarise(recipe, rundir) | {"outcome": "finished", "reason": "all steps done"}
    rundir.summary.write_text(json.dumps(values))
    (rundir.checkpoints / "step-0000041").mkdir()
    (rundir.checkpoints / "step-0000041" / META).write_text("{}")
    shutil.move(rundir.path, rundir.path.parent / "a b")
    monkeypatch.chdir(rundir.path.parent)
    assert main(["status", "a b"]) == 0
    shown = capsys.readouterr().out
    assert "finished: all steps done" in shown
    for command in (
        "rollouts show 'a b' ",
        "--logdir 'a b/tensorboard' ",
        "megarl export 'a b' 'a b/hf' ",
        f"megarl train 'a b/recipe.yaml' run.resume=auto run.steps={2 * recipe.run.steps} ",
    ):
        assert command in shown


def test_no_export_is_shown_of_a_checkpoint_that_was_put_aside(
    recipe: Recipe, write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = write_run(3)
    values = summary.summarise(recipe, rundir) | {"outcome": "failed", "reason": "it is damaged"}
    rundir.summary.write_text(json.dumps(values))
    (rundir.checkpoints / "step-0000003.unreadable").mkdir()
    assert main(["status", str(rundir.path)]) == 0
    shown = capsys.readouterr().out
    assert "failed: it is damaged" in shown
    assert "megarl export" not in shown


def test_a_stopped_run_shows_what_goes_on_with_it_and_its_only_score_once(
    recipe: Recipe, write_run: Write
) -> None:
    rundir = write_run(3)
    scored = {
        "pass_rate_before": 0.1,
        "pass_rate_before_step": 0,
        "pass_rate_after": 0.1,
        "pass_rate_after_step": 0,
    }
    values = (
        summary.summarise(recipe, rundir) | scored | {"outcome": "stopped", "reason": "as asked"}
    )
    console = terminal.console(width=200)
    with console.capture() as captured:
        console.print(summary.render(values, rundir))
    shown = "".join(captured.get().replace("│", "").split())  # a long path is folded
    assert f"continuemegarltrain{rundir.recipe}run.resume=auto╰" in shown
    assert "0.100(step0),notscoredsince" in shown
    assert "(last3steps)" in shown


def test_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["status", str(tmp_path)], ["logs", str(tmp_path)]):
        assert main(words) == 2
        assert f"{tmp_path}: not a run directory" in capsys.readouterr().err


def logged(rundir: RunDir, role: str, host: str, rank: int, *lines: str) -> None:
    log = rundir.log(role, host, rank)
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_logs(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = write_run(3)
    run = str(rundir.path)
    logged(rundir, "server", "n1", 0, "a", "b", "c")
    logged(rundir, "server", "n2", 1, "d")
    assert main(["logs", run, "--role", "server", "-n", "2"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "server n1.0: b",
        "server n1.0: c",
        "server n2.1: d",
    ]
    assert main(["logs", run, "--role", "server-1"]) == 0
    assert capsys.readouterr().out == "d\n"
    for host, rank in (("n3", 0), ("n3", 1)):
        logged(rundir, "learner", host, rank, f"rank {rank}")
    assert main(["logs", run]) == 0
    assert capsys.readouterr().out == "rank 0\n"
    shutil.rmtree(rundir.logs / "learner")
    assert main(["logs", run, "--role", "learner"]) == 2
    assert "no log of learner yet" in capsys.readouterr().err
    assert main(["logs", run, "--role", "judge-1"]) == 2
    assert (
        "--role: 'judge-1' is none of server, learner, controller, supervisor"
        in capsys.readouterr().err
    )


def test_logs_of_the_supervisor_are_sentences(
    write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = write_run(3)
    log = rundir.logs / "supervisor.jsonl"
    log.unlink(missing_ok=True)
    at = {"time": time.mktime((2026, 3, 1, 14, 5, 6, 0, 0, -1)), "session": "s"}
    append_jsonl(
        log, at | {"event": "started", "role": "server-0", "pid": 7, "nodes": ["n1", "n2"]}
    )
    append_jsonl(log, at | {"event": "stopping", "signal": ""})
    with log.open("a") as file:
        file.write("half of a li\n[1]\n")
    assert main(["logs", str(rundir.path), "--role", "supervisor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-03-01 14:05:06 server-0 started (pid 7, nodes n1,n2)",
        "2026-03-01 14:05:06 run stopping",
        "half of a li",
        "[1]",
    ]


def test_logs_are_followed_to_the_end(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = write_run(3)
    logged(rundir, "learner", "n1", 0, "first")
    following = threading.Thread(
        target=main, args=(["logs", str(rundir.path), "--role", "learner", "-f"],)
    )
    following.start()
    shown = ""
    deadline = time.monotonic() + 30
    while not shown and time.monotonic() < deadline:
        time.sleep(0.02)
        shown = capsys.readouterr().out
    assert shown == "first\n"
    logged(rundir, "learner", "n1", 0, "second")
    logged(rundir, "learner", "n2", 1, "of another rank")
    rundir.summary.write_text("{}")
    following.join(30)
    assert not following.is_alive()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "learner n1.0: second",
        "learner n2.1: of another rank",
    ]


def test_of_a_log_of_weeks_that_is_followed_only_the_end_is_read(
    write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = write_run(3)
    logged(rundir, "learner", "n1", 0)
    os.truncate(rundir.log("learner", "n1", 0), 1 << 40)  # which takes no place
    logged(rundir, "learner", "n1", 0, "", "last but one", "last")
    rundir.summary.write_text("{}")
    assert main(["logs", str(rundir.path), "-f", "-n", "2"]) == 0
    assert capsys.readouterr().out == "last but one\nlast\n"


def test_causes(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    deaths = [
        Death(Role("server", i), ["n1"], 1e9, "was killed by SIGKILL", "" if i else "OSError: no")
        for i in range(22)
    ]
    Console(width=100).print(causes(deaths))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("what died last (2 before that are in logs/supervisor.jsonl)")
    assert len(lines) == 22
    date, _, *rest = lines[-1].split()  # a run lasts for weeks
    assert date == time.strftime("%m-%d", time.localtime(1e9))
    assert rest == ["server-21", "n1", "was", "killed", "by", "SIGKILL", "none"]
