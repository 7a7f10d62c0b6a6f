"""How much of the requests' common prefixes comes from the servers' caches? Tiny
servers, groups of conversations.

    python -m benchmarks.prefixes [--servers 4] [--groups 48] [--json FILE]

Each group samples its prompt GENERATIONS times, in TURNS turns of an environment that
replies with REPLY tokens, through Places, GroupPlaces and Sampler as in a run. Ideally,
all tokens that the group has sent or received before are cached.

    waiting     the group waits for its first request, as in a run
    at once     all first requests are sent together
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarl.core import recipe as recipes
from megarl.core.base.admission import Admission
from megarl.core.base.contracts import Observation
from megarl.core.base.types import Episode, Prompt
from megarl.core.sampling.places import GroupPlaces
from megarl.core.sampling.sampler import Job, Sampler
from megarl.tools.eval.servers import OwnServers, own_servers
from tests.tiny import tiny_llama

GENERATIONS = 8
TURNS = 3
PROMPT = 256
REPLY = 16
LIMIT = 400
STOP = (0, 1, 2, 3)
"""A turn ends with one of these or the end token, on average after 26 random tokens
from 128.
"""


class Counting:
    """An environment of TURNS turns."""

    turns = TURNS
    stop_tokens = STOP

    def __init__(self) -> None:
        self.step_number = 0

    @asynccontextmanager
    async def played(self, prompt: Prompt) -> AsyncIterator[None]:
        yield

    async def step(self, tokens: np.ndarray) -> Observation:
        self.step_number += 1
        return Observation(np.arange(REPLY, dtype=np.int32), done=self.step_number == TURNS)

    async def reward(self) -> None:
        return None

    def record(self, turns: int, limited: bool) -> Episode:
        return Episode(turns=turns, calls=turns, errors=0, seconds=0.0, limited=limited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(Path(folder) / "a", max_position_embeddings=1024)
        recipe = recipes.from_tree(
            {
                "run": {"name": "run", "dir": folder},
                "model": {"path": f"{folder}/a", "dtype": "fp32"},
                "length": {
                    "prompt_tokens": PROMPT,
                    "thinking_tokens": [LIMIT, LIMIT + 1],
                    "answer_tokens": 50,
                },
                "serving": {"kv_tokens": 32768, "max_running_requests": 32},
                "resources": {"servers": options.servers},
            }
        )
        with own_servers(recipe) as servers:
            found = {
                name: asyncio.run(share(servers, options.groups, seed, waits))
                for seed, (name, waits) in enumerate((("waiting", True), ("at once", False)))
            }
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


async def share(servers: OwnServers, groups: int, seed: int, waits: bool) -> dict[str, float]:
    """Return reusable and cached tokens, their ratio, and the seconds. Groups arrive as
    places become free, as in a full pipeline.
    """
    servers, recipe, random = (
        replace(servers),
        servers.recipe,
        np.random.default_rng(seed),
    )  # with places of its own
    places = servers.places
    admission = Admission(1000, 8)
    silent: dict[str, Any] = {"decode": lambda tokens: "", "continued": lambda tokens: ""}
    tokenizer: Any = SimpleNamespace(ids=lambda text: np.zeros(0, np.int32), ends=(127,), **silent)
    environments: Any = SimpleNamespace(of=lambda task: Counting())
    sampler = Sampler(recipe, tokenizer, servers, environments)

    async def group(ticket: int) -> None:
        held = GroupPlaces(places, admission, ticket, GENERATIONS)
        if not waits:
            held.let_others_begin()
        prompt = Prompt(
            id=str(ticket), tokens=random.integers(0, 127, PROMPT, dtype=np.int32), answer=""
        )
        jobs = (
            Job(
                prompt,
                (1, ticket, n),
                partial(held.take, n),
                f"{seed}/{ticket}",
                LIMIT,
                1.0,
                1.0,
                started=held.cached,
            )
            for n in range(GENERATIONS)
        )
        await asyncio.gather(*map(sampler.complete, jobs))

    begin = time.monotonic()
    running = set()
    for _ in range(groups):
        while places.free(lambda version: True) <= 0:
            places.changed.clear()
            await places.changed.wait()
        running.add(asyncio.create_task(group(admission.admit())))
        await asyncio.sleep(0)
    await asyncio.gather(*running)
    for client in servers.clients.values():
        await client.close()
    uses = places.use.values()
    reusable = sum(use.reusable for use in uses)
    cached = sum(use.cached for use in uses)
    return {
        "reusable_tokens": reusable,
        "cached_tokens": cached,
        "share": cached / reusable,
        "seconds": time.monotonic() - begin,
    }


if __name__ == "__main__":
    main()
