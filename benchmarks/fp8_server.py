"""`python -m benchmarks.fp8_server serve …`: runs megarl with a server whose linear layers SGLang
quantises to FP8 as it loads them.

SGLang calls this quantization=fp8. It is only measured against bf16: a learner cannot publish to
such a server, whose weights are not those that it sends, so the recipe has no key for it.
"""

import sys

from megarl.cli import main
from megarl.core.server import launch

if __name__ == "__main__":
    arguments = launch.engine_arguments
    launch.engine_arguments = lambda *given: arguments(*given) | {"quantization": "fp8"}
    sys.exit(main())
