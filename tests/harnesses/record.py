"""What harnesses send to the gateway when the policy's answers come from a script:
`python -m tests.harnesses.record [MODE …]`.

One file of recordings/ per mode, which tests/unit/tasks/agents/test_recordings.py
replays. Texts longer than LONGEST are cut.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from megarl.tasks.agents import gateway as module
from tests.harnesses.environments import python_of, versions
from tests.harnesses.programs import MODES
from tests.unit.tasks.agents.serving import gateway, run

RECORDINGS = Path(__file__).parent / "recordings"
LONGEST = 300
LIMIT_S = 300.0
HEADERS = ("user-agent", "x-stainless-retry-count", "anthropic-version")
THINKS = "<think>\n Let me see:  é →\n</think>\n\n"


def calls(*called: tuple[str, str]) -> str:
    return "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {told}}}\n</tool_call>'
        for name, told in called
    )


def script(mode: str) -> list[str]:
    """Return what the policy says in turn: odd white space, two calls at once, one
    call, words, and words once more.
    """
    if mode.startswith("mini-swe-agent-text"):
        block = "```mswea_bash_command\n{}\n```"
        commands = ("echo hi", "pwd | wc -l", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        return [f"{THINKS}THOUGHT: so \n\n{block.format(command)}  \n" for command in commands]
    if mode.startswith(("mini-swe-agent", "verifiers-bash")):
        last = '{"command":"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'
        first = calls(
            ("bash", '{"command":  "echo hi"}'), ("bash", '{"command":"printf \'a\\\\tb\\n\'"}')
        )
        return [f"{THINKS}Look.  {first}", THINKS + calls(("bash", last)), "Done.\n"]
    if mode == "verifiers-null":
        return [f"{THINKS} Forty-two. \n"]
    several = calls(
        ("add", '{"b": 2,  "a":1.0,"note":"caf\\u00e9 → x"}'), ("add", '{"a": 3, "b" :4}')
    )
    one = calls(("add", '{"a":10, "b":-1e1}'))
    return [
        f"{THINKS} Two sums. \n{several}",
        THINKS + one,
        f"{THINKS} It is 3,\n and 7. ",
        f"{THINKS}Yes.\n",
    ]


def shortened(value: Any) -> Any:
    match value:
        case str():
            return value if len(value) <= LONGEST else value[:LONGEST] + "…"
        case dict():
            return {key: shortened(one) for key, one in value.items()}
        case list():
            return [shortened(one) for one in value]
    return value


async def record(mode: str) -> dict[str, Any]:
    """Run the harness; return what it sent, and what was made of it."""
    harness = MODES[mode][0]
    sent = list[dict[str, Any]]()
    python = await asyncio.to_thread(python_of, harness)
    read = module._read

    async def noted(request: web.Request, check_size: Callable[[int], None]) -> bytes:
        data = await read(request, check_size)
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        sent.append({"path": request.path, "headers": headers, "body": shortened(json.loads(data))})
        return data

    module._read = noted
    with tempfile.TemporaryDirectory() as folder:
        async with gateway(Path(folder), *script(mode), family="qwen", roomy=True) as served:
            key = served.session.key
            url = served.url
            places = {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_BASE": f"{url}/v1",
                "ANTHROPIC_BASE_URL": url,
            }
            keys = {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key, "MSWEA_SILENT_STARTUP": "1"}
            process = await asyncio.create_subprocess_exec(
                python,
                Path(__file__).with_name("programs.py"),
                mode,
                env=os.environ | places | keys | {"PYTHONPATH": ""},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                told = json.dumps({"prompt": "What is 1 + 2, and what is 3 + 4?"}).encode()
                said, _ = await asyncio.wait_for(process.communicate(told), LIMIT_S)
            finally:
                module._read = read
                if process.returncode is None:
                    process.kill()
            if process.returncode:
                raise SystemExit(
                    f"{mode}: status {process.returncode}, and said {said.decode()[-3000:]}"
                )
            paths = len(served.session.tree.paths()[1])
            left = len(served.said)
    assert key not in json.dumps(sent)
    return {"versions": versions(python), "paths": paths, "unsaid": left, "requests": sent}


if __name__ == "__main__":
    RECORDINGS.mkdir(exist_ok=True)
    for mode in sys.argv[1:] or MODES:
        made = run(lambda mode=mode: record(mode), LIMIT_S)  # type: ignore[misc]
        (RECORDINGS / f"{mode}.json").write_text(
            json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        )
        print(
            f"{mode}: {len(made['requests'])} requests, {made['paths']} paths, {made['unsaid']}"
            " texts unsaid",
            flush=True,
        )
