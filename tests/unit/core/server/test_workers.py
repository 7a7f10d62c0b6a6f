"""What SGLang's processes do in another way than SGLang."""

import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megarl.core.base.checksum import checksum, written
from megarl.core.base.process import shared_memory_mark
from megarl.core.server import workers

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


def test_a_server_answers_with_our_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through SGLang's own WeightChecker, for parameters and buffers."""
    from sglang.srt.utils import weight_checker

    monkeypatch.setattr(weight_checker, "_hash_tensor", weight_checker._hash_tensor)
    workers.own_checksums()
    model = torch.nn.BatchNorm1d(5)
    checker = weight_checker.WeightChecker.__new__(weight_checker.WeightChecker)
    checker._get_model, checker._placement = lambda: model, dict.fromkeys(PLACEMENT, 0)
    said = checker.handle("checksum", role="target")["checksums"]
    assert said == {name: written(int(checksum(tensor))) for name, tensor in model.state_dict().items()}


def test_scouts_loader_does_not_warn_of_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning would name all parameters that are not in it. Errors are still logged."""
    from megarl.core.base import ranks

    name, seen = "sglang.srt.models.mllama4", []
    source = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "models" / "mllama4.py"
    assert "logger = logging.getLogger(__name__)\n" in source.read_text()
    scheduler = ModuleType("scheduler")  # theirs takes seconds to import
    scheduler.run_scheduler_process = lambda: seen.append(logging.getLogger(name).getEffectiveLevel())
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", scheduler)
    monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    for owner, change in (
        (workers, "own_buffers"),
        (workers, "own_staging"),
        (workers, "own_labels"),
        (ranks, "bind_all"),
    ):
        monkeypatch.setattr(owner, change, lambda *_: None)
    workers.scheduler(1.0)
    assert seen == [logging.ERROR]
