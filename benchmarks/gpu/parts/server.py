"""Measures one SGLang server as started by megarl: tokens/s of many requests at once,
in bf16, in FP8 (serving.quantization), and in bf16 without the overlap schedule.

The reference, in the same run, is a client that sends the same requests and does not
read the replies. FP8 needs a GPU.
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
WAYS = {"overlap": "megarl", "fp8": "megarl", "no overlap": "benchmarks.no_overlap"}
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
            if way == "fp8" and networks.DEVICE == "cpu":
                yield "fp8: only a GPU has its products; nothing was measured"
                continue
            recipe = recipe_of(folder, way, tokens)
            sizes = f"{serving.sizes(recipe)}, {CONCURRENCY} requests of {tokens} tokens at once"
            with serving.served(recipe, module) as (process, endpoints, ready):
                yield Row(f"ready, {way}", ready, "s", sizes)
                found = asyncio.run(
                    server.measured(recipe, endpoints, process.pid, tokens, CONCURRENCY)
                )
            rates[way] = found["streamed"][0]
            what = f"megarl's client, streamed, {way}"
            bare = "a client that reads nothing"
            yield Row(what, rates[way], "tokens/s", sizes, bare, found["bare"][0])
            yield {"way": way} | found
            if way == "fp8":
                yield Row(
                    f"megarl's client, streamed, {way}",
                    rates[way],
                    "tokens/s",
                    sizes,
                    "bf16",
                    rates["overlap"],
                )
        yield Row(
            "megarl's client, streamed",
            rates["overlap"],
            "tokens/s",
            sizes,
            "no overlap",
            rates["no overlap"],
        )


def recipe_of(folder: Path, way: str, tokens: int) -> Recipe:
    precision = "fp8" if way == "fp8" else "none"
    return recipes.from_tree(
        {
            "run": {"name": way.replace(" ", "-"), "dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "bf16"},
            "length": {
                "prompt_tokens": 64,
                "thinking_tokens": [tokens, tokens],
                "answer_tokens": 16,
            },
            "serving": {
                "kv_tokens": CONCURRENCY * (2 * tokens + 128),
                "max_running_requests": CONCURRENCY,
                "quantization": precision,
            },
        }
    )
