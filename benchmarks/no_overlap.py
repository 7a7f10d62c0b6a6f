"""`python -m benchmarks.no_overlap serve …`: runs megarl with a server that ends one
step before it prepares the next.

SGLang calls this disable_overlap_schedule. It is only the reference for measuring
overlap, so the recipe has no key for it.
"""

import sys

from megarl.cli import main
from megarl.core.engine import launch

if __name__ == "__main__":
    arguments = launch.engine_arguments
    launch.engine_arguments = lambda *given: arguments(*given) | {"disable_overlap_schedule": True}
    sys.exit(main())
