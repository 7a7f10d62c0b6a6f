"""Measures one SGLang server as started by megarl: tokens/s of many requests at once, with and without the overlap schedule.

The reference, in the same run, is a client that sends the same requests and does not read the replies.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import server
from benchmarks.gpu import networks, serving
from benchmarks.gpu.rows import Row, Said
from megarl.core import recipe as recipes
from megarl.core.recipe import Recipe

ONE_B = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
"""Llama 3.2 1B."""
CONCURRENCY = 64
WAYS = {"overlap": "megarl", "no overlap": "benchmarks.no_overlap"}
"""The module that serves, for each configuration."""


def rows(tiny: bool) -> Iterator[Said]:
    serving.need_sglang()
    config = networks.llama_8b(**networks.TINY | {"num_hidden_layers": 2} if tiny else ONE_B)
    tokens = 32 if tiny else 512
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving.random_model(config, folder)
        rates: dict[str, float] = {}
        for way, module in WAYS.items():
            recipe = recipe_of(folder, way, tokens)
            sizes = f"{serving.sizes(recipe)}, {CONCURRENCY} requests of {tokens} tokens at once"
            with serving.served(recipe, module) as (process, endpoints, ready):
                yield Row(f"ready, {way}", ready, "s", sizes)
                found = asyncio.run(server.measured(recipe, endpoints, process.pid, tokens, CONCURRENCY))
            rates[way] = found["streamed"][0]
            what, bare = f"megarl's client, streamed, {way}", "a client that reads nothing"
            yield Row(what, rates[way], "tokens/s", sizes, bare, found["bare"][0])
            yield {"way": way} | found
        yield Row("megarl's client, streamed", rates["overlap"], "tokens/s", sizes, "no overlap", rates["no overlap"])


def recipe_of(folder: Path, way: str, tokens: int) -> Recipe:
    return recipes.from_tree(
        {
            "run": {"name": way.replace(" ", "-"), "dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "bf16"},
            "length": {"prompt_tokens": 64, "thinking_tokens": [tokens, tokens], "answer_tokens": 16},
            "serving": {"kv_tokens": CONCURRENCY * (2 * tokens + 128), "max_running_requests": CONCURRENCY},
        }
    )
