"""The terminal agent: tasks that are folders, the sandbox of the policy's commands, and
sessions of a policy that is made up.
"""

import asyncio
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.tasks.agents import terminal
from megarl.tasks.agents.inside import AgentTask
from megarl.tasks.agents.sandbox import agent_sandbox
from megarl.tasks.agents.terminal import Output, passes, read_task, run, solve, try_task, workshop
from megarl.tasks.graders.scratch import hand_over, scratch
from tests.unit.tasks.agents import serving
from tests.unit.tasks.agents.serving import gateway

pytestmark = pytest.mark.processes
EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of each family of the example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("terminal_tasks")
    rng = random.Random(1)
    for family in example.FAMILIES:
        example.write_folder(family(rng), tmp_path / "tasks" / family.__name__)
    sys.modules.pop("terminal_tasks")
    return tmp_path / "tasks"


def test_a_folder_of_tasks_becomes_rows(
    tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MegarlError, match=r"count would be hidden from the agent: .* start megarl"):
        terminal.main([str(tasks), str(tasks / "rows.jsonl")])
    monkeypatch.chdir(tasks.parent)
    terminal.main([str(tasks), str(tasks / "rows.jsonl")])
    assert capsys.readouterr().out.startswith("3 tasks in ")
    rows = [json.loads(line) for line in (tasks / "rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["count", "find", "fix"]
    for row in rows:
        task = read_task(Path(row["answer"]))
        assert (row["prompt"], task.test_s) == (task.instruction, 10.0)


def without_a_test(task: Path) -> None:
    (task / "tests" / "test.sh").unlink()


def with_an_image(task: Path) -> None:
    (task / "environment" / "Dockerfile").touch()


def with_bad_settings(task: Path) -> None:
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 'soon'")


def with_a_test_that_always_passes(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("true\n")


def with_a_wrong_solution(task: Path) -> None:
    (task / "solution" / "solve.sh").write_text("echo never mind; false\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_test, r"find is not a task: it has no tests/test\.sh"),
        (with_an_image, r"find needs an image .* put the files themselves into environment/"),
        (with_bad_settings, r"task\.toml cannot be read: could not convert"),
        (with_a_test_that_always_passes, "find: its test passes before any work is done"),
        (with_a_wrong_solution, r"find: its test fails after its solution.*never mind\n.*status 1"),
    ],
)
def test_a_task_that_is_none_is_refused(
    tasks: Path, change: Callable[[Path], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tasks)
    change(tasks / "find")
    with pytest.raises(MegarlError, match=rf"(?s){said}"):
        terminal.main([str(tasks), str(tasks / "rows.jsonl")])
    assert not (tasks / "rows.jsonl").exists()
    with pytest.raises(MegarlError, match="there is no task"):
        terminal.main([str(tasks / "fix"), "rows.jsonl"])
    with pytest.raises(MegarlError, match="none is not there, or is hidden from the agent"):
        read_task(tasks / "none")


def test_a_command_can_do_nothing_outside_of_its_folder(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    task = read_task(tasks / "find")

    def said(command: str, limit_s: float = 20) -> Output:
        return run(task, work, ["sh", "-c", command], limit_s)

    with workshop(task) as work:
        assert len(said("ls").text.split()) == len(list((tasks / "find/environment").iterdir()))
        assert said(f"ls {tasks}").message == "(no output)", "no task, and so no test"
        assert said("env | grep secret").status == 1
        for forbidden in (
            f"kill -0 {os.getpid()}",
            f"cat /proc/{os.getpid()}/environ",
            f"touch {Path.cwd()}/left",
            "touch /run/left",
            f"umount {tasks}",
            "mount -o remount,rw,bind /",
            ": >> /proc/sys/kernel/core_pattern",
        ):
            assert said(forbidden).status != 0, forbidden
        assert said("grep -c : /proc/net/dev").text == "1\n", "loopback alone"
        assert said("echo 1 > a; touch /tmp/b; cat a").message == "1"
        assert said("false").message == "(status 1)"
        assert said("echo bwrap: no; false") == Output("bwrap: no\n", 1)
        assert said("chmod 0 .").status == 0
        assert said("cat a").message == "1"
        assert said("sleep 60", limit_s=0.5).status == 124
        shown = said("seq 100000").text
        assert shown.startswith("1\n2\n")
        assert shown.endswith("99999\n100000\n")
        assert "\n...\n" in shown
        assert len(shown) < 5000


def test_a_command_sees_no_folder_that_programs_have_sockets_in(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(EXAMPLES))
    task = read_task(tasks / "find")
    with workshop(task) as work, tempfile.TemporaryDirectory(dir="/var/tmp"):
        for folder in ("/run", "/var/tmp", str(EXAMPLES)):
            assert os.listdir(folder)
            assert run(task, work, ["ls", "-A", folder], 20) == Output("", 0)


def test_a_test_imports_nothing_that_the_policy_has_left(tasks: Path) -> None:
    task = read_task(tasks / "find")
    python = f"{sys.base_prefix}/bin/python3"
    (task.path / "tests" / "test.sh").write_text(
        f"echo bwrap: no; {python} -c 'import json, sys; sys.exit(1)'\n"
    )
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for left in (f".local/lib/{version}/site-packages/usercustomize.py", "json.py"):
        with workshop(task) as work:
            (work / left).parent.mkdir(parents=True, exist_ok=True)
            (work / left).write_text("import os; os._exit(0)")
            ends_at_once = run(task, work, [python, "-c", "import json; print(1)"], 20)
            assert ends_at_once == Output("", 0), left
            assert not passes(task, work), left


def test_its_commands_run_in_the_sandbox_of_an_agent(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from pathlib import Path; from megarl.tasks.agents import terminal;"
        " print([terminal.try_task(terminal.read_task(Path(p))) for p in sys.argv[1:]])"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tasks.parent)
    with scratch() as folder:
        hand_over(folder)
        done = subprocess.run(
            [*agent_sandbox(folder, folder), sys.executable, "-c", code, *tasks.iterdir()],
            env=os.environ | {"TMPDIR": str(folder)},
            capture_output=True,
            text=True,
        )
    assert done.stdout == "['', '', '']\n", done.stderr


def test_a_machine_without_namespaces_is_told(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tasks / "programs").mkdir()
    (tasks / "programs" / "rm").symlink_to(str(shutil.which("rm")))
    monkeypatch.setenv("PATH", str(tasks / "programs"))
    with pytest.raises(MegarlError, match=r"install it \(apt-get install bubblewrap\)"):
        try_task(read_task(tasks / "find"))
    (tasks / "bwrap").write_text("#!/bin/sh\necho bwrap: no namespaces; exit 1")
    (tasks / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tasks}:/usr/bin:/bin")
    with pytest.raises(MegarlError, match="cannot run in bubblewrap here: bwrap: no namespaces"):
        try_task(read_task(tasks / "find"))


@pytest.mark.parametrize("is_right", [True, False])
def test_the_reward_is_the_test_after_the_policys_commands(
    tasks: Path, tmp_path: Path, is_right: bool
) -> None:
    task = read_task(tasks / "count")
    first, second = (task.path / "solution" / "solve.sh").read_text().splitlines()
    if not is_right:
        second = second.replace("echo", "echo 1")
    answers = [f"I look.\n```bash\n{first}\n```", f"```sh\n{second}\n```", "Done."]

    async def play() -> None:
        async with gateway(tmp_path / "model", *answers, requests=3) as served:
            given = AgentTask(
                prompt=task.instruction,
                id="count",
                task="t",
                answer=str(task.path),
                reward_key=served.session.reward_key,
                base_url=f"{served.url}/v1",
                api_key=served.session.key,
                model="policy",
            )
            assert await asyncio.to_thread(solve, given) is is_right
            counted = (task.path / "tests" / "expected").read_text().strip()
            assert f"user\n{counted}<|im_end|>" in served.sent(1)
            assert "(no output)" in served.sent()
            assert len(served.session.rollout().paths) == 1

    (tmp_path / "model").mkdir()
    serving.run(play)
