"""A step of every family as a GPU would take it, its buckets and checkpoints: no
operation mixes devices, and the result is a CPU's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import stand_in_gpu
from tests.processes import LEARNERS
from tests.stand_in_gpu import steps
from tests.stand_in_gpu.steps import CASES, MODELS, VOCABULARY
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[4]
MIXED = """
import torch
from tests import stand_in_gpu
stand_in_gpu.install()
with stand_in_gpu.on_stand_in_gpu():
    here, there = torch.ones(3), torch.ones(3, device="cuda", requires_grad=True)
    loss = (there * 2).sum()
    loss.backward()
    assert there.grad.device.type == "cuda" and there.grad.cpu().tolist() == [2, 2, 2]
    assert (there * torch.tensor(2.0)).device.type == "cuda"  # a scalar of the CPU may meet it
    assert there.detach()[torch.tensor([0, 1])].cpu().tolist() == [1, 1]  # and so may indices
    for mixed in (lambda: there * here, lambda: torch.cat([here, there]), lambda: here.index_select(0, there.long())):
        try:
            mixed()
        except stand_in_gpu.DevicesMixed:
            continue
        raise SystemExit("devices were mixed")
"""


def python(*words: str, env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """By case, on the stand-in and on a CPU."""
    folder = tmp_path_factory.mktemp("stand_in")
    for name, tiny in MODELS.items():
        tiny(folder / name, torch.bfloat16, vocab_size=VOCABULARY)
    files = folder / "gpu.json", folder / "cpu.json"
    words = ["-m", "tests.stand_in_gpu.steps", "gpu", str(folder), str(files[0])]
    python(*words, env=stand_in_gpu.environment(folder))
    status, said = LEARNERS.run(steps.main, ["cpu", folder, files[1]], ROOT, os.environ, 500)
    assert status == 0, said
    gpu, cpu = (json.loads(file.read_text()) for file in files)
    return gpu, cpu


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_cpus(measured: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    gpu, cpu = (found[case] for found in measured)
    assert (gpu["devices"], cpu["devices"]) == (["cuda"], ["cpu"])
    assert gpu["experts on"] == (["cpu"] if "replay" in case else [])
    exact = case.endswith("fp32")
    for mine, theirs in zip(gpu["steps"], cpu["steps"], strict=True):
        assert mine == pytest.approx(
            theirs, rel=1e-5 if exact else 0.05, abs=1e-5 if exact else 0.01
        )
    assert gpu["published"] == cpu["published"]
    # In bf16 a rounding may turn a choice of experts; those of fp32 are the ones that
    # would show a fault.
    rounded = 0.3 if "moe" in case or "oss" in case else 0.1
    assert gpu["logprobs"] == pytest.approx(cpu["logprobs"], abs=1e-4 if exact else rounded)


def test_a_fused_adamw_is_stored_before_its_first_step_and_resumed(tmp_path: Path) -> None:
    """Also where a part of it is in the host's memory. Resumed runs take the steps of
    the one that went on.
    """
    tiny_llama(tmp_path / "llama", torch.bfloat16, vocab_size=VOCABULARY, num_hidden_layers=2)
    file = tmp_path / "found.json"
    words = ["-m", "tests.stand_in_gpu.fused_adam", str(tmp_path), str(file)]
    python(*words, env=stand_in_gpu.environment(tmp_path))
    whole, divided = json.loads(file.read_text()).values()
    assert (whole["classes"], divided["classes"]) == (["FusedAdam"], ["AdamW", "FusedAdam"])
    for found in (whole, divided):
        for stored in range(2):
            assert found[f"resumed after {stored}"] == found["rows"][stored:]
            assert found[f"counted after {stored}"] == [3]


def test_devices_that_are_mixed_are_found(tmp_path: Path) -> None:
    python("-c", MIXED, env=stand_in_gpu.environment(tmp_path))
