"""`python -m benchmarks.no_overlap serve …`: megarl whose server ends one step before it prepares the next.

SGLang calls it disable_overlap_schedule. It is what overlap is measured against, so no recipe has a key for it.
"""

import sys

from megarl.cli import main
from megarl.core.server import launch

if __name__ == "__main__":
    arguments = launch.engine_arguments
    launch.engine_arguments = lambda *given: arguments(*given) | {"disable_overlap_schedule": True}
    sys.exit(main())
