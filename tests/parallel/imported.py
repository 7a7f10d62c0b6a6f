"""What a learner, a warm start and the worlds of these tests import, for a process that
forks them.
"""

import importlib
import os

from megarl.core.base.process import importing

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
}  # before torch; a warm start would take all cores
with importing():
    for module in (
        "megarl.core.learner.main",
        "megarl.tools.monitoring.metrics",
        "megarl.tools.sft",
        "tests.parallel.learner_world",
        "tests.stack.publish_world",
        "torch._dynamo",  # which an optimiser imports when it is made
    ):
        importlib.import_module(module)
