"""An agent that lets the policy work in a terminal on tasks that are folders, as
Harbor's are, but without images.

    TASK/instruction.md      what the policy is told
         tests/test.sh       run where the policy has worked; status 0: it is solved
         environment/        the files that the policy finds
         solution/solve.sh   solves the task, so that it can be tried
         task.toml           [verifier] timeout_sec

    python -m megarl.tasks.agents.terminal TASKS tasks.jsonl
        tries the tasks in a folder, and writes a row for each: its instruction, and the
        folder as `answer`

The policy writes one command a message, as a block of shell; a message without one ends
the session, and the test gives the reward. Each command runs in a sandbox of its own
inside the agent's: it writes only in the working folder and in an empty /tmp, has no
network and no key, does not see the folder that holds the tasks, nor those in which
programs make their sockets, and can neither signal nor trace the agent. Its processes
end with it. The test's home is the empty /tmp, and its Python imports nothing from the
working folder of its own accord. The last three parts of a task may be missing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_jsonl
from megarl.tasks.agents.inside import AgentTask, folders_of_sockets

SYSTEM = (
    "You work in a terminal. Write one command at a time, in a block that begins with ```sh and"
    " ends with ```. You are sent what it prints. When you have finished, write a message without"
    " a command."
)
COMMAND = re.compile(r"```(?:ba)?sh\n(.*?)\n?```", re.DOTALL)
COMMAND_LIMIT_S = 60.0
TEST_LIMIT_S = 60.0
"""Time limit of a test whose task.toml has none."""
REQUEST_LIMIT_S = 3600.0
SHOWN_BYTES = 2000
"""How much of the beginning, and how much of the end, of an output the policy sees."""
NOTHING = "(no output)"
TIMED_OUT = 124
"""Status of a command that ran into its limit, as of timeout(1)."""
WHERE = (
    "data.sandbox=bubblewrap hides temporary folders, /run and, under root, what others may not"
    " enter; tasks can lie below the directory that you start megarl from"
)
TEST_VARIABLES = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
"""So that a test's programs take nothing from where the policy has worked."""


@dataclass(frozen=True)
class TaskFolder:
    """A task. test_s: the time limit of its test, in seconds."""

    path: Path
    instruction: str
    test_s: float


@dataclass(frozen=True)
class Output:
    """What a command printed, shortened, and its exit status."""

    text: str
    status: int

    @property
    def message(self) -> str:
        """What the policy is told."""
        text = self.text.strip("\n")
        if self.status:
            return f"{text}\n(status {self.status})".lstrip("\n")
        return text or NOTHING


def solve(task: AgentTask) -> bool:
    """Let the policy work on the task whose folder is `answer`; return whether its test
    passes.
    """
    folder = read_task(Path(task.answer))
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.prompt},
    ]
    with workshop(folder) as work:
        while answer := _answer(task, messages):
            commands = COMMAND.findall(answer)
            if not commands:
                break
            output = run(folder, work, ["sh", "-c", commands[-1]], COMMAND_LIMIT_S)
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": output.message})
        return passes(folder, work)


def read_task(path: Path) -> TaskFolder:
    """Read a task's folder. MegarlError if it is none, or if it needs an image."""
    path = path.resolve()
    if not os.path.exists(path):  # False, too, if we may not look
        raise MegarlError(f"{path} is not there, or is hidden from the agent: {WHERE}")
    for name in ("instruction.md", "tests/test.sh"):
        if not (path / name).is_file():
            raise MegarlError(f"{path} is not a task: it has no {name}")
    if (path / "environment" / "Dockerfile").exists():
        raise MegarlError(
            f"{path} needs an image (environment/Dockerfile), and none is built here; put the files"
            " themselves into environment/"
        )
    settings = path / "task.toml"
    test_s = TEST_LIMIT_S
    if settings.exists():
        try:
            verifier = tomllib.loads(settings.read_text()).get("verifier", {})
            test_s = float(verifier.get("timeout_sec", TEST_LIMIT_S))
        except (ValueError, TypeError, AttributeError) as error:
            raise MegarlError(f"{settings} cannot be read: {error}") from None
    return TaskFolder(path, (path / "instruction.md").read_text().strip(), test_s)


@contextmanager
def workshop(task: TaskFolder) -> Iterator[Path]:
    """Have a copy of the task's files in a new folder for the block."""
    work = Path(tempfile.mkdtemp(prefix="work-")).resolve()
    try:
        files = task.path / "environment"
        if files.is_dir():
            shutil.copytree(files, work, symlinks=True, dirs_exist_ok=True)
        yield work
    finally:  # Python's own removal fails at what a policy may make
        subprocess.run(["/bin/rm", "-rf", "--", str(work)], stderr=subprocess.DEVNULL)


