"""Waits of a group for weights end: with the bytes, with what another member said, with a late error, or at their limit."""

import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.core.base.broadcast import BROKEN, BroadcastGroup, in_thread
from megarl.run.process import free_ports


@pytest.fixture
def group() -> BroadcastGroup:
    """A member whose communicator is not asked for anything."""
    member = BroadcastGroup.__new__(BroadcastGroup)
    member.name, member._backend, member._limit_s, member._group = "weights", "nccl", 1.0, None
    member._line = dist.PrefixStore("line", dist.HashStore())
    return member


def work(done: bool, error: str = "") -> Any:
    """What NCCL gives: its wait returns at once."""
    return SimpleNamespace(
        is_completed=lambda: done, wait=lambda: True, exception=lambda: RuntimeError(error) if error else None
    )


def test_a_work_that_never_ends_is_given_up_at_the_limit(group: BroadcastGroup) -> None:
    group.wait(work(True))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done with a broadcast within 1 s \(weights.timeout_s\)"):
        group.wait(work(False))
    assert time.monotonic() - began >= 1


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
    group._line, group._limit_s = dist.PrefixStore("line", client), 30.0
    assert not group._line.check([BROKEN])
    del store
    with pytest.raises(RuntimeError):
        group.wait(work(False))
    group.close("it is gone")  # nobody is left to be told


def test_what_hangs_is_left_behind() -> None:
    hanging = in_thread(lambda: time.sleep(600))
    assert not hanging.done()
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: print(1 / 0)).result(10)


MEMBER = """
import os, sys, time
import torch
import torch.distributed as dist
from megarl.core.base.broadcast import BroadcastGroup
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
group = BroadcastGroup("weights", rank, 2, "gloo", ("127.0.0.1", port), 60.0, store)
if rank:
    print("here", flush=True)
    time.sleep(600)  # receives nothing
*_, (work, _) = group.send(b"head", torch.zeros(64 << 20, dtype=torch.uint8))
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
    """Not after the 60 s for which gloo would wait for a member that is alive and does not receive."""
    (port,) = free_ports(1)
    members = [
        subprocess.Popen([sys.executable, "-c", MEMBER, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
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
