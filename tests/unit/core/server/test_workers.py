"""What SGLang makes in /dev/shm can be told from what others make there."""

import os
from pathlib import Path

import pytest

from megarl.core.base.process import shared_memory_mark
from megarl.core.server import workers


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
