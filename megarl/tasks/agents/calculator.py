"""The quickstart's agent, such as a user would write: it asks the policy for a product,
and calculates the terms in brackets.

    123*456= ─► policy: <think>[123*456] ─► agent: 56088
             ─► policy: </think>56088 ─► the task's grader

It knows nothing of megarl: any program that can use OpenAI's API would do. It imports
nothing that is slow to import, because each rollout is a process of its own.
"""

import json
import operator
import re
import urllib.request
from typing import Any

TURNS = 3
CALL = re.compile(r"\[(\d{1,9})([-+*])(\d{1,9})\]$")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def solve(task: Any) -> None:
    """Work on the task's prompt. The task's grader gives the reward."""
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(TURNS):
        answer = ask(task, messages)
        if not answer.endswith("]"):
            return
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "tool", "content": calculated(answer)})


def calculated(answer: str) -> str:
    """Return the value of the term in brackets at the answer's end; "?" if there is
    none.
    """
    call = CALL.search(answer)
    if call is None:
        return "?"
    return str(OPERATORS[call[2]](int(call[1]), int(call[3])))


def ask(task: Any, messages: list[dict[str, str]]) -> str:
    """Return the policy's next message."""
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    ) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
