"""Waits of a group for weights end: with the bytes, with what another member said, with a late error, or at their limit."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.core.base.broadcast import BROKEN, BroadcastGroup, in_thread


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
    assert 1 <= time.monotonic() - began < 5


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
