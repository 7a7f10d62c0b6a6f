"""One SGLang server as megarl starts it: tokens/s of many requests at once, then the learner's weights published to it.

Learner and server share the first GPU, as `weights.transport: cuda_ipc` allows. NCCL refuses two ranks on one GPU, so the
process group is measured without a GPU only. Reference in the same run: a publication by way of the disk.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import server
from benchmarks.gpu import networks
from benchmarks.gpu.rows import Absent, Row, Said
from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Publish, Published, Score, ScoredRollout, ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.recipe import Recipe
from megarl.core.server.client import Prefill, ServerClient
from megarl.core.weights.publisher import Publisher
from megarl.lab.evaluation.servers import wait_ready

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
SHARED: dict[str, dict[str, Any]] = {
    "resources": {"colocate": True},
    "serving": {"memory_fraction": 0.4},
    "weights": {"transport": "cuda_ipc"},
}
DIRECT = SHARED if networks.DEVICE == "cuda" else {"weights": {"transport": "process_group"}}
BY_DISK = {"weights": {"transport": "disk"}}
PUBLICATIONS = 3
PARITY_TOKENS = 32
START_LIMIT_S = 150


def rows(tiny: bool) -> Iterator[Said]:
    if importlib.util.find_spec("sglang") is None:
        raise Absent("SGLang is not installed")
    config = networks.llama_8b(**networks.TINY | {"num_hidden_layers": 2} if tiny else ONE_B)
    tokens = 32 if tiny else 512
    with tempfile.TemporaryDirectory() as name:
        recipe, refused = made(config, Path(name), tokens)
        process, endpoints = server.start(recipe)
        try:
            ready = wait_ready(endpoints.servers[0], START_LIMIT_S, process.poll)
            found = asyncio.run(server.measured(recipe, endpoints, process.pid, tokens, CONCURRENCY))
            sizes = (
                f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, vocabulary {config['vocab_size']}, "
                f"{recipe.model.dtype}, {CONCURRENCY} requests of {tokens} tokens at once"
            )
            yield Row("ready", ready, "s", sizes)
            yield Row("megarl's client, streamed", found["streamed"][0], "tokens/s", sizes, "bare", found["bare"][0])
            yield from published(recipe, endpoints, sizes)
            if refused:
                yield f"absent: weights.transport {DIRECT['weights']['transport']}: {refused}"
        except Exception:
            print((Path(name) / "run" / "logs" / "server.log").read_text(errors="replace")[-3000:])
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and why is what is to be said
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def made(config: dict[str, Any], folder: Path, tokens: int) -> tuple[Recipe, str]:
    """A random model on disk, and the recipe of its server; why that does not publish directly, if it does not."""
    tree: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"dtype": "bf16" if networks.DEVICE == "cuda" else "fp32"},
        "length": {"prompt_tokens": 64, "thinking_tokens": [tokens, tokens], "answer_tokens": 16},
        "serving": {"kv_tokens": CONCURRENCY * (2 * tokens + 128), "max_running_requests": CONCURRENCY},
    }
    recipe = networks.recipe_of(config, folder / "config", tree)
    path = Path(recipe.model.path)
    parallel.start(recipe.model, seed=0, timeout_s=networks.LIMIT_S)
    chunks = build.build(recipe.model, path)
    networks.fill(chunks)
    hf.save(chunks, family_of(path), path, folder / "model")
    tree["model"] |= {"path": str(folder / "model")}
    try:
        return changed(tree, DIRECT), ""
    except MegarlError as error:
        return changed(tree, BY_DISK), str(error).splitlines()[0]


def changed(tree: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Recipe:
    """The recipe of the tree with some keys of some sections."""
    return recipes.from_tree(tree | {name: tree.get(name, {}) | keys for name, keys in sections.items()})


def published(recipe: Recipe, endpoints: Endpoints, sizes: str) -> Iterator[Row]:
    """By the recipe's transport, and by the disk."""
    trainer = Trainer(recipe, Path(recipe.model.path))
    by_disk = changed(recipe.model_dump(mode="json", exclude_unset=True), BY_DISK)
    disk = publication(trainer, by_disk, endpoints, 1)
    name, what = recipe.weights.transport, "publication: pause, transfer, checksums, continue"
    yield Row(f"{what}, disk", seconds_of(disk), "s", sizes)
    if name == "disk":
        return
    direct = publication(trainer, recipe, endpoints, 1 + PUBLICATIONS)
    yield Row(f"{what}, {name}", seconds_of(direct), "s", sizes, "disk", seconds_of(disk))
    rates = (each.bytes_sent / seconds_of(each) / 1e6 for each in (direct, disk))
    yield Row(f"{what}, {name}", next(rates), "MB/s", sizes, "disk", next(rates))
    yield Row(f"parity: mean difference of a log-prob, {name}", parity(trainer, endpoints), "nats", sizes)


def publication(trainer: Trainer, recipe: Recipe, endpoints: Endpoints, first: int) -> Published:
    """The quickest of several; versions count from `first`."""
    publisher = Publisher(recipe, endpoints, trainer.policy.chunks, trainer.policy.family)
    address = ServerAddress(id=0, url=endpoints.servers[0])
    done = []
    for version in range(first, first + PUBLICATIONS):
        result = publisher.publish(Publish(version=version, servers=(address,)), "benchmark")
        assert result is not None
        if result.results[0].error:
            raise RuntimeError(result.results[0].error)
        done.append(result)
    return min(done, key=seconds_of)


def parity(trainer: Trainer, endpoints: Endpoints) -> float:
    """Mean |server - learner| log-prob of what the server samples, both with the weights published last."""
    prompt, other = np.arange(16, dtype=np.int32), 0

    async def sampled() -> tuple[list[np.ndarray], list[Prefill]]:
        async with ServerClient(
            ServerAddress(id=0, url=endpoints.servers[0]), endpoints.api_key, endpoints.admin_key, START_LIMIT_S
        ) as client:
            found = [await client.generate(prompt, PARITY_TOKENS, ignore_eos=True) for _ in range(4)]
            rollouts = [np.concatenate([prompt, each.tokens]) for each in found]
            return rollouts, await client.score(rollouts, [len(prompt)] * len(rollouts), "parity", against=other)

    rollouts, served = asyncio.run(sampled())
    each = tuple(ScoredRollout(tokens=tokens, first=len(prompt)) for tokens in rollouts)
    scored = trainer.score(Score(version=trainer.step, rollouts=each, against=other), "benchmark")
    pairs = zip(served, scored.logprobs, strict=True)
    return float(np.mean([np.abs(theirs.logprobs - ours) for theirs, ours in pairs]))


def seconds_of(published: Published) -> float:
    return published.pause_seconds + published.transfer_seconds + published.resume_seconds
