"""What a server imports, for a process that forks servers: it costs each of them ten
seconds of a core otherwise.
"""

import importlib
import os

from megarl.core.base.process import importing

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
with importing():
    from megarl.core import recipe as recipes
    from megarl.core.engine import launch, workers
    from megarl.shims import sglang_cpu

    os.environ |= launch.environment(
        recipes.from_tree({"model": {"path": "any"}}), 0, [0], cuda=False
    )
    sglang_cpu.install()
    workers.without_megatron()
    for module in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.registry",
        "tests.pessimistic_nccl",  # a backend that a test's learner may ask for
    ):
        importlib.import_module(module)
