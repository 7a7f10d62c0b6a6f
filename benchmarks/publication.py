"""Bytes per second of a publication to a real server, against a bare broadcast of the same bytes over the same kind of group.

    python -m benchmarks.publication [--layers 12] [--hidden 768] [--bucket-mb 64] [--repeats 5]

    bare      the same buckets to a process that does nothing but receive them
    gather    the learner's part without sending: weights into buckets
    hash      gather, with what the server's checksums must be (CPU only)
    transfer  hash, broadcasting, and the server loading what it gets, one bucket while the next is made
    whole     pause, transfer, the server's checksums and their comparison, continue

All are repeated in turn, so that a busy machine is busy for all. One learner rank, one server; gloo without a GPU.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.server import start
from megarl.core import recipe as recipes
from megarl.core.base.messages import Publish, ServerAddress
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import Endpoints
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.recipe import Recipe
from megarl.core.server.client import Fleet, ServerClient
from megarl.core.weights.process_group import ProcessGroupTransport, form_group
from megarl.core.weights.publisher import Publisher
from megarl.core.weights.transport import Bucket, SentChecksums, buckets
from megarl.lab.evaluation.servers import wait_ready

LIMIT = timedelta(seconds=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        recipe = make(Path(directory), options.layers, options.hidden, options.bucket_mb)
        process, endpoints = start(recipe)
        try:
            wait_ready(endpoints.servers[0], recipe.serving.start_timeout_s, process.poll)
            measure(recipe, endpoints, options.repeats)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def make(directory: Path, layers: int, hidden: int, bucket_mb: int) -> Recipe:
    """A random Llama in fp32 and the recipe to serve it."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    return recipes.from_tree(
        {
            "run": {"name": "run", "dir": str(directory)},
            "model": {"path": str(directory / "model"), "dtype": "fp32"},
            "length": {"prompt_tokens": 100, "thinking_tokens": [100, 100], "answer_tokens": 100},
            "serving": {"kv_tokens": 4096, "max_running_requests": 8},
            "weights": {"bucket_mb": bucket_mb},
        }
    )


def measure(recipe: Recipe, endpoints: Endpoints, repeats: int) -> None:
    parallel.start(recipe.model, 0, 120)
    path = Path(recipe.model.path)
    family = family_of(path)
    chunks = build.build(recipe.model, path)
    hf.load(chunks, family, path)
    limit = recipe.weights.bucket_mb << 20
    publisher = Publisher(recipe, endpoints, chunks, family)
    transport = ProcessGroupTransport(chunks, family, limit, recipe.weights.timeout_s, flush=False)
    address = ServerAddress(id=0, url=endpoints.servers[0])
    peer, group = receiver([len(b.flat) for b in buckets(hf.export(chunks, family), limit)])
    version = 0

    def bare() -> int:
        return sum(broadcast(bucket, group) for bucket in filled)

    def gather() -> int:
        return sum(len(bucket.flat) for bucket in buckets(hf.export(chunks, family), limit))

    def hashed() -> int:
        return sum(len(bucket.flat) for bucket in buckets(SentChecksums().watch(hf.export(chunks, family)), limit))

    def transfer() -> int:
        server = ServerClient(address, endpoints.api_key, endpoints.admin_key, recipe.weights.timeout_s)
        with closing(Fleet([server], version)) as fleet:
            sent = transport.send(fleet, [0], version)
        assert not sent.errors, sent.errors
        return sent.bytes

    def whole() -> int:
        command = Publish(version=version, servers=(address,))
        published = publisher.publish(command, "benchmark")
        assert published is not None
        assert not published.results[0].error, published.results[0].error
        return published.bytes_sent

    filled = list(buckets(hf.export(chunks, family), limit))
    ways: dict[str, Callable[[], int]] = {
        "bare": bare,
        "gather": gather,
        "hash": hashed,
        "transfer": transfer,
        "whole": whole,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):  # the first forms the groups and is not counted
        for name, way in ways.items():
            version += 1
            begin = time.perf_counter()
            size = way()
            took = time.perf_counter() - begin
            if repeat:
                seconds[name].append(took)
    peer.kill()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    print(f"{size / 2**20:.0f} MiB in buckets of {recipe.weights.bucket_mb} MiB, {backend}, medians of {repeats}")
    print(f"{'':>10} {'seconds':>8} {'MB/s':>7} {'of bare':>8}")
    for name, each in seconds.items():
        median = statistics.median(each)
        share = statistics.median(seconds["bare"]) / median
        print(f"{name:>10} {median:>8.2f} {size / 1e6 / median:>7.0f} {share:>8.2f}", flush=True)
    parallel.stop()


def broadcast(bucket: Bucket, group: Any) -> int:
    dist.broadcast(bucket.flat, group_src=0, group=group)
    return len(bucket.flat)


def receiver(sizes: list[int]) -> tuple[subprocess.Popen[bytes], Any]:
    """A process that receives buffers of these sizes over and over, and the group with it."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=LIMIT, wait_for_workers=False)
    name = f"bare-{uuid.uuid4().hex[:8]}"
    code = f"from benchmarks.publication import receive; receive({name!r}, {store.port}, {sizes})"
    process = subprocess.Popen([sys.executable, "-c", code], preexec_fn=die_with_parent)
    return process, form_group(name, 0, 2, "nccl" if torch.cuda.is_available() else "gloo", store, LIMIT)


def receive(name: str, port: int, sizes: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT)
    cuda = torch.cuda.is_available()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what groups are registered with
    group = form_group(name, 1, 2, "nccl" if cuda else "gloo", store, LIMIT)
    buffers = [torch.empty(size, dtype=torch.uint8, device="cuda" if cuda else "cpu") for size in sizes]
    while True:
        for buffer in buffers:
            dist.broadcast(buffer, group_src=0, group=group)


if __name__ == "__main__":
    main()
