"""Measures tokens/s of one server alone: through ServerClient (streamed, log-probs,
versions) and under a bare load.

    python -m benchmarks.server RECIPE [key=value …] [--tokens 128] [--serial] [--json]

The bare load is the cheapest possible client: it gets whole replies, which it does not
read. --serial: a second server, whose scheduler does not prepare a step during the
previous one, has the streamed load, too. All loads are repeated in turn, in one run, so
that other load on the machine affects all; tokens per second of the server's own CPU
time hardly depend on it.
"""

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil

from benchmarks.roles import client_of, served
from megarl.core import recipe as recipes
from megarl.core.base.architecture import in_directory
from megarl.core.base.rundir import Endpoints
from megarl.core.client.client import ServerClient
from megarl.core.recipe import Recipe

CONCURRENCY = (1, 8, 32, 128)
PROMPT_TOKENS = 16
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a request")
    parser.add_argument(
        "--serial", action="store_true", help="also a server without SGLang's overlap schedule"
    )
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON each instead of a table"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        servers = []
        for module in ("megarl", "benchmarks.no_overlap")[: 1 + options.serial]:
            recipe = recipes.load(
                options.recipe, [*options.overrides, f"run.dir={directory}", f"run.name={module}"]
            )
            server = stack.enter_context(served(recipe, module))
            servers.append((server.endpoints, server.process.pid))
        if not options.json:
            print(f"{options.tokens} tokens a request")
            print(
                f"{'load':>10} {'concurrency':>11} {'tokens/s':>9} {'per server CPU-s':>17}"
                f" {'client CPU':>11}"
            )
        for concurrency in CONCURRENCY:
            found = asyncio.run(
                measured(recipe, *servers[0], options.tokens, concurrency, *servers[1:])
            )
            for load, (rate, work, share) in found.items():
                if options.json:
                    row = {
                        "load": load,
                        "concurrency": concurrency,
                        "tokens_per_second": rate,
                        "tokens_per_cpu_second": work,
                    }
                    print(json.dumps(row), flush=True)
                else:
                    print(
                        f"{load:>10} {concurrency:>11} {rate:>9.0f} {work:>17.0f} {share:>10.1%}",
                        flush=True,
                    )


async def measured(
    recipe: Recipe,
    endpoints: Endpoints,
    pid: int,
    tokens: int,
    concurrency: int,
    other: tuple[Endpoints, int] | None = None,
) -> dict[str, tuple[float, float, float]]:
    """Return for each load: median tokens/s, tokens per CPU-second of the server, CPU
    share of the client.

    other: another server and its process, for the load `serial`.
    """
    vocabulary = in_directory(recipe.model.path).vocabulary
    generator = np.random.default_rng(0)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    headers = {"Authorization": f"Bearer {endpoints.api_key}", "Content-Type": "application/json"}

    def prompt() -> np.ndarray:
        return generator.integers(0, vocabulary, PROMPT_TOKENS, dtype=np.int32)

    async with (
        client_of(endpoints) as client,
        client_of(other[0] if other else endpoints) as second,
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
    ):

        async def bare() -> int:
            sampling = {"max_new_tokens": tokens, "ignore_eos": True}
            body = {
                "input_ids": prompt().tolist(),
                "sampling_params": sampling,
                "return_logprob": True,
            }
            async with session.post(
                f"{endpoints.servers[0]}/generate", data=msgspec.json.encode(body)
            ) as reply:
                answer = await reply.read()
                if reply.status != 200:
                    raise SystemExit(
                        f"the server refused a request of {PROMPT_TOKENS} + {tokens} tokens:"
                        f" {answer.decode()}"
                    )
                return tokens

        async def streamed(client: ServerClient) -> int:
            salt = str(generator.integers(1 << 30))
            return len(
                (await client.generate(prompt(), tokens, cache_salt=salt, ignore_eos=True)).tokens
            )

        loads: dict[str, tuple[Callable[[], Awaitable[int]], int]] = {
            "bare": (bare, pid),
            "streamed": (partial(streamed, client), pid),
        }
        if other:
            loads["serial"] = partial(streamed, second), other[1]
        seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in loads}
        for _ in range(REPEATS):
            for name, (load, process) in loads.items():
                seen[name].append(await once(load, concurrency, process))
    medians = {}
    for name, runs in seen.items():
        rate, work, share = (statistics.median(column) for column in zip(*runs, strict=True))
        medians[name] = rate, work, share
    return medians


async def once(
    load: Callable[[], Awaitable[int]], concurrency: int, pid: int
) -> tuple[float, float, float]:
    """Return tokens/s, tokens per CPU-second of the server's processes, and CPU-seconds
    of this process per second.
    """
    server = server_cpu(pid)
    client = client_cpu()
    start = time.monotonic()
    count = sum(await asyncio.gather(*(load() for _ in range(concurrency))))
    seconds = time.monotonic() - start
    return count / seconds, count / (server_cpu(pid) - server), (client_cpu() - client) / seconds


def server_cpu(pid: int) -> float:
    main = psutil.Process(pid)
    times: list[Any] = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def client_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