def passes(task: TaskFolder, work: Path) -> bool:
    """Return whether the task's test passes in this folder."""
    test = task.path / "tests" / "test.sh"
    return run(task, work, ["bash", str(test)], task.test_s, "tests").status == 0


def run(task: TaskFolder, work: Path, command: list[str], limit_s: float, part: str = "") -> Output:
    """Run a command in a sandbox, in the folder where the policy works. part: what it
    may read of the task's folder, nothing if empty. MegarlError if there is no sandbox
    here.
    """
    work.chmod(0o700)  # a command may have closed it
    variables = {"PATH": os.environ["PATH"], "HOME": str(work), "LC_ALL": "C.UTF-8"}
    if part == "tests":
        variables |= TEST_VARIABLES
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as report:
        sandbox = [*_sandbox(task, work, part), "--json-status-fd", str(report.fileno()), "--"]
        try:
            status = subprocess.run(
                [*sandbox, *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[report.fileno()],
                timeout=limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        except FileNotFoundError:
            raise MegarlError(
                "commands of the policy run in bubblewrap; install it (apt-get install bubblewrap)"
            ) from None
        report.seek(0)
        has_started = status == TIMED_OUT or b'"exit-code"' in report.read()
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(SHOWN_BYTES)
        output.seek(max(SHOWN_BYTES, size - SHOWN_BYTES))
        end = output.read()
    if status > 0 and not has_started:
        raise MegarlError(
            f"commands of the policy cannot run in bubblewrap here: {text.decode(errors='replace')}"
        )
    if size > 2 * SHOWN_BYTES:
        text += b"\n...\n"
    return Output((text + end).decode(errors="replace"), status)


def _sandbox(task: TaskFolder, work: Path, part: str) -> list[str]:
    """Build the bwrap command for `run`, without what it is to run."""
    sandbox = ["bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    sandbox += ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    sandbox += ["--ro-bind", "/", "/", "--dev", "/dev"]
    temporary = Path("/tmp").resolve()
    covers = sorted({temporary, task.path.parent, *folders_of_sockets()})
    for cover in covers:
        sandbox += ["--tmpfs", str(cover)]
    folder = str(task.path / part)
    if part:
        sandbox += ["--ro-bind", folder, folder]
    sandbox += ["--bind", str(work), str(work), "--chdir", str(work)]
    for cover in covers:
        if cover != temporary:
            sandbox += ["--remount-ro", str(cover)]
    return sandbox


def try_task(task: TaskFolder) -> str:
    """Return what is wrong with a task: its test passes before any work, or fails after
    its solution; "" if nothing is.
    """
    with workshop(task) as work:
        if passes(task, work):
            return "its test passes before any work is done"
        if not (task.path / "solution" / "solve.sh").is_file():
            return ""
        command = ["bash", str(task.path / "solution" / "solve.sh")]
        solved = run(task, work, command, COMMAND_LIMIT_S, "solution")
        if not passes(task, work):
            return f"its test fails after its solution, which printed: {solved.message}"
    return ""


def _answer(task: AgentTask, messages: list[dict[str, str]]) -> str:
    """Return the policy's next message; "" if a limit of the session has been
    reached.
    """
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as reply:
            content = json.load(reply)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return ""
    return str(content or "")


def main(words: list[str]) -> None:
    """Try the tasks in a folder, and write their rows."""
    from megarl.tasks.agents.sandbox import hides  # slow to import, and no agent needs it

    if len(words) != 2:
        raise MegarlError("usage: python -m megarl.tasks.agents.terminal TASKS ROWS.jsonl")
    paths = sorted(path.parent for path in Path(words[0]).glob("*/instruction.md"))
    if not paths:
        raise MegarlError(f"{words[0]}: there is no task, that is, no */instruction.md")
    rows = []
    for path in paths:
        task = read_task(path)
        if hides(path):
            raise MegarlError(f"{task.path} would be hidden from the agent: {WHERE}")
        problem = try_task(task)
        if problem:
            raise MegarlError(f"{path}: {problem}")
        rows.append({"id": path.name, "prompt": task.instruction, "answer": str(task.path)})
    write_jsonl(Path(words[1]), rows)
    print(f"{len(rows)} tasks in {words[1]}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MegarlError as error:
        sys.exit(f"megarl: {error}")
