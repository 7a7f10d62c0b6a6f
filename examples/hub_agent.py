"""An agent that lets the policy work on a task of the environments hub (verifiers 0.4,
v1), with the hub's own runner and rubric. A row's prompt is the task's position:

    for n in $(seq 0 63); do echo "{\\"prompt\\": \\"$n\\"}"; done > positions.jsonl

data: {sandbox: rlimits, tasks: {hub: {train: positions.jsonl, heldout: 16,
    agent: [harness/bin/python, hub_agent.py, hub_taskset], grader: exact}}}

The Python is that of an environment with verifiers, uv and the taskset: verifiers does
not go with megarl's own packages. The runner starts programs whose packages uv fetches,
so the agent needs the network. PYTHONPATH names the folder of a taskset that is a file.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path


def rewarded(taskset: str, position: int, folder: Path) -> float:
    """Run a task, and return the sum of its weighted rewards."""
    programs = Path(sys.executable).parent
    variables = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}  # uv is there
    command = [str(programs / "vf-eval"), taskset]
    command += ["--select.include.idx", str(position), "-m", os.environ["OPENAI_MODEL"]]
    command += ["--client.base-url", os.environ["OPENAI_BASE_URL"]]
    command += ["--client.api-key-var", "OPENAI_API_KEY"]
    command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
    command += ["--push", "False", "--no-rich", "-o", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=variables)
    (traces,) = folder.rglob("traces.jsonl")
    episode = json.loads(traces.read_text())
    total = 0.0
    for trace in episode["traces"]:
        if not trace["rewards"] or None in trace["rewards"].values():
            sys.exit(f"the task was not graded: {trace['errors']}")
        for reward in trace["rewards"].values():
            total += reward["score"] * reward["weight"]
    return total


def post(reward: float, key: str) -> None:
    """Give the session its reward."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/reward",
        json.dumps({"reward": reward}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()


def main(taskset: str) -> None:
    task = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        reward = rewarded(taskset, int(task["prompt"]), Path(folder))
    post(reward, task["reward_key"])


if __name__ == "__main__":
    main(sys.argv[1])
