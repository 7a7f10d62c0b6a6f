"""The grader `math`: whether an answer in prose or LaTeX equals the expected one."""

import re

from megarl.core.base.contracts import last_box
from megarl.tasks.graders.math.compare import equal
from megarl.tasks.graders.math.reader import read
from megarl.tasks.graders.math.tokens import CannotRead
