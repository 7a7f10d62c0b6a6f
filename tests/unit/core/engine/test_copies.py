"""Which copy of the attention gets a request, and what a server of several answers."""

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller
from sglang.srt.managers.scheduler import Scheduler

from megarl.core.engine import copies, workers
from megarl.core.engine.copies import Homes, agreed


class Answer(msgspec.Struct):
    success: bool
    message: str


RIGHT = Answer(True, "done")
WRONG = Answer(False, "not done")


def test_one_answer_is_made_of_all() -> None:
    assert agreed([RIGHT]) == agreed([RIGHT, Answer(True, "done")]) == RIGHT
    assert agreed([RIGHT, WRONG, RIGHT]) == WRONG
    other = agreed([RIGHT, Answer(True, "done, but otherwise")])
    assert other == Answer(False, "the copies of the attention gave different answers")


class Distributor:
    """SGLang's, with copies that only note the groups of their requests."""

    def __init__(self, copies: int) -> None:
        self.dp_budget = data_parallel_controller.DPBudget(copies)
        self.workers: list[list[str | None]] = [[] for _ in range(copies)]


def test_groups_are_spread_and_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(worker: list[str | None], request: Any) -> None:
        worker.append(request.routing_key)

    monkeypatch.setattr(data_parallel_controller, "sock_send", note)
    monkeypatch.setattr(copies, "RECENT_GROUPS", 3)
    distributor = Distributor(3)
    homes = Homes()

    def send(*groups: str | None) -> list[list[str | None]]:
        for group in groups:
            homes.send(distributor, SimpleNamespace(routing_key=group))
        sent = distributor.workers
        distributor.workers = [[], [], []]
        return sent

    assert send("a", "b", "c") == [["a"], ["b"], ["c"]]
    assert send("a", "a", "b", "a", "c", "c") == [["a", "a", "a"], ["b"], ["c", "c"]]
    # The second copy has the fewest requests.
    assert send(None, None, None) == [[], [None, None], [None]]
    # The group without a request for the longest time is forgotten.
    assert send("a", "c", "new") == [["a"], ["new"], ["c"]]
    assert list(homes._copies) == ["a", "c", "new"]


def test_copies_draw_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: Any) -> None:
        self.random_seed = 7

    drawn = {}
    for copy in range(3):
        monkeypatch.setattr(Scheduler, "__init__", make)
        parallel = SimpleNamespace(attn_dp_rank=copy)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda found=parallel: found)
        copies.own_draws()
        Scheduler()
        drawn[copy] = float(torch.rand(()))
    assert len(set(drawn.values())) == 3
    assert drawn[0] == float(torch.rand((), generator=torch.Generator().manual_seed(7)))


def test_its_processes_can_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU. They import megarl first, which keeps megatron from SGLang."""
    names = ("run_scheduler_process_with_init_pipe", "run_data_parallel_controller_process")
    for name in names:
        assert getattr(engine, name).__module__ == data_parallel_controller.__name__
        monkeypatch.setattr(engine, name, None)
    workers.own_processes()
    for name in names:
        run = getattr(engine, name)
        assert pickle.loads(pickle.dumps(run)) is run
        assert run.__module__ == workers.__name__
