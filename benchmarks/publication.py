"""Measures bytes per second of passes over weights, and of a publication to a real
server, against a bare broadcast of the same bytes over the same kind of group.

    python -m benchmarks.publication [--layers 12] [--hidden 768] [--experts 0]
    [--expert-width 32] [--server-ranks 1] [--bucket-mb 64] [--repeats 5]

    sum       torch.sum of a bucket of random bytes as floats, over and over
    checksum  sync/checksum.py of the same bytes
    sha256    hashlib's

    bare      the same buckets sent to a process that only receives them
    gather    the learner's part without sending: weights are put into buckets
    hash      gather, with computation of the expected checksums
    apart     hash, with each expert's tensors summed alone (only with --experts)
    whole     a publication: transfer, the copy's checksums and their comparison, pause,
              swap, continue
    transfer  part of whole: hash, broadcast, and the server's loading into its copy, in
              parallel
    pause     part of whole, from the pause to the reply that the server goes on

Then it prints the least CPU seconds that the server took for a publication, in how many
tensors and buckets it came, and, in MiB, the peak memory of learner and server, and of
the server before its first publication.

The rows of a table are repeated in turn, so that other load on the machine affects all
of them. The passes run on one thread of the CPU. There are one learner rank and one
server; gloo without a GPU. With --experts the model is a Qwen3-MoE, whose experts are
so small, unless --expert-width says otherwise, that calls, not bytes, take the time.
--alone: only gather, hash and apart, in CPU seconds, without a server.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.roles import served
from megarl.core import recipe as recipes
from megarl.core.base.messages import Publish, ServerAddress
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import Endpoints
from megarl.core.client.fleet import Fleet
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.recipe import Recipe
from megarl.core.sync import transport
from megarl.core.sync.broadcast import BroadcastGroup
from megarl.core.sync.checksum import checksum
from megarl.core.sync.process_group import VIEWS, ProcessGroupTransport, backend
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import Bucket, Sent, SentChecksums, buckets

LIMIT_S = 120.0
PASSES = 20
"""Buckets in one repetition of a pass."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense Llama")
    parser.add_argument(
        "--expert-width", type=int, default=32, help="columns; of 32 by 128, a tensor has 16 KiB"
    )
    parser.add_argument("--server-ranks", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--alone", action="store_true", help="the learner's own passes, in CPU seconds"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        with tempfile.TemporaryDirectory() as directory:
            recipe = made(Path(directory), options)
            learner_alone(recipe, options.repeats)
        return
    passes(options.bucket_mb << 20, options.repeats)
    with tempfile.TemporaryDirectory() as directory:
        recipe = made(Path(directory), options)
        with served(recipe) as server:
            measure(recipe, server.endpoints, server.process.pid, options.repeats)


def passes(size: int, repeats: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)

    def over(one: Callable[[], object]) -> Callable[[], int]:
        def all_of_them() -> int:
            for _ in range(PASSES):
                one()
            return PASSES * size

        return all_of_them

    seconds, total = timed(
        {
            "sum": over(lambda: data.view(torch.float32).sum()),
            "checksum": over(lambda: checksum(data)),
            "sha256": over(lambda: hashlib.sha256(memoryview(data.numpy())).digest()),
        },
        repeats,
    )
    show(f"{PASSES} times {size >> 20} MiB, medians of {repeats}", seconds, total, "sum")


def timed(ways: dict[str, Callable[[], int]], repeats: int) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each repetition of each way, made in turn, and the bytes of
    one. The first is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            size = way()
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return seconds, size


def show(title: str, seconds: dict[str, list[float]], size: int, standard: str) -> None:
    print(title)
    print(f"{'':>10} {'seconds':>8} {'MB/s':>7} {f'of {standard}':>8}")
    for name, each in seconds.items():
        median = statistics.median(each)
        share = statistics.median(seconds[standard]) / median
        print(f"{name:>10} {median:>8.2f} {size / 1e6 / median:>7.0f} {share:>8.2f}", flush=True)


def made(directory: Path, options: argparse.Namespace) -> Recipe:
    return make(
        directory,
        options.layers,
        options.hidden,
        options.bucket_mb,
        options.experts,
        options.expert_width,
        options.server_ranks,
    )


def make(
    directory: Path,
    layers: int,
    hidden: int,
    bucket_mb: int,
    experts: int = 0,
    expert_width: int = 32,
    server_ranks: int = 1,
) -> Recipe:
    """Write a random fp32 Llama, or a Qwen3-MoE with this many experts; return a recipe
    to serve it.
    """
    sizes = {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 512,
        "eos_token_id": None,
    }
    if experts:
        of_experts = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": expert_width,
        }
        config = Qwen3MoeConfig(**sizes, **of_experts, head_dim=64)
        Qwen3MoeForCausalLM(config).save_pretrained(directory / "model")
    else:
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(directory / "model")
    return recipes.from_tree(
        {
            "run": {"name": "run", "dir": str(directory)},
            "model": {"path": str(directory / "model"), "dtype": "fp32"},
            "length": {"prompt_tokens": 100, "thinking_tokens": [100, 100], "answer_tokens": 100},
            "serving": {"kv_tokens": 4096, "max_running_requests": 8},
            "weights": {"bucket_mb": bucket_mb},
            "resources": {"server_tensor_parallel": server_ranks},
        }
    )


