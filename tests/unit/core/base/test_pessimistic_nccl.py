"""The stand-in does what it says: code that trusts `Work.wait`, a dead peer's error or
`destroy_process_group` fails on it.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.pessimistic_nccl import ERROR_AFTER, LATE_S, Late, PessimisticNccl

LIMIT_S = 20.0


@pytest.fixture
def pair() -> tuple[PessimisticNccl, PessimisticNccl]:
    store = dist.HashStore()
    first, second = (PessimisticNccl(store, rank, 2, timedelta(seconds=1)) for rank in range(2))
    return first, second


def both(pair: tuple[PessimisticNccl, PessimisticNccl], tensors: list[torch.Tensor]) -> list[Late]:
    works: list[Late] = []
    options = dist.BroadcastOptions()
    options.rootRank = 0
    peer = threading.Thread(target=lambda: works.append(pair[1].broadcast([tensors[1]], options)))
    peer.start()
    works.insert(0, pair[0].broadcast([tensors[0]], options))
    peer.join(LIMIT_S)
    return works


def test_bytes_land_after_wait_has_returned(pair: tuple[PessimisticNccl, PessimisticNccl]) -> None:
    tensors = [torch.ones(3), torch.zeros(3)]
    _, work = both(pair, tensors)
    assert work.wait()
    assert tensors[1].tolist() == [0, 0, 0]
    assert work.ended.wait(LIMIT_S + LATE_S)
    assert tensors[1].tolist() == [1, 1, 1]
    pair[0].shutdown()


def test_nobody_hears_of_a_peer_that_is_gone(pair: tuple[PessimisticNccl, PessimisticNccl]) -> None:
    for work in both(pair, [torch.ones(3), torch.zeros(3)]):
        assert work.ended.wait(LIMIT_S)
    pair[1].abort()
    options = dist.BroadcastOptions()
    options.rootRank = 1
    work = pair[0].broadcast([torch.zeros(3)], options)
    assert work.wait()
    assert not work.ended.wait(1.0)
    ending = threading.Thread(target=pair[0].shutdown, daemon=True)
    ending.start()
    ending.join(0.5)
    assert ending.is_alive()
    pair[0].abort()
    ending.join(LIMIT_S)
    assert not ending.is_alive()


def test_an_error_appears_late(
    pair: tuple[PessimisticNccl, PessimisticNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in both(pair, [torch.ones(3), torch.zeros(3)]):
        assert work.ended.wait(LIMIT_S)
    monkeypatch.setenv(ERROR_AFTER, "0.7")
    pair[1].cut()
    options = dist.BroadcastOptions()
    options.rootRank = 1
    began = time.monotonic()
    work = pair[0].broadcast([torch.zeros(3)], options)
    assert work.wait()
    assert work.exception() is None
    assert work.ended.wait(LIMIT_S)
    assert time.monotonic() - began > 0.6
    assert work.is_completed()
    assert isinstance(work.exception(), RuntimeError)
