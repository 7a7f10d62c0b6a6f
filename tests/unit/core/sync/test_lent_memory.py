"""Whether lent memory is there, on a GPU and with servers that are fakes."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from megarl.core import recipe as recipes
from megarl.core.base.rundir import Endpoints, LinkKeys
from megarl.core.learner import offload as module
from megarl.core.learner.offload import LEAST_RELEASED, Offload

LENDING = {
    "resources": {"colocate": True, "servers": 1},
    "weights": {"transport": "cuda_ipc"},
    "pipeline": {"k": 0},
    "serving": {"memory_fraction": 0.4},
}
GIB = 1 << 30


@pytest.fixture
def offload(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Offload:
    """Its server answers to everything."""
    monkeypatch.setattr(Offload, "_call_each", lambda _self, ids, _call, _version: list(ids))
    endpoints = Endpoints(
        session="s",
        controller="",
        servers=("http://127.0.0.1:2",),
        api_key="",
        admin_key="",
        rendezvous_port=0,
        link=LinkKeys.new(),
    )
    return Offload(recipes.from_tree(LENDING), endpoints)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, free: Sequence[int]) -> None:
    """These many bytes are free, one number each time that is asked."""
    answers = iter(free)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        mem_get_info=lambda: (next(answers), 80 * GIB),
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(("freed", "warned"), [(0, True), (LEAST_RELEASED, False), (GIB, False)])
def test_a_server_that_keeps_its_memory_is_named_once(
    offload: Offload,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    freed: int,
    warned: bool,
) -> None:
    fake_gpu(monkeypatch, [GIB, GIB + freed, GIB])
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            with offload.released(step):
                pass
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    for line in said:
        assert line.startswith("memory: server 0 released nothing")
        assert "libcudart.so.13: add its folder to LD_LIBRARY_PATH" in line


def test_each_rank_of_a_wide_server_counts(
    offload: Offload, caplog: pytest.LogCaptureFixture
) -> None:
    offload._width = 2
    offload._compare([0, 1], [GIB, GIB, GIB, 0])
    (record,) = caplog.records
    assert record.getMessage().startswith("memory: server 1 released nothing")
