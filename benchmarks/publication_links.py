"""Measures whether data-parallel copies of a learner that send to a server at once use
all their network links.

    python -m benchmarks.publication_links [--mbit 400] [--repeats 5]

It needs root, and Linux, for it makes network namespaces.

    learner rank 0, in a namespace ══ MBIT/s ══╗
                                               ╠══ bridge ── a server of two ranks
    learner rank 1, in a namespace ══ MBIT/s ══╝

Each rank has a copy of a Llama of 345 MiB in fp32. Its namespace has one link, whose
sending rate `tc` limits. Publications in which rank 0 alone sends, and in which each
rank sends half, take turns; the server receives over gloo. Printed are medians of the
seconds of a transfer, and the share of that time for which the bytes would occupy the
links in use at their full rate.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.publication import make
from benchmarks.roles import served
from megarl.core import recipe as recipes
from megarl.core.base.messages import Publish, ServerAddress
from megarl.core.base.process import die_with_parent
from megarl.core.base.ranks import bind_all
from megarl.core.base.rundir import RunDir
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.sync.process_group import ProcessGroupTransport
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.run.process import free_ports

RANKS = 2
BRIDGE = "megarl-links"
SERVER = "10.231.78.1"
BUCKET_MB = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, networks(options.mbit) as spaces:
        recipe = make(Path(directory), 12, 768, BUCKET_MB)
        recipe = recipes.from_tree(
            {
                **recipe.model_dump(),
                "resources": {"server_tensor_parallel": RANKS, "learner_ranks": RANKS},
            }
        )
        with served(recipe, host=SERVER, interface=BRIDGE):
            words = [str(RunDir(recipe.run.path).recipe), str(options.mbit), str(options.repeats)]
            port = str(free_ports(1)[0])
            ranks = [
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        space,
                        sys.executable,
                        "-W",
                        "ignore",
                        "-m",
                        __spec__.name,
                        "rank",
                        *words,
                    ],
                    env=os.environ
                    | {
                        "MASTER_ADDR": address(0),
                        "MASTER_PORT": port,
                        "GLOO_SOCKET_IFNAME": "megarl0",
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(RANKS),
                        "OMP_NUM_THREADS": "1",
                    },
                    preexec_fn=die_with_parent,
                )
                for rank, space in enumerate(spaces)
            ]
            assert [rank.wait() for rank in ranks] == [0] * RANKS


def address(rank: int) -> str:
    return f"10.231.78.{rank + 2}"


@contextmanager
def networks(mbit: int) -> Iterator[list[str]]:
    """Make a namespace for each rank, connected to the bridge by a link that sends at
    most `mbit` Mbit/s.
    """
    spaces = [f"{BRIDGE}-{rank}" for rank in range(RANKS)]

    def run(*words: str, check: bool = True) -> None:
        subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL)

    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{SERVER}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for rank, space in enumerate(spaces):
            run("ip", "netns", "add", space)
            run(
                "ip",
                "link",
                "add",
                f"megarl-to-{rank}",
                "type",
                "veth",
                "peer",
                "name",
                "megarl0",
                "netns",
                space,
            )
            run("ip", "link", "set", f"megarl-to-{rank}", "master", BRIDGE, "up")
            run("ip", "-n", space, "address", "add", f"{address(rank)}/24", "dev", "megarl0")
            for interface in ("lo", "megarl0"):
                run("ip", "-n", space, "link", "set", interface, "up")
            rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
            run("tc", "-n", space, "qdisc", "add", "dev", "megarl0", "root", "tbf", *rate)
        yield spaces
    finally:
        for space in spaces:
            run("ip", "netns", "delete", space, check=False)
        run("ip", "link", "delete", BRIDGE, check=False)


def rank(path: str, mbit: int, repeats: int) -> None:
    """Run one rank of the learner; rank 0 prints."""
    bind_all()
    torch.set_num_threads(1)
    recipe = recipes.load(path)
    endpoints = RunDir(recipe.run.path).endpoints()
    source = Path(recipe.model.path)
    parallel.start(recipe.model, 0, 120)
    family = family_of(source)
    chunks = build.build(recipe.model, source)
    hf.load(chunks, family, source)
    server = ServerAddress(id=0, url=endpoints.servers[0], tensor_parallel=RANKS)
    weights = ServedWeights(chunks, family, fp8=False)
    publishers = {}
    for sources in (1, RANKS):
        publishers[sources] = Publisher(recipe, endpoints, chunks, family)
        publishers[sources]._transport = ProcessGroupTransport(
            weights, LastSent(1), BUCKET_MB << 20, recipe.weights.timeout_s, links=sources
        )
    seconds: dict[int, list[float]] = {1: [], RANKS: []}
    version = 0
    for repeat in range(repeats + 1):
        for sources, publisher in publishers.items():
            version += 1
            published = publisher.publish(Publish(version=version, servers=(server,)), "benchmark")
            if published is not None:
                assert not published.results[0].error, published.results[0].error
                size = published.bytes_sent
                if repeat:  # the first forms the group
                    seconds[sources].append(published.transfer_seconds)
    if dist.get_rank() == 0:
        print(f"{size / 2**20:.0f} MiB, links of {mbit} Mbit/s, medians of {repeats}")
        for sources, each in seconds.items():
            least = size * 8e-6 / mbit / sources
            median = statistics.median(each)
            print(f"{sources} sending: {median:.2f} s, {least / median:.2f} of the links' rate")
    parallel.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
