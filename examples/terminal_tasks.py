"""Tasks for a terminal, as folders, of three families that each need two commands; and
traces of a teacher that solves half of them, for a warm start:

    python examples/terminal_tasks.py terminal

writes terminal/train, terminal/heldout and terminal/sft.jsonl. What a task's folder has
is in megarl/tasks/agents/terminal.py, the whole example in docs/how-to/agents.md.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TRAIN = 240
HELDOUT = 48
TRACES = 12_000
END = "<eos>"
NOTHING = "(no output)"
KINDS = {"right": 0.5, "slipped": 0.4, "hasty": 0.1}
"""What the teacher does: all that is right; the second command with an error; only the
first command.
"""
TYPOS = ["ecoh", "ehco", "ehoc", "eoch", "eohc", "ceho", "hceo", "oche"]


@dataclass(frozen=True)
class Task:
    """A task. files: what the policy finds, by name. check: a command whose output is
    `expected` when the task is solved. first, printed, second: the solution's two
    commands, and what the first one prints. slip: the second with an error.
    """

    instruction: str
    files: dict[str, str]
    check: str
    expected: str
    first: str
    printed: str
    second: str
    slip: str


def name(rng: random.Random) -> str:
    return rng.choice("abcdefgh") + str(rng.randint(10, 99))


def number(rng: random.Random) -> str:
    return str(rng.randint(100, 999))


def find(rng: random.Random) -> Task:
    """Copy the file that contains a number."""
    numbers = rng.sample(range(100, 1000), 6)
    names = sorted({name(rng) for _ in range(3)})
    files = {file: f"{numbers.pop()}\n{numbers.pop()}\n" for file in names}
    source = rng.choice(names)
    key = rng.choice(files[source].split())
    target = f"r{rng.randint(1, 9)}"
    wrong_target = f"r{rng.randint(1, 9)}"
    return Task(
        f"Copy the file that contains {key} to {target}.",
        files,
        f"cat {target}",
        files[source],
        f"grep -l {key} *",
        source,
        f"cp {source} {target}",
        f"cp {source} {wrong_target}",
    )


def count(rng: random.Random) -> Task:
    """Write down how many lines have a number."""
    source = name(rng)
    key = number(rng)
    times = rng.randint(1, 9)
    lines = [key] * times + ["10", "20", "30"]
    rng.shuffle(lines)
    target = f"r{rng.randint(1, 9)}"
    return Task(
        f"Write the number of lines with {key} in {source} to {target}.",
        {source: "\n".join(lines) + "\n"},
        f"cat {target}",
        f"{times}\n",
        f"grep -c {key} {source}",
        str(times),
        f"echo {times} > {target}",
        f"echo {rng.randint(1, 9)} > {target}",
    )


def fix(rng: random.Random) -> Task:
    """Correct a program."""
    program = name(rng)
    typo = rng.choice(TYPOS)
    word = number(rng)
    return Task(
        f"Correct the misspelled echo in {program}.",
        {program: f"{typo} {word}\n"},
        f"sh {program}",
        f"{word}\n",
        f"cat {program}",
        f"{typo} {word}",
        f"sed -i s/{typo}/echo/ {program}",
        f"sed -i s/{rng.choice(TYPOS)}/echo/ {program}",
    )


FAMILIES: list[Callable[[random.Random], Task]] = [find, count, fix]


def write_folder(task: Task, folder: Path) -> None:
    """Write a task's folder."""
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    for file, text in task.files.items():
        (folder / "environment" / file).write_text(text)
    (folder / "instruction.md").write_text(f"{task.instruction}\n")
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 10.0\n")
    (folder / "tests" / "expected").write_text(task.expected)
    (folder / "tests" / "test.sh").write_text(
        f'{task.check} 2>&1 | cmp -s - "$(dirname "$0")/expected"\n'
    )
    (folder / "solution" / "solve.sh").write_text(f"{task.first}\n{task.second}\n")


def trace(task: Task, kind: str) -> dict[str, object]:
    """A session of the teacher: its messages, and between them what it is sent."""
    second = task.slip if kind == "slipped" else task.second
    parts = [f"```sh\n{task.first}\n```{END}", f"{task.printed}\n"]
    if kind != "hasty":
        parts += [f"```sh\n{second}\n```{END}", f"{NOTHING}\n"]
    return {"prompt": f"{task.instruction}\n", "completion": [*parts, "done"]}


def main(folder: Path) -> None:
    rng = random.Random(0)
    instructions = set()
    for part, size in (("heldout", HELDOUT), ("train", TRAIN)):
        for n in range(size):
            task = FAMILIES[n % len(FAMILIES)](rng)
            while task.instruction in instructions:
                task = FAMILIES[n % len(FAMILIES)](rng)
            instructions.add(task.instruction)
            write_folder(task, folder / part / f"{part}-{n:03}")
    with open(folder / "sft.jsonl", "w") as file:
        for kind in rng.choices(list(KINDS), list(KINDS.values()), k=TRACES):
            task = rng.choice(FAMILIES)(rng)
            if task.instruction not in instructions:
                file.write(json.dumps(trace(task, kind)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
