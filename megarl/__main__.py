"""`python -m megarl`, which is how the supervisor starts the roles."""

import sys

from megarl.cli import main

sys.exit(main())
