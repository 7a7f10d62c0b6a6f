"""Measures 100 publications of Qwen3 1.7B to a busy server on the same GPU, by CUDA
IPC: seconds, pause, checksums.

Two sets of weights take turns, the second being the first with all signs changed, so a
publication without effect has the wrong checksum. The reference, also for the checksum,
is a publication of the first set through the disk. There are rows for each half of the
publications.
"""

import asyncio
import statistics
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import networks, serving
from benchmarks.gpu.rows import Row, Said
from megarl.core.base.messages import Publish, Published, ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.client.client import ServerClient
from megarl.core.models import build, family_of, hf
from megarl.core.sync.publisher import Publisher

PUBLICATIONS = 100
GROUP = 50
REQUESTS = 8
PROMPT_TOKENS = 16
POLL_S = 0.05
TINY = ("resources.colocate=true", "weights.transport=cuda_ipc", "serving.memory_fraction=0.25")


def rows(tiny: bool) -> Iterator[Said]:
    serving.need_sglang()
    count, group = (6, 3) if tiny else (PUBLICATIONS, GROUP)
    with tempfile.TemporaryDirectory() as name:
        recipe = serving.one_gpu(Path(name), tiny, "run.name=publication", *(TINY if tiny else ()))
        tokens = recipe.length.completion_tokens
        chunks = build.build(recipe.model, Path(recipe.model.path))
        family = family_of(Path(recipe.model.path))
        hf.load(chunks, family, Path(recipe.model.path))
        with serving.served(recipe) as (_, endpoints, _), asking(endpoints, tokens) as ended:
            disk = recipe.model_copy(
                update={"weights": recipe.weights.model_copy(update={"transport": "disk"})}
            )
            reference = published(Publisher(disk, endpoints, chunks, family), endpoints, 0)
            how = (
                "CUDA IPC"
                if networks.DEVICE == "cuda"
                else "shared memory, for there is no GPU and so no CUDA IPC"
            )
            sizes = (
                f"{serving.sizes(recipe)}, {reference.bytes_sent / 1e9:.3g} GB by {how}, buckets of"
                f" {recipe.weights.bucket_mb} MiB, {REQUESTS} requests under way"
            )
            publisher = Publisher(recipe, endpoints, chunks, family)
            checksums: dict[int, str] = {0: reference.results[0].checksum}
            done: list[Published] = []
            for version in range(1, count + 1):
                if version > 1:
                    negate(chunks)
                done.append(published(publisher, endpoints, version))
                checksum = done[-1].results[0].checksum
                turn = 1 - version % 2
                if checksum != checksums.setdefault(turn, checksum) or checksum == checksums.get(
                    1 - turn
                ):
                    raise RuntimeError(
                        f"publication {version}: checksum {checksum}, those before have {checksums}"
                    )
                if version % group == 0:
                    yield from measured(done[-group:], version, sizes, reference)
                    seconds = [
                        [p.pause_seconds, p.transfer_seconds, p.resume_seconds]
                        for p in done[-group:]
                    ]
                    yield {"publications": seconds}
            yield Row(
                f"requests of {tokens} tokens that ended meanwhile", ended[0], "requests", sizes
            )


def published(publisher: Publisher, endpoints: Endpoints, version: int) -> Published:
    address = ServerAddress(id=0, url=endpoints.servers[0])
    result = publisher.publish(Publish(version=version, servers=(address,)), "benchmark")
    assert result is not None
    if result.results[0].error:
        raise RuntimeError(result.results[0].error)
    return result


@torch.no_grad()
def negate(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.neg_()


def measured(done: list[Published], last: int, sizes: str, disk: Published) -> Iterator[Row]:
    """Yield rows on the publications up to number `last`."""
    which = f"publications {last - len(done) + 1} to {last}"
    seconds = [seconds_of(each) for each in done]
    median = statistics.median(seconds)
    whole = seconds_of(disk)
    yield Row(
        f"{which}, checksums equal: the server stands still, median",
        median,
        "s",
        sizes,
        "disk",
        whole,
    )
    yield Row(f"{which}: the longest", max(seconds), "s", sizes, "disk", whole)
    paused = statistics.median(each.pause_seconds for each in done)
    yield Row(
        f"{which}: of it until the server has stopped, median",
        paused,
        "s",
        sizes,
        "disk",
        disk.pause_seconds,
    )
    yield Row(
        f"{which}",
        done[0].bytes_sent / median / 1e9,
        "GB/s",
        sizes,
        "disk",
        disk.bytes_sent / whole / 1e9,
    )
    if networks.DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        yield Row(
            f"{which}: memory in use after them, all processes", (total - free) / 1e9, "GB", sizes
        )


def seconds_of(one: Published) -> float:
    return one.pause_seconds + one.transfer_seconds + one.resume_seconds


@contextmanager
def asking(endpoints: Endpoints, tokens: int) -> Iterator[list[int]]:
    """Keep REQUESTS requests running until the block ends; yield a list with the number
    of ended ones. If one fails, its error is raised at the end.
    """
    ended = [0]
    stop = threading.Event()

    async def one(client: ServerClient, n: int) -> None:
        while True:
            await client.generate(
                np.arange(n, n + PROMPT_TOKENS, dtype=np.int32), tokens, ignore_eos=True
            )
            ended[0] += 1

    async def ask() -> None:
        address = ServerAddress(id=0, url=endpoints.servers[0])
        limit_s = float(serving.START_LIMIT_S)
        async with ServerClient(address, endpoints.api_key, endpoints.admin_key, limit_s) as client:
            all_of_them = asyncio.gather(*(one(client, n) for n in range(REQUESTS)))
            while not stop.is_set() and not all_of_them.done():
                await asyncio.sleep(POLL_S)
            all_of_them.cancel()
            with suppress(asyncio.CancelledError):
                await all_of_them

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asyncio.run, ask())
        try:
            yield ended
        finally:
            stop.set()
        asked.result()
