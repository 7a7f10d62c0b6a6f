"""Agents of the tests, as users write them: functions, and a command (`python -m
tests.unit.tasks.agents.programs`).
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def ask(
    messages: list[dict[str, Any]],
    path: str = "chat/completions",
    limit_s: float = 30,
    key: str = "",
    **more: Any,
) -> Any:
    """The answer's message, or the error's text."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages} | more
    key = key or os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as reply:
            said = json.load(reply)
            return said["choices"][0]["message"]["content"] if "choices" in said else said
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["message"]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def judged(task: Any) -> float:
    """Its own reward."""
    return 0.5 if ask(user(task.prompt)) == task.answer else -0.5


def nests(task: Any) -> float:
    """Leaves a folder that Python's own removal cannot handle."""
    os.chdir(os.environ["TMPDIR"])
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    return judged(task)


def judged_by_numpy(task: Any) -> Any:
    import numpy as np

    return np.bool_(ask(user(task.prompt)) != task.answer)


async def unjudged(task: Any) -> None:
    """Leaves the reward to the task's grader."""
    ask(user(task.prompt))


def rewarded_by_turn(task: Any) -> None:
    """Four turns in two conversations, with rewards before, between and after them."""
    ask([], "reward", key=task.reward_key, reward=8)
    ask(user(task.prompt))
    ask([], "reward", key=task.reward_key, reward=100)
    ask([], "reward", key=task.reward_key, reward=1)  # in place of the 100
    ask(user("something else"))
    said = {"role": "assistant", "content": "7"}
    ask([*user(task.prompt), said, *user("and?")])
    ask([], "reward", key=task.reward_key, reward=2)
    ask([*user(task.prompt), said, *user("and?"), said, *user("and then?")])
    ask([], "reward", key=task.reward_key, reward=0.5)


def crashes_after_a_turns_reward(task: Any) -> None:
    ask(user(task.prompt))
    ask([], "reward", key=task.reward_key, reward=1)
    ask(user(f"{task.prompt} again"))
    sys.exit(3)


def runs_the_policys_program(task: Any) -> None:
    """One that posts a reward with whatever it finds in the environments of itself and
    of the agent.
    """
    ask(user(task.prompt))
    subprocess.run([sys.executable, "-c", f"from {__name__} import cheat; cheat()"], check=True)


def cheat() -> None:
    found = {
        word
        for pid in ("self", os.getppid())
        for word in Path(f"/proc/{pid}/environ").read_text().split("\0")
    }
    for key in {word.partition("=")[2] for word in found} | {sys.stdin.read()}:
        with suppress(ValueError):  # no header can have it
            ask([], "reward", key=key, reward=1)


def posts_text(task: Any) -> None:
    ask(user(task.prompt))
    ask([], "reward", key=task.reward_key, reward="1.0")  # and does not look at the answer


def posts_nan_first(task: Any) -> None:
    """Posts NaN in its first session, and a number in its second."""
    ask(user(task.prompt))
    mark = Path(os.environ["CRASH_MARK"])
    if mark.exists():
        ask([], "reward", key=task.reward_key, reward=0.5)
    else:
        mark.touch()
        ask([], "reward", key=task.reward_key, reward=float("nan"))


def returns_nan(task: Any) -> float:
    return float("nan")


def crashes(task: Any) -> bool:
    ask(user(task.prompt))
    raise RuntimeError("a bug of mine")


def crashes_once(task: Any) -> bool:
    mark = Path(os.environ["CRASH_MARK"])
    if not mark.exists():
        mark.touch()
        os._exit(3)
    return ask(user(task.prompt)) == task.answer


def sleeps(task: Any) -> None:
    """Leaves two children behind, one of them in a session of its own, and waits for
    ever. It tells their ids in a file, and that it was told to end in another.
    """
    ask(user(task.prompt))
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(command, start_new_session=alone) for alone in (False, True)]
    mark = Path(os.environ["CHILD_MARK"])
    mark.write_text(" ".join(str(child.pid) for child in children))
    try:
        time.sleep(600)
    finally:
        mark.with_suffix(".ended").touch()


def speaks_on(task: Any) -> None:
    """Asks until it is told that its session is over, and ends."""
    while "session is over" not in ask(user(f"{task.prompt} {time.monotonic()}")):
        pass


def looks_around(task: Any) -> float:
    """In its digits whether it finds the run's key, can write beside the run and in
    TMPDIR, and sees others' processes.
    """
    folder = Path(os.environ["LOOKED_AT"])
    found = [(folder / "run" / "key").exists()]
    for place in (folder, Path(os.environ["TMPDIR"])):
        with suppress(OSError):
            (place / "left").write_text("")
        found.append((place / "left").exists())
    found.append(len(list(Path("/proc").glob("[0-9]*"))) > 8)
    ask(user(task.prompt))
    return float("".join(str(int(each)) for each in found))


def reaches(task: Any) -> float:
    """In its digits, which of the machine's sockets it can connect to."""
    reached = ""
    for family, address in json.loads(os.environ["SOCKETS"]):
        with socket.socket(family) as client:
            place = tuple(address) if isinstance(address, list) else address
            reached += str(int(client.connect_ex(place) == 0))
    ask(user(task.prompt))
    return float(reached)


def asks_at_once(task: Any) -> float:
    """Hangs up once, then asks as often at once as the answer says, and counts
    answers.
    """
    where = urlsplit(task.base_url)
    with socket.create_connection((where.hostname, where.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    with ThreadPoolExecutor(40) as pool:
        answers = pool.map(lambda n: ask(user(f"{task.prompt} {n}")), range(40))
        return float(list(answers).count(task.answer))


def fills_its_output(task: Any) -> None:
    print("x" * 1000)
    sys.exit("nothing to do")


def wanders(task: Any) -> None:
    """Does what agents do, in ten requests or so: goes on, begins anew with a summary,
    edits what was said, leaves early and asks again, asks the same twice at once as two
    sub-agents. talks: the messages of each conversation.
    """
    rng = random.Random(task.api_key)
    system = [{"role": "system", "content": f"be {rng.choice(('brief', 'kind'))}"}]
    talks = [[*system, *user(task.prompt)]]
    for _ in range(rng.randint(4, 12)):
        at = rng.randrange(len(talks))
        before = talks.pop(at)
        act = rng.random()
        if act < 0.1:
            before = [*system, *user(f"You said {before[-1]['content'][:20]!r}. Go on.")]
        elif act < 0.25 and len(before) > 3:
            before = [
                *before[:-2],
                {"role": "assistant", "content": f"{before[-2]['content']}!"},
                before[-1],
            ]
        elif act < 0.35:
            with suppress(OSError):
                ask(before, limit_s=0.02)
        count = 2 if act > 0.85 and len(talks) < 4 else 1
        with ThreadPoolExecutor() as at_once:
            said = [asked.result() for asked in [at_once.submit(ask, before) for _ in range(count)]]
        talks += [
            [*before, {"role": "assistant", "content": text}, *user(f"{n} more")]
            for n, text in enumerate(said)
        ]


if __name__ == "__main__":
    given = json.load(sys.stdin)
    assert ask(user(given["prompt"])) == given["answer"]
    ask([], "reward", key=given["reward_key"], reward=0.25)
