"""An agent of your own: it asks the policy, lets it check its answer, and rewards what
it says in the end. Copy it to where you start megarl, and name it in the recipe:

data: {tasks: {sums: {agent: "my_agent:solve"}}}

It needs no more than HTTP, so it can be tried without megarl with any server that has
OpenAI's chat completions (docs/how-to/agents.md):

    export OPENAI_BASE_URL=http://127.0.0.1:30000/v1
    python examples/my_agent.py "What is 17 + 2?" 19
"""

import json
import os
import re
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

NUMBER = re.compile(r"-?\d+")
CHECK = "Check your answer, then write the final number."
LIMIT_S = 600.0


def solve(task: Any) -> bool:
    """Return whether the last number of the second answer is the expected one."""
    messages = [{"role": "user", "content": task.prompt}]
    messages.append({"role": "assistant", "content": ask(task, messages)})
    messages.append({"role": "user", "content": CHECK})
    numbers = NUMBER.findall(ask(task, messages))
    return bool(numbers) and int(numbers[-1]) == int(task.answer)


def ask(task: Any, messages: list[dict[str, str]]) -> str:
    """Return the policy's next message. All of them are trained."""
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        content: str = json.load(reply)["choices"][0]["message"]["content"]
    return content


def main(prompt: str, answer: str) -> None:
    """Work on one prompt as megarl would let it."""
    task = SimpleNamespace(
        prompt=prompt,
        answer=answer,
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        model=os.environ.get("OPENAI_MODEL", "policy"),
    )
    print("right" if solve(task) else "wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
