"""What a server's processes do differently from SGLang."""

import importlib.util
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core.base.process import shared_memory_mark
from megarl.core.client.client import JOIN, RUNNING
from megarl.core.engine import workers
from megarl.core.sync import broadcast
from megarl.core.sync import checksum as sums
from megarl.core.sync.checksum import checksum, written

PLACEMENT = ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size")


def test_files_in_shared_memory_are_named_by_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed.device_communicators import shm_broadcast
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs

    made = PortArgs("", "", "", 1, "", "", None, None, instance_id="abc")
    monkeypatch.setattr(PortArgs, "init_new", staticmethod(lambda *_: made))
    monkeypatch.setattr(shm_broadcast, "make_shm_name", shm_broadcast.make_shm_name)
    pattern = f"*{shared_memory_mark(os.getsid(0))}*"
    assert not Path(shm_path_for(made.instance_id)).match(pattern)
    workers.own_ports()
    assert Path(shm_path_for(PortArgs.init_new(None).instance_id)).match(pattern)
    workers.own_buffers()
    buffer = shm_broadcast.ShmRingBuffer(1, 64, 1)
    assert Path(buffer.shared_memory.name).match(pattern)


def test_a_further_node_ends_with_the_first_of_its_ranks_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And listens for nobody."""
    from sglang.srt.entrypoints import engine

    context = multiprocessing.get_context("fork")
    lives = context.Process(target=time.sleep, args=(600,))
    ends = context.Process(target=int)
    made = SimpleNamespace(block_until_scheduler_exits=None)
    monkeypatch.setattr(
        engine.Engine, "_launch_scheduler_processes", staticmethod(lambda *_: (made, [lives, ends]))
    )
    monkeypatch.setattr(
        engine, "launch_dummy_health_check_server", engine.launch_dummy_health_check_server
    )
    workers.own_further_nodes()
    lives.start()
    ends.start()
    try:
        launched, _ = engine.Engine._launch_scheduler_processes()
        launched.block_until_scheduler_exits()
        assert lives.is_alive()
    finally:
        lives.kill()
        lives.join()
    assert engine.launch_dummy_health_check_server("127.0.0.1", -1, False) is None


def test_a_server_answers_with_our_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through SGLang's own WeightChecker, for parameters and buffers."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.utils import weight_checker

    monkeypatch.setattr(Scheduler, "__init__", Scheduler.__init__)
    monkeypatch.setattr(weight_checker, "_hash_tensor", weight_checker._hash_tensor)
    workers.own_checksums()
    model = torch.nn.BatchNorm1d(5)
    checker = weight_checker.WeightChecker.__new__(weight_checker.WeightChecker)
    checker._get_model, checker._placement = lambda: model, dict.fromkeys(PLACEMENT, 0)
    said = checker.handle("checksum", role="target")["checksums"]
    assert said == {
        name: written(int(checksum(tensor))) for name, tensor in model.state_dict().items()
    }


def test_a_server_tries_the_checksum_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its scheduler has chosen a device, and before it is asked for one."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.utils import weight_checker

    happened: list[object] = []
    monkeypatch.setattr(weight_checker, "_hash_tensor", weight_checker._hash_tensor)
    monkeypatch.setattr(
        Scheduler, "__init__", lambda _, *given, **named: happened.append((given, named))
    )
    monkeypatch.setattr(sums, "multiplies_exactly", happened.append)
    workers.own_checksums()
    Scheduler("arguments", ports="ports")
    assert happened == [(("arguments",), {"ports": "ports"}), torch.device("cpu")]


def test_a_rank_waits_for_the_slowest_to_load_the_model_as_long_as_a_start_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.model_executor.model_runner_components import load_model_utils as loading

    waits: list[float] = []
    ranks = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(loading, "get_parallel", lambda: ranks)
    monkeypatch.setattr(
        loading.dist,
        "monitored_barrier",
        lambda *, timeout, **_: waits.append(timeout.total_seconds()),
    )
    monkeypatch.setattr(loading, "UNBALANCED_MODEL_LOADING_TIMEOUT_S", 480)  # put back afterwards
    workers.own_start(3600.0)
    loading.dist_barrier_after_load(elastic_ep_backend=None, tp_rank=0)
    assert waits == [3600.0]


def test_the_watchdog_waits_for_no_batch_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place the batch stays, and is computed on only after the pause, which may be
    longer than the watchdog's limit.
    """
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.invariant_checker import create_scheduler_watchdog

    for name in ("pause_generation", "record_weight_version_change"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    workers.own_labels()
    scheduler: Any = SimpleNamespace(
        is_initializing=False, cur_batch_for_debug=object(), forward_ct=1, _pause_started_at=None
    )
    watchdog = create_scheduler_watchdog(scheduler, 3600.0)
    assert watchdog.is_active()
    Scheduler.pause_generation(scheduler, PauseGenerationReqInput(mode="in_place"))
    assert scheduler._engine_paused
    assert not watchdog.is_active()


def test_scouts_loader_does_not_warn_of_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning would name all parameters that are not in it.
    Errors are still logged.
    """
    from megarl.core.base import ranks

    name = "sglang.srt.models.mllama4"
    seen = []
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "srt" / "models" / "mllama4.py"
    assert "logger = logging.getLogger(__name__)\n" in source.read_text()
    scheduler: Any = ModuleType("scheduler")  # theirs takes seconds to import
    scheduler.run_scheduler_process = lambda: seen.append(
        logging.getLogger(name).getEffectiveLevel()
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", scheduler)
    monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    for owner, change in (
        (workers, "own_buffers"),
        (workers, "own_start"),
        (workers, "own_staging"),
        (workers, "own_labels"),
        (workers, "own_pauses"),
        (workers, "own_checksums"),
        (workers, "own_routing"),
        (workers, "without_megatron"),
        (ranks, "bind_all"),
    ):
        monkeypatch.setattr(owner, change, lambda *_: None)
    workers.scheduler(1.0, 2.0, 0, fp8=False, copies=1)
    assert seen == [logging.ERROR]


@pytest.mark.parametrize(("experts", "dtype"), [(255, torch.uint8), (256, torch.int16)])
def test_a_retracted_request_keeps_the_experts_of_the_tokens_it_has(
    monkeypatch: pytest.MonkeyPatch, experts: int, dtype: torch.dtype
) -> None:
    """It is retracted twice, and again before it has another token. Places in the cache
    are freed and given out anew.
    """
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.state_capturer import base, routed_experts

    places = torch.zeros(1, 16, dtype=torch.int64)  # of the only request's tokens
    chosen = torch.full((100, 2, 1), -1, dtype=torch.int32)  # by place
    capturer = SimpleNamespace(host_cache=SimpleNamespace(buffer=chosen))
    capturer.get_topk = lambda *a, **k: base.BaseTopkCapturer.get_topk(capturer, *a, **k)
    for module in (routed_experts, batch_result_processor):
        monkeypatch.setattr(module, "get_global_experts_capturer", lambda: capturer)
    processor = batch_result_processor.SchedulerBatchResultProcessor
    monkeypatch.setattr(
        processor, "_maybe_collect_routed_experts", processor._maybe_collect_routed_experts
    )
    monkeypatch.setattr(schedule_batch, "release_req", lambda **_: bool(places.fill_(99).any()))
    workers.own_routing(experts)
    request = SimpleNamespace(
        return_routed_experts=True,
        routed_experts_start_len=2,
        routed_experts=None,
        origin_input_ids=[7] * 4,
        output_ids=[],
        output_ids_through_stop=[],
        kv=SimpleNamespace(req_pool_idx=0),
        rid="",
        seqlen=0,
        cached_tokens=0,
    )
    pool = SimpleNamespace(req_to_token=places)

    def compute(tokens: int, first_place: int, experts: int) -> None:
        """Compute the input and `tokens` in all, from scratch; token i chooses
        `experts` + i.
        """
        for i in range(4 + tokens - 1):
            places[0, i] = first_place + i
            chosen[first_place + i] = experts + i
        request.output_ids = request.output_ids_through_stop = [5] * tokens

    def retract() -> None:
        more = dict.fromkeys(("token_to_kv_pool_allocator", "tree_cache", "hisparse_coordinator"))
        schedule_batch.retract_all(reqs=[request], req_to_token_pool=pool, **more)

    retract()  # before it had a token
    compute(3, 10, 10)
    retract()
    retract()
    compute(5, 30, 40)
    retract()
    compute(6, 50, 70)
    processor._maybe_collect_routed_experts(SimpleNamespace(req_to_token_pool=pool), request)
    assert request.routed_experts.dtype == dtype
    first = [12, 13, 14, 15]
    second = [46, 47]
    third = [78]  # from the third token of the input on
    assert request.routed_experts[:, 0, 0].tolist() == first + second + third
    assert torch.equal(request.routed_experts[:, 0], request.routed_experts[:, 1])


@pytest.mark.usefixtures("one_rank")
def test_the_groups_of_a_lost_learner_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that is killed has told nobody. Its successor has a group for each of
    two stages, which stay.
    """
    closed: list[str] = []

    class Group:
        def __init__(self, name: str, *_: object) -> None:
            self.name = name

        def close(self, broken: str = "") -> None:
            closed.append(f"{self.name}: {broken}")

    class Manager:
        update_weights_from_distributed: Any = None

    class Updater:
        destroy_weights_update_group: Any = None

    served = "sglang.srt.managers.scheduler_components.weight_updater"
    for module, names in (
        (
            "sglang.srt.managers.io_struct",
            {"UpdateWeightsFromDistributedReqOutput": SimpleNamespace},
        ),
        (served, {"SchedulerWeightUpdaterManager": Manager}),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            {"WeightUpdater": Updater},
        ),
        ("sglang.srt.runtime_context", {"get_serving": None}),
    ):
        stand_in = ModuleType(module)  # theirs take seconds to import
        vars(stand_in).update(names)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(broadcast, "BroadcastGroup", Group)
    workers.own_staging(1.0)
    groups: dict[str, Group] = {}
    updater = SimpleNamespace(_model_update_group=groups, get_model=lambda: None, tp_rank=0)
    runner = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=updater))
    manager = SimpleNamespace(tp_worker=runner, tp_cpu_group=None)

    def join(name: str) -> None:
        rest = f'"name":"{name}","master":"127.0.0.1","port":1,"first":1,"world":2,"backend":"gloo"'
        request = SimpleNamespace(load_format=JOIN, names=[f"{{{rest}}}"])
        while (
            said := Manager.update_weights_from_distributed(manager, request)
        ).message == RUNNING:
            time.sleep(0.01)
        assert said.success

    for name in ("weights-a-1", "weights-a-2"):
        join(name)
    assert set(groups) == {"weights-a-1", "weights-a-2"}
    for name in ("weights-b-3", "weights-b-4"):
        join(name)
    assert set(groups) == {"weights-b-3", "weights-b-4"}
    while len(closed) < 2:  # in threads
        time.sleep(0.01)
    assert sorted(closed) == [
        "weights-a-1: its learner is gone",
        "weights-a-2: its learner is gone",
    ]
