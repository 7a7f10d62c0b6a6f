"""What a server answers in SGLang's place, and how much of a shared GPU it takes."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.engine.launch import free_and_total, static_fraction
from megarl.core.engine.proxy import OwnReplies

PLACE = DeviceIdentity("this", ("GPU-0",))


class Sglang:
    """Counts what comes through; answers with `status`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append(scope["path"].split("_")[0][1:])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})


def asked(app: OwnReplies, method: str, path: str) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(app({"type": "http", "method": method, "path": path}, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_it_says_where_it_is() -> None:
    status, body = asked(OwnReplies(Sglang(), PLACE), "GET", "/device_identity")
    assert (status, msgspec.json.decode(body, type=DeviceIdentity)) == (200, PLACE)


def test_memory_is_released_and_resumed_once_however_often_it_is_said() -> None:
    sglang = Sglang()
    app = OwnReplies(sglang, PLACE)
    for call in ("resume", "release", "release", "resume", "resume", "release"):
        assert asked(app, "POST", f"/{call}_memory_occupation")[0] == 200
    assert sglang.calls == ["release", "resume", "release"]


def test_a_call_that_failed_changes_nothing() -> None:
    sglang = Sglang()
    app = OwnReplies(sglang, PLACE)
    sglang.status = 400
    assert asked(app, "POST", "/release_memory_occupation")[0] == 400
    sglang.status = 200
    assert asked(app, "POST", "/release_memory_occupation")[0] == 200
    assert asked(app, "POST", "/generate")[0] == 200
    assert sglang.calls == ["release", "release", "generate"]


def test_a_paused_server_is_healthy() -> None:
    sglang = Sglang()
    app = OwnReplies(sglang, PLACE)
    for path in ("/health", "/pause_generation", "/health", "/continue_generation", "/health"):
        assert asked(app, "GET", path)[0] == 200
    assert sglang.calls == ["health", "pause", "continue", "health"]


def test_the_share_is_of_the_whole_gpu_whoever_has_taken_a_part_of_it() -> None:
    """SGLang leaves free: what was free, times 1 - fraction. So it ends with share x
    total of its own.
    """
    for free in (80_000, 40_000, 25_000):
        fraction = static_fraction(0.25, [(80_000, 80_000), (free, 80_000)])
        assert free - free * (1 - fraction) == pytest.approx(0.25 * 80_000)
    with pytest.raises(
        MegarlError,
        match=r"memory_fraction: 0.25 of the GPU are 19.5 GiB, and only 14.6 of 78.1 GiB",
    ):
        static_fraction(0.25, [(15_000, 80_000)])


def test_nvidia_smi_is_asked_about_the_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "24000, 24564"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert free_and_total() == [(24000, 24564)]
    assert "--id=3" in (tmp_path / "asked").read_text()
    smi.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(MegarlError, match=r"serving.memory_fraction: nvidia-smi does not say"):
        free_and_total()
