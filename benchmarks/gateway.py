"""Measures the agents' gateway alone, with a made-up policy: 256 sessions at once, and
a request's cost after 500 turns.

    python -m benchmarks.gateway [--sessions 256] [--turns 8] [--long 500]

The agents run in another process. Costs are CPU time of the controller's thread per
request, so that other work on the machine does not count; the agents' waits are wall
time. After the sessions, tokens are compared: the tokens sent to the policy must be the
beginning of a path, and each token that the policy wrote must be trained exactly once.
"""

import argparse
import asyncio
import json
import random
import string
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.core.base.contracts import PolicyTurn, TurnRequest
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Segment, float32, int32, paths_of
from megarl.core.recipe import from_tree
from megarl.tasks.agents.gateway import Gateway
from megarl.tasks.agents.rendering import Rendering
from megarl.tasks.agents.session import AgentSession
from megarl.tasks.data.chat import load_chat
from tests.unit.tasks.agents.templates import QWEN

RESULTS = Path(__file__).parent / "results" / "gateway.json"
LONG = {
    "prompt_tokens": 1_000_000,
    "thinking_tokens": [1000, 1000],
    "answer_tokens": 1000,
    "control": "none",
}
RECIPE = from_tree(
    {"length": LONG, "agent": {"requests": 10_000, "trained_tokens": 10_000_000, "paths": 10_000}}
)
RESULT = 2000
"""Characters in a tool's result. The policy writes WORDS words before a call."""
WORDS = 50
REPEATS = 20
RNG = random.Random(0)
VOCABULARY = [
    "".join(RNG.choices(string.ascii_lowercase, k=RNG.randint(2, 9))) for _ in range(8000)
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}},
    }
]


def prose(words: int) -> str:
    return " ".join(RNG.choices(VOCABULARY, k=words))


def write_tokenizer(folder: Path) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|im_end|>", "<|im_start|>"],
    )
    backend.train_from_iterator([prose(20_000) for _ in range(10)], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=QWEN
    )
    made.save_pretrained(folder)
    return load_tokenizer(folder)


class MadeUpPolicy:
    """A policy that writes some words and a call, split into tokens as no tokenizer
    would do it. computed: seconds spent.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.sent: list[np.ndarray] = []
        self.said: list[np.ndarray] = []
        self.computed = 0.0

    async def __call__(self, request: TurnRequest) -> PolicyTurn:
        begun = time.thread_time()
        call = json.dumps({"name": "bash", "arguments": {"command": prose(5)}})
        text = f"{prose(WORDS)}\n<tool_call>\n{call}\n</tool_call>"
        pieces = [text[n : n + 3] for n in range(0, len(text), 3)]
        ids = int32(
            [
                *(int(i) for ids in self._tokenizer.encode_all(pieces) for i in ids),
                self._tokenizer.end,
            ]
        )
        self.sent.append(request.tokens)
        self.said.append(ids)
        self.computed += time.thread_time() - begun
        await asyncio.sleep(0.01)
        return PolicyTurn(
            (Segment(tokens=ids, logprobs=float32([-1] * len(ids)), weight_version=0),), True
        )


def check(session: AgentSession, policy: MadeUpPolicy, turns: int) -> None:
    """Assert that no token is lost or duplicated."""
    segments, branches, _ = session.tree.paths()
    (path,) = paths_of(segments, branches, int32(()))
    assert len(policy.said) == turns
    assert all(np.array_equal(path.tokens[: len(sent)], sent) for sent in policy.sent)
    assert np.array_equal(path.tokens[path.trained], np.concatenate(policy.said))


async def work(
    http: aiohttp.ClientSession, url: str, key: str, turns: int, waits: list[float]
) -> list[dict[str, Any]]:
    """Be an agent for `turns` turns; return its messages."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prose(100)},
        {"role": "user", "content": prose(50)},
    ]
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(turns):
        begun = time.perf_counter()
        body = {"model": "policy", "messages": messages, "tools": TOOLS}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            said = (await reply.json())["choices"][0]["message"]
        waits.append(time.perf_counter() - begun)
        messages.append(said)
        messages += [
            {"role": "tool", "tool_call_id": c["id"], "content": prose(RESULT // 6)}
            for c in said["tool_calls"]
        ]
    return messages


async def agents() -> None:
    """Be the agents' process: read the job from stdin, and write the measurements to
    stdout.
    """
    asked = json.loads(sys.stdin.readline())
    waits = list[float]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        made = await asyncio.gather(
            *(work(http, asked["url"], key, asked["turns"], waits) for key in asked["keys"])
        )
        kilobytes = len(json.dumps({"messages": made[0]})) // 1000
        print(json.dumps({"waits": waits, "kilobytes": kilobytes}), flush=True)


async def measured(sessions: int, turns: int, tokenizer: Tokenizer, last: int) -> dict[str, float]:
    """Serve `sessions` sessions at once; return the controller's CPU time and the
    agents' waits. last: only this many requests, the last ones, count.
    """
    gateway = Gateway("127.0.0.1")
    rendering = Rendering(load_chat(tokenizer.path), tokenizer, "sampled")
    policies = [MadeUpPolicy(tokenizer) for _ in range(sessions)]
    await gateway.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.close)
        served = [
            await stack.enter_async_context(gateway.session(RECIPE, tokenizer, rendering, policy))
            for policy in policies
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.gateway",
            "--agents",
            limit=1 << 28,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin
        assert process.stdout
        asked = {"url": gateway.url, "turns": turns, "keys": [session.key for session in served]}
        begun = time.perf_counter()
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        count = sessions * turns - last
        while sum(len(policy.said) for policy in policies) < count:
            await asyncio.sleep(0.005)
        before = time.thread_time() - sum(policy.computed for policy in policies)
        told = json.loads(await process.stdout.readline())
        computed = (
            time.thread_time() - sum(policy.computed for policy in policies) - before
        ) / last
        await process.wait()
        took = time.perf_counter() - begun
        for session, policy in zip(served, policies, strict=True):
            check(session, policy, turns)
    waits = np.array(told["waits"][-last:]) * 1000
    return {
        "sessions": sessions,
        "turns": turns,
        "kilobytes": told["kilobytes"],
        "tokens": max(len(policy.sent[-1]) for policy in policies),
        "computed_ms": 1000 * computed,
        "waited_ms_median": float(np.median(waits)),
        "waited_ms_99": float(np.quantile(waits, 0.99)),
        "requests_per_s": sessions * turns / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--long", type=int, default=500, help="turns of the one long session")
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.agents:
        asyncio.run(agents())
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))
        rows = [
            asyncio.run(
                measured(asked.sessions, asked.turns, tokenizer, asked.sessions * asked.turns)
            ),
            asyncio.run(measured(1, asked.long, tokenizer, REPEATS)),
        ]
    for row in rows:
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