def measure(recipe: Recipe, endpoints: Endpoints, server: int, repeats: int) -> None:
    before = memory(server)
    parallel.start(recipe.model, 0, 120)
    path = Path(recipe.model.path)
    family = family_of(path)
    chunks = build.build(recipe.model, path)
    hf.load(chunks, family, path)
    limit = recipe.weights.bucket_mb << 20
    transfers: list[float] = []

    class Timed(ProcessGroupTransport):
        def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
            begin = time.perf_counter()
            sent = super().send(fleet, ids, version)
            transfers.append(time.perf_counter() - begin)
            return sent

    publisher = Publisher(recipe, endpoints, chunks, family)
    weights = ServedWeights(chunks, family, fp8=False)
    ranks = recipe.resources.server_tensor_parallel
    publisher._transport = Timed(weights, LastSent(1), limit, recipe.weights.timeout_s, ranks)
    address = ServerAddress(id=0, url=endpoints.servers[0], tensor_parallel=ranks)

    def exported() -> Iterator[tuple[str, Tensor]]:
        return hf.export(chunks, family, stacked=False)

    pauses: list[float] = []
    used: list[float] = []
    peer, group = receiver([len(b.flat) for b in buckets(exported(), limit)])
    version = 0

    def bare() -> int:
        return sum(broadcast(bucket, group) for bucket in filled)

    def gather() -> int:
        return sum(len(bucket.flat) for bucket in buckets(exported(), limit, limit / VIEWS))

    def hashed() -> int:
        sums = SentChecksums(family.architecture)
        size = sum(
            len(bucket.flat) for bucket in buckets(sums.watch(exported()), limit, limit / VIEWS)
        )
        assert sums.expected()
        return size

    def apart() -> int:
        with patch.object(transport, "TOGETHER", 0):
            return hashed()

    def whole() -> int:
        nonlocal version
        version += 1
        command = Publish(version=version, servers=(address,))
        used_before = cpu_seconds(server)
        published = publisher.publish(command, "benchmark")
        used.append(cpu_seconds(server) - used_before)
        assert published is not None
        assert not published.results[0].error, published.results[0].error
        pauses.append(published.pause_seconds + published.resume_seconds)
        return published.bytes_sent

    filled = list(buckets(exported(), limit))
    ways = {"bare": bare, "gather": gather, "hash": hashed, "whole": whole}
    if family.architecture.experts:
        ways["apart"] = apart
    seconds, size = timed(ways, repeats)  # the first forms the groups
    seconds |= {"transfer": transfers[1:], "pause": pauses[1:]}
    peer.kill()
    title = (
        f"{size / 2**20:.0f} MiB in buckets of {recipe.weights.bucket_mb} MiB, {backend()}, medians"
        f" of {repeats}"
    )
    show(title, seconds, size, "bare")
    sent = [len(bucket.names) for bucket in buckets(exported(), limit, limit / VIEWS)]
    print(
        f"server {min(used):.2f} CPU s for {sum(sent)} tensors in {len(sent)} buckets, received by"
        f" {ranks} ranks"
    )
    print(
        f"learner {most(os.getpid())}, server {memory(server)}, before its first publication"
        f" {before}"
    )
    parallel.stop()


