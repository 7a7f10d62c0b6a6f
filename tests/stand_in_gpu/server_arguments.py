"""What SGLang makes of the arguments of each shipped recipe, and of servers on several
nodes, on a Hopper and on a Blackwell GPU that a stand-in plays.

`python -m tests.stand_in_gpu.server_arguments` prints by recipe and compute capability,
as JSON, what we asked for and what SGLang has resolved. The packages that only a GPU
machine has are stood in for by modules without content.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests import stand_in_gpu

ABSENT = ("sgl_kernel", "flashinfer", "pynvml")
MODELS = {
    "qwen3-8b": "qwen3-8b",
    "qwen3-30b": "qwen3-30b-a3b",
    "scalerl-17b": "llama-4-scout",
    "scalerl-1gpu": "qwen3-1.7b",
}
"""By the beginning of a recipe's name; others have Llama 3.1 8B."""

SPANNING = {"deepseek-v3": 32, "kimi-k2": 32, "glm-4.5": 16}
"""GPUs of a server, on nodes of 8."""


ALSO = ("attention_backend", "fp8_gemm_runner_backend", "quantization")
"""What SGLang chooses itself, mostly."""

DELTA = ("qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")
"""Models with gated delta networks."""

IN_FP8 = ("qwen3-8b", "qwen3-30b-a3b")
"""Models of servers in FP8."""


WITH_COPIES = ("deepseek-v3", "glm-4.5")
"""Models of servers with a copy of the attention on each GPU."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> MagicMock:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        vars(module).update(__path__=[], __version__="99", __getattr__=attribute)


def resolved(major: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield a recipe's name, what `megarl serve` asks of SGLang, and what that makes of
    it.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common

    from megarl.core import recipe as recipes
    from megarl.core.base.architecture import CONFIGS
    from megarl.core.base.rundir import Meeting
    from megarl.core.engine.launch import engine_arguments, node_arguments, precision_arguments
    from megarl.core.recipe import Recipe

    gpu = SimpleNamespace(
        major=major,
        minor=0,
        multi_processor_count=132,
        name="stand-in",
        uuid="stand-in",
        total_memory=80 << 30,
    )
    torch.cuda.get_device_capability = lambda *_: (major, 0)
    torch.cuda.get_device_properties = lambda *_: gpu
    torch.cuda.mem_get_info = lambda *_: (gpu.total_memory, gpu.total_memory)
    for function in vars(common).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()

    def asked_and_made(recipe: Recipe, nodes: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
        asked = engine_arguments(recipe, 0, "127.0.0.1", 1, cuda=True) | precision_arguments(
            recipe, major
        )
        asked |= node_arguments(Meeting(nodes, 2), "127.0.0.1", nodes - 1)
        arguments = ServerArgs(**asked)
        arguments.resolve_once()
        return asked, arguments.resolved_dict()

    with tempfile.TemporaryDirectory() as folder:

        def model(config: str) -> str:
            """Return a directory of its own: SGLang reads each but once."""
            path = Path(folder) / config
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text((CONFIGS / f"{config}.json").read_text())
            return f"model.path={path}"

        for name in recipes.shipped():
            if "tiny" in name or "quickstart" in name:
                continue
            config = next(
                (config for start, config in MODELS.items() if name.startswith(start)),
                "llama-3.1-8b",
            )
            yield name, *asked_and_made(recipes.load(name, [model(config)]))
        for config in IN_FP8:
            keys = ["serving.quantization=fp8", "serving.kv_cache_dtype=fp8_e4m3"]
            yield (
                f"{config}-fp8",
                *asked_and_made(recipes.load("scalerl-8b", [model(config), *keys])),
            )
        for config in DELTA:
            yield config, *asked_and_made(recipes.load("scalerl-8b", [model(config)]))
        for config in WITH_COPIES:
            keys = ["resources.server_tensor_parallel=8", "serving.attention_copies=8"]
            recipe = recipes.load(
                "scalerl-8b", [model(config), *keys, "serving.expert_parallel=true"]
            )
            yield f"{config}-copies", *asked_and_made(recipe)
        for name, ranks in SPANNING.items():
            wide = [model(name), f"resources.server_tensor_parallel={ranks}"]
            yield name, *asked_and_made(recipes.load("scalerl-8b", wide), ranks // 8)


def main() -> None:
    stand_in_gpu.install()
    sys.meta_path.append(Absent())
    torch.version.cuda = "13.0"
    found = {}
    for major in (9, 10):
        for name, asked, made in resolved(major):
            found[f"{name} sm{major}0"] = asked, {key: made[key] for key in (*asked, *ALSO)}
    print(json.dumps({"found": found, "nccl": nccl()}))


def nccl() -> dict[str, str]:
    """Return NCCL's variables after SGLang has set its own."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import ServerArgs

    engine.assert_pkg_version = lambda *_: None
    engine._set_envs_and_config(ServerArgs(model_path="none"))
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


if __name__ == "__main__":
    main()
