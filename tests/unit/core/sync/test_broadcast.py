"""Waits of a group for weights end: with the bytes, with what another member said, with
a late error, or at their limit.
"""

import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.core.sync.broadcast import BROKEN, BroadcastGroup, LaunchOrder, form_limit_s, in_thread
from megarl.run.process import free_ports


@pytest.fixture
def group() -> BroadcastGroup:
    """A member whose communicator is not asked for anything."""
    member = BroadcastGroup.__new__(BroadcastGroup)
    member.name = "weights"
    member._backend = "nccl"
    member._limit_s = 1.0
    member._group = None
    member._line = dist.PrefixStore("line", dist.HashStore())
    member._device, member._landings, member._buckets = (
        torch.device("cpu"),
        [torch.empty(0, dtype=torch.uint8)] * 2,
        0,
    )
    return member


def work(done: bool, error: str = "") -> Any:
    """What NCCL gives: its wait returns at once."""
    return SimpleNamespace(
        is_completed=lambda: done,
        wait=lambda: True,
        exception=lambda: RuntimeError(error) if error else None,
    )


def test_a_work_that_never_ends_is_given_up_at_the_limit(group: BroadcastGroup) -> None:
    group.wait(work(True))
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"not done with a broadcast within 1 s \(weights.timeout_s\)"
    ):
        group.wait(work(False))
    assert time.monotonic() - began >= 1


def test_more_ranks_have_longer_to_form_a_group() -> None:
    """A minute and half a second for each, but no longer than a bucket may take."""
    assert form_limit_s(2, 600.0) == 61.0
    assert form_limit_s(200, 600.0) == 160.0
    assert form_limit_s(2000, 600.0) == 600.0
    assert form_limit_s(200, 5.0) == 5.0


def test_the_first_that_gives_up_is_heard(group: BroadcastGroup) -> None:
    group._limit_s = 30.0
    group.close("server 1 is gone\nand more")
    group.close("another reason")
    with pytest.raises(RuntimeError, match=r"the process group is broken: server 1 is gone$"):
        group.wait(work(False))


def test_an_error_that_nccl_keeps_to_itself_is_raised(group: BroadcastGroup) -> None:
    with pytest.raises(RuntimeError, match="ncclRemoteError"):
        group.wait(work(True, "ncclRemoteError"))


def test_a_store_that_is_gone_breaks_the_group(group: BroadcastGroup) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, 1, False, timedelta(seconds=5))
    group._line = dist.PrefixStore("line", client)
    group._limit_s = 30.0
    assert not group._line.check([BROKEN])
    del store
    with pytest.raises(RuntimeError):
        group.wait(work(False))
    group.close("it is gone")  # nobody is left to be told


def test_no_group_waits_for_the_turn_of_one_that_broke(group: BroadcastGroup) -> None:
    turns = LaunchOrder()
    group._limit_s = 30.0
    group._line.set("0", "2 4 4")
    turns.broken = "the model cannot load a bucket of turn 1"
    with pytest.raises(RuntimeError, match="of turn 1"):
        group.receive(turns)


def test_what_hangs_is_left_behind() -> None:
    hanging = in_thread(lambda: time.sleep(600))
    assert not hanging.done()
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: print(1 / 0)).result(10)


MEMBER = """
import os, sys, time
import torch
import torch.distributed as dist
from megarl.core.sync.broadcast import BroadcastGroup
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
group = BroadcastGroup("weights", rank, 2, "gloo", ("127.0.0.1", port), 60.0, store)
if rank:
    print("here", flush=True)
    time.sleep(600)  # receives nothing
*_, (work, _) = group.send(lambda: 1, b"head", torch.zeros(64 << 20, dtype=torch.uint8))
try:
    group.wait(work, lambda: "server 1 does not answer")
except RuntimeError as error:
    began = time.monotonic()
    group.close(str(error))
    print(time.monotonic() - began, error, flush=True)
os._exit(0)
"""


@pytest.mark.processes
def test_a_broken_group_is_left_at_once_by_who_was_sending() -> None:
    """Not after the 60 s for which gloo would wait for a member that is alive and does
    not receive.
    """
    (port,) = free_ports(1)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        said, _ = members[0].communicate(timeout=240)
    finally:
        for member in members:
            member.kill()
            member.wait()
    seconds, why = said.split(" ", 1)
    assert float(seconds) < 20
    assert why == "server 1 does not answer\n"


SENDERS = """
import itertools, sys, threading, time
import torch
import torch.distributed as dist
from megarl.core.sync.broadcast import BroadcastGroup, LaunchOrder
rank, ports = int(sys.argv[1]), map(int, sys.argv[2:])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stores = [dist.TCPStore("127.0.0.1", port, 3, rank == 0, wait_for_workers=False) for port in ports]
groups = [
    BroadcastGroup(f"from {n}", rank, 3, "gloo", ("127.0.0.1", store.port), 60.0, store) for n, store in enumerate(stores)
]
turns, taken, launched, broadcast = LaunchOrder(), itertools.count(1), [], BroadcastGroup.broadcast

def noted(group, flat):
    launched.append(group.name)
    return broadcast(group, flat)

def work(n):
    if rank:
        time.sleep(0.5 * (rank == 1 + n))  # a thread of each rank is late, each that of another group
        while groups[n].receive(turns) is not None:
            pass
        stores[n].set(f"{rank} is done", "")
        return
    before = stores[n].num_keys()
    for _ in range(10):
        for sent, _ in groups[n].send(lambda: next(taken), b"head", torch.zeros(1000, dtype=torch.uint8)):
            groups[n].wait(sent)
    groups[n].send(lambda: next(taken))
    stores[n].wait(["1 is done", "2 is done"])
    groups[n].forget()
    assert stores[n].num_keys() == before + 2

BroadcastGroup.broadcast = noted
threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*launched, sep="\\n", flush=True)
"""


@pytest.mark.processes
def test_all_ranks_launch_the_broadcasts_of_two_senders_in_one_order() -> None:
    """NCCL's kernels wait for each other on a GPU: in opposite orders, two groups' may
    wait for ever.
    """
    ports = [str(port) for port in free_ports(2)]
    words = [sys.executable, "-c", SENDERS]
    ranks = [
        subprocess.Popen([*words, str(rank), *ports], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        _, first, second = (rank.communicate(timeout=240)[0].splitlines() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert sorted(first) == 20 * ["from 0"] + 20 * ["from 1"]
    assert first == second