def learner_alone(recipe: Recipe, repeats: int) -> None:
    """Print the least CPU seconds of a learner's passes over all tensors,
    made in turn.
    """
    parallel.start(recipe.model, 0, 120)
    path = Path(recipe.model.path)
    family = family_of(path)
    chunks = build.build(recipe.model, path)
    limit = recipe.weights.bucket_mb << 20

    def gather() -> int:
        made = buckets(hf.export(chunks, family, stacked=False), limit, limit / VIEWS)
        return sum(len(bucket.names) for bucket in made)

    def hashed() -> int:
        sums = SentChecksums(family.architecture)
        made = buckets(sums.watch(hf.export(chunks, family, stacked=False)), limit, limit / VIEWS)
        count = sum(len(bucket.names) for bucket in made)
        assert sums.expected()
        return count

    def apart() -> int:
        with patch.object(transport, "TOGETHER", 0):
            return hashed()

    least: dict[str, float] = {}
    for _ in range(repeats):
        for way in (gather, hashed, apart):
            begin = time.process_time()
            count = way()
            seconds = time.process_time() - begin
            least[way.__name__] = min(seconds, least.get(way.__name__, seconds))
    parallel.stop()
    for name, seconds in least.items():
        each = seconds / count * 1e6
        print(f"{name:>8} {seconds:.3f} CPU s for {count} tensors, {each:.0f} us for each")


def most(process: int) -> int:
    """Return the peak memory of a process in MiB."""
    (line,) = [
        line
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) >> 10


def memory(server: int) -> int:
    """Return the largest peak memory of the server's processes in MiB, that of its
    scheduler, which owns the model.
    """
    return max(most(process.pid) for process in psutil.Process(server).children(recursive=True))


def cpu_seconds(server: int) -> float:
    """Return what a server's processes have used so far."""
    main = psutil.Process(server)
    return sum(sum(p.cpu_times()[:2]) for p in (main, *main.children(recursive=True)))


def broadcast(bucket: Bucket, group: BroadcastGroup) -> int:
    group.wait(group.broadcast(bucket.flat))
    return len(bucket.flat)


def receiver(sizes: list[int]) -> tuple[subprocess.Popen[bytes], BroadcastGroup]:
    """Return a process that receives buffers of these sizes over and over, and the
    group with it.
    """
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
    name = f"bare-{uuid.uuid4().hex[:8]}"
    code = f"from benchmarks.publication import receive; receive({name!r}, {store.port}, {sizes})"
    process = subprocess.Popen([sys.executable, "-c", code], preexec_fn=die_with_parent)
    return process, BroadcastGroup(name, 0, 2, backend(), ("127.0.0.1", store.port), LIMIT_S, store)


def receive(name: str, port: int, sizes: list[int]) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # groups are registered with it
    group = BroadcastGroup(name, 1, 2, backend(), ("127.0.0.1", port), LIMIT_S)
    buffers = [
        torch.empty(size, dtype=torch.uint8, device="cuda" if cuda else "cpu") for size in sizes
    ]
    while True:
        for buffer in buffers:
            group.wait(group.broadcast(buffer))


if __name__ == "__main__":
    main()
