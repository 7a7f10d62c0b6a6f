"""What a server imports, for a process that forks servers: it costs each of them twelve seconds of a core otherwise."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

from megarl.core import recipe as recipes
from megarl.core.server import launch
from megarl.shims import sglang_cpu

os.environ |= launch.environment(recipes.from_tree({"model": {"path": "any"}}), 0, [0], cuda=False)
sglang_cpu.install()

# isort: split
import sglang.srt.entrypoints.http_server  # noqa: E402, F401

from tests import pessimistic_nccl  # noqa: E402, F401  a backend that a test's learner may ask for

gc.freeze()  # nobody looks through it again, and no page of it is copied for that
