"""What SGLang itself makes of every shipped recipe's arguments, and of servers on
several nodes, on GPUs that are not here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe
from megarl.run.launcher import ALIKE, task
from megarl.run.nodes import this_node
from megarl.run.placement import Place
from megarl.run.restart import Role, RoleKind
from tests import stand_in_gpu

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[4]
BACKENDS = {"sm90": "fa3", "sm100": "trtllm_mha"}
LATENT = {"sm90": "fa3", "sm100": "trtllm_mla"}


def resolved(folder: Path, **variables: str) -> dict[str, Any]:
    environment = stand_in_gpu.environment(folder) | {"PYTHONPATH": str(ROOT)} | variables
    words = [sys.executable, "-W", "ignore", "-m", "tests.stand_in_gpu.server_arguments"]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_sglang_keeps_what_it_is_told(tmp_path: Path, recipe: Recipe) -> None:
    """And all that megarl leaves to it becomes what the GPU can do; NCCL's variables
    stay as the launcher sets them.
    """
    place = Place((this_node(0, ""),), ("0",))
    kinds: tuple[RoleKind, ...] = ("learner", "server")
    learner, server = (
        task(recipe, RunDir(tmp_path), Role(kind), 1, place).environment for kind in kinds
    )
    assert {name: learner[name] for name in ALIKE} == {name: server[name] for name in ALIKE}
    said = resolved(tmp_path, **{name: str(server[name]) for name in ALIKE})
    assert {name: said["nccl"][name] for name in ALIKE} == {name: learner[name] for name in ALIKE}
    assert len(said["found"]) >= 2 * 10
    assert said["found"]["deepseek-v3 sm90"][1]["nnodes"] == 4
    assert said["found"]["glm-4.5-copies sm100"][1]["attn_dp_size"] == 8
    for name, (asked, made) in said["found"].items():
        assert {key: made[key] for key in asked} == asked, name
        config, capability = name.split()
        backends = LATENT if config.startswith(("deepseek-v3", "kimi-k2")) else BACKENDS
        assert made["attention_backend"] == backends[capability], name
        in_fp8 = config.endswith("-fp8")
        assert made["quantization"] in ((None, "fp8") if in_fp8 else (None,)), (
            name
        )  # or SGLang reads it as it loads
        products = "triton" if in_fp8 and capability == "sm100" else "auto"
        assert made["fp8_gemm_runner_backend"] == products, name
        # By itself it takes flashinfer_trtllm on sm100, which tells nobody the experts
        # that it chose.
        assert made["moe_runner_backend"] == (
            "triton" if made["enable_return_routed_experts"] else "auto"
        ), name
